"""Whether runs.db is still the file that was opened: one that has gone, or is another by now, is said and not looked past.

SQLite keeps on reading the file it opened, wherever that is now: what a screen shows would be true of nothing any more.
Nothing is opened here; `os.stat` alone tells: closing a file drops this process's locks on it, SQLite's among them, and then
a writer takes the log away under our reader. Whoever keeps a Reader open asks this before its `data_version`.
"""

from __future__ import annotations

import os
from pathlib import Path

from orchestrator.errors import StoreError

Identity = tuple[int, int]  # device and inode; an inode is not given out again while a reader has its file open


class Place:
    """Where the database lies, and what lay there when it was looked at last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: Identity | None = None  # None: nothing has been there yet
        self._was_lost = self._had_content = self._was_cut = False
        self._written: tuple[int, int] | None = None  # when, in ns of the file system, and how many bytes there were
        self.is_another = False
        self.was_written = False  # since the look before: by a checkpoint, or by somebody who writes over it

    def must_reopen(self) -> bool:
        """Whether a reader opened before may read something else than what lies there; `is_another` says what for sure.

        Where `was_written`, the same database lies there, but SQLite looks at no page again that it has kept: bytes written
        over the file are seen by a reader that is opened anew.
        Raises StoreError where nothing lies there any more, or what this user may not read.
        """
        found = self._found()
        self.is_another = self._known is not None and (found != self._known or self._was_cut)
        must = self.is_another or self._was_lost
        self._known, self._was_lost, self._was_cut = found, False, False
        return must

    def _found(self) -> Identity | None:
        try:
            told = self._path.stat()
        except FileNotFoundError:
            if self._known is None:
                return None  # a yard without runs yet
            raise self._lost("has been moved or deleted") from None
        except OSError as error:
            raise self._lost(f"cannot be looked at ({error.strerror})") from error
        if not os.access(self._path, os.R_OK, effective_ids=os.access in os.supports_effective_ids):
            raise self._lost("may not be read by this user")
        if self._had_content and told.st_size == 0:
            self._was_cut = True  # what is made in the same file is another database
            raise self._lost("is empty now (0 B)")
        self._had_content = told.st_size > 0
        written = (told.st_mtime_ns, told.st_size)
        self.was_written, self._written = self._written not in (None, written), written
        return told.st_dev, told.st_ino

    def _lost(self, what: str) -> StoreError:
        self._was_lost = True
        return StoreError(f"{self._path.name} {what}; shown is what was read before")
