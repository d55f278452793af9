"""The forward kernel of `attention`, and what the backward shares with it: which row is what, and which tiles it sees.

Row r of all is slot r % SLOTS of head r // SLOTS % GROUP_PAD in block r // (SLOTS · GROUP_PAD); slots and the heads of a group
are padded to powers of two. Scores are in base two: exp2 is what the hardware has. Host side and reference: `attention`.
"""

from __future__ import annotations

from remote.drafter.kernels.launch import jit, tl

LENGTHS = ("num_context", "num_blocks")


@jit()
def tile_rows(
    first, num_blocks,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
):  # fmt: skip
    """Token, head within the group, block and whether the row is one at all (not padding)."""
    row = first + tl.arange(0, ROWS)
    block = row // (SLOTS * GROUP_PAD)
    head = row // SLOTS % GROUP_PAD
    slot = row % SLOTS
    return block * BLOCK + slot, head, block, (block < num_blocks) & (slot < BLOCK) & (head < GROUP)


@jit()
def tile_numbers(first, kv_head, num_blocks, ROWS: tl.constexpr, SLOTS: tl.constexpr, GROUP_PAD: tl.constexpr):
    """Where a row's own numbers stand, padding included: side by side, so that they are read in wide pieces."""
    row = first + tl.arange(0, ROWS)
    count = num_blocks * (SLOTS * GROUP_PAD)
    return kv_head * count + row, row < count


@jit()
def tile_parts(start, end, is_row, KEYS: tl.constexpr):
    """Tile borders of the context the rows see: [begin, whole), [whole, tail) seen by all of them, [tail, finish)."""
    far = 2147483647
    finish = tl.max(tl.where(is_row, end, 0), 0)
    begin = tl.minimum(tl.min(tl.where(is_row, start, far), 0), finish) // KEYS * KEYS
    whole = (tl.max(tl.where(is_row, start, 0), 0) + KEYS - 1) // KEYS * KEYS
    tail = tl.min(tl.where(is_row, end, far), 0) // KEYS * KEYS
    is_any = tail > whole
    return begin, tl.where(is_any, whole, begin), tl.where(is_any, tail, begin), finish


@jit()
def own_mask(
    row_block, row_token, is_row, key_block, key_token, is_key, CAUSAL: tl.constexpr
):  # fmt: skip
    sees = (row_block[:, None] == key_block[None, :]) & is_row[:, None] & is_key[None, :]
    if CAUSAL:
        sees = sees & (key_token[None, :] <= row_token[:, None])
    return sees


@jit()
def _sweep(
    total, weight, peak, query, key_base, value_base, start, end, first, last, num_context, scale_log2,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over context tiles [first, last): the running sum of values, of weights, and the highest score."""
    dim = tl.arange(0, DIM)
    for low in tl.range(first, last, KEYS, num_stages=STAGES):
        at = low + tl.arange(0, KEYS)
        offset = at[:, None] * (KV_HEADS * DIM) + dim[None, :]
        if MASKED:
            key = tl.load(key_base + offset, mask=at[:, None] < num_context, other=0.0)
        else:
            key = tl.load(key_base + offset)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale_log2
        if MASKED:
            score = tl.where((at[None, :] >= start[:, None]) & (at[None, :] < end[:, None]), score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        share = tl.exp2(score - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        weight = weight * shrink + tl.sum(share, 1)
        total = total * shrink[:, None]
        if MASKED:
            value = tl.load(value_base + offset, mask=at[:, None] < num_context, other=0.0)
        else:
            value = tl.load(value_base + offset)
        total = tl.dot(share.to(value.dtype), value, total, input_precision=PRECISION)
        peak = new_peak
    return total, weight, peak


@jit(LENGTHS)
def forward_kernel(
    query_ptr, key_ptr, value_ptr, block_key_ptr, block_value_ptr, start_ptr, end_ptr, out_ptr, log_sum_ptr,
    num_context, num_blocks, scale,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """One tile of rows. Its own keys come first, so that every row has a finite highest score from then on."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # late anchors see most: the longest first
    kv_head = tl.program_id(1)
    OWN: tl.constexpr = ROWS // GROUP_PAD
    scale_log2 = scale * 1.4426950408889634
    token, head, block, is_row = tile_rows(tile * ROWS, num_blocks, ROWS, BLOCK, SLOTS, GROUP, GROUP_PAD)
    dim = tl.arange(0, DIM)
    head = kv_head * GROUP + head
    at_row = (token.to(tl.int64) * (KV_HEADS * GROUP) + head) * DIM
    query = tl.load(query_ptr + at_row[:, None] + dim[None, :], mask=is_row[:, None], other=0.0)
    start = tl.load(start_ptr + token, mask=is_row, other=0)
    end = tl.load(end_ptr + token, mask=is_row, other=0)

    own = tile * OWN + tl.arange(0, OWN)
    own_block = own // SLOTS
    own_token = own_block * BLOCK + own % SLOTS
    is_own = (own_block < num_blocks) & (own % SLOTS < BLOCK)
    at_own = (own_token.to(tl.int64) * KV_HEADS + kv_head) * DIM
    key = tl.load(block_key_ptr + at_own[:, None] + dim[None, :], mask=is_own[:, None], other=0.0)
    value = tl.load(block_value_ptr + at_own[:, None] + dim[None, :], mask=is_own[:, None], other=0.0)
    score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale_log2
    score = tl.where(own_mask(block, token, is_row, own_block, own_token, is_own, CAUSAL), score, float("-inf"))
    peak = tl.max(score, 1)
    peak = tl.where(is_row, peak, 0.0)
    share = tl.exp2(score - peak[:, None])
    weight = tl.sum(share, 1)
    total = tl.dot(share.to(value.dtype), value, input_precision=PRECISION)

    begin, whole, tail, finish = tile_parts(start, end, is_row, KEYS)
    keys = key_ptr + kv_head * DIM
    values = value_ptr + kv_head * DIM
    total, weight, peak = _sweep(total, weight, peak, query, keys, values, start, end, begin, whole, num_context,
                                 scale_log2, KV_HEADS, DIM, KEYS, True, 1, PRECISION)  # fmt: skip
    total, weight, peak = _sweep(total, weight, peak, query, keys, values, start, end, whole, tail, num_context,
                                 scale_log2, KV_HEADS, DIM, KEYS, False, STAGES, PRECISION)  # fmt: skip
    total, weight, peak = _sweep(total, weight, peak, query, keys, values, start, end, tail, finish, num_context,
                                 scale_log2, KV_HEADS, DIM, KEYS, True, 1, PRECISION)  # fmt: skip
    weight = tl.where(is_row, weight, 1.0)
    out = (total / weight[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at_row[:, None] + dim[None, :], out, mask=is_row[:, None])
    at_number, is_number = tile_numbers(tile * ROWS, kv_head, num_blocks, ROWS, SLOTS, GROUP_PAD)
    tl.store(log_sum_ptr + at_number, peak + tl.log2(weight), mask=is_number)  # 0 where the row is padding
