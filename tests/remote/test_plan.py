"""The memory plan against torch's own books, its published numbers, and what must hold of every plan."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remote.allocator import grows_segments
from remote.drafter import attention_sdpa, loss, loss_chunk
from remote.plan import GIB, Plan, plan
from remote.plan.advice import Planner, largest_fit, nearest_fits, switches, uses
from remote.plan.attention import LAUNCH_PAIRS
from remote.plan.memory import (
    PROCESS_TOLERANCE_BYTES,
    block_activations,
    head_workspace,
    kept_components,
    row_bytes,
)
from remote.plan.moments import SCALE_ROWS
from remote.plan.roles import roles_plan
from remote.plan.sizes import SOFT_TERMS, anchor_slots, sizes
from remote.spec import DataSpec, DFlashSpec, DrafterSpec, LossSpec, NoiseSpec, OptimSpec, TargetSpec, TrainSpec, load
from tests.remote.allocations import peaks
from tests.remote.jobs import events, make_run, run_job, tiny_job_spec
from tests.remote.specs import tiny_spec

LARGE = DFlashSpec(
    recipe="qwen3.6-27b",
    branch="ddtree",
    entry="dflash",
    target=TargetSpec("/models/x", 5120, 64, 248_320, False, 26_895_998_464, 248_044, 248_044),
    drafter=DrafterSpec(5, 17_408, 32, 8, 128, [1, 16, 31, 46, 61], 32, 248_070, 1e7, 262_144),
    data=DataSpec("p", "a", "h", 8000, 1024, "row"),
    train=TrainSpec(num_steps=10),
    loss=LossSpec(terms={"ce": 1.0, "kl": 0.15}, gamma=10),
)


def small_spec(**sections: dict[str, Any]) -> DFlashSpec:
    """Small enough for a processor, large enough that tensors of 8 bytes do not matter."""
    own: dict[str, dict[str, Any]] = {
        "target": {"hidden_size": 64, "vocab_size": 2000, "tied_embeddings": False},
        "drafter": {"num_layers": 3, "intermediate_size": 192, "block_size": 8, "attention": "sdpa"},
        "data": {"row_tokens": 256, "max_anchors": 64},
        "loss": {"terms": {"ce": 1.0, "kl": 0.15}, "chunk_tokens": 64},
    }
    return tiny_spec(**{name: own.get(name, {}) | sections.get(name, {}) for name in own | sections})


# Two tables and no layers: what is looked at is what its rows take in a step that makes them itself.
BESIDE: dict[str, dict[str, Any]] = {
    "data": {"hidden_states": "online", "row_tokens": 256, "max_anchors": 64},
    "target": {"hidden_size": 64, "vocab_size": 2000, "tied_embeddings": False, "num_parameters": 2 * 2000 * 64},
}
SLIDING: dict[str, Any] = {"layer_types": ["sliding", "sliding", "full"], "sliding_window": 48}
CASES = {
    "base": small_spec(),
    "cross-entropy alone": small_spec(loss={"terms": {"ce": 1.0}}),
    "cap": small_spec(loss={"terms": {"ce": 1.0, "kl": 0.1, "cap": 0.1}}),
    "layers checkpointed": small_spec(train={"activation_checkpointing": "non_reentrant"}),
    "one large loss chunk": small_spec(loss={"chunk_tokens": 512}),
    "few anchors": small_spec(data={"row_tokens": 64, "max_anchors": 4}),
    "wide": small_spec(target={"hidden_size": 192}, drafter={"intermediate_size": 512}),
    "many anchors": small_spec(data={"row_tokens": 384, "max_anchors": 160}),
    "many anchors, checkpointed": small_spec(
        data={"row_tokens": 384, "max_anchors": 160}, train={"activation_checkpointing": "non_reentrant"}
    ),
    "moments in bfloat16": small_spec(optim={"moment_dtype": "bfloat16"}),
    "wide heads": small_spec(drafter={"num_heads": 16, "intermediate_size": 64}, target={"vocab_size": 100}),
    "anchors per document": small_spec(data={"anchors_per": "document", "max_anchors": 12}),
    "sliding layers": small_spec(drafter=SLIDING),
    "sliding layers, many anchors": small_spec(drafter=SLIDING, data={"row_tokens": 384, "max_anchors": 160}),
    "sliding layers, noise, anchors per document": small_spec(
        drafter=SLIDING,
        data={"anchors_per": "document", "max_anchors": 12, "noise": NoiseSpec("gaussian", 0.05)},
        loss={"terms": {"ce": 1.0, "kl": 0.15, "cap": 0.05}, "streak_beta": 0.5},
    ),
    "tied": small_spec(target={"tied_embeddings": True}),
    "target beside": small_spec(**BESIDE),
    "target beside, one large loss chunk": small_spec(loss={"chunk_tokens": 512}, **BESIDE),
    "target beside, cap": small_spec(loss={"terms": {"ce": 1.0, "kl": 0.1, "cap": 0.1}}, **BESIDE),
    "the target's label": small_spec(loss={"terms": {"ce": 1.0}, "label": "teacher_argmax"}),
}


def tensors(made: Plan) -> dict[str, int]:
    """Predicted bytes by stage without the process itself, which the books do not see."""
    own = {"Python and torch", "transformers and the tokenizer", "library workspace"}  # of the process, not tensors
    return {
        stage.name: sum(component.size_bytes for component in stage.components if component.name not in own)
        for stage in made.stages
    }


@pytest.mark.parametrize("num_layers", [1, 2, 3, 7])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_activations_of_alike_layers_are_counted_as_one_by_one(num_layers: int, device: str) -> None:
    spec = small_spec(drafter={"num_layers": num_layers, "attention": "auto"})
    at = sizes(spec, device=device)

    one_by_one = [block_activations(at, spec, layer=layer) for layer in range(num_layers)]

    for count in range(num_layers):  # all of them go on with fewer rows, which is counted beside them
        kept = {line.name: line.size_bytes for line in kept_components(spec, at, layers=count)}
        assert kept["activations kept"] - sum(one_by_one[:count]) == row_bytes(at, at.block_tokens, at.hidden)


def test_the_most_layers_are_planned_at_once() -> None:
    began_s = time.monotonic()

    plan(small_spec(drafter={"num_layers": 1_000}), device="cpu")

    assert time.monotonic() - began_s < 5  # 0.07 s measured; layer after layer in each of them took a minute


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_stage_is_within_five_percent_of_torchs_own_books(name: str) -> None:
    spec = CASES[name]

    found = peaks(spec)

    for stage, predicted_bytes in tensors(plan(spec, device="cpu")).items():
        assert predicted_bytes == pytest.approx(found[stage], rel=0.05), stage


@pytest.mark.slow
@pytest.mark.parametrize("name", ["base", "many anchors", "one large loss chunk", "anchors per document"])
def test_a_forward_without_gradients_is_within_five_percent_too(name: str) -> None:
    spec = CASES[name]

    found = peaks(spec, gradients=False)

    for stage, predicted_bytes in tensors(plan(spec, device="cpu", rung="fwd")).items():
        assert predicted_bytes == pytest.approx(found[stage], rel=0.05), stage


@pytest.mark.slow
def test_a_processs_own_peaks_are_within_the_plans_tolerance(
    tmp_path: Path, tiny_target_spec: TargetSpec, tiny_drafter_spec: DrafterSpec
) -> None:
    """On a CPU: a training that read a target before, and a rung that did not, each in a process of its own."""
    wide = replace(tiny_drafter_spec, intermediate_size=60_000, attention="sdpa")
    run = make_run(tmp_path, tiny_job_spec(tiny_target_spec, wide))
    spec = load(run.spec_json)
    assert isinstance(spec, DFlashSpec)

    assert run_job(run, "train", is_warm=False).returncode == 0
    assert run_job(run, "smoke", "fwd_bwd", is_warm=False).returncode == 0

    for writer, rung in (("rank0", None), ("rung-fwd_bwd", "fwd_bwd")):
        predicted = {stage.name: stage.allocated_bytes for stage in plan(spec, device="cpu", rung=rung).stages}
        measured = {
            event.fields["stage"]: event.fields["allocated_bytes"]
            for event in events(run, writer=writer, kind="memory")
        }
        for stage, predicted_bytes in predicted.items():
            slack_bytes = max(0.05 * predicted_bytes, PROCESS_TOLERANCE_BYTES)
            assert measured[stage] == pytest.approx(predicted_bytes, abs=slack_bytes), (writer, stage)


def test_the_plan_knows_the_trainers_own_constants() -> None:
    assert LAUNCH_PAIRS == attention_sdpa.LAUNCH_PAIRS
    assert SCALE_ROWS == loss.SCALE_ROWS
    assert SOFT_TERMS == loss_chunk.SOFT_TERMS


def large(**sections: dict[str, Any]) -> DFlashSpec:
    return replace(LARGE, **{name: replace(getattr(LARGE, name), **fields) for name, fields in sections.items()})


def size_of(made: Plan, stage: str, name: str) -> int:
    return sum(component.size_bytes for component in made.stage(stage).components if component.name == name)


def states(made: Plan) -> int:
    names = ("drafter weights", "fp32 masters", "gradients", "optimizer moments")
    return sum(size_of(made, "step", name) for name in names)


def test_model_states_are_twelve_bytes_a_parameter_without_masters_and_sixteen_with() -> None:
    assert states(plan(large(optim={"master_dtype": "none"}))) == 12 * 1_730_213_120 == 20_762_557_440
    assert states(plan(LARGE)) == 16 * 1_730_213_120 == 27_683_409_920


def test_the_frozen_tables_are_two_and_a_half_gigabytes_each() -> None:
    made = plan(LARGE)

    assert size_of(made, "load", "target embedding") == size_of(made, "load", "target head") == 248_320 * 5120 * 2


def test_inputs_are_sixty_one_kilobytes_a_context_token_and_eleven_more_where_the_loss_is_taught_ahead() -> None:
    beside, ahead = plan(large(data={"hidden_states": "online"})), plan(LARGE)

    assert 8000 * 61_440 <= size_of(beside, "step", "inputs") <= 8000 * 61_440 + 4_000_000
    assert size_of(ahead, "step", "inputs") - size_of(beside, "step", "inputs") == 8000 * (5120 * 4 + 16 - 5120 * 2)


def test_a_chunk_of_2048_logits_in_float32_is_twice_970_mebibytes() -> None:
    spec = large(
        drafter={"block_size": 2}, loss={"terms": {"ce": 1.0}, "chunk_tokens": 2048}, train={"kernels": "torch"}
    )
    at = replace(sizes(spec, device="cuda"), chunk_slots=2048)

    one_copy = (head_workspace(spec, at) - 2048 * 5120 * 2) / 3

    assert one_copy == 2 * 970 * 1024**2
    assert 24_576 * 248_320 * 2 == 12_205_424_640  # all logits of the first user's row in bfloat16, 11.37 GiB


def test_the_large_recipe_fits_the_first_users_card_and_not_a_quarter_of_it() -> None:
    assert plan(LARGE, capacity_bytes=95 * GIB).verdict == "fits"
    assert plan(LARGE, capacity_bytes=24 * GIB).verdict == "does not fit"
    assert plan(LARGE).verdict is None


def test_the_verdict_is_tight_between_ninety_five_percent_and_all_of_the_card() -> None:
    needed = plan(LARGE).driver_bytes

    assert plan(LARGE, capacity_bytes=needed).step_verdict == "tight"
    assert plan(LARGE, capacity_bytes=needed - 1).step_verdict == "does not fit"
    assert plan(LARGE, capacity_bytes=round(needed / 0.95) + 1).step_verdict == "fits"


def test_measured_memory_that_no_line_explains_is_a_line_of_its_own() -> None:
    made = plan(LARGE, residuals={"forward": [GIB, 2 * GIB], "step": [-GIB]})

    stages = [made.stage(name) for name in ("forward", "step")]
    assert [(stage.unexplained_bytes, stage.num_measured) for stage in stages] == [(2 * GIB, 2), (-GIB, 1)]
    assert made.stage("backward").unexplained_bytes is None


def test_the_pass_is_planned_and_no_part_that_the_plan_leaves_out() -> None:
    before, begun = plan(LARGE), plan(LARGE, has_pass=False)

    assert before.target_pass is not None
    assert begun.target_pass is None
    assert begun.not_modelled == before.not_modelled
    assert not any("pass before training" in line for line in before.not_modelled)


def test_what_smoke_runs_took_beyond_their_plan_must_fit_too() -> None:
    capacity = round(plan(LARGE).driver_bytes / 0.95) + 1
    fits, seen = (plan(LARGE, capacity_bytes=capacity, residuals=left) for left in ({}, {"forward": [GIB, 2 * GIB]}))

    assert (fits.step_verdict, fits.unexplained_bytes) == ("fits", 0)
    assert (seen.step_verdict, seen.peak.name, seen.unexplained_bytes) == ("tight", "forward", 2 * GIB)
    assert seen.driver_bytes == seen.peak.allocated_bytes + 2 * GIB + seen.slack_bytes + seen.context_bytes
    assert plan(LARGE, capacity_bytes=capacity, residuals={"forward": [40 * GIB]}).step_verdict == "does not fit"
    assert plan(LARGE, residuals={"step": [40 * GIB]}).peak.name == "step", "the peak is where most was seen"
    assert plan(LARGE, residuals={"forward": [-GIB]}).driver_bytes == fits.driver_bytes, "a plan too high earns nothing"


def test_kinds_of_peak_are_kept_apart() -> None:
    made = plan(LARGE)

    assert made.driver_bytes == made.peak.allocated_bytes + made.slack_bytes + made.context_bytes
    assert made.peak.allocated_bytes == max(stage.allocated_bytes for stage in made.stages)
    careless = replace(LARGE, env={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})
    assert plan(careless).slack_bytes > made.slack_bytes


def test_either_name_of_the_allocators_settings_says_whether_segments_grow() -> None:
    """A supervisor sets its own under neither where a recipe sets one of them."""
    assert grows_segments({})
    assert not grows_segments({"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"})
    assert not grows_segments({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"})
    assert grows_segments({"PYTORCH_ALLOC_CONF": "max_split_size_mb:128, expandable_segments:True"})


def test_a_plan_says_what_it_does_not_model_and_where_it_was_not_checked() -> None:
    made = plan(small_spec(drafter={"intermediate_size": 4096}), device="cpu")

    assert "pages of mapped files, which the kernel takes back when memory is short" in made.not_modelled
    assert made.extrapolated == ("inner size 4,096 was not checked; 64 to 512 was",)
    assert plan(CASES["base"], device="cpu").extrapolated == ()


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="device is 'tpu'; a plan knows cuda and cpu"):
        plan(LARGE, device="tpu")


def test_online_hidden_states_bring_the_whole_target_onto_the_card() -> None:
    made = plan(large(data={"hidden_states": "online"}))

    assert size_of(made, "load", "target model") == 2 * 26_895_998_464


def test_a_drafter_fed_by_targets_holds_their_tables_and_its_queue_but_no_target() -> None:
    made = plan(
        large(
            data={"hidden_states": "online"}, roles={"target": 5, "drafter": 3, "queue": 20}, train={"accumulation": 3}
        )
    )

    assert size_of(made, "load", "target model") == 0
    assert size_of(made, "load", "target embedding") == 248_320 * 5120 * 2
    assert size_of(made, "load", "hidden-state queue") == 0
    assert size_of(made, "step", "hidden-state queue") == 20 * 8000 * 61_440  # 9.16 GiB


def test_drafters_that_share_a_step_hold_every_gradient_all_the_time_and_their_share_of_the_inputs() -> None:
    shared, alone = plan(large(roles={"drafter": 3}, train={"accumulation": 3})), plan(LARGE)

    gradients = [
        size_of(shared, stage, "gradients") + size_of(shared, stage, "gradient buckets")
        for stage in ("load", "forward", "backward", "step")
    ]
    assert all(size >= 2 * 1_730_213_120 for size in gradients)
    assert gradients[0] == gradients[3] == 2 * 1_730_213_120
    assert "time: what drafters wait for one another and for the sum of their gradients" in shared.not_modelled
    assert size_of(shared, "step", "inputs") == size_of(alone, "step", "inputs")


def test_anchors_are_counted_as_the_trainer_counts_them() -> None:
    assert anchor_slots(LARGE) == 1024
    per_document = large(data={"anchors_per": "document", "max_anchors": 512})
    assert anchor_slots(per_document, 3) == 1536
    assert anchor_slots(per_document) == 8000  # 16 documents: more slots than a row has tokens do not exist
    assert anchor_slots(large(data={"anchors_per": "document", "max_anchors": 1})) == 4000  # of two tokens each
    assert anchor_slots(large(data={"anchors_per": "document", "max_anchors": 5000})) == 8000
    assert anchor_slots(large(data={"max_anchors": 9000})) == 8000


@pytest.mark.slow
def test_a_switch_lowers_the_peak_it_claims_to_lower_and_can_be_typed() -> None:
    offered = switches(large(drafter={"attention": "sdpa"}, train={"rows_per_step": 2}))

    today = plan(large(drafter={"attention": "sdpa"}, train={"rows_per_step": 2}))
    assert {"train.activation_checkpointing=non_reentrant"} in [set(switch.overrides) for switch in offered]
    for switch in offered:
        assert plan(switch.spec).driver_bytes == today.driver_bytes - switch.saved_bytes
        assert switch.saved_bytes > 0
    checkpointing = next(switch for switch in offered if "checkpoint" in switch.name)
    assert 1.1 < checkpointing.work_factor < 1.4
    assert checkpointing.keeps_result


def test_half_of_two_anchors_is_told_as_one() -> None:
    told = {switch.name for most in (2, 4) for switch in switches(large(data={"max_anchors": most}))}

    assert {"1 anchor", "2 anchors"} <= told
    assert "1 anchors" not in told


def within(capacity_bytes: int) -> Planner:
    return partial(plan, capacity_bytes=capacity_bytes)


def test_the_nearest_changes_fit() -> None:
    for capacity in (60 * GIB, 45 * GIB, 36 * GIB, 24 * GIB):
        found = nearest_fits(LARGE, within(capacity))

        assert found
        assert all(plan(switch.spec, capacity_bytes=capacity).step_verdict == "fits" for switch in found)
        for switch in found:
            keys = [text.partition("=")[0] for text in switch.overrides]
            assert len(keys) == len(set(keys)), "a key said twice"
    assert nearest_fits(LARGE, within(8 * GIB)) == []


@pytest.mark.parametrize("stage", ["forward", "backward", "step"])
def test_a_change_is_planned_with_what_smoke_runs_took_too(stage: str) -> None:
    planned = partial(plan, capacity_bytes=44 * GIB, residuals={stage: [8 * GIB]})
    today = planned(LARGE)

    for switch in [*switches(LARGE, planned), *nearest_fits(LARGE, planned)]:
        assert switch.plan == planned(switch.spec)
        assert switch.saved_bytes == today.driver_bytes - switch.plan.driver_bytes > 0
    largest = largest_fit(LARGE, planned)
    assert largest is not None
    assert planned(large(data={"max_anchors": largest.max_anchors})).step_verdict == "fits"
    assert planned(large(data={"max_anchors": largest.max_anchors + 1})).step_verdict != "fits"


def test_what_fits_but_tightly_is_offered_where_nothing_fits_with_room() -> None:
    least = LARGE
    while lower := switches(least):
        least = lower[0].spec
    capacity = round(plan(least).driver_bytes * 1.01)

    offered = nearest_fits(LARGE, within(capacity))

    assert offered
    assert {switch.plan.step_verdict for switch in offered} == {"tight"}


def test_the_largest_fit_fits_and_one_anchor_more_does_not() -> None:
    largest = largest_fit(LARGE, within(95 * GIB))

    assert largest is not None
    assert largest.block_tokens == largest.max_anchors * 32
    assert plan(large(data={"max_anchors": largest.max_anchors}), capacity_bytes=95 * GIB).step_verdict == "fits"
    assert plan(large(data={"max_anchors": largest.max_anchors + 1}), capacity_bytes=95 * GIB).step_verdict != "fits"
    assert largest_fit(LARGE, within(8 * GIB)) is None


def test_work_counts_what_the_laboratory_counted() -> None:
    """Least exact work is 536.6 TFLOP at ddtree, of them 20.1 for the target's logits, which are not made in a step where the
    loss is taught ahead; the eager body keeps the last layer's unneeded rows."""
    ahead, online = plan(LARGE).work.total, plan(large(data={"hidden_states": "online"})).work
    beside = online.total - online.target

    assert 536.6e12 <= beside <= 1.05 * 536.6e12
    assert 20e12 <= beside - ahead <= 1.15 * 20.1e12


