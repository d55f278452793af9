"""The time of a plan: measured where the database has a step of this shape, else a bound that is called a guess."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

from orchestrator.actions.places import Places, find_places
from orchestrator.actions.plans import Planned, effects, plan_memory
from orchestrator.actions.recipes import compare
from orchestrator.actions.step_time import StepTime, bound, measured, time_sentence
from orchestrator.recipe import load_recipe
from orchestrator.store.reads import Reader
from orchestrator.store.rows import Document
from orchestrator.store.writes import Store
from orchestrator.verbs.plan_page import plan_document, plan_page
from remote.plan import plan
from remote.plan.time import CEILING_FLOP_PER_S
from remote.spec import DFlashSpec, dump
from tests.orchestrator.runs import batch, event, started, steps

H200 = "NVIDIA H200 150754820096 bytes"


def _spec(word: str = "smollm2", branch: str = "ce", *overrides: str) -> DFlashSpec:
    spec = load_recipe(word).resolve(branch, overrides).spec
    assert isinstance(spec, DFlashSpec)
    return spec


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return find_places(tmp_path, {}, db=tmp_path / "runs.db")


def _record(places: Places, run_id: str, spec: DFlashSpec, step_s: float, *, gpu: str = "none", **more: Any) -> None:
    """A training of three reported steps, or, as a smoke run, a rung."""
    documents = {Document.SPEC: dump(spec), Document.FINGERPRINT: json.dumps({"gpu": gpu})}
    told = steps(1, 3, step_s=step_s, block_tokens_per_s=100.0)
    if more.get("kind") == "smoke":
        told = [event(1, "rung", name="fwd_bwd", passed=True, values={"step_s": step_s}, message="")]
    with Store(places.db) as store:
        started(store, run_id, recipe=spec.recipe, branch=spec.branch, documents=documents, **more)
        store.ingest(batch(told, run_id=run_id))


def _time(places: Places, spec: DFlashSpec, device: str = "cpu", host: str | None = None) -> StepTime | None:
    with Reader(places.db) as reader:
        made = plan(spec, device=device)
        return measured(reader, spec, made, host=host) or bound(spec, made)


def test_a_training_of_the_same_shape_is_the_measure_whatever_its_length_rate_or_data(places: Places) -> None:
    ran = _spec("smollm2", "ce", "train.num_steps=10", "optim.lr=1e-3", "loss.gamma=4", "data.held_out=other.jsonl")
    _record(places, "kaaaaaaa", ran, 0.25)

    found = _time(places, _spec())

    assert found == StepTime(pytest.approx(0.25), 700, True, "run kaaaaaaa on local")
    assert found.total_s == pytest.approx(175.0)


@pytest.mark.parametrize(
    "override",
    ["data.max_anchors=16", "drafter.block_size=4", "loss.terms.kl=0.1", "train.accumulation=2", "life.num_gpus=8"],
)
def test_another_shape_measures_nothing(places: Places, override: str) -> None:
    _record(places, "kaaaaaaa", _spec(), 0.25)

    assert _time(places, _spec("smollm2", "ce", override)) is None


def test_a_rung_is_the_measure_until_a_training_is_and_says_that_it_took_the_worst_batch(places: Places) -> None:
    _record(places, "kbbbbbbb", _spec(), 0.5, kind="smoke")
    by_rung = _time(places, _spec())
    _record(places, "kaaaaaaa", _spec(), 0.25)
    by_run = _time(places, _spec())

    assert by_rung == StepTime(0.5, 700, True, "the worst batch, in smoke run kbbbbbbb on local")
    assert by_run is not None
    assert by_run.source == "run kaaaaaaa on local"


def test_a_card_is_not_measured_by_a_processor_nor_a_host_by_another(places: Places) -> None:
    spec = _spec("qwen3.6-27b", "v6")
    _record(places, "kaaaaaaa", spec, 9.0)
    bounded = _time(places, spec, device="cuda")
    _record(places, "kbbbbbbb", spec, 0.4, gpu=H200, host="big")

    assert bounded is not None
    assert not bounded.is_measured
    assert bounded.step_s == plan(spec).work.total / CEILING_FLOP_PER_S
    assert _time(places, spec, device="cuda") == StepTime(
        pytest.approx(0.4), 40_000, True, "run kbbbbbbb on big, NVIDIA H200"
    )
    elsewhere = _time(places, spec, device="cuda", host="small")
    assert elsewhere is not None
    assert not elsewhere.is_measured


def test_a_ceiling_that_nobody_measured_bounds_nothing(places: Places) -> None:
    spec = _spec("qwen3.6-27b", "v6")

    assert _time(places, spec, device="cpu") is None
    assert _time(places, replace(spec, train=replace(spec.train, dtype="float32")), device="cuda") is None


def test_a_run_of_which_nobody_tells_what_it_ran_on_measures_nothing(places: Places) -> None:
    """An imported run has no fingerprint; a card's step is no step of a processor."""
    _record(places, "kaaaaaaa", _spec(), 0.25)
    with Store(places.db) as store:
        store.keep_document("kaaaaaaa", Document.FINGERPRINT, "{}")

    assert _time(places, _spec()) is None
    assert _time(places, _spec(), device="cuda") == bound(_spec(), plan(_spec(), device="cuda"))


