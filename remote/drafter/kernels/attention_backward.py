"""The backward kernels of `attention`: one over tiles of rows, one over tiles of context; none needs atomics.

Row r of all is slot r % SLOTS of head r // SLOTS % GROUP_PAD in block r // (SLOTS · GROUP_PAD); slots and the heads of a group
are padded to powers of two. Scores are in base two: exp2 is what the hardware has. Host side and reference: `attention`.
"""

from __future__ import annotations

from remote.drafter.kernels.attention_forward import LENGTHS, own_mask, tile_numbers, tile_parts, tile_rows
from remote.drafter.kernels.launch import jit, tl


@jit()
def _query_sweep(
    grad, query, grad_out, log_sum, delta, key_base, value_base, start, end, first, last, num_context, scale_log2,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the part of context tiles [first, last) to the gradient of the queries, before the scale."""
    dim = tl.arange(0, DIM)
    for low in tl.range(first, last, KEYS, num_stages=STAGES):
        at = low + tl.arange(0, KEYS)
        offset = at[:, None] * (KV_HEADS * DIM) + dim[None, :]
        if MASKED:
            key = tl.load(key_base + offset, mask=at[:, None] < num_context, other=0.0)
            value = tl.load(value_base + offset, mask=at[:, None] < num_context, other=0.0)
        else:
            key = tl.load(key_base + offset)
            value = tl.load(value_base + offset)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale_log2
        if MASKED:
            score = tl.where((at[None, :] >= start[:, None]) & (at[None, :] < end[:, None]), score, float("-inf"))
        share = tl.exp2(score - log_sum[:, None])
        grad_share = tl.dot(grad_out, tl.trans(value), input_precision=PRECISION)
        grad_score = share * (grad_share - delta[:, None])
        grad = tl.dot(grad_score.to(key.dtype), key, grad, input_precision=PRECISION)
    return grad


@jit(LENGTHS)
def query_gradient_kernel(
    query_ptr, key_ptr, value_ptr, block_key_ptr, block_value_ptr, start_ptr, end_ptr, out_ptr, log_sum_ptr,
    grad_out_ptr, delta_ptr, grad_query_ptr, grad_block_key_ptr, grad_block_value_ptr,
    num_context, num_blocks, scale,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile's queries and of its blocks' own keys and values; leaves delta = Σ out·grad_out a row."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    OWN: tl.constexpr = ROWS // GROUP_PAD
    scale_log2 = scale * 1.4426950408889634
    token, head, block, is_row = tile_rows(tile * ROWS, num_blocks, ROWS, BLOCK, SLOTS, GROUP, GROUP_PAD)
    dim = tl.arange(0, DIM)
    head = kv_head * GROUP + head
    at_row = ((token.to(tl.int64) * (KV_HEADS * GROUP) + head) * DIM)[:, None] + dim[None, :]
    out = tl.load(out_ptr + at_row, mask=is_row[:, None], other=0.0)
    grad_out = tl.load(grad_out_ptr + at_row, mask=is_row[:, None], other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1)
    at_number, is_number = tile_numbers(tile * ROWS, kv_head, num_blocks, ROWS, SLOTS, GROUP_PAD)
    tl.store(delta_ptr + at_number, delta, mask=is_number)
    query = tl.load(query_ptr + at_row, mask=is_row[:, None], other=0.0)
    log_sum = tl.load(log_sum_ptr + at_number, mask=is_number, other=0.0)
    start = tl.load(start_ptr + token, mask=is_row, other=0)
    end = tl.load(end_ptr + token, mask=is_row, other=0)

    own = tile * OWN + tl.arange(0, OWN)
    own_block = own // SLOTS
    own_token = own_block * BLOCK + own % SLOTS
    is_own = (own_block < num_blocks) & (own % SLOTS < BLOCK)
    at_own = ((own_token.to(tl.int64) * KV_HEADS + kv_head) * DIM)[:, None] + dim[None, :]
    key = tl.load(block_key_ptr + at_own, mask=is_own[:, None], other=0.0)
    value = tl.load(block_value_ptr + at_own, mask=is_own[:, None], other=0.0)
    score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale_log2
    score = tl.where(own_mask(block, token, is_row, own_block, own_token, is_own, CAUSAL), score, float("-inf"))
    share = tl.exp2(score - log_sum[:, None])
    grad_share = tl.dot(grad_out, tl.trans(value), input_precision=PRECISION)
    grad_score = (share * (grad_share - delta[:, None])).to(key.dtype)
    grad_value = tl.dot(tl.trans(share.to(grad_out.dtype)), grad_out, input_precision=PRECISION)
    grad_key = tl.dot(tl.trans(grad_score), query, input_precision=PRECISION) * scale
    tl.store(grad_block_value_ptr + at_own, grad_value.to(value.dtype), mask=is_own[:, None])
    tl.store(grad_block_key_ptr + at_own, grad_key.to(key.dtype), mask=is_own[:, None])

    grad = tl.dot(grad_score, key, input_precision=PRECISION)
    begin, whole, tail, finish = tile_parts(start, end, is_row, KEYS)
    keys = key_ptr + kv_head * DIM
    values = value_ptr + kv_head * DIM
    grad = _query_sweep(grad, query, grad_out, log_sum, delta, keys, values, start, end, begin, whole, num_context,
                        scale_log2, KV_HEADS, DIM, KEYS, True, 1, PRECISION)  # fmt: skip
    grad = _query_sweep(grad, query, grad_out, log_sum, delta, keys, values, start, end, whole, tail, num_context,
                        scale_log2, KV_HEADS, DIM, KEYS, False, STAGES, PRECISION)  # fmt: skip
    grad = _query_sweep(grad, query, grad_out, log_sum, delta, keys, values, start, end, tail, finish, num_context,
                        scale_log2, KV_HEADS, DIM, KEYS, True, 1, PRECISION)  # fmt: skip
    tl.store(grad_query_ptr + at_row, (grad * scale).to(query.dtype), mask=is_row[:, None])


@jit()
def _context_sweep(
    grad_key, grad_value, key, value, query_ptr, grad_out_ptr, log_sum_ptr, delta_ptr, start_ptr, end_ptr,
    at, kv_head, first, last, num_blocks, scale_log2,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the part of row tiles [first, last) to the gradients of one tile of context; keys stand in the rows here."""
    dim = tl.arange(0, DIM)
    for tile in tl.range(first, last, num_stages=STAGES):
        token, head, _block, is_row = tile_rows(tile * ROWS, num_blocks, ROWS, BLOCK, SLOTS, GROUP, GROUP_PAD)
        head = kv_head * GROUP + head
        at_row = ((token.to(tl.int64) * (KV_HEADS * GROUP) + head) * DIM)[:, None] + dim[None, :]
        query = tl.load(query_ptr + at_row, mask=is_row[:, None], other=0.0)
        at_number, is_number = tile_numbers(tile * ROWS, kv_head, num_blocks, ROWS, SLOTS, GROUP_PAD)
        log_sum = tl.load(log_sum_ptr + at_number, mask=is_number, other=0.0)
        score = tl.dot(key, tl.trans(query), input_precision=PRECISION) * scale_log2
        if MASKED:
            start = tl.load(start_ptr + token, mask=is_row, other=0)
            end = tl.load(end_ptr + token, mask=is_row, other=0)
            sees = (at[:, None] >= start[None, :]) & (at[:, None] < end[None, :]) & is_row[None, :]
            score = tl.where(sees, score, float("-inf"))
        share = tl.exp2(score - log_sum[None, :])
        grad_out = tl.load(grad_out_ptr + at_row, mask=is_row[:, None], other=0.0)
        delta = tl.load(delta_ptr + at_number, mask=is_number, other=0.0)
        grad_value = tl.dot(share.to(grad_out.dtype), grad_out, grad_value, input_precision=PRECISION)
        grad_share = tl.dot(value, tl.trans(grad_out), input_precision=PRECISION)
        grad_score = (share * (grad_share - delta[None, :])).to(query.dtype)
        grad_key = tl.dot(grad_score, query, grad_key, input_precision=PRECISION)
    return grad_key, grad_value


@jit(LENGTHS)
def context_gradient_kernel(
    query_ptr, key_ptr, value_ptr, start_ptr, end_ptr, log_sum_ptr, grad_out_ptr, delta_ptr,
    grad_key_ptr, grad_value_ptr, seen_by_ptr,
    num_context, num_blocks, scale,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of context keys and values: walks the one range of blocks that see it."""
    # Early context is seen by most blocks: the longest of all heads first. Head by head, the last one's longest tile
    # began when most of the card was done, and a step waited for it (2,491 turns of a loop against 2,042).
    tile = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    RATIO: tl.constexpr = SLOTS * GROUP_PAD
    num_tiles = tl.num_programs(0) // KV_HEADS
    scale_log2 = scale * 1.4426950408889634
    at = tile * KEYS + tl.arange(0, KEYS)
    dim = tl.arange(0, DIM)
    at_key = ((at * KV_HEADS + kv_head) * DIM)[:, None] + dim[None, :]
    is_key = (at < num_context)[:, None]
    key = tl.load(key_ptr + at_key, mask=is_key, other=0.0)
    value = tl.load(value_ptr + at_key, mask=is_key, other=0.0)
    begin = tl.load(seen_by_ptr + tile) * RATIO // ROWS
    whole = (tl.load(seen_by_ptr + num_tiles + tile) * RATIO + ROWS - 1) // ROWS
    tail = tl.load(seen_by_ptr + 2 * num_tiles + tile) * RATIO // ROWS
    finish = (tl.load(seen_by_ptr + 3 * num_tiles + tile) * RATIO + ROWS - 1) // ROWS
    is_any = tail > whole
    whole = tl.where(is_any, whole, begin)
    tail = tl.where(is_any, tail, begin)
    grad_key = tl.zeros([KEYS, DIM], dtype=tl.float32)
    grad_value = tl.zeros([KEYS, DIM], dtype=tl.float32)
    grad_key, grad_value = _context_sweep(
        grad_key, grad_value, key, value, query_ptr, grad_out_ptr, log_sum_ptr, delta_ptr, start_ptr, end_ptr, at, kv_head,
        begin, whole, num_blocks, scale_log2, BLOCK, SLOTS, GROUP, GROUP_PAD, KV_HEADS, DIM, ROWS, True, 1,
        PRECISION)  # fmt: skip
    grad_key, grad_value = _context_sweep(
        grad_key, grad_value, key, value, query_ptr, grad_out_ptr, log_sum_ptr, delta_ptr, start_ptr, end_ptr, at, kv_head,
        whole, tail, num_blocks, scale_log2, BLOCK, SLOTS, GROUP, GROUP_PAD, KV_HEADS, DIM, ROWS, False, STAGES,
        PRECISION)  # fmt: skip
    grad_key, grad_value = _context_sweep(
        grad_key, grad_value, key, value, query_ptr, grad_out_ptr, log_sum_ptr, delta_ptr, start_ptr, end_ptr, at, kv_head,
        tail, finish, num_blocks, scale_log2, BLOCK, SLOTS, GROUP, GROUP_PAD, KV_HEADS, DIM, ROWS, True, 1,
        PRECISION)  # fmt: skip
    tl.store(grad_key_ptr + at_key, (grad_key * scale).to(key.dtype), mask=is_key)
    tl.store(grad_value_ptr + at_key, grad_value.to(value.dtype), mask=is_key)


@jit(LENGTHS[1:])
def own_gradient_kernel(
    query_ptr, block_key_ptr, block_value_ptr, out_ptr, log_sum_ptr, grad_out_ptr, delta_ptr, grad_block_key_ptr,
    grad_block_value_ptr, num_blocks, scale,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    PRECISION: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """For `attention_hopper`: gradients of one block's own keys and values; leaves delta = Σ out·grad_out, (heads, tokens)."""
    block = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    slot = tl.arange(0, SLOTS)
    is_token = slot < BLOCK
    token = block * BLOCK + slot
    dim = tl.arange(0, DIM)
    at_own = ((token.to(tl.int64) * KV_HEADS + kv_head) * DIM)[:, None] + dim[None, :]
    key = tl.load(block_key_ptr + at_own, mask=is_token[:, None], other=0.0)
    value = tl.load(block_value_ptr + at_own, mask=is_token[:, None], other=0.0)
    sees = is_token[:, None] & is_token[None, :]  # keys in the rows
    if CAUSAL:
        sees = sees & (slot[:, None] <= slot[None, :])
    grad_key = tl.zeros([SLOTS, DIM], dtype=tl.float32)
    grad_value = tl.zeros([SLOTS, DIM], dtype=tl.float32)
    for index in tl.range(0, GROUP):
        head = kv_head * GROUP + index
        at_row = ((token.to(tl.int64) * (KV_HEADS * GROUP) + head) * DIM)[:, None] + dim[None, :]
        at_number = head * (num_blocks * BLOCK) + token
        query = tl.load(query_ptr + at_row, mask=is_token[:, None], other=0.0)
        out = tl.load(out_ptr + at_row, mask=is_token[:, None], other=0.0)
        grad_out = tl.load(grad_out_ptr + at_row, mask=is_token[:, None], other=0.0)
        log_sum = tl.load(log_sum_ptr + at_number, mask=is_token, other=0.0)
        delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1)
        tl.store(delta_ptr + at_number, delta, mask=is_token)
        score = tl.dot(key, tl.trans(query), input_precision=PRECISION) * (scale * 1.4426950408889634)
        share = tl.exp2(tl.where(sees, score, float("-inf")) - log_sum[None, :])
        grad_value = tl.dot(share.to(grad_out.dtype), grad_out, grad_value, input_precision=PRECISION)
        grad_share = tl.dot(value, tl.trans(grad_out), input_precision=PRECISION)
        grad_score = (share * (grad_share - delta[None, :])).to(query.dtype)
        grad_key = tl.dot(grad_score, query, grad_key, input_precision=PRECISION)
    tl.store(grad_block_value_ptr + at_own, grad_value.to(value.dtype), mask=is_token[:, None])
    tl.store(grad_block_key_ptr + at_own, (grad_key * scale).to(key.dtype), mask=is_token[:, None])
