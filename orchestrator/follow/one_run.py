"""Follows one run for one look: its wishes, its bytes, its state. Called by the follower's host threads.

The order is the promise: a wish is carried out before anything is written here, so that no fault of the
database keeps a run from being stopped; bytes are brought in before a state is decided; and before a final
state the host is looked at again until nothing new came, so that the last lines are never lost. What is
decided holds for the attempt that was looked at. No transaction is open while the host is asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from orchestrator import launch, launcher
from orchestrator.errors import DraftyardError, HostError
from orchestrator.follow import nodes, secrets
from orchestrator.follow.desk import Desk
from orchestrator.follow.ending import conclude_all, end_part, end_with_cause, rules_of, writers
from orchestrator.follow.machines import refuse_stranger
from orchestrator.follow.notices import clock_offset_s, note_clock, notice, on_this_clock
from orchestrator.follow.silence import reported_every_s, silent_s, step_seconds
from orchestrator.follow.status import GONE_S, Known, Verdict, judge
from orchestrator.follow.streams import AttemptPlace, Caught, catch_up
from orchestrator.observe import Evidence, observe
from orchestrator.shell.stream import StreamShell
from orchestrator.store.ingest import is_supervisor
from orchestrator.store.rows import NO_SUPERVISOR, AttemptRow, Document, IntentRow, Reason, RunRow, State
from orchestrator.workplace import Workplace

NEVER_STARTED_S = 3600.0  # a launch of which nobody can tell whether it lives has died by then, if it got nowhere
LATE_S = 180.0  # after the grace: by then a supervisor that works has killed its job, asked its cards and said its end
ALL_LOG_BYTES = 2**62
MAX_LAST_LOOKS = 20


@dataclass(frozen=True)
class Looked:
    """What one look brought, for the follower's pace."""

    caught: Caught = field(default_factory=Caught)
    has_ended: bool = False


def settle_unstarted(desk: Desk, run: RunRow) -> bool:
    """Whether the host can tell nothing of the run: only the row exists, and launch is probing, shipping, or has died.

    Ends it where that is known. Asks no host, so it works for one that does not answer.
    """
    is_on_host = run.workdir is not None and run.attempt > 0
    if run.more_hosts and is_on_host and nodes.end_of(desk.reader, run):
        conclude_all(desk, run)
        return True
    if is_on_host and run.state is not State.PENDING:
        return False
    if run.node > 0:  # the first host's thread speaks for all
        return True
    if launcher.settle_if_killed(desk.store, run):
        return True
    verdict = None if is_on_host else _unstarted(desk, run)
    if verdict is not None:
        desk.store.set_state(
            run.id, verdict.state, reason=verdict.reason, evidence=verdict.evidence, attempt=run.attempt
        )
    return verdict is not None or not is_on_host


def _unstarted(desk: Desk, run: RunRow) -> Verdict | None:
    """Of a run that its host knows nothing of, and whose launch may live."""
    is_alive = launcher.is_alive(desk.reader.document(run.id, Document.LAUNCHER))
    if desk.reader.intents(run.id):
        return Verdict(State.STOPPED, Reason.USER, "stopped before it was started")
    if is_alive is None and _age_s(desk, run.id, run.created_s) > NEVER_STARTED_S:
        return Verdict(State.FAILED, Reason.START_TIMEOUT, "the launch never got as far as starting it")
    return None


def look(desk: Desk, shell: StreamShell, run: RunRow) -> Looked:
    """One look at a live run that has an attempt. Raises HostError when the host does not answer."""
    asked_s = desk.clock()
    try:
        seen = observe(shell, run_folder(run), attempt=run.attempt)
    except HostError:
        raise
    except DraftyardError:  # what cannot be looked into can be stopped all the same
        _carry_out_stops(desk, shell, run, Evidence.nothing())
        raise
    refuse_stranger(desk, run, seen)
    _carry_out_stops(desk, shell, run, seen)
    _stop_lonely(desk, shell, run, seen)
    note_clock(desk, run.host, seen, asked_s=asked_s)
    caught = _bring_in(desk, shell, run, seen)
    if caught.num_events:
        notice(desk, run, seen)
    verdict = _judge(desk, run, seen, shell)
    if verdict is None or not verdict.state.is_final:
        _apply(desk, run, verdict)
        return Looked(caught)
    return _settle(desk, shell, run, caught)


def run_folder(run: RunRow) -> str:
    return f"{run.workdir}/runs/{run.id}"


# -------------------------------------------------------------------------------------- wishes


