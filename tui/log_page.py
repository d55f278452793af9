"""A piece of a log, read by byte range: a file of five gigabytes opens as fast as one of five lines.

At most PAGE_BYTES are held, wherever in the file they lie. A piece begins and ends at line ends,
unless one line is longer than the piece. Searching goes through the file in blocks and keeps none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.actions.log_text import LogLine, cut_to_lines, shown_lines
from orchestrator.store.logs import STREAMS
from orchestrator.store.reads import Reader
from orchestrator.store.rows import RunRow
from tui.searcher import Searcher, finder, first_of, last_of

PAGE_BYTES = 128 * 1024
FEW_LINES = 60  # fewer would not fill a screen
LONGEST_LINE_BYTES = 8 * 1024 * 1024  # a longer one is shown from here on
BLOCK_BYTES = 1024 * 1024
LONGEST_SEARCH_BYTES = 64 * 1024 * 1024  # of one step of a search; the next step goes on from there


@dataclass(frozen=True)
class LogAsk:
    """Which piece: one that ends at `end` (None: the newest), or one that begins at `start`."""

    stream: str = "stdout"
    attempt: int | None = None  # None: the newest
    start: int | None = None
    end: int | None = None


@dataclass(frozen=True)
class LogPage:
    run_id: str
    attempt: int
    stream: str
    start: int  # bytes of the file
    end: int
    size: int
    lines: tuple[LogLine, ...]
    other_size: int  # of the other stream

    @property
    def is_at_end(self) -> bool:
        return self.end >= self.size


@dataclass(frozen=True)
class Found:
    """Where a search stands: the line's first byte, or how far it has come."""

    at: int | None
    searched_to: int
    is_done: bool


def read_log(reader: Reader, run: RunRow, ask: LogAsk) -> LogPage:
    attempt = ask.attempt or max(run.attempt, 1)
    size = reader.logs.size_bytes(run.id, attempt, ask.stream)
    other = next(stream for stream in STREAMS if stream != ask.stream)
    if ask.start is not None:
        start = min(ask.start, size)
        raw = reader.logs.read(run.id, attempt, ask.stream, offset=start, size=PAGE_BYTES)
        newline = raw.rfind(b"\n")
        if start + len(raw) < size and newline >= 0:
            raw = raw[: newline + 1]
    else:
        end = size if ask.end is None else min(ask.end, size)
        raw, start = _ending_at(reader, (run.id, attempt, ask.stream), end)
    return LogPage(
        run_id=run.id,
        attempt=attempt,
        stream=ask.stream,
        start=start,
        end=start + len(raw),
        size=size,
        lines=tuple(shown_lines(raw, start)),
        other_size=reader.logs.size_bytes(run.id, attempt, other),
    )


def _ending_at(reader: Reader, log: tuple[str, int, str], end: int) -> tuple[bytes, int]:
    """The piece before `end`. Where few lines fill it, it goes back to the beginning of the long one."""
    start = max(0, end - PAGE_BYTES)
    raw, cut = cut_to_lines(reader.logs.read(*log, offset=start, size=end - start), start, at_file_start=start == 0)
    if start == 0 or raw.count(b"\n") >= FEW_LINES:
        return raw, cut
    while start > max(0, end - LONGEST_LINE_BYTES):
        before = max(0, start - BLOCK_BYTES)
        newline = reader.logs.read(*log, offset=before, size=start - before).rfind(b"\n")
        if newline >= 0:
            start = before + newline + 1
            break
        start = before
    return reader.logs.read(*log, offset=start, size=end - start), start


def search_log(
    reader: Reader,
    page: LogPage,
    pattern: str,
    *,
    after: int,
    backwards: bool = False,
    searcher: Searcher | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> Found:
    """The next line that holds the pattern (a regular expression, any case), beginning at byte `after`.

    One call reads at most LONGEST_SEARCH_BYTES, so that a search can be given up between calls. With a `searcher` it is tried
    there, and TooSlow raised where it does not end. `is_wanted` is asked before each block: one that is not ends where it is.
    Raises UsageError for what is no regular expression, DraftyardError where the searcher cannot answer.
    """
    find = finder(pattern)

    def place(block: bytes) -> int | None:
        if searcher is not None:
            return searcher.place(pattern, block, is_last=backwards, is_wanted=is_wanted)
        return last_of(find, block) if backwards else first_of(find, block)

    search = _search_back if backwards else _search_on
    return search(reader, page, place, after, is_wanted)


def _search_on(
    reader: Reader, page: LogPage, place: Callable[[bytes], int | None], after: int, is_wanted: Callable[[], bool]
) -> Found:
    offset, stop = after, after + LONGEST_SEARCH_BYTES
    size = reader.logs.size_bytes(page.run_id, page.attempt, page.stream)
    while offset < min(size, stop) and is_wanted():
        block = reader.logs.read(page.run_id, page.attempt, page.stream, offset=offset, size=BLOCK_BYTES)
        whole = block[: block.rfind(b"\n") + 1] or block
        at = place(whole)
        if at is not None:
            return Found(offset + whole.rfind(b"\n", 0, at) + 1, offset, True)
        offset += len(whole) or BLOCK_BYTES
    return Found(None, offset, offset >= size)


def _search_back(
    reader: Reader, page: LogPage, place: Callable[[bytes], int | None], before: int, is_wanted: Callable[[], bool]
) -> Found:
    end, stop = before, max(0, before - LONGEST_SEARCH_BYTES)
    while end > stop and is_wanted():
        start = max(0, end - BLOCK_BYTES)
        block = reader.logs.read(page.run_id, page.attempt, page.stream, offset=start, size=end - start)
        block, start = cut_to_lines(block, start, at_file_start=start == 0)
        at = place(block)
        if at is not None:
            return Found(start + block.rfind(b"\n", 0, at) + 1, start, True)
        end = start if start < end else max(0, end - BLOCK_BYTES)
    return Found(None, end, end == 0)
