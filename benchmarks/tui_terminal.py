"""`draftyard watch` in a pseudo-terminal of its own: keys go in as a hand types them, what is painted comes out as bytes.

A key counts as answered when what it must change stands in what the program has written since: the
cursor on another run, the word of another order, the name of another screen. News of runs that is painted meanwhile
answers nothing.
"""

from __future__ import annotations

import fcntl
import os
import pty
import random
import re
import select
import signal
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tui_cost import Cost, Costs

SIZE = (
    170,
    45,
)  # wide enough for the run under the cursor beside the list, which is most of what a move reads and paints
DEADLINE_S = 20.0
RECENT_BYTES = 8192
_ESCAPE = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[()][A-Z0-9]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_CURSOR = re.compile("▌[^▌\n]{0,60}?/[^ ]+ +([a-z0-9]{8})")


@dataclass(frozen=True)
class Answer:
    key: str
    paint_s: float  # to the first paint that shows that the key was taken
    all_s: float  # to what the key asked for, read and drawn
    crowded_s: float  # of the first, in which the program could run and another process had its processor
    cost: Cost | None  # of the program itself until that first paint


class Watching:
    """The program on the other side of the terminal."""

    def __init__(self, leader: int, pid: int, costs: Costs) -> None:
        self._leader, self.pid, self._costs = leader, pid, costs
        self._cursor = ""  # the run that the cursor was seen on last
        self._recent = b""  # a terminal hands out 4 KiB at a time, which may end within a row

    def typed(self, seconds: float, *, seed: int = 1) -> list[Answer]:
        """The answers to the keys of this time: mostly moves, now and then another order or a run looked into."""
        noise = random.Random(seed)
        answers: list[Answer] = []
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            for keys in (
                ["j"] * 12,
                ["k"] * 6,
                ["s", "j", "j", "k", "o"],
                ["j"] * 4,
                ["enter", "2", "4", "1", "escape"],
            ):
                for key in keys:
                    answers.append(self.press(key))
                    self._rest(noise.uniform(0.02, 0.12))
            answers.append(self.press("g"))
        return answers

    def press(self, key: str) -> Answer:
        """One key, awaited. Raises TimeoutError where it is never answered."""
        first, then = _ANSWERED_BY[key]
        crowded_s, began = self._crowded_s(), time.perf_counter()
        os.write(self._leader, _BYTES.get(key, key.encode()))
        text, paint_s, written = "", 0.0, b""
        while time.perf_counter() - began < DEADLINE_S:
            written += self._read(DEADLINE_S)
            text = _plain(written)
            if not paint_s and self._shows(first, text):
                paint_s = time.perf_counter() - began
                crowded_s = self._crowded_s() - crowded_s
            if paint_s and (then is None or re.search(then, text)):
                self._look_for_cursor()
                all_s, cost = time.perf_counter() - began, self._costs.between(began, began + paint_s)
                return Answer(key, paint_s, all_s, crowded_s, cost)
        raise TimeoutError(f"key {key!r} was not answered within {DEADLINE_S:g} s; written was: {text[-2000:]}")

    def shown(self, pattern: str) -> None:
        """Waits until that has been painted. Raises TimeoutError."""
        written, ends = b"", time.monotonic() + DEADLINE_S
        while time.monotonic() < ends:
            written += self._read(0.2)
            if re.search(pattern, _plain(written)):
                self._look_for_cursor()
                return
        raise TimeoutError(f"{pattern!r} did not come; written was: {_plain(written)[:6000]}")

    def _crowded_s(self) -> float:
        """How long the painting thread has waited for a processor so far, as Linux counts it; elsewhere nothing."""
        told = Path(f"/proc/{self.pid}/task/{self.pid}/schedstat")
        return int(told.read_text().split()[1]) / 1e9 if told.exists() else 0.0

    def _shows(self, pattern: str | None, text: str) -> bool:
        if pattern is not None:
            return re.search(pattern, text) is not None
        return any(found != self._cursor for found in _CURSOR.findall(text))

    def _look_for_cursor(self) -> None:
        self._cursor = (_CURSOR.findall(_plain(self._recent)) or [self._cursor])[-1]

    def _rest(self, seconds: float) -> None:
        """As a hand does between two keys; what is painted meanwhile is read, as a terminal would."""
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            self._read(left)
            self._look_for_cursor()

    def _read(self, wait_s: float) -> bytes:
        ready, _, _ = select.select([self._leader], [], [], wait_s)
        piece = os.read(self._leader, 1 << 16) if ready else b""
        self._recent = (self._recent + piece)[-RECENT_BYTES:]
        return piece


_BYTES = {"enter": b"\r", "escape": b"\x1b"}
_TABS = "1 overview +2 curves"
# Key -> what its first paint shows (None: the cursor on another run), and what all of its answer does.
_ANSWERED_BY: dict[str, tuple[str | None, str | None]] = {
    "j": (None, None),
    "k": (None, None),
    "g": (None, None),
    "s": ("worst off first", None),
    "o": ("ends in", None),
    "enter": (_TABS, "bottleneck"),
    "1": (_TABS, "bottleneck"),
    "2": (_TABS, "step_s"),
    "4": (_TABS, None),
    "escape": ("2 hosts", None),
}


def _plain(written: bytes) -> str:
    return _ESCAPE.sub(b"", written).decode("utf-8", "replace")


@contextmanager
def watching(db: Path) -> Iterator[Watching]:
    """The program over this database, its list painted; it is ended on the way out."""
    descriptor, notes = tempfile.mkstemp(prefix="draftyard-keys-")
    os.close(descriptor)
    pid, leader = pty.fork()
    if pid == 0:  # the other process
        width, height = SIZE
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        env = {name: text for name, text in os.environ.items() if name not in ("COLUMNS", "LINES")}
        env |= {"TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
        os.execvpe(
            sys.executable,
            [sys.executable, "-m", "benchmarks.tui_cost", str(db), notes],
            env,
        )
    try:
        with closing(Costs(Path(notes))) as costs:
            program = Watching(leader, pid, costs)
            program.shown(r"▌.*live")
            yield program
    finally:
        Path(notes).unlink()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(leader)
