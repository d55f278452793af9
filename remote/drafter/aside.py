"""Folders that are made, replaced or deleted beside their place, under a hidden name that says which process does it.

    .step-00000400.<pid>-<start ticks>-<boot>.tmp    half made, or half deleted
    .step-00000400.<pid>-<start ticks>-<boot>.old    what stood there, while the new one takes its name

It does not decide what a leftover is worth.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from remote.processes import Identity

# A bare pid was written by an older release; it names no process.
_LEFT = re.compile(r"\.(?P<name>[^.]+)\.(?P<owner>(?P<pid>\d+)[-\da-f]*)\.(?P<end>tmp|old)")


@dataclass(frozen=True)
class Leftover:
    """What a process that is gone left beside `folder`."""

    path: Path
    folder: Path
    was_moved: bool  # a whole folder moved aside, not one half made


def beside(folder: Path, end: str = "tmp") -> Path:
    """The hidden name under which this process works at `folder`."""
    return folder.with_name(f".{folder.name}.{_owner(os.getpid())}.{end}")


def leftovers(parent: Path) -> Iterator[Leftover]:
    """Of all folders in `parent`."""
    for path in list(parent.glob(".*")):
        parts = _LEFT.fullmatch(path.name)
        if parts is not None and _owner(int(parts["pid"])) != parts["owner"]:
            yield Leftover(path, parent / parts["name"], parts["end"] == "old")


def swap(made: Path, folder: Path) -> None:
    """Renames `made` to `folder`; what stood there goes, or stands there again when the system refuses."""
    old = beside(folder, "old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    try:
        made.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Its names are on the disk after this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _owner(pid: int) -> str | None:
    """A live process and no other: a container that starts again gives its pids out again. None: it is gone."""
    found = Identity.of(pid)
    return f"{pid}-{found.start_ticks}-{found.boot_id[:8]}" if found is not None and found.is_alive else None
