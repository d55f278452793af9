"""The errors that carry an exit code.

DraftyardError            1  failed for a reason said on stderr
├── UsageError            2  a word on the command line
│   └── RecipeError       2  a recipe, with file:line:col of every item
├── GateRefused           3  evidence missing, failed, or of another fingerprint
├── HostError             4  a host cannot be reached or trusted; `reason` says which
├── RunNotFound           5  no such run, or the prefix is ambiguous
└── NotFinished           6  still going at the deadline: not a failure
"""

from __future__ import annotations

from typing import ClassVar


def one_line(fault: str) -> str:
    """A fault of a file, whose names may hold line breaks."""
    return fault.replace("\n", "\\n")


class DraftyardError(Exception):
    """Says what was seen, what was expected, what to do."""

    exit_code: ClassVar[int] = 1
    reason: str = "failed"


class UsageError(DraftyardError):
    exit_code = 2
    reason = "usage"


class RecipeError(UsageError):
    """One or more faults of a recipe, each one line `file:line:col: path: message`."""

    reason = "recipe"

    def __init__(self, items: list[str]) -> None:
        self.items = [one_line(item) for item in items]
        super().__init__("\n".join(self.items))


class GateRefused(DraftyardError):
    """`repair` is the one command that makes the missing evidence."""

    exit_code = 3
    reason = "gate"

    def __init__(self, message: str, repair: str) -> None:
        super().__init__(f"{message}\n  repair: {repair}")
        self.repair = repair


class HostError(DraftyardError):
    """reason: unreachable, host_key_unknown, host_key_changed, auth, container_stopped, another_machine."""

    exit_code = 4

    def __init__(self, message: str, reason: str = "unreachable") -> None:
        super().__init__(message)
        self.reason = reason


class StoreError(DraftyardError):
    """runs.db cannot be used: locked, full, read-only, damaged, too new, or on a file system that breaks it.

    `is_passing`: it may be over by itself or once a person has made room, so a background process tries again.
    """

    reason = "store"

    def __init__(self, message: str, *, is_passing: bool = False) -> None:
        super().__init__(message)
        self.is_passing = is_passing


class RunNotFound(DraftyardError):
    exit_code = 5
    reason = "run_not_found"


class NotFinished(DraftyardError):
    exit_code = 6
    reason = "not_finished"
