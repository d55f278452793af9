"""Attention of block tokens over a range of context and their own block, in three kernels without any mask tensor.

A row sees context `start ≤ c < end` and the tokens of its own block (or those up to itself). Anchors are sorted, so
starts and ends never fall from block to block: a tile of rows touches one range of context, most of it whole, and a tile
of context is seen by one range of blocks. Two integers a row say it all; tiles outside the ranges are never loaded.

The query heads that share a key/value head are folded into the rows of a tile (slots and heads padded to powers of two),
so that a tile holds whole blocks and owns the gradient of their own keys: no atomics, the same bits every time.
Online softmax after FlashAttention-2 (arXiv 2307.08691), in base two; the backward keeps only the output and a
log-sum-exp a row and recomputes the scores.

Shapes: S context tokens, T block tokens (N blocks of B), Q query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from remote import own_attention
from remote.drafter.kernels import attention_hopper, launch
from remote.drafter.kernels.attention_backward import context_gradient_kernel, query_gradient_kernel
from remote.drafter.kernels.attention_forward import forward_kernel
from remote.drafter.kernels.launch import can_launch, precision
from remote.drafter.keys import KeyValues, MadeFrom
from remote.drafter.visibility import Visibility, chunk_mask
from remote.own_attention import block_rows, power_of_two
from remote.spec import DrafterSpec


@dataclass(frozen=True)
class Tile:
    rows: int  # query rows: slots × heads of a group
    keys: int  # context tokens
    stages: int  # of the software pipeline
    warps: int


@dataclass(frozen=True)
class Tiles:
    """Of the three kernels; found by timing on an H200, and for smaller shared memory (99 KiB) by its size alone."""

    forward: Tile
    query: Tile
    context: Tile
    is_hopper: bool = False  # the kernels of `attention_hopper`: of a tile, how many warps and rows are theirs to say


HOPPER_TILES = Tiles(Tile(128, 128, 3, 4), Tile(128, 64, 4, 4), Tile(64, 128, 3, 4), is_hopper=True)
LARGE_TILES = Tiles(Tile(128, 64, 2, 4), Tile(128, 64, 3, 8), Tile(64, 64, 2, 4))
SMALL_TILES = Tiles(Tile(128, 64, 2, 8), Tile(128, 32, 2, 8), Tile(64, 64, 2, 4))
LARGE_SHARED_MEMORY = ((8, 0), (9, 0), (10, 0), (10, 3))  # compute capabilities with 160 KiB and more


@dataclass(frozen=True)
class Case:
    """What decides between kernels: nothing that changes from step to step of a training."""

    block_size: int
    group: int  # query heads that share a key
    head_dim: int
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, drafter: DrafterSpec, *, device: torch.device, dtype: torch.dtype) -> Case:
        group = drafter.num_heads // drafter.num_kv_heads
        return cls(drafter.block_size, group, drafter.head_dim, device, dtype)


def plan(
    visibility: Visibility, *, tiles: Tiles | None = None, for_all_cards: bool = False
) -> Callable[[Tensor, KeyValues], Tensor]:
    """Attention over these ranges. Made once a step for all layers that share them; a few small device operations.

    By the kernels of `tiles_for`; by plain torch where these do not fit. `tiles`: those of a test or a trial, unasked.
    """
    ranges: list[Ranges] = []

    @launch.on_its_device
    def attend(query_TQD: Tensor, keys: KeyValues, made_from: MadeFrom | None = None) -> Tensor:
        case = _case(query_TQD, keys, visibility)
        taken = tiles or tiles_for(case, for_all_cards=for_all_cards)
        if not can_launch(query_TQD) or (tiles is None and misfit(case, taken) is not None):
            return attention_reference(query_TQD, keys, visibility)
        if not ranges:
            ranges.append(read_ranges(visibility, taken))
        inputs = [tensor.contiguous() for tensor in (query_TQD, *keys)]
        out: Tensor = _RangedAttention.apply(*inputs, ranges[0], made_from)
        return out

    return attend


def obstacle(drafter: DrafterSpec, *, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot train here, or None."""
    case = Case.of(drafter, device=device, dtype=dtype)
    return launch.obstacle(device=device, dtype=dtype) or misfit(case, tiles_for(case))


def misfit(case: Case, tiles: Tiles) -> str | None:
    """What of the case no tile can hold, or None."""
    return own_attention.misfit(
        block_size=case.block_size,
        group=case.group,
        head_dim=case.head_dim,
        is_hopper=tiles.is_hopper,
        is_float32=case.device.type == "cuda" and case.dtype == torch.float32,
    )


