"""x · Wᵀ on a processor by oneDNN, where torch's own way is MKL.

MKL takes no AVX-512 on AMD's processors; oneDNN, in the same torch, does, and needs a third to two thirds of the time on an
EPYC (docs/decisions.md has the numbers; Intel's and ARM were not measured). The operator is the one that torch's own
compiler calls. It knows no gradient, so what is trained goes torch's way, as does everything on a card.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x [..., I] · weightᵀ + bias, [..., O], in the dtype of both."""
    is_plain_float = x.device.type == "cpu" and x.dtype == weight_OI.dtype == torch.float32
    is_plain_float &= bias_O is None or bias_O.stride() == (1,)  # it reads a bias as if it lay in one piece
    if is_plain_float and not torch.is_grad_enabled() and torch.backends.mkldnn.enabled and has_onednn():
        return torch.ops.mkldnn._linear_pointwise(x, weight_OI, bias_O, "none", [], "")
    return F.linear(x, weight_OI, bias_O)


@cache
def has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