def test_a_target_beside_the_drafter_costs_its_pass_in_every_step() -> None:
    """64 layers of some 24.3 billion weights, two FLOP a weight, over 8,000 tokens; nobody else passes it in a step."""
    online = plan(large(data={"hidden_states": "online"}))

    assert plan(LARGE).work.target == 0
    assert online.work.target == pytest.approx(390e12, rel=0.01)
    assert online.least_step_s is not None
    assert online.least_step_s > online.work.total / 797e12 * 0.999 > 0.49


def test_the_pass_before_training_is_planned_as_a_targets_rank_and_counts_in_the_verdict() -> None:
    alone = large(evaluate={"at_end": False})
    made = plan(alone)
    rank = roles_plan(split := large(roles={"target": 1, "drafter": 1}), plan(split))

    assert rank is not None
    assert rank.target is not None
    assert made.target_pass_bytes == rank.target.driver_bytes > 54 * GIB
    just, short = (plan(alone, capacity_bytes=made.target_pass_bytes + more) for more in (0, -1))
    assert (just.verdict, just.pass_verdict) == ("tight", "tight")
    assert (short.verdict, short.step_verdict, short.pass_verdict) == ("does not fit", "fits", "does not fit")
    lent = plan(alone, capacity_bytes=made.target_pass_bytes - GIB, reserve_bytes=GIB)
    assert lent.pass_verdict == "tight", "what a step leaves free is there for the pass"
    assert plan(large(data={"hidden_states": "online"}), capacity_bytes=40 * GIB).pass_verdict is None


