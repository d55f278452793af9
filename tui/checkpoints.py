"""What a run left behind: checkpoints, artifacts, evaluations, its rungs, and what happened to it, newest first."""

from __future__ import annotations

from orchestrator.store.rows import State
from orchestrator.units import format_size
from tui.detail import RunDetail
from tui.outside import to_type
from tui.overview import clock
from tui.pieces import BLANK, Line, broken, heading, width_of, wrapped
from tui.wording import age, count, fit
from tui.worth import evaluation_lines


def checkpoint_lines(detail: RunDetail, now_s: float, width: int) -> list[Line]:
    run = detail.run
    lines: list[Line] = [heading("Checkpoints", width, f"on {run.host}")]
    for row in reversed(detail.checkpoints):
        best = [("best", "good")] if row.is_best else []
        size = format_size(row.size_bytes) if row.size_bytes is not None else ""
        lines.append(
            [
                (f"step {count(row.step):>9}  ", "text"),
                (f"{size:>10}  ", "muted"),
                (f"{age(now_s - row.at_s):>4} ago  ", "muted"),
                *best,
            ]
        )
    if detail.checkpoints:
        root = f"{run.folder}/" if run.folder else ""
        lines += wrapped(root + detail.checkpoints[-1].path, width, "muted")
    else:
        lines.append([("None yet.", "muted")])
    lines += _artifact_lines(detail, width)
    lines += evaluation_lines(detail.evaluations, width, run=run, spec=detail.spec or {})
    if detail.rungs:
        lines += [BLANK, heading("Rungs", width, "with this fingerprint")]
        for rung in reversed(detail.rungs):
            mark = ("✓ ", "good") if rung.passed else ("✗ ", "bad")
            told = wrapped(rung.message, max(8, width - 16), "muted") or [BLANK]
            first: Line = [mark, (fit(rung.rung, 14), "text")]
            lines += [[*([(" " * 16, "text")] if index else first), *line] for index, line in enumerate(told)]
    lines += [BLANK, heading("What happened", width, "newest first")]
    times = [clock(event.at_s, now_s) for event in detail.events]
    room = max(map(len, times), default=0)
    for event, at in reversed([*zip(detail.events, times, strict=True)]):
        begin: Line = [(fit(at, room) + "  ", "faint"), (fit(event.kind, 10), "muted")]
        gap: Line = [(" " * width_of(begin), "text")]
        told = wrapped(event.text, max(8, width - width_of(begin))) or [BLANK]
        lines += [[*(gap if index else begin), *line] for index, line in enumerate(told)]
    return lines


def _artifact_lines(detail: RunDetail, width: int) -> list[Line]:
    """What is known to lie among an attempt's artifacts, on the host; the folder itself is looked at by `pull` alone."""
    run = detail.run
    known = [
        (failure.attempt, str(failure.facts["memory_snapshot"]), "the allocator's memory when it ran out")
        for failure in detail.failures
        if failure.facts.get("memory_snapshot")
    ]
    if run.kind == "export" and run.state is State.SUCCEEDED:
        known.append((run.attempt, "export", "the drafter as public tools load it"))
    lines: list[Line] = [BLANK, heading("Artifacts", width)]
    for attempt, name, what in known:
        lines += broken([(f"attempts/{attempt}/artifacts/{name}", "text"), (f"  {what}", "muted")], width)
    lines += wrapped(to_type(f"draftyard pull {run.id} --artifacts brings all that each attempt left."), width, "muted")
    return lines
