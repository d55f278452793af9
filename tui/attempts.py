"""The attempts of a run: how long all of them took, which steps each took, and what a resume had to do anew. Pure drawing."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.store.rows import AttemptRow
from orchestrator.units import counted
from tui.detail import RunDetail
from tui.pieces import Line, Piece, fields, flowed
from tui.wording import age, count, duration, reason_words, state_letter, state_word

MOST = 3  # attempts that are listed, the newest ones


def took(detail: RunDetail, now_s: float) -> Line | None:
    """From the start of the first attempt to the end of the last; of several also for how long it ran. None of one that never began."""
    run = detail.run
    begun = [attempt for attempt in detail.attempts if attempt.started_s is not None]
    begun_s = min((attempt.started_s for attempt in begun if attempt.started_s is not None), default=run.started_s)
    if begun_s is None or run.ended_s is None:
        return None
    told: list[Piece] = [("took ", "muted"), (duration(run.ended_s - begun_s), "text")]
    if len(begun) > 1:
        ran_s = sum(attempt.ended_s - attempt.started_s for attempt in begun if attempt.ended_s and attempt.started_s)
        told += [
            (f" in {counted(len(begun), 'attempt')}, ", "muted"),
            (duration(ran_s), "text"),
            (" of it running", "muted"),
        ]
    return [*told, (f", ended {age(now_s - run.ended_s)} ago", "muted")]


def attempt_lines(detail: RunDetail, width: int) -> list[Line]:
    """Of a run with several: the steps of each, how it ended, and the work that was lost between them."""
    if len(detail.attempts) < 2:
        return []
    lines: list[Line] = []
    for attempt in detail.attempts[-MOST:]:
        meaning = state_letter(attempt.state, attempt.reason)[1]
        steps = f"steps {count(attempt.first_step)}–{count(attempt.last_step)}" if attempt.last_step else "no step"
        told = reason_words(attempt.reason) if attempt.reason else state_word(attempt.state)
        lines += fields(f"attempt {attempt.number}", flowed([[(steps, "text")], [(told, meaning)]], width - 13))
    num_steps, lost_s = lost_work(detail.attempts)
    if num_steps:
        spent = f", {duration(lost_s)}" if lost_s else ""
        lines += fields("lost work", flowed([[(f"{counted(num_steps, 'step')}{spent}", "warn")]], width - 13))
    return lines


def lost_work(attempts: Sequence[AttemptRow]) -> tuple[int, float]:
    """Steps that a later attempt took again, and the seconds they had taken at their attempt's mean pace."""
    num_steps, lost_s = 0, 0.0
    ends = [(one.first_step, one.last_step, one.duration_s) for one in attempts]
    reached = [(first, last, ran_s or 0.0) for first, last, ran_s in ends if first is not None and last is not None]
    for number, (first, last, ran_s) in enumerate(reached):
        later = [after for after, _, _ in reached[number + 1 :]]
        again = max(0, last + 1 - max(first, min(later, default=last + 1)))
        num_steps += again
        lost_s += ran_s / (last + 1 - first) * again
    return num_steps, lost_s
