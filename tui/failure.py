"""Why a run ended badly: what happened, what would help, the numbers, the whole traceback.

Also says it when nothing failed, so that the tab never lies empty. Pure drawing.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, chop_cells

from orchestrator.store.rows import FailureRow, RunRow, State
from tui.answers import Answers
from tui.detail import RunDetail
from tui.facts import fact_lines
from tui.fits import fit_lines
from tui.outside import to_type
from tui.pieces import BLANK, Line, broken, heading, wrapped
from tui.ranks import Rank
from tui.runs_rows import never_started
from tui.wording import count, gib, state_word, told_and_repairs

_UNEXPLAINED = "unexplained"  # the kind of a bad end that no rule explains


def failure_lines(detail: RunDetail, width: int) -> list[Line]:
    run = detail.run
    if not detail.failures:
        if never_started(run):
            told = [line for part in told_and_repairs(run.evidence) for line in wrapped(part, width)]
            return [[("It never started; nothing ran.", "bad")], *told]
        lines: list[Line] = [[(_nothing_failed(run), "good" if run.state is State.SUCCEEDED else "muted")]]
        told = [line for part in told_and_repairs(run.evidence) for line in wrapped(part, width, "muted")]
        return [*lines, *told] if run.evidence else lines
    first, *echoes = detail.failures
    lines = _first_cause(first, _source(first, detail.ranks), detail.answers, width)
    for echo in echoes:
        told_by = _source(echo, detail.ranks)
        lines += [BLANK, heading(f"Also: {_kind(echo.kind)}", width, f"attempt {echo.attempt}, {told_by}")]
        lines += wrapped(echo.message, width)
    if first.traceback:
        is_last_words = first.kind == _UNEXPLAINED
        lines += [
            BLANK,
            heading("Last words", width, first.source) if is_last_words else heading("Traceback", width, "whole"),
        ]
        lines += [line for row in first.traceback.rstrip().split("\n") for line in _trace_line(row, width)]
    return lines


def _source(failure: FailureRow, ranks: Sequence[Rank]) -> str:
    """Who told it; of a run over several hosts also where that was."""
    host = next((rank.host for rank in ranks if failure.source == f"rank{rank.number}"), "")
    return f"{failure.source} on {host}" if host else failure.source


def _first_cause(failure: FailureRow, source: str, answers: Answers, width: int) -> list[Line]:
    where = [f"stage {failure.stage}"] if failure.stage else []
    where += [f"step {count(failure.step)}"] if failure.step is not None else []
    where += [f"attempt {failure.attempt}", f"told by {source}"]
    lines: list[Line] = [
        *broken([(_kind(failure.kind), "bad"), ("  " + ", ".join(where), "muted")], width),
        *wrapped(failure.message, width, "strong"),
        *_exceeded(answers, width),
    ]
    if failure.hint:
        lines += [BLANK, heading("What would help", width), *wrapped(to_type(failure.hint), width)]
    lines += _would_fit(answers, width)
    if failure.facts:
        lines += [BLANK, heading("Numbers", width, "sizes in GiB, 2^30 bytes"), *fact_lines(failure.facts, width)]
    return lines


def _exceeded(answers: Answers, width: int) -> list[Line]:
    """Which stage went beyond its plan, and what most of that was; where the plan was kept there is nothing to say."""
    over = answers.exceeded
    if over is None:
        return []
    planned = f"{state_word(over.stage)} was planned with {gib(over.planned_bytes)} allocated"
    part = f"{gib(over.component_bytes)} of it {state_word(over.component)}"
    return wrapped(f"{planned}, {part}; it needed {gib(over.needed_bytes)}", width, "warn")


def _would_fit(answers: Answers, width: int) -> list[Line]:
    """From the plan of what ran, against the card less what that plan had been short of."""
    if answers.fits is None:
        return []
    first = (2 if answers.setting else 1) if answers.try_line else None
    title, *changes = fit_lines(answers.fits, width, short_bytes=answers.short_bytes, first=first)
    lines: list[Line] = [*_pieces(answers, width), BLANK, title]
    # Where its stage is named above, that has said so: a low screen has no line to spare for the changes that fit.
    if answers.short_bytes and answers.exceeded is None:
        told = f"It needed {gib(answers.short_bytes)} more than the plan said; what is offered leaves that free."
        lines += wrapped(told, width, "warn")
    command, _, what = answers.try_line.partition("    ")
    said: Line = [(to_type(command), "strong"), (f"  {what}", "muted")]
    return [*lines, *changes, *([BLANK, *broken(said, width)] if command else [])]


def _pieces(answers: Answers, width: int) -> list[Line]:
    """Memory was there, but in pieces: what comes before every change of the plan."""
    if not answers.pieces:
        return []
    lines: list[Line] = [BLANK, heading("To try first", width), *wrapped(answers.pieces, width)]
    if answers.setting is not None:
        name, assigned = answers.setting
        told = wrapped(" ".join(f"--env {word}" for word in assigned), width - 3, "faint")
        lines += [[("1  ", "muted"), (name, "text")], *([("   ", "text"), *line] for line in told)]
    return lines


def _kind(kind: str) -> str:
    names = {"gpu_oom": "GPU out of memory", "host_oom": "Host out of memory", "cgroup_oom": "Container out of memory"}
    names[_UNEXPLAINED] = "Ended badly, and nothing known says why"
    return names.get(kind, kind.replace("_", " ").capitalize())


def _nothing_failed(run: RunRow) -> str:
    if run.state is State.FAILED:
        return "It failed; nothing is known of the cause."
    if run.state is State.LOST:
        return "It was lost; it told nothing of its end."
    return "Nothing failed." if run.state.is_final else f"Nothing has failed; the run is {state_word(run.state)}."


def _trace_line(row: str, width: int) -> list[Line]:
    """Frames of a traceback stand out by their indent; a long line is broken between words, never cut."""
    meaning = "muted" if row.startswith("    ") else "text"
    lines: list[Line] = []
    while cell_len(row) > width > 1:
        room = len(chop_cells(row, width)[0])
        place = row.rfind(" ", room // 2, room + 1)
        end = place if place > 0 else room  # a word of that length is broken
        lines.append([(row[:end], meaning)])
        row = row[end:].removeprefix(" ")
    return [*lines, [(row, meaning)]]
