"""What is added in full precision to a product that was made in eight bits: a few rows of the head, one tensor, a scale.

Shapes: M slots, K tokens of each, V vocabulary, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from remote.drafter.kernels.launch import can_launch, jit, on_its_device, tl

TILE, WARPS = 1024, 4  # numbers of a row that one program holds, and its warps


@on_its_device
def add_exact_rows(
    product_MH: Tensor, scale_M: Tensor, token_MK: Tensor, coefficient_MK: Tensor, head_VH: Tensor, *,
    other_MH: Tensor | None = None, other_scale_M: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """scale · product + Σ coefficient · head[token] + other_scale · other, in place of the product (float32)."""
    assert (other_MH is None) == (other_scale_M is None), "a tensor with its scale"
    if not can_launch(product_MH) or product_MH.dtype != torch.float32:
        return add_exact_rows_reference(
            product_MH, scale_M, token_MK, coefficient_MK, head_VH, other_MH=other_MH, other_scale_M=other_scale_M
        )
    (num_rows, width), num_tokens = product_MH.shape, token_MK.shape[1]
    if num_rows:
        _exact_rows_kernel[(num_rows, -(-width // TILE))](
            product_MH, scale_M, token_MK, coefficient_MK, head_VH,
            product_MH if other_MH is None else other_MH, scale_M if other_scale_M is None else other_scale_M,
            WIDTH=width, NUM_TOKENS=num_tokens, TILE=TILE, HAS_OTHER=other_MH is not None, num_warps=WARPS,
        )  # fmt: skip
    return product_MH


def add_exact_rows_reference(
    product_MH: Tensor, scale_M: Tensor, token_MK: Tensor, coefficient_MK: Tensor, head_VH: Tensor, *,
    other_MH: Tensor | None = None, other_scale_M: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The same in plain torch."""
    product_MH.mul_(scale_M[:, None])
    for token_M, coefficient_M in zip(token_MK.unbind(1), coefficient_MK.unbind(1), strict=True):
        product_MH.addcmul_(head_VH[token_M].to(product_MH.dtype), coefficient_M[:, None])
    if other_MH is not None and other_scale_M is not None:
        product_MH.addcmul_(other_MH, other_scale_M[:, None])
    return product_MH


@jit()
def _exact_rows_kernel(
    product_ptr, scale_ptr, token_ptr, coefficient_ptr, head_ptr, other_ptr, other_scale_ptr,
    WIDTH: tl.constexpr, NUM_TOKENS: tl.constexpr, TILE: tl.constexpr, HAS_OTHER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_there = at < WIDTH
    total = tl.load(product_ptr + row * WIDTH + at, mask=is_there, other=0.0) * tl.load(scale_ptr + row)
    for place in tl.static_range(NUM_TOKENS):
        token = tl.load(token_ptr + row * NUM_TOKENS + place)
        coefficient = tl.load(coefficient_ptr + row * NUM_TOKENS + place)
        total += coefficient * tl.load(head_ptr + token * WIDTH + at, mask=is_there, other=0.0).to(tl.float32)
    if HAS_OTHER:
        other = tl.load(other_ptr + row * WIDTH + at, mask=is_there, other=0.0)
        total += tl.load(other_scale_ptr + row) * other
    tl.store(product_ptr + row * WIDTH + at, total, mask=is_there)
