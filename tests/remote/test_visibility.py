"""Masks against the sentences of the rules: who sees what, for every window convention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remote.drafter.blocks import Row, build_blocks
from remote.drafter.visibility import FULL, dense_mask, layer_rule, layer_types, visible, visible_in_decoding
from remote.spec import DrafterSpec
from tests.remote.packed import MASK_ID, blocks_of, packed_row
from tests.remote.specs import tiny_spec

RULES = ("specforge", "automodel", "modelopt", "speculators")


def sliding(rule: str, window: int, block_size: int = 4) -> DrafterSpec:
    return replace(
        tiny_spec().drafter,
        layer_types=["sliding", "full"],
        sliding_window=window,
        window_rule=rule,
        block_size=block_size,
    )


def sees(row: Row, anchor: int, k: int, c: int, window: int | None, rule: str) -> bool:
    """Context visibility in the words of each public trainer."""
    if not (row.document_S[c] == row.document_S[anchor] and int(row.document_S[c]) != -1 and c < anchor):
        return False
    if window is None:
        return True
    return {
        "specforge": c >= anchor + k - (window - 1),
        "automodel": (anchor + k) - c < window,
        "modelopt": c > anchor + k - window,
        "speculators": c >= anchor - window,
    }[rule]


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    padding=st.integers(0, 3),
    window=st.integers(4, 9),
    seed=st.integers(0, 50),
)
def test_mask_equals_the_rule_element_by_element(
    rule: str, lengths: list[int], padding: int, window: int, seed: int
) -> None:
    row, drafter = packed_row(lengths, padding=padding, seed=seed), sliding(rule, window)
    blocks = blocks_of(row, num_slots=4, block_size=4, seed=seed)
    size = len(row.input_ids_S)

    for layer, width, causal in ((0, window, rule in ("specforge", "speculators")), (1, None, False)):
        mask = dense_mask(visible(layer_rule(drafter, layer), blocks, size))

        for t in range(16):
            b, k = divmod(t, 4)
            keep = bool(blocks.keep_N[b])
            context = [keep and sees(row, int(blocks.anchors_N[b]), k, c, width, rule) for c in range(size)]
            own = [c // 4 == b and (not causal or c % 4 <= k) for c in range(16)]
            assert mask[t].tolist() == context + own


@pytest.mark.parametrize(
    ("rule", "starts"),
    [
        ("specforge", [13, 14, 15, 16]),
        ("automodel", [13, 14, 15, 16]),
        ("modelopt", [13, 14, 15, 16]),
        ("speculators", [12, 12, 12, 12]),
    ],
)
def test_window_example_of_40_tokens_anchor_20_window_8(rule: str, starts: list[int]) -> None:
    row = packed_row([40])
    blocks = build_blocks(row, torch.tensor([20]), torch.tensor([True]), block_size=4, mask_token_id=MASK_ID)

    mask = dense_mask(visible(layer_rule(sliding(rule, 8), 0), blocks, 40))[:, :40]

    assert [row_mask.nonzero().flatten().tolist() for row_mask in mask] == [list(range(start, 20)) for start in starts]


def test_host_ranges_hold_every_visible_position() -> None:
    row = packed_row([30, 17], padding=2)
    blocks = blocks_of(row, num_slots=8, block_size=4)

    for rule in RULES:
        seen = visible(layer_rule(sliding(rule, 6), 0), blocks, len(row.input_ids_S))

        for block, (start, end) in enumerate(seen.ranges):
            columns = dense_mask(seen)[block * 4 : block * 4 + 4, : seen.num_context].any(0).nonzero().flatten()
            assert columns.tolist() == list(range(start, end))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_context", [0, 3, 25])
def test_decoding_sees_what_training_sees_after_the_same_context(rule: str, num_context: int) -> None:
    row = packed_row([num_context + 4])
    blocks = build_blocks(row, torch.tensor([num_context]), torch.tensor([True]), block_size=4, mask_token_id=MASK_ID)

    for layer in (0, 1):
        layer_is = layer_rule(sliding(rule, 6), layer)
        trained = dense_mask(visible(layer_is, blocks, num_context))
        decoded = dense_mask(
            visible_in_decoding(layer_is, num_context=num_context, block_size=4, device=torch.device("cpu"))
        )

        assert torch.equal(decoded, trained)


def test_layers_without_types_are_full_unless_the_convention_knows_one_window_for_all() -> None:
    plain = replace(tiny_spec().drafter, sliding_window=8)

    assert layer_types(plain) == ["full", "full"]
    assert layer_types(replace(plain, window_rule="speculators")) == ["full", "full"]
    assert layer_types(replace(plain, window_rule="automodel")) == ["sliding", "sliding"]
    assert layer_types(replace(plain, window_rule="modelopt", layer_types=["full", "sliding"])) == ["full", "sliding"]
    assert layer_rule(plain, 0) == FULL


def test_window_smaller_than_the_block_is_refused() -> None:
    with pytest.raises(ValueError, match="needs at least block_size 4"):
        layer_rule(sliding("specforge", 3), 0)
