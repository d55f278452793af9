"""What a key costs the program itself: processor time between the key being read and the bytes that answer it being written.

Runs inside the watched program, which is the real one but for a terminal driver that takes notes. Clocks of threads do not
count what other processes had of the machine meanwhile, so what they say holds on a busy one too. Notes go to a file of
records; `Costs` reads them on the other side of the terminal.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from textual import events
from textual.app import App
from textual.message import Message

import tui.app
import tui.opening
from tui.terminal import Terminal

KEY, WRITE = 0, 1
_NOTE = struct.Struct("<Bddd")  # kind; seconds: by the wall, of the painting thread, of all threads


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
        clocks = (time.perf_counter(), time.clock_gettime(self._painting), time.process_time())
        os.write(self.notes, _NOTE.pack(kind, *clocks))


def watched(db: Path, notes: Path) -> None:
    Noting.notes = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    tui.app.Terminal = Noting  # type: ignore[misc]  # the driver that the program names when it is made
    tui.opening.run(db)


@dataclass(frozen=True)
class Cost:
    painting_s: float  # of the thread that reads no database, paints, and lays out
    all_s: float  # of every thread, the reading one included, whether or not the answer had to wait for it


class Costs:
    """The notes taken so far."""

    def __init__(self, notes: Path) -> None:
        self._file = notes.open("rb")
        self._notes: list[tuple[int, float, float, float]] = []

    def between(self, began: float, painted: float) -> Cost | None:
        """From the first key read after `began` to the last piece written before `painted`, by the clock of the machine."""
        self._notes = [note for note in (*self._notes, *_NOTE.iter_unpack(self._whole())) if note[1] >= began]
        read = next((note for note in self._notes if note[0] == KEY), None)
        written = [note for note in self._notes if note[0] == WRITE and note[1] <= painted]
        if read is None or not written:
            return None
        return Cost(written[-1][2] - read[2], written[-1][3] - read[3])

    def _whole(self) -> bytes:
        piece = self._file.read()
        rest = len(piece) % _NOTE.size
        self._file.seek(-rest, os.SEEK_CUR)
        return piece[: len(piece) - rest]

    def close(self) -> None:
        self._file.close()


if __name__ == "__main__":
    watched(Path(sys.argv[1]), Path(sys.argv[2]))
