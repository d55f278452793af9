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
TOLD = {
    "loss": 3.0,
    "loss_ce": 3.0,
    "grad_norm": 1.0,
    "lr": 0.1,
    "mine": 2.0,
    "accuracy": 0.5,
    "accuracy_at_1": 0.6,
    "topk_2": 0.7,
    "streak": 1.5,
    "acceptance_length": 2.5,
    "entropy_right": 0.3,
}
SUMS = {"loss", "loss_ce", "grad_norm"}
COUNTS = {"accuracy", "topk_2", "streak", "acceptance_length", "entropy_right"}


def _record(
    yard: Yard,
    run_id: str,
    last: int,
    *,
    told: dict[str, float] | None = None,
    entry: str = "dflash",
    block_size: int = 16,
    **loss: Any,
) -> None:
    told_of_it = {"loss": {**LOSS, **loss}, "drafter": {"block_size": block_size}} if entry == "dflash" else {}
    spec = json.dumps({"entry": entry, **told_of_it, "train": {"num_steps": 700}})
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
    ("other", "keys", "marked"),
    [
        ({"decay": "dpace"}, "loss.decay", SUMS),
        ({"gamma": 7.0}, "loss.gamma", SUMS),
        ({"terms": {"ce": 1.0, "kl": 0.15}}, "loss.terms.kl", {"loss", "grad_norm"}),
        ({"terms": {"ce": 1.0, "kl": 0.0}}, "", set()),  # not used
        ({"label": "teacher_argmax"}, "loss.label", {*SUMS, *COUNTS, "accuracy_at_1"}),
        (
            {"block_size": 32},
            "drafter.block_size",
            {*SUMS, *COUNTS},
        ),  # a later slot is a harder one; the first is the same
        ({"decay": "none", "block_size": 32}, "loss.decay, drafter.block_size", {*SUMS, *COUNTS}),
        ({"dpace_alpha": 0.9}, "", set()),  # nothing is weighed by it
        ({"chunk_tokens": 9, "hidden_gradient": "fp8"}, "", set()),
        ({"normalization": "weights"}, "", set()),  # as it is where a spec does not say it: older ones know fewer keys
        ({"normalization": "rows"}, "loss.normalization", SUMS),
        ({"entry": "script"}, "entry", {*SUMS, *COUNTS, "accuracy_at_1"}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_metrics_that_are_made_differently_are_marked_with_what_does_it(
    yard: Yard, other: dict[str, Any], keys: str, marked: set[str]
) -> None:
    _record(yard, "aaaaaaaa", 30)
    _record(yard, "bbbbbbbb", 30, **other)

    assert yard.run("compare", "aaaaaaaa", "bbbbbbbb") == 0

    firsts = {line.split(" ")[0] for line in yard.out.splitlines()}
    assert {first[:-1] for first in firsts if len(first) > 1 and first.endswith("*")} == marked
    note = "not to be held against one another"
    assert (note in yard.out) == bool(keys)
    assert not keys or f"* made differently ({keys}): {note}" in " ".join(yard.out.split())
    told = {row["name"]: row["unlike"] for row in yard.json("compare", "aaaaaaaa", "bbbbbbbb")["metrics"]}
    assert {name for name, why in told.items() if why} == marked
    assert set().union(*told.values()) == set(filter(None, keys.split(", ")))


def test_a_metric_that_only_runs_of_one_making_tell_may_be_compared(yard: Yard) -> None:
    _record(yard, "aaaaaaaa", 30, told={"loss_ce": 3.0})
    _record(yard, "bbbbbbbb", 30, told={"loss_ce": 2.0})
    _record(yard, "cccccccc", 30, told={"accuracy": 0.5}, decay="none")

    assert yard.run("compare", "aaaaaaaa", "bbbbbbbb", "cccccccc") == 0

    assert "made differently" not in yard.out


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

    for words, said in ((["show", "bbbbbbbb"], "80 block tokens/s"), (["compare", "aaaaaaaa", "bbbbbbbb"], "80 ")):
        assert yard.run(*words) == 0
        assert said in yard.out
        assert "125" not in yard.out


def test_a_run_that_is_named_twice_is_said(yard: Yard) -> None:
    _record(yard, "aaaaaaaa", 30)

    assert yard.run("compare", "aaaaaaaa", "aaaa") == 0
    assert yard.err == "note: run aaaaaaaa stands beside itself\n"


def test_what_is_no_mean_is_not_told_under_the_heading_of_one(yard: Yard) -> None:
    """A rate that is set is the newest one."""
    for run_id in ("aaaaaaaa", "bbbbbbbb"):
        _record(yard, run_id, 30)

    assert yard.run("metrics", "aaaaaaaa") == 0
    (line,) = [line.split() for line in yard.out.splitlines() if line.startswith("lr ")]
    assert line[1:3] == ["-", "0.1"]
    assert yard.run("compare", "aaaaaaaa", "bbbbbbbb") == 0
    assert "lr: the newest, as it is set or only grows" in yard.out
