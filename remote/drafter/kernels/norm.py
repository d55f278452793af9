"""RMSNorm alone, before linears, and of heads together with the rotary embedding; what is cheap is recomputed backwards.

Each keeps its input and one float32 a row; no normed copy lives until the backward. x̂ = x / sqrt(mean(x²) + eps), in
float32 whatever the dtype. Shapes: N tokens, H width, Q heads of size D.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from remote.drafter.kernels.launch import can_launch, jit, on_its_device, tl, triton
from remote.drafter.rope import Rotary, rotate, spread_rows

CPU_PROGRAMS = 3  # in the interpreter
LENGTHS = ("num_rows",)


@dataclass(frozen=True)
class Walk:
    """How a gradient kernel is launched: each program walks many rows and adds up one part of the weight's gradient."""

    warps: int
    programs: int  # a multiprocessor


NORM_WARPS, HEAD_WARPS = 8, 4  # of the kernels with a program a row; all four found by timing (`benchmarks.tiles`)
NORM_WALK, HEAD_WALK = Walk(8, 2), Walk(4, 16)


@on_its_device
def rms_norm(x_NH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x̂ · weight."""
    if not can_launch(x_NH):
        return rms_norm_reference(x_NH, weight_H, eps)
    out: Tensor = _Norm.apply(x_NH.contiguous(), weight_H, eps)
    return out


def rms_norm_reference(x_NH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x_NH, weight_H.shape, weight_H, eps)


@on_its_device
def norm_linears(x_NH: Tensor, weight_H: Tensor, eps: float, *matrices: Tensor) -> tuple[Tensor, ...]:
    """The normed input times each matrix (out, H); the normed input is recomputed for the matrices' gradients."""
    if not can_launch(x_NH):
        return norm_linears_reference(x_NH, weight_H, eps, *matrices)
    out: tuple[Tensor, ...] = _NormLinears.apply(x_NH.contiguous(), weight_H, eps, *matrices)
    return out


def norm_linears_reference(x_NH: Tensor, weight_H: Tensor, eps: float, *matrices: Tensor) -> tuple[Tensor, ...]:
    normed_NH = rms_norm_reference(x_NH, weight_H, eps)
    return tuple(F.linear(normed_NH, matrix) for matrix in matrices)


@on_its_device
def head_norm_rotate(x_UQD: Tensor, weight_D: Tensor, eps: float, at: Rotary, spread: int = 1) -> Tensor:
    """Each head normed, then rotated, without a rounding between the two, (N, Q, D).

    U = N, or, with `spread` B > 1, N/B + 1: the rows of `rope.spread_rows`, which are normed once for each token that has one.
    """
    head_dim = x_UQD.shape[-1]
    if not can_launch(x_UQD) or triton.next_power_of_2(head_dim) != head_dim:
        return head_norm_rotate_reference(x_UQD, weight_D, eps, at, spread)
    out: Tensor = _HeadNormRotate.apply(
        x_UQD.contiguous(), weight_D, eps, at.cos.contiguous(), at.sin.contiguous(), spread
    )
    return out


def head_norm_rotate_reference(x_UQD: Tensor, weight_D: Tensor, eps: float, at: Rotary, spread: int = 1) -> Tensor:
    return rotate(spread_rows(rms_norm_reference(x_UQD, weight_D, eps), spread), at)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scale = norm_rows(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        return *norm_gradients(grad_out.contiguous(), *ctx.saved_tensors), None


class _NormLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, *matrices: Tensor) -> tuple[Tensor, ...]:
        normed, scale = norm_rows(x, weight, eps)
        ctx.save_for_backward(x, weight, scale, *matrices)
        ctx.eps = eps
        return tuple(normed @ matrix.T for matrix in matrices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale, *matrices = ctx.saved_tensors
        grad_normed = grads[0] @ matrices[0]
        for grad, matrix in zip(grads[1:], matrices[1:], strict=True):
            grad_normed.addmm_(grad, matrix)
        grad_x, grad_weight = norm_gradients(grad_normed, x, weight, scale)
        del grad_normed
        normed, _ = norm_rows(x, weight, ctx.eps)
        return grad_x, grad_weight, None, *(grad.T @ normed for grad in grads)


class _HeadNormRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, spread: int) -> Tensor:
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.eps, ctx.spread = eps, spread
        return rotated(x, weight, cos, sin, eps, spread=spread)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, cos, sin = ctx.saved_tensors
        grads = rotated_gradients(grad_out.contiguous(), x, weight, cos, sin, ctx.eps, spread=ctx.spread)
        return *grads, None, None, None, None


# One launch each, as `benchmarks.tiles` times them


def norm_rows(x: Tensor, weight: Tensor, eps: float, *, warps: int = NORM_WARPS) -> tuple[Tensor, Tensor]:
    """The normed rows and each row's factor 1 / sqrt(mean(x²) + eps)."""
    (num_rows, width), out = x.shape, torch.empty_like(x)
    scale = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        _norm_kernel[(num_rows,)](
            x, weight, out, scale, eps, WIDTH=width, TILE=triton.next_power_of_2(width), num_warps=warps
        )
    return out, scale


def norm_gradients(
    grad_out: Tensor, x: Tensor, weight: Tensor, scale: Tensor, *, walk: Walk = NORM_WALK
) -> tuple[Tensor, Tensor]:
    """Of the rows and of the weight."""
    (num_rows, width), grad_x = x.shape, torch.empty_like(x)
    partial = _partial_sums(num_rows, width, walk, x.device)
    _norm_gradient_kernel[(partial.shape[0],)](
        grad_out, x, weight, scale, grad_x, partial, num_rows,
        WIDTH=width, TILE=triton.next_power_of_2(width), num_warps=walk.warps,
    )  # fmt: skip
    return grad_x, partial.sum(0).to(weight.dtype)


def rotated(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, *, spread: int = 1, warps: int = HEAD_WARPS
) -> Tensor:
    """Every head normed and rotated."""
    num_rows, (heads, head_dim) = cos.shape[0], x.shape[1:]
    out = x.new_empty(num_rows, heads, head_dim)
    if num_rows:
        _head_kernel[(num_rows,)](
            x, weight, cos, sin, out, eps, x.shape[0] - 1,
            SPREAD=spread, HEADS=heads, HEADS_PAD=triton.next_power_of_2(heads), HALF=head_dim // 2, num_warps=warps,
        )  # fmt: skip
    return out


def rotated_gradients(
    grad_out: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, *,
    spread: int = 1, walk: Walk = HEAD_WALK,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of the heads and of their weight. What many tokens share gets the sum of their gradients, in float32."""
    num_rows, (heads, head_dim), grad_x = cos.shape[0], x.shape[1:], torch.empty_like(x)
    partial = _partial_sums(num_rows, head_dim, walk, x.device)
    programs = partial.shape[0]
    shared = x.new_empty(programs if spread > 1 else 0, heads, head_dim, dtype=torch.float32)
    _head_gradient_kernel[(programs,)](
        grad_out, x, weight, cos, sin, grad_x, partial, shared, num_rows, eps, x.shape[0] - 1,
        SPREAD=spread, HEADS=heads, HEADS_PAD=triton.next_power_of_2(heads), HALF=head_dim // 2, num_warps=walk.warps,
    )  # fmt: skip
    if spread > 1:
        grad_x[-1] = shared.sum(0)
    return grad_x, partial.sum(0).to(weight.dtype)


def _partial_sums(num_rows: int, width: int, walk: Walk, device: torch.device) -> Tensor:
    """One row a program, in a fixed order: the sum has the same bits every time."""
    programs = CPU_PROGRAMS
    if device.type == "cuda":
        programs = walk.programs * torch.cuda.get_device_properties(device).multi_processor_count
    return torch.empty(max(1, min(programs, num_rows)), width, dtype=torch.float32, device=device)


@jit()
def _norm_kernel(x_ptr, weight_ptr, out_ptr, scale_ptr, eps, WIDTH: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILE)
    is_in = at < WIDTH
    x = tl.load(x_ptr + row * WIDTH + at, mask=is_in, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / WIDTH + eps)
    weight = tl.load(weight_ptr + at, mask=is_in, other=0.0).to(tl.float32)
    tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + row * WIDTH + at, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=is_in)


@jit(LENGTHS)
def _norm_gradient_kernel(
    grad_out_ptr, x_ptr, weight_ptr, scale_ptr, grad_x_ptr, partial_ptr, num_rows, WIDTH: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """With g = grad · weight: grad x = scale · (g − x̂ · mean(g · x̂)); grad weight = Σ grad · x̂."""
    program = tl.program_id(0)
    at = tl.arange(0, TILE)
    is_in = at < WIDTH
    weight = tl.load(weight_ptr + at, mask=is_in, other=0.0).to(tl.float32)
    total = tl.zeros([TILE], dtype=tl.float32)
    for row in range(program, num_rows, tl.num_programs(0)):
        place = tl.cast(row, tl.int64) * WIDTH + at
        scale = tl.load(scale_ptr + row)
        normed = tl.load(x_ptr + place, mask=is_in, other=0.0).to(tl.float32) * scale
        grad = tl.load(grad_out_ptr + place, mask=is_in, other=0.0).to(tl.float32)
        total += grad * normed
        grad = grad * weight
        grad = scale * (grad - normed * (tl.sum(grad * normed, 0) / WIDTH))
        tl.store(grad_x_ptr + place, grad.to(grad_x_ptr.dtype.element_ty), mask=is_in)
    tl.store(partial_ptr + program * WIDTH + at, total, mask=is_in)


@jit(("last",))
def _head_kernel(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, eps, last,
    SPREAD: tl.constexpr, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """All heads of one token. Both halves of cos and sin are alike, so the first serves for both."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_PAD)[:, None]
    at = tl.arange(0, HALF)[None, :]
    is_in = (head < HEADS) & (at < HALF)
    source = row
    if SPREAD > 1:
        source = tl.where(row % SPREAD == 0, row // SPREAD, last)
    place = (source * HEADS + head) * (2 * HALF) + at
    first = tl.load(x_ptr + place, mask=is_in, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + place + HALF, mask=is_in, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
    first = first * scale * tl.load(weight_ptr + at).to(tl.float32)
    second = second * scale * tl.load(weight_ptr + at + HALF).to(tl.float32)
    cos = tl.load(cos_ptr + row * (2 * HALF) + at).to(tl.float32)
    sin = tl.load(sin_ptr + row * (2 * HALF) + at).to(tl.float32)
    place = (row * HEADS + head) * (2 * HALF) + at
    tl.store(out_ptr + place, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=is_in)
    tl.store(out_ptr + place + HALF, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=is_in)


@jit((*LENGTHS, "last"))
def _head_gradient_kernel(
    grad_out_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, grad_x_ptr, partial_ptr, shared_ptr, num_rows, eps, last,
    SPREAD: tl.constexpr, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Rotates the gradient back, then as the norm's; the factor of each head is computed again."""
    program = tl.program_id(0)
    head = tl.arange(0, HEADS_PAD)[:, None]
    at = tl.arange(0, HALF)[None, :]
    is_in = (head < HEADS) & (at < HALF)
    weight_first = tl.load(weight_ptr + at).to(tl.float32)
    weight_second = tl.load(weight_ptr + at + HALF).to(tl.float32)
    total_first = tl.zeros([HALF], dtype=tl.float32)
    total_second = tl.zeros([HALF], dtype=tl.float32)
    shared_first = tl.zeros([HEADS_PAD, HALF], dtype=tl.float32)
    shared_second = tl.zeros([HEADS_PAD, HALF], dtype=tl.float32)
    for row in range(program, num_rows, tl.num_programs(0)):
        place = (tl.cast(row, tl.int64) * HEADS + head) * (2 * HALF) + at
        source = place
        if SPREAD > 1:
            is_own = row % SPREAD == 0
            source = (tl.cast(tl.where(is_own, row // SPREAD, last), tl.int64) * HEADS + head) * (2 * HALF) + at
        first = tl.load(x_ptr + source, mask=is_in, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + source + HALF, mask=is_in, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
        first = first * scale
        second = second * scale
        cos = tl.load(cos_ptr + tl.cast(row, tl.int64) * (2 * HALF) + at).to(tl.float32)
        sin = tl.load(sin_ptr + tl.cast(row, tl.int64) * (2 * HALF) + at).to(tl.float32)
        out_first = tl.load(grad_out_ptr + place, mask=is_in, other=0.0).to(tl.float32)
        out_second = tl.load(grad_out_ptr + place + HALF, mask=is_in, other=0.0).to(tl.float32)
        grad_first = out_first * cos + out_second * sin
        grad_second = out_second * cos - out_first * sin
        total_first += tl.sum(grad_first * first, 0)
        total_second += tl.sum(grad_second * second, 0)
        grad_first = grad_first * weight_first
        grad_second = grad_second * weight_second
        mean = ((tl.sum(grad_first * first, 1) + tl.sum(grad_second * second, 1)) / (2 * HALF))[:, None]
        grad_first = scale * (grad_first - first * mean)
        grad_second = scale * (grad_second - second * mean)
        is_written = is_in
        if SPREAD > 1:
            is_written = is_in & is_own
            shared_first += tl.where(is_own, 0.0, grad_first)
            shared_second += tl.where(is_own, 0.0, grad_second)
        tl.store(grad_x_ptr + source, grad_first.to(grad_x_ptr.dtype.element_ty), mask=is_written)
        tl.store(grad_x_ptr + source + HALF, grad_second.to(grad_x_ptr.dtype.element_ty), mask=is_written)
    tl.store(partial_ptr + program * (2 * HALF) + tl.arange(0, HALF), total_first)
    tl.store(partial_ptr + program * (2 * HALF) + HALF + tl.arange(0, HALF), total_second)
    if SPREAD > 1:
        place = (program.to(tl.int64) * HEADS + head) * (2 * HALF) + at
        tl.store(shared_ptr + place, shared_first, mask=is_in)
        tl.store(shared_ptr + place + HALF, shared_second, mask=is_in)
