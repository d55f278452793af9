"""Files that a person names (recipes, hosts, settings, secrets, keys, scripts), read whole: regular files of sensible size.

The one way to read such a file: a pipe would be waited for, a device never ends, and a log named by mistake
fills the memory. What is refused is an OSError like any other that reading raises; its `strerror` says what
was seen and what was expected.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

LARGEST_BYTES = 4 * 1024**2

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def read_given(path: Path) -> bytes:
    """The file's bytes, links followed. Raises OSError, at once also for a pipe that nobody writes to."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'no file')}; a regular file was expected", str(path))
    with os.fdopen(descriptor, "rb") as stream:
        return read_bounded(stream, str(path))


def odd_kind(path: Path) -> str | None:
    """What a file that is no regular one is ("a pipe"), links followed and nothing opened; None where nobody can tell."""
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except (OSError, ValueError):
        return None
    return None if kind == stat.S_IFREG else _KINDS.get(kind, "no file")


def read_bounded(stream: BinaryIO, name: str) -> bytes:
    """All that comes; OSError where that is more than LARGEST_BYTES."""
    content = stream.read(LARGEST_BYTES + 1)
    if len(content) > LARGEST_BYTES:
        raise OSError(errno.EFBIG, f"it is larger than the {LARGEST_BYTES // 1024**2} MiB that are read of one", name)
    return content
