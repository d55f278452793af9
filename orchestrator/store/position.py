"""How far a file on a host has been read: the one fact that makes reading exactly once."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass


@dataclass(frozen=True)
class StreamPosition:
    """Where reading goes on; all zero for a file never read."""

    identity: str = ""
    offset_bytes: int = 0
    last_seq: int = 0
    kept_bytes: int = 0
    stopped_because: str | None = None


def read_position(connection: sqlite3.Connection, run_key: int, attempt: int, writer: str) -> StreamPosition:
    sql = """
        SELECT identity, offset_bytes, last_seq, kept_bytes, stopped_because FROM streams
        WHERE run_key = ? AND attempt = ? AND writer = ?"""
    found = connection.execute(sql, (run_key, attempt, writer)).fetchone()
    return StreamPosition(*found) if found else StreamPosition()
