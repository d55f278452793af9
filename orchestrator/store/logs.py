"""logs/<run>/<attempt>/ beside runs.db: stdout and stderr of a run, byte for byte.

The follower puts bytes at an offset it keeps in the database, so a repeated write changes nothing.
What is read has stars in the place of every secret that the reader knows by value, and of what its host told to be one
(hidden.json beside the logs: places, no values); its length and all offsets stay.
Cleaning for people (UTF-8, carriage returns, escapes) is done where they are shown.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from orchestrator.store.faults import told_plainly
from remote.hiding import MOST_SPANS, spellings
from remote.rundir import read_json, write_json

STREAMS = ("stdout", "stderr")


def name_of_log(stream: str, node: int) -> str:
    """Under which name an output is kept: `stdout`, of a run's further hosts `stdout.1`, ..."""
    return f"{stream}.{node}" if node else stream


@dataclass(frozen=True)
class LogFolder:
    root: Path
    secrets_of: Callable[[str], Collection[str]] = lambda run_id: ()  # run id -> values that nobody is shown

    def path(self, run_id: str, attempt: int, stream: str) -> Path:
        return self.root / run_id / str(attempt) / f"{stream}.log"

    def size_bytes(self, run_id: str, attempt: int, stream: str) -> int:
        """0 when nothing has arrived yet."""
        try:
            return self.path(run_id, attempt, stream).stat().st_size
        except FileNotFoundError:
            return 0

    def read(self, run_id: str, attempt: int, stream: str, *, offset: int, size: int) -> bytes:
        """At most `size` bytes from `offset`; empty at or past the end, or when nothing has arrived."""
        secrets = _spelled(frozenset(self.secrets_of(run_id)))
        margin = min(offset, len(secrets[0]) - 1) if secrets else 0  # a secret may begin before, or end behind
        path = self.path(run_id, attempt, stream)
        with told_plainly(path):
            try:
                with path.open("rb") as log:
                    log.seek(offset - margin)
                    content = log.read(margin + size + (len(secrets[0]) - 1 if secrets else 0))
            except FileNotFoundError:
                return b""
        hidden = bytearray(_starred(content, secrets)[margin : margin + size])
        for begin, end in self._unknown(path, stream, secrets, offset, offset + len(hidden)):
            inside = slice(max(begin - offset, 0), min(end - offset, len(hidden)))
            hidden[inside] = re.sub(rb"[^\n]", b"*", hidden[inside])  # of many places at once, line by line
        return bytes(hidden)

    def hide(self, run_id: str, attempt: int, places: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Keeps where the attempt's host found secrets, by stream as `remote.hiding.spans_in` tells it; anew for each stream."""
        path = self._hidden(self.path(run_id, attempt, ""))
        kept = read_json(path) or {}
        new = {**kept, **places}
        new = {stream: [list(span) for span in spans] for stream, spans in new.items() if spans}
        if new != kept:
            write_json(path, new, mode=0o600)

    def places(self, run_id: str, attempt: int) -> dict[str, list[list[int]]]:
        """What was kept so."""
        return read_json(self._hidden(self.path(run_id, attempt, ""))) or {}

    def _hidden(self, log: Path) -> Path:
        return log.with_name("hidden.json")

    def _unknown(
        self, log: Path, stream: str, secrets: Sequence[bytes], first: int, last: int
    ) -> list[tuple[int, int]]:
        """What its host told of these bytes and the reader does not know by value. Rises by the first byte."""
        spans = _places(self._hidden(log), stream)
        found = []
        for number, (begin, end) in enumerate(spans):
            is_here = begin < last and end > first
            is_of_many = number == 0 and len(spans) > MOST_SPANS
            if is_here and (is_of_many or not _begins_known(log, begin, secrets)):
                found.append((begin, end))
        return found

    def write(self, run_id: str, attempt: int, stream: str, *, offset: int, content: bytes) -> None:
        """Puts bytes at `offset` and ends the file there: what lay behind came from a write that never counted."""
        path = self.path(run_id, attempt, stream)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            written = 0
            while written < len(content):
                written += os.pwrite(descriptor, content[written:], offset + written)
            os.ftruncate(descriptor, offset + len(content))
        finally:
            os.close(descriptor)

    def forget(self, run_id: str) -> None:
        shutil.rmtree(self.root / run_id, ignore_errors=True)


def _places(path: Path, stream: str) -> tuple[tuple[int, int], ...]:
    try:
        changed_ns = path.stat().st_mtime_ns
    except OSError:
        return ()
    return _places_of(path, stream, changed_ns)


@lru_cache(maxsize=16)  # a log is read in many pieces
def _places_of(path: Path, stream: str, _changed_ns: int) -> tuple[tuple[int, int], ...]:
    return tuple((begin, end) for begin, end in (read_json(path) or {}).get(stream, ()))


def _begins_known(log: Path, begin: int, secrets: Sequence[bytes]) -> bool:
    if not secrets:
        return False
    with log.open("rb") as stream:
        stream.seek(begin)
        return stream.read(len(secrets[0])).startswith(tuple(secrets))


@lru_cache(maxsize=16)  # a log is read in many pieces
def _spelled(values: frozenset[str]) -> tuple[bytes, ...]:
    """The longest first."""
    return tuple(spelled.encode() for spelled in spellings(values))


def _starred(content: bytes, secrets: tuple[bytes, ...]) -> bytes:
    """Most pieces hold no secret, which looking for each tells far sooner than the pattern of all."""
    here = [secret for secret in secrets if secret in content]
    if not here:
        return content
    return re.sub(b"|".join(map(re.escape, here)), lambda found: b"*" * len(found.group()), content)