def _garbage(db: Path) -> None:
    db.write_bytes(b"no database at all, but long enough to be looked at" * 40)


def _of_tomorrow(db: Path) -> None:
    with contextlib.closing(sqlite3.connect(db)) as connection:
        connection.execute("PRAGMA user_version = 9999")


@pytest.mark.parametrize("spoil", [_garbage, _of_tomorrow, Path.mkdir])
def test_a_database_that_cannot_be_read_leaves_the_time_a_guess_and_is_told(
    places: Places, spoil: Callable[[Path], None]
) -> None:
    spoil(places.db)
    told: list[str] = []

    found = plan_memory(places, "qwen3.6-27b", branch="v6", tell=told.append)
    names = [item.name for item in effects(places, compare(places, "qwen3.6-27b:v6", ":ddtree"), tell=told.append)]

    assert found.time == bound(found.spec, found.plan)
    assert "time of a step, at least: a guess" in names
    assert [line.split(":")[0] for line in told] == ["what was measured before is not known"] * 2
    assert str(places.db) in told[0]


@pytest.mark.parametrize("capacity_bytes", [None, 95 * 2**30])
def test_a_database_that_cannot_be_read_is_told_once_where_a_host_is_named(
    places: Places, capacity_bytes: int | None
) -> None:
    """And not as a host that nobody has looked at, which nobody can know."""
    _garbage(places.db)
    told: list[str] = []

    found = plan_memory(places, "qwen3.6-27b", host="box", capacity_bytes=capacity_bytes, tell=told.append)

    assert found.plan.capacity_bytes == capacity_bytes
    assert found.time == bound(found.spec, found.plan)
    assert [line.split(":")[0] for line in told] == ["what was measured before is not known"]


def test_a_stored_spec_of_another_version_is_passed_over(places: Places) -> None:
    _record(places, "kaaaaaaa", _spec(), 0.25)
    with Store(places.db) as store:
        store.keep_document("kaaaaaaa", Document.SPEC, '{"spec_version": 99}')

    assert _time(places, _spec()) is None


def test_the_page_calls_a_bound_a_guess_and_a_measure_by_its_run(places: Places) -> None:
    spec = _spec("qwen3.6-27b", "v6")
    guessed = plan_memory(places, "qwen3.6-27b", branch="v6")
    _record(places, "kbbbbbbb", spec, 0.4, gpu=H200)
    known = plan_memory(places, "qwen3.6-27b", branch="v6")
    unknown = plan_memory(places, "smollm2")

    lines = [_time_line(found) for found in (guessed, known, unknown)]
    assert "a guess: an H200 takes at least 0.157 s a step" in lines[0]
    assert lines[0].endswith("the most that one H200 was measured to do; a card that does less takes as much longer")
    assert "797 TFLOP/s, the most that one H200 was measured to do" in lines[0]
    assert (
        "0.4 s a step, 4 h 26 min for all 40,000 without the target's pass and the evaluation; measured: run kbbbbbbb on local, NVIDIA H200"
        in lines[1]
    )
    assert "not measured yet: draftyard smoke smollm2 -b ce does" in lines[2]
    assert plan_document(known)["time"]["is_measured"] is True
    assert plan_document(unknown)["time"] is None


