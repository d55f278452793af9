"""One chunk of the loss by fused row operations: the same sums and gradients as `loss_chunk`, in two reads of the logits.

Buffers alive at once: the drafter's logits (M, V) and the target's (U, V) in float32. The gradient (M, V) is written in
the head's dtype where the logits stood; with cap, whose own gradient reads them again, the first one has a buffer of its
own. A target known by its expectation has no logits. Shapes as there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from remote.drafter.kernels.cross_entropy import (
    TargetRows,
    cross_entropy_gradient,
    entropy_gradient,
    in_their_place,
    row_statistics,
)
from remote.drafter.logits import head_logits, logits_dtype, weighted_rows
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
    with_gradient: bool,
) -> ChunkOutcome:  # fmt: skip
    """What every slot of the chunk is read to be and, on request, both gradients of its hidden states.

    An Expectation has a row for each slot.
    """
    soft = soft_coefficient(spec)
    expected = teacher if soft and isinstance(teacher, Expectation) else None
    known = teacher if soft and isinstance(teacher, TeacherLogits) else None
    rest_M = None if expected is None else expected.rest_logit(hidden_MH)  # before the logits take the room
    logits_MV = head_logits(hidden_MH, head_VH)
    label_M = labels_of(slots, teacher, spec)
    read = row_statistics(logits_MV, label_M)
    assert read.label_logit_M is not None
    assert read.rank_M is not None
    values = SlotValues(
        label_M, read.log_sum_M - read.label_logit_M, read.entropy_M, read.best_M == label_M, read.rank_M
    )
    weight_M = slot_weights(values, slots.grid, spec)
    target = None if known is None else TargetRows(known.logits_UV, known.log_sum_U, slots.teacher_M, slots.order_M)
    soft_ce_M = None
    if expected is not None and rest_M is not None:  # of the logits before their gradient takes their place
        best_logit_M = logits_MV.gather(1, expected.best_S[:, None])[:, 0]
        soft_ce_M = expected.soft_ce(read.log_sum_M, best_logit_M, rest_M)
    has_cap, place_MV = bool(spec.terms.get("cap")), in_their_place(logits_MV, head_VH.dtype)
    gradient_MV = torch.empty_like(logits_MV, dtype=head_VH.dtype) if has_cap else place_MV
    by_logits_M = cross_entropy_gradient(
        logits_MV, read.log_sum_M, label_M, weight_M,
        hard=spec.terms.get("ce", 0.0), soft=soft, target=target, best=None if expected is None else expected.best,
        out_MV=gradient_MV if with_gradient else None,
    )  # fmt: skip
    found = Read(values, weight_M, soft_values(by_logits_M if expected is None else soft_ce_M, teacher, slots))
    if not with_gradient:
        return ChunkOutcome(found, None, None)
    if expected is None:
        gradient_MH = gradient_MV @ head_VH
    else:
        gradient_MH = expected.take_rest(weighted_rows(gradient_MV, head_VH), soft * weight_M)
    if not has_cap:
        return ChunkOutcome(found, gradient_MH, None)
    del gradient_MV
    scale_M = spec.terms["cap"] * weight_M * values.right_M
    entropy_gradient(logits_MV, read.log_sum_M, read.entropy_M, scale_M, out_MV=place_MV)
    return ChunkOutcome(found, gradient_MH, place_MV @ head_VH)
