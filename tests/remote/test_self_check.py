"""What `auto` takes on a card: own kernels that pass their check there, else the plain path, and the log says why."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from remote.drafter import self_check, workbench
from remote.drafter.attention import Backend
from remote.drafter.model import DFlashDrafter, DraftCache
from remote.drafter.self_check import Trial, Verdict
from remote.drafter.workbench import Checks
from remote.report import UserFault
from tests.remote.cuda import CPU, CUDA, in_interpreter, needs_cuda
from tests.remote.packed import relative_error
from tests.remote.specs import tiny_spec

SPEC = tiny_spec(
    drafter={"layer_types": ["sliding", "full"], "sliding_window": 6},
    loss={"terms": {"ce": 1.0, "kl": 0.15, "cap": 0.05}},
)
PASSED = Verdict(True, "error 4.0e-03 against float64 on this device, 2.0e-02 is allowed")
FAILED = Verdict(False, "their check failed here: error 3.1e-01 against float64 on this device, 2.0e-02 is allowed")


def saying(verdict: Verdict) -> workbench.Check:
    return lambda spec, device, dtype: verdict


def never(*_: object) -> Verdict:
    raise AssertionError("nobody had a choice to make")


def trial(ours: Callable[..., Sequence[Tensor]]) -> Trial:
    return Trial(ours, lambda x: [x * x], [torch.randn(40, generator=torch.Generator().manual_seed(0))])


def test_auto_takes_the_kernels_where_their_checks_pass() -> None:
    chosen = workbench.choose(SPEC, CUDA, checks=Checks(saying(PASSED), saying(PASSED)))

    assert (chosen.backend.name, chosen.is_fused) == ("triton", True)
    assert chosen.reasons["attention"] == f"triton: auto: draftyard's own kernels, {PASSED.reason}"
    assert chosen.reasons["kernels"].startswith(f"triton: auto, {PASSED.reason}")


def test_auto_takes_the_plain_path_where_a_check_fails_and_says_the_number() -> None:
    chosen = workbench.choose(SPEC, CUDA, checks=Checks(saying(FAILED), saying(FAILED)))

    assert (chosen.backend.name, chosen.is_fused) == ("flex", False)
    assert all("error 3.1e-01" in chosen.reasons[name] for name in ("attention", "kernels"))


def test_each_of_the_two_is_judged_by_itself() -> None:
    chosen = workbench.choose(SPEC, CUDA, checks=Checks(saying(FAILED), saying(PASSED)))

    assert (chosen.backend.name, chosen.is_fused) == ("flex", True)


def test_an_obstacle_is_named_and_nothing_is_tried() -> None:
    verdict = self_check.check_attention(tiny_spec(drafter={"head_dim": 24}), CPU, torch.float32)

    assert verdict == Verdict(False, "Triton needs CUDA, the device is cpu")


def test_what_the_recipe_names_is_not_checked_and_a_processor_has_nothing_to_check() -> None:
    checks = Checks(never, never)
    plain = tiny_spec(drafter={"attention": "flex"}, train={"kernels": "torch"})

    assert workbench.choose(plain, CUDA, checks=checks).backend.name == "flex"
    assert workbench.choose(SPEC, CPU, checks=checks).reasons["kernels"].startswith("torch: auto, Triton needs CUDA")
    with pytest.raises(UserFault, match=r"train\.kernels is triton, which cannot train here: Triton needs CUDA"):
        workbench.choose(tiny_spec(train={"kernels": "triton"}), CPU, checks=checks)


def test_a_function_that_is_off_fails_with_the_number_and_one_that_is_right_passes() -> None:
    right = self_check.judge([trial(lambda x: [x**2])], CPU, torch.float32)
    off = self_check.judge([trial(lambda x: [x * x]), trial(lambda x: [1.05 * x * x])], CPU, torch.float32)

    assert right.is_passed
    assert right.reason.endswith("against float64 on this device, 1.0e-04 is allowed")
    assert off == Verdict(
        False, "their check failed here: error 5.0e-02 against float64 on this device, 1.0e-04 is allowed"
    )


def test_a_value_that_is_right_with_a_gradient_that_is_not_fails() -> None:
    wrong = trial(lambda x: [(x * x).detach() + 0.0 * x])

    assert not self_check.judge([wrong], CPU, torch.float32).is_passed


def test_a_nan_fails_and_an_exception_fails_with_its_text() -> None:
    nan = self_check.judge([trial(lambda x: [x * torch.nan])], CPU, torch.float32)
    broken = self_check.judge([trial(lambda x: [x @ torch.ones(3)])], CPU, torch.float32)

    assert not nan.is_passed
    assert not broken.is_passed
    assert broken.reason.startswith("their check failed here: RuntimeError: ")


@pytest.mark.slow  # the interpreter takes seconds
@in_interpreter
@pytest.mark.parametrize("trials", [self_check.attention_trials, self_check.kernel_trials])
def test_the_kernels_pass_their_own_check(trials: Callable[..., Sequence[Trial]]) -> None:
    before = torch.random.get_rng_state()

    verdict = self_check.judge(trials(SPEC, CPU, torch.float32), CPU, torch.float32)

    assert verdict.is_passed, verdict
    assert torch.equal(torch.random.get_rng_state(), before), "training would begin with other numbers"


@pytest.mark.slow
@in_interpreter
def test_a_drafter_by_kernels_drafts_what_the_plain_one_drafts() -> None:
    """Decoding: one block at a time over a context that grows."""
    drafted = []
    for name, is_fused in (("triton", True), ("eager", False)):
        model = DFlashDrafter(SPEC.target, SPEC.drafter, backend=Backend(name, "test"), is_fused=is_fused)
        model.init_weights(torch.Generator().manual_seed(0))
        generator, cache = torch.Generator().manual_seed(1), DraftCache(SPEC.drafter.num_layers)
        for num_new in (9, 1, 3):
            features = torch.randn(num_new, 3 * SPEC.target.hidden_size, generator=generator)
            block = torch.randn(SPEC.drafter.block_size, SPEC.target.hidden_size, generator=generator)
            drafted.append(model.draft(features, cache, block))

    for ours, plain in zip(drafted[:3], drafted[3:], strict=True):
        assert relative_error(ours, plain) < 1e-5


# ---- on a card


@needs_cuda
def test_on_a_card_the_kernels_pass_quickly_and_leave_nothing() -> None:
    """At the widths of the 27B drafter; the first round compiles what training would compile."""
    spec = tiny_spec(
        target={"hidden_size": 5120, "vocab_size": 248_320},
        drafter={"intermediate_size": 17_408, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 32},
        loss={"terms": {"ce": 1.0, "kl": 0.15}},
    )
    first = workbench.choose(spec, CUDA)
    before, started_s = torch.cuda.memory_allocated(), time.monotonic()

    again = workbench.choose(spec, CUDA)

    assert time.monotonic() - started_s < 3
    assert torch.cuda.memory_allocated() <= before
    assert (first.backend.name, first.is_fused) == ("triton", True), first.reasons
    assert (again.backend.name, again.is_fused) == ("triton", True), again.reasons
