"""The run under the cursor, beside the list, where the screen is wide enough: what a glance should tell."""

from __future__ import annotations

from tui.chart import Look, Series, chart_lines
from tui.detail import RunDetail
from tui.outside import to_type
from tui.overview import CHART_SMOOTHING, memory_lines, state_lines
from tui.pieces import BLANK, Line, beside, width_of, wrapped

WIDE = 100  # cells from which on charts stand side by side
METRICS = ("loss", "accuracy")


EDGE: Line = (("│", "line"), ("  ", "text"))


def beside_lines(detail: RunDetail, now_s: float, width: int, height: int, *, ascii_only: bool) -> list[Line]:
    """With a line at its left, all the way down."""
    lines = preview_lines(detail, now_s, width - width_of(EDGE), height, ascii_only=ascii_only)
    return [[*EDGE, *line] for line in [*lines, *[BLANK] * (height - len(lines))]]


def below_lines(detail: RunDetail, now_s: float, width: int, height: int, *, ascii_only: bool) -> list[Line]:
    """With a line above it."""
    return [[("─" * width, "line")], *preview_lines(detail, now_s, width, height - 1, ascii_only=ascii_only)]


def preview_lines(detail: RunDetail, now_s: float, width: int, height: int, *, ascii_only: bool) -> list[Line]:
    run = detail.run
    lines: list[Line] = [
        [(run.recipe, "strong"), ("/", "faint"), (run.branch, "strong"), (f"  {run.id}", "muted")],
        *state_lines(detail, now_s, width, ascii_only=ascii_only),
    ]
    if detail.failures:
        failure = detail.failures[0]
        cause, hint = wrapped(failure.message, width, "bad"), wrapped(to_type(failure.hint), width, "muted")
        lines += [BLANK, *at_most(4, cause), *at_most(3, hint)]
    memory = memory_lines(detail, now_s, width, ascii_only=ascii_only)
    lines += _charts(detail, width, height - len(lines) - len(memory) - 2, ascii_only=ascii_only)
    lines += [BLANK, *memory] if memory else []
    if run.why or run.note:
        lines += [BLANK, *wrapped(run.why or run.note, width, "muted")[:3]]
    return lines[:height]


def at_most(number: int, lines: list[Line]) -> list[Line]:
    """The run's own page has all of it; here it is said that there is more."""
    return lines if len(lines) <= number else [*lines[: number - 1], [("… enter shows the rest", "muted")]]


def _charts(detail: RunDetail, width: int, room: int, *, ascii_only: bool) -> list[Line]:
    """One below the other, side by side where that leaves each wide enough; none where they would be too low."""
    curves = [curve for name in METRICS if (curve := detail.curve(name)) is not None and curve.samples]
    columns = len(curves) if width >= WIDE else 1
    share = min(20, (room - len(curves)) // max(1, len(curves) // max(1, columns)))
    if share < 5:
        return []
    each = (width - 3 * (columns - 1)) // max(1, columns)
    blocks = [
        chart_lines(
            curve.name, curve.unit, [Series(detail.run.branch, "live", curve.samples, curve.newest)], (each, share),
            Look(smoothing=CHART_SMOOTHING, ascii_only=ascii_only),
        )
        for curve in curves
    ]  # fmt: skip
    if columns > 1:
        return [BLANK, *beside(*((block, each) for block in blocks), gap=3)]
    return [line for block in blocks for line in (BLANK, *block)]
