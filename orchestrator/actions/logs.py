"""A run's output as the store has it: cleaned lines, raw bytes, or a tail that goes on. Contacts nothing."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.actions.history import find, open_reader
from orchestrator.actions.log_text import clean_lines, clean_texts, cut_to_lines
from orchestrator.actions.places import Places
from orchestrator.errors import UsageError
from orchestrator.redact import redact_lines
from orchestrator.store.logs import STREAMS, LogFolder, name_of_log
from orchestrator.store.reads import Reader
from orchestrator.store.rows import RunRow

__all__ = [
    "STREAMS",
    "Passage",
    "Tail",
    "Wish",
    "are_told_apart",
    "find",
    "outputs",
    "passages",
    "raw",
    "silent_attempt",
    "titled",
]

CHUNK_BYTES = 1024 * 1024
LONGEST_TORN_BYTES = 8 * CHUNK_BYTES  # a line longer than this (a bar that never ends its line) is given in parts
TAIL_BYTES_PER_LINE = 2_000  # how far back to look for the newest N lines
# What is looked at in one piece; beyond it all lines are read, and the newest kept.
LONGEST_REACH_BYTES = 64 * CHUNK_BYTES

_RANK = re.compile(r"^\[?(?:rank|default)\s?(\d+)\]?[:\s]")


@dataclass(frozen=True)
class Wish:
    """Which part of the output is wanted."""

    streams: tuple[str, ...] = STREAMS
    attempt: int | None = None  # None: the newest
    last: int | None = None  # lines
    since_s: float | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Passage:
    """Neighbouring lines of one output, cleaned and without secrets: a megabyte of them at a time."""

    stream: str
    attempt: int
    texts: list[str]


def passages(places: Places, selector: str, wish: Wish) -> Iterator[Passage]:
    """Stdout, then stderr; of each the newest `last` lines where that is wished."""
    with open_reader(places) as reader:
        run = reader.run(selector)
        attempt = _attempt(reader, run, wish)
        for stream in wish.streams:
            begin, end = _span(reader, run, attempt, stream, wish)
            found = _Output(reader.logs, run.id, attempt, stream, begin).passages(wish.rank, end=end, is_last=True)
            yield from found if wish.last is None else _newest(found, wish.last)


def are_told_apart(places: Places, run: RunRow, wish: Wish) -> bool:
    """Whether more than stdout is wished for, and there."""
    with open_reader(places) as reader:
        attempt = wish.attempt or run.attempt
        further = [stream for stream in wish.streams if stream != "stdout"]
        return len(wish.streams) > 1 and any(reader.logs.size_bytes(run.id, attempt, stream) for stream in further)


def outputs(run: RunRow, wanted: Sequence[str], host: str | None = None) -> tuple[str, ...]:
    """The names under which a run's outputs are kept: of each of its hosts, or of one. UsageError where it has no such."""
    if host is not None and host not in run.hosts:
        raise UsageError(f"run {run.id} is not on host {host}; it is on {' and '.join(run.hosts)}")
    numbers = [number for number, name in enumerate(run.hosts) if host in (None, name)]
    return tuple(name_of_log(stream, number) for number in numbers for stream in wanted)


def titled(run: RunRow, output: str) -> str:
    """`stderr`, or where a run has several hosts `stderr on gpu2`."""
    stream, _, number = output.partition(".")
    return f"{stream} on {run.hosts[int(number or 0)]}" if run.more_hosts else stream


def _newest(found: Iterator[Passage], last: int) -> Iterator[Passage]:
    kept: deque[str] = deque(maxlen=last)
    passage = None
    for passage in found:
        kept.extend(passage.texts)
    if passage is not None and kept:
        yield Passage(passage.stream, passage.attempt, list(kept))


def raw(places: Places, selector: str, wish: Wish) -> Iterator[bytes]:
    """The bytes as the job wrote them, stdout, then stderr."""
    with open_reader(places) as reader:
        run = reader.run(selector)
        attempt = _attempt(reader, run, wish)
        for stream in wish.streams:
            offset = _since(reader, run, attempt, stream, wish)
            while chunk := reader.logs.read(run.id, attempt, stream, offset=offset, size=CHUNK_BYTES):
                yield chunk
                offset += len(chunk)


def silent_attempt(places: Places, selector: str, wish: Wish) -> int | None:
    """The attempt that is wished for, where nothing of the outputs wished for has come; 0 before there is any."""
    with open_reader(places) as reader:
        run = reader.run(selector)
        return _silent(reader, run, _attempt(reader, run, wish), wish)


def _silent(reader: Reader, run: RunRow, attempt: int, wish: Wish) -> int | None:
    return None if any(reader.logs.size_bytes(run.id, attempt, stream) for stream in wish.streams) else attempt


