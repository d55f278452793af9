"""Trouble with single runs: in the follower's log at once, an event as soon as the database takes it. Each once.

A fault at every look must fill neither of them, and one that keeps the database from being written must
not keep anything else from being done. It never raises what a database can.
"""

from __future__ import annotations

import sqlite3
import sys
import traceback
from dataclasses import dataclass, field

from orchestrator.errors import DraftyardError, RunNotFound, StoreError
from orchestrator.follow.desk import Desk
from orchestrator.redact import redact

KIND = "follower_error"


@dataclass
class Complaints:
    said: set[tuple[str, str]] = field(default_factory=set)  # run id and line, in the log
    unstored: dict[tuple[str, str], str] = field(default_factory=dict)  # -> the whole text

    def add(self, desk: Desk, run_id: str, error: Exception) -> None:
        """Called while the error is handled."""
        whole = redact(traceback.format_exc())
        line = redact(f"{type(error).__name__}: {error}".splitlines()[0])
        if (run_id, line) not in self.said:
            self.said.add((run_id, line))
            sys.stderr.write(f"{run_id}: {line if isinstance(error, DraftyardError) else whole}\n")
            self.unstored[run_id, line] = whole
        self.store(desk)

    def store(self, desk: Desk) -> None:
        """Writes what is still unwritten; what cannot be written now waits for the next call."""
        for (run_id, line), whole in list(self.unstored.items()):
            try:
                if not any(row.text == line for row in desk.reader.events(run_id, kinds=[KIND])):
                    desk.store.add_event(run_id, KIND, line, {"traceback": whole})
            except RunNotFound:  # purged meanwhile
                pass
            except (StoreError, sqlite3.Error):  # full, locked; or a row that the database does not take
                continue
            del self.unstored[run_id, line]