def test_fewer_anchors_are_the_most_that_fit_and_not_half() -> None:
    largest = largest_fit(LARGE, within(46 * GIB))

    assert largest is not None
    fewer = next(switch for switch in switches(LARGE, within(46 * GIB)) if "data.max_anchors" in switch.overrides[0])
    assert fewer.overrides == (f"data.max_anchors={largest.max_anchors}",)
    assert 512 < largest.max_anchors < 1024


def test_of_the_chunk_lengths_one_is_offered_so_that_every_other_switch_is() -> None:
    names = [switch.name for switch in switches(LARGE, within(95 * GIB))]

    assert len([name for name in names if name.startswith("loss chunks")]) == 1
    assert "no fp32 masters" in names
    assert len(names) <= 5


def test_the_largest_step_says_where_it_is_an_extrapolation() -> None:
    far, near = largest_fit(LARGE, within(95 * GIB)), largest_fit(LARGE, within(46 * GIB))

    assert far is not None
    assert near is not None
    assert far.block_tokens > 32_768 > near.block_tokens
    assert (far.is_extrapolated, near.is_extrapolated) == (True, False)


def test_a_time_is_the_work_at_a_measured_rate() -> None:
    work, coarse = plan(LARGE).work, plan(large(loss={"hidden_gradient": "fp8"})).work

    assert work.seconds(788e12) == pytest.approx(0.69, rel=0.05)
    assert work.head / coarse.head == pytest.approx(2 / 1.5)  # one of the two products of a slot takes half the time


