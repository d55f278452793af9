"""How a run's row lives: whether it may start (one attempt at a time, on GPUs promised to nobody else), how it moves.

Each is a part of one immediate transaction that `writes` opens: of two launches that race, the second
reads what the first has written.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import text as sql
from sqlmodel import Session, col, select

from orchestrator.errors import DraftyardError
from orchestrator.redact import redact
from orchestrator.store import queries
from orchestrator.store.reads import run_of_row
from orchestrator.store.rows import Document, RunRow, State
from orchestrator.store.tables import AttemptTable, DocumentTable, IntentTable, NodeTable, RunTable, event_of

Choose = Callable[[Mapping[str, str]], tuple[str, ...]]  # GPU -> the run it is promised to; the GPUs chosen
STOPPED = "stopped"
BINNED = "the run went into the bin"
CALLED_OFF = "called off by a stop"  # what became of a retry


def row_of(session: Session, run_id: str) -> RunRow:
    """As a reader would give it, in this transaction: behind it another process may have purged the run."""
    session.flush()
    driver = session.connection().connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    cursor = driver.cursor()
    cursor.row_factory = sqlite3.Row
    return run_of_row(cursor.execute(f"SELECT {queries.RUN_COLUMNS} FROM runs r WHERE r.id = ?", (run_id,)).fetchone())


def begin_attempt(
    session: Session,
    run: RunTable,
    now_s: float,
    *,
    number: int | None = None,
    after: int | None = None,
    retry: int | None = None,
) -> int:
    """One more start; the run is pending again. Raises DraftyardError where `_refuse_attempt` does."""
    _refuse_attempt(session, run, after=after, retry=retry)
    run.attempt = number or run.attempt + 1
    run.state, run.reason, run.evidence = State.PENDING, None, f"attempt {run.attempt} is being started"
    run.started_s = run.ended_s = run.unreachable_since_s = run.last_event_s = run.stage = None
    session.add(AttemptTable(run_key=key_of(run), number=run.attempt, state=State.PENDING, created_s=now_s))
    session.add(event_of(run, "attempt", run.evidence, {}, now_s))
    end_wishes(session, run, "retry", "a new attempt was started", now_s)
    return run.attempt


def _refuse_attempt(session: Session, run: RunTable, *, after: int | None, retry: int | None) -> None:
    """Unless everything before it has ended, and, where `after` is named, nothing has come after that attempt.

    `retry`: the wish that it carries out, which a stop may have called off since.
    """
    state = State(run.state)
    if run.removed_s is not None:
        raise _refusal(f"run {run.id} is in the bin; draftyard restore {run.id} takes it out", state)
    if run.attempt == 0 and state.is_final:
        raise _refusal(f"run {run.id} is {state} already ({run.evidence}); it never started: launch it anew", state)
    if not state.is_final and (run.attempt > 0 or state is not State.PENDING):
        told = f"run {run.id} is {state} in its attempt {run.attempt} ({run.evidence})"
        raise _refusal(f"{told}; only a run that has ended gets a new one", state)
    if after is not None and run.attempt != after:
        told = f"run {run.id} has had its attempt {run.attempt} meanwhile and is {state} ({run.evidence})"
        raise _refusal(f"{told}; say it again if it is to go on", state)
    refuse_stopped(session, run)
    wish = None if retry is None else session.get(IntentTable, retry)
    if wish is not None and wish.done_s is not None:
        raise _refusal(f"the retry of run {run.id} is no longer wished: {wish.outcome}", State.STOPPED)


def set_up(session: Session, run: RunTable, attempt: int, now_s: float) -> None:
    """Past the last point at which a start can be called off; DraftyardError where it has been, or was overtaken."""
    refuse_stopped(session, run)
    if run.attempt != attempt or run.state != State.PENDING:
        raise _refusal(f"run {run.id} is {run.state} already ({run.evidence}); it is not started", State(run.state))
    move(session, run, State.SETTING_UP, (None, "started; the job has said nothing yet", None), now_s)


def move(
    session: Session,
    run: RunTable,
    state: State,
    grounds: tuple[str | None, str, float | None],
    now_s: float,
    *,
    wish: str | None = None,
) -> None:
    """The run and its newest attempt; `grounds`: reason, evidence, ended_s (None: now). Asks nothing.

    `wish` (retry) comes with a final state, unless somebody had asked for a stop.
    """
    reason, evidence, ended_s = grounds[0], redact(grounds[1]), grounds[2]  # a person may have typed it
    text = f"{run.state} -> {state}{f' ({reason})' if reason else ''}: {evidence}"
    session.add(event_of(run, "state", text, {"from": run.state, "to": state, "reason": reason}, now_s))
    for row in (run, session.get(AttemptTable, (run.key, run.attempt))):
        if row is not None:
            row.state, row.reason, row.evidence = state, reason, evidence
            row.ended_s = (now_s if ended_s is None else ended_s) if state.is_final else None
    if state.is_final:
        run.unreachable_since_s = None
        was_stopped = end_wishes(session, run, "stop", f"{state}: {evidence}", now_s) > 0
        if wish is not None and not was_stopped:
            session.add(IntentTable(run_key=key_of(run), kind=wish, asked_s=now_s))


def mark(session: Session, run: RunTable, state: State, why: str, now_s: float) -> None:
    """A person's word. Of a live run it says that no host was asked: what runs there may go on."""
    was_live = "" if State(run.state).is_final else f" (it was {run.state}, and no host was asked)"
    end_wishes(session, run, "retry", f"marked {state}", now_s)
    move(session, run, state, ("user", f"marked by hand: {why}{was_live}", None), now_s)


