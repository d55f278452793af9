"""Follows one run for one look: its wishes, its bytes, its state. Called by the follower's host threads.

The order is the promise: a wish is carried out before anything is written here, so that no fault of the
database keeps a run from being stopped; bytes are brought in before a state is decided; and before a final
state the host is looked at again until nothing new came, so that the last lines are never lost. What is
decided holds for the attempt that was looked at. No transaction is open while the host is asked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator import launch, launcher
from orchestrator.errors import DraftyardError, HostError
from orchestrator.failure import UNEXPLAINED, Failure, Findings, Told, causes
from orchestrator.follow.desk import Desk
from orchestrator.follow.notices import clock_offset_s, note_clock, notice, on_this_clock
from orchestrator.follow.status import GONE_S, Known, Rules, Verdict, judge, still_held
from orchestrator.follow.streams import AttemptPlace, Caught, catch_up, torn_bytes, unread_names
from orchestrator.observe import Evidence, observe
from orchestrator.redact import redact, redact_tree
from orchestrator.shell.stream import StreamShell
from orchestrator.store.ingest import SUPERVISOR
from orchestrator.store.rows import AttemptRow, Document, FailureRow, IntentRow, Kind, Reason, RunRow, State
from orchestrator.units import counted
from orchestrator.workplace import Workplace

NEVER_STARTED_S = 3600.0  # a launch of which nobody can tell whether it lives has died by then, if it got nowhere
LATE_S = 30.0  # after the grace: by then a supervisor that works has killed its job and written exit.json
STEPS_FOR_MEDIAN = 50
ALL_LOG_BYTES = 2**62
MAX_LAST_LOOKS = 20
LOG_TAIL_BYTES = 512 * 1024
LIFE = ("start_timeout_s", "stall_factor", "grace_s", "retries", "retry_on")  # what the recipe's life decides here


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
    if is_on_host and run.state is not State.PENDING:
        return False
    verdict = _unstarted(desk, run, is_on_host=is_on_host)
    if verdict is not None:
        desk.store.set_state(
            run.id, verdict.state, reason=verdict.reason, evidence=verdict.evidence, attempt=run.attempt
        )
    return verdict is not None or not is_on_host


def _unstarted(desk: Desk, run: RunRow, *, is_on_host: bool) -> Verdict | None:
    """A pending run whose launch is gone was never spawned: the launch says "setting up" before it spawns."""
    is_alive = launcher.is_alive(desk.reader.document(run.id, Document.LAUNCHER))
    # In this order: nobody moves the row after its launch is gone, so what is read now was its last word.
    if is_alive is False and desk.reader.run(run.id).state is State.PENDING:
        return Verdict(State.FAILED, None, "the launch was killed before it started the job")
    if is_on_host:
        return None
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
    _carry_out_stops(desk, shell, run, seen)
    note_clock(desk, run.host, seen, asked_s=asked_s)
    caught = _bring_in(desk, shell, run, seen)
    if caught.num_events:
        notice(desk, run, seen)
    verdict = _judge(desk, run, seen)
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
        grace_s = _rules_of(desk, run).grace_s if wish.grace_s is None else wish.grace_s
        what = f"{run.id} {run.attempt} {_stop_text(wish)}"
        is_said = run.state == State.STOPPING and run.evidence == _stop_text(wish)
        if is_said:  # perhaps by a follower before this one
            desk.wished_up_s.setdefault(what, seen.uptime_s)
        if _is_orphaned(desk, run, seen) or (seen.supervisor_alive and _lies_s(desk, what, seen) > grace_s + LATE_S):
            python = str((seen.supervisor or {}).get("python") or "python3")
            name = launch.attempt_name(run.id, run.attempt)
            launch.reap(shell, Workplace(str(run.workdir), python, ""), names=[name])
        if is_said or (seen.attempt is None and seen.job_alive):  # a folder that is away must not be made anew
            continue
        launch.stop(shell, run_folder(run), attempt=run.attempt, grace_s=grace_s)
        desk.wished_up_s.setdefault(what, math.inf)  # the next look begins to count
        desk.store.set_state(run.id, State.STOPPING, reason=Reason.USER, evidence=_stop_text(wish), attempt=run.attempt)


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
    place = AttemptPlace(run.id, run.attempt, where, clock_offset_s(desk, run.host))
    limit = {} if log_bytes is None else {"log_bytes": log_bytes}
    caught = catch_up(desk.store, shell, place, seen.files, desk.doubts, **limit)
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
        _end_with_cause(desk, run, seen, verdict)


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
    return next(row for row in desk.reader.attempts(run.id) if row.number == run.attempt)


def _judge(desk: Desk, run: RunRow, seen: Evidence) -> Verdict | None:
    attempt = _attempt(desk, run)
    steps = desk.reader.metric_values(run.id, "step_s", attempt=run.attempt, rank=0, last=STEPS_FOR_MEDIAN)
    streams = [row for row in desk.reader.streams(run.id) if row.attempt == run.attempt]
    known = Known(
        run=desk.reader.run(run.id),
        attempt=attempt,
        stop_was_asked=any(wish.kind == "stop" for wish in desk.reader.intents(run.id)),
        num_job_events=sum(row.last_seq for row in streams if row.writer != SUPERVISOR),
        step_seconds=[value.value for value in steps],
        waited_s=_age_s(desk, f"{run.id} {run.attempt}", attempt.created_s),
        gone_s=_gone_s(desk, run, seen),
    )
    return judge(on_this_clock(seen, clock_offset_s(desk, run.host)), known, _rules_of(desk, run))


def _gone_s(desk: Desk, run: RunRow, seen: Evidence) -> float:
    """For how long the looks have missed its folder."""
    what = f"{run.id} without its folder"
    if seen.attempt is not None:
        desk.first_seen_s.pop(what, None)
        return 0.0
    return desk.monotonic() - desk.first_seen_s.setdefault(what, desk.monotonic())


def _age_s(desk: Desk, what: str, since_s: float) -> float:
    """How long ago that was; never less than it has been watched here, should somebody set the clock back."""
    first_s = desk.first_seen_s.setdefault(what, desk.monotonic())
    return max(desk.clock() - since_s, desk.monotonic() - first_s)


def _rules_of(desk: Desk, run: RunRow) -> Rules:
    spec = json.loads(desk.reader.document(run.id, Document.SPEC) or "{}")
    life = spec.get("life") or {}
    known = {name: life[name] for name in LIFE if name in life}
    return Rules(is_script=spec.get("entry") == "script" or run.kind == "script", **known)


def _apply(desk: Desk, run: RunRow, verdict: Verdict | None) -> None:
    """Writes a live state only when it is news: a write takes the database's one lock."""
    if verdict is None:
        return
    now = desk.reader.run(run.id)
    if (now.state, now.reason) != (verdict.state, verdict.reason):
        desk.store.set_state(
            run.id, verdict.state, reason=verdict.reason, evidence=verdict.evidence, attempt=run.attempt
        )


