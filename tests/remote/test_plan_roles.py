"""The plan of a training by role: a target rank's memory against torch's books, and what decides a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.books import Books
from remote.balance import predicted
from remote.drafter import queue
from remote.drafter import target as trainer
from remote.drafter.target import load_target
from remote.plan import plan
from remote.plan.roles import RolesPlan, roles_plan
from remote.plan.sizes import sizes
from remote.plan.target import CAPTURE_TOKENS, OUTBOX, target_pass_bytes
from remote.spec import TargetSpec
from tests.remote.test_plan import large, small_spec

GIB = 2**30


def by_role(capacity_bytes: int | None = None, *, device: str = "cuda", **roles: int) -> RolesPlan:
    spec = large(
        data={"hidden_states": "online"},
        roles={"target": 5, "drafter": 3, "queue": 20} | roles,
        train={"accumulation": 3},
    )
    found = roles_plan(spec, plan(spec, capacity_bytes=capacity_bytes, device=device))
    assert found is not None
    return found


def test_one_process_has_no_roles() -> None:
    assert roles_plan(large(), plan(large())) is None


def test_the_plan_of_a_target_knows_the_trainers_own_constants() -> None:
    assert OUTBOX == queue.OUTBOX
    assert CAPTURE_TOKENS == trainer._CAPTURE_TOKENS


def test_a_target_rank_holds_its_weights_and_the_batches_that_it_sends() -> None:
    target = by_role().target
    assert target is not None

    sizes = {line.name: line.size_bytes for line in target.components}
    assert sizes["target model"] == 2 * 26_895_998_464
    assert sizes["hidden states"] == 3 * 8000 * 61_440
    assert 0.5 * GIB < sizes["a pass of the target"] < 2 * GIB
    assert 52 * GIB < target.driver_bytes < 55 * GIB


def test_each_role_is_judged_by_its_own_card() -> None:
    verdicts = {role.name: role.verdict for role in by_role(40 * GIB).each}

    assert verdicts["target"] == "does not fit"
    assert [role.verdict for role in by_role().each] == [None, None]
    assert {role.verdict for role in by_role(139 * GIB).each} == {"fits"}


def test_a_drafter_rank_must_fit_what_the_plan_says_smoke_runs_and_all() -> None:
    spec = large(data={"hidden_states": "online"}, roles={"target": 5, "drafter": 3, "queue": 20}, train={"accumulation": 3})  # fmt: skip
    capacity = round(plan(spec).driver_bytes * 1.1)
    fits, seen = (plan(spec, capacity_bytes=capacity, residuals=left) for left in ({}, {"backward": [20 * GIB]}))

    for made, verdict in ((fits, "fits"), (seen, "does not fit")):
        found = roles_plan(spec, made)
        assert found is not None
        assert found.target is not None
        assert found.drafter.driver_bytes == made.driver_bytes
        assert found.drafter.verdict == made.verdict == verdict
        assert found.machine_bytes == 3 * made.driver_bytes + 5 * found.target.driver_bytes


def test_the_queue_is_its_depth_in_batches_of_hidden_states() -> None:
    found = by_role()

    assert (found.batch_bytes, found.queue_bytes) == (8000 * 61_440, 20 * 8000 * 61_440)


def test_a_step_is_as_long_as_its_slower_side_takes() -> None:
    """3 batches a step: 3 drafters at 0.9 s give 3.3 a second; 5 targets at 0.8 s give 6.3, at 3 s 1.7."""
    found = by_role()

    assert found.step_s(0.8, 0.9) == pytest.approx(0.9)
    assert found.step_s(3.0, 0.9) == pytest.approx(1.8)
    assert found.least_step_s is not None
    assert found.least_step_s == found.step_s(found.each[0].least_batch_s or 0, found.drafter.least_batch_s or 0)


def test_a_target_batch_is_two_flop_a_weight_and_token_at_the_least() -> None:
    """docs/many-gpus.md: 24.35 billion parameters over 8,000 tokens, measured to take 0.815 s."""
    target = by_role().target
    assert target is not None

    assert target.batch_flop == pytest.approx(2 * 24.35e9 * 8000, rel=0.01)
    assert target.least_batch_s is not None
    assert 0.3 < target.least_batch_s < 0.815


def test_drafters_without_targets_share_the_batches_of_a_step() -> None:
    found = by_role(target=0)

    assert (found.target, found.queue_bytes) == (None, 0)
    assert found.step_s(0.0, 0.9) == pytest.approx(0.9)


def test_processes_of_one_machine_without_cards_take_its_memory_together() -> None:
    found = by_role(device="cpu")

    assert found.machine_bytes == sum(role.num_ranks * role.driver_bytes for role in found.each)
    assert [role.least_batch_s for role in found.each] == [None, None]


def test_the_side_that_will_wait_is_foretold_from_seconds_a_batch() -> None:
    """A batch of all: 3 drafters at 0.9 s need 0.3 s, 5 targets at 0.5 s 0.1 s, so each target waits two thirds of its time."""
    sides = predicted(5, 3, 0.5, 0.9)

    assert sides.bound == "drafter-bound"
    assert sides.target.wait_share == pytest.approx(2 / 3)
    assert sides.drafter.wait_share == 0
    assert predicted(1, 7, 0.5, 0.9).bound == "target-bound"
    assert sides.balanced == (3, 5)


@pytest.mark.slow
def test_a_pass_of_a_real_target_takes_no_more_than_its_plan_and_more_than_half(
    tiny_target_spec: TargetSpec, tmp_path: Path
) -> None:
    spec = small_spec(data={"row_tokens": 512}, target=vars(tiny_target_spec), drafter={"captured_layers": [1, 2, 4]})
    target = load_target(spec.target, cache=tmp_path, device="cpu", dtype=torch.float32)
    ids_S, document_S, position_S = torch.arange(512) % 200, torch.zeros(512, dtype=torch.long), torch.arange(512)
    at = sizes(spec, device="cpu")
    left_bytes = 512 * (at.captured + 1) * at.hidden * at.element_bytes

    books = Books()
    weights = [weight for layer in target.decoder.layers for weight in layer.parameters()]
    books.alive = {weight.untyped_storage()._cdata: 0 for weight in weights}  # there before, whatever views them
    with books:
        target.capture(ids_S, document_S, position_S, layers=spec.drafter.captured_layers)

    planned = target_pass_bytes(spec, at)
    assert planned / 2 < books.peak_bytes - left_bytes <= planned
