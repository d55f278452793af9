"""The one connection of a reader: opened read-only, opened anew once a database is there, its faults said plainly.

A database that does not exist yet reads as an empty one. Where SQLite can make none of its files beside it (a full disk,
a folder of somebody else's) it is read as it lies, as long as all of it lies in the one file. It knows no table: what is
asked is the business of `reads`, `selection`, `acceptance` and `names`.
"""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from orchestrator.errors import StoreError
from orchestrator.store import migrations
from orchestrator.store.faults import told_plainly


class ReadConnection:
    """Asks one database. Threads may share it, but for one whose handlers call Python (`reads.Reader.give_way`)."""

    def __init__(self, path: Path, *, busy_timeout_s: float = migrations.BUSY_TIMEOUT_S) -> None:
        self.path = path
        self._busy_timeout_s = busy_timeout_s
        self._generation = 0
        self._is_empty = True
        self._still: tuple[int, ...] | None = None  # how the files lay, where they are read as they lie
        with told_plainly(path):
            self._sqlite = self._open()

    def close(self) -> None:
        self._sqlite.close()

    def all(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[Any]:
        """Every row of the answer, by number and by name. Raises StoreError."""
        with self.sqlite() as connection:
            return connection.execute(sql, values).fetchall()

    @contextmanager
    def sqlite(self) -> Iterator[sqlite3.Connection]:
        """The connection itself, for what is shared with the writing half. Raises StoreError."""
        with told_plainly(self.path):
            yield self._sqlite

    @property
    def is_absent(self) -> bool:
        """Whether no database was there when it was opened last."""
        return self._is_empty

    def data_version(self) -> int:
        """A number that changes when anybody else has committed, or has made the database; asking costs microseconds."""
        with told_plainly(self.path):
            has_come = self._is_empty and _is_there(self.path)
            if has_come or (self._still is not None and self._still != _stamp(self.path)):
                self._sqlite.close()
                self._sqlite = self._open()
        return self._generation << 32 | int(self.all("PRAGMA data_version")[0][0])

    def wait_at_most(self, busy_timeout_s: float) -> None:
        """How long each question from now on may wait for whoever has locked the database."""
        self._busy_timeout_s = max(0.0, busy_timeout_s)
        self.all(f"PRAGMA busy_timeout = {math.ceil(self._busy_timeout_s * 1000)}")

    def _open(self) -> sqlite3.Connection:
        self._generation += 1
        self._is_empty = not _is_there(self.path)
        if self._is_empty:
            connection = sqlite3.connect(":memory:", check_same_thread=False)
            connection.row_factory = sqlite3.Row
            connection.executescript(migrations.schema_sql())
            return connection
        connection, is_stale = self._opened()
        if is_stale:
            migrations.migrate(self.path)
        connection.row_factory = sqlite3.Row
        return connection

    def _opened(self) -> tuple[sqlite3.Connection, bool]:
        """And whether it is of an older schema."""
        self._still = None
        try:
            return _looked_into(
                migrations.connect(self.path, readonly=True, busy_timeout_s=self._busy_timeout_s), self.path
            )
        except (sqlite3.DatabaseError, StoreError) as error:
            if not _lacks_shared_memory(error) or _has_log(self.path):
                raise
        self._still = _stamp(self.path)
        return _looked_into(migrations.connect(self.path, readonly=True, is_still=True), self.path)


def _looked_into(connection: sqlite3.Connection, path: Path) -> tuple[sqlite3.Connection, bool]:
    try:
        return connection, migrations.needs_migration(connection, path)
    except (sqlite3.DatabaseError, StoreError):
        connection.close()
        raise


def _lacks_shared_memory(error: Exception) -> bool:
    """Whether it may be that: SQLite's codes for it are those of a disk at fault, which reading then meets again."""
    cause = error.__cause__ if isinstance(error, StoreError) else error
    code = getattr(cause, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    return code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_FULL)


def _has_log(path: Path) -> bool:
    """Whether the newest words lie in a file beside it, which nobody reads without shared memory."""
    return any(size > 0 for size in _stamp(path)[2:])


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
