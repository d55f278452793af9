"""What `auto` takes on a card: own kernels that pass their check there, else the plain path, and the log says why."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from remote.drafter import loss_fused, self_check, workbench
from remote.drafter.attention import Backend
from remote.drafter.kernels import adamw, attention, body
from remote.drafter.kernels.adamw import Stored
from remote.drafter.keys import KeyValues
from remote.drafter.model import DFlashDrafter, DraftCache
from remote.drafter.self_check import Trial, Verdict
from remote.drafter.teacher import Expectation, expect
from remote.drafter.workbench import Checks
from remote.report import UserFault
from remote.spec import DFlashSpec, LossSpec
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


def test_a_rank_that_runs_the_target_alone_computes_no_check() -> None:
    """On a card's device that is not there: whatever were computed would raise, or be refused for it."""
    chosen = workbench.choose(SPEC, CUDA, checks=workbench.UNASKED)

    assert chosen.dtype is torch.bfloat16
    assert "this rank runs the target alone" in chosen.reasons["attention"] + chosen.reasons["kernels"]


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


def test_each_result_is_judged_by_itself() -> None:
    """A plain path that is far off in one of them grants nothing to the others, and not everything to that one."""

    def off(*shares: float) -> Callable[[Tensor], list[Tensor]]:
        return lambda x: [(x * x) * (1 + share) if x.dtype != torch.float64 else x * x for share in shares]

    def judged(ours: Sequence[float], plain: Sequence[float]) -> bool:
        tried = trial(off(*ours))._replace(plain=off(*plain), has_gradients=False)
        return self_check.judge([tried], CPU, torch.float32).is_passed

    assert judged((0.02, 0.0), (0.01, 0.0))
    assert not judged((0.0, 0.02), (0.01, 0.0))
    assert not judged((1.1, 0.0), (0.5, 0.0))


# ---- Kernels that are wrong. Without Triton ours compute by the plain formulas: what is broken here is the only error.


def scaled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Its value, 5 % too large."""

    def broken(*arguments: Any, **named: Any) -> Any:
        found = function(*arguments, **named)
        return tuple(1.05 * each for each in found) if isinstance(found, tuple) else 1.05 * found

    return broken


def without_gradient(place: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Its value, and no gradient for the argument at that place."""

    def breaks(function: Callable[..., Any]) -> Callable[..., Any]:
        def broken(*arguments: Any) -> Any:
            given = list(arguments)
            given[place] = given[place].detach() + 0.0 * given[place]
            return function(*given)

        return broken

    return breaks


def attending(breaks: Callable[..., Any]) -> Callable[..., Any]:
    """Of the function that a plan of attention gives; gradients are those of query, context keys, ... own values."""

    def breaks_plan(plan: Callable[..., Any]) -> Callable[..., Any]:
        def broken_plan(*arguments: Any, **named: Any) -> Any:
            right = plan(*arguments, **named)
            attend = breaks(lambda query, *keys: right(query, KeyValues(*keys)))
            return lambda query, keys, _=None: attend(query, *keys)

        return broken_plan

    return breaks_plan


def chunked(**wrong: float) -> Callable[..., Any]:
    """A chunk of the loss with a gradient that is too large by so much."""

    def breaks(gradient: Callable[..., Any]) -> Callable[..., Any]:
        def broken(*arguments: Any, out_MV: Tensor | None, **named: Any) -> Any:
            found = gradient(*arguments, out_MV=out_MV, **named)
            if out_MV is not None:
                out_MV.mul_(wrong.get("gradient", 1.0))
            return found if found is None else found * wrong.get("value", 1.0)

        return broken

    return breaks


def stepping(after: Callable[[Stored], object], **named_wrong: Any) -> Callable[..., Any]:
    """An update that is right but for what is done afterwards, or for what it was told."""

    def breaks(step: Callable[..., Any]) -> Callable[..., Any]:
        def broken(grad: Tensor, stored: Stored, rates: Any, **named: Any) -> None:
            step(grad, stored, rates, **(named | named_wrong))
            after(stored)

        return broken

    return breaks


def stale(step: Callable[..., Any]) -> Callable[..., Any]:
    """An update that writes the master alone."""

    def broken(grad: Tensor, stored: Stored, rates: Any, **named: Any) -> None:
        before = stored.weight.clone()
        step(grad, stored, rates, **named)
        if stored.master is not None:
            stored.weight.copy_(before)

    return broken


def of_the_weight(step: Callable[..., Any]) -> Callable[..., Any]:
    """An update that takes the weight for the master."""

    def broken(grad: Tensor, stored: Stored, rates: Any, **named: Any) -> None:
        if stored.master is not None:
            stored.master.copy_(stored.weight)
        step(grad, stored, rates, **named)

    return broken


def blind(step: Callable[..., Any]) -> Callable[..., Any]:
    return lambda grad, *arguments, **named: step(torch.zeros_like(grad), *arguments, **named)