def _carry_out_stops(desk: Desk, shell: StreamShell, run: RunRow, seen: Evidence) -> None:
    """Writes the wish for the supervisor, once; where that was killed, or does not act, ends its job itself."""
    for wish in desk.reader.intents(run.id):
        if wish.kind != "stop" or seen.exit is not None:
            continue  # where no supervisor has come yet, the wish waits for it in the attempt's folder
        grace_s = rules_of(desk, run).grace_s if wish.grace_s is None else wish.grace_s
        what = f"{run.id} {run.attempt} {_stop_text(wish)}"
        is_said = run.state == State.STOPPING and run.evidence == _stop_text(wish)
        if run.more_hosts:  # the run's state says nothing of this host; a stop that is written twice is one
            is_said = f"{what} {run.node}" in desk.stops_left
        if is_said:  # perhaps by a follower before this one
            desk.wished_up_s.setdefault(what, math.inf)  # the next look, or this one, begins to count
        if _is_orphaned(desk, run, seen) or (seen.supervisor_alive and _lies_s(desk, what, seen) > grace_s + LATE_S):
            _reap(shell, run, seen)
        if is_said or (seen.attempt is None and seen.job_alive):  # a folder that is away must not be made anew
            continue
        why_not = _refusal(shell, run, grace_s=grace_s)
        _note_wish(desk, run, what, _stop_text(wish), why_not, ends_in_s=grace_s + LATE_S)


def _note_wish(desk: Desk, run: RunRow, what: str, text: str, why_not: str | None, *, ends_in_s: float) -> None:
    """A wish that lies there, or that its host did not take, which is tried again at each look; once each."""
    here = f"{what} {run.node}"
    if why_not is None:
        desk.stops_left.add(here)
        if here in desk.stops_refused:  # its supervisor hears of it only now
            desk.stops_refused.discard(here)
            desk.wished_up_s[what] = math.inf
    else:
        desk.stops_refused.add(here)
        text += f", but host {run.host} does not take the wish"
    desk.wished_up_s.setdefault(what, math.inf)  # the next look begins to count
    if why_not is not None and run.evidence.startswith(text):  # its words may be others at every try
        return
    if why_not is not None:
        text += f": {why_not}; what of it still lives {ends_in_s:g} s after the wish is ended from here"
    desk.store.set_state(run.id, State.STOPPING, reason=Reason.USER, evidence=text, attempt=run.attempt)


def _refusal(shell: StreamShell, run: RunRow, *, grace_s: float, why: str | None = None) -> str | None:
    """Leaves the wish to stop; why its host does not take it (a full disk, one gone read-only), which holds up nothing else."""
    try:
        launch.stop(shell, run_folder(run), attempt=run.attempt, grace_s=grace_s, why=why)
    except HostError:
        raise
    except DraftyardError as error:
        return str(error)
    return None


def _stop_lonely(desk: Desk, shell: StreamShell, run: RunRow, seen: Evidence) -> None:
    """Ends a part of a run over several hosts some time after another one has fallen, unless it has ended by itself."""
    other = nodes.fallen(desk.reader, run) if run.more_hosts else None
    what = _lonely(run)
    is_away = seen.attempt is None and seen.job_alive  # its folder, which must not be made anew
    is_heard = seen.supervisor_alive or not seen.is_claimed  # of one that has not come yet, the wish waits there
    if other is None or seen.exit is not None or what in desk.stops_left or is_away:
        return
    since_s = desk.first_seen_s.setdefault(what, desk.monotonic())
    if desk.monotonic() - since_s < nodes.patience_s(desk.reader, run, other) or not (is_heard or seen.job_alive):
        return
    if not nodes.is_lonely(desk.reader, run):  # before the deed, so that whoever follows next knows whose it was
        text = f"host {run.host} is stopped: host {other.host} has ended ({other.verdict.evidence})"
        desk.store.add_event(run.id, "note", text, {nodes.LONELY: run.node})
    if is_heard:
        grace_s = rules_of(desk, run).grace_s
        if run.node > 0:  # the first host has rank 0, which may be writing a checkpoint
            grace_s = min(grace_s, nodes.LONELY_GRACE_S)
        why = None if _is_asked_to_stop(desk, run) else nodes.LONELY
        why_not = _refusal(shell, run, grace_s=grace_s, why=why)
        if why_not is not None and what not in desk.stops_refused:
            desk.stops_refused.add(what)
            desk.store.add_event(run.id, "note", f"host {run.host} does not take the wish to stop: {why_not}")
        if why_not is not None and desk.monotonic() - since_s < grace_s + LATE_S:
            return
        if why_not is not None:
            _reap(shell, run, seen)
    else:
        _reap(shell, run, seen)
    desk.stops_left.add(what)


