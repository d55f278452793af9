"""Who is starting a run: a process of this machine, known so that its death can be told from its patience.

Until a launch has written its last word before the spawn, nothing on the host says anything of it. A
launch that was killed in that time would look like one that is still shipping. What is decided here is
the end of such a run alone, for the follower and for a launch that is said again.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

from orchestrator.store.rows import Document, RunRow, State
from orchestrator.store.writes import Store
from remote.processes import Identity, boot_id

LAUNCH_KILLED = "the launch was killed before it started the job"
NAMESPACE = Path("/proc/self/ns/pid")
RETRY = "DRAFTYARD_RETRY"  # set by the follower for what carries out a retry: the id of the wish


def taken_retry() -> int | None:
    """The wish that this process carries out; taken once, so that nothing started from here holds it for its own."""
    text = os.environ.pop(RETRY, "")
    return int(text) if text.isdecimal() else None


def this_process() -> str:
    """A text to keep with the run, never the same twice: a process may launch many runs, and tries of one at once are told
    apart by it. No facts of the process where the machine has no /proc."""
    mine = Identity.of(os.getpid())
    facts = {} if mine is None else {**mine.__dict__, "namespace": _namespace()}
    return json.dumps({**facts, "launch": secrets.token_hex(8)})


def is_alive(text: str | None) -> bool | None:
    """Whether that process lives; None where nobody can tell: none kept, or one of another container."""
    kept: dict[str, Any] = json.loads(text) if text else {}
    if "pid" not in kept:
        return None
    if kept["boot_id"] != boot_id():
        return False
    if kept["namespace"] != _namespace():
        return None
    return Identity(kept["pid"], kept["start_ticks"], kept["boot_id"]).is_alive


def settle_if_killed(store: Store, run: RunRow) -> bool:
    """Ends a pending run whose launch is gone; False where it lives, or nobody can tell, or it was quicker.

    Such a run was never spawned: the launch says "setting up" before it spawns.
    """
    if run.state is not State.PENDING:
        return False
    is_gone = is_alive(store.reader.document(run.id, Document.LAUNCHER)) is False
    # In this order: nobody moves the row after its launch is gone, so what is read now was its last word.
    if not is_gone or store.reader.run(run.id).state is not State.PENDING:
        return False
    store.set_state(run.id, State.FAILED, evidence=LAUNCH_KILLED, attempt=run.attempt)
    return True


def _namespace() -> str | None:
    try:
        return str(NAMESPACE.readlink())
    except OSError:
        return None
