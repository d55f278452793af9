"""The one connection of a reader: opened read-only, opened anew once a database is there, its faults said plainly.

A database that does not exist yet reads as an empty one. Where SQLite can make none of its files beside it (a full disk,
a folder of somebody else's) it is read as it lies, as long as all of it lies in the one file. It knows no table: what is
asked is the business of `reads`, `selection`, `acceptance` and `names`.
"""

from __future__ import annotations

import math
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import StoreError
from orchestrator.store import migrations
from orchestrator.store.faults import told_plainly


@dataclass(frozen=True)
class _Opened:
    sqlite: sqlite3.Connection
    is_empty: bool = False  # no database is there
    immutable: tuple[int, ...] | None = None  # the stamp of the files, where SQLite reads them as such
    is_stale: bool = False  # of an older schema


class ReadConnection:
    """Asks one database. Threads may share it, but for one whose handlers call Python (`reads.Reader.give_way`)."""

    def __init__(self, path: Path, *, busy_timeout_s: float = migrations.BUSY_TIMEOUT_S) -> None:
        self.path = path
        self._busy_timeout_s = busy_timeout_s
        self._generation = 1
        self._stand: tuple[Callable[..., None], int] | None = None
        self._turn = threading.Lock()
        self._before: _Opened | None = None
        with told_plainly(path):
            self._opened = self._open()

    def close(self) -> None:
        for opened in filter(None, (self._before, self._opened)):
            opened.sqlite.close()

    def all(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[Any]:
        """Every row of the answer, by number and by name. Raises StoreError."""
        with self.sqlite() as connection:
            return connection.execute(sql, values).fetchall()

    @contextmanager
    def sqlite(self) -> Iterator[sqlite3.Connection]:
        """The connection itself, for what is shared with the writing half. Raises StoreError."""
        with told_plainly(self.path):
            if self._opened.immutable is not None:  # what SQLite answered of one that has changed would be of two times
                self._open_anew_if(lambda opened: opened.immutable not in (None, _stamp(self.path)))
            yield self._opened.sqlite

    @property
    def is_absent(self) -> bool:
        """Whether no database was there when it was opened last."""
        return self._opened.is_empty

    def data_version(self) -> int:
        """A number that changes when anybody else has committed, or has made the database; asking costs microseconds."""
        with told_plainly(self.path):
            if self.is_absent:
                self._open_anew_if(lambda opened: opened.is_empty and _is_there(self.path))
        version = int(self.all("PRAGMA data_version")[0][0])  # may open anew itself
        return self._generation << 32 | version

    def wait_at_most(self, busy_timeout_s: float) -> None:
        """How long each question from now on may wait for whoever has locked the database."""
        self._busy_timeout_s = max(0.0, busy_timeout_s)
        self.all(f"PRAGMA busy_timeout = {math.ceil(self._busy_timeout_s * 1000)}")

    def stand_meanwhile(self, stand: Callable[..., None], *, steps: int) -> None:
        """`stand` is called before each question, and every so many steps of one, however often it is opened anew."""
        with self.sqlite() as connection:
            self._stand = stand, steps
            _stand_meanwhile(connection, self._stand)

    def _open_anew_if(self, is_due: Callable[[_Opened], bool]) -> None:
        """Where that fails, all is as it was, and the next question tries again.

        The one before stays open until then: another thread may be reading it, and it holds no lock of anybody's.
        """
        with self._turn:
            if not is_due(self._opened):
                return
            opened = self._open()
            if self._before is not None:
                self._before.sqlite.close()
            self._before, self._opened = self._opened, opened
            self._generation += 1

    def _open(self) -> _Opened:
        if not _is_there(self.path):
            connection = sqlite3.connect(":memory:", check_same_thread=False)
            connection.executescript(migrations.schema_sql())
            opened = _Opened(connection, is_empty=True)
        else:
            opened = self._open_file()
        opened.sqlite.row_factory = sqlite3.Row
        if self._stand is not None:
            _stand_meanwhile(opened.sqlite, self._stand)
        return opened

    def _open_file(self) -> _Opened:
        try:
            connection = migrations.connect(self.path, readonly=True, busy_timeout_s=self._busy_timeout_s)
            opened = _looked_into(connection, self.path)
        except (sqlite3.DatabaseError, StoreError) as error:
            stamp = _stamp(self.path)  # the one that is judged is the one that is kept: a log may come in between
            if not _lacks_shared_memory(error) or _has_log(stamp):
                raise
            opened = _looked_into(migrations.connect(self.path, readonly=True, is_immutable=True), self.path, stamp)
        if opened.is_stale:
            try:
                migrations.migrate(self.path)
            except StoreError:
                opened.sqlite.close()
                raise
        return opened


def _stand_meanwhile(connection: sqlite3.Connection, stand: tuple[Callable[..., None], int]) -> None:
    connection.set_trace_callback(stand[0])
    connection.set_progress_handler(*stand)


def _looked_into(connection: sqlite3.Connection, path: Path, immutable: tuple[int, ...] | None = None) -> _Opened:
    try:
        return _Opened(connection, immutable=immutable, is_stale=migrations.needs_migration(connection, path))
    except (sqlite3.DatabaseError, StoreError):
        connection.close()
        raise


def _lacks_shared_memory(error: Exception) -> bool:
    """Whether it may be that: SQLite's codes for it are those of a disk at fault, which reading then meets again."""
    cause = error.__cause__ if isinstance(error, StoreError) else error
    code = getattr(cause, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    return code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_FULL)


def _has_log(stamp: tuple[int, ...]) -> bool:
    """Whether the newest words lie in a file beside it, which nobody reads without shared memory."""
    return any(size > 0 for size in stamp[2:])


def _stamp(path: Path) -> tuple[int, ...]:
    """When the database was written, in ns, and the sizes of it and its logs: no such log is one of 0 bytes."""
    told = path.stat()
    real = Path(os.path.realpath(path))
    logs = (real.with_name(f"{real.name}{ending}") for ending in ("-wal", "-journal"))
    return told.st_mtime_ns, told.st_size, *(log.stat().st_size if log.exists() else 0 for log in logs)


def _is_there(path: Path) -> bool:
    """Raises OSError where nobody can tell (a circle of links, say): what cannot be looked at is not an empty one."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True
