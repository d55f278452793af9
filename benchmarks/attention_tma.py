"""Trials of attention kernels in Triton: tensor descriptors, rows in the order of tokens."""

from remote.drafter.kernels.launch import jit, tl
from remote.drafter.kernels.attention_forward import LENGTHS, own_mask, tile_parts


@jit()
def tile_rows(
    tile,
    num_blocks,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
):
    row = tile * ROWS + tl.arange(0, ROWS)
    block = row // (SLOTS * GROUP_PAD)
    head = row // SLOTS % GROUP_PAD
    slot = row % SLOTS
    return block * BLOCK + slot, head, block, (block < num_blocks) & (slot < BLOCK) & (head < GROUP)


@jit()
def load_keys(
    source,
    low,
    kv_head,
    num_context,
    KEYS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    MASKED: tl.constexpr,
    DESC: tl.constexpr,
):
    if DESC:
        return source.load([low, kv_head * DIM])
    else:
        at = tl.arange(0, KEYS)
        offset = at[:, None] * (KV_HEADS * DIM) + tl.arange(0, DIM)[None, :]
        base = source + (low * KV_HEADS + kv_head) * DIM
        if MASKED:
            return tl.load(base + offset, mask=(low + at)[:, None] < num_context, other=0.0)
        else:
            return tl.load(base + offset)


