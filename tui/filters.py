"""What every line passes on its way to the terminal, whichever widget drew it: ASCII alone where that was asked for."""

from __future__ import annotations

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from tui.wording import plain


class Ascii(LineFilter):
    """Every character gets a likeness of its own width: borders, toasts and what is typed included."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [Segment(_likeness(text), style, control) for text, style, control in segments]


def _likeness(text: str) -> str:
    return text if text.isascii() else "".join(_cells(char) for char in text)


def _cells(char: str) -> str:
    width = cell_len(char)
    return char if char.isascii() else plain(char)[:width].ljust(width)
