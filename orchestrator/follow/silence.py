"""For how long a job has said nothing, and how long its steps take: what tells a hang from a slow step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from orchestrator.follow.desk import Desk
from orchestrator.follow.status import SHORTEST_STALL_S
from orchestrator.observe import Evidence
from orchestrator.shell import Shell
from orchestrator.store.ingest import is_supervisor, rank_of
from orchestrator.store.rows import AttemptRow, RunRow
from remote.rundir import writer_of
from remote.wire import Event, WireError, decode

STEPS_FOR_MEDIAN = 50
TAIL_BYTES = 64 * 1024  # hundreds of records


def silent_s(desk: Desk, run: RunRow, attempt: AttemptRow, num_job_events: int, host_now_s: float) -> float:
    """Since the job's newest event; `host_now_s` as a time of this machine.

    The clocks of day are asked once of each piece of news, when it comes; from then on the time passes by a clock
    that nobody sets. A clock that is set later makes no hang and hides none.
    """
    last_s = attempt.last_job_event_s or attempt.last_event_s
    if last_s is None:
        return 0.0
    what, now_s = f"{run.id} {attempt.number}", desk.monotonic()
    known, since_s = desk.silent_since_s.get(what, (-1, 0.0))
    if known != num_job_events:
        since_s = now_s - max(0.0, host_now_s - last_s)
        desk.silent_since_s[what] = num_job_events, since_s
    return now_s - since_s


def step_seconds(desk: Desk, run: RunRow, attempt: AttemptRow) -> list[float]:
    """What the job itself told of its newest steps."""
    told = desk.reader.metric_values(run.id, "step_s", attempt=attempt.number, rank=0, last=STEPS_FOR_MEDIAN)
    return [value.value for value in told]


def reported_every_s(shell: Shell, folder: str, seen: Evidence, quiet_s: float) -> Sequence[float]:
    """The times between the newest steps that rank 0 has reported, for a job that does not tell `step_s`.

    From the end of its events file in `folder`, an attempt's: the store keeps no time of each step. It is read
    where the silence is long enough to be a hang, and not otherwise. HostError where the host does not answer.
    """
    if quiet_s <= SHORTEST_STALL_S:
        return ()
    at_s: dict[int, float] = {}
    for file in seen.files:
        writer, is_rotated = writer_of(file.name) or ("", True)
        if is_rotated or is_supervisor(writer) or rank_of(writer) != 0:
            continue
        start = max(0, file.size_bytes - TAIL_BYTES)
        try:
            tail = shell.read_range(f"{folder}/{file.name}", start, TAIL_BYTES)
        except FileNotFoundError:  # moved away since it was listed; the next look sees where it went
            continue
        for event in _events(tail):
            step = event.fields.get("step")
            if event.kind == "metrics" and isinstance(step, int):
                at_s.setdefault(step, event.monotonic_s)
    times = sorted(at_s.values())[-STEPS_FOR_MEDIAN - 1 :]
    return [later - earlier for earlier, later in pairwise(times)]


def _events(tail: bytes) -> Iterator[Event]:
    """Its whole records; the first may be cut, the last be on its way."""
    for line in tail.splitlines():
        try:
            yield decode(line)
        except WireError:
            continue
