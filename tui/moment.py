"""Of when a measurement is: of now, or of a moment that is told beside it. No screen shows one without this question.

Times are those of the store, which keeps every host's as this machine's. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.store.rows import RunRow
from tui.pieces import Line
from tui.wording import age

PRESENT_S = 120.0  # a supervisor samples its cards every 10 s, and waits 60 s for a driver that is slow to answer
_GROUNDS = ("line", "accent")  # the track of a bar, the mark of what is chosen


def is_of_now(at_s: float | None, now_s: float) -> bool:
    """Whether what was measured then may be told as what is; unknown or far in the future: no."""
    return at_s is not None and abs(now_s - at_s) <= PRESENT_S


def is_present(run: RunRow, at_s: float | None, now_s: float) -> bool:
    """As above, of a run: one that has ended or is out of reach has no present."""
    return not run.state.is_final and run.unreachable_since_s is None and is_of_now(at_s, now_s)


def end_s(run: RunRow, left_s: float, stepped_s: float | None, now_s: float) -> float:
    """When it takes its last step, `left_s` from now; of one that is silent, from its newest step: silence puts no end off."""
    is_silent = run.last_event_s is not None and not is_present(run, run.last_event_s, now_s)
    return (stepped_s if is_silent and stepped_s is not None else now_s) + left_s


def last_seen(at_s: float | None, now_s: float) -> str:
    """`last seen 25m ago`."""
    return "never seen" if at_s is None else f"last seen {age(now_s - at_s)} ago"


def faded(lines: Iterable[Line]) -> list[Line]:
    """In the ink of what is no longer so: no number stands out, no bar is live."""
    return [[(text, meaning if meaning in _GROUNDS else "faint") for text, meaning in line] for line in lines]
