"""The forward kernel of `attention_hopper`, and what the backward shares with it.

A program is three groups of warps: one warp copies tiles of keys and values into rings of buffers, two groups of four
multiply, each for 64 rows of the tile of 128. A buffer's barrier `full` is passed when a copy has arrived, `empty` when both
groups have read it. While one group weighs its scores, the tensor cores work for the other.

Row r of all is slot r % SLOTS of head r // SLOTS % GROUP_PAD in block r // (SLOTS · GROUP_PAD), as in `attention_forward`.
Turns of the loops: the own blocks' keys first, then context from `begin` to `finish`, KEYS at a time.
"""

from __future__ import annotations

from remote.drafter.kernels.gluon import (
    copy_tile,
    gl,
    jit,
    mbarrier,
    sync_warps,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LENGTHS = ("num_blocks",)


@jit()
def row_parts(row, num_blocks, BLOCK: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr, GROUP_PAD: gl.constexpr):
    """Token, head within the group, block and whether the row is one at all (not padding)."""
    block = row // (SLOTS * GROUP_PAD)
    head = row // SLOTS % GROUP_PAD
    slot = row % SLOTS
    return block * BLOCK + slot, head, block, (block < num_blocks) & (slot < BLOCK) & (head < GROUP)


@jit()
def tile_ends(
    tile, start_ptr, end_ptr, num_blocks,
    BLOCK: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr, GROUP_PAD: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Tile borders of the context the rows see: [begin, whole), [whole, tail) seen by all of them, [tail, finish)."""
    row = tile * 128 + gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    token, _head, _block, is_row = row_parts(row, num_blocks, BLOCK, SLOTS, GROUP, GROUP_PAD)
    start = gl.load(start_ptr + token, mask=is_row, other=0)
    end = gl.load(end_ptr + token, mask=is_row, other=0)
    far = 2147483647
    finish = gl.max(gl.where(is_row, end, 0), 0)
    begin = gl.minimum(gl.min(gl.where(is_row, start, far), 0), finish) // KEYS * KEYS
    whole = (gl.max(gl.where(is_row, start, 0), 0) + KEYS - 1) // KEYS * KEYS
    tail = gl.min(gl.where(is_row, end, far), 0) // KEYS * KEYS
    if tail <= whole:
        whole = begin
        tail = begin
    return begin, whole, tail, finish


@jit()
def ring(SIZE: gl.constexpr, STAGES: gl.constexpr, DIM: gl.constexpr, dtype: gl.constexpr):
    """Buffers of (SIZE, DIM) with their barriers full (one copy arrives) and empty (two groups have read)."""
    tiles = gl.allocate_shared_memory(dtype, [STAGES, SIZE, DIM], gl.NVMMASharedLayout(128, 16, 2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    return tiles, full, empty


@jit()
def hand_back(empty, stage, is_due=True):
    """Of a group of warps: all have read the buffer."""
    sync_warps()
    mbarrier.arrive(empty.index(stage), count=1, pred=is_due)


@jit()
def _copy_keys(into, own, context, own_token, low, kv_head, turn, OWN: gl.constexpr, SIZE: gl.constexpr, STAGES: gl.constexpr,
               DIM: gl.constexpr):  # fmt: skip
    tiles, full, empty = into
    stage = turn % STAGES
    mbarrier.wait(empty.index(stage), turn // STAGES % 2 ^ 1)
    mbarrier.expect(full.index(stage), SIZE * DIM * 2)
    copy_tile(own, [own_token, kv_head * DIM], full.index(stage), tiles.index(stage), pred=turn < OWN)
    copy_tile(context, [low, kv_head * DIM], full.index(stage), tiles.index(stage), pred=turn >= OWN)


@jit()
def feed_keys(
    sources, keys_ring, values_ring, own_token, kv_head, begin, finish,
    OWN: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """The warp that copies: own keys for OWN turns, then context."""
    keys, values, block_keys, block_values = sources
    for turn in range(OWN + (finish - begin + KEYS - 1) // KEYS):
        low = begin + (turn - OWN) * KEYS
        own = own_token + turn * KEYS
        _copy_keys(keys_ring, block_keys, keys, own, low, kv_head, turn, OWN, KEYS, STAGES, DIM)
        _copy_keys(values_ring, block_values, values, own, low, kv_head, turn, OWN, KEYS, STAGES, DIM)


@jit()
def only_seen(score, rows, at, num_tokens, SEES: gl.constexpr, BLOCK: gl.constexpr, CAUSAL: gl.constexpr):
    """Minus infinity where a row does not see key `at`. SEES: "all", "range" of context or "own" block."""
    token, block, is_row, start, end = rows
    if SEES == "range":
        sees = (gl.expand_dims(at, 0) >= gl.expand_dims(start, 1)) & (gl.expand_dims(at, 0) < gl.expand_dims(end, 1))
        score = gl.where(sees, score, float("-inf"))
    if SEES == "own":
        sees = gl.expand_dims(at // BLOCK, 0) == gl.expand_dims(block, 1)
        sees = sees & gl.expand_dims(is_row, 1) & gl.expand_dims(at < num_tokens, 0)
        if CAUSAL:
            sees = sees & (gl.expand_dims(at, 0) <= gl.expand_dims(token, 1))
        score = gl.where(sees, score, float("-inf"))
    return score


@jit()
def _sweep(
    total, share, weight, peak, query, rows, keys_ring, values_ring, since, until, base, num_tokens, scale_log2,
    SEES: gl.constexpr, BLOCK: gl.constexpr, CAUSAL: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    DIM: gl.constexpr,
):  # fmt: skip
    """Turns [since, until): the scores of a turn are made while the shares of the one before are multiplied."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    keys, keys_full, keys_empty = keys_ring
    values, values_full, values_empty = values_ring
    zero = gl.zeros([64, KEYS], gl.float32, layout=scores)
    for turn in range(since, until):
        stage = turn % STAGES
        before = (turn - 1) % STAGES
        mbarrier.wait(keys_full.index(stage), turn // STAGES % 2)
        score = warpgroup_mma(query, keys.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(values_full.index(before), (turn - 1) // STAGES % 2)
        total = warpgroup_mma(share, values.index(before), total, is_async=True)
        score = warpgroup_mma_wait(1, deps=[score])
        hand_back(keys_empty, stage)
        at = base + turn * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, scores))
        score = only_seen(score, rows, at, num_tokens, SEES, BLOCK, CAUSAL)
        new_peak = gl.maximum(peak, gl.max(score, 1) * scale_log2)
        exact = gl.exp2(score * scale_log2 - gl.expand_dims(new_peak, 1))
        shrink = gl.exp2(peak - new_peak)
        weight = weight * shrink + gl.sum(exact, 1)
        peak = new_peak
        total, share = warpgroup_mma_wait(0, deps=[total, share])
        hand_back(values_empty, before)
        total = total * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, sums)), 1)
        share = gl.convert_layout(exact.to(values.dtype), gl.DotOperandLayout(0, sums, 2))
    return total, share, weight, peak


