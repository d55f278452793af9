"""What trainings were measured to take counts in the next plan as what smoke runs took does, each with its number."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
import pytest

from orchestrator.actions import history
from orchestrator.actions.host_facts import GpuBusy
from orchestrator.actions.lots import choice
from orchestrator.actions.places import Places, find_places
from orchestrator.actions.plans import plan_body, plan_memory
from orchestrator.actions.shape import shape_of
from orchestrator.recipe import load_recipe
from orchestrator.store.rows import Document, Kind
from orchestrator.store.writes import Store
from orchestrator.verbs.measured import ladder, memory
from orchestrator.verbs.plan_page import plan_document, plan_page
from remote.plan import Plan, plan
from remote.plan.roles import roles_plan
from remote.spec import DFlashSpec, dump
from tests.orchestrator.runs import again, batch, event, started
from tests.orchestrator.test_lots import lot

GIB, MIB = 2**30, 2**20
H200 = "NVIDIA H200 150754820096 bytes"
SPLIT = ("data.hidden_states=online", "roles.target=1", "roles.drafter=1", "life.num_gpus=2")


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return find_places(tmp_path, {}, db=tmp_path / "runs.db")


def _spec(*overrides: str) -> DFlashSpec:
    spec = load_recipe("smollm2").resolve("ce", overrides).spec
    assert isinstance(spec, DFlashSpec)
    return spec


def _trained(
    places: Places,
    run_id: str,
    peaks: dict[str, int],
    *overrides: str,
    gpu: str = "none",
    host: str = "local",
    **parts: Any,
) -> None:
    """A training that took so much in each stage; parts of its fingerprint by name."""
    documents = {Document.SPEC: dump(_spec(*overrides)), Document.FINGERPRINT: json.dumps({"gpu": gpu, **parts})}
    card = None if gpu == "none" else 0
    told = [
        event(at, "memory", stage=stage, gpu=card, allocated_bytes=size, reserved_bytes=None, driver_bytes=None)
        for at, (stage, size) in enumerate(peaks.items(), 1)
    ]
    with Store(places.db) as store:
        started(store, run_id, recipe="smollm2", branch="ce", host=host, documents=documents)
        store.ingest(batch(told, run_id=run_id))


def _climbed(places: Places, run_id: str, beyond_bytes: int, **parts: str) -> None:
    spec = _spec()
    planned = plan(spec, device="cpu", rung="fwd_bwd").stage("step").allocated_bytes
    documents = {Document.SPEC: dump(spec), Document.FINGERPRINT: json.dumps({"gpu": "none", **parts})}
    values = {"step_allocated_bytes": planned + beyond_bytes}
    with Store(places.db) as store:
        started(store, run_id, kind="smoke", recipe="smollm2", documents=documents)
        told = event(1, "rung", name="fwd_bwd", passed=True, values=values, message="")
        store.ingest(batch([told], run_id=run_id))


def _planned(*overrides: str, device: str = "cpu") -> Plan:
    return plan(_spec(*overrides), device=device)


def _beyond(stage: str, beyond_bytes: int, *overrides: str, device: str = "cpu") -> dict[str, int]:
    return {stage: _planned(*overrides, device=device).stage(stage).allocated_bytes + beyond_bytes}


def _page(places: Places, **asked: Any) -> list[str]:
    return [click.unstyle(line) for line in plan_page(plan_memory(places, "smollm2", **asked), width=None)]


def test_what_must_fit_is_at_least_what_trainings_of_the_shape_took(places: Places) -> None:
    with Store(places.db) as store:
        store.host_seen("local", address="here", facts={"gpus": [], "memory": {"total_bytes": GIB}})
    before = plan_memory(places, "smollm2", host="local")
    _trained(places, "taaaaaaa", _beyond("step", 300 * MIB) | _beyond("load", 2 * MIB))
    _trained(places, "tbbbbbbb", _beyond("step", 700 * MIB))

    found = plan_memory(places, "smollm2", host="local")

    step = found.plan.stage("step")
    assert (step.unexplained_bytes, step.num_measured) == (700 * MIB, 2)
    assert (found.plan.stage("load").unexplained_bytes, found.plan.stage("load").num_measured) == (2 * MIB, 1)
    assert found.plan.driver_bytes == step.allocated_bytes + 700 * MIB
    assert (before.plan.verdict, found.plan.verdict) == ("fits", "does not fit")
    assert before.largest is not None
    assert found.largest is None or found.largest.max_anchors < before.largest.max_anchors
    assert set(plan_document(found)["measured_in"]) == {"taaaaaaa", "tbbbbbbb"}


@pytest.mark.parametrize("mine", ["full", "fp8"])
def test_what_is_kept_of_the_hidden_gradient_is_of_the_shape(mine: str) -> None:
    """The fp8 copy of the head and its scales are no line of the other's plan, and its step takes another time."""
    spec = load_recipe("qwen3-8b").resolve(None, [f"loss.hidden_gradient={mine}"]).spec
    assert isinstance(spec, DFlashSpec)
    other = "full" if mine == "fp8" else "fp8"

    assert shape_of(spec) != shape_of(replace(spec, loss=replace(spec.loss, hidden_gradient=other)))


