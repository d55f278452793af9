"""What the end of a launch leaves in the run's row, unless its job may live: then only its host knows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.actions.host_facts import MissingDependency
from orchestrator.actions.telling import Tell, silent
from orchestrator.errors import DraftyardError, GateRefused, HostError, StoreError
from orchestrator.interrupts import Interrupted
from orchestrator.store.rows import Document, Reason, RunRow, State
from orchestrator.store.writes import Store

if TYPE_CHECKING:
    from orchestrator.actions.sending import Launched

SAY_AGAIN_S = 2.0


@dataclass
class Doubt:
    """Whether the supervisor may have been started: from then on this side knows nothing, and the run folder all."""

    may_live: bool = False
    broken_off: str | None = None  # of several hosts: which did not start, so that the others are being stopped


@dataclass
class Begun:
    """What whoever starts a job has not been told yet."""

    launched: Launched | None = None


@contextmanager
def told_if_left(tell: Tell) -> Iterator[Begun]:
    """An interrupt between a job's start and its caller's word of it: what was closed meanwhile is no matter, the job is."""
    begun = Begun()
    try:
        yield begun
    except KeyboardInterrupt:
        if (launched := begun.launched) is not None:
            run_id, on = launched.run_id, " and ".join((launched.host, *launched.more_hosts))
            tell(f"run {run_id} was started and goes on, on {on}: draftyard watch {run_id}, or draftyard wait {run_id}")
        raise


@contextmanager
def outcome(store: Store, run_id: str, *, attempt: int, tell: Tell = silent) -> Iterator[Doubt]:
    """Whatever ends a launch before its job may live is in the run's row, except a refusal, which takes the row back.

    It speaks of its own attempt alone: where a newer one exists, nothing is written.
    """
    doubt = Doubt()
    try:
        yield doubt
    except GateRefused as error:
        why = str(error)
        _say(store, lambda into: into.remove_pending(run_id, why=why))
        raise
    except BaseException as error:
        if doubt.may_live:
            _leave_it_to_the_host(error, run_id, doubt, tell)
            raise
        state, reason, evidence = _before_a_start(error)
        _say(store, lambda into: into.set_state(run_id, state, reason=reason, evidence=evidence, attempt=attempt))
        if attempt != 1 and _has_ended(store, run_id):  # an attempt's own doubt has spoken where its job may live
            tell(_never_began(run_id, attempt))
        raise


def new_attempt(store: Store, run: RunRow, *, tell: Tell = silent, launcher: str | None = None, **how: Any) -> int:
    """As `Store.new_attempt`; an interrupt on the way, when the row may be there already, is that attempt's end.

    `launcher`: by which a resume knows its own attempt; None: of a launch, whose run is its own.
    """
    try:
        return store.new_attempt(run.id, launcher=launcher, **how)
    except KeyboardInterrupt:
        with suppress(DraftyardError):
            number = store.reader.run(run.id).attempt
            is_ours = launcher in (None, store.reader.document(run.id, Document.LAUNCHER))
            if number == run.attempt + 1 and is_ours:
                with outcome(store, run.id, attempt=number, tell=tell):
                    raise
        raise


def _never_began(run_id: str, attempt: int) -> str:
    """Of a launch (attempt 0: the first attempt is a part of it) or of a resume."""
    if attempt == 0:
        return f"it never began; why is kept as run {run_id} (`draftyard show {run_id}`), which @last passes over"
    kept = f"why is kept with run {run_id} (`draftyard show {run_id}`)"
    return f"attempt {attempt} never began; {kept}, and draftyard resume {run_id} tries again"


def _has_ended(store: Store, run_id: str) -> bool:
    with suppress(DraftyardError):
        return State(store.reader.run(run_id).state).is_final
    return False


def _say(store: Store, say: Callable[[Store], object]) -> None:
    """Once, or, where the database is at fault, again until it takes it, for as long as this process lives.

    The death of a launch is seen by the follower. A screen lives on: its run would stay pending, and its GPUs promised.
    """
    try:
        say(store)
    except StoreError:
        args = (store.path, say)
        threading.Thread(target=_say_later, args=args, name="last word of a launch", daemon=True).start()
    except DraftyardError:
        pass  # stopped meanwhile, or settled: what ended the launch is what matters


def _say_later(db: Path, say: Callable[[Store], object]) -> None:
    while db.exists():
        time.sleep(SAY_AGAIN_S)
        try:
            with Store(db) as store:
                say(store)
        except StoreError:
            continue
        except DraftyardError:
            pass
        return


def _leave_it_to_the_host(error: BaseException, run_id: str, doubt: Doubt, tell: Tell) -> None:
    hint = f"whether run {run_id} has started is not known yet: draftyard wait {run_id}"
    if doubt.broken_off is not None:
        hint = f"{doubt.broken_off}; what has started of run {run_id} is being stopped: draftyard wait {run_id}"
    if isinstance(error, DraftyardError):
        error.args = (f"{error}\n  {hint}",)
    else:
        tell(hint)


def _before_a_start(error: BaseException) -> tuple[State, str | None, str]:
    state, reason, why = ending_of(error, otherwise="the launch broke off before it started")
    match error:
        case HostError() | MissingDependency():
            return state, reason, why
        case DraftyardError(reason="stopped"):
            return State.STOPPED, Reason.USER, "stopped before it was started"
        case DraftyardError():
            return state, reason, f"never started: {why}"
        case KeyboardInterrupt():
            return state, reason, "interrupted before it started" + _by(error)
        case _:
            return state, reason, why


def ending_of(error: BaseException, *, otherwise: str) -> tuple[State, str | None, str]:
    """State, reason and evidence of what an error keeps from starting; `otherwise`: of one that nobody foresaw."""
    match error:
        case HostError():
            return State.FAILED, Reason.UNREACHABLE, _whole(error)
        case MissingDependency():
            return State.FAILED, Reason.MISSING_DEPENDENCY, _whole(error)
        case DraftyardError():
            return State.FAILED, None, _whole(error)
        case KeyboardInterrupt():
            return State.STOPPED, Reason.USER, "interrupted" + _by(error)
        case _:
            return State.FAILED, None, otherwise


def _by(error: KeyboardInterrupt) -> str:
    """The signal, where it was no key."""
    return f" ({error.number.name})" if isinstance(error, Interrupted) else ""


def _whole(error: Exception) -> str:
    """Every line: who holds a card, which key changed, and the repair stand below the first."""
    return "\n".join(" ".join(line.split()) for line in str(error).splitlines())


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
