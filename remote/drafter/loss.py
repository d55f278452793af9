"""The drafter's loss: head, terms and metrics fused over chunks, the gradient made in the forward pass.

Shapes: T block tokens, M supervised slots of them, S context tokens, V vocabulary, H hidden size, B block size.

The head is frozen, so a chunk's logits are needed once: terms, metrics and d(loss)/d(hidden) come from the same
visit, and no more than one chunk's logits ever live. What remains for the backward is one (M, H) tensor (two with
cap) and a scalar multiplication.

Numerators and denominators stay apart: `a + b` of two LossSums is the LossSums of both micro-batches, and ranks may
sum `totals_F`. cap is averaged over its own weights (Σ over right slots), hence a second pair. To divide exactly by
a sum that is not known yet, call backward on the numerator and divide the gradients later; `known_denominator` tells
beforehand what the blocks alone determine.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from remote.drafter import loss_chunk, loss_fused
from remote.drafter.blocks import Blocks
from remote.drafter.coarse_head import CoarseHead, Drift
from remote.drafter.head_plan import HeadChunk, HeadPlan, plan_head
from remote.drafter.loss_chunk import TOP_K, Grid, Read, Slots, Totals, needs_teacher
from remote.drafter.teacher import Expectation, Teacher
from remote.drafter.weights import position_weights
from remote.spec import LOSS_TERMS, LossSpec

SCALE_ROWS = 4096  # rows of the gradient scaled at once, in float32
# A gradient that is to be corrected is kept times this, and rounded to bfloat16 so. What is added later is mostly less than
# half a step of that format: added to numbers that stand on its steps it would round away, and between them it arrives in
# the mean. Divided by this and by a denominator that is a fraction they stand on none.
BETWEEN_STEPS = 0.5**0.5


@dataclass(frozen=True)
class LossSums:
    """Sums over the supervised slots of one or more micro-batches."""

    numerator: Tensor  # differentiable: Σ weight · (coefficients · ce, kl, soft_ce)
    cap_numerator: Tensor  # differentiable: coefficient · Σ weight·[right]·H(q)
    totals: Totals  # detached, float64; see `loss_chunk` and `metrics`

    @property
    def denominator(self) -> Tensor:
        """What the recipe's normalization divides the numerator by."""
        return self.totals["denominator"][0]

    @property
    def cap_denominator(self) -> Tensor:
        """Σ weight·[right]; cap divides by it, or by 1 where it is smaller."""
        return self.totals["right_weights"][0]

    def objective(self, denominator: Tensor | None = None, cap_denominator: Tensor | None = None) -> Tensor:
        """The loss to call backward on, divided by the given (summed) denominators or by its own.

        Zero, with a gradient of zero, where nothing is supervised: a rank without anchors takes part all the same.
        """
        total = self.denominator if denominator is None else denominator
        cap_total = self.cap_denominator if cap_denominator is None else cap_denominator
        return self.numerator / (total + (total == 0)) + self.cap_numerator / cap_total.clamp(min=1)

    @property
    def totals_F(self) -> Tensor:
        """All sums as one vector, so that one copy brings them to the host."""
        return torch.cat(list(self.totals.values()))

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(
            numerator=self.numerator + other.numerator,
            cap_numerator=self.cap_numerator + other.cap_numerator,
            totals={name: value + other.totals[name] for name, value in self.totals.items()},
        )


