"""logs/<run>/<attempt>/ beside runs.db: stdout and stderr of a run, byte for byte.

The follower puts bytes at an offset it keeps in the database, so a repeated write changes nothing.
What is read has stars in the place of every secret that the reader knows by value; its length and all offsets stay.
Cleaning for people (UTF-8, carriage returns, escapes) is done where they are shown.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from orchestrator.store.faults import told_plainly
from remote.hiding import spellings

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
        return _starred(content, secrets)[margin : margin + size]

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
