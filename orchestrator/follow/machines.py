"""Which machine a run lives on, so that another one that answers under its host's name is not taken for it.

A host's name is a line of a file that anybody may edit under a live run. What its machine says of itself is kept with
the run as soon as the run has been seen alive there; a stranger, on which there is nothing of the run, is then no
evidence that it is gone. Judges no state: a stranger is an error like a host that does not answer.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.errors import HostError, UsageError
from orchestrator.follow.desk import Desk
from orchestrator.host import hosts_of
from orchestrator.observe import Evidence
from orchestrator.store.rows import Document, RunRow

REASON = "another_machine"
CLOCKS_S = 60.0  # by which the clocks of two machines may differ, and a start may have come before its row


def refuse_stranger(desk: Desk, run: RunRow, seen: Evidence) -> None:
    """Keeps the machine that the run is seen on. Raises HostError where another one answers; what is known of none is trusted."""
    if run.attempt == 0 or not seen.boot_id or seen.exit is not None:  # its end, wherever it is read, is its end
        return
    kept = json.loads(desk.reader.document(run.id, Document.MACHINES) or "{}")
    home = kept.get(str(run.node), {})
    if seen.is_claimed and not seen.rebooted:
        now = {"machine": seen.machine, "boot_id": seen.boot_id}
        if home != now:
            desk.store.keep_document(run.id, Document.MACHINES, json.dumps({**kept, str(run.node): now}))
        return
    why = _strange(desk, run, home, seen) if home and not seen.job_alive else None
    if why is not None:
        raise HostError(
            f"another machine answers as host {run.host}, {why}: {_entry(desk, run)}\n"
            f"  run {run.id} lives on where it was started, and is followed again when that machine answers under this name",
            REASON,
        )


def _strange(desk: Desk, run: RunRow, home: Mapping[str, Any], seen: Evidence) -> str | None:
    """A reboot keeps the machine's id and begins a boot younger than the run; a container that is started anew keeps both ids."""
    if home["boot_id"] == seen.boot_id and seen.is_claimed:
        return None
    if home["machine"] and seen.machine and home["machine"] != seen.machine:
        return "by its machine id"
    began_s = desk.reader.attempts(run.id, run.attempt)[0].created_s
    if home["boot_id"] != seen.boot_id and desk.clock() - seen.uptime_s < began_s - CLOCKS_S:
        return "by its boot id, and was up before the run began"
    return None


def _entry(desk: Desk, run: RunRow) -> str:
    """Where the name is said, as the file is now."""
    kept = desk.reader.hosts_file(run.id)
    with contextlib.suppress(UsageError):
        return hosts_of([run.host], kept=kept, here=None).find(run.host).source
    return str(kept or Path("hosts.yaml"))