def test_of_the_loss_only_numbers_are_no_part_of_the_shape() -> None:
    """Whatever it comes to have belongs to it until somebody says otherwise."""
    spec = _spec()
    alike = {"gamma": 9.0, "dpace_alpha": 0.1, "streak_beta": 0.3, "normalization": "rows", "terms": {"ce": 0.5}}
    other = {"label": "teacher_argmax", "decay": "none", "chunk_tokens": 64, "hidden_gradient": "fp8"}
    assert {field.name for field in fields(spec.loss)} == alike.keys() | other.keys()

    for name, value in (alike | other).items():
        changed = replace(spec, loss=replace(spec.loss, **{name: value}))
        assert (shape_of(changed) == shape_of(spec)) is (name in alike), name


def test_smoke_runs_and_trainings_are_counted_each_by_its_name(places: Places) -> None:
    _trained(places, "taaaaaaa", _beyond("step", 300 * MIB))
    alone = _page(places)
    _climbed(places, "kaaaaaaa", 100 * MIB)
    _climbed(places, "kbbbbbbb", 20 * MIB)

    page = _page(places)

    assert any("+0.293 GiB off at most, in step, by 1 training of this shape; the newest taaaaaaa" in x for x in alone)
    assert "  + unexplained  0.293 GiB that 1 training took in step and no line of the plan explains" in alone
    told = "2 smoke runs and 1 training"
    assert any(f"+0.293 GiB off at most, in step, by {told} of this shape; the newest " in line for line in page)
    assert f"  + unexplained  0.293 GiB that {told} took at most in step and no line of the plan explains" in page
    body = plan_document(plan_memory(places, "smollm2"))
    assert (body["num_smoke_runs"], body["num_trainings"]) == (2, 1)


@pytest.mark.parametrize("stage", ["target", "load"])
def test_a_stage_is_told_by_the_runs_that_measured_it(places: Places, stage: str) -> None:
    """A training that ended before its first step says nothing of one, though it is the newest."""
    _climbed(places, "kaaaaaaa", 100 * MIB)
    loaded = _planned().target_pass if stage == "target" else _planned().stage("load")
    assert loaded is not None
    _trained(places, "taaaaaaa", {stage: loaded.allocated_bytes + MIB})

    page, body = _page(places), plan_document(plan_memory(places, "smollm2"))

    assert any("+0.098 GiB off at most, in step, by 1 smoke run of this shape; the newest k" in line for line in page)
    assert "  + unexplained  0.098 GiB that 1 smoke run took in step and no line of the plan explains" in page
    assert (set(body["measured_in"]), body["num_trainings"]) == ({"kaaaaaaa", "taaaaaaa"}, 1)
    assert body["measured_by_stage"] == {
        "step": {"run_ids": ("kaaaaaaa",), "num_smoke_runs": 1, "num_trainings": 0},
        stage: {"run_ids": ("taaaaaaa",), "num_smoke_runs": 0, "num_trainings": 1},
    }


def test_of_several_stages_each_has_its_own_number_and_newest(places: Places) -> None:
    _trained(places, "taaaaaaa", _beyond("step", 300 * MIB))
    _trained(places, "tbbbbbbb", _beyond("load", -350 * MIB))

    page = _page(places)

    assert any("-0.342 GiB off at most, in load, by 1 training of this shape; the newest tbbbbbbb" in x for x in page)
    assert "  + unexplained  0.293 GiB that 1 training took in step and no line of the plan explains" in page


@pytest.mark.parametrize(
    ("overrides", "more"),
    [
        (("data.max_anchors=9",), {}),
        ((), {"gpu": H200}),
        (("train.accumulation=2",), {}),
    ],
    ids=["another shape", "another kind of device", "another accumulation"],
)
def test_a_training_of_another_shape_or_device_teaches_nothing(
    places: Places, overrides: tuple[str, ...], more: dict[str, str]
) -> None:
    _trained(places, "taaaaaaa", {"step": 3 * GIB}, *overrides, **more)

    assert plan_memory(places, "smollm2").measured.runs.run_ids == ()


def test_on_a_named_host_its_own_trainings_count_alone(places: Places) -> None:
    with Store(places.db) as store:
        store.host_seen("local", address="here", facts={"gpus": [], "memory": {"total_bytes": GIB}})
    _trained(places, "taaaaaaa", {"step": 3 * GIB}, host="other")

    assert plan_memory(places, "smollm2", host="local").measured.runs.run_ids == ()
    assert plan_memory(places, "smollm2").measured.runs.run_ids == ("taaaaaaa",)


