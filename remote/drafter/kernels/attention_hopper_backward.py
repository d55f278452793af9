"""The backward kernels of `attention_hopper`: one over tiles of rows, one over tiles of context; neither needs atomics.

Programs are groups of warps as in `attention_hopper_forward`. Scores are in base two: exp2 is what the hardware has.
"""

from __future__ import annotations

from remote.drafter.kernels.attention_hopper_forward import (
    LENGTHS,
    feed_keys,
    hand_back,
    load_rows,
    only_seen,
    ring,
    row_parts,
    store_rows,
    tile_ends,
)
from remote.drafter.kernels.gluon import (
    copy_tile,
    gl,
    jit,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)


@jit()
def _query_sweep(
    grad, query, grad_out, log_sum, delta, rows, keys_ring, values_ring, since, until, base, num_tokens, scale_log2,
    SEES: gl.constexpr, BLOCK: gl.constexpr, CAUSAL: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    DIM: gl.constexpr,
):  # fmt: skip
    """Adds turns [since, until) to the gradient of the queries, before the scale; each ends while the next begins."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16]), 2)
    keys, keys_full, keys_empty = keys_ring
    values, values_full, values_empty = values_ring
    zero = gl.zeros([64, KEYS], gl.float32, layout=scores)
    grad_score = gl.zeros([64, KEYS], keys.dtype, layout=left)
    grad = warpgroup_mma_init(grad)
    for turn in range(since, until):
        stage = turn % STAGES
        phase = turn // STAGES % 2
        mbarrier.wait(keys_full.index(stage), phase)
        key = keys.index(stage)
        score = warpgroup_mma(query, key.permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(values_full.index(stage), phase)
        value = values.index(stage).permute((1, 0))
        grad_share = warpgroup_mma(grad_out, value, zero, use_acc=False, is_async=True)
        score, so_far, grad_score = warpgroup_mma_wait(1, deps=[score, grad, grad_score])
        hand_back(keys_empty, (turn + STAGES - 1) % STAGES, turn > since)
        at = base + turn * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, scores))
        score = only_seen(score, rows, at, num_tokens, SEES, BLOCK, CAUSAL)
        share = gl.exp2(score * scale_log2 - gl.expand_dims(log_sum, 1))
        grad_share = warpgroup_mma_wait(0, deps=[grad_share])
        grad_score = gl.convert_layout((share * (grad_share - gl.expand_dims(delta, 1))).to(keys.dtype), left)
        grad = warpgroup_mma(grad_score, key, so_far, is_async=True)
        hand_back(values_empty, stage)
    grad, grad_score = warpgroup_mma_wait(0, deps=[grad, grad_score])
    hand_back(keys_empty, (until + STAGES - 1) % STAGES, until > since)
    return grad


@jit()
def _query_rows(
    given,
    BLOCK: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr, GROUP_PAD: gl.constexpr, KV_HEADS: gl.constexpr,
    DIM: gl.constexpr, OWN: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    """One group's 64 rows."""
    query_ptr, grad_out_ptr, log_sum_ptr, delta_ptr, start_ptr, end_ptr, grad_query_ptr, keys_ring, values_ring, tile, kv_head, ends, num_blocks, scale = given  # fmt: skip
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    begin, whole, tail, finish = ends
    scale_log2 = scale * 1.4426950408889634
    num_tokens = num_blocks * BLOCK
    row = tile * 128 + PART * 64
    query = load_rows(query_ptr, row, kv_head, num_blocks, BLOCK, SLOTS, GROUP, GROUP_PAD, KV_HEADS, DIM, KEYS)
    grad_out = load_rows(grad_out_ptr, row, kv_head, num_blocks, BLOCK, SLOTS, GROUP, GROUP_PAD, KV_HEADS, DIM, KEYS)
    at_row = row + gl.arange(0, 64, layout=gl.SliceLayout(1, scores))
    token, head, block, is_row = row_parts(at_row, num_blocks, BLOCK, SLOTS, GROUP, GROUP_PAD)
    number = (kv_head * GROUP + head) * num_tokens + token
    log_sum = gl.load(log_sum_ptr + number, mask=is_row, other=0.0)
    delta = gl.load(delta_ptr + number, mask=is_row, other=0.0)
    start = gl.load(start_ptr + token, mask=is_row, other=0)
    end = gl.load(end_ptr + token, mask=is_row, other=0)
    rows = (token, block, is_row, start, end)

    own_token = tile * 128 // (SLOTS * GROUP_PAD) * BLOCK
    base = begin - OWN * KEYS
    second = OWN + (whole - begin) // KEYS
    third = OWN + (tail - begin) // KEYS
    until = OWN + (finish - begin + KEYS - 1) // KEYS
    grad = gl.zeros([64, DIM], gl.float32, layout=sums)
    grad = _query_sweep(
        grad, query, grad_out, log_sum, delta, rows, keys_ring, values_ring, 0, OWN, own_token, num_tokens, scale_log2,
        "own", BLOCK, CAUSAL, KEYS, STAGES, DIM)  # fmt: skip
    grad = _query_sweep(
        grad, query, grad_out, log_sum, delta, rows, keys_ring, values_ring, OWN, second, base, num_tokens, scale_log2,
        "range", BLOCK, CAUSAL, KEYS, STAGES, DIM)  # fmt: skip
    grad = _query_sweep(
        grad, query, grad_out, log_sum, delta, rows, keys_ring, values_ring, second, third, base, num_tokens, scale_log2,
        "all", BLOCK, CAUSAL, KEYS, STAGES, DIM)  # fmt: skip
    grad = _query_sweep(
        grad, query, grad_out, log_sum, delta, rows, keys_ring, values_ring, third, until, base, num_tokens, scale_log2,
        "range", BLOCK, CAUSAL, KEYS, STAGES, DIM)  # fmt: skip
    store_rows(grad_query_ptr, grad * scale, row, kv_head, num_blocks, BLOCK, SLOTS, GROUP, GROUP_PAD, KV_HEADS, DIM)


