"""`draftyard watch` in a pseudo-terminal of its own: keys go in as a hand types them, what is painted comes out as bytes.

A key counts as answered when what it must change has been painted since: the cursor on another run, the word of another order, the
name of another screen. Where the cursor stands is looked up on the screen that the bytes have painted (`Face`), never in the newest
bytes: a list that is painted anew is longer than any piece of them worth keeping. News of runs that is painted meanwhile answers nothing.
"""

from __future__ import annotations

import codecs
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
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len

from benchmarks.tui_cost import Cost, Costs

SIZE = (170, 45)  # wide enough for the run under the cursor beside the list, most of what a move reads and paints
DEADLINE_S = 20.0
MOST_UNANSWERED = 3  # after so many keys nobody waits for another
_TOKEN = re.compile(r"\x1b\[([0-?]*)[ -/]*([@-~])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[()][A-Z0-9]|([^\x1b]+)")
_CUT = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]*\x1b?|[()])?$")  # a sequence whose end has not come
_RUN = re.compile(r"/\S+ +([a-z0-9]{8})\b")  # in a row of the list


class Face:
    """What stands on the screen, as the bytes have painted it there."""

    def __init__(self, size: tuple[int, int] = SIZE) -> None:
        self._width, height = size
        self._rows = [[" "] * self._width for _ in range(height)]
        self._x = self._y = 0
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._rest = ""

    def feed(self, piece: bytes) -> str:
        """The text of the piece, without sequences; one that is cut waits for its end."""
        text = self._rest + self._decode(piece)
        cut = _CUT.search(text)
        self._rest = text[cut.start() :] if cut else ""
        said = []
        for numbers, end, words in _TOKEN.findall(text[: cut.start()] if cut else text):
            if words:
                self._put(words)
                said.append(words)
            elif end == "H":
                row, _, column = numbers.partition(";")
                self._y, self._x = int(row or 1) - 1, int(column or 1) - 1
            elif end == "J":
                self._rows = [[" "] * self._width for _ in self._rows]
        return "".join(said)

    def _put(self, words: str) -> None:
        for line in words.splitlines():
            cells = list(line)
            if cell_len(line) != len(line):  # a wide sign has two
                cells = [cell for sign in line for cell in (sign, *"\0" * (cell_len(sign) - 1))]
            if self._y < len(self._rows):
                self._rows[self._y][self._x : self._x + len(cells)] = cells
                del self._rows[self._y][self._width :]
            self._x += len(cells)

    def runs(self) -> list[str]:
        """The runs of the list in sight, from the top; empty words for what is none."""
        found = [_RUN.search(row) for row in str(self).splitlines()]
        return [match.group(1) if match else "" for match in found]

    def cursor(self) -> int | None:
        """The row that it stands on."""
        return next((number for number, row in enumerate(self._rows) if row[0] == "▌"), None)

    def chosen(self) -> str:
        """The run under the cursor; empty words where there is none."""
        row = self.cursor()
        return "" if row is None else self.runs()[row]

    def __str__(self) -> str:
        return "\n".join("".join(row).replace("\0", "").rstrip() for row in self._rows)


@dataclass(frozen=True)
class Answer:
    key: str
    paint_s: float  # to the first paint that shows that the key was taken
    all_s: float  # to what the key asked for, read and drawn
    crowded_s: float  # of the first, in which the program could run and another process had its processor
    cost: Cost | None  # of the program itself until that first paint
    is_first: bool  # of its key
    strayed: str = ""  # where the cursor stood after it, where that is not where the key moves it


