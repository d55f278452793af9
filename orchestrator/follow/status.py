"""What a run's evidence says of its state: pure functions, one verdict per look.

Only evidence decides: the exit file, whether supervisor and job live (pid, start ticks, boot id), the
job's own last word, time since its last event. A host that does not answer decides nothing: the
follower shows "unreachable since" and asks again. Why a run failed is `failure`'s business.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from orchestrator.store.rows import NO_SUPERVISOR, AttemptRow, Kind, Reason, RunRow, State
from remote.sampler import HELD_BYTES
from remote.wire import LATEST_S

SHORTEST_STALL_S = 120.0
STARTING_S = 60.0  # a launch in flight may still start what was asked to stop
GONE_S = 60.0  # a run folder may be away for a moment: a disk mounted again, a folder moved and moved back
NOT_ENDED = "not ended when it was copied; a newer copy, imported, says how it ended"
NO_EXIT_FILE = "no exit file was there when it was copied"
LONELY = "stopped because another host's part had ended"
ENDED_FROM_HERE = (9, 15)  # signals by which the follower ends what a wish does not reach
STOP_SIGNALS = {2: "SIGINT", 15: "SIGTERM"}


class Evidence(Protocol):
    """What one look at the host showed; `launch.observe` fills it."""

    @property
    def attempt(self) -> int | None: ...
    @property
    def supervisor(self) -> Mapping[str, Any] | None: ...
    @property
    def supervisor_alive(self) -> bool: ...
    @property
    def job_alive(self) -> bool: ...
    @property
    def is_claimed(self) -> bool: ...
    @property
    def is_copy(self) -> bool: ...
    @property
    def rebooted(self) -> bool: ...
    @property
    def boot_id(self) -> str: ...
    @property
    def exit(self) -> Mapping[str, Any] | None: ...
    @property
    def host_time_s(self) -> float: ...
    @property
    def uptime_s(self) -> float: ...


@dataclass(frozen=True)
class Rules:
    """The recipe's `life`, as far as it decides states."""

    start_timeout_s: float = 600.0
    stall_factor: float = 20.0
    grace_s: float = 60.0
    retries: int = 0
    retry_on: Sequence[str] = ()
    is_script: bool = False  # a script of the user's own may report nothing at all


@dataclass(frozen=True)
class Known:
    """What the store holds of the attempt when the look is judged."""

    run: RunRow
    attempt: AttemptRow
    stop_was_asked: bool  # by a person
    num_job_events: int  # of the job itself, the supervisor's left out
    step_seconds: Sequence[float] = ()  # newest steps
    silent_s: float = 0.0  # since the job's newest event
    waited_s: float = 0.0  # since the attempt was asked for, on this machine's clock
    gone_s: float = 0.0  # since its folder was last seen, where it is not there now
    launch_gone_s: float = 0.0  # since its launch was first seen to be dead
    is_lonely: bool = False  # a part of a run over several hosts that was ended because another part had fallen


@dataclass(frozen=True)
class Verdict:
    state: State
    reason: str | None
    evidence: str  # one line for a person
    ended_s: float | None = None
    needs_cause: bool = False  # `failure` is asked why; where it failed, it may name a better reason than an exit code


def judge(seen: Evidence, known: Known, rules: Rules) -> Verdict | None:
    """The state that this look proves, or None when it proves nothing new."""
    if seen.exit is not None and not seen.supervisor_alive:
        return _ended(seen.exit, known, rules)
    if seen.rebooted:
        return _gone(known) if known.attempt.final_outcome else _lost_in_reboot(seen, known)
    if seen.supervisor_alive or seen.job_alive:
        return _alive(seen, known, rules)
    if seen.supervisor is None and not seen.is_claimed:
        return _not_started(seen, known, rules)
    return _copied(known) if seen.is_copy else _gone(known)


# ------------------------------------------------------------------------- with an exit file