@jit()
def _first_turn(
    query, rows, keys_ring, own_token, num_tokens, scale_log2,
    BLOCK: gl.constexpr, CAUSAL: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Shares of the own blocks' keys, their sum and the highest score of each row."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    keys, keys_full, keys_empty = keys_ring
    zero = gl.zeros([64, KEYS], gl.float32, layout=scores)
    mbarrier.wait(keys_full.index(0), 0)
    score = warpgroup_mma(query, keys.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(0, deps=[score])
    hand_back(keys_empty, 0)
    at = own_token + gl.arange(0, KEYS, layout=gl.SliceLayout(0, scores))
    score = only_seen(score, rows, at, num_tokens, "own", BLOCK, CAUSAL)
    is_row = rows[2]
    peak = gl.where(is_row, gl.max(score, 1) * scale_log2, 0.0)
    exact = gl.exp2(score * scale_log2 - gl.expand_dims(peak, 1))
    return gl.convert_layout(exact.to(keys.dtype), gl.DotOperandLayout(0, sums, 2)), gl.sum(exact, 1), peak


@jit()
def _last_values(total, share, values_ring, turn, STAGES: gl.constexpr):
    values, values_full, _values_empty = values_ring
    stage = turn % STAGES
    mbarrier.wait(values_full.index(stage), turn // STAGES % 2)
    total = warpgroup_mma(share, values.index(stage), total, is_async=True)
    total, share = warpgroup_mma_wait(0, deps=[total, share])
    return total


@jit()
def _rows(
    given,
    BLOCK: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr, GROUP_PAD: gl.constexpr, KV_HEADS: gl.constexpr,
    DIM: gl.constexpr, OWN: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    """One group's 64 rows. Its own keys come first, so that every row has a finite highest score from then on."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    (
        query_ptr,
        start_ptr,
        end_ptr,
        out_ptr,
        log_sum_ptr,
        keys_ring,
        values_ring,
        tile,
        kv_head,
        ends,
        num_blocks,
        scale,
    ) = given
    begin, whole, tail, finish = ends
    scale_log2 = scale * 1.4426950408889634
    num_tokens = num_blocks * BLOCK
    row = tile * 128 + PART * 64
    query = load_rows(query_ptr, row, kv_head, num_blocks, BLOCK, SLOTS, GROUP, GROUP_PAD, KV_HEADS, DIM, KEYS)
    at_row = row + gl.arange(0, 64, layout=gl.SliceLayout(1, scores))
    token, head, block, is_row = row_parts(at_row, num_blocks, BLOCK, SLOTS, GROUP, GROUP_PAD)
    start = gl.load(start_ptr + token, mask=is_row, other=0)
    end = gl.load(end_ptr + token, mask=is_row, other=0)
    rows = (token, block, is_row, start, end)

    own_token = tile * 128 // (SLOTS * GROUP_PAD) * BLOCK
    share, weight, peak = _first_turn(
        query, rows, keys_ring, own_token, num_tokens, scale_log2, BLOCK, CAUSAL, KEYS, DIM
    )
    total = gl.zeros([64, DIM], gl.float32, layout=sums)

    base = begin - OWN * KEYS
    second = OWN + (whole - begin) // KEYS
    third = OWN + (tail - begin) // KEYS
    until = OWN + (finish - begin + KEYS - 1) // KEYS
    total, share, weight, peak = _sweep(
        total, share, weight, peak, query, rows, keys_ring, values_ring, OWN, second, base, num_tokens, scale_log2,
        "range", BLOCK, CAUSAL, KEYS, STAGES, DIM)  # fmt: skip
    total, share, weight, peak = _sweep(
        total, share, weight, peak, query, rows, keys_ring, values_ring, second, third, base, num_tokens, scale_log2,
        "all", BLOCK, CAUSAL, KEYS, STAGES, DIM)  # fmt: skip
    total, share, weight, peak = _sweep(
        total, share, weight, peak, query, rows, keys_ring, values_ring, third, until, base, num_tokens, scale_log2,
        "range", BLOCK, CAUSAL, KEYS, STAGES, DIM)  # fmt: skip
    total = _last_values(total, share, values_ring, until - 1, STAGES)

    weight = gl.where(is_row, weight, 1.0)
    gl.store(log_sum_ptr + (kv_head * GROUP + head) * num_tokens + token, peak + gl.log2(weight), mask=is_row)
    total = total / gl.expand_dims(gl.convert_layout(weight, gl.SliceLayout(1, sums)), 1)
    store_rows(out_ptr, total, row, kv_head, num_blocks, BLOCK, SLOTS, GROUP, GROUP_PAD, KV_HEADS, DIM)


@jit()
def load_rows(
    source_ptr, row, kv_head, num_blocks,
    BLOCK: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr, GROUP_PAD: gl.constexpr, KV_HEADS: gl.constexpr,
    DIM: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """64 rows in registers, as the left side of a product with KEYS keys: read once, they need no shared memory."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    at = row + gl.arange(0, 64, layout=gl.SliceLayout(1, left))
    token, head, _block, is_row = row_parts(at, num_blocks, BLOCK, SLOTS, GROUP, GROUP_PAD)
    first = (token.to(gl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + head) * DIM
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, left))
    where = gl.expand_dims(first, 1) + gl.expand_dims(dim, 0)
    return gl.load(source_ptr + where, mask=gl.expand_dims(is_row, 1), other=0.0)


@jit()
def store_rows(
    target_ptr, value, row, kv_head, num_blocks,
    BLOCK: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr, GROUP_PAD: gl.constexpr, KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
):  # fmt: skip
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    at = row + gl.arange(0, 64, layout=gl.SliceLayout(1, sums))
    token, head, _block, is_row = row_parts(at, num_blocks, BLOCK, SLOTS, GROUP, GROUP_PAD)
    first = (token.to(gl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + head) * DIM
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, sums))
    where = gl.expand_dims(first, 1) + gl.expand_dims(dim, 0)
    gl.store(target_ptr + where, value.to(target_ptr.dtype.element_ty), mask=gl.expand_dims(is_row, 1))


@jit(LENGTHS)
def forward_kernel(
    query_ptr, keys, values, block_keys, block_values, start_ptr, end_ptr, out_ptr, log_sum_ptr, num_blocks, scale,
    BLOCK: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr, GROUP_PAD: gl.constexpr, KV_HEADS: gl.constexpr,
    DIM: gl.constexpr, OWN: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """One tile of 128 rows; late anchors see most: the longest of all heads first."""
    tile = gl.num_programs(0) // KV_HEADS - 1 - gl.program_id(0) // KV_HEADS
    kv_head = gl.program_id(0) % KV_HEADS
    ends = tile_ends(tile, start_ptr, end_ptr, num_blocks, BLOCK, SLOTS, GROUP, GROUP_PAD, KEYS)
    keys_ring = ring(KEYS, STAGES, DIM, keys.dtype)
    values_ring = ring(KEYS, STAGES, DIM, keys.dtype)
    own_token = tile * 128 // (SLOTS * GROUP_PAD) * BLOCK
    sources = (keys, values, block_keys, block_values)
    given = (
        query_ptr, start_ptr, end_ptr, out_ptr, log_sum_ptr, keys_ring, values_ring, tile, kv_head, ends, num_blocks, scale,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_rows, (given, BLOCK, SLOTS, GROUP, GROUP_PAD, KV_HEADS, DIM, OWN, KEYS, STAGES, CAUSAL, 0)),
            (_rows, (given, BLOCK, SLOTS, GROUP, GROUP_PAD, KV_HEADS, DIM, OWN, KEYS, STAGES, CAUSAL, 1)),
            (feed_keys, (sources, keys_ring, values_ring, own_token, kv_head, ends[0], ends[3], OWN, KEYS, STAGES, DIM)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
