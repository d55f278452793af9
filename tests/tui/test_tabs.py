"""The lines of screens and of tabs: no number reads as a count, and the open one is told without a colour."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.store.writes import Store
from tests.tui.golden import opened, press, shown
from tests.tui.yard import LIVE
from tui.app import Draftyard
from tui.home import SCREENS
from tui.plain import screen_text
from tui.run import TABS

pytestmark = pytest.mark.slow  # a whole app a test


@pytest.mark.parametrize(("theme", "ascii_only"), [("draftyard", False), ("draftyard-16", True)])
async def test_the_line_of_screens_counts_nothing_and_says_which_is_open(
    theme: str, ascii_only: bool, tmp_path: Path, open_app: Callable[..., Draftyard]
) -> None:
    """`1 runs  2 hosts  3 smoke` was read as one run, two hosts and three smokes, and without colours none was open."""
    with Store(tmp_path / "runs.db"):
        pass
    app = open_app(tmp_path / "runs.db", ascii_only=ascii_only)
    app.theme = theme
    async with opened(app) as pilot:
        for number, name in enumerate(SCREENS, 1):
            await press(app, pilot, str(number))
            top = screen_text(app).splitlines()[0]

            assert re.findall(rf"\b\d+ (?:{'|'.join(SCREENS)})", top.replace("0 runs", "")) == []
            assert re.findall(r"\[(\d):(\w+)\]", top) == [(str(number), name)]
            assert re.findall(r"\b\d:(\w+)", top)[:4] == list(SCREENS)
            assert top.isascii()


async def test_the_line_of_tabs_counts_nothing_and_says_which_is_open(open_app: Callable[..., Draftyard]) -> None:
    app = open_app(run=LIVE)
    lines = []
    async with opened(app) as pilot:
        for number, name in enumerate(TABS, 1):
            await press(app, pilot, str(number))
            line = (await shown(app, pilot, f"[{number}:{name}]")).splitlines()[1]
            lines.append(line.replace("[", " ").replace("]", " ").rstrip())

            assert re.findall(r"\[(\d):(\w+)\]", line) == [(str(number), name)]
            assert re.findall(r"\d:(\w+)", line) == list(TABS)

    assert len(set(lines)) == 1  # no name moves where another is opened
