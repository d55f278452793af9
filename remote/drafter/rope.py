"""Rotary position embedding as Qwen3 has it: plain, over the whole head, halves rotated.

The order of operations and the float32 angles are those of the public implementations, so that a drafter serves
with the numbers it was trained with; float64 models compute float64 angles (oracles).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotary(NamedTuple):
    """Cosine and sine for N positions and head size D, both (N, 1, D)."""

    cos: Tensor
    sin: Tensor


def rotary(position_N: Tensor, *, head_dim: int, theta: float, dtype: torch.dtype) -> Rotary:
    """Frequencies theta^(-2i/D), angles position · frequency, the D/2 angles repeated for both halves."""
    work = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, head_dim, 2, device=position_N.device).to(work) / head_dim
    angle = position_N.to(work)[:, None] * (1.0 / theta**exponent)
    angle = torch.cat([angle, angle], dim=-1)[:, None]
    return Rotary(angle.cos().to(dtype), angle.sin().to(dtype))


def spread_rows(x: Tensor, spread: int) -> Tensor:
    """N·B rows of N + 1: of every B, the first has a row of its own and the others share the last; as they are for B = 1."""
    if spread == 1:
        return x
    own, shared = x[:-1, None], x[-1:, None]
    rest = shared.expand(own.shape[0], spread - 1, *x.shape[1:])
    return torch.cat([own, rest], dim=1).flatten(0, 1)


def rotate(x_NHD: Tensor, at: Rotary) -> Tensor:
    """x·cos + (−x₂, x₁)·sin for x of N positions and H heads."""
    first, second = x_NHD.chunk(2, dim=-1)
    return x_NHD * at.cos + torch.cat([-second, first], dim=-1) * at.sin