def test_a_head_in_fp8_is_a_line_of_the_plan_and_its_absence_a_change_that_is_offered() -> None:
    coarse = large(loss={"hidden_gradient": "fp8"})

    assert size_of(plan(coarse), "load", "head in fp8") == 248_320 * 5120
    assert (
        size_of(plan(coarse, device="cpu"), "load", "head in fp8") == size_of(plan(LARGE), "load", "head in fp8") == 0
    )
    offered = next(switch for switch in switches(coarse) if switch.overrides == ("loss.hidden_gradient=full",))
    assert offered.saved_bytes > 1.1 * GIB
    assert offered.work_factor > 1.05
    assert not any("hidden_gradient" in text for switch in switches(LARGE) for text in switch.overrides)


def test_a_loss_that_asks_for_auto_is_planned_in_fp8_where_it_can_be() -> None:
    auto = large(loss={"hidden_gradient": "auto"})

    assert plan(auto).stages == plan(large(loss={"hidden_gradient": "fp8"})).stages
    assert any("does not multiply float8" in text for text in plan(auto).not_modelled)
    harmed = large(loss={"hidden_gradient": "auto", "terms": {"kl": 1.0}})
    assert size_of(plan(harmed), "load", "head in fp8") == 0
    assert not any("float8" in text for text in plan(harmed).not_modelled)


