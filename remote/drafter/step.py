"""One optimizer step: rows become a micro-batch, micro-batches become one update.

Shapes: S context tokens of the packed row, N anchor slots, B block size, T = N·B, C = K·H captured features.

The loss of a step is one sum over one denominator, however the rows were cut into micro-batches
(D-PACE's and CAP's own denominators included), so accumulation changes memory and, beside rounding, nothing else.
Rounding: gradients add up in the dtype of the weights, so in bfloat16 each micro-batch rounds the sum once more.
A row without anchors contributes nothing and never skips a step. Anchors and noise are drawn from
(seed, epoch, row) alone: neither rank, step nor the order of rows changes them.

It reads no files and reports nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from remote.drafter.blocks import PAD_DOCUMENT, Blocks, Row, build_blocks, join_anchors, sample_anchors
from remote.drafter.data import Batch
from remote.drafter.head_plan import HeadPlan, plan_head
from remote.drafter.loss import LossSums, drafter_loss, known_denominator
from remote.drafter.teacher import Teacher, teacher_of, tensors_of
from remote.drafter.workbench import Workbench
from remote.spec import LOSS_TERMS, DataSpec

ON_PEER = "loss of peer "  # and its index: what a drafter's latch closes for that another one has seen


@dataclass(frozen=True)
class MicroBatch:
    """Some rows joined in one, on the device, with their blocks."""

    keys: tuple[tuple[int, int], ...]  # (epoch, row) of each row in it
    row: Row
    blocks: Blocks
    plan: HeadPlan
    features_SC: Tensor
    teacher: Teacher
    num_block_tokens: int  # of used blocks
    num_context_tokens: int  # without padding


@dataclass(frozen=True)
class StepResult:
    """Device values of one step; nothing here has been waited for."""

    sums: LossSums
    grad_norm: Tensor


def row_generator(
    seed: int, key: tuple[int, int], *, purpose: str, device: torch.device | str = "cpu"
) -> torch.Generator:
    """The randomness of one row in one epoch, for one purpose."""
    digest = hashlib.sha256(f"{purpose}/{seed}/{key[0]}/{key[1]}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def anchor_slots(data: DataSpec, *, most_documents: int) -> int:
    """Anchor slots of one row: static, so that shapes never change from step to step."""
    wanted = data.max_anchors * (most_documents if data.anchors_per == "document" else 1)
    return min(wanted, data.row_tokens)


def assemble(batch: Batch, bench: Workbench, *, num_slots: int) -> MicroBatch:
    """Draws the anchors of each row on the host, moves everything to the device once and adds the noise there."""
    spec, device = bench.spec, bench.device
    anchors = [
        sample_anchors(
            part,
            num_slots=num_slots,
            max_anchors=spec.data.max_anchors,
            per=spec.data.anchors_per,
            generator=row_generator(spec.train.seed, key, purpose="anchors"),
        )
        for part, key in zip(batch.parts, batch.keys, strict=True)
    ]
    blocks = build_blocks(
        batch.row,
        *join_anchors(anchors, [len(part.input_ids_S) for part in batch.parts]),
        block_size=spec.drafter.block_size,
        mask_token_id=spec.drafter.mask_token_id,
    )
    return MicroBatch(
        keys=batch.keys,
        row=batch.row.to(device),
        blocks=blocks.to(device),
        plan=plan_head(blocks, chunk_tokens=spec.loss.chunk_tokens).to(device),
        features_SC=_with_noise(batch, bench),
        teacher=teacher_of([tensor.to(device, non_blocking=True) for tensor in tensors_of(batch.teacher)]),
        num_block_tokens=int(blocks.keep_N.sum()) * blocks.block_size,
        num_context_tokens=int((batch.row.document_S != PAD_DOCUMENT).sum()),
    )


def run_step(step: int, micro_batches: Sequence[MicroBatch], bench: Workbench) -> StepResult:
    """Forward, backward and one update. The host never waits for the device here."""
    optimizer, meter, peers = bench.optimizer, bench.meter, bench.peers
    denominators = _own_denominators(micro_batches, bench)
    total: LossSums | None = None
    for index, micro_batch in enumerate(micro_batches):
        with peers.adding_up(bench.shared, is_last=index == len(micro_batches) - 1):
            with meter.part("forward"):
                sums = forward(micro_batch, bench)
                if index == 0:  # what this rank divides by, then what all of them do
                    denominators = peers.sum(_pair(sums) if denominators is None else denominators)
                assert denominators is not None
                objective = sums.objective(*denominators)
            optimizer.latch.watch(step, _watched(sums, objective), micro_batch=index)
            with meter.part("backward"):
                objective.backward()
        total = _detached(sums) if total is None else total + _detached(sums)
    assert total is not None, "a step has at least one micro-batch"
    _close_together(step, bench)
    with meter.part("optimizer"):
        grad_norm = optimizer.update(step)
    return StepResult(total, grad_norm)


def forward(micro_batch: MicroBatch, bench: Workbench) -> LossSums:
    """Loss sums of one micro-batch, differentiable where gradients are on."""
    blocks, plan = micro_batch.blocks, micro_batch.plan
    embeddings_UH = bench.embed(blocks.distinct_ids)
    hidden_MH = bench.shared(micro_batch.features_SC, embeddings_UH, micro_batch.row, blocks, plan.index_M)
    return drafter_loss(
        hidden_MH,
        blocks,
        head_VH=bench.head_VH,
        teacher=micro_batch.teacher,
        spec=bench.spec.loss,
        plan=plan,
        is_fused=bench.drafter.is_fused,
        coarse_head=bench.coarse_head,
    )


def _own_denominators(micro_batches: Sequence[MicroBatch], bench: Workbench) -> Tensor | None:
    """What this rank's micro-batches add to the divisors of the step, (loss, cap); None: the only one's own will do.

    D-PACE and CAP divide by what the drafter itself says, so several micro-batches need a sweep
    without gradients first: a third more work, and the exact sum.
    """
    if len(micro_batches) == 1:
        return None
    spec = bench.spec.loss
    known = [known_denominator(micro_batch.blocks, spec) for micro_batch in micro_batches]
    if not spec.terms.get("cap") and all(denominator is not None for denominator in known):
        denominator = torch.stack([denominator for denominator in known if denominator is not None]).sum()
        return torch.stack([denominator, torch.zeros_like(denominator)])
    with torch.no_grad(), bench.meter.part("forward"):
        return torch.stack([_pair(forward(micro_batch, bench)) for micro_batch in micro_batches]).sum(0)


def _pair(sums: LossSums) -> Tensor:
    return torch.stack([sums.denominator, sums.cap_denominator])


def _close_together(step: int, bench: Workbench) -> None:
    """A number that is not finite on one drafter keeps the weights of all as they are, and each knows on which it was."""
    latch, peers = bench.optimizer.latch, bench.peers
    if peers.num > 1:
        own_P = torch.zeros(peers.num, device=latch.is_closed.device)
        own_P[peers.index] = latch.is_closed
        closed_P = peers.sum(own_P)
        latch.watch(step, {f"{ON_PEER}{i}": torch.where(closed_P[i] > 0, torch.nan, 0.0) for i in range(peers.num)})


def _detached(sums: LossSums) -> LossSums:
    """The same sums without their graph, so that a window of steps can be added up."""
    numerator, cap_numerator = sums.numerator.detach(), sums.cap_numerator.detach()
    return dataclasses.replace(sums, numerator=numerator, cap_numerator=cap_numerator)


def _watched(sums: LossSums, objective: Tensor) -> dict[str, Tensor]:
    """Each term of the loss by its metric name, then the whole."""
    terms = {f"loss_{term}": sums.totals[term][0] for term in LOSS_TERMS if term in sums.totals}
    return terms | {"loss": objective}


def _with_noise(batch: Batch, bench: Workbench) -> Tensor:
    """The captured features on the device, each row noised by its own generator there: a CPU is too slow for wide rows."""
    noise, device = bench.spec.data.noise, bench.device
    features_SC = batch.features_SC.to(device, non_blocking=True)
    if noise.kind == "none" or noise.scale == 0:
        return features_SC
    drawn_SC = torch.empty_like(features_SC)
    pieces = drawn_SC.split([len(part.input_ids_S) for part in batch.parts])
    for piece, key in zip(pieces, batch.keys, strict=True):
        generator = row_generator(bench.spec.train.seed, key, purpose="noise", device=device)
        if noise.kind == "gaussian":
            piece.normal_(0.0, noise.scale, generator=generator)
        else:
            piece.uniform_(-noise.scale, noise.scale, generator=generator)
    return drawn_SC.add_(features_SC)  # not into the features: on a CPU they are the loader's own
