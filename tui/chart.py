"""A chart as lines: title with the newest value, axis, braille curve, steps below.

Takes samples, returns lines; the arithmetic is curve's, the dots are canvas's. Drawn from back to
front: older attempts, the span from lowest to highest, the smoothed mean. Values that were not
finite are marked on the bottom row of the plot and counted in the title; where a few values would
press all others flat, they leave the axis: an arrow marks their place, the title says how far they go.
The span is drawn of one curve and its older attempts; of every other one what leaves the axis by far is marked all the same.
Where curves of several cover each other they take the cells in turn, so that none is lost below the last.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from rich.cells import cell_len

from tui.canvas import Canvas
from tui.curve import Axis, Sample, Trace, Window, axis_of, full_window, is_far, means, nearest, smooth, trace
from tui.pieces import Line, Piece, fitted, width_of
from tui.theme import MARKS, SERIES
from tui.wording import count, fit, gib, short_count, value

MOST_KNOWN = 40  # charts, two grids of curves; some 100 KB each
MARK_EVERY = 2 * len(SERIES)  # cells; a place for each, and one between two
LABEL_CELLS = 6  # of a number beside the axis
BEHIND = ("faint", "line", "band")  # older attempts with their spans, and the span of the newest


@dataclass(frozen=True)
class Series:
    label: str
    meaning: str
    samples: Sequence[Sample]
    newest: float | None = None  # the newest raw value; a bucket's mean would differ from it
    is_dimmed: bool = False  # an older attempt
    is_reference: bool = False  # a baseline: its own span is left out, that of the other stays


@dataclass(frozen=True)
class Look:
    """How a chart is drawn; what it shows is in its series."""

    is_log: bool = False
    smoothing: float = 0.0
    window: Window | None = None  # None: everything
    crosshair: float | None = None  # a step
    ascii_only: bool = False


def chart_lines(title: str, unit: str, series: Sequence[Series], size: tuple[int, int], look: Look) -> list[Line]:
    """Exactly `size` (width, height) of lines; height 4 at least. The newest ones are known: the thread that reads draws ahead."""
    fixed = tuple(
        one if isinstance(one.samples, tuple) else dataclasses.replace(one, samples=tuple(one.samples))
        for one in series
    )
    return list(_drawn(title, unit, fixed, size, look))


@lru_cache(maxsize=MOST_KNOWN)
def _drawn(title: str, unit: str, series: tuple[Series, ...], size: tuple[int, int], look: Look) -> list[Line]:
    width, height = size
    plot_height = max(1, height - 2)
    window = look.window or full_window(*(one.samples for one in series))
    labels_width = 8
    canvas = Canvas(max(4, width - labels_width), plot_height, ascii=look.ascii_only)
    traces = _traces(series, window, canvas.num_columns, look)
    axis = axis_of([one for _, one in traces], is_log=look.is_log)
    has_band = any(meaning == "band" for meaning, _ in traces)
    unspread = [one for one in series if not one.is_dimmed and (one.is_reference or not has_band)]
    strays = _strays(unspread, window, canvas.num_columns, axis, look)
    are_several = sum(meaning not in BEHIND for meaning, _ in traces) > 1
    for layer, (meaning, shown) in enumerate(traces):
        canvas.plot(shown, axis, layer, shares=are_several and meaning not in BEHIND)
    leaving = [one for _, one in traces] + strays
    plot = _plot_lines(canvas, axis, traces, leaving, (unit, labels_width))
    if look.crosshair is not None:
        plot = _with_crosshair(plot, window, look.crosshair, labels_width, canvas.width)
    head = [*_title(title, unit, series, look, traces), *_reach(axis, leaving, unit)]
    for explained, short in ((_smoothed(look), ""), ("  log scale", "  log")):
        if width_of(head) > width:  # words of explanation go before a number is cut
            head = [(short if text == explained else text, meaning) for text, meaning in head]
    return [fitted(head, width), *plot, _steps(window, width, labels_width)]


def _traces(series: Sequence[Series], window: Window, num_columns: int, look: Look) -> list[tuple[str, Trace]]:
    """(meaning, trace) from back to front."""
    spans: list[tuple[str, Trace]] = []
    older: list[tuple[str, Trace]] = []
    front: list[tuple[str, Trace]] = []
    num_own = sum(not one.is_dimmed and not one.is_reference for one in series)

    def traced(samples: Sequence[Sample]) -> Trace:
        return trace(samples, window, num_columns, is_log=look.is_log)

    for one in series:
        has_span = look.smoothing > 0 or any(sample.low < sample.high for sample in one.samples)
        if has_span and (one.is_dimmed or (num_own == 1 and not one.is_reference)):
            spans.append(("line" if one.is_dimmed else "band", traced(one.samples)))
        line = traced(means(smooth(one.samples, look.smoothing)))
        (older if one.is_dimmed else front).append(("faint" if one.is_dimmed else one.meaning, line))
    return [
        *(span for span in spans if span[0] == "line"),
        *older,
        *(span for span in spans if span[0] == "band"),
        *front,
    ]


def _strays(series: Sequence[Series], window: Window, num_columns: int, axis: Axis, look: Look) -> list[Trace]:
    """Of curves whose span is not drawn, the columns whose lowest or highest value lies far beyond the axis."""
    found = []
    for one in series:
        if not any(sample.low < sample.high for sample in one.samples):
            continue
        spread = trace(one.samples, window, num_columns, is_log=look.is_log)
        columns = [span if span and is_far(span, axis) else None for span in spread.columns]
        found.append(dataclasses.replace(spread, columns=tuple(columns)))
    return found


def _plot_lines(
    canvas: Canvas,
    axis: Axis,
    traces: Sequence[tuple[str, Trace]],
    leaving: Sequence[Trace],
    labels: tuple[str, int],
) -> list[Line]:
    """`leaving`: whose values beyond the axis are marked; `labels`: their unit and their cells."""
    unit, labels_width = labels
    rows = canvas.rows()
    bad_cells = {column // 2 for _, one in traces for column in one.bad_columns}
    above, below = _leaving(axis, leaving)
    are_several = sum(meaning not in BEHIND for meaning, _ in traces) > 1
    lines: list[Line] = []
    places = _places_of_marks([meaning for meaning, _ in traces]) if are_several else {}
    for index, row in enumerate(rows):
        marks = dict.fromkeys(above, "↑") if index == 0 else {}
        if index == len(rows) - 1:
            marks |= {**{cell: "↓" for cell in below if cell not in marks}, **dict.fromkeys(bad_cells, "×")}
        pieces: list[Piece] = [_label(axis, index, len(rows), unit, labels_width)]
        run, run_meaning = "", "text"
        for column, (char, layer) in enumerate(row):
            meaning = "text" if layer is None else traces[layer][0]
            if sharing := canvas.shared.get((index, column)):
                meaning = _whose_turn([traces[one][0] for one in sharing], column, places)
            if places:
                char = places.get((meaning, column % MARK_EVERY), char)
            if column in marks:
                char, meaning = marks[column], "warn" if marks[column] == "×" else "odd"
            if meaning != run_meaning and run:
                pieces.append((run, run_meaning))
                run = ""
            run, run_meaning = run + char, meaning
        lines.append([*pieces, (run, run_meaning)])
    return lines


def _places_of_marks(meanings: Sequence[str]) -> dict[tuple[str, int], str]:
    """Every few cells a curve of several bears the mark of its legend, each at places of its own."""
    return {(meaning, 2 * SERIES.index(meaning)): MARKS[meaning] for meaning in meanings if meaning in MARKS}


def _whose_turn(meanings: Sequence[str], column: int, places: Mapping[tuple[str, int], str]) -> str:
    """Which of the curves that cover each other in a cell is seen there: that whose mark has its place there, else two cells each."""
    marked = [meaning for meaning in meanings if (meaning, column % MARK_EVERY) in places]
    return marked[0] if marked else meanings[column // 2 % len(meanings)]


def _leaving(axis: Axis, traces: Sequence[Trace]) -> tuple[set[int], set[int]]:
    """Cells whose values lie above the axis, and below it."""
    columns = [(place // 2, span) for one in traces for place, span in enumerate(one.columns) if span is not None]
    above = {cell for cell, span in columns if span.high > axis.high}
    return above, {cell for cell, span in columns if span.low < axis.low}


def _label(axis: Axis, row: int, num_rows: int, unit: str, width: int) -> Piece:
    """The value at the top, the middle and the bottom of the axis."""
    places = {0: 1.0, num_rows - 1: 0.0}
    if num_rows >= 5:
        places[num_rows // 2] = 1 - (num_rows // 2) / (num_rows - 1)
    if row not in places:
        return (" " * (width - 1) + "│", "line")
    text = _axis_text(axis.at(places[row]), unit, axis)
    return (fit(text, width - 2, right=True) + " ┤", "faint")  # of LABEL_CELLS


def _axis_text(number: float, unit: str, axis: Axis) -> str:
    """As many digits as tell the ends of the axis apart, in LABEL_CELLS."""
    if unit == "bytes":
        return gib(number, unit=False)
    size, span = abs(number), axis.high - axis.low
    if size < span / 1000 and not axis.is_log:  # the decades of a log axis are all of one rank, and none of them is 0
        return "0"
    if 10_000 <= size < 999.5e9:
        scale, suffix = (1e3, "k") if size < 999_500 else (1e6, "M") if size < 999.5e6 else (1e9, "G")
        return _digits(number / scale, span / scale, LABEL_CELLS - 1) + suffix
    if 0.001 <= size < 10_000:
        return _digits(number, min(span, size * 10) if axis.is_log else span, LABEL_CELLS)
    for digits in (1, 0):
        mantissa, _, exponent = f"{number:.{digits}e}".partition("e")
        text = f"{mantissa}e{int(exponent)}"
        if len(text) <= LABEL_CELLS:
            break
    return text


def _digits(number: float, span: float, room: int) -> str:
    """Rounded, never cut."""
    digits = min(4, max(0, 2 - math.floor(math.log10(span))))
    text = f"{number:,.{digits}f}"
    while len(text) > room and digits:
        digits -= 1
        text = f"{number:,.{digits}f}"
    return text


def _title(title: str, unit: str, series: Sequence[Series], look: Look, traces: Sequence[tuple[str, Trace]]) -> Line:
    shown = [one for one in series if not one.is_dimmed]
    pieces: list[Piece] = [(title, "strong")]
    if len(shown) == 1 and shown[0].samples:
        at = None if look.crosshair is None and shown[0].newest is not None else _sample_at(shown[0].samples, look)
        newest = shown[0].newest if at is None else at.mean
        assert newest is not None
        pieces += [(f"  {value(newest, unit=unit)}", shown[0].meaning)]
        pieces += [(f" {unit}", "muted")] if unit and unit != "bytes" else []
        if at is not None and look.crosshair is not None:
            pieces += [(f"  step {count(at.step)}", "muted")]
    elif not shown or not any(one.samples for one in shown):
        pieces += [("  no values yet", "muted")]
    else:
        for one in shown:
            at_value = _short_newest(one, unit, look) if one.samples else "–"
            pieces += [
                (f"  {MARKS.get(one.meaning, '●')} ", one.meaning),
                (f"{one.label} " if one.label else "", "text"),
                (at_value, "muted"),
            ]
        pieces += [(" mean", "muted")] if unit.endswith("mean") else []
    num_bad = sum(one.num_bad for meaning, one in traces if meaning not in ("line", "band"))
    num_hidden = max((one.num_hidden for _, one in traces), default=0)
    pieces += [(_smoothed(look), "faint")] if look.smoothing > 0 else []
    pieces += [(f"  × {num_bad} not finite", "warn")] if num_bad else []
    pieces += [(f"  {num_hidden} ≤ 0 not shown", "warn")] if num_hidden else []
    pieces += [("  log scale", "muted")] if look.is_log else []
    return pieces


def _smoothed(look: Look) -> str:
    return f"  smoothed {look.smoothing:g}"


def _short_newest(one: Series, unit: str, look: Look) -> str:
    """The newest value as reported, under the crosshair the curve's; short, as several stand side by side."""
    is_newest = look.crosshair is None and one.newest is not None
    number = one.newest if is_newest and one.newest is not None else _sample_at(one.samples, look).mean
    return short_count(number) if unit != "bytes" and abs(number) >= 10_000 else value(number, unit=unit)


