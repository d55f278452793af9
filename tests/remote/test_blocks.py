"""Anchors, blocks and labels against plain loops over positions; every rule of documents and masks by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remote.drafter.blocks import (
    UNSUPERVISED_LABEL,
    Row,
    build_blocks,
    candidates,
    check_row,
    join_anchors,
    join_rows,
    sample_anchors,
)
from tests.remote.packed import MASK_ID, blocks_of, packed_row

ROWS = st.builds(
    packed_row,
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    padding=st.integers(0, 4),
    seed=st.integers(0, 1000),
    unmasked=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def allowed_anchors(row: Row) -> list[int]:
    """The rule in words: this token and the next are supervised and of one document."""
    document, mask = row.document_S.tolist(), row.loss_mask_S.tolist()
    return [
        p
        for p in range(len(mask) - 1)
        if mask[p] and mask[p + 1] and document[p] == document[p + 1] and document[p] >= 0
    ]


@given(ROWS)
def test_candidates_are_supervised_pairs_of_one_document(row: Row) -> None:
    assert candidates(row).nonzero().flatten().tolist() == allowed_anchors(row)


@given(ROWS, st.integers(1, 12), st.integers(1, 12), st.integers(0, 100))
def test_anchors_per_row_are_distinct_sorted_candidates(row: Row, num_slots: int, max_anchors: int, seed: int) -> None:
    anchors_N, keep_N = sample_anchors(
        row, num_slots=num_slots, max_anchors=max_anchors, per="row", generator=generator(seed)
    )

    kept = anchors_N[keep_N].tolist()
    assert anchors_N.shape == keep_N.shape == (num_slots,)
    assert kept == sorted(set(kept))
    assert set(kept) <= set(allowed_anchors(row))
    assert len(kept) == min(num_slots, max_anchors, len(allowed_anchors(row)))
    assert keep_N.tolist() == sorted(keep_N.tolist(), reverse=True)
    assert torch.equal(anchors_N, anchors_N.sort().values)


@pytest.mark.slow
@given(ROWS, st.integers(1, 30), st.integers(1, 4), st.integers(0, 100))
def test_anchors_per_document_share_the_budget_by_document(row: Row, num_slots: int, most: int, seed: int) -> None:
    anchors_N, keep_N = sample_anchors(
        row, num_slots=num_slots, max_anchors=most, per="document", generator=generator(seed)
    )

    kept, allowed = anchors_N[keep_N].tolist(), allowed_anchors(row)
    by_document = {int(row.document_S[p]): 0 for p in allowed}
    for p in allowed:
        by_document[int(row.document_S[p])] += 1
    assert len(kept) == len(set(kept)) == min(num_slots, sum(min(most, count) for count in by_document.values()))
    assert set(kept) <= set(allowed)
    for document in by_document:
        assert sum(int(row.document_S[p]) == document for p in kept) <= most


@pytest.mark.slow
def test_every_candidate_is_drawn_equally_often() -> None:
    row, draws = packed_row([6, 5]), torch.zeros(11)
    source = generator(7)

    for _ in range(4000):
        anchors_N, keep_N = sample_anchors(row, num_slots=3, max_anchors=3, per="row", generator=source)
        draws[anchors_N[keep_N]] += 1

    expected = 4000 * 3 / 9
    assert draws[[5, 10]].tolist() == [0, 0]
    assert (draws[candidates(row)] - expected).abs().max() < 5 * expected**0.5


def test_same_seed_gives_the_same_anchors_and_the_next_draw_others() -> None:
    row = packed_row([200])
    source, twin = generator(3), generator(3)

    first, again = (
        sample_anchors(row, num_slots=20, max_anchors=20, per="row", generator=each)[0] for each in (source, twin)
    )
    second = sample_anchors(row, num_slots=20, max_anchors=20, per="row", generator=source)[0]

    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_row_without_candidates_leaves_every_slot_unused() -> None:
    row = packed_row([1, 1, 1], padding=2)

    blocks = blocks_of(row, num_slots=4, block_size=3)

    assert not blocks.keep_N.any()
    assert not blocks.supervised_T.any()
    assert blocks.ids_T.tolist() == [MASK_ID] * 12
    assert all(start == end for start, end in blocks.ranges)


@given(ROWS, st.integers(2, 6), st.integers(0, 100))
def test_blocks_follow_the_formulas_slot_by_slot(row: Row, block_size: int, seed: int) -> None:
    blocks = blocks_of(row, num_slots=6, block_size=block_size, seed=seed)

    size, ids, document = len(row.input_ids_S), row.input_ids_S.tolist(), row.document_S.tolist()
    for b, (anchor, keep) in enumerate(zip(blocks.anchors_N.tolist(), blocks.keep_N.tolist(), strict=True)):
        assert int(blocks.document_N[b]) == (document[anchor] if keep else -1)
        if keep:
            assert int(blocks.context_start_N[b]) == document.index(document[anchor])
            assert blocks.ranges[b] == (document.index(document[anchor]), anchor)
        for k in range(block_size):
            t, p = b * block_size + k, anchor + k
            omega = keep and k >= 1 and p < size and document[p] == document[anchor] and bool(row.loss_mask_S[p])
            assert int(blocks.slot_T[t]) == k
            assert bool(blocks.supervised_T[t]) == omega
            assert int(blocks.label_T[t]) == (ids[p] if omega else UNSUPERVISED_LABEL)
            assert int(blocks.ids_T[t]) == (ids[anchor] if keep and k == 0 else MASK_ID)
            if keep:
                assert int(blocks.position_T[t]) == int(row.position_S[anchor]) + k
            if omega:
                assert int(blocks.teacher_T[t]) == p - 1


def test_labels_never_cross_into_the_next_document() -> None:
    """Two documents of 48 tokens, blocks of 4 on every candidate: labels by attention alone would cross."""
    row = packed_row([48, 48])
    blocks = blocks_of(row, num_slots=94, block_size=4)

    label_position_T = blocks.anchors_N.repeat_interleave(4) + blocks.slot_T
    crossing = blocks.supervised_T & (
        row.document_S[label_position_T.clamp(max=95)] != blocks.document_N.repeat_interleave(4)
    )

    assert blocks.keep_N.all()
    assert not crossing.any()
    assert int(blocks.supervised_T.sum()) == 2 * (45 * 3 + 2 + 1)


def test_anchors_of_rows_drawn_one_by_one_equal_anchors_of_the_joined_row() -> None:
    rows = [packed_row([5, 7], padding=2, seed=1), packed_row([9], seed=2), packed_row([1], seed=3)]
    parts = [
        sample_anchors(row, num_slots=4, max_anchors=4, per="row", generator=generator(i)) for i, row in enumerate(rows)
    ]

    joined = join_rows(rows)
    anchors_N, keep_N = join_anchors(parts, [14, 9, 1])
    blocks = build_blocks(joined, anchors_N, keep_N, block_size=3, mask_token_id=MASK_ID)

    own = [build_blocks(row, *part, block_size=3, mask_token_id=MASK_ID) for row, part in zip(rows, parts, strict=True)]
    check_row(joined)
    assert joined.num_rows == blocks.num_rows == 3
    assert joined.document_S.unique().tolist() == [-1, 0, 1, 2, 3]
    assert keep_N.sum() == sum(piece.keep_N.sum() for piece in own)
    for name in ("ids_T", "position_T", "label_T", "supervised_T"):
        kept = torch.cat([getattr(piece, name).view(-1, 3)[piece.keep_N] for piece in own])
        assert torch.equal(getattr(blocks, name).view(-1, 3)[keep_N], kept)


BROKEN = {
    "common length": {"loss_mask_S": torch.ones(3, dtype=torch.bool)},
    "must be bool": {"loss_mask_S": torch.ones(6)},
    "covers padding": {"document_S": torch.tensor([0, 0, 0, 1, 1, -1])},
    "not contiguous": {"document_S": torch.tensor([0, 0, 1, 1, 0, 0])},
    "restart at 0": {"position_S": torch.arange(1, 7)},
}


@pytest.mark.parametrize("message", BROKEN)
def test_broken_row_is_refused_by_name(message: str) -> None:
    row = packed_row([3, 3])

    with pytest.raises(ValueError, match=message):
        check_row(replace(row, **BROKEN[message]))


def test_moving_keeps_every_value() -> None:
    blocks = blocks_of(packed_row([8]), num_slots=3, block_size=2)

    moved = blocks.to("meta")

    assert moved.anchors_N.device.type == moved.label_T.device.type == "meta"
    assert (moved.ranges, moved.block_size, moved.num_blocks) == (blocks.ranges, 2, 3)
