"""Who sees what: per drafter layer, the context range and the block columns every block token attends to.

Shapes: S context tokens, N blocks of B tokens, T = N·B. Keys are ordered [S context | T block tokens].
Row (b,k) sees context c iff start(b,k) ≤ c < a_b (strictly before its anchor, same document), and of the block
columns those of its own block: all of them, or j ≤ k where the layer is causal in the block. Rows of unused
blocks see only their own block, so that no softmax is ever empty.

Because documents are contiguous, two integers a row say it all; dense masks exist for the oracle and small chunks.

Window rules (W = sliding_window), as the public trainers have them:

| rule        | first context index              | in block      | which layers |
|---|---|---|---|
| specforge   | a + k - (W-1), moves with k      | causal        | those typed sliding |
| automodel   | a + k - (W-1), moves with k      | bidirectional | those typed sliding; all when no types are given |
| modelopt    | a + k - (W-1), moves with k      | bidirectional | those typed sliding; all when no types are given |
| speculators | a - W for every k                | causal        | those typed sliding |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from remote.drafter.blocks import Blocks
from remote.spec import DrafterSpec

WINDOW_ON_ALL_LAYERS = ("automodel", "modelopt")  # these trainers know one window for the whole drafter
BIDIRECTIONAL_WINDOW = ("automodel", "modelopt")


@dataclass(frozen=True)
class LayerRule:
    window: int | None  # None: the whole document before the anchor
    sloped: bool  # the window's edge moves with the slot
    causal: bool  # in the block


FULL = LayerRule(window=None, sloped=False, causal=False)


@dataclass(frozen=True)
class Visibility:
    """The ranges of one layer rule over one set of blocks."""

    start_T: Tensor  # int64, first visible context index
    end_T: Tensor  # int64, one past the last: the anchor
    num_context: int
    block_size: int
    causal: bool
    ranges: tuple[tuple[int, int], ...]  # host: per block, the widest [start, end) of its rows


def layer_types(drafter: DrafterSpec) -> list[str]:
    """ "full" or "sliding" for every layer as it is trained; an export must write these."""
    if drafter.layer_types:
        return list(drafter.layer_types)
    everywhere = drafter.sliding_window is not None and drafter.window_rule in WINDOW_ON_ALL_LAYERS
    return ["sliding" if everywhere else "full"] * drafter.num_layers


def layer_rule(drafter: DrafterSpec, index: int) -> LayerRule:
    """The rule of layer `index`. ValueError when a sliding layer's window is smaller than the block."""
    if layer_types(drafter)[index] == "full":
        return FULL
    window = drafter.sliding_window
    if window is None or window < drafter.block_size:
        raise ValueError(
            f"drafter.sliding_window is {window}; layer {index} is sliding and needs at least block_size {drafter.block_size}"
        )
    return window_meaning(drafter.window_rule, window)


def window_meaning(window_rule: str, window: int) -> LayerRule:
    """A sliding layer under the rule of that name."""
    return LayerRule(window=window, sloped=window_rule != "speculators", causal=window_rule not in BIDIRECTIONAL_WINDOW)


def visible(rule: LayerRule, blocks: Blocks, num_context: int) -> Visibility:
    """What the blocks of a training row see under `rule`."""
    first_T = blocks.anchors_N.repeat_interleave(blocks.block_size)
    document_T = blocks.context_start_N.repeat_interleave(blocks.block_size)
    return Visibility(
        start_T=torch.maximum(document_T, _window_start(rule, first_T, blocks.slot_T)),
        end_T=first_T,
        num_context=num_context,
        block_size=blocks.block_size,
        causal=rule.causal,
        ranges=tuple((max(start, _widest_start(rule, anchor)), anchor) for start, anchor in blocks.ranges),
    )


def visible_in_decoding(rule: LayerRule, *, num_context: int, block_size: int, device: torch.device) -> Visibility:
    """What one block sees after `num_context` tokens of a single document."""
    slot_B = torch.arange(block_size, device=device)
    end_B = torch.full_like(slot_B, num_context)
    return Visibility(
        start_T=_window_start(rule, end_B, slot_B).clamp(min=0),
        end_T=end_B,
        num_context=num_context,
        block_size=block_size,
        causal=rule.causal,
        ranges=((max(0, _widest_start(rule, num_context)), num_context),),
    )


def dense_mask(visibility: Visibility) -> Tensor:
    """The whole mask, bool (T, S+T): True where the query sees the key."""
    num_tokens = visibility.start_T.shape[0]
    return chunk_mask(visibility, rows=(0, num_tokens), context=(0, visibility.num_context))


def chunk_mask(visibility: Visibility, *, rows: tuple[int, int], context: tuple[int, int]) -> Tensor:
    """The mask of block tokens `rows` (whole blocks) over [context slice | these same block tokens]."""
    device = visibility.start_T.device
    index = torch.arange(*context, device=device)
    row = torch.arange(*rows, device=device)
    start, end = visibility.start_T[slice(*rows), None], visibility.end_T[slice(*rows), None]
    block = row // visibility.block_size
    own = block[:, None] == block
    if visibility.causal:
        own = own & (row <= row[:, None])
    return torch.cat([(index >= start) & (index < end), own], dim=1)


def _window_start(rule: LayerRule, anchor: Tensor, slot: Tensor) -> Tensor:
    if rule.window is None:
        return torch.zeros_like(anchor)
    return anchor + slot - (rule.window - 1) if rule.sloped else anchor - rule.window


def _widest_start(rule: LayerRule, anchor: int) -> int:
    if rule.window is None:
        return 0
    return anchor - (rule.window - 1) if rule.sloped else anchor - rule.window
