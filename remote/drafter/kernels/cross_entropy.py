"""Rows of logits: what loss and metrics read of them in one visit, and the gradient of the loss in a second.

A row of 248,320 float32 numbers fits no cache, so each visit is one read from memory, and the gradient is written
once, in the head's dtype. Both visits keep a running state in every lane; lanes meet at the end of the row alone.
Position weights stand between the visits, because D-PACE and streaks need the block's cross-entropies first.

Shapes: M rows of the drafter, U rows of the target, V vocabulary. q = softmax(logits), p = softmax(target's logits).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from remote.drafter.kernels.launch import RowTile, can_launch, jit, on_its_device, tl

COARSE = torch.float8_e4m3fn
COARSE_MOST = 448.0  # the largest number of that format
STATISTICS = RowTile(512, 4, 3)  # four such tiles at once
GRADIENT = RowTile(4096, 16)  # no pipeline: the barrier that lets it write in place forbids one


@dataclass(frozen=True)
class RowStatistics:
    """One number a row; the last two are None where no label was given."""

    log_sum_M: Tensor  # log Σ exp
    entropy_M: Tensor  # nats
    likeliest_MK: Tensor  # int64: the best, then others that are about the highest; each is a token
    label_logit_M: Tensor | None
    rank_M: Tensor | None  # int64, how many are not at most the label's: 0 is best, NaN ranks last

    @property
    def best_M(self) -> Tensor:
        """int64, the first of the highest; -1 where a number of the row is NaN."""
        return self.likeliest_MK[:, 0].masked_fill(self.log_sum_M.isnan(), -1)


@dataclass(frozen=True)
class TargetRows:
    """The target's logits and, for each row of the drafter, which of them is its teacher."""

    logits_UV: Tensor
    log_sum_U: Tensor
    index_M: Tensor  # int64
    order_M: Tensor | None = None  # int64, the drafter's rows by teacher: those begun together read one, from the cache
    best_p_U: Tensor | None = None  # the highest share of each of the target's rows


@dataclass(frozen=True)
class Best:
    """Of each row of the drafter the target's most probable token, where no more of the target is at hand."""

    token_M: Tensor  # int64
    p_M: Tensor


@on_its_device
def row_statistics(
    logits_MV: Tensor, label_M: Tensor | None = None, *, num_likeliest: int = 1, tile: RowTile = STATISTICS
) -> RowStatistics:
    """Log-sum-exp, entropy and argmax of every row; with labels their logits and ranks as well.

    `num_likeliest`: tokens named of a row. All but the first are the best of a lane each, so one that shares
    its lane with a better one is passed over.
    """
    if not can_launch(logits_MV) or logits_MV.dtype != torch.float32:
        return row_statistics_reference(logits_MV, label_M, num_likeliest=num_likeliest)
    num_rows, vocab = logits_MV.shape
    log_sum, entropy, label_logit = (logits_MV.new_empty(num_rows) for _ in range(3))
    likeliest = torch.empty(num_rows, num_likeliest, dtype=torch.int64, device=logits_MV.device)
    rank = torch.empty(num_rows, dtype=torch.int64, device=logits_MV.device)
    if num_rows:
        _statistics_kernel[(num_rows,)](
            logits_MV, rank if label_M is None else label_M, log_sum, entropy, likeliest, label_logit, rank,
            HAS_LABEL=label_M is not None, NUM_LIKELIEST=num_likeliest, **row_constants(vocab, tile),
        )  # fmt: skip
    has_label = label_M is not None
    return RowStatistics(log_sum, entropy, likeliest, label_logit if has_label else None, rank if has_label else None)


def row_statistics_reference(
    logits_MV: Tensor, label_M: Tensor | None = None, *, num_likeliest: int = 1
) -> RowStatistics:
    """The same in plain torch; of fewer tokens than are named, the best stands for those that lack."""
    log_sum_M = logits_MV.logsumexp(-1)
    log_q_MV = logits_MV - log_sum_M[:, None]
    entropy_M = -torch.linalg.vecdot(log_q_MV.exp(), log_q_MV)
    likeliest_MK = logits_MV.argmax(-1, keepdim=True).repeat(1, num_likeliest)
    if num_likeliest > 1:
        found_MK = logits_MV.topk(min(num_likeliest, logits_MV.shape[1]), dim=-1).indices
        likeliest_MK[:, 1 : found_MK.shape[1]] = found_MK[:, 1:]
    if label_M is None:
        return RowStatistics(log_sum_M, entropy_M, likeliest_MK, None, None)
    label_logit_M = logits_MV.gather(1, label_M[:, None])
    rank_M = logits_MV.shape[1] - (logits_MV <= label_logit_M).sum(-1)
    return RowStatistics(log_sum_M, entropy_M, likeliest_MK, label_logit_M[:, 0], rank_M)