def note_first_event(session: Session, run: RunTable, now_s: float) -> None:
    """A start of which an event has come is running. Said with the event's own rows, so that no reader ever sees a
    step of a run that is being set up, whenever its host or its follower is cut off; a run further on stays as it is.
    """
    if State(run.state) in (State.PENDING, State.SETTING_UP):
        move(session, run, State.RUNNING, (None, "its job has begun to report", None), now_s)


def promise_gpus(session: Session, run: RunTable, choose: Choose, host: str | None = None) -> tuple[str, ...]:
    """Keeps the choice in the run's launch document, where the next to choose finds it. `host`: one after the first."""
    rows = session.connection().execute(sql(queries.PROMISES)).all()
    chosen = choose(queries.promised([tuple(row) for row in rows], host or run.host, run.id))
    kept = document_of(session, run, Document.LAUNCH)
    new = {"gpus": list(chosen)} if host is None else {"more_gpus": {**kept.get("more_gpus", {}), host: list(chosen)}}
    keep_document(session, run, Document.LAUNCH, json.dumps({**kept, **new}))
    return chosen


def place_nodes(session: Session, run: RunTable, workdirs: Sequence[str]) -> None:
    for number, workdir in enumerate(workdirs):
        node = session.get(NodeTable, (key_of(run), number))
        if node is not None:  # a run on one host has none
            node.workdir = workdir


def end_node(session: Session, key: tuple[int, int], attempt: int, end: Mapping[str, Any]) -> None:
    node = session.get(NodeTable, key)
    if node is not None and node.ended_attempt != attempt:
        node.ended_attempt, node.end_json, node.unreachable_since_s = attempt, json.dumps(end), None


def said_of_host(session: Session, name: str, since_s: float | None) -> None:
    """Runs of a host that is silent show since when; of several hosts, since the first of them fell silent."""
    live = None if since_s is None else col(RunTable.state).in_([state.value for state in State if not state.is_final])
    chosen = select(RunTable).where(RunTable.host == name)
    for run in session.exec(chosen if live is None else chosen.where(live)).all():
        run.unreachable_since_s = since_s
    for node in session.exec(select(NodeTable).where(NodeTable.host == name)).all():
        run_of_it = session.get(RunTable, node.run_key)
        assert run_of_it is not None
        node.unreachable_since_s = None if State(run_of_it.state).is_final else since_s
        session.flush()
        each = session.exec(select(NodeTable.unreachable_since_s).where(NodeTable.run_key == node.run_key)).all()
        run_of_it.unreachable_since_s = min((at for at in each if at is not None), default=None)


def end_wishes(session: Session, run: RunTable, kind: str, outcome: str, now_s: float) -> int:
    """A stop is for the attempt that was live when it was asked; a retry for the ending that called for it."""
    wishes = open_wishes(session, run, kind)
    for wish in wishes:
        wish.done_s, wish.outcome = now_s, outcome
    return len(wishes)


def finish_wish(session: Session, wish: IntentTable, outcome: str, now_s: float) -> None:
    """What became of it. Of a retry that made no attempt the run says so, which stays as it has ended."""
    wish.done_s, wish.outcome = now_s, outcome
    run = session.get(RunTable, wish.run_key)
    if wish.kind == "retry" and run is not None:
        told = f"the retry did not begin: {redact(outcome)}"
        run.evidence = f"{run.evidence}; {told}" if run.evidence else told
        session.add(event_of(run, "note", told, {}, now_s))


def open_wishes(session: Session, run: RunTable, kind: str) -> list[IntentTable]:
    wanted = select(IntentTable).where(
        IntentTable.run_key == run.key, IntentTable.kind == kind, col(IntentTable.done_s).is_(None)
    )
    return list(session.exec(wanted).all())


def keep_document(session: Session, run: RunTable, name: Document, text: str) -> None:
    """Adds a long text to the run, or replaces it."""
    found = session.exec(
        select(DocumentTable).where(DocumentTable.run_key == run.key, DocumentTable.name == name)
    ).first()
    kept = found or DocumentTable(run_key=key_of(run), name=name, text=text)
    kept.text = text
    session.add(kept)
    session.flush()


def document_of(session: Session, run: RunTable, name: Document) -> dict[str, Any]:
    wanted = select(DocumentTable.text).where(DocumentTable.run_key == run.key, DocumentTable.name == name)
    found: dict[str, Any] = json.loads(session.exec(wanted).first() or "{}")
    return found


def key_of(run: RunTable) -> int:
    assert run.key is not None
    return run.key


def refuse_stopped(session: Session, run: RunTable) -> None:
    if open_wishes(session, run, "stop"):
        raise _refusal(f"run {run.id} was asked to stop; it is not started", State.STOPPED)


def _refusal(message: str, state: State) -> DraftyardError:
    error = DraftyardError(message)
    error.reason = STOPPED if state in (State.STOPPED, State.STOPPING) else "state"
    return error