def _reach(axis: Axis, traces: Sequence[Trace], unit: str) -> Line:
    """How far values go that have left the axis: `↑ 69`."""
    spans = [span for one in traces for span in one.columns if span is not None]
    high, low = (
        max((span.high for span in spans), default=axis.high),
        min((span.low for span in spans), default=axis.low),
    )
    above = [(f"  ↑ {value(high, unit=unit)}", "odd")] if high > axis.high else []
    return [*above, *([(f"  ↓ {value(low, unit=unit)}", "odd")] if low < axis.low else [])]


def _sample_at(samples: Sequence[Sample], look: Look) -> Sample:
    smoothed = smooth(samples, look.smoothing)
    if look.crosshair is None:
        return smoothed[-1]
    found = nearest(smoothed, look.crosshair)
    return smoothed[-1] if found is None else found


def _with_crosshair(plot: list[Line], window: Window, step: float, labels_width: int, width: int) -> list[Line]:
    """A vertical line through the blank cells of the crosshair's column."""
    column = labels_width + round((step - window.first) / (window.last - window.first) * (width - 1))
    return [_replace_blank(line, column) for line in plot]


def _replace_blank(line: Line, column: int) -> Line:
    pieces: list[Piece] = []
    position = 0
    for text, meaning in line:
        size = cell_len(text)
        at = column - position
        if 0 <= at < size == len(text) and text[at] == " ":
            pieces += [(text[:at], meaning), ("┊", "muted"), (text[at + 1 :], meaning)]
        else:
            pieces.append((text, meaning))
        position += size
    return pieces


def _steps(window: Window, width: int, labels_width: int) -> Line:
    """First and last step under the ends of the plot."""
    first, last = count(max(0.0, window.first)), count(window.last)
    room = width - labels_width - cell_len(first) - cell_len(last)
    return [(" " * labels_width + first + " " * max(1, room) + last, "faint")]