def drafter_loss(
    hidden: Tensor,
    blocks: Blocks,
    *,
    head_VH: Tensor,
    teacher: Teacher | None,
    spec: LossSpec,
    plan: HeadPlan | None = None,
    is_fused: bool = False,
    coarse_head: CoarseHead | None = None,
) -> LossSums:
    """Loss and metric sums of the drafter's normed hidden states: (T, H) of all block tokens, or, with a plan of their head,
    (M, H) of its supervised slots alone, as the drafter gives them for `plan.index_M`. A plan made on the CPU saves a look
    at the device.

    `teacher` is the target's last hidden states, normed exactly once, or what `teacher.expect` made of them; slot k reads
    position anchor+k-1. It may be None where neither a term nor the label needs it. `is_fused` takes the row kernels of `kernels.cross_entropy` where torch's own operations would be used;
    these alone can make the gradient with `coarse_head`.
    """
    assert coarse_head is None or is_fused, "the coarse product belongs to the fused rows"
    assert not head_VH.requires_grad, "the head belongs to the target and is frozen"
    if not needs_teacher(spec):
        teacher = None
    elif teacher is None:
        raise ValueError(
            f"loss.terms {spec.terms} with label {spec.label} need the target's last hidden states; none given"
        )
    if plan is None:
        plan = plan_head(blocks, chunk_tokens=spec.chunk_tokens)
        hidden = hidden.index_select(0, plan.index_M)
    assert hidden.shape[0] == plan.index_M.shape[0], "the plan's slots, one hidden state each"
    with_gradient = hidden.requires_grad and torch.is_grad_enabled()
    work = _Work(
        plan,
        head_VH,
        teacher,
        spec,
        blocks.num_blocks,
        with_gradient,
        loss_fused if is_fused else loss_chunk,
        coarse_head,
    )
    totals = empty_totals(blocks.block_size, spec, device=hidden.device)
    numerator, cap_numerator = _FusedLoss.apply(hidden, work, totals)
    totals["numerator"], totals["cap_numerator"] = numerator.detach()[None], cap_numerator.detach()[None]
    totals["denominator"] = _denominator(blocks, totals, spec)
    return LossSums(numerator, cap_numerator, totals)


def known_denominator(blocks: Blocks, spec: LossSpec) -> Tensor | None:
    """The denominator as far as the blocks alone determine it; None where it depends on the drafter's outputs."""
    depends = spec.normalization == "weights" and (spec.decay == "dpace" or spec.streak_beta != 0)
    if depends:
        return None
    supervised_NB = blocks.supervised_T.view(-1, blocks.block_size)
    unused = torch.zeros_like(supervised_NB, dtype=torch.float64)
    weights = position_weights(unused, supervised_NB, supervised_NB, dataclasses.replace(spec, streak_beta=0.0))
    totals = {"weights": weights.sum()[None], "supervised_at": supervised_NB.sum(0).double()}
    return _denominator(blocks, totals, spec)[0]


def empty_totals(block_size: int, spec: LossSpec, *, device: torch.device) -> Totals:
    """Zero sums under every name this loss has, in one fixed order."""
    terms = [term for term in LOSS_TERMS if spec.terms.get(term)]
    scalars = ["numerator", "cap_numerator", "denominator", *terms, "weights", "right_weights"]
    scalars += [*(f"topk_{k}" for k in TOP_K), "streak", "blocks", "entropy_right"]
    totals = {name: torch.zeros(1, dtype=torch.float64, device=device) for name in scalars}
    return totals | {
        name: torch.zeros(block_size, dtype=torch.float64, device=device) for name in ("supervised_at", "right_at")
    }


@dataclass(frozen=True)
class _Work:
    plan: HeadPlan
    head_VH: Tensor
    teacher: Teacher | None
    spec: LossSpec
    num_blocks: int
    with_gradient: bool
    rows: Any  # the module that computes a chunk: `loss_chunk` or `loss_fused`
    coarse_head: CoarseHead | None