UPDATES = {
    "master": stepping(lambda stored: stored.moved.add_(0.05)),
    "weight": stepping(lambda stored: stored.weight.mul_(1.1)),
    "exp_avg": stepping(lambda stored: stored.exp_avg.mul_(-5)),
    "exp_avg_sq": stepping(lambda stored: stored.exp_avg_sq.fill_(7)),
    "nan": stepping(lambda stored: stored.exp_avg_sq.fill_(torch.nan)),
    "gradient": blind,
    "divisor": stepping(lambda stored: None, divisor=None),
}
MASTERED = {"weight not written": stale, "weight for master": of_the_weight}
BROKEN = [
    *((attention, "plan", attending(breaks)) for breaks in (scaled, *map(without_gradient, range(5)))),
    *((body, name, breaks) for name in ("rms_norm", "head_norm_rotate") for breaks in (scaled, *map(without_gradient, range(2)))),
    *((body, "norm_linears", breaks) for breaks in (scaled, *map(without_gradient, (0, 1, 3, 4)))),
    *((body, "norm_mlp", breaks) for breaks in (scaled, *map(without_gradient, (0, 1, 3, 4, 5)))),
    *((loss_fused, "cross_entropy_gradient", chunked(**{what: 1.3})) for what in ("value", "gradient")),
    (loss_fused, "entropy_gradient", chunked(gradient=3.0)),
    *((adamw, "adamw_step", breaks) for breaks in UPDATES.values()),
    (adamw, "global_norm", scaled),
]  # fmt: skip


def trials_of(spec: DFlashSpec, dtype: torch.dtype) -> chain[Trial]:
    """Of the recipe, and of its target beside the drafter: then the loss reads the target's own rows."""
    beside = replace(spec, data=replace(spec.data, hidden_states="online"))
    kernels = (self_check.kernel_trials(each, CPU, dtype) for each in (spec, beside))
    return chain(self_check.attention_trials(spec, CPU, dtype), *kernels)


def break_it(monkeypatch: pytest.MonkeyPatch, room: Any, name: str, breaks: Callable[..., Any]) -> None:
    if room is body:
        monkeypatch.setattr(body, "FUSED", body.FUSED._replace(**{name: breaks(getattr(body.FUSED, name))}))
    else:
        monkeypatch.setattr(room, name, breaks(getattr(room, name)))


@pytest.mark.slow
@pytest.mark.usefixtures("without_triton")
@pytest.mark.parametrize(("room", "name", "breaks"), BROKEN, ids=[f"{name}-{i}" for i, (_, name, _) in enumerate(BROKEN)])  # fmt: skip
def test_a_broken_kernel_of_any_kind_is_refused(monkeypatch: pytest.MonkeyPatch, room, name: str, breaks) -> None:
    assert self_check.judge(trials_of(SPEC, torch.float32), CPU, torch.float32).is_passed

    break_it(monkeypatch, room, name, breaks)

    refused = self_check.judge(trials_of(SPEC, torch.float32), CPU, torch.float32)
    assert not refused.is_passed
    assert "is allowed" in refused.reason, "it computed, and wrongly"


@pytest.mark.slow
@pytest.mark.usefixtures("without_triton")
@pytest.mark.parametrize("share", [0.0, 2.0])
def test_a_wrong_expectation_is_refused(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """In bfloat16, and with little weight on the target: the plain side must have no part in what is checked."""
    spec = replace(SPEC, loss=LossSpec(terms={"ce": 1.0, "kl": 0.15}))
    assert self_check.judge(self_check.kernel_trials(spec, CPU, torch.bfloat16), CPU, torch.bfloat16).is_passed

    def wrong(last_hidden_SH: Tensor, head_VH: Tensor) -> Expectation:
        made = expect(last_hidden_SH, head_VH)
        return replace(made, rest_SH=made.rest_SH * share)

    monkeypatch.setattr(self_check, "expect", wrong)
    refused = self_check.judge(self_check.kernel_trials(spec, CPU, torch.bfloat16), CPU, torch.bfloat16)
    assert not refused.is_passed
    assert "is allowed" in refused.reason


@pytest.mark.slow
@pytest.mark.usefixtures("without_triton")
@pytest.mark.parametrize("optim", [{}, {"moment_dtype": "bfloat16"}, {"master_dtype": "none"}, {"clip_norm": 0.0}])
def test_an_update_is_checked_with_what_the_recipe_keeps(monkeypatch: pytest.MonkeyPatch, optim) -> None:
    """In bfloat16, where a master may be."""
    seen: list[tuple[Stored, Tensor | None]] = []

    def watched(step: Callable[..., Any]) -> Callable[..., Any]:
        def broken(grad: Tensor, stored: Stored, rates: Any, *, divisor: Tensor | None, is_closed: Tensor) -> None:
            seen.append((stored, divisor))
            step(grad, stored, rates, divisor=divisor, is_closed=is_closed)

        return broken

    def update() -> list[Trial]:
        return [*self_check.kernel_trials(tiny_spec(optim=optim), CPU, torch.bfloat16)][-1:]

    with monkeypatch.context() as patch:
        break_it(patch, adamw, "adamw_step", watched)
        assert self_check.judge(update(), CPU, torch.bfloat16).is_passed
    ((stored, divisor),) = seen
    assert (stored.master is None) is ("master_dtype" in optim)
    assert stored.exp_avg.dtype == stored.exp_avg_sq.dtype == (torch.bfloat16 if "moment_dtype" in optim else torch.float32)  # fmt: skip
    assert (divisor is None) is ("clip_norm" in optim)
    for kind, breaks in (UPDATES | (MASTERED if stored.master is not None else {})).items():
        if kind == "divisor" and divisor is None:
            continue  # there is none to forget
        with monkeypatch.context() as patch:
            break_it(patch, adamw, "adamw_step", breaks)
            assert not self_check.judge(update(), CPU, torch.bfloat16).is_passed, kind


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
