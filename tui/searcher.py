"""A pattern tried in a process of its own, with so much processor time and no more.

Python's engine holds every thread while it matches, and there are patterns, `(a+)+$` is one, that end no sooner than a line of forty
letters has been tried in all its parts. So what a person types is tried elsewhere, and the process that tries it ends by itself.
Plain words, which always end, are not sent there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from orchestrator.errors import DraftyardError, UsageError

LIMIT_S = 2.0  # of processor time, for a piece of a log; a pattern that ends takes some milliseconds
MARKING_S = 0.5  # for what is in sight
ENDS_S = 1.0  # between the last word of the process and its end
_SPECIAL = re.compile(r"[.^$*+?{}\[\]\\|()]")
_IS_BY_NUMBER = re.compile(
    r"\\[xuUN0-7]"
)  # a sign named by its number is a byte to a pattern of bytes, where it is known at all
Find = Callable[[bytes], Iterator[int]]
Span = tuple[int, int]


class TooSlow(UsageError):
    """A pattern that did not end in its time."""


class NoAnswer(DraftyardError):
    """The searching process could not be started, or ended by something else than its time."""


def _always() -> bool:
    return True


def is_plain(pattern: str) -> bool:
    """Words without a sign that means something else: they are found in one pass."""
    return not _SPECIAL.search(pattern)


def finder(pattern: str) -> Find:
    """Where a block matches, in bytes. Over the bytes themselves, which is fast; over text for letters that are several bytes.

    Raises UsageError for what is no regular expression.
    """
    flags = re.IGNORECASE | re.MULTILINE
    try:
        over_text = re.compile(pattern, flags)
        if pattern.isascii() and not _IS_BY_NUMBER.search(pattern):
            over_bytes = re.compile(pattern.encode(), flags)
            return lambda block: (match.start() for match in over_bytes.finditer(block))
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"not a regular expression: {error}") from error

    def find(block: bytes) -> Iterator[int]:
        text, place, done = block.decode(errors="surrogateescape"), 0, 0
        for match in over_text.finditer(text):
            place += len(text[done : match.start()].encode(errors="surrogateescape"))
            done = match.start()
            yield place

    return find


def first_of(find: Find, block: bytes) -> int | None:
    return next(find(block), None)


def last_of(find: Find, block: bytes) -> int | None:
    newest = deque(find(block), maxlen=1)
    return newest[0] if newest else None


def spans_of(pattern: str, texts: Sequence[str]) -> dict[str, list[Span]]:
    """What of each text matches, without those that match nothing or nowhere."""
    compiled = re.compile(pattern, re.IGNORECASE)
    found = {text: [match.span() for match in compiled.finditer(text) if match.group()] for text in texts}
    return {text: spans for text, spans in found.items() if spans}


class Searcher:
    """Asks the process; starts it when it is needed, and anew where a pattern or anything else has ended it. One question at a
    time. Its questions raise TooSlow and NoAnswer."""

    def __init__(self) -> None:
        self._is_closed = False
        self._child: subprocess.Popen[bytes] | None = None
        self._one_at_a_time = threading.Lock()

    def place(
        self, pattern: str, block: bytes, *, is_last: bool, is_wanted: Callable[[], bool] = _always
    ) -> int | None:
        """The first or the last byte of the block where it matches; None too where it is wanted no more when its turn comes."""
        asked = {"pattern": pattern, "is_last": is_last, "num_bytes": len(block), "limit_s": LIMIT_S}
        found: int | None = self._ask(asked, block, is_wanted)
        return found

    def spans(self, pattern: str, texts: Sequence[str]) -> Mapping[str, Sequence[Span]]:
        """`spans_of`."""
        found: list[list[list[int]]] = self._ask({"pattern": pattern, "texts": texts, "limit_s": MARKING_S})
        return {
            text: [(first, last) for first, last in spans] for text, spans in zip(texts, found, strict=True) if spans
        }

    def close(self) -> None:
        """For good. Does not wait for a question that is still asked."""
        self._is_closed = True
        self._end()

    def _end(self) -> tuple[int, str]:
        """Ends the process where there is one; its status and its last word."""
        child, self._child = self._child, None
        if child is None:
            return 0, ""
        child.kill()  # which does nothing to one that has ended
        status, told = child.wait(), b""
        with contextlib.suppress(OSError, ValueError):
            told = child.stderr.read() if child.stderr is not None else b""
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what it never read
                    pipe.close()
        return status, (told.decode(errors="replace").strip().splitlines() or [""])[-1]

    def _ask(self, asked: Mapping[str, object], block: bytes = b"", is_wanted: Callable[[], bool] = _always) -> Any:
        """A line of JSON and the bytes it announces; a line of JSON comes back, or nothing where its time was over."""
        with self._one_at_a_time:
            if not is_wanted():
                return None
            question, was_there = json.dumps(asked).encode() + b"\n" + block, self._child is not None
            line, status, told = self._answer(question)
            if not line and was_there and status != -signal.SIGVTALRM:  # it had been ended since it was asked last
                line, status, told = self._answer(question)
        if line:
            return json.loads(line)
        if status == -signal.SIGVTALRM:
            after = f"no end after {asked['limit_s']:g} s"
            raise TooSlow(f"the pattern takes too long: {after}; one without a repeat in a repeat ends")
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with exit status {status}"
        raise NoAnswer(f"the searching process ended {how}{told and f' ({told})'}; search again to start another")

    def _answer(self, question: bytes) -> tuple[bytes, int, str]:
        """A whole line; or none, how the process ended, and its last word."""
        if self._is_closed:
            raise NoAnswer("the log was left")
        child = self._child = self._child or _started()
        assert child.stdin is not None
        assert child.stdout is not None
        line = b""
        with contextlib.suppress(OSError, ValueError):  # it has ended, or was closed beside us
            child.stdin.write(question)
            child.stdin.flush()
            line = child.stdout.readline()
        if line.endswith(b"\n"):
            return line, 0, ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(ENDS_S)  # its own status, before it is killed
        return b"", *self._end()


def _started() -> subprocess.Popen[bytes]:
    """Of this very program, and of nothing that lies in the folder where it was called."""
    command = [sys.executable, "-P", "-m", "tui.searcher"]
    here, known = str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")
    path = f"{here}{os.pathsep}{known}" if known else here
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )
    except OSError as error:
        raise NoAnswer(f"the searching process cannot be started: {error}; search again, or for plain words") from error


def serve(asked: IO[bytes], told: IO[bytes]) -> None:
    """Answers until nobody asks any more. A question beyond its time ends the process: its timer is the system's."""
    find: tuple[str, Find] = ("", finder(""))
    while line := asked.readline():
        question = json.loads(line)
        pattern, block = question["pattern"], asked.read(question.get("num_bytes", 0))
        signal.setitimer(signal.ITIMER_VIRTUAL, question["limit_s"])
        if "texts" in question:
            found = spans_of(pattern, question["texts"])
            answer: object = [found.get(text, []) for text in question["texts"]]
        else:
            find = find if find[0] == pattern else (pattern, finder(pattern))
            answer = (last_of if question["is_last"] else first_of)(find[1], block)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        told.write(json.dumps(answer).encode() + b"\n")
        told.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
