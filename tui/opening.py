"""From the command line into the screens and out again: what is opened first, how, and what is said once it is left."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from orchestrator.actions.places import Places
from orchestrator.errors import UsageError
from orchestrator.store.reads import Reader
from orchestrator.units import counted
from tui.app import Draftyard
from tui.compare import MOST_RUNS
from tui.faults import crash_line
from tui.home import SCREENS
from tui.keys import binding_names
from tui.once import print_once
from tui.outside import spell_with, to_type
from tui.run import TABS
from tui.terminal import no_pauses, speaks_unicode, terminal_size


def run(
    db_path: Path,
    *,
    places: Places | None = None,
    runs: Sequence[str] = (),
    screen: str | None = None,
    ascii: bool = False,
    readonly: bool = False,
    once: bool = False,
    document: Callable[..., None] | None = None,
    theme: str | None = None,
    mouse: bool = True,
    size: tuple[int, int] | None = None,
    spell: Callable[[str], str] = str,
) -> int:
    """Opens the screens and returns the exit code when they are left; `once` prints one and ends.

    Without `places` nothing can be started or stopped from it. `runs` are selectors: of one its page is opened, several are
    compared. `screen` is one of SCREENS, or with one run of TABS. `size` (columns, lines) is for `once`; `document` gets what
    such a screen shows, by name, instead of its text being printed. `spell`: commands in a text as they are typed in the shell
    at hand. Raises RunNotFound for a run that is not there,
    UsageError for a screen that does not go with the runs, and for a key of the settings that no screen has.
    """
    _check(runs, screen)
    if runs:
        with Reader(db_path) as reader:
            runs = list(dict.fromkeys(reader.run(selector).id for selector in runs))  # one named twice is one
    is_printed = once or document is not None
    spell_with(str if document is not None else spell)
    app = Draftyard(
        db_path, places=places, run=runs[0] if len(runs) == 1 else None, compared=runs if len(runs) > 1 else (), screen=screen,
        ascii_only=ascii or not speaks_unicode(), readonly=readonly or is_printed,
    )  # fmt: skip
    if theme is not None and not app.no_color:
        app.theme = theme
    if places is not None:
        app.set_keymap(places.own_keys(binding_names()))
    if is_printed:
        return print_once(app, size or terminal_size((120, 40)), document)
    no_pauses()
    app.run(mouse=mouse)
    return _left(app)


def _check(runs: Sequence[str], screen: str | None) -> None:
    """What of runs and screen do not go together."""
    if len(runs) > MOST_RUNS:
        raise UsageError(f"{len(runs)} runs: at most {MOST_RUNS} are compared at once; draftyard compare takes more")
    if screen in TABS and len(runs) != 1:
        raise UsageError(f"--screen {screen} shows one run: name it, as in draftyard watch @last --screen {screen}")
    if screen in SCREENS and runs:
        raise UsageError(f"--screen {screen} shows every run: leave {' '.join(runs)} out")


def _left(app: Draftyard) -> int:
    """The exit code, and in words what goes on."""
    if app.ended_by is not None:
        return 128 + app.ended_by
    if app.crash is not None:
        sys.stderr.write(f"{crash_line(app.crash)}\n")
    if app.num_live:
        goes = "goes" if app.num_live == 1 else "go"
        sys.stdout.write(f"{counted(app.num_live, 'run')} {goes} on. Come back with: {to_type('draftyard watch')}\n")
    return app.return_code or 0
