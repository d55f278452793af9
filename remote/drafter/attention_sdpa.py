"""Attention through torch's scaled_dot_product_attention, in chunks that stay inside a memory budget.

Anchors are sorted, so neighbouring blocks see nearly the same context: a chunk of whole blocks takes one slice of
the context keys (gathering per block would copy the context once a block) plus its own block tokens, under one small mask.
Grouped heads are folded into the query rows: keys and values are never expanded, and every SDPA kernel stays
available (`enable_gqa` with a mask leaves only cuDNN and math on torch 2.11).

The backward recomputes each chunk instead of keeping it: what outlives the forward is the inputs alone. Gradients
of the shared context are summed in at least float32.

Shapes: S context, T block tokens, Q query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from remote.drafter.keys import KeyValues, MadeFrom
from remote.drafter.visibility import Visibility, chunk_mask

# Query-key pairs that the launches of one more chunk are worth, by device type.
LAUNCH_PAIRS = {"cuda": 1 << 20, "cpu": 1 << 14}
MATH_SCORE_COPIES = 4  # the math kernel holds scores, masked scores, probabilities and, backwards, their gradient


@dataclass(frozen=True)
class Chunk:
    rows: tuple[int, int]  # block tokens, whole blocks
    context: tuple[int, int]  # the slice of context that any of them sees


@dataclass(frozen=True)
class HeadShape:
    """What the memory of a chunk depends on beside its lengths."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int
    fused: bool


def plan(visibility: Visibility, *, workspace_bytes: int) -> Callable[[Tensor, KeyValues], Tensor]:
    """Attention over these ranges; the chunks are cut at the first call and serve every layer."""
    chunks: dict[HeadShape, list[Chunk]] = {}

    def attend(query_TQD: Tensor, keys: KeyValues, _: MadeFrom | None = None) -> Tensor:
        shape = _head_shape(query_TQD, keys)
        if shape not in chunks:
            launch_pairs = LAUNCH_PAIRS.get(query_TQD.device.type, LAUNCH_PAIRS["cpu"])
            chunks[shape] = cut_chunks(visibility, shape, workspace_bytes=workspace_bytes, launch_pairs=launch_pairs)
        out: Tensor = _ChunkedAttention.apply(query_TQD, *keys, visibility, chunks[shape])
        return out

    return attend


def cut_chunks(visibility: Visibility, shape: HeadShape, *, workspace_bytes: int, launch_pairs: int) -> list[Chunk]:
    """Joins neighbouring blocks while the overhead per block falls and the budget holds; never divides a block.

    A chunk's overhead is its launch, in query-key pairs, plus the pairs its blocks would not have had one by one.
    """
    size = visibility.block_size
    chunks: list[Chunk] = []
    num_blocks, alone = 0, 0  # of the chunk being filled: its blocks, and their pairs taken one by one
    for index, (start, end) in enumerate(visibility.ranges):
        single = Chunk(rows=(index * size, (index + 1) * size), context=(start, max(start, end)))
        if chunks:
            joined, joined_alone = _join(chunks[-1], single), alone + _pairs(single)
            overhead = (launch_pairs + _pairs(chunks[-1]) - alone) / num_blocks
            joined_overhead = (launch_pairs + _pairs(joined) - joined_alone) / (num_blocks + 1)
            if joined_overhead <= overhead and chunk_bytes(joined, shape) <= workspace_bytes:
                chunks[-1], num_blocks, alone = joined, num_blocks + 1, joined_alone
                continue
        chunks.append(single)
        num_blocks, alone = 1, _pairs(single)
    return chunks


def chunk_bytes(chunk: Chunk, shape: HeadShape) -> int:
    """What the forward and backward of one chunk materialise at once, in bytes.

    Joined keys and values, folded queries, the output and the gradients of all four; the mask as bool and as the
    kernel's additive bias; and, for the math kernel, float32 copies and the scores of every head.
    """
    rows, keys = _num_rows(chunk), _num_keys(chunk)
    elements = 2 * shape.num_heads * rows * shape.head_dim + 2 * shape.num_kv_heads * keys * shape.head_dim
    group = shape.num_heads // shape.num_kv_heads
    mask = group * rows * keys * (1 + shape.element_bytes)
    if shape.fused:
        return 2 * elements * shape.element_bytes + mask
    work_bytes = max(4, shape.element_bytes)
    scores = MATH_SCORE_COPIES * shape.num_heads * rows * keys * work_bytes
    return 2 * elements * (shape.element_bytes + work_bytes) + mask + scores


