"""Position weights of the loss as pure functions over a grid of N blocks and B slots.

Slot 0 is the anchor and never supervised. Every weight is a constant to the gradient. Sources: exponential decay
DFlash paper Eq. 4; D-PACE arXiv 2605.18810; the streak factor is this project's own definition.
"""

from __future__ import annotations

import torch
from torch import Tensor

from remote.spec import LossSpec


def position_weights(ce_NB: Tensor, right_NB: Tensor, supervised_NB: Tensor, spec: LossSpec) -> Tensor:
    """w of the recipe's loss, (N, B), zero where not supervised.

    `ce_NB` (nats) matters to D-PACE alone and `right_NB` (argmax equals the label) to the streak factor alone.
    """
    if spec.decay == "dpace":
        weight_NB = dpace_weights(ce_NB, supervised_NB, alpha=spec.dpace_alpha)
    elif spec.decay == "exponential":
        weight_NB = exponential_weights(ce_NB, gamma=spec.gamma)
    else:
        weight_NB = torch.ones_like(ce_NB)
    if spec.streak_beta:
        weight_NB = weight_NB * streak_factor(right_NB, supervised_NB, beta=spec.streak_beta)
    return torch.where(supervised_NB, weight_NB, 0.0)


def exponential_weights(like_NB: Tensor, *, gamma: float) -> Tensor:
    """w_k = exp(-(k-1)/γ), of the shape and dtype of `like_NB`; slot 0 has no meaning."""
    slot_B = torch.arange(like_NB.shape[1], device=like_NB.device, dtype=like_NB.dtype)
    return torch.exp(-(slot_B - 1) / gamma).expand_as(like_NB)


def dpace_weights(ce_NB: Tensor, supervised_NB: Tensor, *, alpha: float) -> Tensor:
    """w_k = Σ_{j≥k, supervised} Π_{1≤i≤j} q̃_i with q̃ = (1-α)·exp(-CE) + α, and 1 where not supervised."""
    confidence_NB = (1 - alpha) * torch.exp(-ce_NB) + alpha
    chain_NB = torch.where(supervised_NB, confidence_NB, 1.0).cumprod(1)
    reached_NB = torch.where(supervised_NB, chain_NB, 0.0)
    return reached_NB.flip(1).cumsum(1).flip(1)


def streak_factor(right_NB: Tensor, supervised_NB: Tensor, *, beta: float) -> Tensor:
    """1 + β·[slots 1 .. k-1 of the block are all right]; an unsupervised slot breaks no streak."""
    unbroken_NB = (right_NB | ~supervised_NB).cumprod(1)
    before_NB = torch.ones_like(unbroken_NB)
    before_NB[:, 1:] = unbroken_NB[:, :-1]
    return 1 + beta * before_NB


def streak_lengths(right_NB: Tensor, supervised_NB: Tensor) -> Tensor:
    """Leading right slots per block, (N,): the accepted draft tokens, without the bonus token."""
    unbroken_NB = (right_NB | ~supervised_NB).cumprod(1)
    return (unbroken_NB * supervised_NB).sum(1)
