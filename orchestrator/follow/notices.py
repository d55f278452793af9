"""Things a person should hear of while a run goes on: a loss that is no number, a disk that fills up.

Each is an event, written once per attempt; alerts are made of them. They change no state. The offset
of the host's clock is noted too: what a host says of times is kept as times of this machine.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.follow.desk import Desk
from orchestrator.observe import Evidence
from orchestrator.store.rows import RunRow
from orchestrator.units import format_size

LEAST_FREE_BYTES = 1024**3  # where no checkpoint says how much the next one needs
LOSS = "loss"
CLOCK_MOVED_S = 2.0


def notice(desk: Desk, run: RunRow, seen: Evidence) -> None:
    """Looks at what has just been brought in."""
    bad = [row for row in desk.reader.series(run.id, LOSS) if row.attempt == run.attempt and row.num_nan]
    if bad:
        text = f"{LOSS} is not a number in {bad[0].num_nan} of {bad[0].num_values} steps, last at or before step {bad[0].last_step}"
        _say_once(desk, run, "nonfinite", text)
    needed_bytes = _needed_bytes(desk, run)
    if seen.disk_free_bytes is not None and seen.disk_free_bytes < needed_bytes:
        text = f"host {run.host} has {format_size(seen.disk_free_bytes)} free on its disk; the next checkpoint wants {format_size(needed_bytes)}"
        _say_once(desk, run, "low_disk", text, host=run.host)


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


def _say_once(desk: Desk, run: RunRow, kind: str, text: str, **fields: str) -> None:
    """Of each host, where the fields name one."""
    said = [row for row in desk.reader.events(run.id, kinds=[kind]) if row.attempt == run.attempt]
    if not any(row.fields == fields for row in said):
        desk.store.add_event(run.id, kind, text, fields)
