"""Everything that is written to runs.db, each call one immediate transaction.

Launch writes the run's row, user edits touch their own tables, the follower alone writes facts from
hosts. A final state is never overwritten except by `mark`. The only importer of sqlmodel, with
`tables`; bulk rows go through sqlite3 on the same connection (`ingest`, `metrics`).
Never call it inside a network wait: a transaction holds the database's one write lock.
Whatever is wrong with the file is a StoreError; what a start needs settled in one transaction is in `run_states`.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy.exc import DBAPIError
from sqlmodel import Session, col, delete, select

from orchestrator.errors import DraftyardError, RunNotFound
from orchestrator.redact import redact
from orchestrator.store import migrations, run_states
from orchestrator.store.engine import LOCK_WAIT_S, open_engine
from orchestrator.store.faults import told_plainly
from orchestrator.store.ingest import Ingested, StreamBatch, advance_log, apply_batch
from orchestrator.store.logs import LogFolder
from orchestrator.store.position import StreamPosition
from orchestrator.store.reads import Reader
from orchestrator.store.rows import Document, FailureRow, NewRun, RunRow, State
from orchestrator.store.run_id import check_run_id
from orchestrator.store.run_states import CALLED_OFF, Choose, key_of
from orchestrator.store.tables import (
    AttemptTable,
    DocumentTable,
    FailureTable,
    HostTable,
    IntentTable,
    RunTable,
    TagTable,
    event_of,
    failure_of,
    nodes_of,
    run_of,
)


class Store:
    """Writes of one database; creates or migrates it when opened. Threads may share it."""

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.time,
        lock_wait_s: float = LOCK_WAIT_S,
    ) -> None:
        """`lock_wait_s`: how long each call may wait for others that keep the database locked."""
        read_wait_s = min(migrations.BUSY_TIMEOUT_S, lock_wait_s)
        migrations.migrate(path, busy_timeout_s=read_wait_s)
        self.path = path
        self.logs = LogFolder(path.parent / "logs")
        self._clock = clock
        self._engine = open_engine(path, lock_wait_s=lock_wait_s)
        self.reader = Reader(path, busy_timeout_s=read_wait_s)

    def close(self) -> None:
        self.reader.close()
        self._engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------- a run's row

    def create_run(self, new: NewRun) -> RunRow:
        """The run's row, pending. The same id again returns the row that is there: launching twice is one launch.

        Raises DraftyardError for an id that is no plain name: it becomes a folder beside the database.
        """
        check_run_id(new.id)
        with self._session() as session:
            if session.exec(select(RunTable).where(RunTable.id == new.id)).first() is None:
                run = run_of(new, self._clock() if new.created_s is None else new.created_s)
                session.add(run)
                session.flush()
                key = key_of(run)
                texts = new.documents.items()
                session.add_all(DocumentTable(run_key=key, name=name, text=text) for name, text in texts)
                session.add_all(TagTable(run_key=key, tag=tag) for tag in set(map(redact, new.tags)))
                session.add_all(nodes_of(key, new))
            return run_states.row_of(session, new.id)

    def keep_document(self, run_id: str, name: Document, text: str) -> None:
        """Adds a long text to the run, or replaces it."""
        with self._session() as session:
            run_states.keep_document(session, _run(session, run_id), name, text)

    def describe_run(self, run_id: str, **facts: str) -> None:
        """Fills columns that launch learns on its way: workdir, tree_hash, fingerprint."""
        assert set(facts) <= _DESCRIBABLE, f"not a fact of launch: {set(facts) - _DESCRIBABLE}"
        with self._session() as session:
            run = _run(session, run_id)
            for name, value in facts.items():
                setattr(run, name, value)

    def place_nodes(self, run_id: str, workdirs: Sequence[str]) -> None:
        """Where a run over several hosts works on each, by number."""
        with self._session() as session:
            run_states.place_nodes(session, _run(session, run_id), workdirs)

    def end_node(self, run_id: str, number: int, attempt: int, end: Mapping[str, Any]) -> None:
        """How an attempt's part on one host has ended; what is said first stays."""
        with self._session() as session:
            run_states.end_node(session, (key_of(_run(session, run_id)), number), attempt, end)

    def remove_pending(self, run_id: str, *, why: str) -> None:
        """Takes back the row of a launch that the gate refused; an event with the reason stays."""
        with self._session() as session:
            run = _run(session, run_id)
            if run.state != State.PENDING or run.attempt != 0:
                raise DraftyardError(f"run {run_id} is {run.state}; only a run that never started can be taken back")
            fields = {"run": run_id, "recipe": run.recipe, "branch": run.branch, "host": run.host, "kind": run.kind}
            session.delete(run)
            session.add(
                event_of(None, "refused", f"{run.recipe}/{run.branch} on {run.host}: {why}", fields, self._clock())
            )

    def promise_gpus(self, run_id: str, choose: Choose, *, host: str | None = None) -> tuple[str, ...]:
        """The GPUs that `choose` takes, given those promised to live runs; promised to this run while it is live.
        `host`: one after the run's first.

        `choose` runs inside the transaction, so that of two launches the second sees what the first took.
        """
        with self._session() as session:
            return run_states.promise_gpus(session, _run(session, run_id), choose, host)

    def new_attempt(
        self,
        run_id: str,
        *,
        number: int | None = None,
        after: int | None = None,
        retry: int | None = None,
        launcher: str | None = None,
        choose: Choose | None = None,
    ) -> int:
        """One more start, numbered from 1; the run is pending again. With `choose`, GPUs are promised to it as well.

        Only a run whose newest attempt has ended gets one, or a pending one its first, and never one that was
        stopped or is asked to stop: DraftyardError. `number`: as an imported folder has it. `after`: the newest
        attempt that whoever asks knows of; one that has come since is not gone past. `retry`: its wish.
        """
        with self._session() as session:
            run = _run(session, run_id)
            attempt = run_states.begin_attempt(session, run, self._clock(), number=number, after=after, retry=retry)
            if launcher is not None:
                run_states.keep_document(session, run, Document.LAUNCHER, launcher)
            if choose is not None:
                run_states.promise_gpus(session, run, choose)
            return attempt

    def set_up(self, run_id: str, attempt: int) -> None:
        """From here on the job may live, and only what its host shows decides. Raises DraftyardError, and changes
        nothing, for an attempt that has been ended, overtaken or asked to stop."""
        with self._session() as session:
            run_states.set_up(session, _run(session, run_id), attempt, self._clock())

    def set_state(
        self,
        run_id: str,
        state: State,
        *,
        reason: str | None = None,
        evidence: str,
        ended_s: float | None = None,
        attempt: int | None = None,
        wish: str | None = None,
    ) -> bool:
        """Moves the run and its newest attempt; False, and nothing changed, when the run has already ended.

        `attempt`: the one that was looked at; a newer one keeps all as it is. `wish`: see `run_states.move`.
        """
        with self._session() as session:
            run = _run(session, run_id)
            is_said = (run.state, run.reason, run.evidence) == (state, reason, evidence)
            if State(run.state).is_final or is_said or attempt not in (None, run.attempt):
                return False
            run_states.move(session, run, state, (reason, evidence, ended_s), self._clock(), wish=wish)
            return True

    def mark(self, run_id: str, state: State, *, why: str) -> None:
        """A person's word over the evidence: the one way to change a final state. Logged for ever."""
        with self._session() as session:
            run_states.mark(session, _run(session, run_id), state, why, self._clock())

    def describe_attempt(self, run_id: str, attempt: int, **facts: str | int | None) -> None:
        """What the supervisor's and the exit file say: pid, start_ticks, boot_id, exit_code, signal."""
        assert set(facts) <= _ATTEMPT_FACTS, f"not a fact of an attempt: {set(facts) - _ATTEMPT_FACTS}"
        with self._session() as session:
            row = session.get(AttemptTable, (_run(session, run_id).key, attempt))
            if row is None:
                raise RunNotFound(f"run {run_id} has no attempt {attempt}")
            for name, value in facts.items():
                setattr(row, name, value)

    # ------------------------------------------------------- what hosts tell

    def ingest(self, batch: StreamBatch) -> Ingested:
        """Rows, offset, last seq and what they prove in one transaction; repeats change nothing."""
        with self._session() as session:
            run = _run(session, batch.run_id)
            told = apply_batch(_driver(session), key_of(run), batch)
            if told.num_events and batch.attempt == run.attempt:
                run_states.note_first_event(session, run, self._clock())
            return told

    def position(self, run_id: str, attempt: int, writer: str) -> StreamPosition:
        """Where reading of an events file, or of stdout or stderr, goes on. Takes no lock."""
        return self.reader.position(run_id, attempt, writer)

    def keep_log(
        self, run_id: str, attempt: int, stream: str, *, content: bytes, read_from: StreamPosition
    ) -> StreamPosition:
        """Bytes of stdout or stderr that followed `read_from`; written to the log folder, then counted."""
        size = len(content)
        kept = StreamPosition(read_from.identity, read_from.offset_bytes + size, 0, read_from.kept_bytes + size)
        with told_plainly(self.logs.root):
            self.logs.write(run_id, attempt, stream, offset=read_from.kept_bytes, content=content)
        with self._session() as session:
            place = (key_of(_run(session, run_id)), attempt, stream)
            advance_log(_driver(session), place, kept, at_s=self._clock())
        return kept

    def replace_failures(self, run_id: str, attempt: int, failures: Sequence[FailureRow]) -> None:
        """All that is known of why this attempt ended, first cause first."""
        with self._session() as session:
            key = key_of(_run(session, run_id))
            known = delete(FailureTable).where(col(FailureTable.run_key) == key, col(FailureTable.attempt) == attempt)
            session.exec(known)
            session.add_all(failure_of(key, row) for row in failures)

    def add_event(self, run_id: str | None, kind: str, text: str, fields: Mapping[str, Any] | None = None) -> None:
        """Something that happened on this side."""
        with self._session() as session:
            run = None if run_id is None else _run(session, run_id)
            session.add(event_of(run, kind, text, fields or {}, self._clock()))

    def host_seen(
        self,
        name: str,
        *,
        address: str = "",
        facts: Mapping[str, Any] | None = None,
        clock_offset_s: float | None = None,
    ) -> None:
        """The host answered. Ends "unreachable" for it and its runs."""
        with self._session() as session:
            host = session.get(HostTable, name) or HostTable(name=name, address=address)
            host.address = address or host.address
            host.seen_s, host.unreachable_since_s, host.error = self._clock(), None, None
            if facts is not None:
                host.facts_json = json.dumps(facts)
            if clock_offset_s is not None:
                host.clock_offset_s = clock_offset_s
            session.add(host)
            run_states.said_of_host(session, name, None)

    def host_unreachable(self, name: str, *, error: str) -> None:
        """The host did not answer: its live runs show since when. Their states stay."""
        with self._session() as session:
            host = session.get(HostTable, name) or HostTable(name=name, address="")
            host.unreachable_since_s = host.unreachable_since_s or self._clock()
            host.error = error
            session.add(host)
            run_states.said_of_host(session, name, host.unreachable_since_s)

    # ---------------------------------------------------------------- wishes

    def ask(self, run_id: str, kind: str, *, grace_s: float | None = None) -> int:
        """A wish (stop, retry) for the follower; an open one of the same kind is renewed. Returns its id.

        A run that has ended cannot be stopped: DraftyardError. The wish would wait for its next attempt.
        """
        with self._session() as session:
            run = _run(session, run_id)
            if kind == "stop" and State(run.state).is_final:
                raise DraftyardError(f"run {run_id} has ended already: {run.state}; {run.evidence}")
            found = run_states.open_wishes(session, run, kind)
            wish = found[0] if found else IntentTable(run_key=key_of(run), kind=kind, asked_s=self._clock())
            wish.grace_s = grace_s
            session.add(wish)
            session.flush()
            assert wish.id is not None
            return wish.id

    def call_off_retry(self, run_id: str) -> bool:
        """A stop of a run that has ended: whether there was a retry to take back."""
        with self._session() as session:
            return bool(run_states.end_wishes(session, _run(session, run_id), "retry", CALLED_OFF, self._clock()))

    def finish_intent(self, intent_id: int, *, outcome: str) -> None:
        """What became of a wish, unless that is said already."""
        with self._session() as session:
            wish = session.get(IntentTable, intent_id)
            if wish is not None and wish.done_s is None:
                run_states.finish_wish(session, wish, outcome, self._clock())

    def cursor(self, name: str) -> int | None:
        """How far `name` has read the events; None when it never has. Takes no lock."""
        return self.reader.cursor(name)

    def move_cursor(self, name: str, event_id: int) -> None:
        with self._session() as session:
            _driver(session).execute("INSERT OR REPLACE INTO cursors VALUES (?, ?)", (name, event_id))

    # --------------------------------------------------------- keeping order

    def tag(self, run_id: str, *, add: Iterable[str] = (), remove: Iterable[str] = ()) -> None:
        with self._session() as session:
            key = key_of(_run(session, run_id))
            for tag in {*remove, *add, *map(redact, add)}:
                session.exec(delete(TagTable).where(col(TagTable.run_key) == key, col(TagTable.tag) == tag))
            session.add_all(TagTable(run_key=key, tag=tag) for tag in set(map(redact, add)))

    def note(self, run_id: str, text: str) -> None:
        """Replaces the run's note."""
        with self._session() as session:
            _run(session, run_id).note = redact(text)

    def remove(self, run_id: str) -> None:
        """Into the bin, where no retry starts it; nothing is lost. A live run is refused."""
        with self._session() as session:
            run = _run(session, run_id)
            if not State(run.state).is_final:
                raise DraftyardError(f"run {run_id} is {run.state}; stop it first (draftyard stop {run_id})")
            run.removed_s = self._clock()
            run_states.end_wishes(session, run, "retry", run_states.BINNED, run.removed_s)

    def restore(self, run_id: str) -> None:
        """Out of the bin. Raises DraftyardError for a run that is not in it."""
        with self._session() as session:
            run = _run(session, run_id)
            if run.removed_s is None:
                raise DraftyardError(f"run {run_id} is not in the bin; `draftyard ls --removed` lists what is")
            run.removed_s = None

    def purge(self, run_id: str) -> None:
        """Ends a run in the bin: its rows, values and logs here. What lies on the host stays there."""
        with self._session() as session:
            run, connection = _run(session, run_id), _driver(session)
            if run.removed_s is None:
                raise DraftyardError(f"run {run_id} is not in the bin; remove it first (draftyard rm {run_id})")
            for table in ("metrics", "rollups"):
                connection.execute(
                    f"DELETE FROM {table} WHERE series IN (SELECT id FROM series WHERE run_key = ?)", (run.key,)
                )
            connection.execute("DELETE FROM runs WHERE key = ?", (run.key,))
        self.logs.forget(run_id)

    # ----------------------------------------------------------------- inner

    @contextmanager
    def _session(self) -> Iterator[Session]:
        """One immediate transaction; committed at the end, undone on an error.

        StoreError instead of SQLAlchemy's wrapper: nobody outside this room knows of one.
        """
        with told_plainly(self.path):
            try:
                with Session(self._engine, expire_on_commit=False) as session, session.begin():
                    yield session
            except DBAPIError as error:
                raise error.orig or error from error


_DESCRIBABLE = {"workdir", "tree_hash", "fingerprint"}

_ATTEMPT_FACTS = {"pid", "start_ticks", "boot_id", "exit_code", "signal"}


def _driver(session: Session) -> sqlite3.Connection:
    """The same transaction without SQLAlchemy, for bulk rows."""
    driver = session.connection().connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    return driver


def _run(session: Session, run_id: str) -> RunTable:
    run = session.exec(select(RunTable).where(RunTable.id == run_id)).first()
    if run is None:
        raise RunNotFound(f"no run has the id {run_id!r}")
    return run