def test_trainings_and_smoke_runs_of_other_code_than_the_newest_of_both_teach_nothing(places: Places) -> None:
    _climbed(places, "kaaaaaaa", 900 * MIB, tree="old")
    _trained(places, "taaaaaaa", _beyond("step", 10 * MIB), tree="new")  # its row is made after the rung's own time

    assert plan_memory(places, "smollm2").measured.runs.run_ids == ("taaaaaaa",)


def test_of_a_training_in_several_attempts_the_newest_counts_as_its_code_does(places: Places) -> None:
    _trained(places, "taaaaaaa", {"step": 3 * GIB})
    with Store(places.db) as store:
        again(store, "taaaaaaa")
        told = event(
            9,
            "memory",
            stage="step",
            gpu=None,
            reserved_bytes=None,
            driver_bytes=None,
            allocated_bytes=_beyond("step", MIB)["step"],
        )
        store.ingest(batch([told], run_id="taaaaaaa", attempt=2))

    assert plan_memory(places, "smollm2").plan.stage("step").unexplained_bytes == MIB


def test_of_ranks_by_role_only_a_drafters_peaks_are_held_against_a_drafters_plan(places: Places) -> None:
    _trained(places, "taaaaaaa", _beyond("step", 5 * MIB, *SPLIT), *SPLIT)  # of rank 0, the drafter
    with Store(places.db) as store:
        told = event(
            1, "memory", stage="step", gpu=None, allocated_bytes=9 * GIB, reserved_bytes=None, driver_bytes=None
        )
        store.ingest(batch([told], run_id="taaaaaaa", writer="rank1"))

    alone = roles_plan(_spec(*SPLIT), _planned(*SPLIT))
    found = plan_memory(places, "smollm2", overrides=SPLIT)
    step, page = found.plan.stage("step"), _page(places, overrides=SPLIT)

    assert (step.unexplained_bytes, step.num_measured) == (5 * MIB, 1)
    assert found.by_role is not None
    assert alone is not None
    rank, planned = found.by_role.plan.target, alone.target
    assert rank is not None
    assert planned is not None
    assert rank.driver_bytes == 9 * GIB, "the fullest moment of a rank of the target, against its own plan"
    assert (planned.num_measured, rank.num_measured) == (0, 1)
    assert any(
        line.startswith("unexplained") and line.endswith("that 1 training took and no line of the plan explains")
        for line in page
    )


def test_a_launch_counts_what_runs_took_on_that_host_as_its_plan_does(places: Places) -> None:
    """Else a card that somebody else holds a part of is let through by a plan that is known to be too low."""
    made = _planned(device="cuda")
    _trained(places, "taaaaaaa", _beyond(made.peak.name, 300 * MIB, device="cuda"), gpu=H200, host="gpu")
    place = lot("gpu", boot_id="one", cards=("GPU-a",))
    card = {"index": 0, "uuid": "GPU-a", "total_bytes": made.driver_bytes + GIB, "used_bytes": GIB - 100 * MIB}
    place = replace(
        place, settled=replace(place.settled, spec=_spec()), site=replace(place.site, facts={"gpus": [card]})
    )
    elsewhere = replace(place, site=replace(place.site, host=replace(place.site.host, name="other")))
    elsewhere = replace(elsewhere, settled=replace(place.settled, host=elsewhere.site.host))

    with Store(places.db) as store:
        with pytest.raises(GpuBusy, match="of it as runs took more"):
            choice(place, Kind.TRAIN, store.reader)({})
        assert choice(elsewhere, Kind.TRAIN, store.reader)({}) == ("GPU-a",)


# ------------------------------------------------------------------------------ the target's pass


def test_the_pass_before_training_is_held_beside_what_trainings_took_in_it(places: Places) -> None:
    made = _planned()
    assert made.target_pass is not None
    _trained(places, "taaaaaaa", {"target": made.target_pass.allocated_bytes + 550 * MIB})

    found = plan_memory(places, "smollm2")
    page = _page(places)

    estimate = made.target_pass.allocated_bytes
    assert found.plan.target_pass is not None
    assert (found.plan.target_pass.unexplained_bytes, found.plan.target_pass.num_measured) == (550 * MIB, 1)
    assert found.plan.target_pass_bytes == made.target_pass_bytes + 550 * MIB
    seen = (estimate + 550 * MIB) / GIB
    assert any(
        line.startswith("target pass")
        and f"{seen:.2f} GiB once before training, with the whole target loaded" in line
        and f"measured in 1 training; the estimate was {estimate / GIB:.2f} GiB" in line
        for line in page
    )
    assert plan_body(found.plan)["target_pass"]["allocated_bytes"] == estimate