def _reap(shell: StreamShell, run: RunRow, seen: Evidence) -> None:
    python = str((seen.supervisor or {}).get("python") or "python3")
    launch.reap(shell, Workplace(str(run.workdir), python, ""), names=[launch.attempt_name(run.id, run.attempt)])


def _is_asked_to_stop(desk: Desk, run: RunRow) -> bool:
    return any(wish.kind == "stop" for wish in desk.reader.intents(run.id))


def _lonely(run: RunRow) -> str:
    return f"{run.id} {run.attempt} {run.node} is lonely"


def _is_orphaned(desk: Desk, run: RunRow, seen: Evidence) -> bool:
    """Whether its job has no supervisor; a folder that is away for a moment says nothing about that."""
    if seen.attempt is None:
        return seen.job_alive and _gone_s(desk, run, seen) > GONE_S
    return seen.job_alive and not seen.supervisor_alive


def _lies_s(desk: Desk, what: str, seen: Evidence) -> float:
    """For how long this stop has lain there, by its host's own clock; 0 before it does.

    The time in which a host could not be asked, or was paused, gave its supervisor none to act.
    """
    if what not in desk.wished_up_s:
        return 0.0
    desk.wished_up_s[what] = min(desk.wished_up_s[what], seen.uptime_s)
    return seen.uptime_s - desk.wished_up_s[what]


def _stop_text(wish: IntentRow) -> str:
    grace = "the recipe's grace" if wish.grace_s is None else f"{wish.grace_s:g} s of grace"
    return f"asked to stop, {grace}"


# --------------------------------------------------------------------------------------- bytes


def _bring_in(
    desk: Desk,
    shell: StreamShell,
    run: RunRow,
    seen: Evidence,
    *,
    folder: str | None = None,
    log_bytes: int | None = None,
) -> Caught:
    where = f"{folder or run_folder(run)}/attempts/{run.attempt}"
    place = AttemptPlace(run.id, run.attempt, where, clock_offset_s(desk, run.host), run.node)
    limit = {} if log_bytes is None else {"log_bytes": log_bytes}
    caught = catch_up(desk.store, shell, place, seen.files, desk.doubts, **limit)
    if run.node == 0:
        _note_facts(desk, run, seen)
    return caught


def bring_in_whole(desk: Desk, shell: StreamShell, run: RunRow, seen: Evidence, folder: str) -> None:
    """Everything the listed files of one attempt hold; for folders that change no more."""
    for _ in range(MAX_LAST_LOOKS):
        caught = _bring_in(desk, shell, run, seen, folder=folder, log_bytes=ALL_LOG_BYTES)
        if caught.is_complete and caught.num_events == 0:
            return


def conclude(desk: Desk, run: RunRow, seen: Evidence) -> None:
    """Judges the newest attempt of a run whose bytes are all here."""
    verdict = _judge(desk, run, seen)
    if verdict is not None and verdict.state.is_final:
        end_with_cause(desk, run, seen, verdict)


def _note_facts(desk: Desk, run: RunRow, seen: Evidence) -> None:
    """Process and exit facts, written once."""
    known = _attempt(desk, run)
    supervisor, exit_file = seen.supervisor or {}, seen.exit or {}
    facts = {
        "pid": supervisor.get("job_pid"),
        "start_ticks": supervisor.get("job_start_ticks"),
        "boot_id": supervisor.get("boot_id"),
        "exit_code": exit_file.get("exit_code"),
        "signal": exit_file.get("signal"),
    }
    new = {
        name: value
        for name, value in facts.items()
        if isinstance(value, str if name == "boot_id" else int) and getattr(known, name) is None
    }
    new = {name: value for name, value in new.items() if isinstance(value, str) or abs(value) < 2**63}
    if new:
        desk.store.describe_attempt(run.id, run.attempt, **new)


# --------------------------------------------------------------------------------------- state


def _attempt(desk: Desk, run: RunRow) -> AttemptRow:
    return desk.reader.attempts(run.id, run.attempt)[0]