@on_its_device
def cross_entropy_gradient(
    logits_MV: Tensor, log_sum_M: Tensor, label_M: Tensor, weight_M: Tensor, *,
    hard: float, soft: float, target: TargetRows | None = None, best: Best | None = None, out_MV: Tensor | None,
    tile: RowTile = GRADIENT,
) -> Tensor | None:  # fmt: skip
    """Gradient of Σ weight · (hard·CE(label) + soft·(−Σ p log q)) into `out_MV`; returns −Σ p log q of each row.

    w·(hard·(q − [label]) + soft·(q − p)). Of a target that is known by its expectation p is no more than its `best` token: the
    caller adds the rest. Without a target's rows None comes back, and without them or `best` there is no soft part; without
    `out_MV` no gradient is written. `out_MV` may be `in_their_place(logits_MV, ...)`: the logits are lost then. Where it is in
    float8 neither `label_M` nor `best` is taken off: the caller keeps them exact, and chooses weights that fill that range.
    """
    assert target is None or best is None, "one target, known in one way"
    if target is None and out_MV is None:
        return None
    if not can_launch(logits_MV) or logits_MV.dtype != torch.float32:
        return cross_entropy_gradient_reference(
            logits_MV, log_sum_M, label_M, weight_M, hard=hard, soft=soft, target=target, best=best, out_MV=out_MV
        )
    num_rows, vocab = logits_MV.shape
    soft_ce, is_coarse = torch.empty_like(log_sum_M), out_MV is not None and out_MV.dtype == COARSE
    rows = target or TargetRows(logits_MV, log_sum_M, label_M)
    if num_rows:
        _cross_entropy_kernel[(num_rows,)](
            logits_MV, log_sum_M, label_M, weight_M, rows.logits_UV, rows.log_sum_U, rows.index_M,
            rows.index_M if rows.order_M is None else rows.order_M,
            label_M if best is None else best.token_M, weight_M if best is None else best.p_M,
            logits_MV if out_MV is None else out_MV, soft_ce, float(hard), float(soft),
            HAS_TARGET=target is not None, HAS_ORDER=rows.order_M is not None, HAS_BEST=best is not None,
            HAS_OUT=out_MV is not None, IS_COARSE=is_coarse, **out_constants(logits_MV, out_MV),
            **row_constants(vocab, tile),
        )  # fmt: skip
    return soft_ce if target is not None else None


