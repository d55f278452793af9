"""What a fault says on a screen or after it, in one line: of the store while reading, of our own when a screen broke."""

from __future__ import annotations

import traceback
from pathlib import Path

from orchestrator.actions.log_text import inert
from orchestrator.errors import StoreError
from orchestrator.redact import redact


def trouble(error: Exception, lasting_s: float) -> str:
    """Why reading failed, in one line; what passes is no fault, only a wait."""
    if isinstance(error, StoreError) and error.is_passing:
        return f"{error.__cause__ or error} for {lasting_s:.0f} s; shown is what was read before"
    return (str(error).splitlines() or [type(error).__name__])[0]


def crash_line(error: BaseException) -> str:
    """What broke and where in our own files, for a report; no value of any variable, and no secret in the message."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent.name == "tui"]
    where = f" at tui/{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    told = redact(inert(str(error).splitlines()[0] if str(error) else "no message"))
    return f"draftyard watch: the screen broke{where}: {type(error).__name__}: {told}; please report it"
