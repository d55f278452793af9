"""Runs side by side: how far each was, and which of their numbers may be held against one another."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestrator.store.rows import Document, State
from orchestrator.store.writes import Store
from tests.orchestrator.runs import batch, new_run, started, steps
from tests.orchestrator.yard import Yard

LOSS = {
    "terms": {"ce": 1.0},
    "label": "data",
    "decay": "exponential",
    "gamma": 4.0,
    "dpace_alpha": 0.5,
    "streak_beta": 0.0,
}
TOLD = {"loss": 3.0, "loss_ce": 3.0, "accuracy": 0.5, "streak": 1.5}


def _record(yard: Yard, run_id: str, last: int, *, told: dict[str, float] | None = None, **loss: Any) -> None:
    spec = json.dumps({"entry": "dflash", "loss": {**LOSS, **loss}, "train": {"num_steps": 700}})
    with Store(yard.root / "runs.db") as store:
        started(store, run_id, documents={**new_run().documents, Document.SPEC: spec}, num_steps=700)
        store.ingest(batch(steps(1, last, **(told or TOLD)), run_id=run_id))
        store.set_state(run_id, State.STOPPED, evidence="x")


@pytest.mark.parametrize("verb", ["compare", "diff"])
def test_each_run_says_how_far_it_was(yard: Yard, verb: str) -> None:
    """A loss at step 478 beside one at step 27 read as a verdict."""
    _record(yard, "aaaaaaaa", 30)
    _record(yard, "bbbbbbbb", 7)

    assert yard.run(verb, "aaaaaaaa", "bbbbbbbb") == 0

    heads = yard.out.splitlines()[:2]
    assert [head.rpartition(": ")[2] for head in heads] == ["stopped, step 30 of 700", "stopped, step 7 of 700"]


@pytest.mark.parametrize(
    ("loss", "keys", "marked"),
    [
        ({"decay": "dpace"}, "loss.decay", {"loss", "loss_ce"}),
        ({"gamma": 7.0}, "loss.gamma", {"loss", "loss_ce"}),
        ({"terms": {"ce": 1.0, "kl": 0.15}}, "loss.terms.kl", {"loss"}),
        ({"label": "teacher_argmax"}, "loss.label", {"loss", "loss_ce", "accuracy", "streak"}),
        ({"dpace_alpha": 0.9}, "", set()),  # nothing is weighed by it
        ({"chunk_tokens": 9}, "", set()),
    ],
)
def test_losses_that_are_made_differently_are_marked(
    yard: Yard, loss: dict[str, Any], keys: str, marked: set[str]
) -> None:
    _record(yard, "aaaaaaaa", 30)
    _record(yard, "bbbbbbbb", 30, **loss)

    assert yard.run("compare", "aaaaaaaa", "bbbbbbbb") == 0

    assert {line.split()[0].rstrip("*") for line in yard.out.splitlines() if line.split(" ")[0].endswith("*")} - {
        ""
    } == marked
    note = "not to be held against one another"
    assert (note in yard.out) == bool(keys)
    assert not keys or f"* made differently ({keys}): {note}" in yard.out
    assert yard.json("compare", "aaaaaaaa", "bbbbbbbb")["unlike_losses"] == ([keys] if keys else [])


def test_a_speed_has_one_number(yard: Yard) -> None:
    """A mean of rates is another number than all tokens over all seconds, which is what a speed is."""
    uneven = [
        *steps(1, 30, block_tokens_per_s=200.0, step_s=0.5, **TOLD),
        *steps(31, 60, block_tokens_per_s=50.0, step_s=2.0),
    ]
    for run_id in ("aaaaaaaa", "bbbbbbbb"):
        with Store(yard.root / "runs.db") as store:
            started(store, run_id)
            store.ingest(batch(uneven, run_id=run_id))
            store.set_state(run_id, State.SUCCEEDED, evidence="x")

    for words, said in ((["show", "bbbbbbbb"], "0.08 block Ktok/s"), (["compare", "aaaaaaaa", "bbbbbbbb"], "80 ")):
        assert yard.run(*words) == 0
        assert said in yard.out
        assert "125" not in yard.out


def test_a_run_that_is_named_twice_is_said(yard: Yard) -> None:
    _record(yard, "aaaaaaaa", 30)

    assert yard.run("compare", "aaaaaaaa", "aaaa") == 0
    assert yard.err == "note: run aaaaaaaa stands beside itself\n"
