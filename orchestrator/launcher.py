"""Who is starting a run: a process of this machine, known so that its death can be told from its patience.

Until a launch has written its last word before the spawn, nothing on the host says anything of it. A
launch that was killed in that time would look like one that is still shipping. It decides nothing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from remote.processes import Identity, boot_id

NAMESPACE = Path("/proc/self/ns/pid")
RETRY = "DRAFTYARD_RETRY"  # set by the follower for what carries out a retry: the id of the wish


def taken_retry() -> int | None:
    """The wish that this process carries out; taken once, so that nothing started from here holds it for its own."""
    text = os.environ.pop(RETRY, "")
    return int(text) if text.isdecimal() else None


def this_process() -> str:
    """A text to keep with the run; empty facts where the machine has no /proc."""
    mine = Identity.of(os.getpid())
    return json.dumps({} if mine is None else {**mine.__dict__, "namespace": _namespace()})


def is_alive(text: str | None) -> bool | None:
    """Whether that process lives; None where nobody can tell: none kept, or one of another container."""
    kept: dict[str, Any] = json.loads(text) if text else {}
    if not kept:
        return None
    if kept["boot_id"] != boot_id():
        return False
    if kept["namespace"] != _namespace():
        return None
    return Identity(kept["pid"], kept["start_ticks"], kept["boot_id"]).is_alive


def _namespace() -> str | None:
    try:
        return str(NAMESPACE.readlink())
    except OSError:
        return None