@functools.cache
def is_fused(*, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether SDPA has, for a masked call here, a kernel that does not hold the scores."""
    if device.type == "cpu":
        return torch.backends.cuda.flash_sdp_enabled()  # the name notwithstanding, the switch of the CPU kernel too
    if device.type != "cuda":
        return False
    probe = torch.empty(1, 1, 16, head_dim, device=device, dtype=dtype)
    mask = torch.zeros(1, 1, 16, 16, device=device, dtype=torch.bool)
    params = torch.backends.cuda.SDPAParams(probe, probe, probe, mask, 0.0, False, False)
    return torch.backends.cuda.can_use_efficient_attention(params) or torch.backends.cuda.can_use_cudnn_attention(
        params
    )


class _ChunkedAttention(torch.autograd.Function):
    """query_TQD, four key/value tensors -> out_TQD; keeps its inputs, recomputes each chunk backwards."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, *rest: Any) -> Tensor:
        *keys, visibility, chunks = rest
        ctx.save_for_backward(query, *keys)
        ctx.visibility, ctx.chunks = visibility, chunks
        out = torch.empty_like(query)
        for chunk in chunks:
            out[slice(*chunk.rows)] = _attend_chunk(_inputs(chunk, query, keys), chunk, visibility)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, *keys = ctx.saved_tensors
        grads = [torch.empty_like(query), *map(_zeros_to_sum, keys[:2]), *map(torch.empty_like, keys[2:])]
        for chunk in ctx.chunks:
            with torch.enable_grad():
                inputs = [x.detach().requires_grad_() for x in _inputs(chunk, query, keys)]
                out = _attend_chunk(inputs, chunk, ctx.visibility)
            parts = torch.autograd.grad(out, inputs, grad_out[slice(*chunk.rows)])
            rows, context = slice(*chunk.rows), slice(*chunk.context)
            grads[0][rows], grads[3][rows], grads[4][rows] = parts[0], parts[3], parts[4]
            grads[1][context] += parts[1]
            grads[2][context] += parts[2]
        return *(grad.to(query.dtype) for grad in grads), None, None


def _inputs(chunk: Chunk, query: Tensor, keys: list[Tensor]) -> list[Tensor]:
    rows, context = slice(*chunk.rows), slice(*chunk.context)
    return [query[rows], keys[0][context], keys[1][context], keys[2][rows], keys[3][rows]]


def _attend_chunk(inputs: list[Tensor], chunk: Chunk, visibility: Visibility) -> Tensor:
    query, context_key, context_value, block_key, block_value = inputs
    rows, num_heads, head_dim = query.shape
    num_kv_heads = block_key.shape[1]
    group = num_heads // num_kv_heads
    key = torch.cat([context_key, block_key]).transpose(0, 1)
    value = torch.cat([context_value, block_value]).transpose(0, 1)
    folded = (
        query.view(rows, num_kv_heads, group, head_dim)
        .permute(1, 2, 0, 3)
        .reshape(num_kv_heads, group * rows, head_dim)
    )
    mask = chunk_mask(visibility, rows=chunk.rows, context=chunk.context).repeat(group, 1)
    out = scaled_dot_product_attention(folded[None], key[None], value[None], attn_mask=mask)[0]
    return out.view(num_kv_heads, group, rows, head_dim).permute(2, 0, 1, 3).reshape(rows, num_heads, head_dim)


def _head_shape(query_TQD: Tensor, keys: KeyValues) -> HeadShape:
    _, num_heads, head_dim = query_TQD.shape
    fused = is_fused(device=query_TQD.device, dtype=query_TQD.dtype, head_dim=head_dim)
    return HeadShape(num_heads, keys.block_key_TGD.shape[1], head_dim, query_TQD.element_size(), fused)


def _zeros_to_sum(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


def _join(first: Chunk, second: Chunk) -> Chunk:
    """Both chunks as one; a chunk without context adds none."""
    rows = (first.rows[0], second.rows[1])
    filled = [chunk.context for chunk in (first, second) if chunk.context[1] > chunk.context[0]]
    if not filled:
        return Chunk(rows=rows, context=first.context)
    return Chunk(rows=rows, context=(min(start for start, _ in filled), max(end for _, end in filled)))


def _num_rows(chunk: Chunk) -> int:
    return chunk.rows[1] - chunk.rows[0]


def _num_keys(chunk: Chunk) -> int:
    return chunk.context[1] - chunk.context[0] + _num_rows(chunk)


def _pairs(chunk: Chunk) -> int:
    return _num_rows(chunk) * _num_keys(chunk)
