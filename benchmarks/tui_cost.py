"""What a key costs the program itself: processor time between the key being read and the bytes that answer it being written.

Runs inside the watched program, which is the real one but for a terminal driver that takes notes, and notes of what else it did.
Clocks of threads do not count what other processes had of the machine meanwhile, so what they say holds on a busy one too. Notes go
to a file of records; `Costs` reads them on the other side of the terminal.
"""

from __future__ import annotations

import gc
import os
import struct
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

from textual import events
from textual._compositor import Compositor
from textual.app import App
from textual.css.stylesheet import Stylesheet
from textual.message import Message
from textual.screen import Screen

import tui.app
import tui.opening
from tui.frame import YardScreen
from tui.run import RunScreen
from tui.runs import RunsScreen
from tui.snapshot import Room
from tui.terminal import Terminal

KEY, WRITE, DID = 0, 1, 2
# kind; of DID its place in WORK. Seconds: by the wall, of the painting thread, of all threads; of DID the wall's when it began and ended,
# and what its own thread took.
_NOTE = struct.Struct("<BBddd")
# What may stand between a key and its paint, in words. `taking` draws what was read, `painting` writes what has changed.
WORK: tuple[tuple[str, Any, str], ...] = (
    ("reading", Room, "read"),
    ("list", RunsScreen, "_present_list"),
    ("preview", RunsScreen, "_present_preview"),
    ("run", RunScreen, "present"),
    ("taking", YardScreen, "take"),
    ("painting", Screen, "_on_timer_update"),
    ("layout", Compositor, "reflow"),
    ("styles", Stylesheet, "update_nodes"),
    ("parsing styles", Stylesheet, "parse"),
    ("garbage", None, ""),
    ("import", None, ""),
)


def note(kind: int, what: int, *clocks: float) -> None:
    os.write(Noting.notes, _NOTE.pack(kind, what, *clocks))


class Noting(Terminal):
    """The program's own driver; notes each key as it is read and each piece before it is written."""

    notes: int  # a file's descriptor

    def __init__(self, app: App[Any], **settings: Any) -> None:
        super().__init__(app, **settings)
        self._painting = time.pthread_getcpuclockid(threading.get_ident())
        write, flush = self._file.write, self._file.flush

        def noted_write(text: str) -> None:
            self._note(WRITE)
            write(text)

        def noted_flush() -> None:
            self._note(WRITE)
            flush()

        self._file.write, self._file.flush = noted_write, noted_flush

    def process_message(self, message: Message) -> None:
        if isinstance(message, events.Key):
            self._note(KEY)
        super().process_message(message)

    def _note(self, kind: int) -> None:
        note(kind, 0, time.perf_counter(), time.clock_gettime(self._painting), time.process_time())


def watched(db: Path, notes: Path) -> None:
    Noting.notes = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    tui.app.Terminal = Noting  # type: ignore[misc]  # the driver that the program names when it is made
    for number, (_, owner, name) in enumerate(WORK):
        if owner is not None:
            _note_calls(owner, name, number)
    _note_garbage()
    _note_imports()
    tui.opening.run(db)


def _note_calls(owner: Any, name: str, number: int) -> None:
    do = getattr(owner, name)

    @wraps(do)
    def noted(*args: Any, **settings: Any) -> Any:
        began, cpu = time.perf_counter(), time.thread_time()
        try:
            return do(*args, **settings)
        finally:
            note(DID, number, began, time.perf_counter(), time.thread_time() - cpu)

    setattr(owner, name, noted)


def _note_garbage() -> None:
    number, began = _number("garbage"), [0.0]

    def noted(phase: str, _: Mapping[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            began[0] = now
        else:
            note(DID, number, began[0], now, now - began[0])

    gc.callbacks.append(noted)


def _note_imports() -> None:
    """That a module is looked for is noted as work of no length: after the first paint there should be none."""
    number = _number("import")

    class Seeing:
        @staticmethod
        def find_spec(*_: object) -> None:
            now = time.perf_counter()
            note(DID, number, now, now, 0.0)

    sys.meta_path.insert(0, Seeing)  # type: ignore[arg-type]  # of a finder it has what is asked of one


def _number(word: str) -> int:
    return next(number for number, (told, _, _) in enumerate(WORK) if told == word)


@dataclass(frozen=True)
class Cost:
    painting_s: float  # of the thread that reads no database, paints, and lays out
    all_s: float  # of every thread, the reading one included, whether or not the answer had to wait for it
    did: Mapping[str, tuple[int, float]] = field(
        default_factory=dict
    )  # word -> how often, seconds by the wall, until the paint


class Costs:
    """The notes taken so far."""

    def __init__(self, notes: Path) -> None:
        self._file = notes.open("rb")
        self._notes: list[tuple[int, int, float, float, float]] = []

    def between(self, began: float, painted: float) -> Cost | None:
        """From the first key read after `began` to the last piece written before `painted`, by the clock of the machine."""
        self._notes = [
            note
            for note in (*self._notes, *_NOTE.iter_unpack(self._whole()))
            if note[3 if note[0] == DID else 2] >= began
        ]
        read = next((note for note in self._notes if note[0] == KEY), None)
        written = [note for note in self._notes if note[0] == WRITE and note[2] <= painted]
        if read is None or not written:
            return None
        return Cost(written[-1][3] - read[3], written[-1][4] - read[4], self._did(read[2], written[-1][2]))

    def _did(self, began: float, ended: float) -> dict[str, tuple[int, float]]:
        """What overlaps that time, each with the share of it that does."""
        did: dict[str, tuple[int, float]] = {}
        for kind, what, first, last, _ in self._notes:
            if kind == DID and first <= ended and last >= began:
                word = WORK[what][0]
                number, took_s = did.get(word, (0, 0.0))
                did[word] = (number + 1, took_s + min(last, ended) - max(first, began))
        return did

    def _whole(self) -> bytes:
        piece = self._file.read()
        rest = len(piece) % _NOTE.size
        self._file.seek(-rest, os.SEEK_CUR)
        return piece[: len(piece) - rest]

    def close(self) -> None:
        self._file.close()


if __name__ == "__main__":
    watched(Path(sys.argv[1]), Path(sys.argv[2]))