def _settle(desk: Desk, shell: StreamShell, run: RunRow, caught: Caught) -> Looked:
    """Looks again until nothing new comes, then says the last word. A verdict that does not hold is dropped."""
    for _ in range(MAX_LAST_LOOKS):
        seen = observe(shell, run_folder(run), attempt=run.attempt)
        more = _bring_in(desk, shell, run, seen, log_bytes=ALL_LOG_BYTES)
        caught += more
        verdict = _judge(desk, run, seen)
        if verdict is None or not verdict.state.is_final:
            _apply(desk, run, verdict)
            return Looked(caught)
        if more.is_complete and more.num_events == 0 and more.num_log_bytes == 0:
            if seen.supervisor_alive:  # it came up too late; nobody waits for it any more
                launch.stop(shell, run_folder(run), attempt=run.attempt, grace_s=_rules_of(desk, run).grace_s)
            _end_with_cause(desk, run, seen, verdict, may_retry=True)
            return Looked(caught, has_ended=True)
    return Looked(caught)


def _end_with_cause(desk: Desk, run: RunRow, seen: Evidence, verdict: Verdict, *, may_retry: bool = False) -> None:
    """The last word on the attempt, unless it had ended already or a newer one was made meanwhile."""
    failures = causes(_findings(desk, run, seen.exit)) if verdict.needs_cause else []
    if verdict.state is State.STOPPED:  # an exit status that nothing explains is no news of what was told to end
        failures = [item for item in failures if item.kind != UNEXPLAINED]
    reason, evidence = verdict.reason, verdict.evidence
    if failures:
        desk.store.replace_failures(
            run.id, run.attempt, [_failure_row(run, item, i) for i, item in enumerate(failures)]
        )
        first = failures[0]
        if first.reason is not None and verdict.state is not State.STOPPED:
            reason = first.reason
        evidence = f"{evidence}; {redact(first.message)}"
    held = _still_held(desk, run, seen)
    if held:
        evidence = f"{evidence}; {held}"
    has_ended = desk.store.set_state(
        run.id,
        verdict.state,
        reason=reason,
        evidence=evidence,
        ended_s=verdict.ended_s,
        attempt=run.attempt,
        wish="retry" if may_retry and _wants_retry(desk, run, verdict.state, reason) else None,
    )
    if has_ended:
        _say_torn(desk, run, seen)


