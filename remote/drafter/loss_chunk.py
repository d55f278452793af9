"""One chunk of the loss: logits, every term, their sums, and the gradient of the hidden states, in one visit.

Shapes: M supervised slots of the chunk, U teacher rows, V vocabulary, H hidden size, N blocks of B slots.
q = softmax(logits) of the drafter, p = softmax(teacher logits), both in float32 (float64 for float64 inputs).

The cross-entropies to a distribution y all have the gradient q − y in the logits: ce (y the label), soft_ce and
kl (y = p; they differ by the teacher's entropy alone). cap is the entropy of q, gradient −q·(log q + H(q)), on slots
whose argmax is already right (after LLaDA 2.0, arXiv 2512.15745).

Buffers alive at once, each (M, V) in float32: logits (turned into log q, then into cap's gradient), q (turned into
the gradient), p of every slot when a soft term is on, and the product inside one dot product (later, in its place,
the gradient rounded to the head's dtype); and the teacher's (U, V). A target known by its expectation takes none of these
but a row (M, H). `remote.plan.memory` counts the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from remote.drafter.logits import head_logits, hidden_gradient, weighted_rows
from remote.drafter.teacher import Expectation
from remote.drafter.weights import position_weights, streak_lengths
from remote.spec import LossSpec

SOFT_TERMS = ("kl", "soft_ce")
TOP_K = (2, 4, 8)

Totals = dict[str, Tensor]  # sums in float64, each of length 1 or B


@dataclass(frozen=True)
class TeacherLogits:
    """The target's distribution at U positions."""

    log_p_UV: Tensor
    entropy_U: Tensor  # nats

    def kept(self, count: int) -> TeacherLogits:
        """The last `count` rows, copied so that the rest can be freed."""
        start = self.entropy_U.shape[0] - count
        return TeacherLogits(self.log_p_UV[start:].clone(), self.entropy_U[start:].clone())

    def best_of(self, slots: Slots) -> Tensor:
        """The most probable token of each slot."""
        return self.log_p_UV.argmax(-1).index_select(0, slots.teacher_M)

    def entropy_of(self, slots: Slots) -> Tensor:
        return self.entropy_U.index_select(0, slots.teacher_M)


@dataclass(frozen=True)
class Grid:
    """Where supervised slots stand among the blocks and slots (N, B) of a chunk, or of all."""

    cell_M: Tensor
    num_blocks: int
    block_size: int


@dataclass(frozen=True)
class Slots:
    """The supervised slots of one chunk."""

    label_M: Tensor
    grid: Grid
    teacher_M: Tensor  # row of the chunk's TeacherLogits
    order_M: Tensor  # the slots by their teachers


class KnownTeacher(Protocol):
    """The target as a chunk of the loss knows it: `TeacherLogits` of either module, or an Expectation with a row a slot."""

    def best_of(self, slots: Any, /) -> Tensor: ...

    def entropy_of(self, slots: Any, /) -> Tensor: ...


@dataclass(frozen=True)
class SlotValues:
    """What weights, terms and metrics read of the drafter's distribution, one number a slot."""

    label_M: Tensor
    ce_M: Tensor  # nats
    entropy_M: Tensor  # nats
    right_M: Tensor  # bool, argmax equals the label
    rank_M: Tensor  # how many tokens are more probable than the label


@dataclass(frozen=True)
class Student(SlotValues):
    """The distribution itself as well; the (M, V) buffers are overwritten by the gradients."""

    log_sum_M: Tensor
    log_q_MV: Tensor
    q_MV: Tensor


@dataclass(frozen=True)
class Read:
    """All that the sums are made of, one number a slot; of several chunks they are summed together."""

    values: SlotValues
    weight_M: Tensor
    soft_M: dict[str, Tensor]  # of the soft terms, by name

    @classmethod
    def joined(cls, parts: Sequence[Read]) -> Read:
        values = [[getattr(part.values, each.name) for part in parts] for each in fields(SlotValues)]
        soft = {term: torch.cat([part.soft_M[term] for part in parts]) for term in parts[0].soft_M}
        return cls(SlotValues(*map(torch.cat, values)), torch.cat([part.weight_M for part in parts]), soft)

    def totals(self, grid: Grid, spec: LossSpec) -> Totals:
        """Sums of every term and metric."""
        return loss_totals(self.values, self.weight_M, self.soft_M, spec) | metric_totals(self.values, grid)


