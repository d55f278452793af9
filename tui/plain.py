"""A screen as plain text: for pipes and for tests.

The text comes through Textual's public screenshot: its SVG places every piece of text by its cell;
this turns the places back into lines.
"""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

if TYPE_CHECKING:
    from textual.app import App

_TEXT = re.compile(r'<text[^>]* x="([\d.]+)" y="[\d.]+"[^>]*clip-path="url\(#[^"]*-line-(\d+)\)"[^>]*>(.*?)</text>')
_CELL_WIDTH = 12.2  # of the SVG export, in its own units


def screen_text(app: App[Any]) -> str:
    """Every line of the screen, blanks at line ends left out, one newline at the end."""
    lines: dict[int, str] = {}
    pieces = [(int(row), float(x), html.unescape(text)) for x, row, text in _TEXT.findall(app.export_screenshot())]
    for row, x, text in sorted(pieces):
        line = lines.get(row, "")
        place = round(x / _CELL_WIDTH)
        lines[row] = line + " " * (place - cell_len(line)) + text.replace("\xa0", " ")
    return "\n".join(lines.get(row, "").rstrip() for row in range(max(lines, default=-1) + 1)).rstrip() + "\n"
