"""The operations of a drafter layer between its products and its attention, as a table: torch's own, or fused.

The model is written once over this table. Both give the same numbers up to rounding; the fused ones keep less for the
backward (`norm`, `swiglu`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from remote.drafter.kernels import norm, swiglu


class BodyOperations(NamedTuple):
    rms_norm: Callable[..., Tensor]  # (x_NH, weight_H, eps)
    norm_linears: Callable[..., tuple[Tensor, ...]]  # (x_NH, weight_H, eps, *matrices)
    head_norm_rotate: Callable[..., Tensor]  # (x_UQD, weight_D, eps, rotary factors, spread)
    norm_mlp: Callable[..., Tensor]  # (x_NH, weight_H, eps, gate_IH, up_IH, down_HI)


def _torch_mlp(x_NH: Tensor, weight_H: Tensor, eps: float, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor) -> Tensor:
    """One expression, so that gate is freed where no gradient needs it before up is there."""
    normed_NH = norm.rms_norm_reference(x_NH, weight_H, eps)
    return F.linear(F.silu(F.linear(normed_NH, gate_IH)) * F.linear(normed_NH, up_IH), down_HI)


def _fused_mlp(x_NH: Tensor, weight_H: Tensor, eps: float, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor) -> Tensor:
    gate_NI, up_NI = norm.norm_linears(x_NH, weight_H, eps, gate_IH, up_IH)
    return swiglu.swiglu_linear(gate_NI, up_NI, down_HI)


TORCH = BodyOperations(
    norm.rms_norm_reference, norm.norm_linears_reference, norm.head_norm_rotate_reference, _torch_mlp
)
FUSED = BodyOperations(norm.rms_norm, norm.norm_linears, norm.head_norm_rotate, _fused_mlp)