def _ended(exit_file: Mapping[str, Any], known: Known, rules: Rules) -> Verdict:
    ended_s = _time_s(exit_file.get("ended_s"))
    code, number = _code_and_signal(exit_file)
    stubborn = exit_file.get("stubborn")
    rest = f"; these processes would not die: {stubborn}" if stubborn else ""
    # Asked to stop, and failed at that: what it was to save last is lost. Before its first step it had nothing to save.
    failed = (number is None and code not in (0, None)) or known.attempt.final_outcome == "failed"
    failed = failed and (known.attempt.last_step is not None or rules.is_script or known.run.kind != Kind.TRAIN)
    match exit_file.get("reason"):
        case "user":
            return Verdict(State.STOPPED, Reason.USER, f"stopped as asked{_how(code, number)}{rest}", ended_s, failed)
        case "lonely":
            return Verdict(State.STOPPED, None, f"{LONELY}{_how(code, number)}{rest}", ended_s, failed)
        case "max_duration":
            text = f"reached its max_duration{_how(code, number)}{rest}"
            return Verdict(State.STOPPED, Reason.MAX_DURATION, text, ended_s, failed)
        case "signal":
            text = f"the supervisor was told to stop (SIGTERM){rest}"
            return Verdict(State.STOPPED, f"{Reason.SIGNAL}:15", text, ended_s, failed)
        case "start_failed":
            message = str(exit_file.get("message") or "no message")
            return Verdict(State.FAILED, Reason.EXIT, f"the job could not be started: {message}", ended_s, True)
    if number in ENDED_FROM_HERE and known.stop_was_asked and known.run.state is State.STOPPING:
        text = f"stopped as asked{_how(code, number)}; its supervisor had heard of no stop{rest}"
        return Verdict(State.STOPPED, Reason.USER, text, ended_s, True)
    if number is not None and code is not None:
        said = f"exit status {code}, as a shell says of {STOP_SIGNALS.get(number, f'signal {number}')}"
        state = State.STOPPED if number in STOP_SIGNALS else State.FAILED
        text = f"{said}; none was sent from here{rest}"
        return Verdict(state, f"{Reason.SIGNAL}:{number}", text, ended_s, state is State.FAILED)
    if number in STOP_SIGNALS:
        text = f"ended by {STOP_SIGNALS[number]} that was not ours{rest}"
        return Verdict(State.STOPPED, f"{Reason.SIGNAL}:{number}", text, ended_s)
    if number is not None:
        text = f"killed by signal {number} without our asking{rest}"
        return Verdict(State.FAILED, f"{Reason.SIGNAL}:{number}", text, ended_s, True)
    if code is None:
        return Verdict(State.LOST, None, "the exit file says neither exit status nor signal", ended_s, True)
    if code == 0:
        return _exit_zero(known, rules, ended_s)
    return Verdict(State.FAILED, f"{Reason.EXIT}:{code}", f"exit status {code} in the exit file{rest}", ended_s, True)