class _FusedLoss(torch.autograd.Function):
    """hidden_MH -> (numerator, cap numerator); fills `totals` on the way and keeps their gradients."""

    @staticmethod
    def forward(ctx: Any, hidden_MH: Tensor, work: _Work, totals: Totals) -> tuple[Tensor, Tensor]:
        plan, spec = work.plan, work.spec
        num_grads = (1 + bool(spec.terms.get("cap"))) if work.with_gradient else 0
        grads = [torch.empty_like(hidden_MH) for _ in range(num_grads)]
        drift = Drift(work.coarse_head) if work.coarse_head is not None and work.with_gradient else None
        coarse = {} if drift is None else {"drift": drift}
        teacher: Any = None  # TeacherLogits of that module, or an Expectation with a row for each slot
        read = list[Read]()
        for chunk in plan.chunks:
            teacher = _teacher(work, chunk, teacher)
            rows = slice(*chunk.slots)
            outcome = work.rows.chunk_loss(
                hidden_MH[rows], _slots(plan, chunk), teacher=teacher, head_VH=work.head_VH, spec=spec, with_gradient=work.with_gradient, **coarse,
            )  # fmt: skip
            read.append(outcome.read)
            parts = [part for part in (outcome.gradient_MH, outcome.cap_gradient_MH) if part is not None]
            for grad_MH, part, scale in zip(grads, parts, (1.0 if drift is None else BETWEEN_STEPS, 1.0), strict=False):
                torch.mul(part, scale, out=grad_MH[rows])
        if read:
            totals |= Read.joined(read).totals(Grid(plan.index_M, work.num_blocks, plan.block_size), spec)
        ctx.num_grads = num_grads
        ctx.save_for_backward(*grads, *(() if drift is None else drift.spread(work.head_VH)))
        numerator = sum(
            (spec.terms[term] * totals[term][0] for term in _averaged(spec)), torch.zeros_like(totals["weights"][0])
        )
        cap_numerator = spec.terms["cap"] * totals["cap"][0] if spec.terms.get("cap") else torch.zeros_like(numerator)
        return numerator, cap_numerator

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        grads, drift = ctx.saved_tensors[: ctx.num_grads], ctx.saved_tensors[ctx.num_grads :]
        out_MH = torch.empty_like(grads[0])
        # A bf16 factor would be off by up to 0.4 %; one with a dimension is read, and multiplied with, as what it is.
        work = torch.promote_types(out_MH.dtype, torch.float32)
        factors = [factor.to(work)[None] for factor in grad_outputs]
        if len(grads) == 1 and not drift:
            return torch.mul(grads[0], factors[0], out=out_MH), None, None
        for start in range(0, out_MH.shape[0], SCALE_ROWS):
            rows = slice(start, start + SCALE_ROWS)
            sums_MH = grads[0][rows] * (factors[0] / BETWEEN_STEPS if drift else factors[0])  # in float32
            if drift:
                sums_MH.addr_(drift[0][rows] * factors[0], drift[1])
            if len(grads) == 2:
                sums_MH.addcmul_(grads[1][rows], factors[1])
            out_MH[rows] = sums_MH
        return out_MH, None, None


def _averaged(spec: LossSpec) -> list[str]:
    """The terms in use that share the recipe's denominator: all but cap."""
    return [term for term in LOSS_TERMS if term != "cap" and spec.terms.get(term)]


def _teacher(work: _Work, chunk: HeadChunk, before: Any) -> Any:
    if work.teacher is None:
        return None
    if isinstance(work.teacher, Expectation):
        return work.teacher.at(work.plan.position_M[slice(*chunk.slots)])
    position_U = work.plan.teacher_U[slice(*chunk.teachers)]
    kept = before.kept(chunk.reused) if before is not None and chunk.reused else None
    return work.rows.teach(work.teacher.index_select(0, position_U), work.head_VH, kept)


def _slots(plan: HeadPlan, chunk: HeadChunk) -> Slots:
    rows = slice(*chunk.slots)
    grid = Grid(plan.cell_M[rows], chunk.blocks[1] - chunk.blocks[0], plan.block_size)
    return Slots(plan.label_M[rows], grid, plan.teacher_M[rows], plan.order_M[rows])


def _denominator(blocks: Blocks, totals: Totals, spec: LossSpec) -> Tensor:
    if spec.normalization == "weights":
        return totals["weights"]
    if spec.normalization == "supervised":
        return totals["supervised_at"].sum()[None]
    return torch.full_like(totals["weights"], float(blocks.num_rows))