def cross_entropy_gradient_reference(
    logits_MV: Tensor, log_sum_M: Tensor, label_M: Tensor, weight_M: Tensor, *,
    hard: float, soft: float, target: TargetRows | None = None, best: Best | None = None, out_MV: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """The same in plain torch."""
    log_q_MV = logits_MV - log_sum_M[:, None]
    soft_ce_M, gradient_MV = None, log_q_MV.exp()
    is_coarse = out_MV is not None and out_MV.dtype == COARSE
    if best is not None:
        gradient_MV = gradient_MV * ((hard + soft) * weight_M)[:, None]
        if not is_coarse:
            gradient_MV.scatter_add_(1, best.token_M[:, None], (-soft * weight_M * best.p_M)[:, None])
    elif target is None:
        gradient_MV = gradient_MV * (hard * weight_M)[:, None]
    else:
        p_MV = (target.logits_UV - target.log_sum_U[:, None]).index_select(0, target.index_M).exp()
        soft_ce_M = -torch.linalg.vecdot(p_MV, log_q_MV)
        gradient_MV = (gradient_MV * (hard + soft) - p_MV * soft) * weight_M[:, None]
    if is_coarse and out_MV is not None:
        out_MV.copy_(gradient_MV.clamp(-COARSE_MOST, COARSE_MOST))
    elif out_MV is not None:
        out_MV.copy_(gradient_MV.scatter_add_(1, label_M[:, None], (-hard * weight_M)[:, None]))
    return soft_ce_M


@on_its_device
def entropy_gradient(
    logits_MV: Tensor, log_sum_M: Tensor, entropy_M: Tensor, scale_M: Tensor, *, out_MV: Tensor
) -> None:
    """Gradient of Σ scale · H(q) into `out_MV`: −scale · q · (log q + H)."""
    if not can_launch(logits_MV) or logits_MV.dtype != torch.float32:
        log_q_MV = logits_MV - log_sum_M[:, None]
        out_MV.copy_(-scale_M[:, None] * log_q_MV.exp() * (log_q_MV + entropy_M[:, None]))
        return
    num_rows, vocab = logits_MV.shape
    if num_rows:
        _entropy_kernel[(num_rows,)](
            logits_MV, log_sum_M, entropy_M, scale_M, out_MV,
            **out_constants(logits_MV, out_MV), **row_constants(vocab, GRADIENT),
        )  # fmt: skip


def in_their_place(logits_MV: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for a gradient (M, V) of `dtype` where the logits stand: the first part of each row, rows as far apart."""
    return logits_MV.view(dtype)[:, : logits_MV.shape[1]]


def out_constants(logits_MV: Tensor, out_MV: Tensor | None) -> dict[str, int]:
    """Of a gradient that stands alone, or in the logits' place."""
    if out_MV is None:
        return {"OUT_WIDTH": logits_MV.shape[1], "IN_PLACE": False}
    return {"OUT_WIDTH": out_MV.stride(0), "IN_PLACE": out_MV.data_ptr() == logits_MV.data_ptr()}


def row_constants(vocab: int, tile: RowTile) -> dict[str, int]:
    """What the kernels are compiled for."""
    return {"VOCAB": vocab, "STAGES": tile.stages, **tile.constants(vocab)}


@jit(slices=("label_ptr",))
def _statistics_kernel(
    logits_ptr, label_ptr, log_sum_ptr, entropy_ptr, likeliest_ptr, label_logit_ptr, rank_ptr,
    VOCAB: tl.constexpr, TILE: tl.constexpr, HAS_LABEL: tl.constexpr, NUM_LIKELIEST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One row. Each lane keeps its own highest number, and its sums relative to that, which are shrunk once for four
    numbers: an exponential a number and a quarter. With two this was bound by them, at half of the memory's rate."""
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row * VOCAB
    lane = tl.arange(0, TILE)
    peak = tl.full([TILE], -1.0e30, tl.float32)
    weight = tl.zeros([TILE], tl.float32)
    moment = tl.zeros([TILE], tl.float32)
    best = lane
    behind = tl.zeros([TILE], tl.int32)
    label_logit = 0.0
    if HAS_LABEL:
        label_logit = tl.load(base + tl.load(label_ptr + row))
        tl.store(label_logit_ptr + row, label_logit)
    for low in tl.range(0, VOCAB, 4 * TILE, num_stages=STAGES):
        at_0, at_1, at_2, at_3 = low + lane, low + TILE + lane, low + 2 * TILE + lane, low + 3 * TILE + lane
        x_0 = tl.load(base + at_0, mask=at_0 < VOCAB, other=-1.0e30)
        x_1 = tl.load(base + at_1, mask=at_1 < VOCAB, other=-1.0e30)
        x_2 = tl.load(base + at_2, mask=at_2 < VOCAB, other=-1.0e30)
        x_3 = tl.load(base + at_3, mask=at_3 < VOCAB, other=-1.0e30)
        best = tl.where(x_0 > peak, at_0, best)
        top = tl.maximum(peak, x_0)
        best = tl.where(x_1 > top, at_1, best)
        top = tl.maximum(top, x_1)
        best = tl.where(x_2 > top, at_2, best)
        top = tl.maximum(top, x_2)
        best = tl.where(x_3 > top, at_3, best)
        top = tl.maximum(top, x_3)
        shrink = tl.exp(peak - top)
        share_0, share_1, share_2, share_3 = tl.exp(x_0 - top), tl.exp(x_1 - top), tl.exp(x_2 - top), tl.exp(x_3 - top)
        weight = weight * shrink + ((share_0 + share_1) + (share_2 + share_3))
        moment = moment * shrink + ((share_0 * x_0 + share_1 * x_1) + (share_2 * x_2 + share_3 * x_3))
        peak = top
        if HAS_LABEL:
            behind += ((x_0 <= label_logit) & (at_0 < VOCAB)).to(tl.int32)
            behind += ((x_1 <= label_logit) & (at_1 < VOCAB)).to(tl.int32)
            behind += ((x_2 <= label_logit) & (at_2 < VOCAB)).to(tl.int32)
            behind += ((x_3 <= label_logit) & (at_3 < VOCAB)).to(tl.int32)
    top = tl.max(peak, 0)
    shrink = tl.exp(peak - top)
    total = tl.sum(weight * shrink, 0)
    log_sum = top + tl.log(total)
    tl.store(log_sum_ptr + row, log_sum)
    tl.store(entropy_ptr + row, log_sum - tl.sum(moment * shrink, 0) / total)
    for place in tl.static_range(NUM_LIKELIEST):
        first = tl.min(tl.where(peak == top, best, 2147483647), 0)
        tl.store(likeliest_ptr + row * NUM_LIKELIEST + place, tl.where(first < VOCAB, first, 0).to(tl.int64))
        peak = tl.where(best == first, -1.0e30, peak)
        top = tl.max(peak, 0)
    if HAS_LABEL:
        tl.store(rank_ptr + row, (VOCAB - tl.sum(behind, 0)).to(tl.int64))


@jit(slices=("label_ptr", "target_row_ptr", "order_ptr", "best_ptr"))
def _cross_entropy_kernel(
    logits_ptr, log_sum_ptr, label_ptr, weight_ptr, target_ptr, target_log_sum_ptr, target_row_ptr, order_ptr, best_ptr, best_p_ptr, out_ptr,
    soft_ce_ptr, hard, soft,
    VOCAB: tl.constexpr, TILE: tl.constexpr, HAS_TARGET: tl.constexpr, HAS_ORDER: tl.constexpr, HAS_BEST: tl.constexpr,
    HAS_OUT: tl.constexpr, IS_COARSE: tl.constexpr, STAGES: tl.constexpr,
    OUT_WIDTH: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """In place, a tile's gradient is no longer than its logits and overwrites nothing beyond them: what lies behind has
    been read, and the barrier keeps a fast warp from writing what a slow one has not."""
    row = tl.program_id(0).to(tl.int64)
    if HAS_ORDER:
        row = tl.load(order_ptr + row)
    base = logits_ptr + row * VOCAB
    lane = tl.arange(0, TILE)
    log_sum = tl.load(log_sum_ptr + row)
    label = tl.load(label_ptr + row)
    weight = tl.load(weight_ptr + row)
    slope = hard * weight
    if HAS_TARGET:
        target_row = tl.load(target_row_ptr + row)
        target_base = target_ptr + target_row * VOCAB
        target_log_sum = tl.load(target_log_sum_ptr + target_row)
        cross = tl.zeros([TILE], tl.float32)
        slope = (hard + soft) * weight
    if HAS_BEST:
        best, taken = tl.load(best_ptr + row), soft * weight * tl.load(best_p_ptr + row)
        slope = (hard + soft) * weight
    for low in tl.range(0, VOCAB, TILE, num_stages=STAGES):
        at = low + lane
        log_q = tl.load(base + at, mask=at < VOCAB, other=0.0) - log_sum
        gradient = slope * tl.exp(log_q)
        if HAS_TARGET:
            p = tl.exp(tl.load(target_base + at, mask=at < VOCAB, other=float("-inf")) - target_log_sum)
            cross += p * log_q
            gradient -= soft * weight * p
        if HAS_OUT:
            if not IS_COARSE:
                gradient -= tl.where(at == label, hard * weight, 0.0)
                if HAS_BEST:
                    gradient -= tl.where(at == best, taken, 0.0)
            if IN_PLACE:
                tl.debug_barrier()
            tl.store(out_ptr + row * OUT_WIDTH + at, gradient.to(out_ptr.dtype.element_ty), mask=at < VOCAB)
    if HAS_TARGET:
        tl.store(soft_ce_ptr + row, -tl.sum(cross, 0))


@jit()
def _entropy_kernel(
    logits_ptr, log_sum_ptr, entropy_ptr, scale_ptr, out_ptr, VOCAB: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    OUT_WIDTH: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row * VOCAB
    log_sum = tl.load(log_sum_ptr + row)
    entropy = tl.load(entropy_ptr + row)
    scale = tl.load(scale_ptr + row)
    for low in tl.range(0, VOCAB, TILE, num_stages=STAGES):
        at = low + tl.arange(0, TILE)
        log_q = tl.load(base + at, mask=at < VOCAB, other=0.0) - log_sum
        gradient = -scale * tl.exp(log_q) * (log_q + entropy)
        if IN_PLACE:
            tl.debug_barrier()
        tl.store(out_ptr + row * OUT_WIDTH + at, gradient.to(out_ptr.dtype.element_ty), mask=at < VOCAB)
