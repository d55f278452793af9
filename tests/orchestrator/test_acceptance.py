"""What `ls` says a drafter is worth: what decoding measured, never what a training batch guessed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from orchestrator.store.acceptance import decoded_acceptance
from orchestrator.store.rows import State
from orchestrator.store.writes import Store
from orchestrator.verbs import listing
from tests.orchestrator.runs import batch, event, started, steps
from tests.orchestrator.yard import Yard


def _decoded(seq: int, length: Any, **protocol: Any) -> Any:
    way = {"method": "chain", "drafter": "trained", **protocol}
    return event(seq, "evaluation", step=20, protocol=way, values={"acceptance_length": length, "speed_up": 1.2})


@pytest.fixture
def store(yard: Yard) -> Store:
    """Runs: `best` evaluated twice, `later` by a job of its own, `never` not at all, `own` by a script."""
    store = Store(yard.root / "runs.db")
    for run_id in ("best", "later", "never", "own"):
        started(store, run_id)
        store.ingest(batch(steps(1, 20, loss=1.0, acceptance_length=1.25), run_id=run_id))
    others = [_decoded(30, 3.5, method="tree", budget=16), _decoded(31, 1.0, drafter="untrained")]
    offline = event(32, "evaluation", step=20, protocol={"method": "offline"}, values={"chain_tau": 9.0})
    strange = [_decoded(33, "many"), event(34, "evaluation", step=20, protocol="x", values=[1])]
    store.ingest(batch([_decoded(28, 1.41), _decoded(29, 1.63), *others, offline, *strange], run_id="best"))
    started(store, "job1", kind="evaluate", parent_run="later")
    store.ingest(batch([_decoded(1, 1.52)], run_id="job1"))
    told = event(28, "evaluation", step=20, protocol={"prompts": 8}, values={"acceptance_length": 1.1})
    store.ingest(batch([told], run_id="own"))
    for run_id in ("best", "later", "never", "own", "job1"):
        store.set_state(run_id, State.SUCCEEDED, evidence="its exit file")
    return store


def test_the_newest_chain_of_the_trained_drafter_counts_its_own_or_a_later_jobs(store: Store) -> None:
    assert decoded_acceptance(store.reader, ["best", "later", "never", "own"]) == {
        "best": 1.63,
        "later": 1.52,
        "own": 1.1,
    }
    assert decoded_acceptance(store.reader, []) == {}


def test_a_list_shows_what_was_decoded_and_a_dash_where_nothing_was(store: Store, yard: Yard) -> None:
    assert yard.run("ls") == 0
    shown = {line.split()[0]: line for line in yard.out.splitlines()}

    assert re.search(r" 1\.63\b", shown["best"])
    assert re.search(r" 1\.52\b", shown["later"])
    assert "1.25" not in yard.out
    assert re.search(r"\s1\s+-\s", shown["never"])
    listed = {run["id"]: run["acceptance"] for run in yard.json("ls")["runs"]}
    assert listed == {"best": 1.63, "later": 1.52, "own": 1.1, "never": None}


def test_a_list_sorts_by_what_it_shows(store: Store, yard: Yard) -> None:
    def order(word: str, *more: str) -> list[str]:
        return [run["id"] for run in yard.json("ls", "--sort", word, *more)["runs"]]

    assert order("accept") == ["best", "later", "own", "never"]
    assert order("-accept") == ["own", "later", "best", "never"]
    assert order("accept", "-n", "1") == ["best"]


def test_a_comparison_begins_with_what_the_drafters_are_worth(store: Store, yard: Yard) -> None:
    assert yard.run("compare", "best", "later") == 0
    shown = re.sub(r" +", " ", yard.out)

    assert "way best later\nchain 1.63 1.52\ntree of 16 3.50 -" in shown
    assert shown.index("\nway ") < shown.index("mean of the last 100")
    assert yard.json("compare", "best", "later")["decoded"][1]["chain"]["mean"] == 1.52


def test_what_was_measured_otherwise_is_marked_and_said(store: Store, yard: Yard) -> None:
    assert yard.run("compare", "best", "own") == 0

    assert "1.10*" in yard.out
    assert "* measured with another method, prompts: not to be compared" in yard.out


def test_runs_stay_comparable_where_only_one_was_measured_beside_its_untrained_drafter(
    store: Store, yard: Yard
) -> None:
    """How the untrained one was measured says nothing of the length that stands there."""
    store.ingest(batch([_decoded(40, 1.7, untrained_rounds="replayed along the plain text")], run_id="best"))

    assert yard.run("compare", "best", "later") == 0

    assert "1.70" in yard.out
    assert "1.52 " in yard.out.replace("\n", " ")
    assert "*" not in yard.out


def test_of_an_interval_both_ends_are_shown(store: Store, yard: Yard) -> None:
    ends = {"acceptance_length": 2.0, "acceptance_length_low": 1.75, "acceptance_length_high": 2.25}
    told = event(40, "evaluation", step=20, protocol={"method": "chain", "drafter": "trained"}, values=ends)
    store.ingest(batch([told], run_id="best"))

    assert yard.run("compare", "best", "later") == 0

    assert "2.00 [1.75, 2.25]" in yard.out


# ------------------------------------------------------------------------------------------ columns


def test_a_list_has_the_columns_that_were_named_in_their_order(store: Store, yard: Yard) -> None:
    assert yard.run("ls", "--columns", "acceptance_length,run,attempt") == 0

    heading, *rows = [line.split() for line in yard.out.splitlines()]
    assert heading == ["acceptance_length", "run", "attempt"]
    assert ["1.25", "best", "1"] in rows


def test_every_column_can_be_shown_and_a_metric_is_in_the_document_too(store: Store, yard: Yard) -> None:
    assert yard.run("ls", "--columns", ",".join(listing.COLUMNS)) == 0
    assert yard.out.splitlines()[0].split() == list(listing.COLUMNS)
    runs = yard.json("ls", "--columns", "run,acceptance_length")["runs"]
    assert {run["metrics"].get("acceptance_length") for run in runs} == {1.25}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "told"),
    [("run,acept", "did you mean 'accept'"), (" , ", "--columns is empty"), ("lss", "did you mean 'loss'")],
)
def test_an_unknown_column_is_named_with_the_nearest(store: Store, yard: Yard, typed: str, told: str) -> None:
    assert yard.run("ls", "--columns", typed) == 2
    assert told in yard.err
