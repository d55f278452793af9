"""Curve arithmetic: what a chart shows, worked out without drawing anything.

A sample is a step with the lowest, highest and mean value it stands for: a raw value has all three
equal, a rolled-up one stands for many steps. `trace` turns samples into one column per dot of width
and keeps the lowest and highest value of each, so no spike is lost at any zoom. A value that is not
finite leaves a gap and a mark at its place; it never bends an axis. Smoothing happens here, at draw
time; what is stored stays raw.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

OUTER_SHARE = 0.03  # of the values at either end may leave an axis
PRESSING = 1.5  # ... where they reach this much of the height of the others beyond them
FEW = 8  # values of which none may leave


class Sample(NamedTuple):
    step: float
    low: float
    high: float
    mean: float
    num_bad: int = 0  # values inside that were NaN or infinite


class Column(NamedTuple):
    low: float
    high: float


@dataclass(frozen=True)
class Window:
    """The steps between the chart's left and right edge."""

    first: float
    last: float

    def zoomed(self, factor: float, *, around: float) -> Window:
        return Window(around - (around - self.first) * factor, around + (self.last - around) * factor)

    def moved(self, fraction: float) -> Window:
        shift = (self.last - self.first) * fraction
        return Window(self.first + shift, self.last + shift)


@dataclass(frozen=True)
class Trace:
    columns: tuple[Column | None, ...]
    bad_columns: frozenset[int]  # where NaN or infinity was
    num_bad: int
    num_hidden: int  # values at or below zero, which a logarithmic axis cannot show


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high`, equal never; `position` maps one to 0..1."""

    low: float
    high: float
    is_log: bool = False

    def position(self, number: float) -> float:
        if self.is_log:
            return (math.log(number) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (number - self.low) / (self.high - self.low)

    def at(self, position: float) -> float:
        if self.is_log:
            return math.exp(math.log(self.low) + position * (math.log(self.high) - math.log(self.low)))
        return self.low + position * (self.high - self.low)


def full_window(*series: Sequence[Sample]) -> Window:
    """From the first step of any series to the last; one step alone gets room on both sides."""
    ends = [(samples[0].step, samples[-1].step) for samples in series if samples]
    if not ends:
        return Window(0.0, 1.0)
    first, last = min(end[0] for end in ends), max(end[1] for end in ends)
    return Window(first, last) if last > first else Window(first - 1, last + 1)


def smooth(samples: Sequence[Sample], weight: float) -> list[Sample]:
    """Exponential moving average of the means, corrected for its start; `weight` in [0, 1), 0 changes nothing.

    Source: Kingma and Ba 2015, section 3 (the bias correction). A value that is not finite is passed over.
    """
    if weight <= 0:
        return list(samples)
    total, norm, fresh, smoothed = 0.0, 0.0, 1 - weight, []
    for sample in samples:
        if not math.isfinite(sample.mean):
            smoothed.append(sample)
            continue
        total = weight * total + fresh * sample.mean
        norm = weight * norm + fresh
        mean = total / norm
        smoothed.append(Sample(sample.step, mean, mean, mean, sample.num_bad))
    return smoothed


def means(samples: Sequence[Sample]) -> list[Sample]:
    """The same samples without their spread."""
    return [Sample(step, mean, mean, mean, num_bad) for step, _, _, mean, num_bad in samples]


def trace(samples: Sequence[Sample], window: Window, num_columns: int, *, is_log: bool = False) -> Trace:
    """One column per dot: the span of the samples that fall on it, joined by straight lines between neighbours."""
    lows, highs = [math.inf] * num_columns, [-math.inf] * num_columns
    bad: set[int] = set()
    num_bad = num_hidden = 0
    scale = (num_columns - 1) / (window.last - window.first) if num_columns > 1 else 0.0
    previous: tuple[float, float] | None = None  # place and mean of the last finite sample, None after a gap
    for step, low, high, mean, num_bad_within in _visible(samples, window):
        place = (step - window.first) * scale
        column = round(place)
        inside = 0 <= column < num_columns
        if num_bad_within and inside:
            num_bad += num_bad_within
            bad.add(column)
        if not math.isfinite(mean) or (is_log and high <= 0):
            num_hidden += inside and math.isfinite(mean)
            previous = None
            continue
        if previous is not None and column - round(previous[0]) > 1:
            _join(lows, highs, previous, (place, mean), is_log)
        if inside:
            low = max(low, min(mean, high)) if is_log and low <= 0 else low
            lows[column], highs[column] = min(low, lows[column]), max(high, highs[column])
        previous = (place, mean) if not is_log or mean > 0 else None
    spans = (Column(low, high) if low <= high else None for low, high in zip(lows, highs, strict=True))
    return Trace(tuple(spans), frozenset(bad), num_bad, num_hidden)


def _visible(samples: Sequence[Sample], window: Window) -> Sequence[Sample]:
    """The samples inside the window and one beyond each edge, so that lines run off the chart."""
    first = bisect_left(samples, window.first, key=lambda sample: sample.step)
    last = bisect_left(samples, window.last, key=lambda sample: sample.step)
    return samples[max(0, first - 1) : last + 2]


def _join(
    lows: list[float], highs: list[float], start: tuple[float, float], end: tuple[float, float], is_log: bool
) -> None:
    """A straight line between two samples, one value for each column strictly between them."""
    (x0, y0), (x1, y1) = start, end
    first, last = max(round(x0) + 1, 0), min(round(x1), len(lows))
    if is_log:
        y0, y1 = math.log(y0), math.log(y1)
    slope = (y1 - y0) / (x1 - x0)
    for column in range(first, last):
        height = y0 + slope * (column - x0)
        number = math.exp(height) if is_log else height
        lows[column], highs[column] = min(number, lows[column]), max(number, highs[column])


def bulk(numbers: Iterable[float]) -> tuple[float, float]:
    """Lowest and highest of nearly all numbers, where a few others would press them flat; else of all. Not for none.

    A loss that begins at 69 and lives at 4 is looked at around 4.
    """
    known = sorted(numbers)
    num_outer = math.ceil(len(known) * OUTER_SHARE) if len(known) >= FEW else 0
    low, high = known[num_outer], known[-1 - num_outer]
    tail = PRESSING * (high - low) or math.inf  # where the bulk is one value, the others are what there is to see
    return (low if low - known[0] > tail else known[0]), (high if known[-1] - high > tail else known[-1])


def axis_of(traces: Iterable[Trace], *, is_log: bool = False) -> Axis:
    """An axis for the bulk of the values, a logarithmic one for all; sane room when all are equal or there are none."""
    present = [column for one in traces for column in one.columns if column is not None]
    if not present:
        return Axis(0.1, 1.0, True) if is_log else Axis(0.0, 1.0)
    low, high = min(column.low for column in present), max(column.high for column in present)
    if not is_log:
        low, high = bulk(number for column in present for number in column)
    if is_log:
        return Axis(low, high, True) if high / low > 1.0001 else Axis(low / 2 or low, high * 2, True)
    if high - low > max(abs(high), abs(low)) * 1e-9:
        return Axis(low, high)
    room = abs(high) * 0.1 or 1.0
    return Axis(low - room, high + room)


def is_far(span: Column, axis: Axis) -> bool:
    """Whether it reaches beyond the axis by PRESSING times its height, where a line of means would not show it."""
    if axis.is_log:
        return axis.position(span.high) > 1 + PRESSING or (span.low > 0 and axis.position(span.low) < -PRESSING)
    return axis.position(span.high) > 1 + PRESSING or axis.position(span.low) < -PRESSING


def nearest(samples: Sequence[Sample], step: float) -> Sample | None:
    """The sample closest to a step."""
    if not samples:
        return None
    index = bisect_left(samples, step, key=lambda sample: sample.step)
    around = samples[max(0, index - 1) : index + 1]
    return min(around, key=lambda sample: abs(sample.step - step))


def thin(samples: Sequence[Sample], num_columns: int) -> list[float | None]:
    """`num_columns` means for a sparkline; None where nothing was."""
    window = full_window(samples)
    shown = trace(means(samples), window, num_columns)
    return [None if column is None else (column.low + column.high) / 2 for column in shown.columns]