class Tail:
    """The output from some place on, asked again and again; whole lines only, until the last time."""

    def __init__(self, places: Places, run_id: str, wish: Wish) -> None:
        self._reader = open_reader(places)
        self._run_id = run_id
        self._wish = wish
        self._outputs: dict[tuple[int, str], _Output] = {}

    def __enter__(self) -> Tail:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def run(self) -> RunRow:
        return self._reader.run(self._run_id)

    def silent_attempt(self, run: RunRow) -> int | None:
        """As the function of that name."""
        return _silent(self._reader, run, self._wish.attempt or run.attempt, self._wish)

    def passages(self, *, is_last: bool) -> Iterator[Passage]:
        """What has come since the last call; the torn end of a line only when nothing more will come."""
        run = self.run()
        attempt = self._wish.attempt or run.attempt
        for stream in self._wish.streams if attempt else ():
            last, output = None, self._outputs.get((attempt, stream))
            if output is None:
                begin = _span(self._reader, run, attempt, stream, self._wish)[0]
                last, output = self._wish.last, _Output(self._reader.logs, run.id, attempt, stream, begin)
                self._outputs[attempt, stream] = output
            found = output.passages(self._wish.rank, is_last=is_last)
            yield from found if last is None else _newest(found, last)


class _Output:
    """One output of one attempt, read on and on from a byte where a line begins."""

    def __init__(self, logs: LogFolder, run_id: str, attempt: int, stream: str, begin: int) -> None:
        self._logs, self._name = logs, (run_id, attempt, stream)
        self._offset, self._torn = begin, b""

    def passages(self, rank: int | None, *, end: int | None = None, is_last: bool) -> Iterator[Passage]:
        """All that is there now (up to byte `end`), so that a log of gigabytes needs no gigabytes here."""
        for whole in self._whole_lines(end, is_last=is_last):
            texts = [text for text in redact_lines(clean_texts(whole)) if _is_of_rank(text, rank)]
            if texts:
                yield Passage(self._name[2], self._name[1], texts)

    def _whole_lines(self, end: int | None, *, is_last: bool) -> Iterator[bytes]:
        while True:
            size = CHUNK_BYTES if end is None else min(CHUNK_BYTES, end - self._offset)
            chunk = self._logs.read(*self._name, offset=self._offset, size=size) if size > 0 else b""
            if not chunk:
                break
            self._offset += len(chunk)
            content = self._torn + chunk
            cut = _cut(content)
            self._torn = content[cut:]
            yield content[:cut]
        if is_last:
            torn, self._torn = self._torn, b""
            yield torn


def _cut(content: bytes) -> int:
    """Where its whole lines end; in a line that is too long to wait for, where its newest state begins."""
    cut = content.rfind(b"\n") + 1
    if len(content) - cut <= LONGEST_TORN_BYTES:
        return cut
    return content.rfind(b"\r") if content.rfind(b"\r") > cut else len(content)


def _attempt(reader: Reader, run: RunRow, wish: Wish) -> int:
    known = [row.number for row in reader.attempts(run.id)]
    if wish.attempt is not None and wish.attempt not in known:
        raise UsageError(
            f"run {run.id} has no attempt {wish.attempt}; it has {', '.join(map(str, known)) or 'none yet'}"
        )
    return wish.attempt or run.attempt


def _span(reader: Reader, run: RunRow, attempt: int, stream: str, wish: Wish) -> tuple[int, int]:
    """Bytes that hold everything wished for, beginning at a line."""
    begin, end = _since(reader, run, attempt, stream, wish), reader.logs.size_bytes(run.id, attempt, stream)
    if wish.last is None or wish.rank is not None:
        return begin, end
    reach = TAIL_BYTES_PER_LINE
    while reach <= LONGEST_REACH_BYTES:
        start = max(begin, end - reach)
        content = reader.logs.read(run.id, attempt, stream, offset=start, size=end - start)
        content, start = cut_to_lines(content, start, at_file_start=start == begin)
        found = clean_lines(content, start)
        if len(found) >= wish.last or start <= begin:
            return (found[-wish.last].start if 0 < wish.last <= len(found) else begin if wish.last else end), end
        reach *= 4
    return begin, end


def _since(reader: Reader, run: RunRow, attempt: int, stream: str, wish: Wish) -> int:
    return 0 if wish.since_s is None else reader.log_offset(run.id, attempt, stream, since_s=wish.since_s)


def _is_of_rank(text: str, rank: int | None) -> bool:
    if rank is None:
        return True
    found = _RANK.match(text)
    return found is not None and int(found[1]) == rank
