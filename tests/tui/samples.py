"""Single values as the samples that a curve is drawn from."""

from __future__ import annotations

import math
from collections.abc import Iterable

from orchestrator.units import is_measurable
from tui.curve import Sample


def raw_samples(points: Iterable[tuple[float, float | None]]) -> list[Sample]:
    """Samples of single values; None counts as NaN."""
    samples = []
    for step, number in points:
        known = math.nan if number is None or not is_measurable(number) else number
        samples.append(Sample(step, known, known, known, 1 if math.isnan(known) else 0))
    return samples