def test_room_for_the_head_in_fp8_is_offered_with_the_time_that_it_saves() -> None:
    (offered,) = (use for use in uses(LARGE, within(95 * GIB)) if use.overrides == ("loss.hidden_gradient=auto",))

    assert offered.saved_bytes < 0
    assert offered.work_factor < 0.95


specs = st.builds(
    lambda anchors, block, rows, hidden, terms, checkpointing, device, attention: (
        tiny_spec(
            target={"hidden_size": hidden, "vocab_size": 5000},
            drafter={"block_size": block, "attention": attention},
            data={"row_tokens": rows, "max_anchors": anchors, "noise": NoiseSpec()},
            loss={"terms": terms, "chunk_tokens": 256},
            train={"activation_checkpointing": checkpointing},
        ),
        device,
    ),
    anchors=st.integers(1, 200),
    block=st.integers(2, 32),
    rows=st.integers(64, 600),
    hidden=st.sampled_from([32, 64, 256]),
    terms=st.sampled_from([{"ce": 1.0}, {"ce": 1.0, "kl": 0.1}, {"ce": 1.0, "cap": 0.1}]),
    checkpointing=st.sampled_from(["none", "non_reentrant"]),
    device=st.sampled_from(["cpu", "cuda"]),
    attention=st.sampled_from(["auto", "sdpa"]),
)


