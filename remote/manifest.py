"""What a tree is on a host: a manifest of paths that stay inside, and a marker that says it is whole.

A marker holds the manifest and the boot it was written in: after a reboot files that were renamed shortly before a
power cut may be empty, so a tree is believed only once it was checked again.

Standard library only; sent to the host together with receive.py.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import stat
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

MARKER = ".draftyard-tree.json"
PIECE_BYTES = 1024**2
MAX_LINKS = 40  # Linux follows no more for one path

Entry = list[Any]  # path, mode, size, sha256, link target or null


class Refused(Exception):
    """A manifest that no honest client sends, or content that is not what its name says."""


def check(entries: list[Entry]) -> None:
    """Refused unless every path stays inside the tree."""
    if not are_entries(entries):
        raise Refused("a manifest of no such kind")
    seen: set[str] = set()
    links = {path: link for path, *_, link in entries if link is not None}
    for path, _mode, _size, sha, link in entries:
        plain = PurePosixPath(path)
        leaves = not plain.parts or plain.is_absolute() or ".." in plain.parts
        if leaves or path != str(plain) or "\0" in path or path in seen or is_own(path):  # one spelling for one place
            raise Refused(f"path {path!r}")
        if link is not None and not link_stays_inside(path, links):
            raise Refused(f"link {path!r} -> {link!r}")
        if link is None and (len(sha) != 64 or set(sha) - set("0123456789abcdef")):
            raise Refused(f"hash {sha!r}")
        seen.add(path)
    for path in seen:
        if any(str(parent) in seen for parent in PurePosixPath(path).parents):
            raise Refused(f"path {path!r} lies under a file")


def are_entries(value: Any) -> bool:
    """Whether it has the shape of a manifest, with names that a file system takes; a job may have written over a marker."""
    try:
        for path, mode, size, sha, link in value:
            if [type(mode), type(size), type(sha)] != [int, int, str] or not 0 <= mode <= 0o7777 or size < 0:
                return False
            if b"\0" in os.fsencode(path) + (b"" if link is None else os.fsencode(link)):
                return False
    except (TypeError, ValueError):
        return False
    return isinstance(value, list)


def is_own(path: str) -> bool:
    """Whether it lies where a tree has its marker, or what the marker is written to before it is in place."""
    return path.startswith(MARKER)


def link_stays_inside(path: str, links: Mapping[str, str]) -> bool:
    """Whether the link at `path` leads to a place within the tree, by way of whatever other link its target names.

    `links` are all of the tree: path -> target. What follows more than MAX_LINKS leads in a circle, to no place at all.
    """
    left, at, followed = [*reversed(PurePosixPath(path).parts)], PurePosixPath(), 0
    while left:
        part = left.pop()
        if part == "..":
            if not at.parts:
                return False
            at = at.parent
            continue
        at /= part
        target = links.get(str(at))
        if target is not None:
            followed += 1
            if not target or "\0" in target or target.startswith("/") or followed > MAX_LINKS:
                return False
            left += reversed(PurePosixPath(target).parts)
            at = at.parent
    return True


def read_marker(tree: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        body = json.loads((tree / MARKER).read_bytes())
        return body if isinstance(body, dict) and "boot_id" in body and are_entries(body.get("entries")) else None
    return None


def write_marker(tree: Path, name: str, entries: list[Entry]) -> None:
    aside = tree / f"{MARKER}.{os.getpid()}.tmp"
    with aside.open("w") as stream:
        # The boot id comes first: a shell finds it in the first bytes (see orchestrator/ship.py).
        json.dump({"boot_id": boot_id(), "hash": name, "entries": entries}, stream)
    aside.replace(tree / MARKER)
    os.utime(tree / MARKER)  # what is newer than it was changed since; the rename has just touched its folder


@lru_cache(maxsize=1)
def boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def open_file(path: Path) -> io.FileIO:
    """For reading, unbuffered. OSError where it is a link or no file: to open a named pipe would wait for its writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "no regular file", str(path))
    return io.FileIO(descriptor)


def digest_of(path: Path) -> str:
    with open_file(path) as stream:
        return str(hashed(stream).hexdigest())


def hashed(stream: BinaryIO) -> Any:
    digest = hashlib.sha256()
    while piece := stream.read(PIECE_BYTES):
        digest.update(piece)
    return digest


def is_untouched(tree: Path, entry: Entry) -> bool:
    """Nothing was done to it since the marker: a job may write into its tree, and nobody can set a ctime back."""
    with contextlib.suppress(OSError):
        found, marked = (tree / entry[0]).lstat(), (tree / MARKER).stat()
        return bool(found.st_ctime_ns <= marked.st_mtime_ns)
    return False


def is_right(tree: Path, entry: Entry) -> bool:
    path, mode, _size, sha, link = entry
    place = tree / path
    with contextlib.suppress(OSError):
        if link is not None:
            return bool(str(place.readlink()) == link)
        is_program = bool(place.stat().st_mode & 0o100)
        return is_program == bool(mode & 0o100) and digest_of(place) == str(sha)
    return False
