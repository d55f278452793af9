"""Whether somebody follows the live runs, and how old what is shown of them is. Starts nobody; `life` does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from orchestrator.actions.history import open_reader
from orchestrator.actions.places import Places
from orchestrator.lazy import lazy
from orchestrator.store.rows import RunRow

if TYPE_CHECKING:
    from orchestrator.follow import lease
else:
    lease = lazy("orchestrator.follow.lease")  # what it starts processes with is not for `ls`

FOLLOWER_STARTS_S = 15.0  # generous: a busy machine


def unfollowed_s(places: Places, runs: Iterable[RunRow], *, now_s: float) -> float | None:
    """How old the newest word of the live ones among these runs is, where no follower is at work (it may be stopped) and it is not young.

    None while all is well; a follower that is just starting is given time.
    """
    live = [run.last_event_s or _begun_s(places, run) for run in runs if not run.state.is_final]
    silent_s = now_s - max(live, default=now_s)
    is_at_work = silent_s <= FOLLOWER_STARTS_S or is_followed(places)
    return None if is_at_work else silent_s


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
