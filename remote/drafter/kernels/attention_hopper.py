"""`attention`'s three passes for Hopper cards, by kernels that say which warps copy and which multiply.

The same sums over the same ranges: keys by tile of context, the query heads of a group folded into rows. What differs is
who waits for whom (see `attention_hopper_forward`), and that a row's numbers (its log-sum-exp, its delta) stand head by head
in the order of tokens. Copies are described by tensors' shapes, so that padding costs no arithmetic. Measured against
`attention`'s own kernels by `benchmarks.tiles`; the reference is `attention.attention_reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from remote.drafter.kernels import gluon
from remote.drafter.kernels.attention_backward import own_gradient_kernel
from remote.drafter.kernels.attention_hopper_backward import context_gradient_kernel, query_gradient_kernel
from remote.drafter.kernels.attention_hopper_forward import forward_kernel
from remote.drafter.kernels.gluon import numbers_of, rows_of
from remote.own_attention import HOPPER_COPIED_TOKENS, fits_hopper

if TYPE_CHECKING:
    from remote.drafter.kernels.attention import Case, Ranges, Shape, Tile

TILE_ROWS = 128  # two groups of warps with 64 rows each
CONTEXT_KEYS = 128  # two groups with 64 keys each
OWN_WARPS = 4


def can_launch(case: Case) -> bool:
    """On a Hopper card whose Triton has Gluon, for the widths that fit."""
    fits = fits_hopper(block_size=case.block_size, head_dim=case.head_dim, element_bytes=case.dtype.itemsize)
    return fits and gluon.can_launch(case.device)


def forward_pass(inputs: Sequence[Tensor], ranges: Ranges, shape: Shape) -> tuple[Tensor, Tensor]:
    """The output and log-sum-exps in base two, (Q, T)."""
    query, out, tile = inputs[0], torch.empty_like(inputs[0]), ranges.tiles.forward
    _hold(shape, tile)
    assert constants(shape, tile)["OWN"] == 1, "the first turn is the only one over own keys: more would wait for ever"
    log_sum = out.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)
    forward_kernel[_grid(shape)](
        query, *(rows_of(each, tile.keys) for each in inputs[1:]), ranges.start_T, ranges.end_T, out, log_sum,
        shape.num_blocks, shape.scale, CAUSAL=ranges.visibility.causal, **constants(shape, tile),
    )  # fmt: skip
    return out, log_sum


def query_gradient_pass(
    inputs: Sequence[Tensor], ranges: Ranges, shape: Shape, out: Tensor, log_sum: Tensor, grad_out: Tensor
) -> tuple[Tensor, ...]:
    """Each row's Σ out·grad_out, (Q, T), then the gradients of query, block key and block value."""
    query = inputs[0]
    tile, grad_query = ranges.tiles.query, torch.empty_like(query)
    _hold(shape, tile)
    delta, *grads_of_block = own_gradient_pass(inputs, ranges, shape, out, log_sum, grad_out)
    query_gradient_kernel[_grid(shape)](
        query, *(rows_of(each, tile.keys) for each in inputs[1:]), ranges.start_T, ranges.end_T, log_sum, grad_out, delta,
        grad_query, shape.num_blocks, shape.scale, CAUSAL=ranges.visibility.causal,
        **constants(shape, tile),
    )  # fmt: skip
    return delta, grad_query, *grads_of_block


def own_gradient_pass(
    inputs: Sequence[Tensor], ranges: Ranges, shape: Shape, out: Tensor, log_sum: Tensor, grad_out: Tensor
) -> tuple[Tensor, ...]:
    """Each row's Σ out·grad_out, (Q, T), and the gradients of block key and block value."""
    query, _, _, block_key, block_value = inputs
    delta, grads = torch.empty_like(log_sum), [torch.empty_like(each) for each in (block_key, block_value)]
    own_gradient_kernel[(shape.num_blocks * shape.num_kv_heads,)](
        query, block_key, block_value, out, log_sum, grad_out, delta, *grads, shape.num_blocks, shape.scale,
        CAUSAL=ranges.visibility.causal, **own_constants(shape),
    )  # fmt: skip
    return delta, *grads


def context_gradient_pass(
    inputs: Sequence[Tensor], ranges: Ranges, shape: Shape, log_sum: Tensor, grad_out: Tensor, delta: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of context key and value."""
    query, key, value, _, _ = inputs
    tile, grads = ranges.tiles.context, (torch.empty_like(key), torch.empty_like(value))
    assert tile.keys == CONTEXT_KEYS, "seen_by lists the tiles of context that the kernel takes"
    assert shape.num_tokens % HOPPER_COPIED_TOKENS == 0, "each head's numbers begin at a whole copy"
    half = CONTEXT_KEYS // 2
    context_gradient_kernel[(ranges.seen_by.shape[1] * shape.num_kv_heads,)](
        rows_of(query, tile.rows), rows_of(key, half), rows_of(value, half), ranges.start_T, ranges.end_T,
        numbers_of(log_sum, tile.rows), rows_of(grad_out, tile.rows), numbers_of(delta, tile.rows), *grads, ranges.seen_by,
        shape.num_context, shape.num_tokens, shape.scale, **context_constants(shape, tile),
    )  # fmt: skip
    return grads


def _hold(shape: Shape, tile: Tile) -> None:
    assert tile.rows == TILE_ROWS, "two groups of warps have 64 rows each"
    assert shape.block_rows <= TILE_ROWS, "a tile holds whole blocks"


def _grid(shape: Shape) -> tuple[int]:
    return (-(-shape.num_blocks * shape.block_rows // TILE_ROWS) * shape.num_kv_heads,)


def constants(shape: Shape, tile: Tile) -> dict[str, Any]:
    """`OWN`: turns in which a tile sees its own blocks' keys."""
    own_tokens = TILE_ROWS // shape.block_rows * shape.block_size
    turns = {"OWN": -(-own_tokens // tile.keys), "KEYS": tile.keys, "STAGES": tile.stages}
    return {**shape.widths(), **turns, "num_warps": 4}  # of the first group; the others' are added to it


def context_constants(shape: Shape, tile: Tile) -> dict[str, Any]:
    """Rows are tokens of one head here: no slot and no head is padded."""
    widths = {name: width for name, width in shape.widths().items() if name not in ("SLOTS", "GROUP_PAD")}
    return {**widths, "ROWS": tile.rows, "STAGES": tile.stages, "num_warps": 4}


def own_constants(shape: Shape) -> dict[str, Any]:
    """A program has one block, head by head; the least side of a product is 16."""
    widths = {name: width for name, width in shape.widths().items() if name != "GROUP_PAD"}
    return {**widths, "SLOTS": max(16, widths["SLOTS"]), "PRECISION": shape.precision, "num_warps": OWN_WARPS}
