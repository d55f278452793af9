"""The seam to a machine: six calls that every transport answers alike.

`local` runs here, `ssh` over fabric, and a hop (a row: the prefix that enters) inside another machine.
A command is an argv, never a joined string. Whoever holds a Shell does not know which it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Completed:
    exit_code: int  # of the command itself; a transport that fails raises HostError instead
    stdout: bytes
    stderr: bytes


@dataclass(frozen=True)
class Stat:
    size_bytes: int
    inode: int
    mode: int
    modified_s: float
    is_dir: bool
    is_link: bool


class Shell(Protocol):
    """Paths on the host are absolute POSIX strings. Every wait has a deadline; HostError on loss."""

    def run(self, argv: list[str], *, stdin: bytes = b"", timeout_s: float = 60.0) -> Completed: ...

    def spawn(self, argv: list[str], *, cwd: str) -> None:
        """Starts a process in its own session, all streams closed; it outlives the connection."""
        ...

    def put(self, local: Path, remote: str, *, mode: int = 0o644) -> None:
        """One file; appears whole (written aside, checked, renamed), and goes on where an interrupted put stopped."""
        ...

    def get(self, remote: str, local: Path) -> None:
        """One file; continues a partial copy left by an earlier, interrupted get."""
        ...

    def read_range(self, remote: str, offset: int, size: int) -> bytes:
        """At most `size` bytes from `offset`; empty at or past the end. FileNotFoundError when absent."""
        ...

    def stat(self, remote: str) -> Stat | None: ...

    def close(self) -> None: ...
