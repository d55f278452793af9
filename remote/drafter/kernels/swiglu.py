"""silu(gate) · up and the linear after it; the product is recomputed backwards instead of kept.

Kept are gate and up alone. The backward writes their gradients over them, which spares two tensors as wide as the MLP;
a second backward through the same graph is refused by autograd's own version check. Shapes: N tokens, I inner width, H.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from remote.drafter.kernels.launch import RowTile, can_launch, jit, on_its_device, tl

PRODUCT, GRADIENT = RowTile(2048, 4), RowTile(2048, 4)


@on_its_device
def swiglu_linear(gate_NI: Tensor, up_NI: Tensor, matrix_HI: Tensor) -> Tensor:
    """(silu(gate) · up) · matrixᵀ, (N, H). Overwrites gate and up in the backward: they must be read by nobody else."""
    if not can_launch(gate_NI):
        return swiglu_linear_reference(gate_NI, up_NI, matrix_HI)
    out: Tensor = _SwigluLinear.apply(gate_NI.contiguous(), up_NI.contiguous(), matrix_HI)
    return out


def swiglu_linear_reference(gate_NI: Tensor, up_NI: Tensor, matrix_HI: Tensor) -> Tensor:
    return F.linear(F.silu(gate_NI) * up_NI, matrix_HI)


class _SwigluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, matrix: Tensor) -> Tensor:
        inner = product(gate, up)
        ctx.save_for_backward(gate, up, matrix)
        return inner @ matrix.T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, ...]:
        gate, up, matrix = ctx.saved_tensors
        inner = grad_out @ matrix  # first the gradient of the product, then the product itself
        differentiate(gate, up, inner)
        for tensor in (gate, up):
            torch.autograd.graph.increment_version(tensor)
        return gate, up, grad_out.T @ inner


def product(gate: Tensor, up: Tensor, tile: RowTile = PRODUCT) -> Tensor:
    inner = torch.empty_like(gate)
    if gate.shape[0]:
        _swiglu_kernel[_grid(gate, tile)](gate, up, inner, WIDTH=gate.shape[1], **tile.constants(gate.shape[1]))
    return inner


def differentiate(gate: Tensor, up: Tensor, inner: Tensor, tile: RowTile = GRADIENT) -> None:
    """In: gate, up and the gradient of their product. Out, in the same places: their gradients and the product."""
    if gate.shape[0]:
        _swiglu_gradient_kernel[_grid(gate, tile)](
            gate, up, inner, WIDTH=gate.shape[1], **tile.constants(gate.shape[1])
        )


def _grid(gate: Tensor, tile: RowTile) -> tuple[int, int]:
    return gate.shape[0], -(-gate.shape[1] // tile.constants(gate.shape[1])["TILE"])


@jit()
def _swiglu_kernel(gate_ptr, up_ptr, inner_ptr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    place = tl.program_id(0).to(tl.int64) * WIDTH + at
    gate = tl.load(gate_ptr + place, mask=at < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + place, mask=at < WIDTH, other=0.0).to(tl.float32)
    inner = gate * tl.sigmoid(gate) * up
    tl.store(inner_ptr + place, inner.to(inner_ptr.dtype.element_ty), mask=at < WIDTH)


@jit()
def _swiglu_gradient_kernel(gate_ptr, up_ptr, inner_ptr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    place = tl.program_id(0).to(tl.int64) * WIDTH + at
    gate = tl.load(gate_ptr + place, mask=at < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + place, mask=at < WIDTH, other=0.0).to(tl.float32)
    grad = tl.load(inner_ptr + place, mask=at < WIDTH, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = gate * share
    grad_gate = grad * up * share * (1.0 + gate * (1.0 - share))
    tl.store(gate_ptr + place, grad_gate.to(gate_ptr.dtype.element_ty), mask=at < WIDTH)
    tl.store(up_ptr + place, (grad * silu).to(up_ptr.dtype.element_ty), mask=at < WIDTH)
    tl.store(inner_ptr + place, (silu * up).to(inner_ptr.dtype.element_ty), mask=at < WIDTH)