def _case(query_TQD: Tensor, keys: KeyValues, visibility: Visibility) -> Case:
    _, num_heads, head_dim = query_TQD.shape
    group = num_heads // keys.block_key_TGD.shape[1]
    return Case(visibility.block_size, group, head_dim, query_TQD.device, query_TQD.dtype)


def attention_reference(query_TQD: Tensor, keys: KeyValues, visibility: Visibility) -> Tensor:
    """The same block by block in plain torch, over exactly the context that any row of the block sees."""
    size, (num_heads, head_dim) = visibility.block_size, query_TQD.shape[1:]
    work = torch.promote_types(query_TQD.dtype, torch.float32)
    query, *rest = (tensor.to(work) for tensor in (query_TQD, *keys))
    context_key, context_value, block_key, block_value = (
        tensor.repeat_interleave(num_heads // tensor.shape[1], dim=1) for tensor in rest
    )
    out = []
    for number, (start, end) in enumerate(visibility.ranges):
        rows, context = (number * size, (number + 1) * size), (start, max(start, end))
        key = torch.cat([context_key[slice(*context)], block_key[slice(*rows)]])
        value = torch.cat([context_value[slice(*context)], block_value[slice(*rows)]])
        score = torch.einsum("bqd,nqd->qbn", query[slice(*rows)], key) / math.sqrt(head_dim)
        score = score.masked_fill(~chunk_mask(visibility, rows=rows, context=context), -math.inf)
        out.append(torch.einsum("qbn,nqd->bqd", score.softmax(-1), value))
    return torch.cat(out).to(query_TQD.dtype)


@dataclass(frozen=True)
class Ranges:
    """What the kernels read of a Visibility: int32 on the device, found without waiting for it."""

    start_T: Tensor
    end_T: Tensor
    seen_by: Tensor  # (4, context tiles): blocks [0]..[3] see some of the tile, those from [1] to [2] all of it
    visibility: Visibility
    tiles: Tiles


def read_ranges(visibility: Visibility, tiles: Tiles) -> Ranges:
    """Of a sorted row of blocks; the narrowest range of a block starts with its last slot."""
    size = visibility.block_size
    start_NB, end_N = visibility.start_T.view(-1, size), visibility.end_T[::size].contiguous()
    first_N, last_N = start_NB[:, 0].contiguous(), start_NB[:, -1].contiguous()
    low = torch.arange(0, visibility.num_context, tiles.context.keys, device=end_N.device)
    high = low + tiles.context.keys
    begin = torch.searchsorted(end_N, low, right=True)  # the first block whose end lies beyond the tile's first key
    whole_begin = torch.searchsorted(end_N, high)
    whole_end = torch.searchsorted(last_N, low, right=True)
    finish = torch.maximum(torch.searchsorted(first_N, high), begin)
    seen_by = torch.stack([begin, whole_begin, torch.minimum(whole_end, finish), finish])
    return Ranges(
        visibility.start_T.to(torch.int32), visibility.end_T.to(torch.int32), seen_by.to(torch.int32), visibility, tiles
    )


def tiles_for(case: Case, *, for_all_cards: bool = False) -> Tiles:
    """The fastest of this card; `for_all_cards`: of the kernels that every card has."""
    device = case.device
    if not for_all_cards and attention_hopper.can_launch(case):
        return HOPPER_TILES
    if device.type == "cuda" and torch.cuda.get_device_capability(device) not in LARGE_SHARED_MEMORY:
        return SMALL_TILES
    return LARGE_TILES


class _RangedAttention(torch.autograd.Function):
    """query_TQD, four key/value tensors -> out_TQD."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, context_key: Tensor, context_value: Tensor, block_key: Tensor, block_value: Tensor,
        ranges: Ranges, made_from: MadeFrom | None,
    ) -> Tensor:  # fmt: skip
        out, log_sum = forward_pass((query, context_key, context_value, block_key, block_value), ranges)
        made = (query, block_key) if made_from is None else (made_from.query, made_from.block_key)
        ctx.save_for_backward(*made, context_key, context_value, block_value, out, log_sum)
        ctx.ranges, ctx.make = ranges, None if made_from is None else made_from.make
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, block_key, context_key, context_value, block_value, out, log_sum = ctx.saved_tensors
        if ctx.make is not None:
            query, block_key = ctx.make(query, block_key)
        inputs = (query, context_key, context_value, block_key, block_value)
        ranges, grad_out = ctx.ranges, grad_out.contiguous()
        delta, grad_query, *grads_of_block = query_gradient_pass(inputs, ranges, out, log_sum, grad_out)
        grads_of_context = context_gradient_pass(inputs, ranges, log_sum, grad_out, delta)
        return grad_query, *grads_of_context, *grads_of_block, None, None


# One launch each, as `benchmarks.tiles` times them. inputs: query, context key and value, block key and value.


def forward_pass(inputs: Sequence[Tensor], ranges: Ranges) -> tuple[Tensor, Tensor]:
    """The output and each row's log-sum-exp in base two."""
    shape, out = Shape.of(inputs, ranges), torch.empty_like(inputs[0])
    if ranges.tiles.is_hopper:
        return attention_hopper.forward_pass(inputs, ranges, shape)
    numbers = (shape.num_kv_heads, shape.num_blocks * shape.block_rows)  # one for every row, padding included
    log_sum = out.new_empty(numbers, dtype=torch.float32)
    tile = ranges.tiles.forward
    forward_kernel[shape.grid(tile)](
        *inputs, ranges.start_T, ranges.end_T, out, log_sum,
        *shape.lengths, shape.scale, CAUSAL=ranges.visibility.causal, **shape.constants(tile, is_whole=True),
    )  # fmt: skip
    return out, log_sum


def query_gradient_pass(
    inputs: Sequence[Tensor], ranges: Ranges, out: Tensor, log_sum: Tensor, grad_out: Tensor
) -> tuple[Tensor, ...]:
    """Each row's Σ out·grad_out, then the gradients of query, block key and block value."""
    query, _, _, block_key, block_value = inputs
    shape, tile = Shape.of(inputs, ranges), ranges.tiles.query
    if ranges.tiles.is_hopper:
        return attention_hopper.query_gradient_pass(inputs, ranges, shape, out, log_sum, grad_out)
    delta, grads = torch.empty_like(log_sum), [torch.empty_like(each) for each in (query, block_key, block_value)]
    query_gradient_kernel[shape.grid(tile)](
        *inputs, ranges.start_T, ranges.end_T, out, log_sum, grad_out, delta, *grads,
        *shape.lengths, shape.scale, CAUSAL=ranges.visibility.causal, **shape.constants(tile, is_whole=True),
    )  # fmt: skip
    return delta, *grads


def context_gradient_pass(
    inputs: Sequence[Tensor], ranges: Ranges, log_sum: Tensor, grad_out: Tensor, delta: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of context key and value."""
    query, key, value, _, _ = inputs
    shape, tile = Shape.of(inputs, ranges), ranges.tiles.context
    if ranges.tiles.is_hopper:
        return attention_hopper.context_gradient_pass(inputs, ranges, shape, log_sum, grad_out, delta)
    grads = torch.empty_like(key), torch.empty_like(value)
    context_gradient_kernel[(ranges.seen_by.shape[1] * shape.num_kv_heads,)](
        query, key, value, ranges.start_T, ranges.end_T, log_sum, grad_out, delta, *grads, ranges.seen_by,
        *shape.lengths, shape.scale, **shape.constants(tile, is_whole=False),
    )  # fmt: skip
    return grads


@dataclass(frozen=True)
class Shape:
    num_tokens: int
    num_context: int
    block_size: int
    num_kv_heads: int
    group: int
    head_dim: int
    precision: str

    @classmethod
    def of(cls, inputs: Sequence[Tensor], ranges: Ranges) -> Shape:
        query, context_key, *_ = inputs
        (num_tokens, num_heads, head_dim), num_kv_heads = query.shape, context_key.shape[1]
        size, group = ranges.visibility.block_size, num_heads // num_kv_heads
        return cls(num_tokens, context_key.shape[0], size, num_kv_heads, group, head_dim, precision(query))

    @property
    def num_blocks(self) -> int:
        return self.num_tokens // self.block_size

    @property
    def lengths(self) -> tuple[int, int]:
        return self.num_context, self.num_blocks

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)

    @property
    def block_rows(self) -> int:
        return block_rows(self.block_size, self.group)

    def grid(self, tile: Tile) -> tuple[int, int]:
        rows = max(tile.rows, self.block_rows)
        return -(-self.num_blocks * self.block_rows // rows), self.num_kv_heads

    def widths(self) -> dict[str, Any]:
        return {
            "BLOCK": self.block_size,
            "SLOTS": power_of_two(self.block_size),
            "GROUP": self.group,
            "GROUP_PAD": power_of_two(self.group),
            "KV_HEADS": self.num_kv_heads,
            "DIM": self.head_dim,
        }

    def constants(self, tile: Tile, *, is_whole: bool) -> dict[str, Any]:
        """What the kernels are compiled for. `is_whole`: a tile must hold whole blocks, whose keys it owns."""
        return self.widths() | {
            "ROWS": max(tile.rows, self.block_rows) if is_whole else tile.rows,
            "KEYS": tile.keys,
            "STAGES": tile.stages,
            "PRECISION": self.precision,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }
