"""Bytes of a run's files on its host, brought into the store: whole events once, logs byte for byte.

Every read starts at the offset the store last committed, so whoever dies in between loses nothing and
doubles nothing. A torn last line waits. The byte before the offset must still be the end of a line:
a file that was truncated, rewritten or rotated is noticed and read again from its start, and the
stream's last seq sorts out what is known already. It decides no state.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from orchestrator.shell import Shell
from orchestrator.store.event_rows import MAX_EXCERPT, BadLine
from orchestrator.store.ingest import StreamBatch
from orchestrator.store.logs import STREAMS, name_of_log
from orchestrator.store.position import StreamPosition
from orchestrator.store.writes import Store
from remote.rundir import writer_of
from remote.wire import Event, WireError, WireVersionError, decode

CHUNK_BYTES = 4 * 1024 * 1024  # one read, one transaction
LONGEST_LINE_BYTES = 64 * 1024 * 1024  # a longer one is given up as a bad line
LOG_BYTES_PER_PASS = 16 * 1024 * 1024  # so that a flood of output never holds up the numbers

OVERLAP_BYTES = 64  # of a log, read again to see that it is the same file still

_LOG_SUFFIX = re.compile(r"([.-][A-Za-z0-9._-]+)?")  # of one that was rotated away: `.1`, `-20261130`


class RemoteFile(Protocol):
    """One file of an attempt, as the host lists it."""

    @property
    def name(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def inode(self) -> int: ...


@dataclass(frozen=True)
class AttemptPlace:
    """Where one attempt's files lie on its host, and under which names they are stored."""

    run_id: str
    attempt: int
    folder: str  # absolute path on the host
    clock_offset_s: float = 0.0  # the host's clock minus this machine's
    node: int = 0  # of a run over several hosts: of whose outputs these are


@dataclass(frozen=True)
class Caught:
    """What one pass brought."""

    num_events: int = 0
    num_log_bytes: int = 0
    kinds: frozenset[str] = frozenset()
    is_complete: bool = True  # every listed byte has been read, nothing is in doubt

    def __add__(self, other: Caught) -> Caught:
        return Caught(
            self.num_events + other.num_events,
            self.num_log_bytes + other.num_log_bytes,
            self.kinds | other.kinds,
            self.is_complete and other.is_complete,
        )


class Doubts(dict[tuple[str, int, str], tuple[int, int]]):
    """Stretches of records that seem to be missing, by run, attempt and writer, as the last look found them.

    A file may be rotated between its listing and its reading. So a stretch counts as lost only when two
    looks in a row, each with its own listing, miss the same one.
    """

    def confirm(self, key: tuple[str, int, str], missing: tuple[int, int]) -> bool:
        if self.get(key) == missing:
            return True
        self[key] = missing
        return False


def catch_up(
    store: Store,
    shell: Shell,
    place: AttemptPlace,
    files: Collection[RemoteFile],
    doubts: Doubts,
    *,
    log_bytes: int = LOG_BYTES_PER_PASS,
) -> Caught:
    """Brings in everything the listed files hold beyond what is stored: events first, then logs up to `log_bytes` each."""
    caught = Caught()
    reader = _EventReader(store, shell, place, doubts)
    for writer, own in _by_writer(files).items():
        caught += reader.catch_up(writer, own)
    for stream in STREAMS:
        whole = f"{stream}.log"
        own = [file for file in files if file.name.startswith(whole) and _LOG_SUFFIX.fullmatch(file.name, len(whole))]
        caught += _catch_up_log(store, shell, place, stream, own, log_bytes)
    return caught


def torn_bytes(store: Store, place: AttemptPlace, files: Collection[RemoteFile]) -> dict[str, int]:
    """Writer -> bytes after its last whole record. Of a run that has ended, they are all that will ever come."""
    found = {}
    for file in files:
        writer, is_rotated = writer_of(file.name) or ("", True)
        if is_rotated:
            continue
        position = store.position(place.run_id, place.attempt, writer)
        is_read = position.identity == str(file.inode) and position.stopped_because is None
        rest = file.size_bytes - position.offset_bytes if is_read else 0
        if rest > 0:
            found[writer] = rest
    return found


def unread_names(files: Collection[RemoteFile]) -> list[str]:
    """Names like that of an events file, of which nothing is read: no Reporter takes such a writer."""
    return sorted(file.name for file in files if file.name.startswith("events.") and writer_of(file.name) is None)


# -------------------------------------------------------------------------------------- events


def _by_writer(files: Collection[RemoteFile]) -> dict[str, list[RemoteFile]]:
    """The supervisor's file last: its word that the job has ended never comes before the job's own last words."""
    found: dict[str, list[RemoteFile]] = {}
    for file in sorted(files, key=lambda file: (file.name.startswith("events.supervisor"), file.name)):
        named = writer_of(file.name)
        if named is not None:
            found.setdefault(named[0], []).append(file)
    return found


@dataclass(frozen=True)
class _EventReader:
    store: Store
    shell: Shell
    place: AttemptPlace
    doubts: Doubts

    def catch_up(self, writer: str, files: Sequence[RemoteFile]) -> Caught:
        place = self.place
        position = self.store.position(place.run_id, place.attempt, writer)
        caught = Caught()
        for file in _unread(self.shell, place, files, position, f"events.{writer}.jsonl"):
            reading = _Reading(self.shell, f"{place.folder}/{file.name}", file, position)
            for found in reading.pieces():
                missing = found.missing_after(position.last_seq)
                if missing is not None and not self.doubts.confirm((place.run_id, place.attempt, writer), missing):
                    return caught + Caught(is_complete=False)
                batch = found.batch(place, writer)
                told = self.store.ingest(batch)
                caught += Caught(told.num_events, kinds=told.kinds)
                position = _after(position, batch)
            if reading.is_stopped:
                break
        return caught


def _after(position: StreamPosition, batch: StreamBatch) -> StreamPosition:
    newest = max((event.seq for event in batch.events), default=0)
    return replace(
        position,
        identity=batch.identity,
        offset_bytes=batch.offset_bytes,
        last_seq=max(position.last_seq, newest),
        stopped_because=batch.stopped_because,
    )


def _unread(
    shell: Shell, place: AttemptPlace, files: Sequence[RemoteFile], position: StreamPosition, current: str
) -> list[RemoteFile]:
    """The files to read, oldest first: the current one, and before it what was rotated away since the last read."""
    if len(files) == 1:
        return list(files)
    known = [file for file in files if str(file.inode) == position.identity]
    if known and known[0].name == current:
        return known
    ordered = sorted(files, key=lambda file: (file.name == current, _first_seq(shell, f"{place.folder}/{file.name}")))
    return ordered[ordered.index(known[0]) :] if known else ordered


def _first_seq(shell: Shell, path: str) -> int:
    head = _read(shell, path, 0, 64 * 1024)
    try:
        return decode(head.partition(b"\n")[0]).seq
    except WireError:
        return 0


def _read(shell: Shell, path: str, offset: int, size: int) -> bytes:
    try:
        return shell.read_range(path, offset, size)
    except FileNotFoundError:  # rotated away since it was listed; the next pass sees where it went
        return b""


class _Reading:
    """One events file from its stored offset to the size it was listed with."""

    def __init__(self, shell: Shell, path: str, file: RemoteFile, position: StreamPosition) -> None:
        self._shell, self._path = shell, path
        self._identity = str(file.inode)
        self._size = file.size_bytes
        self._last_seq = position.last_seq
        self._told_stop = position.stopped_because
        is_known = position.identity == self._identity and position.offset_bytes <= file.size_bytes
        self._offset = position.offset_bytes if is_known else 0
        self._counted_to = self._offset  # bad lines before it have been counted
        self._may_start_over = self._offset > 0
        self.is_stopped = False

    def pieces(self) -> Iterator[_Piece]:
        """Whole lines, one piece per read. The file may have grown meanwhile: the next pass sees that."""
        while self._offset < self._size and not self.is_stopped:
            lines = self._lines()
            if lines is None:
                return
            found = _decode(lines, self._offset, self._counted_to)
            if found.missing_after(self._last_seq) is not None and self._start_over():
                continue
            self.is_stopped = found.stopped_because is not None
            if self.is_stopped and found.stopped_because == self._told_stop and not found.events:
                return
            self._offset = found.end_bytes
            self._last_seq = max((self._last_seq, *(event.seq for event in found.events)))
            yield replace(found, identity=self._identity)

    def _start_over(self) -> bool:
        """Reads the whole file again, once: what lies before the offset is not what was read there."""
        if not self._may_start_over:
            return False
        self._offset, self._may_start_over = 0, False
        return True

    def _lines(self) -> bytes | None:
        """Whole lines from the offset on; None when there is none yet."""
        before = 1 if self._offset else 0
        size = CHUNK_BYTES
        while True:
            chunk = _read(self._shell, self._path, self._offset - before, size + before)
            if before and not chunk.startswith(b"\n") and self._start_over():
                before = 0
                continue
            body = chunk[before:]
            end = body.rfind(b"\n") + 1
            if end:
                return body[:end]
            if len(body) < size:
                return None  # a torn last line waits
            if size >= LONGEST_LINE_BYTES:
                return body
            size *= 4


@dataclass(frozen=True)
class _Piece:
    """What whole lines from one read say."""

    events: list[Event]
    bad_lines: list[BadLine]
    end_bytes: int  # where the next read starts: after them, or at the line where the stream stops
    stopped_because: str | None = None
    identity: str = ""

    def missing_after(self, last_seq: int) -> tuple[int, int] | None:
        """The records between `last_seq` and the first one here, when there are any."""
        if not self.events or self.events[0].seq <= last_seq + 1:
            return None
        return last_seq + 1, self.events[0].seq - 1

    def batch(self, place: AttemptPlace, writer: str) -> StreamBatch:
        return StreamBatch(
            place.run_id,
            place.attempt,
            writer,
            self.events,
            self.end_bytes,
            self.identity,
            self.bad_lines,
            self.stopped_because,
            place.clock_offset_s,
        )


def _decode(lines: bytes, offset: int, counted_to: int) -> _Piece:
    """Events of whole lines that begin at `offset`; bad lines before `counted_to` have been counted earlier."""
    events: list[Event] = []
    bad: list[BadLine] = []
    at = offset
    for line in lines.splitlines(keepends=True):
        try:
            events.append(_salvage(line))
        except WireVersionError as error:
            return _Piece(events, bad, at, str(error))
        except WireError as error:
            if line.strip() and at >= counted_to:
                bad.append(BadLine(at, str(error), line[:MAX_EXCERPT].decode("utf-8", "replace")))
        at += len(line)
    return _Piece(events, bad, at)


def _salvage(line: bytes) -> Event:
    """The event of a line; also of one that was glued to a torn line before it."""
    try:
        return decode(line)
    except WireVersionError:
        raise
    except WireError:
        start = line.rfind(b'{"v":')
        if start <= 0:
            raise
        return decode(line[start:])


# ---------------------------------------------------------------------------------------- logs


def _catch_up_log(
    store: Store, shell: Shell, place: AttemptPlace, stream: str, files: Sequence[RemoteFile], limit: int
) -> Caught:
    current, stream = f"{stream}.log", name_of_log(stream, place.node)
    position = store.position(place.run_id, place.attempt, stream)
    brought, is_complete = 0, True
    for file in _unread_logs(files, position, current):
        if str(file.inode) != position.identity or file.size_bytes < position.offset_bytes:
            position = replace(position, identity=str(file.inode), offset_bytes=0)
        while position.offset_bytes < file.size_bytes:
            size = min(CHUNK_BYTES, file.size_bytes - position.offset_bytes, limit - brought)
            content = _next_of_log(store, shell, place, (stream, file.name), position, size) if size > 0 else b""
            if content is None:
                position = replace(position, offset_bytes=0)
                continue
            if not content:
                is_complete = is_complete and size > 0
                break
            position = store.keep_log(place.run_id, place.attempt, stream, content=content, read_from=position)
            brought += len(content)
    return Caught(num_log_bytes=brought, is_complete=is_complete)


def _next_of_log(
    store: Store, shell: Shell, place: AttemptPlace, names: tuple[str, str], position: StreamPosition, size: int
) -> bytes | None:
    """The next bytes; None where what lies before them is not what was kept: the file was truncated and written anew."""
    stream, name = names
    overlap = min(OVERLAP_BYTES, position.offset_bytes)
    kept = store.logs.read(
        place.run_id, place.attempt, stream, offset=max(0, position.kept_bytes - overlap), size=overlap
    )
    found = _read(shell, f"{place.folder}/{name}", position.offset_bytes - overlap, overlap + size)
    is_anew = found and len(kept) == overlap and found[:overlap] != kept  # what was kept may have been taken away here
    return None if is_anew else found[overlap:]


def _unread_logs(files: Sequence[RemoteFile], position: StreamPosition, current: str) -> list[RemoteFile]:
    """What is left of the file last read, wherever it was moved, then the current one."""
    known = [file for file in files if str(file.inode) == position.identity and file.name != current]
    return known + [file for file in files if file.name == current]