@jit()
def _sweep(
    total,
    weight,
    peak,
    query,
    keys,
    values,
    kv_head,
    start,
    end,
    first,
    last,
    num_context,
    scale_log2,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    DESC: tl.constexpr,
    WS: tl.constexpr,
):
    for low in tl.range(first, last, KEYS, num_stages=STAGES, warp_specialize=WS):
        key = load_keys(keys, low, kv_head, num_context, KEYS, KV_HEADS, DIM, MASKED, DESC)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if MASKED:
            at = low + tl.arange(0, KEYS)
            score = tl.where((at[None, :] >= start[:, None]) & (at[None, :] < end[:, None]), score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1) * scale_log2)
        share = tl.exp2(score * scale_log2 - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        weight = weight * shrink + tl.sum(share, 1)
        total = total * shrink[:, None]
        value = load_keys(values, low, kv_head, num_context, KEYS, KV_HEADS, DIM, MASKED, DESC)
        total = tl.dot(share.to(value.dtype), value, total, input_precision=PRECISION)
        peak = new_peak
    return total, weight, peak


@jit(LENGTHS)
def forward_kernel(
    query_ptr,
    keys,
    values,
    block_key_ptr,
    block_value_ptr,
    start_ptr,
    end_ptr,
    out_ptr,
    log_sum_ptr,
    num_context,
    num_blocks,
    scale,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr,
    DESC: tl.constexpr,
    QREG: tl.constexpr,
    WS: tl.constexpr,
):
    kv_head = tl.program_id(0) % KV_HEADS
    num_tiles = tl.num_programs(0) // KV_HEADS
    tile = num_tiles - 1 - tl.program_id(0) // KV_HEADS
    OWN: tl.constexpr = ROWS // GROUP_PAD
    scale_log2 = scale * 1.4426950408889634
    token, head, block, is_row = tile_rows(tile, num_blocks, ROWS, BLOCK, SLOTS, GROUP, GROUP_PAD)
    dim = tl.arange(0, DIM)
    at_row = ((token.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + head) * DIM)[:, None] + dim[None, :]
    query = tl.load(query_ptr + at_row, mask=is_row[:, None], other=0.0)
    if QREG:
        query = tl.where(is_row[:, None], query, 0.0)
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
    total, weight, peak = _sweep(
        total,
        weight,
        peak,
        query,
        keys,
        values,
        kv_head,
        start,
        end,
        begin,
        whole,
        num_context,
        scale_log2,
        KV_HEADS,
        DIM,
        KEYS,
        True,
        1,
        PRECISION,
        DESC,
        False,
    )
    total, weight, peak = _sweep(
        total,
        weight,
        peak,
        query,
        keys,
        values,
        kv_head,
        start,
        end,
        whole,
        tail,
        num_context,
        scale_log2,
        KV_HEADS,
        DIM,
        KEYS,
        False,
        STAGES,
        PRECISION,
        DESC,
        WS,
    )
    total, weight, peak = _sweep(
        total,
        weight,
        peak,
        query,
        keys,
        values,
        kv_head,
        start,
        end,
        tail,
        finish,
        num_context,
        scale_log2,
        KV_HEADS,
        DIM,
        KEYS,
        True,
        1,
        PRECISION,
        DESC,
        False,
    )
    weight = tl.where(is_row, weight, 1.0)
    out = (total / weight[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at_row, out, mask=is_row[:, None])
    tl.store(log_sum_ptr + (kv_head * GROUP + head) * (num_blocks * BLOCK) + token, peak + tl.log2(weight), mask=is_row)


@jit()
def _query_sweep(
    grad,
    query,
    grad_out,
    log_sum,
    delta,
    keys,
    values,
    kv_head,
    start,
    end,
    first,
    last,
    num_context,
    scale_log2,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    DESC: tl.constexpr,
    WS: tl.constexpr,
):
    for low in tl.range(first, last, KEYS, num_stages=STAGES, warp_specialize=WS):
        key = load_keys(keys, low, kv_head, num_context, KEYS, KV_HEADS, DIM, MASKED, DESC)
        value = load_keys(values, low, kv_head, num_context, KEYS, KV_HEADS, DIM, MASKED, DESC)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if MASKED:
            at = low + tl.arange(0, KEYS)
            score = tl.where((at[None, :] >= start[:, None]) & (at[None, :] < end[:, None]), score, float("-inf"))
        share = tl.exp2(score * scale_log2 - log_sum[:, None])
        grad_share = tl.dot(grad_out, tl.trans(value), input_precision=PRECISION)
        grad_score = share * (grad_share - delta[:, None])
        grad = tl.dot(grad_score.to(key.dtype), key, grad, input_precision=PRECISION)
    return grad


@jit(LENGTHS)
def query_gradient_kernel(
    query_ptr,
    keys,
    values,
    block_key_ptr,
    block_value_ptr,
    start_ptr,
    end_ptr,
    out_ptr,
    log_sum_ptr,
    grad_out_ptr,
    delta_ptr,
    grad_query_ptr,
    grad_block_key_ptr,
    grad_block_value_ptr,
    num_context,
    num_blocks,
    scale,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr,
    DESC: tl.constexpr,
    QREG: tl.constexpr,
    WS: tl.constexpr,
):
    kv_head = tl.program_id(0) % KV_HEADS
    num_tiles = tl.num_programs(0) // KV_HEADS
    tile = num_tiles - 1 - tl.program_id(0) // KV_HEADS
    OWN: tl.constexpr = ROWS // GROUP_PAD
    scale_log2 = scale * 1.4426950408889634
    token, head, block, is_row = tile_rows(tile, num_blocks, ROWS, BLOCK, SLOTS, GROUP, GROUP_PAD)
    dim = tl.arange(0, DIM)
    at_row = ((token.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + head) * DIM)[:, None] + dim[None, :]
    query = tl.load(query_ptr + at_row, mask=is_row[:, None], other=0.0)
    grad_out = tl.load(grad_out_ptr + at_row, mask=is_row[:, None], other=0.0)
    out = tl.load(out_ptr + at_row, mask=is_row[:, None], other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1)
    if QREG:
        query = tl.where(is_row[:, None], query, 0.0)
        grad_out = tl.where(is_row[:, None], grad_out, 0.0)
    at_number = (kv_head * GROUP + head) * (num_blocks * BLOCK) + token
    tl.store(delta_ptr + at_number, delta, mask=is_row)
    log_sum = tl.load(log_sum_ptr + at_number, mask=is_row, other=0.0)
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
    grad = _query_sweep(
        grad,
        query,
        grad_out,
        log_sum,
        delta,
        keys,
        values,
        kv_head,
        start,
        end,
        begin,
        whole,
        num_context,
        scale_log2,
        KV_HEADS,
        DIM,
        KEYS,
        True,
        1,
        PRECISION,
        DESC,
        False,
    )
    grad = _query_sweep(
        grad,
        query,
        grad_out,
        log_sum,
        delta,
        keys,
        values,
        kv_head,
        start,
        end,
        whole,
        tail,
        num_context,
        scale_log2,
        KV_HEADS,
        DIM,
        KEYS,
        False,
        STAGES,
        PRECISION,
        DESC,
        WS,
    )
    grad = _query_sweep(
        grad,
        query,
        grad_out,
        log_sum,
        delta,
        keys,
        values,
        kv_head,
        start,
        end,
        tail,
        finish,
        num_context,
        scale_log2,
        KV_HEADS,
        DIM,
        KEYS,
        True,
        1,
        PRECISION,
        DESC,
        False,
    )
    tl.store(grad_query_ptr + at_row, (grad * scale).to(query.dtype), mask=is_row[:, None])


@jit()
def load_tokens(
    source,
    tile,
    column,
    num_tokens,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    DESC: tl.constexpr,
    MASKED: tl.constexpr,
):
    if DESC:
        return source.load([tile * ROWS, column])
    else:
        row = tl.arange(0, ROWS)
        base = source + (tile * ROWS).to(tl.int64) * WIDTH + column
        offset = row[:, None] * WIDTH + tl.arange(0, DIM)[None, :]
        if MASKED:
            return tl.load(base + offset, mask=(tile * ROWS + row < num_tokens)[:, None], other=0.0)
        else:
            return tl.load(base + offset)


@jit()
def _context_sweep(
    grad_key,
    grad_value,
    key,
    value,
    queries,
    grads,
    log_sum_ptr,
    delta_ptr,
    start_ptr,
    end_ptr,
    at,
    kv_head,
    first,
    last,
    num_tokens,
    scale_log2,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    MASKED: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    DESC: tl.constexpr,
    WS: tl.constexpr,
    INIT: tl.constexpr,
    EARLY: tl.constexpr,
):
    WIDTH: tl.constexpr = KV_HEADS * GROUP * DIM
    for back in tl.range(0, (last - first) * GROUP, num_stages=STAGES, warp_specialize=WS):
        tile = last - 1 - back // GROUP
        head = kv_head * GROUP + back % GROUP
        query = load_tokens(queries, tile, head * DIM, num_tokens, ROWS, WIDTH, DIM, DESC, MASKED)
        grad_out = load_tokens(grads, tile, head * DIM, num_tokens, ROWS, WIDTH, DIM, DESC, MASKED)
        token = tile * ROWS + tl.arange(0, ROWS)
        numbers = head * num_tokens + token
        if MASKED:
            log_sum = tl.load(log_sum_ptr + numbers, mask=token < num_tokens, other=0.0)
            delta = tl.load(delta_ptr + numbers, mask=token < num_tokens, other=0.0)
        else:
            log_sum = tl.load(log_sum_ptr + numbers)
            delta = tl.load(delta_ptr + numbers)
        KEYS: tl.constexpr = key.shape[0]
        if INIT:
            score = tl.dot(
                key,
                tl.trans(query),
                tl.broadcast_to((-log_sum / scale_log2)[None, :], (KEYS, ROWS)),
                input_precision=PRECISION,
            )
            share = tl.exp2(score * scale_log2)
        else:
            score = tl.dot(key, tl.trans(query), input_precision=PRECISION)
            share = tl.exp2(score * scale_log2 - log_sum[None, :])
        if MASKED:
            start = tl.load(start_ptr + token, mask=token < num_tokens, other=0)
            end = tl.load(end_ptr + token, mask=token < num_tokens, other=0)
            share = tl.where((at[:, None] >= start[None, :]) & (at[:, None] < end[None, :]), share, 0.0)
        if EARLY:
            if INIT:
                grad_share = tl.dot(
                    value, tl.trans(grad_out), tl.broadcast_to(-delta[None, :], (KEYS, ROWS)), input_precision=PRECISION
                )
            else:
                grad_share = tl.dot(value, tl.trans(grad_out), input_precision=PRECISION)
        grad_value = tl.dot(share.to(grad_out.dtype), grad_out, grad_value, input_precision=PRECISION)
        if not EARLY:
            if INIT:
                grad_share = tl.dot(
                    value, tl.trans(grad_out), tl.broadcast_to(-delta[None, :], (KEYS, ROWS)), input_precision=PRECISION
                )
            else:
                grad_share = tl.dot(value, tl.trans(grad_out), input_precision=PRECISION)
        if INIT:
            grad_score = (share * grad_share).to(query.dtype)
        else:
            grad_score = (share * (grad_share - delta[None, :])).to(query.dtype)
        grad_key = tl.dot(grad_score, query, grad_key, input_precision=PRECISION)
    return grad_key, grad_value


@jit(("num_context", "num_blocks", "num_tokens"))
def context_gradient_kernel(
    queries,
    keys,
    values,
    start_ptr,
    end_ptr,
    log_sum_ptr,
    grads,
    delta_ptr,
    grad_key_ptr,
    grad_value_ptr,
    seen_by_ptr,
    num_context,
    num_tokens,
    scale,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    DESC: tl.constexpr,
    WS: tl.constexpr,
    INIT: tl.constexpr,
    EARLY: tl.constexpr,
):
    tile = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    num_tiles = tl.num_programs(0) // KV_HEADS
    scale_log2 = scale * 1.4426950408889634
    at = tile * KEYS + tl.arange(0, KEYS)
    dim = tl.arange(0, DIM)
    key = load_keys(keys, tile * KEYS, kv_head, num_context, KEYS, KV_HEADS, DIM, True, DESC)
    value = load_keys(values, tile * KEYS, kv_head, num_context, KEYS, KV_HEADS, DIM, True, DESC)
    begin = tl.load(seen_by_ptr + tile) * BLOCK // ROWS
    whole = (tl.load(seen_by_ptr + num_tiles + tile) * BLOCK + ROWS - 1) // ROWS
    tail = tl.load(seen_by_ptr + 2 * num_tiles + tile) * BLOCK // ROWS
    finish = (tl.load(seen_by_ptr + 3 * num_tiles + tile) * BLOCK + ROWS - 1) // ROWS
    is_any = tail > whole
    whole = tl.where(is_any, whole, begin)
    tail = tl.where(is_any, tail, begin)
    grad_key = tl.zeros([KEYS, DIM], dtype=tl.float32)
    grad_value = tl.zeros([KEYS, DIM], dtype=tl.float32)
    grad_key, grad_value = _context_sweep(
        grad_key,
        grad_value,
        key,
        value,
        queries,
        grads,
        log_sum_ptr,
        delta_ptr,
        start_ptr,
        end_ptr,
        at,
        kv_head,
        tail,
        finish,
        num_tokens,
        scale_log2,
        GROUP,
        KV_HEADS,
        DIM,
        ROWS,
        True,
        1,
        PRECISION,
        DESC,
        False,
        INIT,
        EARLY,
    )
    grad_key, grad_value = _context_sweep(
        grad_key,
        grad_value,
        key,
        value,
        queries,
        grads,
        log_sum_ptr,
        delta_ptr,
        start_ptr,
        end_ptr,
        at,
        kv_head,
        whole,
        tail,
        num_tokens,
        scale_log2,
        GROUP,
        KV_HEADS,
        DIM,
        ROWS,
        False,
        STAGES,
        PRECISION,
        DESC,
        WS,
        INIT,
        EARLY,
    )
    grad_key, grad_value = _context_sweep(
        grad_key,
        grad_value,
        key,
        value,
        queries,
        grads,
        log_sum_ptr,
        delta_ptr,
        start_ptr,
        end_ptr,
        at,
        kv_head,
        begin,
        whole,
        num_tokens,
        scale_log2,
        GROUP,
        KV_HEADS,
        DIM,
        ROWS,
        True,
        1,
        PRECISION,
        DESC,
        False,
        INIT,
        EARLY,
    )
    at_key = ((at * KV_HEADS + kv_head) * DIM)[:, None] + dim[None, :]
    is_key = (at < num_context)[:, None]
    dtype = grad_key_ptr.dtype.element_ty
    tl.store(grad_key_ptr + at_key, (grad_key * scale).to(dtype), mask=is_key)
    tl.store(grad_value_ptr + at_key, grad_value.to(dtype), mask=is_key)


@jit(LENGTHS)
def own_gradient_kernel(
    query_ptr,
    block_key_ptr,
    block_value_ptr,
    out_ptr,
    log_sum_ptr,
    grad_out_ptr,
    delta_ptr,
    grad_block_key_ptr,
    grad_block_value_ptr,
    num_blocks,
    num_padded,
    scale,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Leaves delta = sum of out * grad_out a row; gradients of the blocks' own keys and values."""
    kv_head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(0) // KV_HEADS
    OWN: tl.constexpr = ROWS // GROUP_PAD
    token, head, block, is_row = tile_rows(tile, num_blocks, ROWS, BLOCK, SLOTS, GROUP, GROUP_PAD)
    dim = tl.arange(0, DIM)
    at_row = ((token.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + head) * DIM)[:, None] + dim[None, :]
    out = tl.load(out_ptr + at_row, mask=is_row[:, None], other=0.0)
    grad_out = tl.load(grad_out_ptr + at_row, mask=is_row[:, None], other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1)
    at_number = (kv_head * GROUP + head) * num_padded + token
    tl.store(delta_ptr + at_number, delta, mask=is_row)
    query = tl.load(query_ptr + at_row, mask=is_row[:, None], other=0.0)
    log_sum = tl.load(log_sum_ptr + at_number, mask=is_row, other=0.0)
    own = tile * OWN + tl.arange(0, OWN)
    own_block = own // SLOTS
    own_token = own_block * BLOCK + own % SLOTS
    is_own = (own_block < num_blocks) & (own % SLOTS < BLOCK)
    at_own = ((own_token.to(tl.int64) * KV_HEADS + kv_head) * DIM)[:, None] + dim[None, :]
    key = tl.load(block_key_ptr + at_own, mask=is_own[:, None], other=0.0)
    value = tl.load(block_value_ptr + at_own, mask=is_own[:, None], other=0.0)
    score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scale * 1.4426950408889634)
    score = tl.where(own_mask(block, token, is_row, own_block, own_token, is_own, CAUSAL), score, float("-inf"))
    share = tl.exp2(score - log_sum[:, None])
    grad_share = tl.dot(grad_out, tl.trans(value), input_precision=PRECISION)
    grad_score = (share * (grad_share - delta[:, None])).to(key.dtype)
    grad_value = tl.dot(tl.trans(share.to(grad_out.dtype)), grad_out, input_precision=PRECISION)
    grad_key = tl.dot(tl.trans(grad_score), query, input_precision=PRECISION) * scale
    tl.store(grad_block_value_ptr + at_own, grad_value.to(value.dtype), mask=is_own[:, None])
    tl.store(grad_block_key_ptr + at_own, grad_key.to(key.dtype), mask=is_own[:, None])
