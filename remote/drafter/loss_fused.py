"""One chunk of the loss by fused row operations: the same sums and gradients as `loss_chunk`, in two reads of the logits.

Buffers alive at once: the drafter's logits (M, V) and the target's (U, V) in float32. The gradient (M, V) is written in
the head's dtype where the logits stood; with cap, whose own gradient reads them again, the first one has a buffer of its
own. A target known by its expectation has no logits. Shapes as there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from remote.drafter.coarse_head import NUM_LIKELIEST, Drift, ExactTokens
from remote.drafter.kernels.cross_entropy import (
    COARSE,
    RowStatistics,
    TargetRows,
    cross_entropy_gradient,
    entropy_gradient,
    in_their_place,
    row_statistics,
)
from remote.drafter.logits import head_logits, hidden_gradient, logits_dtype, weighted_rows
from remote.drafter.loss_chunk import (
    ChunkOutcome,
    Read,
    Slots,
    SlotValues,
    labels_of,
    slot_weights,
    soft_coefficient,
    soft_values,
)
from remote.drafter.teacher import Expectation
from remote.spec import LossSpec


@dataclass(frozen=True)
class TeacherLogits:
    """The target's logits at U positions, as they came from the head, with what was read of them."""

    logits_UV: Tensor
    log_sum_U: Tensor
    entropy_U: Tensor  # nats
    best_U: Tensor  # int64

    def kept(self, count: int) -> TeacherLogits:
        """The last `count` rows, copied so that the rest can be freed."""
        start = self.entropy_U.shape[0] - count
        return TeacherLogits(*(tensor[start:].clone() for tensor in (self.logits_UV, *self._numbers())))

    def rows_of(self, slots: Slots) -> TargetRows:
        best_logit_U = self.logits_UV.gather(1, self.best_U[:, None].clamp(min=0))[:, 0]
        best_p_U = (best_logit_U - self.log_sum_U).exp()
        return TargetRows(self.logits_UV, self.log_sum_U, slots.teacher_M, slots.order_M, best_p_U)

    def best_of(self, slots: Slots) -> Tensor:
        """The most probable token of each slot."""
        return self.best_U.index_select(0, slots.teacher_M).clamp(min=0)  # a row with a NaN has none

    def entropy_of(self, slots: Slots) -> Tensor:
        return self.entropy_U.index_select(0, slots.teacher_M)

    def _numbers(self) -> tuple[Tensor, ...]:
        return self.log_sum_U, self.entropy_U, self.best_U


def teach(hidden_UH: Tensor, head_VH: Tensor, before: TeacherLogits | None) -> TeacherLogits:
    """The target's rows at new positions, after those kept from the chunk before; the product writes behind these."""
    num_kept, (num_new, vocab) = 0 if before is None else before.entropy_U.shape[0], (len(hidden_UH), len(head_VH))
    logits_UV = torch.empty(num_kept + num_new, vocab, dtype=logits_dtype(head_VH), device=head_VH.device)
    head_logits(hidden_UH, head_VH, out=logits_UV[num_kept:])
    read = row_statistics(logits_UV[num_kept:])
    new = (read.log_sum_M, read.entropy_M, read.best_M)
    if before is None:
        return TeacherLogits(logits_UV, *new)
    logits_UV[:num_kept] = before.logits_UV
    return TeacherLogits(logits_UV, *(torch.cat(pair) for pair in zip(before._numbers(), new, strict=True)))


