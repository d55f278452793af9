"""Which slots go through the head, in which chunks, and which teacher rows they need.

Only supervised slots are projected to the vocabulary. Chunks are whole blocks, because D-PACE and the streak factor
need a block's slots together. Anchors are sorted, so a chunk's slots share teacher positions among themselves and,
at its edge, with the chunk before: each target position is projected once.

Shapes: M supervised slots, U teacher positions to project, N blocks, B block size. The plan is host arithmetic;
make it on the CPU and move it with the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from remote.drafter.blocks import Blocks, on_device


@dataclass(frozen=True)
class HeadChunk:
    """One piece of the work; ranges are half open."""

    slots: tuple[int, int]  # of the M supervised slots
    blocks: tuple[int, int]  # of the N blocks
    teachers: tuple[int, int]  # of the U teacher positions to project now
    reused: int  # teacher rows taken over from the end of the chunk before


@dataclass(frozen=True)
class HeadPlan:
    block_size: int
    index_M: Tensor  # int64, rows of the hidden states (block tokens) that carry loss, ascending
    label_M: Tensor  # int64, data tokens
    cell_M: Tensor  # int64, position in the chunk's grid of blocks and slots
    position_M: Tensor  # int64, the context position whose target logits predict the slot
    teacher_M: Tensor  # int64, its row among the chunk's teachers, the reused ones first
    order_M: Tensor  # int64, the chunk's slots in the order of their teachers
    teacher_U: Tensor  # int64, context positions whose target logits predict the slots
    chunks: tuple[HeadChunk, ...]

    def to(self, device: torch.device | str) -> HeadPlan:
        return on_device(self, device)


def plan_head(blocks: Blocks, *, chunk_tokens: int) -> HeadPlan:
    """Cuts the supervised slots into chunks of at most `chunk_tokens` (one block is never divided)."""
    size = blocks.block_size
    supervised_NB = blocks.supervised_T.view(-1, size).cpu()
    teacher_T, label_T = blocks.teacher_T.cpu(), blocks.label_T.cpu()
    chunks: list[HeadChunk] = []
    cells, rows, new_teachers = [], [], []
    done_slots, done_teachers, last = 0, 0, torch.empty(0, dtype=torch.int64)
    for first, end in _block_ranges(supervised_NB.sum(1).tolist(), chunk_tokens):
        cell = supervised_NB[first:end].flatten().nonzero().flatten()
        teacher, row = torch.unique(teacher_T[first * size + cell], return_inverse=True)
        reused = _shared_edge(last, teacher)
        slots, teachers = (done_slots, done_slots + len(cell)), (done_teachers, done_teachers + len(teacher) - reused)
        chunks.append(HeadChunk(slots, (first, end), teachers, reused))
        cells.append(cell)
        rows.append(row)
        new_teachers.append(teacher[reused:])
        done_slots, done_teachers, last = slots[1], teachers[1], teacher
    index_M = supervised_NB.flatten().nonzero().flatten()
    return HeadPlan(
        block_size=size,
        index_M=index_M,
        label_M=label_T[index_M],
        cell_M=_joined(cells),
        position_M=teacher_T[index_M],
        teacher_M=_joined(rows),
        order_M=_joined([row.argsort(stable=True) for row in rows]),
        teacher_U=_joined(new_teachers),
        chunks=tuple(chunks),
    ).to(blocks.anchors_N.device)


def _block_ranges(counts: list[int], chunk_tokens: int) -> list[tuple[int, int]]:
    """Ranges of blocks whose supervised slots fit a chunk; blocks without any cost nothing and are passed over."""
    ranges: list[tuple[int, int]] = []
    held = 0
    for index, count in enumerate(counts):
        if count == 0:
            continue
        if ranges and held + count <= chunk_tokens:
            ranges[-1] = (ranges[-1][0], index + 1)
            held += count
        else:
            ranges.append((index, index + 1))
            held = count
    return ranges


def _shared_edge(before: Tensor, now: Tensor) -> int:
    """How many of `now`'s first positions are exactly `before`'s last ones; both ascend."""
    if before.numel() == 0:
        return 0
    count = int((now <= before[-1]).sum())
    return count if torch.equal(before[len(before) - count :], now[:count]) else 0


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