@jit(LENGTHS)
def query_gradient_kernel(
    query_ptr, keys, values, block_keys, block_values, start_ptr, end_ptr, log_sum_ptr, grad_out_ptr, delta_ptr,
    grad_query_ptr, num_blocks, scale,
    BLOCK: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr, GROUP_PAD: gl.constexpr, KV_HEADS: gl.constexpr,
    DIM: gl.constexpr, OWN: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Gradient of one tile of 128 queries; late anchors see most: the longest of all heads first."""
    tile = gl.num_programs(0) // KV_HEADS - 1 - gl.program_id(0) // KV_HEADS
    kv_head = gl.program_id(0) % KV_HEADS
    ends = tile_ends(tile, start_ptr, end_ptr, num_blocks, BLOCK, SLOTS, GROUP, GROUP_PAD, KEYS)
    keys_ring = ring(KEYS, STAGES, DIM, keys.dtype)
    values_ring = ring(KEYS, STAGES, DIM, keys.dtype)
    own_token = tile * 128 // (SLOTS * GROUP_PAD) * BLOCK
    sources = (keys, values, block_keys, block_values)
    given = (
        query_ptr, grad_out_ptr, log_sum_ptr, delta_ptr, start_ptr, end_ptr, grad_query_ptr, keys_ring, values_ring,
        tile, kv_head, ends, num_blocks, scale,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_query_rows, (given, BLOCK, SLOTS, GROUP, GROUP_PAD, KV_HEADS, DIM, OWN, KEYS, STAGES, CAUSAL, 0)),
            (_query_rows, (given, BLOCK, SLOTS, GROUP, GROUP_PAD, KV_HEADS, DIM, OWN, KEYS, STAGES, CAUSAL, 1)),
            (feed_keys, (sources, keys_ring, values_ring, own_token, kv_head, ends[0], ends[3], OWN, KEYS, STAGES, DIM)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@jit()
def _feed_rows(
    sources, held, rings, first_key, kv_head, begin, finish, num_tokens,
    GROUP: gl.constexpr, DIM: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that copies: keys and values of the tile once, then rows backwards, the heads of a group in turn.

    From the last row on, so that programs that run at a time read the same rows, whichever tile they have.
    """
    keys, values, queries, grads, log_sums, deltas = sources
    key_tile, value_tile, held_full = held
    query_rows, grad_rows, log_sum_rows, delta_rows, full, empty = rings
    mbarrier.expect(held_full, 4 * 64 * DIM * 2)
    for part in gl.static_range(2):
        copy_tile(keys, [first_key + part * 64, kv_head * DIM], held_full, key_tile.index(part))
        copy_tile(values, [first_key + part * 64, kv_head * DIM], held_full, value_tile.index(part))
    for turn in range((finish - begin) * GROUP):
        stage = turn % STAGES
        ready = full.index(stage)
        token = (finish - 1 - turn // GROUP) * ROWS
        head = kv_head * GROUP + turn % GROUP
        mbarrier.wait(empty.index(stage), turn // STAGES % 2 ^ 1)
        mbarrier.expect(ready, 2 * ROWS * DIM * 2 + 2 * ROWS * 4)
        copy_tile(queries, [token, head * DIM], ready, query_rows.index(stage))
        copy_tile(log_sums, [head * num_tokens + token], ready, log_sum_rows.index(stage))
        copy_tile(grads, [token, head * DIM], ready, grad_rows.index(stage))
        copy_tile(deltas, [head * num_tokens + token], ready, delta_rows.index(stage))


@jit()
def _context_sweep(
    grad_key, grad_value, key, value, at, rings, start_ptr, end_ptr, since, until, finish, num_tokens, scale_log2,
    MASKED: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Adds turns [since, until) to the gradients of 64 keys, which stand in the rows here."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16]), 2)
    column: gl.constexpr = gl.SliceLayout(0, scores)
    query_rows, grad_rows, log_sum_rows, delta_rows, full, empty = rings
    zero = gl.zeros([64, ROWS], gl.float32, layout=scores)
    for turn in range(since, until):
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), turn // STAGES % 2)
        query = query_rows.index(stage)
        grad_out = grad_rows.index(stage)
        score = warpgroup_mma(key, query.permute((1, 0)), zero, use_acc=False, is_async=True)
        grad_share = warpgroup_mma(value, grad_out.permute((1, 0)), zero, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(1, deps=[score])
        log_sum = log_sum_rows.index(stage).load(column)
        share = gl.exp2(score * scale_log2 - gl.expand_dims(log_sum, 0))
        if MASKED:
            token = (finish - 1 - turn // GROUP) * ROWS + gl.arange(0, ROWS, layout=column)
            start = gl.load(start_ptr + token, mask=token < num_tokens, other=0)
            end = gl.load(end_ptr + token, mask=token < num_tokens, other=0)
            sees = (gl.expand_dims(at, 1) >= gl.expand_dims(start, 0)) & (
                gl.expand_dims(at, 1) < gl.expand_dims(end, 0)
            )
            share = gl.where(sees, share, 0.0)
        weight = gl.convert_layout(share.to(query_rows.dtype), left)
        grad_value = warpgroup_mma(weight, grad_out, grad_value, is_async=True)
        grad_share = warpgroup_mma_wait(1, deps=[grad_share])
        delta = delta_rows.index(stage).load(column)
        grad_score = share * (grad_share - gl.expand_dims(delta, 0))
        grad_score = gl.convert_layout(grad_score.to(query_rows.dtype), left)
        grad_key = warpgroup_mma(grad_score, query, grad_key, is_async=True)
        grad_value, grad_key, weight, grad_score = warpgroup_mma_wait(
            0, deps=[grad_value, grad_key, weight, grad_score]
        )
        hand_back(empty, stage)
    return grad_key, grad_value


@jit()
def _context_keys(
    given,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    """One group's 64 keys."""
    held, rings, start_ptr, end_ptr, grad_key_ptr, grad_value_ptr, first_key, kv_head, ends, num_context, num_tokens, scale = given  # fmt: skip
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    begin, whole, tail, finish = ends
    key_tile, value_tile, held_full = held
    scale_log2 = scale * 1.4426950408889634
    first = first_key + PART * 64
    at = first + gl.arange(0, 64, layout=gl.SliceLayout(1, scores))
    grad_key = gl.zeros([64, DIM], gl.float32, layout=sums)
    grad_value = gl.zeros([64, DIM], gl.float32, layout=sums)
    mbarrier.wait(held_full, 0)
    key = key_tile.index(PART)
    value = value_tile.index(PART)
    second = (finish - tail) * GROUP
    third = (finish - whole) * GROUP
    until = (finish - begin) * GROUP
    grad_key, grad_value = _context_sweep(
        grad_key, grad_value, key, value, at, rings, start_ptr, end_ptr, 0, second, finish, num_tokens, scale_log2,
        True, GROUP, DIM, ROWS, STAGES)  # fmt: skip
    grad_key, grad_value = _context_sweep(
        grad_key, grad_value, key, value, at, rings, start_ptr, end_ptr, second, third, finish, num_tokens, scale_log2,
        False, GROUP, DIM, ROWS, STAGES)  # fmt: skip
    grad_key, grad_value = _context_sweep(
        grad_key, grad_value, key, value, at, rings, start_ptr, end_ptr, third, until, finish, num_tokens, scale_log2,
        True, GROUP, DIM, ROWS, STAGES)  # fmt: skip
    row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, sums))
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, sums))
    where = gl.expand_dims((row * KV_HEADS + kv_head) * DIM, 1) + gl.expand_dims(dim, 0)
    is_key = gl.expand_dims(row < num_context, 1)
    gl.store(grad_key_ptr + where, (grad_key * scale).to(grad_key_ptr.dtype.element_ty), mask=is_key)
    gl.store(grad_value_ptr + where, grad_value.to(grad_key_ptr.dtype.element_ty), mask=is_key)


@jit(("num_context", "num_tokens"))
def context_gradient_kernel(
    queries, keys, values, start_ptr, end_ptr, log_sums, grads, deltas, grad_key_ptr, grad_value_ptr, seen_by_ptr,
    num_context, num_tokens, scale,
    BLOCK: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Gradients of one tile of 128 context keys and values: walks the one range of blocks that see it, ROWS tokens at a time.

    Early context is seen by most blocks: the longest of all heads first.
    """
    tile = gl.program_id(0) // KV_HEADS
    kv_head = gl.program_id(0) % KV_HEADS
    num_tiles = gl.num_programs(0) // KV_HEADS
    begin = gl.load(seen_by_ptr + tile) * BLOCK // ROWS
    whole = (gl.load(seen_by_ptr + num_tiles + tile) * BLOCK + ROWS - 1) // ROWS
    tail = gl.load(seen_by_ptr + 2 * num_tiles + tile) * BLOCK // ROWS
    finish = (gl.load(seen_by_ptr + 3 * num_tiles + tile) * BLOCK + ROWS - 1) // ROWS
    if tail <= whole:
        whole = begin
        tail = begin
    ends = (begin, whole, tail, finish)
    first_key = tile * 128

    matrix: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    numbers: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    key_tile = gl.allocate_shared_memory(keys.dtype, [2, 64, DIM], matrix)
    value_tile = gl.allocate_shared_memory(keys.dtype, [2, 64, DIM], matrix)
    held_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(held_full, count=1)
    query_rows, full, empty = ring(ROWS, STAGES, DIM, keys.dtype)
    grad_rows = gl.allocate_shared_memory(keys.dtype, [STAGES, ROWS, DIM], matrix)
    log_sum_rows = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], numbers)
    delta_rows = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], numbers)
    held = (key_tile, value_tile, held_full)
    rings = (query_rows, grad_rows, log_sum_rows, delta_rows, full, empty)
    sources = (keys, values, queries, grads, log_sums, deltas)
    given = (
        held, rings, start_ptr, end_ptr, grad_key_ptr, grad_value_ptr, first_key, kv_head, ends, num_context, num_tokens, scale,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_context_keys, (given, GROUP, KV_HEADS, DIM, ROWS, STAGES, 0)),
            (_context_keys, (given, GROUP, KV_HEADS, DIM, ROWS, STAGES, 1)),
            (_feed_rows, (sources, held, rings, first_key, kv_head, begin, finish, num_tokens, GROUP, DIM, ROWS, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
