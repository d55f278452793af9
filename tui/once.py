"""One screen, printed: for pipes, and for programs that read what it shows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from orchestrator.units import counted
from tui.faults import crash_line
from tui.frame import YardScreen
from tui.painted import Painted
from tui.plain import screen_text
from tui.sheet import Sheet
from tui.table import Table
from tui.terminal import MOST_CELLS

if TYPE_CHECKING:
    from textual.pilot import Pilot

    from tui.app import Draftyard

_OURS = ("ask", "is_another")  # of a snapshot: what the screens tell each other


def print_once(app: Draftyard, size: tuple[int, int], document: Callable[..., None] | None) -> int:
    """The exit code; on stdout the screen as text, or through `document` what it shows, by name."""
    printed: list[str] = []
    own: dict[str, object] = {}

    async def look(pilot: Pilot[object]) -> None:
        for pane in app.screen.query(Painted):
            pane.styles.scrollbar_visibility = "hidden"  # in a text its part of a cell is a stray sign
        await rested(app, pilot)
        printed.append("" if document else _with_what_is_cut(screen_text(app), app))
        own.update(app.screen.document() if isinstance(app.screen, YardScreen) else {})
        app.exit()

    app.run(headless=True, size=size, auto_pilot=look)
    if app.crash is not None:
        sys.stderr.write(f"{crash_line(app.crash)}\n")
        return 1
    if app.shown is None:  # nothing could be read: what stands on the screen is no answer
        sys.stderr.write(f"draftyard watch: {app.trouble}\n")
        return 1
    if document is None:
        sys.stdout.write("".join(printed))
    else:
        shown = {name: item for name, item in vars(app.shown).items() if name not in _OURS}
        document(**shown, **own)
    return 0


def _with_what_is_cut(text: str, app: Draftyard) -> str:
    """The line of keys, which no reader of a text can press, gives way to how much is below the last line, where there is some."""
    panes = [*app.screen.query(Sheet), *app.screen.query(Table)]
    more = max(
        (int(pane.max_scroll_y) for pane in panes if pane.is_on_screen and pane.can_focus and not pane.scroll_offset.y),
        default=0,
    )
    needed = app.size.height + more
    if not more:
        return text
    how = f": LINES={needed} prints all of it" if needed <= MOST_CELLS else f"; one print has {MOST_CELLS:,} at most"
    return "\n".join([*text.splitlines()[:-1], f" {counted(more, 'line')} more{how}\n"])


async def rested(app: Draftyard, pilot: Pilot[object]) -> None:
    """Until no thread is at work, those that another one started included, and the screen shows what they said."""
    await app.settle(pilot)
    while any(not worker.is_finished for worker in app.workers):
        await pilot.pause(0.02)
    await app.settle(pilot)