@dataclass(frozen=True)
class ChunkOutcome:
    read: Read
    gradient_MH: Tensor | None  # of Σ weight·(ce, kl, soft_ce with their coefficients)
    cap_gradient_MH: Tensor | None  # of coefficient · Σ c·H(q)


def needs_teacher(spec: LossSpec) -> bool:
    """Whether any part of the loss reads the target's logits."""
    return spec.label == "teacher_argmax" or any(spec.terms.get(term) for term in SOFT_TERMS)


def teach(hidden_UH: Tensor, head_VH: Tensor, before: TeacherLogits | None) -> TeacherLogits:
    """The target's distribution at new positions, after the rows kept from the chunk before."""
    log_p_UV = head_logits(hidden_UH, head_VH)
    log_p_UV.sub_(log_p_UV.logsumexp(-1, keepdim=True))
    entropy_U = -torch.linalg.vecdot(log_p_UV.exp(), log_p_UV)
    if before is None:
        return TeacherLogits(log_p_UV, entropy_U)
    return TeacherLogits(torch.cat([before.log_p_UV, log_p_UV]), torch.cat([before.entropy_U, entropy_U]))


def chunk_loss(
    hidden_MH: Tensor, slots: Slots, *, teacher: TeacherLogits | Expectation | None, head_VH: Tensor, spec: LossSpec,
    with_gradient: bool,
) -> ChunkOutcome:  # fmt: skip
    """What every slot of the chunk is read to be and, on request, both gradients of its hidden states.

    An Expectation has a row for each slot.
    """
    is_soft = bool(soft_coefficient(spec))
    expected = teacher if is_soft and isinstance(teacher, Expectation) else None
    known = teacher if is_soft and isinstance(teacher, TeacherLogits) else None
    rest_M = None if expected is None else expected.rest_logit(hidden_MH)  # before the logits take the room
    student = read_student(hidden_MH, labels_of(slots, teacher, spec), head_VH)
    p_MV = None if known is None else known.log_p_UV.index_select(0, slots.teacher_M).exp_()
    weight_M = slot_weights(student, slots.grid, spec)
    values = SlotValues(*(getattr(student, each.name) for each in fields(SlotValues)))
    soft_ce_M = None if p_MV is None else -torch.linalg.vecdot(p_MV, student.log_q_MV)
    if expected is not None and rest_M is not None:
        best_logit_M = student.log_q_MV.gather(1, expected.best_S[:, None])[:, 0] + student.log_sum_M
        soft_ce_M = expected.soft_ce(student.log_sum_M, best_logit_M, rest_M)
    read = Read(values, weight_M, soft_values(soft_ce_M, teacher, slots))
    if not with_gradient:
        return ChunkOutcome(read, None, None)
    cap_gradient_MH = _cap_gradient(student, weight_M, head_VH, spec) if spec.terms.get("cap") else None
    gradient_MH = _gradient(student, weight_M, p_MV=p_MV, expected=expected, head_VH=head_VH, spec=spec)
    return ChunkOutcome(read, gradient_MH, cap_gradient_MH)


def read_student(hidden_MH: Tensor, label_M: Tensor, head_VH: Tensor) -> Student:
    """Everything the terms and metrics read, from one set of logits."""
    logits_MV = head_logits(hidden_MH, head_VH)
    label_logit_M = logits_MV.gather(1, label_M[:, None])
    right_M = logits_MV.argmax(-1) == label_M
    rank_M = logits_MV.shape[1] - (logits_MV <= label_logit_M).sum(-1)  # so counted, NaN ranks last and not first
    lse_M = logits_MV.logsumexp(-1, keepdim=True)
    log_q_MV = logits_MV.sub_(lse_M)
    q_MV = log_q_MV.exp()
    entropy_M = -torch.linalg.vecdot(q_MV, log_q_MV)
    return Student(label_M, (lse_M - label_logit_M)[:, 0], entropy_M, right_M, rank_M, lse_M[:, 0], log_q_MV, q_MV)


def labels_of(slots: Slots, teacher: KnownTeacher | None, spec: LossSpec) -> Tensor:
    if spec.label == "data":
        return slots.label_M
    assert teacher is not None, "needs_teacher() said so"
    return teacher.best_of(slots)


