"""The first, polite word of a stop, and whom it goes to.

To the job's whole process group, but under torch's launcher to the ranks that it started: they are in sessions of their
own, so the group is the launcher alone, and it would give them 30 s of its own, whatever the grace of the run.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from remote.job import Job
from remote.processes import members, send

LAUNCHERS = ("torchrun", "torch.distributed.run")


def ask_to_end(job: Job, first: int, asked: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """SIGTERM; `first` is the pid of the job's first process, which leads its group.

    Pid and start ticks of each that was told: once, for a second signal means "at once" to many programs. Those `asked`
    before are left out; a launcher with restarts left starts fallen ranks anew, and these are yet to be told.
    """
    if any(pid == first for pid, _ in asked):
        return set()  # with its whole group
    is_launched = any(Path(word).name in LAUNCHERS for word in job.argv)
    ranks = members(parent=first) - asked if is_launched else set()
    for pid, start_ticks in ranks:
        send(pid, start_ticks, signal.SIGTERM)
    if ranks or asked:
        return ranks
    told = members(group=first)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(first, signal.SIGTERM)
    return told
