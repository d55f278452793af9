"""Trials of attention kernels for Hopper in Gluon: a warp that loads, two warpgroups that compute."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def _feed_rows(
    queries,
    grads,
    keys,
    values,
    log_sums,
    deltas,
    q_s,
    o_s,
    k_s,
    v_s,
    l_s,
    d_s,
    held,
    full,
    empty,
    first_key,
    kv_head,
    begin,
    finish,
    num_padded,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):
    mbarrier.expect(held, 4 * 64 * DIM * 2)
    for part in gl.static_range(2):
        tma.async_copy_global_to_shared(keys, [first_key + part * 64, kv_head * DIM], held, k_s.index(part))
        tma.async_copy_global_to_shared(values, [first_key + part * 64, kv_head * DIM], held, v_s.index(part))
    for turn in range((finish - begin) * GROUP):
        stage = turn % STAGES
        mbarrier.wait(empty.index(stage), turn // STAGES % 2 ^ 1)
        ready = full.index(stage)
        tile = finish - 1 - turn // GROUP
        head = kv_head * GROUP + turn % GROUP
        mbarrier.expect(ready, 2 * ROWS * DIM * 2 + 2 * ROWS * 4)
        tma.async_copy_global_to_shared(queries, [tile * ROWS, head * DIM], ready, q_s.index(stage))
        tma.async_copy_global_to_shared(log_sums, [head * num_padded + tile * ROWS], ready, l_s.index(stage))
        tma.async_copy_global_to_shared(grads, [tile * ROWS, head * DIM], ready, o_s.index(stage))
        tma.async_copy_global_to_shared(deltas, [head * num_padded + tile * ROWS], ready, d_s.index(stage))


@gluon.jit
def _sweep_rows(
    grad_key,
    grad_value,
    key,
    value,
    q_s,
    o_s,
    l_s,
    d_s,
    full,
    empty,
    start_ptr,
    end_ptr,
    at,
    since,
    until,
    finish,
    num_tokens,
    scale_log2,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    MASKED: gl.constexpr,
):
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    column: gl.constexpr = gl.SliceLayout(0, scores)
    zero = gl.zeros([64, ROWS], gl.float32, layout=scores)
    for turn in range(since, until):
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), turn // STAGES % 2)
        q = q_s.index(stage)
        o = o_s.index(stage)
        score = warpgroup_mma(key, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        share_grad = warpgroup_mma(value, o.permute((1, 0)), zero, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(1, deps=[score])
        log_sum = l_s.index(stage).load(column)
        share = gl.exp2(score * scale_log2 - gl.expand_dims(log_sum, 0))
        if MASKED:
            token = (finish - 1 - turn // GROUP) * ROWS + gl.arange(0, ROWS, layout=column)
            start = gl.load(start_ptr + token, mask=token < num_tokens, other=0)
            end = gl.load(end_ptr + token, mask=token < num_tokens, other=0)
            sees = (gl.expand_dims(at, 1) >= gl.expand_dims(start, 0)) & (
                gl.expand_dims(at, 1) < gl.expand_dims(end, 0)
            )
            share = gl.where(sees, share, 0.0)
        weight = gl.convert_layout(share.to(gl.bfloat16), operand)
        grad_value = warpgroup_mma(weight, o, grad_value, is_async=True)
        share_grad = warpgroup_mma_wait(1, deps=[share_grad])
        delta = d_s.index(stage).load(column)
        grad_score = gl.convert_layout((share * (share_grad - gl.expand_dims(delta, 0))).to(gl.bfloat16), operand)
        grad_key = warpgroup_mma(grad_score, q, grad_key, is_async=True)
        grad_value, grad_key, weight, grad_score = warpgroup_mma_wait(
            0, deps=[grad_value, grad_key, weight, grad_score]
        )
        gl.thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
    return grad_key, grad_value


@gluon.jit
def _own_keys(
    q_s,
    o_s,
    k_s,
    v_s,
    l_s,
    d_s,
    held,
    full,
    empty,
    start_ptr,
    end_ptr,
    grad_key_ptr,
    grad_value_ptr,
    first_key,
    kv_head,
    begin,
    whole,
    tail,
    finish,
    num_context,
    num_tokens,
    scale,
    PART: gl.constexpr,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    scale_log2 = scale * 1.4426950408889634
    grad_key = gl.zeros([64, DIM], gl.float32, layout=sums)
    grad_value = gl.zeros([64, DIM], gl.float32, layout=sums)
    at = first_key + PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, scores))
    mbarrier.wait(held, 0)
    key = k_s.index(PART)
    value = v_s.index(PART)
    grad_key, grad_value = _sweep_rows(
        grad_key,
        grad_value,
        key,
        value,
        q_s,
        o_s,
        l_s,
        d_s,
        full,
        empty,
        start_ptr,
        end_ptr,
        at,
        0,
        (finish - tail) * GROUP,
        finish,
        num_tokens,
        scale_log2,
        GROUP,
        DIM,
        ROWS,
        STAGES,
        True,
    )
    grad_key, grad_value = _sweep_rows(
        grad_key,
        grad_value,
        key,
        value,
        q_s,
        o_s,
        l_s,
        d_s,
        full,
        empty,
        start_ptr,
        end_ptr,
        at,
        (finish - tail) * GROUP,
        (finish - whole) * GROUP,
        finish,
        num_tokens,
        scale_log2,
        GROUP,
        DIM,
        ROWS,
        STAGES,
        False,
    )
    grad_key, grad_value = _sweep_rows(
        grad_key,
        grad_value,
        key,
        value,
        q_s,
        o_s,
        l_s,
        d_s,
        full,
        empty,
        start_ptr,
        end_ptr,
        at,
        (finish - whole) * GROUP,
        (finish - begin) * GROUP,
        finish,
        num_tokens,
        scale_log2,
        GROUP,
        DIM,
        ROWS,
        STAGES,
        True,
    )
    row = first_key + PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, sums))
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, sums))
    offset = gl.expand_dims((row * KV_HEADS + kv_head) * DIM, 1) + gl.expand_dims(dim, 0)
    mask = gl.expand_dims(row < num_context, 1)
    gl.store(grad_key_ptr + offset, (grad_key * scale).to(gl.bfloat16), mask=mask)
    gl.store(grad_value_ptr + offset, grad_value.to(gl.bfloat16), mask=mask)


@gluon.jit(do_not_specialize=["num_context", "num_tokens", "num_padded"])
def context_gradient_kernel(
    queries,
    keys,
    values,
    log_sums,
    grads,
    deltas,
    start_ptr,
    end_ptr,
    grad_key_ptr,
    grad_value_ptr,
    seen_by_ptr,
    num_context,
    num_tokens,
    num_padded,
    scale,
    BLOCK: gl.constexpr,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):
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
    first_key = tile * 128
    matrix: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    vector: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, DIM], matrix)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, DIM], matrix)
    q_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, DIM], matrix)
    o_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, DIM], matrix)
    l_s = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], vector)
    d_s = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], vector)
    held = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(held, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (
                _own_keys,
                (
                    q_s,
                    o_s,
                    k_s,
                    v_s,
                    l_s,
                    d_s,
                    held,
                    full,
                    empty,
                    start_ptr,
                    end_ptr,
                    grad_key_ptr,
                    grad_value_ptr,
                    first_key,
                    kv_head,
                    begin,
                    whole,
                    tail,
                    finish,
                    num_context,
                    num_tokens,
                    scale,
                    0,
                    GROUP,
                    KV_HEADS,
                    DIM,
                    ROWS,
                    STAGES,
                ),
            ),
            (
                _own_keys,
                (
                    q_s,
                    o_s,
                    k_s,
                    v_s,
                    l_s,
                    d_s,
                    held,
                    full,
                    empty,
                    start_ptr,
                    end_ptr,
                    grad_key_ptr,
                    grad_value_ptr,
                    first_key,
                    kv_head,
                    begin,
                    whole,
                    tail,
                    finish,
                    num_context,
                    num_tokens,
                    scale,
                    1,
                    GROUP,
                    KV_HEADS,
                    DIM,
                    ROWS,
                    STAGES,
                ),
            ),
            (
                _feed_rows,
                (
                    queries,
                    grads,
                    keys,
                    values,
                    log_sums,
                    deltas,
                    q_s,
                    o_s,
                    k_s,
                    v_s,
                    l_s,
                    d_s,
                    held,
                    full,
                    empty,
                    first_key,
                    kv_head,
                    begin,
                    finish,
                    num_padded,
                    GROUP,
                    DIM,
                    ROWS,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _row_of(row, num_blocks, BLOCK: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr, GROUP_PAD: gl.constexpr):
    block = row // (SLOTS * GROUP_PAD)
    head = row // SLOTS % GROUP_PAD
    slot = row % SLOTS
    return block * BLOCK + slot, head, block, (block < num_blocks) & (slot < BLOCK) & (head < GROUP)


@gluon.jit
def _feed_keys(
    keys,
    values,
    block_keys,
    block_values,
    k_s,
    v_s,
    k_full,
    v_full,
    k_empty,
    v_empty,
    first_token,
    kv_head,
    begin,
    finish,
    DIM: gl.constexpr,
    KEYS: gl.constexpr,
    OWN: gl.constexpr,
    STAGES: gl.constexpr,
):
    for turn in range(OWN + (finish - begin + KEYS - 1) // KEYS):
        stage = turn % STAGES
        phase = turn // STAGES % 2 ^ 1
        is_own = turn < OWN
        at = begin + (turn - OWN) * KEYS
        own_at = first_token + turn * KEYS
        mbarrier.wait(k_empty.index(stage), phase)
        mbarrier.expect(k_full.index(stage), KEYS * DIM * 2)
        tma.async_copy_global_to_shared(
            block_keys, [own_at, kv_head * DIM], k_full.index(stage), k_s.index(stage), pred=is_own
        )
        tma.async_copy_global_to_shared(
            keys, [at, kv_head * DIM], k_full.index(stage), k_s.index(stage), pred=turn >= OWN
        )
        mbarrier.wait(v_empty.index(stage), phase)
        mbarrier.expect(v_full.index(stage), KEYS * DIM * 2)
        tma.async_copy_global_to_shared(
            block_values, [own_at, kv_head * DIM], v_full.index(stage), v_s.index(stage), pred=is_own
        )
        tma.async_copy_global_to_shared(
            values, [at, kv_head * DIM], v_full.index(stage), v_s.index(stage), pred=turn >= OWN
        )


@gluon.jit
def _seen(
    score,
    kind: gl.constexpr,
    at,
    start,
    end,
    token,
    block,
    is_row,
    num_tokens,
    BLOCK: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """kind 0: all, 1: the range, 2: the own block."""
    if kind == 1:
        score = gl.where(
            (gl.expand_dims(at, 0) >= gl.expand_dims(start, 1)) & (gl.expand_dims(at, 0) < gl.expand_dims(end, 1)),
            score,
            float("-inf"),
        )
    if kind == 2:
        sees = (
            (gl.expand_dims(at // BLOCK, 0) == gl.expand_dims(block, 1))
            & gl.expand_dims(is_row, 1)
            & gl.expand_dims(at < num_tokens, 0)
        )
        if CAUSAL:
            sees = sees & (gl.expand_dims(at, 0) <= gl.expand_dims(token, 1))
        score = gl.where(sees, score, float("-inf"))
    return score


@gluon.jit
def _sweep_grad(
    grad,
    q,
    o,
    k_s,
    v_s,
    k_full,
    v_full,
    k_empty,
    v_empty,
    log_sum,
    delta,
    start,
    end,
    token,
    block,
    is_row,
    since,
    until,
    base,
    num_tokens,
    scale_log2,
    KIND: gl.constexpr,
    BLOCK: gl.constexpr,
    CAUSAL: gl.constexpr,
    KEYS: gl.constexpr,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,
):
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    zero = gl.zeros([64, KEYS], gl.float32, layout=scores)
    for turn in range(since, until):
        stage = turn % STAGES
        phase = turn // STAGES % 2
        mbarrier.wait(k_full.index(stage), phase)
        key = k_s.index(stage)
        score = warpgroup_mma(q, key.permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(stage), phase)
        grad_share = warpgroup_mma(o, v_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(1, deps=[score])
        score = _seen(
            score,
            KIND,
            base + turn * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, scores)),
            start,
            end,
            token,
            block,
            is_row,
            num_tokens,
            BLOCK,
            CAUSAL,
        )
        share = gl.exp2(score * scale_log2 - gl.expand_dims(log_sum, 1))
        grad_share = warpgroup_mma_wait(0, deps=[grad_share])
        grad_score = gl.convert_layout((share * (grad_share - gl.expand_dims(delta, 1))).to(gl.bfloat16), operand)
        grad = warpgroup_mma(grad_score, key, grad, is_async=True)
        gl.thread_barrier()
        mbarrier.arrive(v_empty.index(stage), count=1)
        grad, grad_score = warpgroup_mma_wait(0, deps=[grad, grad_score])
        gl.thread_barrier()
        mbarrier.arrive(k_empty.index(stage), count=1)
    return grad


@gluon.jit
def _rows_gradient(
    query_ptr,
    grad_out_ptr,
    log_sum_ptr,
    delta_ptr,
    start_ptr,
    end_ptr,
    grad_query_ptr,
    k_s,
    v_s,
    k_full,
    v_full,
    k_empty,
    v_empty,
    tile,
    kv_head,
    begin,
    whole,
    tail,
    finish,
    num_blocks,
    num_padded,
    scale,
    PART: gl.constexpr,
    BLOCK: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUP: gl.constexpr,
    GROUP_PAD: gl.constexpr,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    KEYS: gl.constexpr,
    OWN: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    scale_log2 = scale * 1.4426950408889634
    num_tokens = num_blocks * BLOCK
    token, head, _b, is_row = _row_of(
        tile * 128 + PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, operand)),
        num_blocks,
        BLOCK,
        SLOTS,
        GROUP,
        GROUP_PAD,
    )
    dim = gl.expand_dims(gl.arange(0, DIM, layout=gl.SliceLayout(0, operand)), 0)
    at_row = gl.expand_dims((token.to(gl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + head) * DIM, 1) + dim
    q = gl.load(query_ptr + at_row, mask=gl.expand_dims(is_row, 1), other=0.0)
    o = gl.load(grad_out_ptr + at_row, mask=gl.expand_dims(is_row, 1), other=0.0)
    token, head, block, is_row = _row_of(
        tile * 128 + PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, scores)),
        num_blocks,
        BLOCK,
        SLOTS,
        GROUP,
        GROUP_PAD,
    )
    number = (kv_head * GROUP + head) * num_padded + token
    log_sum = gl.load(log_sum_ptr + number, mask=is_row, other=0.0)
    delta = gl.load(delta_ptr + number, mask=is_row, other=0.0)
    start = gl.load(start_ptr + token, mask=is_row, other=0)
    end = gl.load(end_ptr + token, mask=is_row, other=0)
    grad = gl.zeros([64, DIM], gl.float32, layout=sums)
    grad = _sweep_grad(
        grad,
        q,
        o,
        k_s,
        v_s,
        k_full,
        v_full,
        k_empty,
        v_empty,
        log_sum,
        delta,
        start,
        end,
        token,
        block,
        is_row,
        0,
        OWN,
        tile * 128 // (SLOTS * GROUP_PAD) * BLOCK,
        num_tokens,
        scale_log2,
        2,
        BLOCK,
        CAUSAL,
        KEYS,
        DIM,
        STAGES,
    )
    base = begin - OWN * KEYS
    first = OWN + (whole - begin) // KEYS
    second = OWN + (tail - begin) // KEYS
    third = OWN + (finish - begin + KEYS - 1) // KEYS
    grad = _sweep_grad(
        grad,
        q,
        o,
        k_s,
        v_s,
        k_full,
        v_full,
        k_empty,
        v_empty,
        log_sum,
        delta,
        start,
        end,
        token,
        block,
        is_row,
        OWN,
        first,
        base,
        num_tokens,
        scale_log2,
        1,
        BLOCK,
        CAUSAL,
        KEYS,
        DIM,
        STAGES,
    )
    grad = _sweep_grad(
        grad,
        q,
        o,
        k_s,
        v_s,
        k_full,
        v_full,
        k_empty,
        v_empty,
        log_sum,
        delta,
        start,
        end,
        token,
        block,
        is_row,
        first,
        second,
        base,
        num_tokens,
        scale_log2,
        0,
        BLOCK,
        CAUSAL,
        KEYS,
        DIM,
        STAGES,
    )
    grad = _sweep_grad(
        grad,
        q,
        o,
        k_s,
        v_s,
        k_full,
        v_full,
        k_empty,
        v_empty,
        log_sum,
        delta,
        start,
        end,
        token,
        block,
        is_row,
        second,
        third,
        base,
        num_tokens,
        scale_log2,
        1,
        BLOCK,
        CAUSAL,
        KEYS,
        DIM,
        STAGES,
    )
    token, head, _b2, is_row = _row_of(
        tile * 128 + PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, sums)),
        num_blocks,
        BLOCK,
        SLOTS,
        GROUP,
        GROUP_PAD,
    )
    dim = gl.expand_dims(gl.arange(0, DIM, layout=gl.SliceLayout(0, sums)), 0)
    at_row = gl.expand_dims((token.to(gl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + head) * DIM, 1) + dim
    gl.store(grad_query_ptr + at_row, (grad * scale).to(gl.bfloat16), mask=gl.expand_dims(is_row, 1))


@gluon.jit
def _parts(
    tile,
    start_ptr,
    end_ptr,
    num_blocks,
    BLOCK: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUP: gl.constexpr,
    GROUP_PAD: gl.constexpr,
    KEYS: gl.constexpr,
):
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    token, _h, _b, is_row = _row_of(
        tile * 128 + gl.arange(0, 128, layout=flat), num_blocks, BLOCK, SLOTS, GROUP, GROUP_PAD
    )
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


@gluon.jit(do_not_specialize=["num_blocks", "num_padded"])
def query_gradient_kernel(
    query_ptr,
    keys,
    values,
    block_keys,
    block_values,
    start_ptr,
    end_ptr,
    log_sum_ptr,
    grad_out_ptr,
    delta_ptr,
    grad_query_ptr,
    num_blocks,
    num_padded,
    scale,
    BLOCK: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUP: gl.constexpr,
    GROUP_PAD: gl.constexpr,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    KEYS: gl.constexpr,
    OWN: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    tile = gl.num_programs(0) // KV_HEADS - 1 - gl.program_id(0) // KV_HEADS
    kv_head = gl.program_id(0) % KV_HEADS
    begin, whole, tail, finish = _parts(tile, start_ptr, end_ptr, num_blocks, BLOCK, SLOTS, GROUP, GROUP_PAD, KEYS)
    matrix: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, DIM], matrix)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, DIM], matrix)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    first_token = tile * 128 // (SLOTS * GROUP_PAD) * BLOCK
    gl.warp_specialize(
        [
            (
                _rows_gradient,
                (
                    query_ptr,
                    grad_out_ptr,
                    log_sum_ptr,
                    delta_ptr,
                    start_ptr,
                    end_ptr,
                    grad_query_ptr,
                    k_s,
                    v_s,
                    k_full,
                    v_full,
                    k_empty,
                    v_empty,
                    tile,
                    kv_head,
                    begin,
                    whole,
                    tail,
                    finish,
                    num_blocks,
                    num_padded,
                    scale,
                    0,
                    BLOCK,
                    SLOTS,
                    GROUP,
                    GROUP_PAD,
                    KV_HEADS,
                    DIM,
                    KEYS,
                    OWN,
                    STAGES,
                    CAUSAL,
                ),
            ),
            (
                _rows_gradient,
                (
                    query_ptr,
                    grad_out_ptr,
                    log_sum_ptr,
                    delta_ptr,
                    start_ptr,
                    end_ptr,
                    grad_query_ptr,
                    k_s,
                    v_s,
                    k_full,
                    v_full,
                    k_empty,
                    v_empty,
                    tile,
                    kv_head,
                    begin,
                    whole,
                    tail,
                    finish,
                    num_blocks,
                    num_padded,
                    scale,
                    1,
                    BLOCK,
                    SLOTS,
                    GROUP,
                    GROUP_PAD,
                    KV_HEADS,
                    DIM,
                    KEYS,
                    OWN,
                    STAGES,
                    CAUSAL,
                ),
            ),
            (
                _feed_keys,
                (
                    keys,
                    values,
                    block_keys,
                    block_values,
                    k_s,
                    v_s,
                    k_full,
                    v_full,
                    k_empty,
                    v_empty,
                    first_token,
                    kv_head,
                    begin,
                    finish,
                    DIM,
                    KEYS,
                    OWN,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _soften(score, weight, peak, scale_log2):
    new_peak = gl.maximum(peak, gl.max(score, 1) * scale_log2)
    share = gl.exp2(score * scale_log2 - gl.expand_dims(new_peak, 1))
    shrink = gl.exp2(peak - new_peak)
    return share, weight * shrink + gl.sum(share, 1), new_peak, shrink


@gluon.jit
def _sweep_forward(
    total,
    share,
    weight,
    peak,
    q,
    k_s,
    v_s,
    k_full,
    v_full,
    k_empty,
    v_empty,
    start,
    end,
    token,
    block,
    is_row,
    since,
    until,
    base,
    num_tokens,
    scale_log2,
    KIND: gl.constexpr,
    BLOCK: gl.constexpr,
    CAUSAL: gl.constexpr,
    KEYS: gl.constexpr,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,
):
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    zero = gl.zeros([64, KEYS], gl.float32, layout=scores)
    for turn in range(since, until):
        stage = turn % STAGES
        before = (turn - 1) % STAGES
        mbarrier.wait(k_full.index(stage), turn // STAGES % 2)
        score = warpgroup_mma(q, k_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), (turn - 1) // STAGES % 2)
        total = warpgroup_mma(share, v_s.index(before), total, is_async=True)
        score = warpgroup_mma_wait(1, deps=[score])
        gl.thread_barrier()
        mbarrier.arrive(k_empty.index(stage), count=1)
        score = _seen(
            score,
            KIND,
            base + turn * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, scores)),
            start,
            end,
            token,
            block,
            is_row,
            num_tokens,
            BLOCK,
            CAUSAL,
        )
        next_share, weight, peak, shrink = _soften(score, weight, peak, scale_log2)
        total, share = warpgroup_mma_wait(0, deps=[total, share])
        gl.thread_barrier()
        mbarrier.arrive(v_empty.index(before), count=1)
        total = total * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, sums)), 1)
        share = gl.convert_layout(next_share.to(gl.bfloat16), operand)
    return total, share, weight, peak


@gluon.jit
def _rows_forward(
    query_ptr,
    start_ptr,
    end_ptr,
    out_ptr,
    log_sum_ptr,
    k_s,
    v_s,
    k_full,
    v_full,
    k_empty,
    v_empty,
    tile,
    kv_head,
    begin,
    whole,
    tail,
    finish,
    num_blocks,
    num_padded,
    scale,
    PART: gl.constexpr,
    BLOCK: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUP: gl.constexpr,
    GROUP_PAD: gl.constexpr,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    KEYS: gl.constexpr,
    OWN: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    shared_operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    scale_log2 = scale * 1.4426950408889634
    num_tokens = num_blocks * BLOCK
    token, head, _b, is_row = _row_of(
        tile * 128 + PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, operand)),
        num_blocks,
        BLOCK,
        SLOTS,
        GROUP,
        GROUP_PAD,
    )
    dim = gl.expand_dims(gl.arange(0, DIM, layout=gl.SliceLayout(0, operand)), 0)
    at_row = gl.expand_dims((token.to(gl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + head) * DIM, 1) + dim
    q = gl.load(query_ptr + at_row, mask=gl.expand_dims(is_row, 1), other=0.0)
    token, head, block, is_row = _row_of(
        tile * 128 + PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, scores)),
        num_blocks,
        BLOCK,
        SLOTS,
        GROUP,
        GROUP_PAD,
    )
    start = gl.load(start_ptr + token, mask=is_row, other=0)
    end = gl.load(end_ptr + token, mask=is_row, other=0)
    own_base = tile * 128 // (SLOTS * GROUP_PAD) * BLOCK

    # The own block's first tile alone: from then on every row has a finite highest score.
    zero = gl.zeros([64, KEYS], gl.float32, layout=scores)
    mbarrier.wait(k_full.index(0), 0)
    score = warpgroup_mma(q, k_s.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(0, deps=[score])
    gl.thread_barrier()
    mbarrier.arrive(k_empty.index(0), count=1)
    score = _seen(
        score,
        2,
        own_base + gl.arange(0, KEYS, layout=gl.SliceLayout(0, scores)),
        start,
        end,
        token,
        block,
        is_row,
        num_tokens,
        BLOCK,
        CAUSAL,
    )
    peak = gl.where(is_row, gl.max(score, 1) * scale_log2, 0.0)
    exact = gl.exp2(score * scale_log2 - gl.expand_dims(peak, 1))
    weight = gl.sum(exact, 1)
    share = gl.convert_layout(exact.to(gl.bfloat16), shared_operand)
    total = gl.zeros([64, DIM], gl.float32, layout=sums)

    base = begin - OWN * KEYS
    first = OWN + (whole - begin) // KEYS
    second = OWN + (tail - begin) // KEYS
    third = OWN + (finish - begin + KEYS - 1) // KEYS
    if OWN > 1:
        total, share, weight, peak = _sweep_forward(
            total,
            share,
            weight,
            peak,
            q,
            k_s,
            v_s,
            k_full,
            v_full,
            k_empty,
            v_empty,
            start,
            end,
            token,
            block,
            is_row,
            1,
            OWN,
            own_base,
            num_tokens,
            scale_log2,
            2,
            BLOCK,
            CAUSAL,
            KEYS,
            DIM,
            STAGES,
        )
    total, share, weight, peak = _sweep_forward(
        total,
        share,
        weight,
        peak,
        q,
        k_s,
        v_s,
        k_full,
        v_full,
        k_empty,
        v_empty,
        start,
        end,
        token,
        block,
        is_row,
        OWN,
        first,
        base,
        num_tokens,
        scale_log2,
        1,
        BLOCK,
        CAUSAL,
        KEYS,
        DIM,
        STAGES,
    )
    total, share, weight, peak = _sweep_forward(
        total,
        share,
        weight,
        peak,
        q,
        k_s,
        v_s,
        k_full,
        v_full,
        k_empty,
        v_empty,
        start,
        end,
        token,
        block,
        is_row,
        first,
        second,
        base,
        num_tokens,
        scale_log2,
        0,
        BLOCK,
        CAUSAL,
        KEYS,
        DIM,
        STAGES,
    )
    total, share, weight, peak = _sweep_forward(
        total,
        share,
        weight,
        peak,
        q,
        k_s,
        v_s,
        k_full,
        v_full,
        k_empty,
        v_empty,
        start,
        end,
        token,
        block,
        is_row,
        second,
        third,
        base,
        num_tokens,
        scale_log2,
        1,
        BLOCK,
        CAUSAL,
        KEYS,
        DIM,
        STAGES,
    )
    last = (third - 1) % STAGES
    mbarrier.wait(v_full.index(last), (third - 1) // STAGES % 2)
    total = warpgroup_mma(share, v_s.index(last), total, is_async=True)
    total, share = warpgroup_mma_wait(0, deps=[total, share])
    weight = gl.where(is_row, weight, 1.0)
    gl.store(log_sum_ptr + (kv_head * GROUP + head) * num_padded + token, peak + gl.log2(weight), mask=is_row)
    total = total / gl.expand_dims(gl.convert_layout(weight, gl.SliceLayout(1, sums)), 1)
    token, head, _b2, is_row = _row_of(
        tile * 128 + PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, sums)),
        num_blocks,
        BLOCK,
        SLOTS,
        GROUP,
        GROUP_PAD,
    )
    dim = gl.expand_dims(gl.arange(0, DIM, layout=gl.SliceLayout(0, sums)), 0)
    at_row = gl.expand_dims((token.to(gl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + head) * DIM, 1) + dim
    gl.store(out_ptr + at_row, total.to(gl.bfloat16), mask=gl.expand_dims(is_row, 1))


@gluon.jit(do_not_specialize=["num_blocks", "num_padded"])
def forward_kernel(
    query_ptr,
    keys,
    values,
    block_keys,
    block_values,
    start_ptr,
    end_ptr,
    out_ptr,
    log_sum_ptr,
    num_blocks,
    num_padded,
    scale,
    BLOCK: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUP: gl.constexpr,
    GROUP_PAD: gl.constexpr,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    KEYS: gl.constexpr,
    OWN: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    tile = gl.num_programs(0) // KV_HEADS - 1 - gl.program_id(0) // KV_HEADS
    kv_head = gl.program_id(0) % KV_HEADS
    begin, whole, tail, finish = _parts(tile, start_ptr, end_ptr, num_blocks, BLOCK, SLOTS, GROUP, GROUP_PAD, KEYS)
    matrix: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, DIM], matrix)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, DIM], matrix)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    first_token = tile * 128 // (SLOTS * GROUP_PAD) * BLOCK
    gl.warp_specialize(
        [
            (
                _rows_forward,
                (
                    query_ptr,
                    start_ptr,
                    end_ptr,
                    out_ptr,
                    log_sum_ptr,
                    k_s,
                    v_s,
                    k_full,
                    v_full,
                    k_empty,
                    v_empty,
                    tile,
                    kv_head,
                    begin,
                    whole,
                    tail,
                    finish,
                    num_blocks,
                    num_padded,
                    scale,
                    0,
                    BLOCK,
                    SLOTS,
                    GROUP,
                    GROUP_PAD,
                    KV_HEADS,
                    DIM,
                    KEYS,
                    OWN,
                    STAGES,
                    CAUSAL,
                ),
            ),
            (
                _rows_forward,
                (
                    query_ptr,
                    start_ptr,
                    end_ptr,
                    out_ptr,
                    log_sum_ptr,
                    k_s,
                    v_s,
                    k_full,
                    v_full,
                    k_empty,
                    v_empty,
                    tile,
                    kv_head,
                    begin,
                    whole,
                    tail,
                    finish,
                    num_blocks,
                    num_padded,
                    scale,
                    1,
                    BLOCK,
                    SLOTS,
                    GROUP,
                    GROUP_PAD,
                    KV_HEADS,
                    DIM,
                    KEYS,
                    OWN,
                    STAGES,
                    CAUSAL,
                ),
            ),
            (
                _feed_keys,
                (
                    keys,
                    values,
                    block_keys,
                    block_values,
                    k_s,
                    v_s,
                    k_full,
                    v_full,
                    k_empty,
                    v_empty,
                    first_token,
                    kv_head,
                    begin,
                    finish,
                    DIM,
                    KEYS,
                    OWN,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )
