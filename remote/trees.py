"""The trees of a work folder: which are whole, what content lies where, and building one aside.

Every file's sha256 is checked before it belongs to a tree, and one rename puts the tree in place.

Standard library only; sent to the host together with receive.py, which speaks with the client.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from remote.manifest import (
    MARKER,
    PIECE_BYTES,
    Entry,
    Refused,
    boot_id,
    digest_of,
    is_right,
    is_untouched,
    open_file,
    read_marker,
    write_marker,
)

RESERVE_BYTES, RESERVE_FILES, RESERVE_PART = (
    256 * 1024**2,
    1000,
    20,
)  # of a disk a twentieth stays free, at most so much
TREES_SEARCHED = 8  # newest first: where content may lie already


class Lacking(Exception):
    """A tree needs content that is nowhere here; its one argument lists the hashes."""


class NoRoom(Exception):
    """A tree would leave too little of the disk for others: their runs save checkpoints there."""


class Store:
    """The `trees` folder of a work folder."""

    def __init__(self, work_dir: Path) -> None:
        self.trees, self.parts = work_dir / "trees", _parts(work_dir)
        self.parts.mkdir(parents=True, exist_ok=True)

    def is_whole(self, name: str) -> bool:
        tree = self.trees / name
        marker = read_marker(tree)
        if marker is None:
            return False
        is_believed, looked_ns = marker["boot_id"] == boot_id(), self._now_ns()
        if all((is_believed and is_untouched(tree, entry)) or is_right(tree, entry) for entry in marker["entries"]):
            if not is_believed:
                write_marker(tree, name, marker["entries"])
            os.utime(tree / MARKER, ns=(looked_ns, looked_ns))  # not what was written while we looked
            return True
        return False

    def _now_ns(self) -> int:
        """By the clock of the file system that the trees lie on."""
        probe = self.parts / f"look.{os.getpid()}"
        probe.touch()
        try:
            return probe.stat().st_mtime_ns
        finally:
            probe.unlink()

    def known_content(self) -> dict[str, Path]:
        """sha256 -> a file that had it when its tree was made; to be checked while it is copied."""
        found: dict[str, Path] = {}
        markers = [path for path in self.trees.glob(f"*/{MARKER}") if not path.parent.name.startswith(".")]
        for path in sorted(markers, key=_modified, reverse=True)[:TREES_SEARCHED]:
            marker = read_marker(path.parent)
            for name, _mode, _size, sha, link in marker["entries"] if marker else []:
                if link is None:
                    found.setdefault(sha, path.parent / name)
        return found

    def missing(self, entries: list[Entry]) -> list[list[Any]]:
        """[sha256, how many bytes are here already] of all content that must travel."""
        known = self.known_content()
        wanted: dict[str, int] = {}
        for _name, _mode, size, sha, link in entries:
            if link is not None or sha in wanted or (self.parts / sha).is_file():
                continue
            if sha not in known or not known[sha].is_file() or known[sha].stat().st_size != size:
                part = self.part(sha)
                wanted[sha] = part.stat().st_size if part.is_file() else 0
        return [[sha, have] for sha, have in wanted.items()]

    def who_sends(self, missing: list[list[Any]]) -> str:
        """Who is sending one of these contents just now; empty when nobody is."""
        for sha, have in missing:
            with contextlib.suppress(FileNotFoundError), self.part(sha).open("rb") as stream:
                try:
                    fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return f"{holder(stream)} ({have:,} bytes are here)"
        return ""

    def need_room(self, entries: list[Entry]) -> None:
        """NoRoom where the disk cannot hold what a tree has yet to write and keep its reserve."""
        sums = disk(self.trees.parent, entries)
        is_enough = sums["to_come_bytes"] + sums["reserve_bytes"] <= sums["free_bytes"]
        if not is_enough or sums["to_come_files"] > sums["free_files"]:
            raise NoRoom

    def part(self, sha: str) -> Path:
        """A content's beginning, found until the next boot: a power cut leaves a file's length and takes its bytes."""
        return _part(self.parts, sha)

    def put_in_place(self, staging: Path, name: str) -> None:
        tree = self.trees / name
        while True:
            try:
                staging.rename(tree)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            if self.is_whole(name):  # another client was faster, with the same content
                return
            aside = self.trees / f".spoiled-{name}-{os.getpid()}"
            tree.rename(aside)
            os.utime(aside)  # it lies there from now on, however old it is


class Staging:
    """A tree being built aside: left whole and in place, or taken apart again with what arrived kept for the next try."""

    def __init__(self, store: Store, name: str, entries: list[Entry]) -> None:
        self._store, self._name, self._entries = store, name, entries
        self._folder = store.trees / f".staging-{name}-{os.getpid()}"
        self._first: dict[str, Entry] = {}  # content -> the first file that has it
        for entry in entries:
            if entry[4] is None:
                self._first.setdefault(entry[3], entry)
        self._here: set[str] = set()  # content that lies, checked, at its first place
        self._lock = contextlib.ExitStack()

    def __enter__(self) -> Staging:
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            self._folder.mkdir()
            self._hold()
            for folder in sorted(_folders_of(self._entries)):
                (self._folder / folder).mkdir(parents=True, exist_ok=True)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _hold(self) -> None:
        """A lock as long as it is being made: `gc` takes away what a ship that was cut has left."""
        descriptor = os.open(self._folder, os.O_RDONLY)
        self._lock.callback(os.close, descriptor)
        with contextlib.suppress(OSError):  # a network disk may lock no folder
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._leave()

    def _leave(self) -> None:
        if self._folder.is_dir():  # it was not put in place
            for sha in self._here:
                with contextlib.suppress(OSError):
                    os.replace(self._place(self._first[sha]), f"{self._store.parts}/{sha}")  # noqa: PTH105
            shutil.rmtree(self._folder, ignore_errors=True)

    def keep(self, sha: str, content: bytes) -> None:
        """Content from the stream goes straight to the first file that has it. Refused when it is not what it should be."""
        entry = self._first.get(sha)
        if entry is None or hashlib.sha256(content).hexdigest() != sha:
            raise Refused(sha)
        place = self._place(entry)
        # Strings and plain calls: Path objects cost more than these small files themselves.
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _mode(entry))
        with os.fdopen(descriptor, "wb", buffering=0) as stream:
            write(stream, content, place)
        self._here.add(sha)

    def keep_part(self, sha: str) -> None:
        """Content that this receiver has just checked while it came: not read again, as what lay here before is."""
        entry = self._first.get(sha)
        if entry is None:
            raise Refused(sha)
        with contextlib.suppress(FileNotFoundError):  # another client took it: `finish` finds it there
            os.replace(self._store.parts / sha, self._place(entry))  # noqa: PTH105
            os.chmod(self._place(entry), _mode(entry))  # noqa: PTH101
            self._here.add(sha)

    def finish(self) -> None:
        """Brings what else is needed from parts and older trees, and puts the tree in place; Lacking names what is nowhere."""
        known = self._store.known_content() if len(self._here) < len(self._first) else {}
        files = [entry for entry in self._entries if entry[4] is None]
        lacking = [entry[3] for entry in files if not self._bring(entry, known.get(entry[3]))]
        if lacking:
            raise Lacking(lacking)
        for path, _mode_there, _size, _sha, link in self._entries:
            if link is not None:  # after the files, so that none is written through a link
                (self._folder / path).symlink_to(link)
        write_marker(self._folder, self._name, self._entries)
        self._store.put_in_place(self._folder, self._name)

    def _bring(self, entry: Entry, known: Path | None) -> bool:
        sha, first = entry[3], self._first[entry[3]]
        if sha in self._here and entry is first:
            return True
        target = Path(self._place(entry))
        if sha in self._here:
            is_here = copy_checked(Path(self._place(first)), target, sha)
        else:
            is_here = self._from_parts(sha, target) or (known is not None and copy_checked(known, target, sha))
        if is_here:
            target.chmod(_mode(entry))
            self._here.add(sha)
        return is_here

    def _from_parts(self, sha: str, target: Path) -> bool:
        """Only what still is what it was: it may have been written shortly before a power cut."""
        part = self._store.parts / sha
        with contextlib.suppress(FileNotFoundError):  # never there, or another client took it
            if digest_of(part) == sha:
                part.replace(target)
                return True
            part.unlink()
        return False

    def _place(self, entry: Entry) -> str:
        return f"{self._folder}/{entry[0]}"


def _folders_of(entries: list[Entry]) -> set[str]:
    return {str(PurePosixPath(entry[0]).parent) for entry in entries}


def disk(work_dir: Path, entries: list[Entry]) -> dict[str, int]:
    """What a tree has yet to write to the disk of the work folder, in whole blocks, and what that has left.

    Of the bytes `reserve_bytes` are to stay free; of the files, what is to stay is taken off already.
    """
    found = os.statvfs(next(place for place in (work_dir, *work_dir.parents) if place.is_dir()))
    num_here = sum((_parts(work_dir) / sha).is_file() for sha in {entry[3] for entry in entries} - {""})
    num_to_come = len(entries) + len(_folders_of(entries)) - num_here
    kept_files = min(found.f_files // RESERVE_PART, RESERVE_FILES)
    return {
        "to_come_bytes": to_be_written(work_dir, entries) + sum(-entry[2] % found.f_frsize for entry in entries),
        "free_bytes": found.f_bavail * found.f_frsize,
        "reserve_bytes": min(found.f_blocks // RESERVE_PART * found.f_frsize, RESERVE_BYTES),
        "to_come_files": num_to_come,
        "free_files": max(0, found.f_favail - kept_files) if found.f_files else num_to_come,  # without a limit: 0 of 0
    }


def to_be_written(work_dir: Path, entries: list[Entry]) -> int:
    """Bytes: every file, but for what has arrived. What lies in an older tree is copied, as is the second file of one content."""
    parts = _parts(work_dir)
    contents = {sha for _path, _mode, _size, sha, link in entries if link is None}
    here = [file for sha in contents for file in (parts / sha, _part(parts, sha)) if file.is_file()]
    whole: int = sum(size for _path, _mode, size, _sha, _link in entries)
    return whole - sum(file.stat().st_size for file in here)


def _parts(work_dir: Path) -> Path:
    return work_dir / "trees" / ".parts"


def _part(parts: Path, sha: str) -> Path:
    return parts / f"{sha}.{boot_id()}.part"


def _mode(entry: Entry) -> int:
    return 0o755 if entry[1] & 0o111 else 0o644


def write(stream: Any, piece: bytes, name: str) -> None:
    if stream.write(piece) != len(piece):  # a disk that fills up takes a part first
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)


def copy_checked(source: Path, target: Path, sha: str) -> bool:
    """Copies while hashing; False, and nothing at the target, when the source is not what it was."""
    digest = hashlib.sha256()
    try:
        # Unbuffered: for hundreds of small files the buffers would cost more than the copy.
        with open_file(source) as reader, target.open("wb", buffering=0) as writer:
            while piece := reader.read(PIECE_BYTES):
                digest.update(piece)
                write(writer, piece, str(target))
    except FileNotFoundError:
        return False
    if digest.hexdigest() != sha:
        target.unlink()
        return False
    return True


def _modified(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def holder(stream: BinaryIO) -> str:
    """Which process has locked an open file, as the kernel says: pid, age, and where its client calls from."""
    inode = os.fstat(stream.fileno()).st_ino
    locks = [line.split() for line in _text(Path("/proc/locks")).splitlines() if " FLOCK " in line]
    pid = next((words[-4] for words in locks if words[-3].endswith(f":{inode}") and words[-4].isdigit()), None)
    if pid is None:
        return "another process"
    ticks = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[19:20]
    up = _text(Path("/proc/uptime")).split()[:1]
    age = f" for {float(up[0]) - int(ticks[0]) / os.sysconf('SC_CLK_TCK'):.0f} s" if up and ticks else ""
    variables = _text(Path(f"/proc/{pid}/environ")).split("\0")
    calls = [value.partition("=")[2].split()[:1] for value in variables if value.startswith("SSH_CONNECTION=")]
    return f"pid {pid}{age}" + (f", for a client at {calls[0][0]}" if calls and calls[0] else "")


def _text(file: Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_bytes().decode("utf-8", "replace")
    return ""
