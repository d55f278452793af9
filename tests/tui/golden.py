"""Golden files: screens as people see them, kept as text and as pictures.

`DRAFTYARD_WRITE_SCREENS=1 pytest tests/tui` writes them anew; look at the difference before keeping it.
"""

from __future__ import annotations

import asyncio
import html
import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from textual.containers import Vertical
from textual.pilot import Pilot
from textual.strip import Strip

from tui.app import Draftyard
from tui.dialogue import Dialogue
from tui.once import rested
from tui.plain import screen_strips, screen_text

SCREENS = Path(__file__).parent / "screens"
IMAGES = Path(__file__).parent.parent.parent / "docs" / "images"
DEADLINE_S = 120.0  # far beyond the slowest test; a screen that failed to open would wait for ever
SHOWN_S = 90.0  # for what takes less than a second on an idle machine
IS_WRITING = bool(os.environ.get("DRAFTYARD_WRITE_SCREENS"))


def matches(path: Path, text: str) -> bool:
    """Whether the golden file says the same; writes it where that was asked for."""
    if IS_WRITING:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return _without_lines(path.read_text(encoding="utf-8")) == _without_lines(text)


def _without_lines(text: str) -> str:
    """Where in our own source or in a bundled recipe a value stands is no part of how a screen looks."""
    return re.sub(r"((?:spec\.py|\.yaml):)\d+", r"\1", text)


_CELL, _LINE, _BASE = (
    12.2,
    24.4,
    18.5,
)  # a cell in Textual's pictures: its width, its height, its top above the baseline
_DOT = 3.4
_PLACES = (
    (0, 0),
    (0, 1),
    (0, 2),
    (1, 0),
    (1, 1),
    (1, 2),
    (0, 3),
    (1, 3),
)  # column and row of each bit of a braille sign
_CURVE = re.compile(r'<text class="([^"]*)" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*[\u2800-\u28ff][^<]*)</text>')


def picture(app: Draftyard) -> str:
    """The screen as SVG that needs no font from elsewhere."""
    svg = app.export_screenshot(title="draftyard watch")
    svg = svg.replace("<svg ", '<svg xml:space="preserve" ', 1)  # some viewers trim blanks at the ends of a text
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = _CURVE.sub(_as_dots, svg)
    return re.sub(
        r"font-family: ?Fira Code[^;]*;", "font-family: 'Fira Code', Menlo, 'DejaVu Sans Mono', monospace;", svg
    )


def _as_dots(text: re.Match[str]) -> str:
    """Curves as the dots they are: few fonts for code have braille signs, and those of another font are wider than a cell."""
    ink, left, base, content = text[1], float(text[2]), float(text[3]), html.unescape(text[4])
    top, dots = base - _BASE, ""
    for number, sign in enumerate(content):
        bits = ord(sign) - 0x2800 if "\u2800" <= sign <= "\u28ff" else 0
        for bit, (column, row) in enumerate(_PLACES):
            if bits >> bit & 1:
                x = left + _CELL * (number + 0.25 + column / 2) - _DOT / 2
                dots += f"M{x:.1f} {top + _LINE * (row + 0.5) / 4 - _DOT / 2:.1f}h{_DOT}v{_DOT}h-{_DOT}z"
    others = re.sub("[\u2800-\u28ff]", "\u00a0", content)
    rest = text[0].replace(text[4], html.escape(others)) if others.strip() else ""
    return f'<path class="{ink}" d="{dots}"/>{rest}'


# Screen -> keys that lead there from the one before it: all of them in one program.
EVERY_SCREEN = {
    "runs": "", "filter": "slash", "worst off": "escape s", "question": "o g j x", "overview": "n enter", "curves": "2",
    "one curve": "z", "memory": "escape 3", "log": "4", "spec": "6", "files": "7", "failure": "escape exclamation_mark",
    "failed log": "4", "compare": "escape g space space c", "hosts": "escape escape 2", "smoke": "3", "launch": "4",
    "help": "question_mark", "palette": "escape colon",
}  # fmt: skip


async def walk(app: Draftyard, pilot: Pilot[Any]) -> AsyncIterator[str]:
    """The name of each screen, once it is there."""
    for name, keys in EVERY_SCREEN.items():
        await press(app, pilot, *keys.split())
        await rested(app, pilot)
        yield name


def on_top(app: Draftyard) -> list[Strip]:
    """What there is to be read: of a dialogue the box alone, as what is below it is dimmed and cut."""
    area = app.screen.query_one(Vertical).region if isinstance(app.screen, Dialogue) else app.screen.region
    return [strip.crop(area.x, area.right) for strip in screen_strips(app)[area.y : area.bottom]]


@asynccontextmanager
async def opened(
    app: Draftyard, *keys: str, size: tuple[int, int] = (80, 24), deadline_s: float = DEADLINE_S
) -> AsyncIterator[Pilot[Any]]:
    """The app running without a terminal, after these keys. Raises TimeoutError for one that never answers
    or never shows what is waited for."""
    async with asyncio.timeout(deadline_s), app.run_test(size=size, notifications=True) as pilot:
        await app.settle(pilot)
        await press(app, pilot, *keys)
        yield pilot


async def shown(app: Draftyard, pilot: Pilot[Any], *words: str) -> str:
    """The screen as text once all the words stand on it: what a key leads to may take a thread or two to get there."""
    ends_s = time.monotonic() + SHOWN_S
    text = screen_text(app)
    while not all(word in text for word in words):
        assert time.monotonic() < ends_s, f"{words} never came:\n{text}"
        await pilot.pause(0.02)
        text = screen_text(app)
    return text


async def press(app: Draftyard, pilot: Pilot[Any], *keys: str) -> None:
    for key in keys:
        await pilot.press(key)
        await app.settle(pilot)