def _say_torn(desk: Desk, run: RunRow, seen: Evidence) -> None:
    """A record cut off by a kill, a full disk or a disk pulled out too early."""
    for writer, size in torn_bytes(desk.store, AttemptPlace(run.id, run.attempt, ""), seen.files).items():
        text = f"the last record of {writer} is cut off after {size} bytes; what it said is lost"
        desk.store.add_event(run.id, "bad_line", text)
    unread = unread_names(seen.files)
    if unread:
        text = f"{counted(len(unread), 'events file')} not read, {unread[0]!a} first: no Reporter takes such a writer"
        desk.store.add_event(run.id, "bad_line", text)


def _still_held(desk: Desk, run: RunRow, seen: Evidence) -> str:
    """Memory is back when the driver says so, not when a process is gone: it may hang in the driver, or leave a child."""
    if not (seen.exit or {}).get("gpus"):
        return ""
    before = desk.reader.gpu_use_at_first(run.id, run.attempt)
    launched = json.loads(desk.reader.document(run.id, Document.LAUNCH) or "{}")
    return still_held(seen.exit, before, launched.get("gpus", ()))


def _wants_retry(desk: Desk, run: RunRow, state: State, reason: str | None) -> bool:
    """The recipe's own wish: so many more attempts, for these reasons (`exit` also means exit:3)."""
    if state not in (State.FAILED, State.LOST) or run.kind != Kind.TRAIN:  # in a reboot it is lost
        return False
    rules = _rules_of(desk, run)
    word = (reason or "").split(":")[0]
    return run.attempt <= rules.retries and word in rules.retry_on


def _findings(desk: Desk, run: RunRow, exit_file: Mapping[str, Any] | None) -> Findings:
    told = [
        Told(writer=row.writer, at_s=row.at_s, fields=row.fields)
        for row in desk.reader.events(run.id, kinds=["failure"])
        if row.attempt == run.attempt
    ]
    return Findings(
        told=told,
        stderr=_tail(desk, run, "stderr"),
        stdout=_tail(desk, run, "stdout"),
        exit_file=exit_file or {},
    )


def _tail(desk: Desk, run: RunRow, stream: str) -> str:
    """Its newest end, without the secrets that are known here."""
    logs = desk.reader.logs
    start = max(0, logs.size_bytes(run.id, run.attempt, stream) - LOG_TAIL_BYTES)
    return logs.read(run.id, run.attempt, stream, offset=start, size=LOG_TAIL_BYTES).decode("utf-8", "replace")


def _failure_row(run: RunRow, found: Failure, place: int) -> FailureRow:
    return FailureRow(
        run_id=run.id,
        attempt=run.attempt,
        kind=found.kind,
        message=redact(found.message),
        hint=found.hint,
        source=found.source,
        stage=found.stage,
        step=found.step,
        traceback=redact(found.traceback),
        facts=redact_tree(found.facts),
        at_s=found.at_s,
        is_first_cause=place == 0,
    )
