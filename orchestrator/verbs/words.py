"""Numbers as people read them: GiB, durations, ages. One spelling for every verb."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

from orchestrator.actions.log_text import inert
from orchestrator.store.rows import NUM_REPORTS, RunRow, State
from orchestrator.units import duration, format_size
from orchestrator.verbs.table import Cell
from remote.wire import LATEST_S

MEAN = f"mean of the last {NUM_REPORTS}"  # reports of a metric: what a list shows of it


def gib(size_bytes: float | None) -> str:
    """17.25 GiB; small sizes in MiB, KiB or bytes."""
    return "-" if size_bytes is None else format_size(size_bytes)


def in_gib(size_bytes: float | None, *, places: int = 2, is_signed: bool = False) -> str:
    """A size in a column whose heading says GiB; empty where there is none."""
    if size_bytes is None:
        return ""
    size, least = size_bytes / 2**30, 10.0**-places
    if 0 < abs(size) < least / 2 and not is_signed:
        return f"<{least}"
    return f"{size:{'+' if is_signed else ''}.{places}f}"


def gib_places(*sizes_bytes: float | None) -> int:
    """Digits behind the point for a column of these: two, or three where all are below 1 GiB, so that points line up."""
    return 2 if max((abs(size) for size in sizes_bytes if size is not None), default=0) >= 2**30 else 3


def grace_left(seconds: float) -> str:
    """What a person who stops a run may wait for: `killed in 42 s`, `being killed`."""
    if seconds <= 0:
        return "being killed"
    return f"killed in {duration(seconds) if seconds >= 60 else f'{max(seconds, 1):.0f} s'}"


def ago(moment_s: float | None, now_s: float) -> str:
    """`3 min ago`; a moment in the future (another clock) is `now`."""
    if moment_s is None:
        return "never"
    seconds = max(now_s - moment_s, 0)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{int(seconds)} s ago" if seconds >= 5 else "now"


def clock(moment_s: float | None) -> str:
    """2026-01-31 09:30:00 UTC"""
    if moment_s is None or not 0 <= moment_s <= LATEST_S:
        return "-"
    return datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def number(value: float | None) -> str:
    """Four significant digits, whole numbers whole, NaN and inf by name."""
    if value is None:
        return "-"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if 1e4 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def metric(name: str, value: float | None) -> str:
    """A metric's value with the unit its name ends in."""
    if name.endswith("_bytes"):
        return gib(value)
    if name.endswith("_s") and not name.endswith("_per_s"):
        return "-" if value is None else f"{value:.3g} s"
    return number(value)


BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None]) -> str:
    """One character a value, from the smallest to the largest; a blank where there is no finite number."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    return "".join(_bar(value, low, span) for value in values)


def _bar(value: float | None, low: float, span: float) -> str:
    if value is None or not math.isfinite(value):
        return " "
    share = (value - low) / span if span > 0 and math.isfinite(span) else 0.5
    return BARS[min(int(share * len(BARS)), len(BARS) - 1)]


STATE_COLOURS = {
    "running": "green",
    "setting_up": "cyan",
    "pending": "cyan",
    "stopping": "yellow",
    "succeeded": "green",
    "failed": "red",
    "lost": "magenta",
}


def state_and_step(run: RunRow) -> str:
    """`running, step 330 of 700`: without how far it is, a number of a run says little."""
    step = "" if run.step is None else f", step {run.step}" + (f" of {run.num_steps}" if run.num_steps else "")
    return state_cell(run).text + step


def state_cell(run: RunRow) -> Cell:
    """The state with its reason; "unreachable" stands beside a live one, never instead of it."""
    word = str(run.state).replace("_", " ")
    if run.state in (State.FAILED, State.LOST) and run.reason:
        word += f" {run.reason}"
    elif run.unreachable_since_s is not None and not run.state.is_final:
        word += ", unreachable"
    return Cell(inert(word), colour=STATE_COLOURS.get(str(run.state)))
