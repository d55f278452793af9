"""Drawing curves and bars with characters: braille dots, block elements, or ASCII.

A cell holds 2 x 4 dots. Later layers win the colour of a cell they share; the dots of all are kept, and of lines is known
which ones share it.
No arithmetic of curves here, no colours, no widgets: cells carry the number of their layer.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from orchestrator.units import is_measurable
from tui.curve import Axis, Column, Trace, bulk

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row][column], Unicode 2800 block

# [side][first row][last row] of a cell -> its dots
_SPANS = [
    [[sum(_DOTS[row][side] for row in range(first, last + 1)) for last in range(4)] for first in range(4)]
    for side in range(2)
]


class Cell(NamedTuple):
    char: str
    layer: int | None  # None: nothing drawn


_EMPTY = Cell(" ", None)


class Canvas:
    def __init__(self, width: int, height: int, *, ascii: bool = False) -> None:
        self.width, self.height, self._ascii = width, height, ascii
        self._dots = [[0] * width for _ in range(height)]
        self._layers: list[list[int | None]] = [[None] * width for _ in range(height)]
        self._lines: dict[tuple[int, int], list[int]] = {}
        self.shared: dict[
            tuple[int, int], tuple[int, ...]
        ] = {}  # (row, column) of a cell -> the lines that cross there

    @property
    def num_columns(self) -> int:
        """Dots across."""
        return self.width * 2

    def plot(self, trace: Trace, axis: Axis, layer: int, *, shares: bool = False) -> None:
        """Vertical spans, each reaching to its neighbour so that a steep line stays a line; one that shares is in `shared`."""
        top = self.height * 4 - 1
        previous: tuple[int, int] | None = None  # lowest and highest row of the column before
        for column, span in enumerate(trace.columns):
            if span is None:
                previous = None
                continue
            high_row = top - _row(axis.position(span.high), top)
            low_row = high_row if span.low == span.high else top - _row(axis.position(span.low), top)
            first, last = high_row, low_row
            if previous is not None:
                first, last = min(first, previous[0] + 1), max(last, previous[1] - 1)
            self._span(first, last, column, layer)
            if shares:
                self._share(first // 4, last // 4, column >> 1, layer)
            previous = (low_row, high_row)

    def _span(self, first: int, last: int, column: int, layer: int) -> None:
        """Dots of a column from row to row, a cell at a time: a band of noise is thousands of them."""
        cell, spans = column >> 1, _SPANS[column & 1]
        for line in range(first // 4, last // 4 + 1):
            begin = 4 * line
            self._dots[line][cell] |= spans[first - begin if first > begin else 0][
                last - begin if last - begin < 3 else 3
            ]
            self._layers[line][cell] = layer

    def _share(self, first: int, last: int, cell: int, layer: int) -> None:
        for line in range(first, last + 1):
            there = self._lines.setdefault((line, cell), [])
            if layer not in there:
                there.append(layer)
            if len(there) > 1:
                self.shared[line, cell] = tuple(there)

    def rows(self) -> list[list[Cell]]:
        draw = _ascii_cell if self._ascii else _braille_cell
        return [
            [Cell(draw(dots), layer) if dots else _EMPTY for dots, layer in zip(line, layers, strict=True)]
            for line, layers in zip(self._dots, self._layers, strict=True)
        ]


def _row(position: float, top: int) -> int:
    # The last bits of a smoothed constant must not make it hop between two rows.
    return min(top, max(0, math.floor(position * top + 0.5 + 1e-6)))


def _braille_cell(dots: int) -> str:
    return chr(0x2800 + dots)


def _ascii_cell(dots: int) -> str:
    rows = [bool(dots & (left | right)) for left, right in _DOTS]
    if sum(rows) >= 3:
        return "|"
    return "'" if rows[0] else "." if rows[3] else "-"


@lru_cache(256)  # a list draws the same ones again at every piece of news
def spark(values: tuple[float | None, ...], *, ascii: bool = False) -> str:
    """Two values a character as a thin line, lowest to highest; blanks where there is none, flat when all are equal."""
    known = [number for number in values if number is not None and is_measurable(number)]
    width = (len(values) + 1) // 2
    if not known:
        return " " * width
    columns = [None if number is None or not is_measurable(number) else Column(number, number) for number in values]
    low, high = bulk(known)
    axis = Axis(low, high) if high > low else Axis(low - 1, high + 1)
    canvas = Canvas(width, 1, ascii=ascii)
    canvas.plot(Trace(tuple(columns), frozenset(), 0, 0), axis, 0)
    return "".join(cell.char for cell in canvas.rows()[0])


def bar(fraction: float | None, width: int, *, ascii: bool = False) -> tuple[str, str]:
    """(filled, empty) parts of a horizontal bar, `width` cells together; anything above nothing shows a sliver.

    Two characters and not two colours of one: it is read in a pipe and with NO_COLOR as well.
    """
    share = 0.0 if fraction is None or not math.isfinite(fraction) else min(1.0, max(0.0, fraction))
    filled, line = ("#", ".") if ascii else ("━", "─")
    halves = round(share * width * 2) or (1 if share > 0 else 0)
    whole, half = divmod(halves, 2)
    if half and ascii:
        whole, half = whole + 1, 0
    return filled * whole + "╸" * half, line * (width - whole - half)
