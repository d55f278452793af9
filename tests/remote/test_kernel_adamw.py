"""The update's kernels against AdamW in float64 and against torch's own fused one, number by number."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from remote.drafter.kernels import adamw
from remote.drafter.kernels.adamw import Rates, Stored
from remote.drafter.kernels.launch import RowTile
from tests.remote.cuda import CPU, CUDA, in_interpreter, needs_cuda

RATES = Rates(step=3, lr=6e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
SHAPE = (37, 61)  # several tiles and a rest
TILE = RowTile(512, 4)
ULP = 2.0**-23
KINDS = {  # dtypes of weight, master, moments
    "fp32 weights": (torch.float32, None, torch.float32),
    "masters": (torch.float16, torch.float32, torch.float32),  # the interpreter rounds to bf16 by cutting: see below
    "masters, rounded moments": (torch.float16, torch.float32, torch.float16),
    "no masters": (torch.float16, None, torch.float32),
}


def made(kind: str, *, device: torch.device = CPU, half: torch.dtype = torch.float16) -> tuple[Tensor, Stored]:
    """A gradient and what it moves, after some steps: moments are of the gradient's size."""
    weight_dtype, master_dtype, moment_dtype = (half if dtype == torch.float16 else dtype for dtype in KINDS[kind])
    generator = torch.Generator().manual_seed(0)
    weight, grad, exp_avg, noise = (torch.randn(SHAPE, generator=generator).to(device) for _ in range(4))
    assert weight_dtype is not None
    assert moment_dtype is not None
    exp_avg = (0.1 * exp_avg).to(moment_dtype)
    exp_avg_sq = (0.1 * noise.square() + 1e-4).to(moment_dtype)
    master = None if master_dtype is None else weight.to(master_dtype)
    return grad.to(weight_dtype), Stored(weight.to(weight_dtype), master, exp_avg, exp_avg_sq)


def copied(stored: Stored) -> Stored:
    return Stored(*(None if each is None else each.clone() for each in tensors(stored)))  # type: ignore[arg-type]


def tensors(stored: Stored) -> tuple[Tensor | None, ...]:
    return stored.weight, stored.master, stored.exp_avg, stored.exp_avg_sq


def exact(grad: Tensor, stored: Stored, divisor: float) -> list[tuple[Tensor, Tensor]]:
    """The textbook in float64: what is moved and both moments, each with the size of what was added up."""
    moved, exp_avg, exp_avg_sq = (each.double() for each in (stored.moved, stored.exp_avg, stored.exp_avg_sq))
    gradient = grad.double() / divisor
    decayed = moved * (1 - RATES.lr * RATES.weight_decay)
    parts = RATES.beta1 * exp_avg, (1 - RATES.beta1) * gradient
    exp_avg = parts[0] + parts[1]
    exp_avg_sq = RATES.beta2 * exp_avg_sq + (1 - RATES.beta2) * gradient**2
    mean = exp_avg / (1 - RATES.beta1**RATES.step)
    spread = (exp_avg_sq / (1 - RATES.beta2**RATES.step)).sqrt()
    step = RATES.lr * mean / (spread + RATES.eps)
    return [
        (decayed - step, moved.abs() + step.abs()), (exp_avg, parts[0].abs() + parts[1].abs()), (exp_avg_sq, exp_avg_sq)
    ]  # fmt: skip


def check(kind: str, *, device: torch.device = CPU, half: torch.dtype = torch.float16) -> None:
    """Within an ulp of a number as large as what was added up, and a half for each rate that is no fp32 number."""
    grad, stored = made(kind, device=device, half=half)
    by_torch = copied(stored)
    divisor, is_open = torch.tensor(1.7, device=device), torch.zeros((), device=device)
    oracles = exact(grad, stored, float(divisor))

    adamw.adamw_step(grad, stored, RATES, divisor=divisor, is_closed=is_open, tile=TILE)
    adamw.adamw_step_reference(grad.clone(), by_torch, RATES, divisor=divisor, is_closed=is_open)

    for now, (oracle, size) in zip((stored.moved, stored.exp_avg, stored.exp_avg_sq), oracles, strict=True):
        allowed = size * (2 * ULP if now.dtype == torch.float32 else torch.finfo(now.dtype).eps)
        assert ((now.double() - oracle).abs() <= allowed).all()
    for ours, theirs in zip(tensors(stored), tensors(by_torch), strict=True):
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=2 * torch.finfo(ours.dtype).eps, atol=2 * ULP)
    if stored.master is not None:
        assert torch.equal(stored.weight, stored.master.to(stored.weight.dtype))


@in_interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_equals_float64_and_torchs_own(kind: str) -> None:
    """float16: the interpreter rounds to bfloat16 otherwise than a card; the card's test takes bfloat16."""
    check(kind)


@in_interpreter
def test_without_a_divisor_nothing_is_divided() -> None:
    grad, stored = made("masters")
    divided, is_open = copied(stored), torch.zeros(())

    adamw.adamw_step(grad, stored, RATES, divisor=None, is_closed=is_open, tile=TILE)
    adamw.adamw_step(grad, divided, RATES, divisor=torch.ones(()), is_closed=is_open, tile=TILE)

    assert all(torch.equal(a, b) for a, b in zip(tensors(stored), tensors(divided), strict=True) if a is not None)  # type: ignore[arg-type]


@in_interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_latch_changes_no_bit(kind: str) -> None:
    grad, stored = made(kind)
    before, bad = copied(stored), torch.full((), math.nan)

    adamw.adamw_step(grad * bad, stored, RATES, divisor=bad, is_closed=torch.ones(()), tile=TILE)

    assert all(torch.equal(a, b) for a, b in zip(tensors(stored), tensors(before), strict=True) if a is not None)  # type: ignore[arg-type]


@in_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_norm_of_several_gradients_is_that_of_float64(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    span = adamw.SPAN * adamw.SQUARES.size
    grads = [torch.randn(size, generator=generator).to(dtype) for size in ((span + 1,), (3, 50), (0,), (7,))]

    norm = adamw.global_norm(grads)

    expected = torch.cat([grad.double().flatten() for grad in grads]).norm()
    assert float(norm) == pytest.approx(float(expected), rel=1e-6)
    assert torch.equal(norm, adamw.global_norm(grads))
    assert norm.dtype == torch.float32


@in_interpreter
def test_one_number_that_is_not_finite_makes_the_norm_so() -> None:
    grads = [torch.ones(10), torch.tensor([1.0, math.inf])]

    assert not torch.isfinite(adamw.global_norm(grads))


# ---- on a card


@needs_cuda
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_on_cuda_equals_float64_and_torchs_own(kind: str) -> None:
    check(kind, device=CUDA, half=torch.bfloat16)


@needs_cuda
def test_on_cuda_other_steps_and_sizes_compile_nothing_anew() -> None:
    grad, stored = made("masters", device=CUDA, half=torch.bfloat16)
    is_open = torch.zeros((), device=CUDA)
    adamw.adamw_step(grad, stored, RATES, divisor=is_open + 1, is_closed=is_open)
    known = len(adamw._step_kernel.device_caches[0][0])

    for step in (1, 16, 17):
        adamw.adamw_step(grad, stored, replace(RATES, step=step, lr=1e-3), divisor=is_open + 1, is_closed=is_open)

    assert len(adamw._step_kernel.device_caches[0][0]) == known