def _judge(desk: Desk, run: RunRow, seen: Evidence, shell: StreamShell | None = None) -> Verdict | None:
    """With the shell of its host a hang is seen also of a job that does not tell how long its steps take."""
    attempt, streams = _attempt(desk, run), desk.reader.streams(run.id)
    if run.more_hosts:
        attempt = nodes.own_part(attempt, writers(seen), streams, desk.reader.events(run.id, kinds=["final"]))
    here = on_this_clock(seen, clock_offset_s(desk, run.host))
    num_job_events = sum(
        row.last_seq for row in streams if row.attempt == run.attempt and not is_supervisor(row.writer)
    )
    quiet_s = silent_s(desk, run, attempt, num_job_events, here.host_time_s)
    steps: Sequence[float] = step_seconds(desk, run, attempt)
    if shell is not None and not steps and attempt.last_step is not None:
        steps = reported_every_s(shell, f"{run_folder(run)}/attempts/{run.attempt}", seen, quiet_s)
    known = Known(
        run=desk.reader.run(run.id),
        attempt=attempt,
        stop_was_asked=_is_asked_to_stop(desk, run),
        is_lonely=bool(run.more_hosts) and nodes.is_lonely(desk.reader, run),
        num_job_events=num_job_events,
        step_seconds=steps,
        silent_s=quiet_s,
        waited_s=_age_s(desk, f"{run.id} {run.attempt}", attempt.created_s),
        gone_s=_gone_s(desk, run, seen),
        launch_gone_s=_launch_gone_s(desk, run) if run.more_hosts and not seen.is_claimed else 0.0,
    )
    return judge(here, known, rules_of(desk, run))


def _gone_s(desk: Desk, run: RunRow, seen: Evidence) -> float:
    """For how long the looks have missed its folder."""
    what = f"{run.id} without its folder"
    if seen.attempt is not None:
        desk.first_seen_s.pop(what, None)
        return 0.0
    return desk.monotonic() - desk.first_seen_s.setdefault(what, desk.monotonic())


def _launch_gone_s(desk: Desk, run: RunRow) -> float:
    """For how long the process that was to start the attempt has been seen to be dead: what it sent last may be on its way.

    Of several hosts alone: there a launch that lives says of each part that it did not start.
    """
    if launcher.is_alive(desk.reader.document(run.id, Document.LAUNCHER)) is not False:
        return 0.0
    what = f"{run.id} {run.attempt} without its launch"
    return desk.monotonic() - desk.first_seen_s.setdefault(what, desk.monotonic())


def _age_s(desk: Desk, what: str, since_s: float) -> float:
    """How long ago that was; never less than it has been watched here, should somebody set the clock back."""
    first_s = desk.first_seen_s.setdefault(what, desk.monotonic())
    return max(desk.clock() - since_s, desk.monotonic() - first_s)


def _apply(desk: Desk, run: RunRow, verdict: Verdict | None) -> None:
    """Writes a live state only when it is news: a write takes the database's one lock."""
    if verdict is None or run.node > 0:  # of several hosts the first one speaks while the run lives
        return
    now = desk.reader.run(run.id)
    is_news = (now.state, now.reason) != (verdict.state, verdict.reason)
    if is_news or (verdict.evidence == NO_SUPERVISOR and now.evidence != NO_SUPERVISOR):
        desk.store.set_state(
            run.id, verdict.state, reason=verdict.reason, evidence=verdict.evidence, attempt=run.attempt
        )


def _settle(desk: Desk, shell: StreamShell, run: RunRow, caught: Caught) -> Looked:
    """Looks again until nothing new comes, then says the last word. A verdict that does not hold is dropped."""
    for _ in range(MAX_LAST_LOOKS):
        seen = observe(shell, run_folder(run), attempt=run.attempt)
        more = _bring_in(desk, shell, run, seen, log_bytes=ALL_LOG_BYTES)
        caught += more
        verdict = _judge(desk, run, seen, shell)
        if verdict is None or not verdict.state.is_final:
            _apply(desk, run, verdict)
            return Looked(caught)
        if more.is_complete and more.num_events == 0 and more.num_log_bytes == 0:
            if seen.supervisor_alive:  # it came up too late; nobody waits for it any more
                _refusal(shell, run, grace_s=rules_of(desk, run).grace_s)
            if seen.exit is None:  # no supervisor has taken its secrets away
                seen = replace(seen, hidden=secrets.taken(desk, shell, run, run_folder(run), seen))
            if run.more_hosts:
                end_part(desk, run, seen, verdict)
            else:
                end_with_cause(desk, run, seen, verdict, may_retry=True)
            return Looked(caught, has_ended=True)
    return Looked(caught)
