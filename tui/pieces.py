"""Lines as pieces of text with a meaning: what every pane draws, before colours and widgets.

A pane is a function from frozen rows and a size to lines, so it can be tested as plain text. Here
are the shapes that panes share: headings, fields, columns side by side, bars.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.cells import cell_len, chop_cells

from orchestrator.actions.log_text import inert
from tui.canvas import bar
from tui.wording import fit

Piece = tuple[str, str]  # text and meaning
Line = Sequence[Piece]

BLANK: Line = ()


def width_of(line: Line) -> int:
    return sum(cell_len(text) for text, _ in line)


def text_of(lines: Iterable[Line]) -> str:
    """Lines as plain text, for tests and pipes."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


def fitted(line: Line, width: int) -> list[Piece]:
    """The line cut or padded to exactly `width` cells."""
    pieces: list[Piece] = []
    room = width
    for text, meaning in line:
        if room <= 0:
            break
        size = cell_len(text)
        pieces.append((fit(text, room) if size > room else text, meaning))
        room -= min(size, room)
    if room > 0:
        pieces.append((" " * room, "text"))
    return pieces


def heading(title: str, width: int, note: str = "") -> Line:
    """A title with a rule to the right edge, and a note at its end."""
    used = cell_len(title) + 1 + (cell_len(note) + 1 if note else 0)
    rule: list[Piece] = [(title, "strong"), (" ", "text"), ("─" * max(0, width - used), "line")]
    return [*rule, (f" {note}", "muted")] if note else rule


def tabs(names: Sequence[str], is_open: str, meaning_of: Callable[[str], str] = lambda _: "muted") -> Line:
    """Names behind the digits that open them, the open one in brackets. A digit before a blank read as a count: `2 hosts`."""
    pieces: list[Piece] = []
    for number, name in enumerate(names, 1):
        this = name == is_open
        number_of, ink = ("key", "strong") if this else ("faint", meaning_of(name))
        before, behind = "[]" if this else "  "
        pieces += [(f"{before}{number}:", number_of), (name, ink), (behind, number_of)]
    return pieces


def field(label: str, value: str | Line, *, label_width: int = 12, meaning: str = "text") -> Line:
    """A label in a column of its own, then the value."""
    pieces = [(value, meaning)] if isinstance(value, str) else list(value)
    return [(fit(label, label_width), "muted"), (" ", "text"), *pieces]


def fields(label: str, lines: Sequence[Line]) -> list[Line]:
    """A field of several lines: the label stands in front of the first."""
    return [field("" if index else label, line) for index, line in enumerate(lines)]


def beside(*blocks: tuple[Sequence[Line], int], gap: int = 2) -> list[Line]:
    """Blocks of given widths side by side, as tall as the tallest."""
    height = max((len(lines) for lines, _ in blocks), default=0)
    rows: list[Line] = []
    for row in range(height):
        line: list[Piece] = []
        for index, (lines, width) in enumerate(blocks):
            line += [(" " * gap, "text")] if index else []
            line += fitted(lines[row] if row < len(lines) else BLANK, width)
        rows.append(line)
    return rows


def broken(line: Line, width: int) -> list[Line]:
    """The line, or where it is too wide its pieces on as many lines as they need, words kept whole."""
    if width_of(line) <= width:
        return [line]
    lines: list[list[Piece]] = [[]]
    for text, meaning in line:
        for part in wrapped(text, width, meaning):
            piece = part[0][0]
            blank = "  " if text.startswith("  ") else " " if lines[-1] else ""
            if lines[-1] and width_of(lines[-1]) + len(blank) + cell_len(piece) > width:
                lines.append([(piece, meaning)])
            else:
                lines[-1].append((blank + piece if lines[-1] else piece, meaning))
    return list(lines)


def meter(fraction: float | None, width: int, meaning: str = "live", *, ascii_only: bool = False) -> list[Piece]:
    """A horizontal bar: the filled part in its meaning, the rest as a faint track."""
    filled, empty = bar(fraction, width, ascii=ascii_only)
    return [(filled, meaning), (empty, "line")]


def memory_meaning(fraction: float | None) -> str:
    """Under 85 % nothing to say; to 95 % tight; beyond it may end badly."""
    if fraction is None or fraction < 0.85:
        return "live"
    return "warn" if fraction < 0.95 else "bad"


def wrapped(text: str, width: int, meaning: str = "text", *, indent: str = "") -> list[Line]:
    """Words on as many lines as they need; a word longer than the width is broken. Never less than a cell a line: what is left
    beside a label is less than none in a terminal of one cell, and is drawn once more before it is laid out anew."""
    width = max(1, width)
    if cell_len(indent) + 2 > width:
        indent = ""  # a line that it fills would take no sign of the word
    lines: list[Line] = []
    current = ""
    for word in inert(text).split():
        while cell_len(word) > width:
            if current:
                lines.append([(current, meaning)])
                current = ""
            part = chop_cells(word, width)[0] or word[0]  # a wide sign is whole or on the next line
            lines.append([(part, meaning)])
            word = indent + word[len(part) :]
        candidate = f"{current} {word}" if current else word
        if cell_len(candidate) > width and current:
            lines.append([(current, meaning)])
            candidate = indent + word
        current = candidate
    return [*lines, [(current, meaning)]] if current else lines


def flowed(words: Iterable[Line], width: int) -> list[Line]:
    """Words of several pieces, as many a line as fit; a word is never broken."""
    lines: list[list[Piece]] = []
    for word in words:
        if lines and width_of(lines[-1]) + 2 + width_of(word) <= width:
            lines[-1] += [("  ", "text"), *word]
        else:
            lines.append(list(word))
    return list(lines)
