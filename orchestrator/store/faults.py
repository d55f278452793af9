"""What a fault of runs.db means for a person: SQLite's own words become one line with the file and what to do.

The one place that translates, for reading and for writing. A broken constraint or a misused driver is a
fault of this program and stays what it is.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import StoreError
from orchestrator.lazy import lazy

if TYPE_CHECKING:
    import tempfile
else:
    tempfile = lazy("tempfile")

OURS = (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError)
ELSEWHERE = "--db or DRAFTYARD_DB names another file"

# Primary result code -> what to do. Source: https://www.sqlite.org/rescode.html
_READONLY = "it cannot be written: let this user write the file and its folder, or mount the disk writable"
_UNREAD = (
    "its newest words lie in {log}, which nobody can read in a folder that cannot be written: copy both to one that can "
    "(cp {both} FOLDER) and read them there, or let this user write here"
)
_BUSY = "another process has kept it locked for too long: find it (fuser -v {file}), or try again later"
_ADVICE = {
    sqlite3.SQLITE_PERM: _READONLY,
    sqlite3.SQLITE_READONLY: _READONLY,
    sqlite3.SQLITE_BUSY: _BUSY,
    sqlite3.SQLITE_LOCKED: _BUSY,
    sqlite3.SQLITE_FULL: "its disk is full: make room there (df {folder}), then say it again",
    sqlite3.SQLITE_IOERR: "its disk does not answer as it should: look at the disk (df {folder}, dmesg)",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened: look at the path and who may read and write there (ls -ld {file} {folder})",
    sqlite3.SQLITE_CORRUPT: "it is damaged: save what can be read (sqlite3 {file} .recover), or move it away to begin anew",
    sqlite3.SQLITE_NOTADB: "it was not written by this program, or it is damaged: move it away to begin anew",
}
_REFUSED = "SQLite refuses what was asked of it: a shorter filter may do, anything else is a fault of draftyard"
_QUOTA = "the quota there is used up: make room, or have it raised (quota -s), then say it again"
_PASSING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
ROOM_BYTES = 64 * 1024  # what SQLite's shared memory grows by, and a page
_PASSING_OS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


@contextmanager
def told_plainly(path: Path) -> Iterator[None]:
    """StoreError for whatever is wrong with the file or its place."""
    try:
        yield
    except (*OURS, StoreError):
        raise
    except (sqlite3.DatabaseError, OSError) as error:
        raise store_error(path, error) from error


def store_error(path: Path, error: Exception) -> StoreError:
    """One line: the file, what was seen, what to do."""
    if isinstance(error, OSError):
        told = f"{path} cannot be used ({_os_words(error)}); {ELSEWHERE}"
        return StoreError(told, is_passing=error.errno in _PASSING_OS)
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code == sqlite3.SQLITE_IOERR and _is_full(path.parent):  # its files for sharing could not grow
        code = sqlite3.SQLITE_FULL
    if code == sqlite3.SQLITE_CANTOPEN and _cannot_be_written(path):  # SQLite would make files of its own there
        code = sqlite3.SQLITE_READONLY
    if path.is_dir():
        return StoreError(f"{path} is a folder; a database file was expected: {ELSEWHERE}")
    names = {"file": shlex.quote(str(path)), "folder": shlex.quote(str(path.parent))}  # parts of commands to type
    advice = _ADVICE.get(code, _REFUSED).format(**names)
    if code == sqlite3.SQLITE_READONLY and (log := _unread_log(path)) is not None:
        both = shlex.join([str(path.resolve()), str(log)])  # under their own names, behind a link too
        advice = _UNREAD.format(log=log, both=both)
    if code == sqlite3.SQLITE_IOERR and has_no_quota_left(path.parent):
        advice = _QUOTA
    if str(error).startswith(("no such table", "no such column")):
        advice = "it was not written by this program: move it away to begin anew"
    told = f"{path}: {error}; {advice}; {ELSEWHERE}"
    return StoreError(told, is_passing=code in _PASSING)


def has_no_quota_left(folder: Path) -> bool:
    """Whether the system takes ROOM_BYTES more there from nobody like us: how much is left a disk does not tell of a quota.

    Of a file without a name, so nothing is left of it. False where it cannot be told.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as stream:
            os.posix_fallocate(stream.fileno(), 0, ROOM_BYTES)
    except OSError as error:
        return error.errno == errno.EDQUOT
    return False


def _os_words(error: OSError) -> str:
    return f"{error.strerror}: {error.filename}" if error.filename else str(error)


def _cannot_be_written(path: Path) -> bool:
    """Whether nothing can be made beside a file that can be read."""
    return path.is_file() and os.access(path, os.R_OK) and not os.access(path.resolve().parent, os.W_OK | os.X_OK)


def _unread_log(path: Path) -> Path | None:
    """The file beside it that holds what was written last, where the shared memory that finds it there is gone."""
    real = path.resolve()
    log, memory = (real.with_name(f"{real.name}{ending}") for ending in ("-wal", "-shm"))
    return log if log.is_file() and log.stat().st_size > 0 and not memory.exists() else None


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < ROOM_BYTES
    except OSError:
        return False
