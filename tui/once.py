"""One screen, printed: for pipes, and for programs that read what it shows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from tui.faults import crash_line
from tui.plain import screen_text

if TYPE_CHECKING:
    from textual.pilot import Pilot

    from tui.app import Draftyard

_OURS = ("ask", "is_another")  # of a snapshot: what the screens tell each other


def print_once(app: Draftyard, size: tuple[int, int], document: Callable[..., None] | None) -> int:
    """The exit code; on stdout the screen as text, or through `document` what it shows, by name."""
    printed: list[str] = []

    async def look(pilot: Pilot[object]) -> None:
        await app.settle(pilot)
        printed.append("" if document else screen_text(app))
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
        shown = vars(app.shown) if app.shown else {}
        document(**{name: item for name, item in shown.items() if name not in _OURS})
    return 0