def _code_and_signal(exit_file: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Exit code and signal; a shell in between reports signal n as exit status 128 + n: both are given then."""
    code, number = _whole(exit_file.get("exit_code")), _whole(exit_file.get("signal"))
    if number is None and code is not None and code - 128 in (2, 6, 7, 9, 11, 15):
        return code, code - 128
    return code, number


def _how(code: int | None, number: int | None) -> str:
    if number is None:
        return f", exit status {code}" if code is not None else ""
    return (
        f", ended by signal {number}" if code is None else f", exit status {code}, as a shell says of signal {number}"
    )


def _exit_zero(known: Known, rules: Rules, ended_s: float | None) -> Verdict:
    match known.attempt.final_outcome:
        case "succeeded":
            return Verdict(State.SUCCEEDED, None, "exit status 0 and the job's final event", ended_s)
        case "stopped":
            reason = Reason.USER if known.stop_was_asked else f"{Reason.SIGNAL}:15"
            text = "the job stopped when told to, before its first step"
            if known.attempt.last_step is not None:
                text = "the job saved its work and stopped when told to"
            return Verdict(State.STOPPED, reason, text, ended_s)
        case "failed":
            return Verdict(
                State.FAILED, f"{Reason.EXIT}:0", "exit status 0, but the job reported a failure", ended_s, True
            )
    if known.num_job_events == 0 and rules.is_script:
        return Verdict(State.SUCCEEDED, None, "exit status 0; the script reports nothing of its own", ended_s)
    text = "exit status 0 without the final event: it ended before its own end"
    return Verdict(State.FAILED, Reason.UNMARKED_EXIT, text, ended_s, True)


# ---------------------------------------------------------------------- without an exit file


def _lost_in_reboot(seen: Evidence, known: Known) -> Verdict:
    if (seen.supervisor or {}).get("boot_id") == seen.boot_id:
        text = "the container was restarted (its first process is younger than the run), the run was not there any more"
        return Verdict(State.LOST, Reason.REBOOT, text, known.attempt.last_event_s)
    booted_s = seen.host_time_s - seen.uptime_s
    text = f"the host was restarted {_span(seen.uptime_s)} ago (another boot id), the run was not there any more"
    return Verdict(State.LOST, Reason.REBOOT, text, booted_s)


def _alive(seen: Evidence, known: Known, rules: Rules) -> Verdict | None:
    if known.run.state == State.STOPPING:  # also of one that has said nothing yet: a state never goes back
        return None
    if known.attempt.last_event_s is None:
        if known.waited_s <= rules.start_timeout_s:
            return Verdict(State.SETTING_UP, None, "the supervisor lives, no event yet")
        text = f"no event within {_span(rules.start_timeout_s)} of its start"
        return Verdict(State.FAILED, Reason.START_TIMEOUT, text)
    if known.attempt.last_job_event_s is None and not rules.is_script and known.waited_s > rules.start_timeout_s:
        text = f"the supervisor lives, but no event of the job within {_span(rules.start_timeout_s)} of its start"
        return Verdict(State.FAILED, Reason.START_TIMEOUT, text)
    if seen.attempt is None:
        return Verdict(State.RUNNING, None, "the run's folder is gone from the host, its processes live")
    if not seen.supervisor_alive:
        return Verdict(State.RUNNING, None, NO_SUPERVISOR)
    limit_s = stall_limit_s(known.step_seconds, rules)
    if limit_s is not None and known.silent_s > limit_s:
        text = (
            f"no step for {_span(known.silent_s)}; the median step takes {statistics.median(known.step_seconds):.3g} s"
        )
        return Verdict(State.RUNNING, Reason.STALLED, text)
    return Verdict(State.RUNNING, None, "supervisor and events are alive")


def proof(exit_file: Mapping[str, Any] | None, own: Collection[str], *, is_stop: bool) -> str:
    """What became of the job's processes and of the memory of its cards (`own`: UUIDs or indices), as its supervisor saw
    it before the job and after its last process. After a stop all of it, as that was asked for; else what is amiss alone.
    """
    if exit_file is None or exit_file.get("reason") == "start_failed":
        return ""
    held, settled = _memory(exit_file, own) if own else ([], [])
    if is_stop and exit_file.get("stubborn") == []:
        settled.insert(0, "no process is left")
    return "; ".join([*held, *settled] if is_stop else held)


def _memory(exit_file: Mapping[str, Any], own: Collection[str]) -> tuple[list[str], list[str]]:
    """A line for each card that still holds memory of the job, and for each that does not or of which nobody can tell."""
    before = {str(gpu.get("uuid")): _whole(gpu.get("used_bytes")) for gpu in _objects(exit_file.get("gpus_before"))}
    held, settled = [], []
    for gpu in _objects(exit_file.get("gpus")):
        used, name = _whole(gpu.get("used_bytes")), f"GPU {gpu.get('index')}"
        if used is None or not {str(gpu.get("uuid")), str(gpu.get("index"))} & set(own):
            continue
        known = before.get(str(gpu.get("uuid")))
        if used - (known or 0) <= HELD_BYTES:
            settled.append(f"{name} is back at {used / 2**30:.2f} GiB")
        elif known is None:
            settled.append(f"{name} holds {used / 2**30:.2f} GiB, unknown how much of that before the job")
        else:
            held.append(f"{name} still holds {(used - known) / 2**30:.2f} GiB more than before the job")
    if not held and not settled:
        settled.append("unknown whether GPU memory is back: nvidia-smi did not say")
    return held, settled


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def stall_limit_s(step_seconds: Sequence[float], rules: Rules) -> float | None:
    """How long a silence is still ordinary; None before there are steps to compare with."""
    if not step_seconds:
        return None
    return max(SHORTEST_STALL_S, rules.stall_factor * statistics.median(step_seconds))


def _not_started(seen: Evidence, known: Known, rules: Rules) -> Verdict | None:
    if (told := _told_to_end(known)) and known.attempt.last_event_s is None and known.waited_s > STARTING_S:
        return Verdict(State.STOPPED, told[0], "stopped before it was started" if known.stop_was_asked else told[1])
    if known.attempt.last_event_s is not None:
        return _folder_gone(seen, known)
    if known.launch_gone_s > STARTING_S:
        return Verdict(State.FAILED, None, "never started: its launch was killed before it came to that")
    if known.waited_s <= rules.start_timeout_s:
        return None
    text = f"nothing was started on the host within {_span(rules.start_timeout_s)}"
    return Verdict(State.FAILED, Reason.START_TIMEOUT, text)


def _folder_gone(seen: Evidence, known: Known) -> Verdict | None:
    """Or only what tells its processes is gone from it; where it is gone as a whole, no process of it is there either."""
    if told := _told_to_end(known):
        what = "its folder is gone from the host, and no process of it lives"
        if seen.attempt is not None:
            what = "supervisor.json and claim are gone from its folder, so nobody can tell what became of its processes"
        text = f"{told[1]}; {what}"
        return Verdict(State.STOPPED, told[0], text, known.attempt.last_event_s)
    if known.gone_s <= GONE_S:
        return None
    text = f"the run's folder has been gone from the host for {_span(known.gone_s)}, and no process of it lives"
    return Verdict(State.LOST, None, text)


def _gone(known: Known) -> Verdict:
    """Neither process lives and no exit file was written: the supervisor was killed. The job may have had its say."""
    last_s = known.attempt.last_event_s
    if told := _told_to_end(known):
        text = f"{told[1]}; supervisor and job are gone, no exit file"
        return Verdict(State.STOPPED, told[0], text, last_s, known.attempt.final_outcome == "failed")
    match known.attempt.final_outcome:
        case "succeeded":
            return Verdict(State.SUCCEEDED, None, "the job's final event; its supervisor was killed before it", last_s)
        case "failed":
            text = "the job reported a failure; its supervisor was killed, there is no exit file"
            return Verdict(State.FAILED, Reason.EXIT, text, last_s, True)
        case "stopped":
            return Verdict(State.STOPPED, f"{Reason.SIGNAL}:15", "the job said it stopped; no exit file", last_s)
    text = "supervisor and job are gone without an exit file: both were killed"
    return Verdict(State.LOST, None, text, last_s, True)


def _copied(known: Known) -> Verdict:
    """Of a copy nobody can tell whether its run lives on. Where it has had its last word, that holds."""
    if known.attempt.final_outcome is None:
        return Verdict(State.LOST, None, NOT_ENDED, known.attempt.last_event_s)
    verdict = _gone(known)
    what = {State.SUCCEEDED: "the job's final event", State.FAILED: "the job reported a failure"}
    text = f"{what.get(verdict.state, 'the job said it stopped')}; {NO_EXIT_FILE}"
    return replace(verdict, evidence=text)


def _told_to_end(known: Known) -> tuple[str | None, str] | None:
    """Reason and words of a stop that came from here; None without one."""
    if known.stop_was_asked:
        return Reason.USER, "stopped as asked"
    return (None, LONELY) if known.is_lonely else None


def _span(seconds: float) -> str:
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _whole(value: Any) -> int | None:
    is_whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    return value if is_whole else None


def _time_s(value: Any) -> float | None:
    is_time = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= LATEST_S
    return float(value) if is_time else None
