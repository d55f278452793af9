"""Packed rows and blocks for the drafter's tests, small enough to read."""

from __future__ import annotations

import torch
from torch import Tensor

from remote.drafter.blocks import Blocks, Row, build_blocks, sample_anchors

MASK_ID = 3
NUM_SPECIAL = 4  # text tokens start here


def packed_row(lengths: list[int], *, padding: int = 0, vocab: int = 96, seed: int = 0, unmasked: float = 0.0) -> Row:
    """Documents of these lengths, then padding; a share `unmasked` of the tokens is out of the loss mask."""
    generator = torch.Generator().manual_seed(seed)
    size = sum(lengths) + padding
    document_S = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((padding,), -1)])
    position_S = torch.cat([torch.arange(n) for n in lengths] + [torch.zeros(padding, dtype=torch.int64)])
    mask_S = (torch.rand(size, generator=generator) >= unmasked) & (document_S >= 0)
    ids_S = torch.randint(NUM_SPECIAL, vocab, (size,), generator=generator)
    return Row(input_ids_S=ids_S, document_S=document_S, position_S=position_S, loss_mask_S=mask_S)


def blocks_of(row: Row, *, num_slots: int, block_size: int, max_anchors: int | None = None, seed: int = 0) -> Blocks:
    anchors_N, keep_N = sample_anchors(
        row,
        num_slots=num_slots,
        max_anchors=max_anchors or num_slots,
        per="row",
        generator=torch.Generator().manual_seed(seed),
    )
    return build_blocks(row, anchors_N, keep_N, block_size=block_size, mask_token_id=MASK_ID)


def relative_error(seen: Tensor, expected: Tensor) -> float:
    return float((seen.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))