def soft_coefficient(spec: LossSpec) -> float:
    """The coefficient of the cross-entropy to the teacher's distribution."""
    return sum(spec.terms.get(term, 0.0) for term in SOFT_TERMS)


def slot_weights(values: SlotValues, grid: Grid, spec: LossSpec) -> Tensor:
    """The position weight of every slot, (M,)."""
    supervised_NB = _placed(torch.ones_like(values.right_M), grid)
    weight_NB = position_weights(_placed(values.ce_M, grid), _placed(values.right_M, grid), supervised_NB, spec)
    return weight_NB.flatten().index_select(0, grid.cell_M)


def _placed(values_M: Tensor, grid: Grid) -> Tensor:
    """Values by block and slot, (N, B); zero or False where not supervised."""
    flat = values_M.new_zeros(grid.num_blocks * grid.block_size)
    return flat.index_copy_(0, grid.cell_M, values_M).view(grid.num_blocks, grid.block_size)


def soft_values(soft_ce_M: Tensor | None, teacher: KnownTeacher | None, slots: Slots) -> dict[str, Tensor]:
    """soft_ce = −Σ p log q and kl = soft_ce − H(p) of every slot, (M,)."""
    if soft_ce_M is None or teacher is None:
        return {}
    return {"soft_ce": soft_ce_M, "kl": soft_ce_M - teacher.entropy_of(slots)}


def loss_totals(read: SlotValues, weight_M: Tensor, soft_values: dict[str, Tensor], spec: LossSpec) -> Totals:
    """Weighted sums of the terms in use, before their coefficients, and the sums of the weights."""
    values = {"ce": read.ce_M, **soft_values}
    totals = {term: _sum(weight_M * values[term]) for term in values if spec.terms.get(term)}
    right_weight_M = weight_M * read.right_M
    if spec.terms.get("cap"):
        totals["cap"] = _sum(right_weight_M * read.entropy_M)
    return totals | {"weights": _sum(weight_M), "right_weights": _sum(right_weight_M)}


def metric_totals(read: SlotValues, grid: Grid) -> Totals:
    """Sums of what is counted, undecayed."""
    right_NB, supervised_NB = _placed(read.right_M, grid), _placed(torch.ones_like(read.right_M), grid)
    totals = {f"topk_{k}": _sum(read.rank_M < k) for k in TOP_K}
    return totals | {
        "supervised_at": supervised_NB.sum(0).double(),
        "right_at": right_NB.sum(0).double(),
        "streak": _sum(streak_lengths(right_NB, supervised_NB)),
        "blocks": _sum(supervised_NB.any(1)),
        "entropy_right": _sum(read.entropy_M * read.right_M),
    }


def _sum(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float64)[None]


def _cap_gradient(student: Student, weight_M: Tensor, head_VH: Tensor, spec: LossSpec) -> Tensor:
    """Of coefficient · Σ c·H(q), c = weight on right slots. Overwrites log q."""
    scale_M = -spec.terms["cap"] * weight_M * student.right_M
    gradient_MV = student.log_q_MV.add_(student.entropy_M[:, None]).mul_(student.q_MV).mul_(scale_M[:, None])
    return hidden_gradient(gradient_MV, head_VH)


def _gradient(
    student: Student, weight_M: Tensor, *, p_MV: Tensor | None, expected: Expectation | None, head_VH: Tensor,
    spec: LossSpec,
) -> Tensor:  # fmt: skip
    """Of Σ weight · (hard·CE + soft·(−Σ p log q)): weight · (hard·(q − label) + soft·(q − p)). Overwrites q and p."""
    hard, soft = spec.terms.get("ce", 0.0), soft_coefficient(spec)
    gradient_MV = student.q_MV.mul_(((hard + soft) * weight_M)[:, None])
    if p_MV is not None:
        gradient_MV.sub_(p_MV.mul_((soft * weight_M)[:, None]))
    if expected is not None:
        gradient_MV.scatter_add_(1, expected.best_S[:, None], (-soft * weight_M * expected.best_p_S)[:, None])
    gradient_MV.scatter_add_(1, student.label_M[:, None], (-hard * weight_M)[:, None])
    if expected is None:
        return hidden_gradient(gradient_MV, head_VH)
    return expected.take_rest(weighted_rows(gradient_MV.to(head_VH.dtype), head_VH), soft * weight_M)
