"""A mean, or a ratio of sums, and how sure it is: percentile bootstrap over prompts.

Prompts are the independent draws, tokens of one text are not; every interval of an evaluation is over prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RESAMPLES = 10_000
LOW, HIGH = 0.025, 0.975  # a 95 % interval


@dataclass(frozen=True)
class Interval:
    """A mean, or a ratio of sums, with its 95 % interval; all NaN where there was nothing to average."""

    mean: float
    low: float
    high: float

    def values(self, name: str) -> dict[str, float]:
        """As three named numbers: name, name_low, name_high."""
        return {name: self.mean, f"{name}_low": self.low, f"{name}_high": self.high}

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def bootstrap(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Mean of `values` and the 2.5 and 97.5 percentiles of the means of resamples; the same seed, the same interval."""
    if not values:
        return Interval(math.nan, math.nan, math.nan)
    drawn = torch.tensor(values, dtype=torch.float64)
    low, high = _bounds(drawn[_resamples(len(values), seed)].mean(1))
    return Interval(float(drawn.mean()), low, high)


def bootstrap_sums(
    columns: Sequence[Sequence[float]], statistic: Callable[[Tensor], Tensor], *, seed: int = 0
) -> Interval:
    """`statistic` of the sums [columns, ...] of paired columns, a ratio say; a prompt is drawn with all its columns.

    It knows how prompts differ, not how the machine's speed drifts while one way runs after the other.
    """
    drawn = torch.tensor(columns, dtype=torch.float64)
    if not drawn.numel():
        return Interval(math.nan, math.nan, math.nan)
    index = _resamples(drawn.shape[1], seed)
    low, high = _bounds(statistic(torch.stack([column[index].sum(1) for column in drawn])))
    return Interval(float(statistic(drawn.sum(1))), low, high)


def difference(left: Sequence[float], right: Sequence[float], *, seed: int = 0) -> Interval:
    """Mean of left - right, paired by prompt."""
    return bootstrap([a - b for a, b in zip(left, right, strict=True)], seed=seed)


def _resamples(num_values: int, seed: int) -> Tensor:
    """Which values each resample draws, [RESAMPLES, num_values]; the same for every statistic over the same prompts."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(num_values, (RESAMPLES, num_values), generator=generator)


def _bounds(drawn: Tensor) -> tuple[float, float]:
    low, high = torch.quantile(drawn, torch.tensor([LOW, HIGH], dtype=torch.float64)).tolist()
    return low, high
