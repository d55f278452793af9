"""The right to start an attempt, which is given once.

The claim file is locked while its supervisor lives and keeps a line when it is gone:
`supervisor PID START_TICKS BOOT_ID`, then `job ...` once the job runs. It is plain text so that a
shell can read it without Python. A supervisor that died before its first line started nothing, and
another may take its place.
"""

from __future__ import annotations

import fcntl
import os

from remote.processes import Identity
from remote.rundir import AttemptDir


class Claim:
    """The right to start an attempt: a lock while we live, and a line that stays when we are gone."""

    def __init__(self, attempt: AttemptDir) -> None:
        attempt.root.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(attempt.root / "claim", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def take(self) -> bool:
        """False when another supervisor has, or ever had, this attempt."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if os.fstat(self._descriptor).st_size:
            return False
        own = Identity.of(os.getpid())
        assert own is not None
        self._note("supervisor", own)
        return True

    def note_job(self, job: Identity) -> None:
        self._note("job", job)

    def _note(self, who: str, identity: Identity) -> None:
        line = f"{who} {identity.pid} {identity.start_ticks} {identity.boot_id}\n"
        os.write(self._descriptor, line.encode())
        os.fsync(self._descriptor)