@given(specs, st.integers(1, 50))
@settings(max_examples=20)
def test_more_anchors_never_need_less(drawn: tuple[DFlashSpec, str], more: int) -> None:
    spec, device = drawn
    larger = replace(spec, data=replace(spec.data, max_anchors=spec.data.max_anchors + more))

    before, after = plan(spec, device=device), plan(larger, device=device)

    assert after.peak.allocated_bytes >= before.peak.allocated_bytes * 0.98  # a chunk of attention may be cut elsewhere


@given(specs)
@settings(max_examples=12)
def test_no_switch_raises_the_peak_and_no_line_is_negative(drawn: tuple[DFlashSpec, str]) -> None:
    spec, device = drawn
    today = plan(spec, device=device)

    assert all(component.size_bytes >= 0 for stage in today.stages for component in stage.components)
    for switch in switches(spec, partial(plan, device=device)):
        assert switch.plan.peak.allocated_bytes < today.peak.allocated_bytes
        assert switch.work_factor > 0


@given(specs, st.sampled_from(["float32", "none"]), st.sampled_from(["float32", "bfloat16"]))
@settings(max_examples=12)
def test_fewer_bytes_of_state_never_need_more(drawn: tuple[DFlashSpec, str], master: str, moment: str) -> None:
    spec, device = drawn
    leaner = replace(spec, optim=OptimSpec(master_dtype=master, moment_dtype=moment))  # type: ignore[arg-type]
    full = replace(spec, optim=OptimSpec())

    assert (
        plan(leaner, device=device).stage("load").allocated_bytes
        <= plan(full, device=device).stage("load").allocated_bytes
    )
