"""One process at a time makes what several want: the others wait, say so, and find it made."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def taking_turns(lock: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds the lock file; `waiting` is called once where another process holds it. Freed by the kernel at its death."""
    with lock.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