def test_a_pass_that_took_less_than_its_estimate_leaves_the_estimate_and_says_both(places: Places) -> None:
    """A training that finds its hidden states kept makes no pass."""
    made = _planned()
    assert made.target_pass is not None
    _trained(places, "taaaaaaa", {"target": made.target_pass.allocated_bytes - 300 * MIB})

    found, page = plan_memory(places, "smollm2"), _page(places)

    assert found.plan.target_pass_bytes == made.target_pass_bytes
    less = (made.target_pass.allocated_bytes - 300 * MIB) / GIB
    (line,) = [line for line in page if line.startswith("target pass")]
    assert "an estimate" in line
    assert f"1 training took {less:.2f} GiB at most" in line


def test_a_measured_pass_that_the_machine_has_no_room_for_does_not_fit(places: Places) -> None:
    with Store(places.db) as store:
        store.host_seen("local", address="here", facts={"gpus": [], "memory": {"total_bytes": GIB}})
    assert plan_memory(places, "smollm2", host="local").plan.verdict == "fits"
    _trained(places, "taaaaaaa", {"target": round(1.38 * GIB)})

    made = plan_memory(places, "smollm2", host="local").plan

    assert (made.verdict, made.step_verdict, made.pass_verdict) == ("does not fit", "fits", "does not fit")


def test_the_evaluation_is_held_beside_what_trainings_that_evaluate_alike_took_in_it(places: Places) -> None:
    made = _planned().evaluation
    assert made is not None
    _trained(places, "taaaaaaa", {"evaluating": made.allocated_bytes + 300 * MIB})
    _trained(places, "tbbbbbbb", {"evaluating": made.allocated_bytes + 900 * MIB}, "evaluate.max_new_tokens=31")

    found, page = plan_memory(places, "smollm2").plan, _page(places)

    assert found.evaluation is not None
    assert (found.evaluation.unexplained_bytes, found.evaluation.num_measured) == (300 * MIB, 1)
    assert found.evaluation_bytes == _planned().evaluation_bytes + 300 * MIB
    (line,) = [line for line in page if line.startswith("evaluation")]
    assert f"; measured in 1 training; the estimate was {made.allocated_bytes / GIB:.2f} GiB allocated" in line


def test_a_runs_page_holds_the_pass_against_its_estimate(places: Places) -> None:
    made = _planned()
    assert made.target_pass is not None
    assert made.evaluation is not None
    took = {"target": round(1.38 * GIB), "evaluating": made.evaluation.allocated_bytes - GIB // 4}
    _trained(places, "taaaaaaa", took | _beyond("step", MIB))
    with Store(places.db) as store:
        store.keep_document("taaaaaaa", Document.PLAN, json.dumps(plan_body(made)))

    told = [click.unstyle(line) for line in memory(history.show(places, "taaaaaaa"), 100)]

    rows = [line.split() for line in told]
    assert any("evaluating: predicted of prompts as long as a row; shorter ones take less" in line for line in told)
    assert any(row[:1] == ["evaluating"] and row[-1] == "-0.25" for row in rows)

    beyond = 1.38 - made.target_pass.allocated_bytes / GIB
    (row,) = [row for row in rows if row and row[0] == "target"]
    assert row == ["target", "host", f"{made.target_pass.allocated_bytes / GIB:.2f}", "1.38", f"+{beyond:.2f}"]


def test_a_rungs_page_says_what_a_training_holds_beside_it(places: Places) -> None:
    """Of a processor: a rung reads no target, so that its plan of `load` is lower than the recipe's."""
    _climbed(places, "kaaaaaaa", 0)
    spec = _spec()
    with Store(places.db) as store:
        store.keep_document("kaaaaaaa", Document.PLAN, json.dumps(plan_body(plan(spec, device="cpu", rung="fwd_bwd"))))
        told = event(2, "memory", stage="load", gpu=None, allocated_bytes=GIB, reserved_bytes=None, driver_bytes=None)
        store.ingest(batch([told], run_id="kaaaaaaa", writer="rung"))

    lines = memory(history.show(places, "kaaaaaaa"), 100)
    whole = "\n".join(ladder(history.show(places, "kaaaaaaa"), 100))

    load = plan(spec, device="cpu", rung="fwd_bwd").stage("load").allocated_bytes / GIB
    (row,) = [line.split() for line in click.unstyle("\n".join(lines)).splitlines() if line.startswith("load ")]
    assert row[:5] == ["load", "host", f"{load:.2f}", "1.00", f"+{1 - load:.2f}"], "plan against measured"
    assert whole.endswith("\n".join(lines)), "below the rungs"
    assert any("a training also holds transformers and the tokenizer" in line for line in lines)
