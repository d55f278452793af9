"""What a page says to type next, and how a job that is no training calls itself."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click
import pytest

from orchestrator.actions import history
from orchestrator.actions.history import RunPage
from orchestrator.actions.places import Places, find_places
from orchestrator.actions.telling import beginning
from orchestrator.recipe import load_recipe
from orchestrator.store.rows import Document, FailureRow, Kind, State
from orchestrator.store.writes import Store
from orchestrator.verbs.history import ls
from orchestrator.verbs.leads import in_short, next_steps
from orchestrator.verbs.page import run_page
from remote.spec import dump
from tests.orchestrator.runs import batch, event, new_run, steps

CHECKPOINT = event(90, "checkpoint", step=97, path="checkpoints/step-00000097", size_bytes=4, is_best=True)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return find_places(tmp_path, {"HOME": str(tmp_path)}, db=tmp_path / "runs.db")


def _ended(
    places: Places, kind: str = "train", state: State = State.STOPPED, *, told: Any = (), **more: Any
) -> RunPage:
    """A job of the bundled recipe that has ended so."""
    spec = load_recipe("smollm2").resolve("ce").spec
    documents = {Document.SPEC: dump(spec), **more.pop("documents", {})}
    with Store(places.db) as store:
        store.create_run(
            new_run("kleadsaa", kind=kind, branch="ce", documents=documents, why="Plain cross-entropy.", **more)
        )
        store.describe_run("kleadsaa", workdir="/data/draftyard", tree_hash="ab" * 32, fingerprint="f" * 16)
        store.new_attempt("kleadsaa")
        store.ingest(batch(told, run_id="kleadsaa"))
        store.set_state("kleadsaa", state, evidence="as it was asked to")
    return history.show(places, "kleadsaa")


def _failed(page: RunPage, message: str) -> RunPage:
    failure = FailureRow(
        run_id=page.run.id, attempt=1, kind="exception", message=message, hint="", source="rank0", stage=None, step=None,
        traceback="", facts={}, at_s=1.0, is_first_cause=True,
    )  # fmt: skip
    return dataclasses.replace(page, failures=[failure])


def _text(page: RunPage, width: int = 80) -> str:
    return click.unstyle("\n".join(run_page(page, width=width, now_s=2000.0)))


@pytest.mark.parametrize(
    ("told", "entry", "words"),
    [
        ([CHECKPOINT], "dflash", "own tokens; not decoded yet: draftyard evaluate kleadsaa"),
        ([], "dflash", "own tokens; nothing is decoded yet"),
        ([CHECKPOINT], "script", "own tokens; nothing is decoded yet"),
    ],
)
def test_what_is_not_decoded_is_not_pointed_at(places: Places, told: list[Any], entry: str, words: str) -> None:
    page = _ended(places, told=[*steps(1, 3, acceptance_length=1.7), *told])
    page = dataclasses.replace(page, spec={**page.spec, "entry": entry})

    text = " ".join(_text(page).split())

    assert words in text
    assert "decoded is below" not in text


@pytest.mark.parametrize("state", [State.STOPPED, State.FAILED, State.LOST, State.SUCCEEDED])
def test_whatever_left_a_checkpoint_leads_to_what_can_be_done_with_it(places: Places, state: State) -> None:
    offered = "\n".join(next_steps(_ended(places, state=state, told=[CHECKPOINT])))

    for verb in ("evaluate", "export", "pull"):
        assert f"  draftyard {verb} kleadsaa" in offered


def test_a_value_that_failed_is_named_by_what_is_to_be_typed_next(places: Places) -> None:
    """The very command that failed, once more, would fail once more."""
    message = "target.source is /models/X: no Hugging Face folder there (it would hold a config.json)"
    page = _failed(_ended(places, "prepare", State.FAILED), message)

    offered = next_steps(page)

    assert offered[-1] == (
        "  draftyard prepare smollm2 -b ce --host local --set target.source=VALUE"
        "    # anew, with another value: with this one it fails again"
    )


def test_what_fails_for_no_value_is_offered_as_it_was(places: Places) -> None:
    page = _failed(_ended(places, "prepare", State.FAILED), "x.y is 3: no")

    offered = next_steps(page)

    assert offered[-1].endswith("--host local    # anew; --set KEY=VALUE changes a value")


def test_prepared_data_lead_to_the_rungs_the_launch_and_the_answers(places: Places) -> None:
    offered = "\n".join(next_steps(_ended(places, "prepare", State.SUCCEEDED)))

    assert "  draftyard smoke smollm2 -b ce --host local" in offered
    assert "  draftyard launch smollm2 -b ce --host local" in offered
    assert "  draftyard pull kleadsaa --artifacts    # the answers" in offered


def test_a_training_that_succeeded_leads_to_the_next_experiment(places: Places) -> None:
    offered = "\n".join(next_steps(_ended(places, state=State.SUCCEEDED)))

    assert "  draftyard recipe show smollm2    # names its branches" in offered
    assert "  draftyard launch smollm2 -b BRANCH --host local    # the next experiment" in offered


@pytest.mark.parametrize("kind", ["evaluate", "export"])
def test_a_job_about_another_run_that_did_not_succeed_leads_to_itself_once_more(places: Places, kind: str) -> None:
    offered = next_steps(_ended(places, kind, parent_run="kparentt"))

    assert f"  draftyard {kind} kparentt    # anew" in offered


@pytest.mark.parametrize(("kind", "is_told"), [("train", True), ("smoke", True), ("export", False), ("prepare", False)])
def test_a_job_that_trains_nothing_does_not_carry_what_the_branch_is_for(
    places: Places, kind: str, is_told: bool
) -> None:
    assert ("Plain cross-entropy." in _text(_ended(places, kind))) is is_told


def test_a_job_about_a_checkpoint_says_of_which_step(places: Places) -> None:
    launch = json.dumps({"checkpoint_step": 97})

    text = _text(_ended(places, "export", parent_run="kparentt", documents={Document.LAUNCH: launch}))

    assert "export of run kparentt, step 97" in text
    assert "checkpoint step" not in text


def test_a_live_run_is_not_explained_by_its_having_begun(places: Places) -> None:
    with Store(places.db) as store:
        store.create_run(new_run("kliveaaa"))
        store.new_attempt("kliveaaa")
        store.ingest(batch(steps(1, 3), run_id="kliveaaa"))

    assert "because" not in _text(history.show(places, "kliveaaa"))


def test_a_best_checkpoint_says_by_what(places: Places) -> None:
    assert "best: most tokens accepted since the one before" in _text(_ended(places, told=[CHECKPOINT]))


def test_the_newest_value_of_what_is_set_stands_for_it(places: Places) -> None:
    """A mean of a learning rate is no rate that ever was."""
    told = [event(step, "metrics", step=step, values={"lr": step / 1000}) for step in range(1, 5)]
    page = _ended(places, told=told)

    listed = history.with_metrics(places, [page.run], ["lr"])
    sorted_by = [history.list_runs(places, f"lr{sign}0.003") for sign in "><"]

    assert [row.recent_mean for row in page.series if row.name == "lr"] == [0.004]
    assert listed[0].metrics == {"lr": 0.004}
    assert [len(runs) for runs in sorted_by] == [1, 0]
    (line,) = [line for line in _text(page).splitlines() if line.startswith("lr ")]
    assert line.split()[1:3] == ["-", "0.004"]


def _way(drafter: str, method: str, mean: float, **more: Any) -> dict[str, Any]:
    values = {"acceptance_length": mean, "acceptance_length_low": mean - 0.2, "acceptance_length_high": mean + 0.2}
    return {"step": 97, "protocol": {"drafter": drafter, "method": method, **more}, "values": values}


def test_what_a_drafter_brings_and_where_it_lies_closes_the_page_of_its_training(places: Places) -> None:
    ways = [_way("untrained", "chain", 1.0), _way("trained", "chain", 1.85), _way("trained", "tree", 2.42, budget=16)]
    told = [event(91 + place, "evaluation", **way) for place, way in enumerate(ways)]
    page = _ended(places, state=State.SUCCEEDED, told=[CHECKPOINT, *told])

    assert in_short(page) == [
        "the drafter brings 1.85 tokens a round [1.65, 2.05], as a tree of 16 2.42 [2.22, 2.62]; untrained 1.00",
        "its checkpoint, of step 97, on local: /data/draftyard/runs/kleadsaa/checkpoints/step-00000097",
    ]


def test_nothing_is_said_in_short_of_what_was_not_decoded(places: Places) -> None:
    assert in_short(_ended(places, told=[CHECKPOINT])) == []


def test_estimates_by_slot_say_what_they_are_and_have_a_dash_where_nothing_was_seen(places: Places) -> None:
    values = {"chain_tau": 1.2, "coverage_1": [0.05, 0.0, float("nan")], "coverage_2": [0.1, 0.02, float("nan")]}
    offline = event(91, "evaluation", step=97, protocol={"method": "offline"}, values=values)

    text = _text(_ended(places, told=[offline]))

    assert "truth among best 1  0.05, 0, -" in text
    assert "slots 1 to 3; each counts the blocks whose slots before it were all covered" in " ".join(text.split())


@pytest.mark.parametrize(
    ("kind", "step", "words"),
    [
        (Kind.TRAIN, None, "starting run knewaaaa: smollm2, branch ce"),
        (Kind.SMOKE, None, "climbing the smoke ladder of smollm2, branch ce, as run knewaaaa"),
        (Kind.SCRIPT, None, "running the script beside smollm2, branch ce, as run knewaaaa"),
        (Kind.PREPARE, None, "preparing what smollm2, branch ce, trains on, as run knewaaaa"),
        (Kind.EXPORT, 97, "exporting step 97, the newest checkpoint of run koldaaaa, as run knewaaaa"),
        (Kind.EVALUATE, 97, "evaluating step 97, the newest checkpoint of run koldaaaa, as run knewaaaa"),
    ],
)
def test_a_job_says_what_it_does_and_not_that_it_trains(kind: Kind, step: int | None, words: str) -> None:
    parent = None if step is None else "koldaaaa"

    assert beginning("knewaaaa", kind, "smollm2", "ce", parent=parent, step=step) == words


def test_runs_in_the_order_of_their_newest_start_stand_as_the_column_tells_it(places: Places) -> None:
    """A run that is only set up has started when it was launched, as `ls` shows it. Where no order is named live ones lead."""
    with Store(places.db, clock=lambda: clock[0]) as store:
        clock = [100.0]
        for run_id, at_s in (("kolderaa", 100.0), ("knextaaa", 200.0), ("kpending", 2500.0)):
            clock[0] = at_s
            store.create_run(new_run(run_id))
            if run_id != "kpending":
                store.new_attempt(run_id)
                store.ingest(batch(steps(1, 2), run_id=run_id))
                store.set_state(run_id, State.STOPPED, evidence="as asked")
        clock[0] = 300.0
        store.new_attempt("kolderaa")
    runs = history.list_runs(places, sort="started")

    told = [run.started_s or run.created_s for run in runs]

    assert told == sorted(told, reverse=True)
    assert {run.id for run in runs} == {"kolderaa", "knextaaa", "kpending"}
    asked = next(str(option.default) for option in ls.params if option.name == "sort")
    for filtered, order in (("", ["kpending", "kolderaa", "knextaaa"]), ("status:stopped", ["knextaaa"])):
        assert [run.id for run in history.list_runs(places, filtered, sort=asked)] == order
        assert [run.id for run in history.list_runs(places, filtered, sort="-" + asked)] == order[::-1]
    with Store(places.db) as store:
        store.set_state("kolderaa", State.STOPPED, evidence="as asked")
        store.set_state("kpending", State.FAILED, evidence="never began", attempt=0)
        assert [run.id for run in store.reader.runs(sort=asked, limit=1, offset=2)] == ["kolderaa"]
