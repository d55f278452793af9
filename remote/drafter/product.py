"""x · Wᵀ, by the faster of the two libraries that torch brings for a processor.

torch asks MKL for products in float32, which takes no AVX-512 on AMD's processors: oneDNN, in the same torch, needs a
third to two thirds of the time there (docs/decisions.md has the numbers). The operator is the one that torch's own
compiler calls; it knows no gradient, so what is trained goes torch's way, as does everything on a card.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x [..., I] · weightᵀ + bias, [..., O], in the dtype of both."""
    is_plain_float = x.device.type == "cpu" and x.dtype == weight_OI.dtype == torch.float32
    if is_plain_float and not torch.is_grad_enabled() and has_onednn():
        return torch.ops.mkldnn._linear_pointwise(x, weight_OI, bias_O, "none", [], "")
    return F.linear(x, weight_OI, bias_O)


@cache
def has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
