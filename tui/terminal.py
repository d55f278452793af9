"""The terminal as fast as a hand: a lone escape answered at once, no pause of the interpreter between a key and its paint.

Textual takes 100 ms to tell Escape from a key that begins with it (an arrow is ESC [ A). The bytes of one key arrive
together, over SSH as well; a fifth of that is what vim and tmux are told to wait by those who know them. `ESCDELAY`
(milliseconds), which curses programs read, still says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import selectors
import shutil
import signal
import sys
from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from textual import constants, events, screen
from textual._xterm_parser import XTermParser
from textual.app import App
from textual.drivers.linux_driver import LinuxDriver
from textual.geometry import Size
from textual.message import Message

from tui.turns import RESTED_S, Turns

ESCAPE_S = 0.02
IDLE_S = 0.1
PAINT_S = 1 / 120  # what a change waits at most for others to be painted with it
SWITCH_S = 0.0005  # Python's own 5 ms is what each turn of the painting thread waited for the reading one
FEW_OBJECTS = 1000  # made since the last collection, from which on another is worth it; a screen that is drawn anew makes some thousands
LOOKS = 20  # at the newest of them, until all that was made since the start is looked through
# With 200 the program grew from 62 to 131 MB in 90 s of keys without a pause, 1,000 events/s beside them.
MOST_LOOKS = 40
MOST_CELLS = 4096  # of a side, more than any terminal has: COLUMNS can be any number, and 65,535 lines took 16 s
MANY_OBJECTS = 100_000  # from which on Python collects by itself, whoever waits


def terminal_size(unless_known: tuple[int, int]) -> tuple[int, int]:
    """Columns and lines: by COLUMNS and LINES, else of the terminal; what neither says, or says as 0, is taken of `unless_known`."""
    columns, lines = shutil.get_terminal_size(unless_known)
    return min(columns, MOST_CELLS), min(lines, MOST_CELLS)


class Terminal(LinuxDriver):
    """Textual's driver with a shorter wait after Escape."""

    def __init__(self, app: App[Any], **settings: Any) -> None:
        super().__init__(app, **settings)
        self._file: Any = _Unheard(sys.__stderr__)
        self._last_size = (80, 24)

    def _sigcont_application(self, *_: object) -> None:
        """Begins anew only after a suspension of ours. A hang-up brings this signal too, and Textual's driver would start
        second threads that nothing ends: the process stayed for ever."""
        if self._must_signal_resume:
            super()._sigcont_application()
        else:
            self._loop.call_soon_threadsafe(self._app.refresh)  # the shell may have written over it

    def start_application_mode(self) -> None:
        """The size is asked for in the loop. Textual asks in the handler of the signal, which the next one interrupts: in a storm
        of resizes the size before was told last at times, and the screen stayed at it."""
        super().start_application_mode()  # type: ignore[no-untyped-call]
        asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, self._tell_size)

    def _get_terminal_size(self) -> tuple[int, int]:
        """A size of 0 is one that nobody knows, as of a serial line: the one before stays."""
        self._last_size = terminal_size(self._last_size)
        return self._last_size

    def _tell_size(self) -> None:
        if not self._in_band_window_resize:
            size = Size(*self._get_terminal_size())
            self.send_message(events.Resize(size, size))

    def run_input_thread(self) -> None:
        parser, decode = XTermParser(self._debug), getincrementaldecoder("utf-8")("replace").decode
        escape_s = constants.ESCAPE_DELAY
        with selectors.SelectSelector() as selector:
            selector.register(self.fileno, selectors.EVENT_READ)
            wait_s = IDLE_S
            while not self.exit_event.is_set():
                is_ready = bool(selector.select(wait_s))
                piece = os.read(self.fileno, 4096) if is_ready else b""
                if is_ready and not piece:
                    return  # it was hung up: it would be ready for ever, and hold up the end of the process
                text = decode(piece)
                self._send(parser.feed(text) if text else ())
                self._send(parser.tick())
                wait_s = (
                    min(escape_s, IDLE_S) if is_ready else IDLE_S
                )  # the parser knows when; the way out waits for us

    def _send(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.process_message(message)


class _Unheard:
    """Output that outlives its terminal: were it an error, the writing thread would die and all others wait for it."""

    def __init__(self, file: TextIO | None) -> None:
        assert file is not None
        self._file = file

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._file.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._file.flush()


def no_pauses() -> None:
    """For a process that is a screen and nothing else: threads take turns often, and Escape waits less."""
    sys.setswitchinterval(SWITCH_S)
    screen.UPDATE_PERIOD = PAINT_S  # type: ignore[misc]  # read by each screen when it begins
    if "ESCDELAY" not in os.environ:
        constants.ESCAPE_DELAY = ESCAPE_S  # type: ignore[misc]  # read whenever a sequence begins
    gc.set_threshold(MANY_OBJECTS, 10, 10)  # however long the first answer takes


def settled() -> None:
    """What there is now stays: it is never looked through again, which took 15 to 50 ms each time."""
    gc.freeze()


def tidy(*, is_rested: bool) -> None:
    """Looks through what was made since, when no key waits for it: some milliseconds. All of it, which takes tens of them, where
    nobody is typing, or has been for long."""
    newest, _, num_looks = gc.get_count()
    if newest > FEW_OBJECTS:
        gc.collect(2 if num_looks >= (LOOKS if is_rested else MOST_LOOKS) else 1)


async def get_ready(app: App[Any], screens: Sequence[str], turns: Turns) -> None:
    """Makes the screens that keys lead to before anybody asks for them: what the first of a kind took, 50 ms for that of a run,
    went into its styles and widgets. The first at once, the others one at a time while nobody types."""
    await turns.calm()
    await app._get_screen(screens[0])[1]  # as Textual's push_screen begins
    settled()
    for name in screens[1:]:
        while not turns.are_rested:
            await asyncio.sleep(RESTED_S)
        await app._get_screen(name)[1]


def speaks_unicode() -> bool:
    """Whether the terminal can be expected to show more than ASCII."""
    encoding = (sys.stdout.encoding or "ascii").lower().replace("-", "")
    return encoding.startswith("utf") and os.environ.get("TERM") != "dumb"