def chunk_loss(
    hidden_MH: Tensor, slots: Slots, *, teacher: TeacherLogits | Expectation | None, head_VH: Tensor, spec: LossSpec,
    with_gradient: bool, drift: Drift | None = None,
) -> ChunkOutcome:  # fmt: skip
    """What every slot of the chunk is read to be and, on request, both gradients of its hidden states.

    An Expectation has a row for each slot. With a `drift` the first of the gradients is made by its coarse head, and counted there.
    """
    soft = soft_coefficient(spec)
    expected = teacher if soft and isinstance(teacher, Expectation) else None
    known = teacher if soft and isinstance(teacher, TeacherLogits) else None
    rest_M = None if expected is None else expected.rest_logit(hidden_MH)  # before the logits take the room
    logits_MV = head_logits(hidden_MH, head_VH)
    label_M = labels_of(slots, teacher, spec)
    read = row_statistics(logits_MV, label_M, num_likeliest=1 if drift is None else NUM_LIKELIEST)
    assert read.label_logit_M is not None
    assert read.rank_M is not None
    values = SlotValues(
        label_M, read.log_sum_M - read.label_logit_M, read.entropy_M, read.best_M == label_M, read.rank_M
    )
    weight_M = slot_weights(values, slots.grid, spec)
    soft_ce_M = None
    if expected is not None and rest_M is not None:  # of the logits before their gradient takes their place
        best_logit_M = logits_MV.gather(1, expected.best_S[:, None])[:, 0]
        soft_ce_M = expected.soft_ce(read.log_sum_M, best_logit_M, rest_M)
    has_cap = bool(spec.terms.get("cap"))
    work = _Gradient(logits_MV, read, label_M, weight_M, head_VH, drift, spec.terms.get("ce", 0.0), soft, expected)
    target = None if known is None else known.rows_of(slots)
    gradient_MH, by_logits_M = work.make(target, with_gradient=with_gradient, is_in_place=not has_cap)
    found = Read(values, weight_M, soft_values(by_logits_M if expected is None else soft_ce_M, teacher, slots))
    if not with_gradient or not has_cap:
        return ChunkOutcome(found, gradient_MH, None)
    place_MV, scale_M = in_their_place(logits_MV, head_VH.dtype), spec.terms["cap"] * weight_M * values.right_M
    entropy_gradient(logits_MV, read.log_sum_M, read.entropy_M, scale_M, out_MV=place_MV)
    return ChunkOutcome(found, gradient_MH, hidden_gradient(place_MV, head_VH))


@dataclass(frozen=True)
class _Gradient:
    """The gradient of the cross-entropies of one chunk, by the head or by its coarse copy."""

    logits_MV: Tensor
    read: RowStatistics
    label_M: Tensor
    weight_M: Tensor
    head_VH: Tensor
    drift: Drift | None
    hard: float
    soft: float
    expected: Expectation | None

    def make(
        self, target: TargetRows | None, *, with_gradient: bool, is_in_place: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Of the hidden states, where it is wanted, and −Σ p log q of a target whose rows are there."""
        if not with_gradient:
            return None, self._by_logits(None, self.weight_M, target)
        if self.drift is None:
            out_MV = self._room(self.head_VH.dtype, is_in_place=is_in_place)
            soft_ce_M = self._by_logits(out_MV, self.weight_M, target)
            if self.expected is None:
                return hidden_gradient(out_MV, self.head_VH), soft_ce_M
            sums_MH = weighted_rows(out_MV, self.head_VH)
            return self.expected.take_rest(sums_MH, self.soft * self.weight_M), soft_ce_M
        exact = ExactTokens.of(
            self.logits_MV, self.read, self.label_M, self.weight_M,
            hard=self.hard, soft=self.soft, target=target, expected=self.expected,
        )  # fmt: skip
        out_MV = self._room(COARSE, is_in_place=is_in_place)
        soft_ce_M = self._by_logits(out_MV, exact.unit_M, target)
        exact.clear(out_MV)
        self.drift.count(exact, out_MV)
        product_MH = self.drift.head.weighted_rows(out_MV)
        return exact.added_to(product_MH, self.head_VH, self.expected, self.soft), soft_ce_M

    def _by_logits(self, out_MV: Tensor | None, weight_M: Tensor, target: TargetRows | None) -> Tensor | None:
        return cross_entropy_gradient(
            self.logits_MV, self.read.log_sum_M, self.label_M, weight_M, hard=self.hard, soft=self.soft,
            target=target, best=None if self.expected is None else self.expected.best, out_MV=out_MV,
        )  # fmt: skip

    def _room(self, dtype: torch.dtype, *, is_in_place: bool) -> Tensor:
        if is_in_place:
            return in_their_place(self.logits_MV, dtype)
        return torch.empty_like(self.logits_MV, dtype=dtype)