def _time_line(found: Planned) -> str:
    told = [click.unstyle(line) for line in plan_page(found, width=None)]
    return next(line for line in told if line.startswith("time "))


def _line(places: Places, branch: str = "ce", **asked: Any) -> str:
    page = [
        click.unstyle(line) for line in plan_page(plan_memory(places, "smollm2", branch=branch, **asked), width=None)
    ]
    return next(line for line in page if line.startswith("time "))


def _seen(places: Places, host: str, *, num_gpus: int) -> None:
    gpus = [{"index": index, "name": "NVIDIA H200", "total_bytes": 140 * 2**30} for index in range(num_gpus)]
    with Store(places.db) as store:
        store.host_seen(host, address=host, facts={"gpus": gpus, "memory": {"total_bytes": 2**36}})


def test_a_smoke_run_is_named_as_what_measures_only_where_it_would_run_on_such_a_device(places: Places) -> None:
    plain = "not measured yet: draftyard smoke smollm2 -b ce does"
    elsewhere = "not measured yet: draftyard smoke smollm2 -b ce --host HOST does, on a host with such a card"

    for _ in range(2):  # nobody has looked at this machine, and then it has no card
        assert _line(places).endswith(plain)
        assert _line(places, capacity_bytes=2**37).endswith(elsewhere)
        _seen(places, "local", num_gpus=0)
    _seen(places, "big", num_gpus=1)
    assert _line(places, host="big").endswith("draftyard smoke smollm2 -b ce --host big does")
    assert _line(places, host="local", capacity_bytes=2**37).endswith(elsewhere)
    _seen(places, "local", num_gpus=1)
    assert _line(places, capacity_bytes=2**37).endswith(plain)
    assert _line(places).endswith("smoke smollm2 -b ce --host HOST does, on a host without a card")


def test_of_roles_that_no_rung_climbs_a_training_is_named_as_what_measures(places: Places) -> None:
    overrides = ["roles.drafter=2", "train.accumulation=2", "life.num_gpus=2"]

    assert _line(places, overrides=overrides).endswith("not measured yet: a training with these roles does")


@pytest.mark.slow
def test_effects_compare_measured_with_measured_or_guess_with_guess(places: Places) -> None:
    compared = compare(places, "qwen3.6-27b:v6", ":ddtree")
    for branch, step_s, run_id in (("v6", 0.4, "kaaaaaaa"), ("ddtree", 1.42, "kbbbbbbb")):
        names = [effect.name for effect in effects(places, compared)]
        assert "time of a step, at least: a guess" in names
        _record(places, run_id, _spec("qwen3.6-27b", branch), step_s, gpu=H200)

    by_name = {effect.name: effect for effect in effects(places, compared)}

    step, whole = by_name["time of a step, measured"], by_name["time of all steps"]
    assert (step.left, step.right, step.unit) == (pytest.approx(0.4), pytest.approx(1.42), "s")
    assert whole.right == pytest.approx(1.42 * 40_000)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], "for all 700 without the target's pass and the evaluation; "),
        (["evaluate.at_end=false"], "for all 700 without the target's pass; "),
        (["data.hidden_states=online"], "for all 700 without the evaluation; "),
        (["data.hidden_states=online", "evaluate.at_end=false"], "for all 700; "),
    ],
)
def test_the_time_of_all_steps_names_what_a_training_does_beside_them(overrides: list[str], told: str) -> None:
    spec = load_recipe("smollm2").resolve("ce", overrides).spec
    assert isinstance(spec, DFlashSpec)

    assert told in time_sentence(StepTime(0.5, 700, True, "run k"), spec)
