"""What the sdpa backend takes at once: its chunks of blocks, cut as `remote.drafter.attention_sdpa` cuts them.

Anchors are taken evenly spread over documents of equal length, which is what random anchors are on average.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from remote.plan.sizes import Sizes, worst_documents
from remote.spec import DFlashSpec

LAUNCH_PAIRS = {"cuda": 1 << 20, "cpu": 1 << 14}  # query-key pairs worth one more kernel launch


class Chunk(NamedTuple):
    """Block tokens of neighbouring blocks, and the context positions any of them sees."""

    rows: int
    start: int
    end: int

    @property
    def pairs(self) -> int:
        return self.rows * (self.end - self.start + self.rows)


def largest_chunk_bytes(spec: DFlashSpec, at: Sizes, *, backward: bool) -> int:
    """Of the layers' rules the worst: joined keys, folded queries, output, mask; backwards their gradients too."""
    windows = {
        spec.drafter.sliding_window if kind == "sliding" else None for kind in spec.drafter.layer_types or ["full"]
    }
    length, budget_bytes = spec.data.row_tokens, spec.drafter.attention_workspace_bytes
    if spec.data.anchors_per == "document":
        length = -(-length // worst_documents(spec.data))
    largest = (_largest(at, length, budget_bytes, window) for window in windows)
    return max(backwards if backward else forward for forward, backwards in largest)


@lru_cache(maxsize=64)  # every stage asks for it, and it looks at each block
def _largest(at: Sizes, length: int, budget_bytes: int, window: int | None) -> tuple[int, int]:
    """Forward and backward, for documents of that length."""
    chunks = set(_chunks(at, length, budget_bytes, window))
    forward, backward = ({_bytes(chunk, at, backward=is_back) for chunk in chunks} for is_back in (False, True))
    return max(forward), max(backward)


def _chunks(at: Sizes, length: int, budget_bytes: int, window: int | None) -> list[Chunk]:
    """Neighbours are joined while the overhead per block (a launch, and pairs no block wanted) falls."""
    launch_pairs = LAUNCH_PAIRS["cuda" if at.is_cuda else "cpu"]
    chunks: list[Chunk] = []
    num_blocks, alone = 0, 0  # of the chunk being filled: its blocks, and their pairs taken one by one
    for index in range(at.blocks):
        single = _block(at, index, length, window)
        if chunks:
            joined, joined_alone = _join(chunks[-1], single), alone + single.pairs
            overhead = (launch_pairs + chunks[-1].pairs - alone) / num_blocks
            is_less = (launch_pairs + joined.pairs - joined_alone) / (num_blocks + 1) <= overhead
            if is_less and _budget_bytes(joined, at) <= budget_bytes:
                chunks[-1], num_blocks, alone = joined, num_blocks + 1, joined_alone
                continue
        chunks.append(single)
        num_blocks, alone = 1, single.pairs
    return chunks


def _block(at: Sizes, index: int, length: int, window: int | None) -> Chunk:
    anchor = (index + 1) * at.context_tokens // (at.blocks + 1)
    start = anchor // length * length
    return Chunk(at.block_size, start if window is None else max(start, anchor - window), anchor)


def _join(first: Chunk, second: Chunk) -> Chunk:
    return Chunk(first.rows + second.rows, min(first.start, second.start), max(first.end, second.end))


def _bytes(chunk: Chunk, at: Sizes, *, backward: bool) -> int:
    """The mask as bool and as the kernel's bias; the bool is gone when the backward kernel runs."""
    keys = chunk.end - chunk.start + chunk.rows
    elements = (2 * at.query_width * chunk.rows + 2 * at.key_width * keys) * at.element_bytes
    mask = at.heads // at.kv_heads * chunk.rows * keys
    forward = elements + mask * (1 + at.element_bytes)
    return max(forward, 2 * elements + mask * at.element_bytes) if backward else forward


def _budget_bytes(chunk: Chunk, at: Sizes) -> int:
    """What the trainer holds against `attention_workspace_bytes` when it cuts."""
    keys = chunk.end - chunk.start + chunk.rows
    elements = 2 * at.query_width * chunk.rows + 2 * at.key_width * keys
    return 2 * elements * at.element_bytes + at.heads // at.kv_heads * chunk.rows * keys * (1 + at.element_bytes)
