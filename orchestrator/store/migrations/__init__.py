"""Brings runs.db to the newest schema: numbered SQL files, each in one transaction.

Forward only. A database of a newer draftyard is refused, one on a network file system too
(SQLite's shared-memory index does not work there: locked, malformed, SQLITE_PROTOCOL).
Standard library alone, because readers open databases as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sqlite3
import sys
from pathlib import Path

from orchestrator.errors import StoreError
from orchestrator.store.faults import told_plainly

BUSY_TIMEOUT_S = 10.0

# statfs(2) f_type numbers; FUSE covers sshfs, s3fs and rclone, whose locks are not to be trusted either.
NETWORK_FILE_SYSTEMS = {
    0x6969: "NFS",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    0x517B: "SMB",
    0x65735546: "FUSE",
    0x01021997: "9P",
    0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre",
    0x5346414F: "AFS",
    0x47504653: "GPFS",
    0x19830326: "FhGFS (BeeGFS)",
    0x01161970: "GFS2",
    0x7461636F: "OCFS2",
    0x73757245: "Coda",
}


def newest_version() -> int:
    return max(number for number, _ in _steps())


def connect(
    path: Path, *, readonly: bool = False, is_immutable: bool = False, busy_timeout_s: float = BUSY_TIMEOUT_S
) -> sqlite3.Connection:
    """A connection with every setting this database relies on. It migrates nothing. Raises StoreError.

    `is_immutable`: nobody writes there, so it is read without locks, and without files of SQLite's own beside it.
    """
    mode = ("ro" if readonly else "rwc") + ("&immutable=1" if is_immutable else "")
    with told_plainly(path):
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}",
            uri=True,
            timeout=busy_timeout_s,
            isolation_level=None,  # transactions are spelled out; the module opens none behind our back
            check_same_thread=False,
        )
        try:
            for pragma in SETTINGS:
                connection.execute(pragma)
        except sqlite3.Error:
            connection.close()
            raise
    return connection


# mmap with a truncated WAL is a SIGBUS; NORMAL loses at most the last commits of a power cut, never the file,
# and those are read again from the host because their offset is lost with them.
SETTINGS = (
    "PRAGMA foreign_keys = ON",
    "PRAGMA mmap_size = 0",
    "PRAGMA synchronous = NORMAL",
)


def migrate(path: Path, *, busy_timeout_s: float = BUSY_TIMEOUT_S) -> None:
    """Creates the database or brings it up to date. Many processes may do this at once. Raises StoreError."""
    with told_plainly(path):
        refuse_network_file_system(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(connect(path, busy_timeout_s=busy_timeout_s)) as connection:
            if _version(connection, path) == newest_version():
                return
            _switch_to_wal(connection, path)
            for number, sql in _steps():
                _apply(connection, number, sql, path)


def schema_sql() -> str:
    """All steps as one script: for a database in memory and for tests."""
    return "\n".join(sql for _, sql in _steps())


def needs_migration(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the database is older than this program; a newer one is a StoreError."""
    return _version(connection, path) < newest_version()


def _steps() -> list[tuple[int, str]]:
    files = sorted(Path(__file__).parent.glob("[0-9]*.sql"))
    return [(int(file.name.split("_")[0]), file.read_text(encoding="utf-8")) for file in files]


def _version(connection: sqlite3.Connection, path: Path) -> int:
    found = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if found > newest_version():
        raise StoreError(
            f"{path} has schema {found}, written by a newer draftyard; this one reads up to {newest_version()}. "
            "Update this installation, or point --db at another file; nothing was changed."
        )
    return found


def _switch_to_wal(connection: sqlite3.Connection, path: Path) -> None:
    # Kept in the file, so once is enough. Switching needs the file alone for a moment: with 32 first starters
    # SQLite answers "locked" at once instead of waiting, hence a transaction that queues them up first.
    for _ in range(200):
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
        else:
            return
    raise StoreError(f"{path} stays locked by another process; try again", is_passing=True)


def _apply(connection: sqlite3.Connection, number: int, sql: str, path: Path) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        if _version(connection, path) < number:  # another process may have been first
            for statement in _statements(sql):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number}")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _statements(sql: str) -> list[str]:
    """Whole statements: executescript would commit the transaction around them."""
    statements, pending = [], ""
    for line in sql.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            statements.append(pending)
            pending = ""
    return statements


def refuse_network_file_system(path: Path) -> None:
    """StoreError when the folder of `path` lies on a file system shared between machines."""
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    name = NETWORK_FILE_SYSTEMS.get(file_system_type(folder))
    if name is not None:
        raise StoreError(
            f"{path} lies on a network file system ({name}), where SQLite's locks fail and databases get damaged. "
            "Point --db or DRAFTYARD_DB at a local disk."
        )


def file_system_type(folder: Path) -> int:
    """f_type of statfs(2) on Linux, 0 elsewhere or when it cannot be asked."""
    if not sys.platform.startswith("linux"):
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = (ctypes.c_long * 32)()  # struct statfs is 120 bytes on 64-bit machines; f_type comes first
    if libc.statfs(os.fsencode(folder), ctypes.byref(buffer)) != 0:
        return 0
    return int(buffer[0]) & 0xFFFFFFFF