class Watching:
    """The program on the other side of the terminal."""

    def __init__(
        self, leader: int, pid: int, costs: Costs | None = None, *, deadline_s: float = DEADLINE_S, began: float = 0.0
    ) -> None:
        self._leader, self.pid, self._costs, self._deadline_s = leader, pid, costs, deadline_s
        self.began = began  # when it was started, as perf_counter has it
        self._read_at = began  # when its newest bytes came
        self._pressed: set[str] = set()
        self.face = Face()
        self.unanswered: list[str] = []  # keys, in words

    def typed(self, seconds: float, *, seed: int = 1) -> Iterator[Answer]:
        """The answers to the keys of this time: mostly moves, now and then another order or a run looked into.

        A key without an answer is kept in `unanswered` and the next one typed; after MOST_UNANSWERED, or where the program has
        ended, there are no more.
        """
        noise = random.Random(seed)
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            for keys in (
                ["j"] * 12,
                ["k"] * 6,
                ["s", "j", "j", "k", "o"],
                ["j"] * 4,
                ["enter", "2", "4", "1", "escape", "g"],
            ):
                for key in keys:
                    try:
                        answer = self.press(key)
                    except (TimeoutError, OSError) as error:
                        self.unanswered.append(str(error))
                        if isinstance(error, TimeoutError) and len(self.unanswered) < MOST_UNANSWERED:
                            continue
                        return
                    yield answer
                    self.rest(noise.uniform(0.02, 0.12))

    def press(self, key: str) -> Answer:
        """One key, awaited. Raises TimeoutError where it is never answered, OSError where the program has ended."""
        self.rest(0.0)
        first, then = _ANSWERED_BY[key]
        is_first, stood, leads_to = key not in self._pressed, self.face.chosen(), self._leads_to(key)
        self._pressed.add(key)
        crowded_s, began = self.crowded_s(), time.perf_counter()
        os.write(self._leader, _BYTES.get(key, key.encode()))
        text, paint_s = "", 0.0
        while (left := self._deadline_s + began - time.perf_counter()) > 0:
            text += self._read(left)
            if not paint_s and (self.face.chosen() not in (stood, "") if first is None else re.search(first, text)):
                paint_s = time.perf_counter() - began
                crowded_s = self.crowded_s() - crowded_s
            if paint_s and (then is None or re.search(then, text)):
                all_s = time.perf_counter() - began
                cost = None if self._costs is None else self._costs.between(began, began + paint_s)
                strayed = f"{key} from {stood} to {self.face.chosen()}, not {leads_to}"
                is_astray = leads_to not in ("", self.face.chosen())
                return Answer(key, paint_s, all_s, crowded_s, cost, is_first, strayed if is_astray else "")
        raise TimeoutError(
            f"key {key!r} was not answered within {self._deadline_s:g} s; on the screen is:\n{self.face}"
        )

    def shown(self, pattern: str) -> None:
        """Waits until that has been painted. Raises TimeoutError."""
        text, ends = "", time.monotonic() + self._deadline_s
        while time.monotonic() < ends:
            text += self._read(0.2)
            if re.search(pattern, text):
                return
        raise TimeoutError(f"{pattern!r} did not come; on the screen is:\n{self.face}")

    def painted_run(self) -> float:
        """When the first bytes came that show a run, as perf_counter has it. Raises TimeoutError, OSError where it has ended."""
        ends = time.monotonic() + self._deadline_s
        while time.monotonic() < ends:
            if any(self.face.runs()):
                return self._read_at
            self._read(0.2)
        raise TimeoutError(f"no run was painted; on the screen is:\n{self.face}")

    def tap(self, key: str) -> None:
        """Without waiting for an answer. Raises OSError where the program has ended."""
        os.write(self._leader, _BYTES.get(key, key.encode()))

    def _leads_to(self, key: str) -> str:
        """The run that a move leads to, as far as it is in sight; empty words for any other key."""
        row, runs = self.face.cursor(), self.face.runs()
        if row is None or key not in "jk":
            return ""
        beside = row + (1 if key == "j" else -1)
        return runs[beside] if 0 <= beside < len(runs) else ""

    def crowded_s(self) -> float:
        """How long the painting thread has waited for a processor so far, as Linux counts it; elsewhere nothing."""
        told = Path(f"/proc/{self.pid}/task/{self.pid}/schedstat")
        return int(told.read_text().split()[1]) / 1e9 if told.exists() else 0.0

    def rest(self, seconds: float) -> None:
        """As a hand does between two keys; what is painted meanwhile is read, as a terminal would."""
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            self._read(left)
        while self._is_there(0.0):
            self._read(0.0)

    def _is_there(self, wait_s: float) -> bool:
        return bool(select.select([self._leader], [], [], wait_s)[0])

    def _read(self, wait_s: float) -> str:
        if not self._is_there(wait_s):
            return ""
        piece = os.read(self._leader, 1 << 16)
        self._read_at = time.perf_counter()
        return self.face.feed(piece)


_BYTES = {"enter": b"\r", "escape": b"\x1b", "space": b" "}
_TABS = r"1:overview\W+2:curves"
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
    "escape": ("2:hosts", None),
}


@contextmanager
def watching(db: Path) -> Iterator[Watching]:
    """The program that takes notes of what a key costs it, its list painted; it is ended on the way out."""
    with (
        tempfile.NamedTemporaryFile(prefix="draftyard-keys-") as notes,
        closing(Costs(Path(notes.name))) as costs,
        _at_terminal(["-m", "benchmarks.tui_cost", str(db), notes.name]) as (leader, pid),
    ):
        program = Watching(leader, pid, costs)
        program.shown(r"▌.*live")
        yield program


# What the verb and its screens import; then the program as from its command. A file says when that was, and for how long until then
# another process had its processor.
_IMPORTED = """
import os, sys, time
import orchestrator.cli, orchestrator.verbs.screen, tui.opening
waits = f"/proc/self/task/{os.getpid()}/schedstat"
crowded_s = int(open(waits).read().split()[1]) / 1e9 if os.path.exists(waits) else 0.0
with open(sys.argv.pop(1), "w") as notes:
    notes.write(f"{time.perf_counter()!r} {crowded_s!r}")
orchestrator.cli.main()
"""


@contextmanager
def watching_as_installed(db: Path, notes: Path | None = None) -> Iterator[Watching]:
    """`draftyard watch` itself, from its start on; it is ended on the way out. `notes`: when it had imported all, as perf_counter
    has it. Read-only, as a follower of its own would look for the runs."""
    words = ["watch", "--db", str(db), "--readonly"]
    began = time.perf_counter()
    start = ["-m", "orchestrator.cli"] if notes is None else ["-c", _IMPORTED, str(notes)]
    with _at_terminal([*start, *words]) as (leader, pid):
        yield Watching(leader, pid, began=began)


@contextmanager
def _at_terminal(words: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Python with these words in a pseudo-terminal of its own: its other end, and the process."""
    pid, leader = pty.fork()
    if pid == 0:  # the other process
        width, height = SIZE
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        env = {name: text for name, text in os.environ.items() if name not in ("COLUMNS", "LINES")}
        env |= {"TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
        os.execvpe(sys.executable, [sys.executable, *words], env)
    try:
        yield leader, pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(leader)
