"""Things a person should hear of while a run goes on: a metric that is no number, a disk that fills up, a silent host.

Each is an event, written once per attempt; alerts are made of them. They change no state. The offset
of the host's clock is noted too: what a host says of times is kept as times of this machine.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import replace

from orchestrator.follow.desk import Desk
from orchestrator.observe import Evidence
from orchestrator.store.rows import EventRow, RunRow, SeriesRow
from orchestrator.units import format_size

LEAST_FREE_BYTES = 1024**3  # where no checkpoint says how much the next one needs
HERE = "this machine"
SILENT_S = 600.0
CLOCK_MOVED_S = 2.0


def notice(desk: Desk, run: RunRow, seen: Evidence) -> None:
    """Looks at what has just been brought in, and at the disks of both sides."""
    _note_nonfinite(desk, run)
    needed_bytes = _needed_bytes(desk, run)
    if seen.disk_free_bytes is not None and seen.disk_free_bytes < needed_bytes:
        text = f"host {run.host} has {format_size(seen.disk_free_bytes)} free on its disk; the next checkpoint wants {format_size(needed_bytes)}"
        _say_once(desk, run, "low_disk", text, host=run.host)
    free_bytes = shutil.disk_usage(desk.store.path.parent).free
    if free_bytes < LEAST_FREE_BYTES:
        text = f"this machine has {format_size(free_bytes)} free where it keeps what runs say, {desk.store.path.parent}"
        _say_once(desk, run, "low_disk", text, host=HERE)


def _note_nonfinite(desk: Desk, run: RunRow) -> None:
    """Of any metric, under each name once; of several ranks the lowest speaks."""
    bad: dict[str, SeriesRow] = {}
    for row in desk.reader.series(run.id):
        if row.attempt == run.attempt and (row.num_nan or math.inf in (row.max_value, -(row.min_value or 0.0))):
            bad.setdefault(row.name, row)
    told = {name for event in _said(desk, run, "nonfinite") for name in event.fields.get("metrics", ())}
    new = [row for name, row in bad.items() if name not in told]
    if new:
        lines = [
            f"{row.name} is not a number in {row.num_nan} of {row.num_values} steps"
            if row.num_nan
            else f"{row.name} is infinite"
            for row in new
        ]
        text = f"{'; '.join(lines)}; last at or before step {max(row.last_step for row in new)}"
        desk.store.add_event(run.id, "nonfinite", text, {"metrics": [row.name for row in new]})


def note_silence(desk: Desk, run: RunRow) -> None:
    """A host that has not answered for a while, once each time that it falls silent."""
    since_s = run.unreachable_since_s
    if since_s is not None and desk.clock() - since_s >= SILENT_S:
        minutes = f"{SILENT_S / 60:.0f} min"
        text = f"host {run.host} has not answered for {minutes}; the run may go on there, its last word is of before"
        _say_once(desk, run, "silent_host", text, host=run.host, since_s=since_s)


def note_clock(desk: Desk, host: str, seen: Evidence, *, asked_s: float) -> None:
    """Host minus here, written when it has moved; half the time since it was asked is its error. A host that says no time moves nothing."""
    if not seen.host_time_s:
        return
    answered_s = desk.clock()
    offset_s = seen.host_time_s - (asked_s + answered_s) / 2
    error_s = abs(answered_s - asked_s) / 2
    if abs(offset_s - desk.clock_offsets_s.get(host, 1e12)) > CLOCK_MOVED_S + error_s:
        desk.clock_offsets_s[host] = offset_s
        desk.store.host_seen(host, clock_offset_s=round(offset_s, 1))


def clock_offset_s(desk: Desk, host: str) -> float:
    """What is subtracted from the host's times; 0 where its clock is as right as can be told."""
    offset_s = desk.clock_offsets_s.get(host, 0.0)
    return offset_s if abs(offset_s) > CLOCK_MOVED_S else 0.0


def on_this_clock(seen: Evidence, offset_s: float) -> Evidence:
    """The evidence with the host's times as times of this machine."""
    if not offset_s:
        return seen
    ended_s = (seen.exit or {}).get("ended_s")
    if not isinstance(ended_s, (int, float)) or isinstance(ended_s, bool):
        return replace(seen, host_time_s=seen.host_time_s - offset_s)
    return replace(
        seen, host_time_s=seen.host_time_s - offset_s, exit={**(seen.exit or {}), "ended_s": ended_s - offset_s}
    )


def _needed_bytes(desk: Desk, run: RunRow) -> int:
    """Two checkpoints: the next one is whole before the oldest is dropped."""
    sizes = [row.size_bytes or 0 for row in desk.reader.checkpoints(run.id)]
    return max(LEAST_FREE_BYTES, 2 * max(sizes, default=0))


def _said(desk: Desk, run: RunRow, kind: str) -> list[EventRow]:
    return [row for row in desk.reader.events(run.id, kinds=[kind]) if row.attempt == run.attempt]


def _say_once(desk: Desk, run: RunRow, kind: str, text: str, **fields: str | float) -> None:
    """Of each host, where the fields name one."""
    if not any(row.fields == fields for row in _said(desk, run, kind)):
        desk.store.add_event(run.id, kind, text, fields)
