"""What the loss reads of the target at a position: its last hidden state, or the expectation made of it ahead.

The terms read the target's distribution p beside the drafter's, log q = W·h − log Σ exp(W·h), in two ways alone:
−Σ p log q = log Σ exp(W·h) − h·(Σ p W), and its gradient in h, Σ q W − Σ p W. So one vector, Σ p W, says what a
vocabulary of numbers would. It takes three products with the head, where the target's logits take one; but it is made
once for a position and kept with the hidden states, and the logits would be made in every step that reads them.

Where the drafter is nearly right q and p nearly cancel, and what rounding costs must be small beside the rest. So the most
probable token is kept apart, to be taken from q before the drafter's own product, and the sum of all others is float32,
of shares that are not rounded to the head's dtype. No kernel of ours has a part in it: what is kept outlives any choice of them.

Shapes: S positions, M slots, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import torch
from torch import Tensor

from remote.drafter.kernels.cross_entropy import Best
from remote.drafter.logits import head_logits, logits_dtype, weighted_rows

EXPECT_ROWS = 256  # positions whose logits are alive at once, a few times over


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

    def best_of(self, _: Any) -> Tensor:
        """The most probable token of each slot, where there is a row for each."""
        return self.best_S

    def entropy_of(self, _: Any) -> Tensor:
        """Likewise."""
        return self.entropy_S

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


# The target's last hidden states (S, H), normed exactly once, or what was made of them.
Teacher: TypeAlias = Tensor | Expectation


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
        log_p_RV = head_logits(last_hidden_SH[rows].to(device), head_VH)
        log_p_RV.sub_(log_p_RV.logsumexp(-1, keepdim=True))
        best_R1, p_RV = log_p_RV.argmax(-1, keepdim=True), log_p_RV.exp()
        found.entropy_S[rows] = -torch.linalg.vecdot(p_RV, log_p_RV)
        found.best_S[rows], found.best_p_S[rows] = best_R1[:, 0], p_RV.gather(1, best_R1)[:, 0]
        del log_p_RV
        found.rest_SH[rows] = weighted_rows(p_RV.scatter_(1, best_R1, 0.0), head_VH)
    return found


def tensors_of(teacher: Teacher) -> tuple[Tensor, ...]:
    return teacher.tensors if isinstance(teacher, Expectation) else (teacher,)


def teacher_of(tensors: Sequence[Tensor]) -> Teacher:
    """What `tensors_of` took apart."""
    return Expectation(*tensors) if len(tensors) > 1 else tensors[0]
