"""Text tables: quiet columns, cut to the width of a terminal and to nothing in a pipe.

No boxes. A column has a heading, an alignment, and one column of a table may be the one that gives
way when the terminal is narrow. Colours are applied to whole cells after the widths are known.
"""

from __future__ import annotations

import dataclasses
import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import click

from orchestrator.actions.log_text import inert

GAP = "  "
LEAST_TEXT = 24  # columns of a running text, however narrow the terminal


@dataclass(frozen=True)
class Column:
    heading: str
    is_number: bool = False  # aligned right
    gives_way: bool = False  # cut first when the row is wider than the terminal
    least: int = 6  # columns it keeps when it gives way
    is_last_to: bool = False  # give way: after all others that do


@dataclass(frozen=True)
class Cell:
    text: str
    colour: str | None = None
    is_dim: bool = False
    is_bold: bool = False


def table(columns: Sequence[Column], rows: Sequence[Sequence[str | Cell]], *, width: int | None) -> list[str]:
    """Heading and rows as lines; `width` None leaves every cell whole."""
    cells = [[_inert(cell if isinstance(cell, Cell) else Cell(cell)) for cell in row] for row in rows]
    widths = [
        max([_cells_wide(column.heading), *(_cells_wide(row[i].text) for row in cells)])
        for i, column in enumerate(columns)
    ]
    if width is not None:
        widths = _narrowed(columns, widths, width)
    heading = [Cell(column.heading, is_dim=True) for column in columns]
    return [_line(columns, row, widths) for row in [heading, *cells]]


def pairs(items: Sequence[tuple[str, str]], *, indent: int = 0, width: int | None = None) -> list[str]:
    """Names and values, the values in one column; a value of several lines stays in its column, as does one that is
    wider than the terminal, where a `width` is given.
    """
    widest = max((len(name) for name, _ in items), default=0)
    room = None if width is None else width - indent - widest - len(GAP)
    lines = []
    for name, value in items:
        first, *rest = [part for line in value.splitlines() for part in wrapped(line, room)] or [""]
        lines.append(" " * indent + click.style(inert(name).ljust(widest), dim=True) + GAP + first)
        lines += [" " * (indent + widest) + GAP + line for line in rest]
    return lines


def wrapped(text: str, width: int | None, *, indent: int = 0) -> list[str]:
    """The text between words, not in them, as lines of at most `width` columns; a terminal that is very narrow cuts."""
    if width is None:
        return [" " * indent + inert(text)]
    room = max(width - indent, LEAST_TEXT)
    return [" " * indent + line for line in textwrap.wrap(inert(text), room, break_long_words=False) or [""]]


def heading(text: str) -> str:
    return click.style(inert(text), bold=True)


def cut(text: str, width: int) -> str:
    """The text in at most `width` columns, ending in … where something was left off."""
    if _cells_wide(text) <= width:
        return text
    kept, used = [], 0
    for character in text:
        used += _cell_wide(character)
        if used > width - 1:
            break
        kept.append(character)
    return "".join(kept) + "…"


def _inert(cell: Cell) -> Cell:
    return dataclasses.replace(cell, text=inert(cell.text))


def _narrowed(columns: Sequence[Column], widths: Sequence[int], width: int) -> list[int]:
    found = list(widths)
    excess = sum(found) + len(GAP) * (len(found) - 1) - width
    for index, column in sorted(enumerate(columns), key=lambda pair: pair[1].is_last_to):
        if excess > 0 and column.gives_way:
            taken = min(excess, max(found[index] - column.least, 0))
            found[index] -= taken
            excess -= taken
    return found


def _line(columns: Sequence[Column], row: Sequence[Cell], widths: Sequence[int]) -> str:
    parts = []
    for index, (column, cell, width) in enumerate(zip(columns, row, widths, strict=True)):
        text = cut(cell.text, width)
        blank = " " * (width - _cells_wide(text))
        is_last = index == len(columns) - 1
        styled = _styled(cell, text)
        parts.append(blank + styled if column.is_number else styled + ("" if is_last else blank))
    return GAP.join(parts).rstrip()


def _styled(cell: Cell, text: str) -> str:
    if not text or not (cell.colour or cell.is_dim or cell.is_bold):
        return text
    return click.style(text, fg=cell.colour, dim=cell.is_dim or None, bold=cell.is_bold or None)


def _cells_wide(text: str) -> int:
    return len(text) if text.isascii() else sum(_cell_wide(character) for character in text)


def _cell_wide(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
