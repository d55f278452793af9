"""The plan by role: what a batch takes each role, measured or a bound, and what follows for both."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from orchestrator.actions.places import Places, find_places
from orchestrator.actions.plans import Planned, plan_memory
from orchestrator.recipe import load_recipe
from orchestrator.store.rows import Document
from orchestrator.store.writes import Store
from orchestrator.verbs.plan_page import plan_document, plan_page
from remote.spec import DFlashSpec, dump
from tests.orchestrator.runs import batch, event, started, steps

H200 = "NVIDIA H200 150754820096 bytes"
BRANCH = "ddtree-8gpu"  # 5 target + 3 drafter, 3 batches a step


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return find_places(tmp_path, {}, db=tmp_path / "runs.db")


def _spec(branch: str = BRANCH, *overrides: str) -> DFlashSpec:
    spec = load_recipe("qwen3.6-27b").resolve(branch, overrides).spec
    assert isinstance(spec, DFlashSpec)
    return spec


def _record(
    places: Places, run_id: str, spec: DFlashSpec, *, drafter: tuple[float, float], target: tuple[float, float] | None
) -> None:
    """A training whose first drafter, and whose first target where it has any, took such steps: seconds, of them waited."""
    documents = {Document.SPEC: dump(spec), Document.FINGERPRINT: json.dumps({"gpu": H200})}
    first = steps(1, 3, step_s=drafter[0], wait_s=drafter[1], block_tokens_per_s=100.0)
    with Store(places.db) as store:
        started(store, run_id, recipe=spec.recipe, branch=spec.branch, documents=documents)
        store.ingest(batch(first, run_id=run_id))
        if target is not None:
            told = steps(1, 3, step_s=target[0], wait_s=target[1])
            store.ingest(batch(told, run_id=run_id, writer=f"rank{spec.roles.drafter}"))


def _plan(places: Places, *, gpu_bytes: int | None = None, overrides: tuple[str, ...] = ()) -> Planned:
    return plan_memory(places, "qwen3.6-27b", branch=BRANCH, capacity_bytes=gpu_bytes, overrides=overrides)


def _line(found: Planned, name: str) -> str:
    told = [click.unstyle(line) for line in plan_page(found, width=None)]
    return next(line for line in told if line.startswith(f"{name} "))


def test_without_a_measure_both_roles_are_bounds_and_what_follows_is_called_a_guess(places: Places) -> None:
    found = _plan(places)

    assert found.by_role is not None
    assert ">= 0.489 s  a bound: 390 TFLOP at 797 TFLOP/s" in _line(found, "target  ")
    assert "a guess, as not both times are measured: the drafters" in _line(found, "bottleneck")
    assert found.time is not None
    assert found.time.step_s == found.by_role.plan.least_step_s  # three batches, one a drafter
    assert not found.time.is_measured


def test_a_training_of_another_division_measures_both_roles_and_the_slower_one_decides(places: Places) -> None:
    """2 + 1: a step of 3 batches takes the drafter 3 s, 0.3 of them waited; a batch takes a target 0.8 s."""
    other = _spec(BRANCH, "roles.target=2", "roles.drafter=1", "life.num_gpus=3", "train.num_steps=7")
    _record(places, "kaaaaaaa", other, drafter=(3.0, 0.3), target=(1.0, 0.2))

    found = _plan(places)

    assert found.by_role is not None
    assert found.by_role.is_measured
    assert found.by_role.target is not None
    assert found.by_role.drafter is not None
    assert [found.by_role.target.batch_s, found.by_role.drafter.batch_s] == pytest.approx([0.8, 0.9])
    assert found.by_role.target.source == "run kaaaaaaa on local, NVIDIA H200"
    assert found.time is not None
    assert found.time.is_measured
    assert found.time.step_s == pytest.approx(0.9)
    assert "the drafters; targets give 5 / 0.8 s = 6.25 batches a second, drafters take 3 / 0.9 s = 3.33" in _line(
        found, "bottleneck"
    )


def test_one_process_measures_a_drafter_and_not_the_target(places: Places) -> None:
    beside = _spec("ddtree", "data.hidden_states=online")
    _record(places, "kaaaaaaa", beside, drafter=(1.2, 0.2), target=None)

    found = _plan(places)

    assert found.by_role is not None
    assert found.by_role.drafter is not None
    assert found.by_role.drafter.batch_s == pytest.approx(1.0)
    assert not found.by_role.is_measured
    assert "a guess, as not both times are measured" in _line(found, "bottleneck")


@pytest.mark.parametrize(("terms", "is_measured"), [((), False), (("loss.terms.kl=0",), True)])
def test_a_training_from_the_cache_makes_no_logits_of_the_target_and_measures_nobody_who_does(
    places: Places, terms: tuple[str, ...], is_measured: bool
) -> None:
    _record(places, "kaaaaaaa", _spec("ddtree", *terms), drafter=(1.2, 0.2), target=None)

    found = _plan(places, overrides=terms)

    assert found.by_role is not None
    assert found.by_role.drafter is not None
    assert found.by_role.drafter.is_measured is is_measured


def test_a_rung_in_one_process_is_no_step_of_several(places: Places) -> None:
    spec = _spec()
    documents = {Document.SPEC: dump(spec), Document.FINGERPRINT: json.dumps({"gpu": H200})}
    told = event(1, "rung", name="fwd_bwd", passed=True, values={"step_s": 2.7}, message="")
    with Store(places.db) as store:
        started(store, "kaaaaaaa", kind="smoke", recipe=spec.recipe, branch=spec.branch, documents=documents)
        store.ingest(batch([told], run_id="kaaaaaaa"))

    found = _plan(places)

    assert found.by_role is not None
    assert found.by_role.drafter is not None
    assert found.by_role.drafter.batch_s == pytest.approx(0.9)  # a step of three batches
    assert found.time is not None
    assert not found.time.is_measured


def test_a_card_too_small_for_a_target_alone_is_told_at_the_top(places: Places) -> None:
    found = _plan(places, gpu_bytes=50 * 2**30, overrides=("data.max_anchors=16", "evaluate.at_end=false"))

    assert found.plan.verdict == "fits"
    assert "does not fit, 4.79 GiB too much, in a target rank; a drafter rank leaves" in _line(found, "capacity")
    assert plan_document(found)["by_role"]["target"]["verdict"] == "does not fit"


def test_the_queue_is_shown_with_its_arithmetic(places: Places) -> None:
    assert "20 batches x 0.458 GiB of hidden states = 9.16 GiB on each drafter's card" in _line(_plan(places), "queue")


def test_one_process_has_no_such_section(places: Places) -> None:
    found = plan_memory(places, "qwen3.6-27b", branch="ddtree")

    assert found.by_role is None
    assert plan_document(found)["by_role"] is None


def test_drafters_without_targets_have_neither_queue_nor_bottleneck(places: Places) -> None:
    found = _plan(places, overrides=("roles.target=0", "life.num_gpus=3"))

    told = "\n".join(click.unstyle(line) for line in plan_page(found, width=None))
    assert "By role: 3 drafter = 3 processes" in told
    assert "bottleneck" not in told
    assert plan_document(found)["by_role"]["target"] is None
