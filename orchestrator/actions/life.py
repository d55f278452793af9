"""A run's life from this side: wishes and waiting. Hosts are the follower's business.

Every word about a run comes from the store; a wish is an intent that the follower carries out.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from orchestrator.actions import followed
from orchestrator.actions.places import Places
from orchestrator.actions.throughput import time_left_s
from orchestrator.actions.wishes import kill_in_s
from orchestrator.errors import DraftyardError, NotFinished, StoreError
from orchestrator.follow import lease, nodes
from orchestrator.store.engine import LOCK_WAIT_S
from orchestrator.store.migrations import BUSY_TIMEOUT_S
from orchestrator.store.reads import Reader
from orchestrator.store.rows import Document, ProgressRow, Reason, RunRow, State
from orchestrator.store.writes import Store
from orchestrator.units import is_measurable

POLL_S = 0.2
PATIENCE_S = 1.0  # of one question with a deadline; it is asked again until then
SHOWN = ("loss", "streak", "block_tokens_per_s")  # of a run that one waits for
COUNTDOWN_S = 1.0
FOLLOWER_CHECK_S = 5.0  # a follower that died is replaced within this time while somebody waits

_OUTCOMES = {Reason.GPU_OOM: 11, Reason.HOST_OOM: 12, Reason.CGROUP_OOM: 12}


@dataclass(frozen=True)
class Moment:
    """What a waiting person is shown: the run now, its newest numbers, work outside the step loop."""

    run: RunRow
    recent: dict[str, float]  # metric -> mean of its newest reports: single steps are too noisy to see learning in
    progress: ProgressRow | None
    kill_in_s: float | None = None  # while it stops: what is left of the grace
    time_left_s: float | None = None  # to its last step
    unwritten: str | None = None  # what keeps news of it from being written here


@dataclass(frozen=True)
class Stop:
    """What asking for a stop came to. Where a retry was called off, nothing of the run lives, nor will."""

    run: RunRow
    has_called_off_retry: bool = False


def stop(places: Places, selector: str, *, grace_s: float | None = None, timeout_s: float | None = None) -> Stop:
    """Wishes a run stopped; the follower does it. Of a run that has ended it calls off the retry that is to come.

    Raises DraftyardError for a run that has ended for good; StoreError where nothing could be written in `timeout_s`.
    """
    with Store(places.db, lock_wait_s=LOCK_WAIT_S if timeout_s is None else min(LOCK_WAIT_S, timeout_s)) as store:
        run = store.reader.run(selector)
        if run.state.is_final and store.call_off_retry(run.id):  # even one under way: it can make no attempt any more
            return Stop(run, has_called_off_retry=True)
        store.ask(run.id, "stop", grace_s=grace_s)
    ensure_follower(places)
    return Stop(run)


def wait(
    places: Places,
    selector: str,
    *,
    timeout_s: float | None = None,
    since_s: float | None = None,
    on_moment: Callable[[Moment], None] | None = None,
) -> RunRow:
    """Returns when the run has ended; `on_moment` is called when something has changed, while it stops each second, and when
    something comes to keep its news from being written.

    Raises NotFinished `timeout_s` after `since_s` (monotonic; None: now), also where a locked database says nothing.
    """
    ends_s = math.inf if timeout_s is None else (time.monotonic() if since_s is None else since_s) + timeout_s
    while True:
        try:
            with Reader(places.db, busy_timeout_s=_patience_s(ends_s)) as reader:
                run = reader.run(selector)
                selector = run.id  # what is asked again means the same run
                run = _until_its_end(places, reader, run, ends_s, on_moment)
            break
        except StoreError as error:
            if timeout_s is None or not error.is_passing:
                raise
            if time.monotonic() >= ends_s:
                raise NotFinished(f"nothing is known of run {selector} after {timeout_s:g} s: {error}") from error
            time.sleep(min(POLL_S, _patience_s(ends_s)))
    if not run.state.is_final:
        raise NotFinished(
            f"run {run.id} {_last_known(places, run)} after {timeout_s:g} s; {_outlook(places, run)}{_gone(run)}"
            f"{_full(places, run)}"
        )
    return run


def is_over(places: Places, selector: str) -> RunRow | None:
    """The run, where it is known at once that it has ended."""
    with contextlib.suppress(DraftyardError), Reader(places.db, busy_timeout_s=POLL_S) as reader:
        run = reader.run(selector)
        return run if run.state.is_final else None
    return None


def _full(places: Places, run: RunRow) -> str:
    with contextlib.suppress(StoreError):
        if (why := followed.unwritten(places, [run], now_s=time.time())) is not None:
            return f"\n  {why}"
    return ""


def _last_known(places: Places, run: RunRow) -> str:
    """What is known of a run that has not ended in time: of a silent host only what it said last."""
    if run.unreachable_since_s is None:
        return f"is {run.state}"
    silent: tuple[str, ...] = ()
    with contextlib.suppress(StoreError), Reader(places.db, busy_timeout_s=POLL_S) as reader:
        silent = nodes.silent_hosts(reader, run)
    if len(silent) > 1:
        return f"was {run.state} when hosts {', '.join(silent)} were last reached, and the hosts are unreachable"
    which = silent[0] if silent else " or ".join(run.hosts)  # a database that is locked by now tells no more
    return f"was {run.state} when host {which} was last reached, and the host is unreachable"


def _outlook(places: Places, run: RunRow) -> str:
    wishes: set[str] = set()
    with contextlib.suppress(StoreError), Reader(places.db, busy_timeout_s=POLL_S) as reader:  # locked: the time is up
        wishes = {intent.kind for intent in reader.intents(run.id)}
    if "stop" in wishes:
        if run.unreachable_since_s is None and run.state is State.STOPPING:  # its evidence says what keeps it
            return f"the wish to stop it stays; {run.evidence}"
        return "the wish to stop it stays, and is carried out when the host answers"
    return "it may well go on" if run.unreachable_since_s is not None else "it goes on"


def _gone(run: RunRow) -> str:
    """What ends a run of a machine that will never answer again; nothing else does, as silence is no evidence."""
    return "" if run.unreachable_since_s is None else f"; gone for good: draftyard mark {run.id} lost WHY"


def _until_its_end(
    places: Places, reader: Reader, run: RunRow, ends_s: float, on_moment: Callable[[Moment], None] | None
) -> RunRow:
    """The run when it has ended, or as it is at the deadline."""
    version, checked_s, said_s, is_full = None, -math.inf, 0.0, False
    while not run.state.is_final:
        if time.monotonic() - checked_s >= FOLLOWER_CHECK_S:
            ensure_follower(places)
            unwritten = followed.unwritten(places, [run], now_s=time.time())
            if unwritten is not None and not is_full and on_moment is not None:
                on_moment(replace(_moment(reader, run), unwritten=unwritten))
            checked_s, is_full = time.monotonic(), unwritten is not None
        if time.monotonic() >= ends_s:
            break
        time.sleep(min(POLL_S, _patience_s(ends_s)))
        reader.database.wait_at_most(_patience_s(ends_s))
        newest = reader.data_version()
        if newest != version or (run.state is State.STOPPING and time.monotonic() - said_s >= COUNTDOWN_S):
            version, said_s, run = newest, time.monotonic(), reader.run(run.id)
            if on_moment is not None:
                on_moment(_moment(reader, run))
    return run


def _patience_s(ends_s: float) -> float:
    """How long one question may wait for a database that others keep locked; meanwhile a Ctrl-C is not heard."""
    return BUSY_TIMEOUT_S if ends_s == math.inf else min(PATIENCE_S, max(0.0, ends_s - time.monotonic()))


def outcome_code(run: RunRow) -> int:
    """The exit code of `wait` and `logs -f` for a run that has ended."""
    if run.state is State.SUCCEEDED:
        return 0
    if run.state is State.STOPPED:
        return 13
    return next((code for reason, code in _OUTCOMES.items() if run.reason == reason), 10)


def ensure_follower(places: Places) -> None:
    """Starts the background follower of this database unless one is at work; returns at once. Raises StoreError."""
    try:
        lease.ensure_follower(places.db, hosts_file=places.hosts_file)
    except (OSError, subprocess.CalledProcessError) as error:
        told = f"no follower could be started beside {places.db} ({error}); what runs goes on, but nobody records it"
        raise StoreError(f"{told}; make that folder writable, then: draftyard follow") from error
    refuse_stopped(places)


def end_older_follower(places: Places) -> None:
    """Ends the follower of this database where an older draftyard started it. Raises StoreError where that is not ours."""
    lease.end_older(places.db)


def refuse_stopped(places: Places) -> None:
    """Raises StoreError where the follower of this database is stopped: it keeps every other from following."""
    pid = lease.stopped_pid(places.db)
    if pid is not None:
        told = (
            f"the follower of {places.db} (process {pid}) is stopped, so no stop is carried out and nothing is recorded"
        )
        raise StoreError(f"{told}; let it go on: kill -CONT {pid}")


def _moment(reader: Reader, run: RunRow) -> Moment:
    told = reader.latest([run.id], SHOWN)[run.id]
    progress = [row for row in reader.progress(run.id) if row.attempt == run.attempt]
    recent = {name: told[name].recent_mean for name in SHOWN if name in told and is_measurable(told[name].recent_mean)}
    spec = json.loads((run.state is State.STOPPING and reader.document(run.id, Document.SPEC)) or "{}")
    grace_s = kill_in_s(run, reader.intents(run.id), spec, time.time())
    return Moment(run, recent, progress[0] if progress else None, grace_s, time_left_s(reader, run))
