"""Whether what live runs do is written down, by somebody and onto a disk with room. Starts nobody; `life` does."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterable
from typing import TYPE_CHECKING

from orchestrator.actions.history import open_reader
from orchestrator.actions.places import Places
from orchestrator.lazy import lazy
from orchestrator.store.faults import has_no_quota_left
from orchestrator.store.rows import RunRow
from orchestrator.units import duration, format_size

if TYPE_CHECKING:
    from orchestrator.follow import lease
else:
    lease = lazy("orchestrator.follow.lease")  # what it starts processes with is not for `ls`

FOLLOWER_STARTS_S = 15.0  # generous: a busy machine
ROOM_BYTES = 2**20  # with less SQLite may fail to write what a look brings


def unfollowed_s(places: Places, runs: Iterable[RunRow], *, now_s: float) -> float | None:
    """How old the newest word of the live ones among these runs is, where no follower is at work (it may be stopped) and it is not young.

    None while all is well; a follower that is just starting is given time.
    """
    silent_s = _silent_s(places, runs, now_s)
    is_at_work = silent_s <= FOLLOWER_STARTS_S or is_followed(places)
    return None if is_at_work else silent_s


def unwritten(places: Places, runs: Iterable[RunRow], *, now_s: float) -> str | None:
    """Why nothing new comes of the live ones among these runs, and what to do, where their database's disk is full, or a quota.

    A follower that lives cannot say so: neither the database nor its own log takes a word then.
    """
    silent_s = _silent_s(places, runs, now_s)
    try:
        left_bytes = shutil.disk_usage(places.db.parent).free
    except OSError:
        return None
    if silent_s <= FOLLOWER_STARTS_S:
        return None
    if left_bytes < ROOM_BYTES:
        what = f"the disk of {places.db} is full ({format_size(left_bytes)} left)"
        repair = f"make room there (df {shlex.quote(str(places.db.parent))})"
    elif has_no_quota_left(places.db.parent):
        what = f"the quota on the disk of {places.db} is used up"
        repair = "make room there, or have it raised (quota -s)"
    else:
        return None
    told = f"{what}, so nothing new of live runs is written, for {duration(silent_s)}"
    return f"{told}; {repair}, and what they did meanwhile is read"


def _silent_s(places: Places, runs: Iterable[RunRow], now_s: float) -> float:
    """How old the newest word of the live ones is; 0 without any."""
    live = [run.last_event_s or _begun_s(places, run) for run in runs if not run.state.is_final]
    return now_s - max(live, default=now_s)


def _begun_s(places: Places, run: RunRow) -> float:
    """When its newest attempt was asked for, of a run that was resumed long after its launch."""
    with open_reader(places) as reader:
        return max([run.created_s, *(attempt.created_s for attempt in reader.attempts(run.id))])


def is_followed(places: Places) -> bool:
    """Whether a background follower is at work on this database, not stopped; costs microseconds."""
    return lease.is_followed(places.db) and lease.stopped_pid(places.db) is None


def follower_pid(places: Places) -> int | None:
    """The process that follows, where the kernel tells; None elsewhere."""
    return lease.holder_pid(places.db)
