"""SQLAlchemy's engine on runs.db: every transaction is immediate, so writers queue before they read."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import QueuePool
from sqlmodel import create_engine

from orchestrator.store import migrations

LOCK_TURNS = 3
LOCK_WAIT_S = LOCK_TURNS * migrations.BUSY_TIMEOUT_S  # of one transaction


def open_engine(path: Path, *, lock_wait_s: float = LOCK_WAIT_S) -> Engine:
    """Whoever waits longer for the one write lock than `lock_wait_s` gets SQLite's error."""

    def connect() -> sqlite3.Connection:
        return migrations.connect(path, busy_timeout_s=lock_wait_s / LOCK_TURNS)

    engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool)

    # Out of the box a SELECT opens no transaction: two processes that read, add and write back lose updates.
    # SQLite's own wait is not fair: of many writers one may stay unlucky for all of it, so it gets more turns.
    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        for turn in range(LOCK_TURNS):
            try:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            except OperationalError:
                if turn + 1 == LOCK_TURNS:
                    raise
            else:
                return

    return engine
