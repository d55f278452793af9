"""The products with the head, as the loss and the target's expectation read them: results in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from remote.drafter.product import linear


def head_logits(hidden_NH: Tensor, head_VH: Tensor, *, out: Tensor | None = None) -> Tensor:
    """hidden · headᵀ in the head's dtype with float32 results: bf16 logits tie, and cost 1 to 2.5 % of the gradient."""
    hidden_NH = hidden_NH.to(head_VH.dtype)
    if hidden_NH.dtype == logits_dtype(head_VH):
        return linear(hidden_NH, head_VH) if out is None else torch.mm(hidden_NH, head_VH.T, out=out)
    if hidden_NH.is_cuda:
        return torch.mm(hidden_NH, head_VH.T, out_dtype=torch.float32, out=out)
    return torch.mm(hidden_NH.float(), head_VH.float().T, out=out)


def logits_dtype(head_VH: Tensor) -> torch.dtype:
    return torch.promote_types(head_VH.dtype, torch.float32)


def hidden_gradient(gradient_NV: Tensor, head_VH: Tensor) -> Tensor:
    """Σ gradient · head, (N, H), both and the result in the head's dtype."""
    return linear(gradient_NV.to(head_VH.dtype), head_VH.T)


def weighted_rows(weight_NV: Tensor, head_VH: Tensor) -> Tensor:
    """Σ weight · head, (N, H), in float32. Weights in float32 are not rounded to a head of fewer bits: they go in two halves."""
    work = logits_dtype(head_VH)
    if not weight_NV.is_cuda or head_VH.dtype == work:
        return linear(weight_NV.to(work), head_VH.to(work).T)
    if weight_NV.dtype == head_VH.dtype:
        return torch.mm(weight_NV, head_VH, out_dtype=work)
    high_NV = weight_NV.to(head_VH.dtype)
    out_NH = torch.mm(high_NV, head_VH, out_dtype=work)
    return out_NH.add_(torch.mm((weight_NV - high_NV).to(head_VH.dtype), head_VH, out_dtype=work))
