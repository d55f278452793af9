"""What the loss reads of the target at a position: its last hidden state, or the expectation made of it ahead.

The terms read the target's distribution p beside the drafter's, log q = W·h − log Σ exp(W·h), in two ways alone:
−Σ p log q = log Σ exp(W·h) − h·(Σ p W), and its gradient in h, Σ q W − Σ p W. So one vector, Σ p W, stands for a
vocabulary of numbers, exactly. It takes two products with the head, where the target's logits take one; but it is made once
for a position, by who makes the hidden states, and the logits would be made in every step that reads them.

Where the drafter is nearly right q and p nearly cancel, and what rounding costs must be small beside the rest. So the most
probable token is kept apart, to be taken from q before the drafter's own product, and the sum of all others is float32.

Shapes: S positions, M slots, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from remote.drafter.kernels.cross_entropy import Best, cross_entropy_gradient, in_their_place, row_statistics
from remote.drafter.logits import head_logits, logits_dtype, weighted_rows

EXPECT_ROWS = 1024  # positions whose logits are alive at once


@dataclass(frozen=True)
class Expectation:
    """The target's distribution p at some positions; float32, or float64 of a float64 head."""

    rest_SH: Tensor  # Σ p·W over all tokens but the best one
    entropy_S: Tensor  # nats
    best_p_S: Tensor
    best_S: Tensor  # int64, the most probable token

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, each.name) for each in fields(self))

    @property
    def best(self) -> Best:
        return Best(self.best_S, self.best_p_S)

    def at(self, position_M: Tensor) -> Expectation:
        """Of these positions, one a slot."""
        return Expectation(*(tensor.index_select(0, position_M) for tensor in self.tensors))

    def rest_logit(self, hidden_SH: Tensor) -> Tensor:
        """What all tokens but the best one add to the drafter's mean logit under p, (S,)."""
        return torch.linalg.vecdot(hidden_SH.to(self.rest_SH.dtype), self.rest_SH)

    def soft_ce(self, log_sum_S: Tensor, best_logit_S: Tensor, rest_logit_S: Tensor) -> Tensor:
        """−Σ p log q, (S,)."""
        return log_sum_S - self.best_p_S * best_logit_S - rest_logit_S

    def take_rest(self, gradient_SH: Tensor, scale_S: Tensor) -> Tensor:
        """Subtracts scale · rest in place, the last part of the gradient; returns it."""
        return gradient_SH.addcmul_(self.rest_SH, scale_S[:, None], value=-1.0)


Teacher = Tensor | Expectation  # the target's last hidden states (S, H), normed exactly once, or what was made of them


@torch.no_grad()
def expect(last_hidden_SH: Tensor, head_VH: Tensor) -> Expectation:
    """The expectation at every position. Of one whose logits are not finite the entropy and the vector are not either."""
    num_positions, device, work = len(last_hidden_SH), head_VH.device, logits_dtype(head_VH)
    found = Expectation(
        torch.empty(num_positions, head_VH.shape[1], dtype=work, device=device),
        torch.empty(num_positions, dtype=work, device=device),
        torch.empty(num_positions, dtype=work, device=device),
        torch.empty(num_positions, dtype=torch.int64, device=device),
    )
    for first in range(0, num_positions, EXPECT_ROWS):
        rows = slice(first, first + EXPECT_ROWS)
        logits_RV = head_logits(last_hidden_SH[rows].to(device), head_VH)
        read = row_statistics(logits_RV)
        best_R = read.best_M.clamp(min=0)  # a row with a NaN has none
        best_p_R = (logits_RV.gather(1, best_R[:, None])[:, 0] - read.log_sum_M).exp()
        rest_RV = in_their_place(logits_RV, head_VH.dtype)
        cross_entropy_gradient(  # q less the best token's share, which is what its soft part makes
            logits_RV, read.log_sum_M, best_R, torch.ones_like(best_p_R),
            hard=0.0, soft=1.0, best=Best(best_R, best_p_R), out_MV=rest_RV,
        )  # fmt: skip
        found.rest_SH[rows] = weighted_rows(rest_RV, head_VH)
        found.entropy_S[rows], found.best_p_S[rows], found.best_S[rows] = read.entropy_M, best_p_R, best_R
    return found


def tensors_of(teacher: Teacher) -> tuple[Tensor, ...]:
    return teacher.tensors if isinstance(teacher, Expectation) else (teacher,)


def teacher_of(tensors: Sequence[Tensor]) -> Teacher:
    """What `tensors_of` took apart."""
    return Expectation(*tensors) if len(tensors) > 1 else tensors[0]
