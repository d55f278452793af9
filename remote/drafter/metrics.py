"""Sums of the loss as the numbers a person reads, by the names of the project (`remote.wire.METRIC_UNITS`).

Ratios are taken here and nowhere earlier, so that micro-batches, ranks and steps add up exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from remote.drafter.loss import LossSums
from remote.drafter.loss_chunk import TOP_K
from remote.spec import LOSS_TERMS

Metrics = dict[str, float | list[float]]


def metrics(sums: LossSums, *, over_ranks: Callable[[Tensor], Tensor] = lambda values: values) -> Metrics:
    """Loss terms (nats), accuracies, streak and acceptance length (tokens), entropy on right slots (nats).

    `accuracy_at` lists slots 1 to B-1. Ratios without a single case are left out (within the list they are NaN). Waits
    once for the device.
    """
    totals = _on_host(sums, over_ranks)
    divisor, cap_divisor = totals["denominator"][0] or 1.0, max(totals["right_weights"][0], 1.0)
    values: Metrics = {"loss": totals["numerator"][0] / divisor + totals["cap_numerator"][0] / cap_divisor}
    for term in LOSS_TERMS:
        if term in totals:
            values[f"loss_{term}"] = totals[term][0] / (cap_divisor if term == "cap" else divisor)
    return values | _accuracies(totals)


def _accuracies(totals: dict[str, list[float]]) -> Metrics:
    num_supervised, num_right, num_blocks = sum(totals["supervised_at"]), sum(totals["right_at"]), totals["blocks"][0]
    values: Metrics = {}
    if num_supervised:
        values["accuracy"] = num_right / num_supervised
        values["accuracy_at"] = [
            right / cases if cases else math.nan
            for right, cases in zip(totals["right_at"][1:], totals["supervised_at"][1:], strict=True)
        ]
        values |= {f"topk_{k}": totals[f"topk_{k}"][0] / num_supervised for k in TOP_K}
        values["streak"] = totals["streak"][0] / num_blocks
        values["acceptance_length"] = totals["streak"][0] / num_blocks + 1
    if num_right:
        values["entropy_right"] = totals["entropy_right"][0] / num_right
    return values


def _on_host(sums: LossSums, over_ranks: Callable[[Tensor], Tensor]) -> dict[str, list[float]]:
    flat = over_ranks(sums.totals_F).tolist()
    named, start = {}, 0
    for name, value in sums.totals.items():
        named[name] = flat[start : start + len(value)]
        start += len(value)
    return named
