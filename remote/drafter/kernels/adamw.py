"""AdamW in one visit of every number: gradient, master and moments in; master, moments and the rounded weight out.

Loshchilov and Hutter, arXiv 1711.05101, as torch's fused AdamW computes it, in float32 whatever is stored. The divisor
that clips and the latch that forbids the update are read on the device. Beside it the global norm of the gradients, in
one read of each and without a float32 copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from remote.drafter.kernels.launch import RowTile, can_launch, jit, on_its_device, tl

STEP = RowTile(512, 4)
SQUARES = RowTile(4096, 8)
SPAN = 16  # tiles that one program of the norm adds up
PLACES = ("first",)  # sizes of weights never change, and what divides them decides how wide a read may be


@dataclass(frozen=True)
class Rates:
    """Of one update. `step` counts from 1."""

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class Stored:
    """What an update reads and writes of one trained tensor; all of one shape, contiguous."""

    weight: Tensor
    master: Tensor | None  # fp32; None: the weight itself is moved
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @property
    def moved(self) -> Tensor:
        return self.weight if self.master is None else self.master


def global_norm(grads: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of all together, a float32 scalar on their device."""
    if not all(can_launch(grad) for grad in grads):
        return global_norm_reference(grads)
    return _global_norm(grads[0], grads)


def global_norm_reference(grads: Sequence[Tensor]) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads])
    )
    return norm


@on_its_device
def _global_norm(_: Tensor, grads: Sequence[Tensor]) -> Tensor:
    """Partial sums in a fixed order: the same bits every time."""
    span = SPAN * SQUARES.size
    counts = [-(-grad.numel() // span) for grad in grads]
    partial = torch.empty(sum(counts), dtype=torch.float32, device=grads[0].device)
    first = 0
    for grad, count in zip(grads, counts, strict=True):
        if count:
            _square_kernel[(count,)](
                grad.contiguous(), partial, grad.numel(), first, TILE=SQUARES.size, SPAN=span, num_warps=SQUARES.warps
            )
        first += count
    return partial.sum(dtype=torch.float64).sqrt().float()


@on_its_device
def adamw_step(
    grad: Tensor, stored: Stored, rates: Rates, *, divisor: Tensor | None, is_closed: Tensor, tile: RowTile = STEP
) -> None:
    """Moves `stored` by grad / divisor; where `is_closed`, a device scalar, is not 0 nothing changes."""
    if not can_launch(grad):
        adamw_step_reference(grad, stored, rates, divisor=divisor, is_closed=is_closed)
        return
    count = grad.numel()
    _step_kernel[(-(-count // tile.size),)](
        grad.contiguous(), stored.moved, stored.exp_avg, stored.exp_avg_sq, stored.weight,
        is_closed if divisor is None else divisor, is_closed, count,
        rates.lr * rates.weight_decay, rates.lr / (1 - rates.beta1**rates.step), (1 - rates.beta2**rates.step) ** -0.5,
        rates.beta1, 1 - rates.beta1, rates.beta2, 1 - rates.beta2, rates.eps,
        TILE=tile.size, HAS_DIVISOR=divisor is not None, HAS_MASTER=stored.master is not None, num_warps=tile.warps,
    )  # fmt: skip


def adamw_step_reference(
    grad: Tensor, stored: Stored, rates: Rates, *, divisor: Tensor | None, is_closed: Tensor
) -> None:
    """The same by torch's own fused AdamW, with a float32 copy of whatever is not float32; torch divides a
    float32 gradient in its own place."""
    kept = [stored.moved.detach(), stored.exp_avg, stored.exp_avg_sq]
    moved, exp_avg, exp_avg_sq = (tensor.float() for tensor in kept)  # no copy where it is fp32 already
    done = torch.full((), rates.step - 1.0, device=grad.device)
    adamw(
        [moved], [grad.float()], [exp_avg], [exp_avg_sq], [], [done],
        fused=True, grad_scale=divisor, found_inf=is_closed, amsgrad=False, maximize=False,
        beta1=rates.beta1, beta2=rates.beta2, lr=rates.lr, weight_decay=rates.weight_decay, eps=rates.eps,
    )  # fmt: skip
    for tensor, now in zip(kept, (moved, exp_avg, exp_avg_sq), strict=True):
        if tensor is not now:
            tensor.copy_(now)
    if stored.master is not None:
        stored.weight.copy_(stored.master)


@jit(PLACES)
def _square_kernel(grad_ptr, partial_ptr, count, first, TILE: tl.constexpr, SPAN: tl.constexpr):
    """Σ grad² of one span."""
    program = tl.program_id(0)
    start = program.to(tl.int64) * SPAN
    total = tl.zeros([TILE], dtype=tl.float32)
    for low in range(0, SPAN, TILE):
        at = start + low + tl.arange(0, TILE)
        grad = tl.load(grad_ptr + at, mask=at < count, other=0.0).to(tl.float32)
        total += grad * grad
    tl.store(partial_ptr + first + program, tl.sum(total, 0))


@jit()
def _step_kernel(
    grad_ptr, moved_ptr, exp_avg_ptr, exp_avg_sq_ptr, weight_ptr, divisor_ptr, closed_ptr, count,
    decay, step_size, correction, beta1, rest1, beta2, rest2, eps,
    TILE: tl.constexpr, HAS_DIVISOR: tl.constexpr, HAS_MASTER: tl.constexpr,
):  # fmt: skip
    """One tile. What goes into the moments is divided as IEEE says; the step is some ulps of a number far below the weight."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_in = at < count
    grad = tl.load(grad_ptr + at, mask=is_in, other=0.0).to(tl.float32)
    moved = tl.load(moved_ptr + at, mask=is_in, other=0.0).to(tl.float32)
    exp_avg = tl.load(exp_avg_ptr + at, mask=is_in, other=0.0).to(tl.float32)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + at, mask=is_in, other=0.0).to(tl.float32)
    if HAS_DIVISOR:
        grad = tl.div_rn(grad, tl.load(divisor_ptr))
    moved -= decay * moved
    exp_avg = beta1 * exp_avg + rest1 * grad
    exp_avg_sq = beta2 * exp_avg_sq + rest2 * grad * grad
    moved -= step_size * exp_avg / (tl.sqrt(exp_avg_sq) * correction + eps)
    if tl.load(closed_ptr) == 0.0:
        tl.store(exp_avg_ptr + at, exp_avg.to(exp_avg_ptr.dtype.element_ty), mask=is_in)
        tl.store(exp_avg_sq_ptr + at, exp_avg_sq.to(exp_avg_sq_ptr.dtype.element_ty), mask=is_in)
        tl.store(moved_ptr + at, moved.to(moved_ptr.dtype.element_ty), mask=is_in)
        if HAS_MASTER:
            tl.store(weight_ptr + at, moved.to(weight_ptr.dtype.element_ty), mask=is_in)
