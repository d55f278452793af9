"""What is left to show of a bad end that no rule explains: how it ended, and what it printed last."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.failure.texts import KILLED, KILLED_BY_SOMEBODY

LAST_LINES = 20
MOST_TOLD = 500  # letters of the last line
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
_CRASHED = "a crash in compiled code: PYTHONFAULTHANDLER=1 under env: shows where; compare the versions of torch and of what it loads"
_SAID_NO_MORE = "nothing known says why; its last words are below, all of them in draftyard logs"
_SAID_NOTHING = "nothing known says why, and it printed nothing"


@dataclass(frozen=True)
class LastWords:
    message: str  # one line
    hint: str
    source: str  # stderr, stdout or exit file
    text: str  # the last lines, empty where there are none


def last_words(exit_file: Mapping[str, Any], stderr: str, stdout: str) -> LastWords | None:
    """None where the job did not end badly."""
    number, code = exit_file.get("signal"), exit_file.get("exit_code")
    if number is None and isinstance(code, int) and code > 128:  # as a shell says it
        number = code - 128
    if not isinstance(number, int) and not (isinstance(code, int) and code != 0):
        return None
    source, printed = ("stderr", stderr) if stderr.strip() else ("stdout", stdout)
    lines = printed.rstrip().splitlines()[-LAST_LINES:]
    named = f"signal {number} ({_name(number)})" if isinstance(number, int) else ""
    how = named or f"exit status {code}"
    if named and exit_file.get("signal") is None:  # the job itself may have chosen that status
        how = f"exit status {code}" + ("" if named.endswith("(unknown)") else f", as a shell says of {named}")
    said = _SAID_NO_MORE if lines else _SAID_NOTHING
    hint = _CRASHED if number in _CRASHES else _killed(exit_file) if number == signal.SIGKILL else said
    last = f": {_in_short(lines[-1].strip())}" if lines else ""
    return LastWords(f"{how}{last}", hint, source if lines else "exit file", "\n".join(lines))


def _in_short(line: str) -> str:
    """A line may be as long as a log: it is there whole, and a page tells its end."""
    return line if len(line) <= MOST_TOLD else f"… {line[-MOST_TOLD:]}"


def _killed(exit_file: Mapping[str, Any]) -> str:
    """By the kernel's counters, which have not risen where this is asked; None of them may be there."""
    counters = [exit_file.get(name) for name in ("oom_kill_delta", "host_oom_kill_delta")]
    return KILLED_BY_SOMEBODY if 0 in counters else KILLED


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
