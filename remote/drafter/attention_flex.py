"""Attention through torch's flex_attention: block-sparse on CUDA, compiled once under a lock.

The block mask is built from the ranges (two integers a row), never from a dense grid: `create_block_mask` would
hold (T, S+T) booleans, 7 GB at 32,768 block tokens. Gradients need CUDA; the forward also runs on a CPU, uncompiled, for checks.

Two traps of torch 2.11 to 2.13: threads that make the first compiled call at once hang (FX tracing is a flag of the
whole process), so every call goes through one lock; and after eight recompilations dynamo silently falls back to the
eager kernel, which holds all scores, so `fullgraph=True` makes that an error. Keep S and T static.

Shapes: S context, T block tokens, Q query heads, G key/value heads, D head size; keys are ordered [S context | T block tokens].
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from remote.drafter.keys import KeyValues, MadeFrom
from remote.drafter.visibility import Visibility

TILE = 128  # rows and columns of one mask tile, flex's own default

_COMPILE_LOCK = threading.Lock()
_compiled: dict[str, Callable[..., Tensor]] = {}


def plan(visibility: Visibility) -> Callable[[Tensor, KeyValues], Tensor]:
    """Attention over these ranges; the block mask is built here, once for all layers that share them."""
    mask = block_mask(visibility)

    def attend(query_TQD: Tensor, keys: KeyValues, _: MadeFrom | None = None) -> Tensor:
        key = torch.cat([keys.context_key_SGD, keys.block_key_TGD]).transpose(0, 1)[None]
        value = torch.cat([keys.context_value_SGD, keys.block_value_TGD]).transpose(0, 1)[None]
        query = query_TQD.transpose(0, 1)[None]
        with _COMPILE_LOCK:
            out = _flex(query.device)(query, key, value, block_mask=mask, enable_gqa=query.shape[1] != key.shape[1])
        return out[0].transpose(0, 1)

    return attend


def block_mask(visibility: Visibility, tile: int = TILE) -> BlockMask:
    """The ranges as flex's tiles: those any row of the tile sees, and those every row sees whole."""
    num_tokens, num_context = visibility.start_T.shape[0], visibility.num_context
    num_tiles = -(-num_tokens // tile)
    start = _by_tile(visibility.start_T, num_tiles, tile)
    end = _by_tile(visibility.end_T, num_tiles, tile)
    low = torch.arange(0, num_context + num_tokens, tile, device=start.device)
    high = low + tile
    empty = start >= end  # rows of unused blocks see no context: they must not widen a tile
    first = torch.where(empty, num_context, start).amin(1, keepdim=True)
    last = torch.where(empty, 0, end).amax(1, keepdim=True)
    touched = (low < last) & (high > first)
    whole = (low >= start.amax(1, keepdim=True)) & (high <= end.amin(1, keepdim=True))
    own = _own_tiles(visibility, num_tiles, tile)
    partial_count, partial_index = _listed((touched & ~whole) | own)
    whole_count, whole_index = _listed(whole & ~own)
    return BlockMask.from_kv_blocks(
        partial_count, partial_index, whole_count, whole_index,
        BLOCK_SIZE=tile, mask_mod=mask_function(visibility), seq_lengths=(num_tokens, num_context + num_tokens),
    )  # fmt: skip


def mask_function(visibility: Visibility) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The mask element by element, in the form flex compiles into its kernel."""
    start_T, end_T = visibility.start_T, visibility.end_T
    num_context, block_size, causal = visibility.num_context, visibility.block_size, visibility.causal

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        context = (key < num_context) & (key >= start_T[query]) & (key < end_T[query])
        token = key - num_context
        own = (token >= 0) & (token // block_size == query // block_size)
        if causal:
            own = own & (token <= query)
        return context | own

    return sees


def _own_tiles(visibility: Visibility, num_tiles: int, tile: int) -> Tensor:
    """Key tiles that hold block tokens of a query tile's own blocks, bool (query tiles, key tiles)."""
    num_tokens, size = visibility.start_T.shape[0], visibility.block_size
    device = visibility.start_T.device
    first_row = torch.arange(num_tiles, device=device)[:, None] * tile
    last_row = (first_row + tile - 1).clamp(max=num_tokens - 1)
    low = torch.arange(0, visibility.num_context + num_tokens, tile, device=device) - visibility.num_context
    return (low < (last_row // size + 1) * size) & (low + tile > first_row // size * size)


def _by_tile(values_T: Tensor, num_tiles: int, tile: int) -> Tensor:
    """Values by query tile, the last tile filled up with the last value."""
    missing = num_tiles * tile - values_T.shape[0]
    return torch.cat([values_T, values_T[-1:].expand(missing)]).view(num_tiles, tile)


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Flex's form of a tile matrix: per query tile, how many key tiles and which ones first."""
    count = tiles.sum(1).to(torch.int32)
    index = tiles.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return count[None, None], index[None, None]


def _flex(device: torch.device) -> Callable[..., Tensor]:
    if device.type != "cuda":
        return flex_attention
    if "cuda" not in _compiled:
        _compiled["cuda"] = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return _compiled["cuda"]
