"""runs.db as a file: schema, transactions, many processes, order. What events become is in test_ingest."""

import contextlib
import multiprocessing
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import fields
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from sqlmodel import SQLModel, create_engine

from orchestrator.errors import DraftyardError, RunNotFound, StoreError
from orchestrator.store import migrations, rows
from orchestrator.store.faults import store_error
from orchestrator.store.reads import Reader
from orchestrator.store.rows import Document, State
from orchestrator.store.tables import TABLES
from orchestrator.store.writes import Store
from tests.orchestrator.runs import RUN, again, batch, event, new_run, started, steps


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "runs.db")


def columns(connection: sqlite3.Connection, table: str) -> list[tuple[str, str, bool, bool]]:
    """name, type, not null, part of the primary key"""
    alike = {"VARCHAR": "TEXT", "FLOAT": "REAL", "BOOLEAN": "INTEGER"}
    found = connection.execute(f"PRAGMA table_info({table})").fetchall()
    return [(row[1], alike.get(row[2], row[2]), bool(row[3]) or bool(row[5]), bool(row[5])) for row in found]


def test_the_tables_of_sqlmodel_are_those_of_the_migrations(tmp_path: Path) -> None:
    migrations.migrate(tmp_path / "sql.db")
    engine = create_engine(f"sqlite:///{tmp_path / 'model.db'}")
    SQLModel.metadata.create_all(engine, tables=[SQLModel.metadata.tables[str(t.__tablename__)] for t in TABLES])
    engine.dispose()
    by_sql, by_model = sqlite3.connect(tmp_path / "sql.db"), sqlite3.connect(tmp_path / "model.db")

    for table in TABLES:
        name = str(table.__tablename__)
        assert columns(by_sql, name) == columns(by_model, name), name
    by_sql.close()
    by_model.close()


def test_every_field_of_a_run_is_read_from_its_own_column(store: Store) -> None:
    store.create_run(
        new_run(tags=("b", "a"), why="to see", num_steps=7, git_dirty=True, workdir="/w", fingerprint="f1")
    )

    run = store.reader.run(RUN)

    assert {field.name for field in fields(rows.RunRow)} >= {"id", "state", "tags"}
    assert (run.id, run.state, run.tags, run.why, run.num_steps) == (RUN, State.PENDING, ("a", "b"), "to see", 7)
    assert (run.git_dirty, run.workdir, run.fingerprint, run.attempt) == (True, "/w", "f1", 0)
    assert store.reader.document(RUN, Document.SPEC) is not None
    assert store.reader.document(RUN, Document.PLAN) is None


def test_creating_the_same_run_twice_is_one_run(store: Store) -> None:
    first = store.create_run(new_run(why="first"))
    again = store.create_run(new_run(why="second"))

    assert again == first
    assert len(store.reader.runs()) == 1


def test_a_database_that_does_not_exist_reads_as_an_empty_one_until_it_appears(tmp_path: Path) -> None:
    reader = Reader(tmp_path / "runs.db")
    before = reader.data_version()
    assert reader.runs(kind=None) == []
    assert not (tmp_path / "runs.db").exists()

    Store(tmp_path / "runs.db").create_run(new_run())

    assert reader.data_version() != before
    assert [run.id for run in reader.runs()] == [RUN]


def test_data_version_changes_only_when_something_was_committed(store: Store) -> None:
    reader = Reader(store.path)
    before = reader.data_version()
    assert reader.data_version() == before

    started(store)

    assert reader.data_version() != before


def test_a_newer_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    Store(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 999")
    connection.close()

    for open_it in (Store, Reader):
        with pytest.raises(
            DraftyardError, match=r"schema 999, written by a newer draftyard.*up to 3.*nothing was changed"
        ):
            open_it(path)


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    path.write_bytes(b"not a database at all" * 100)

    with pytest.raises(DraftyardError, match=r"runs\.db: .*not a database"):
        Store(path)


def test_a_network_file_system_is_refused_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No such mount can be made here: the number statfs would give is put in."""
    for number, name in ((0x6969, "NFS"), (0xFF534D42, "CIFS"), (0x65735546, "FUSE")):
        monkeypatch.setattr(migrations, "file_system_type", lambda folder, number=number: number)
        with pytest.raises(DraftyardError, match=f"network file system \\({name}\\).*--db or DRAFTYARD_DB"):
            Store(tmp_path / "runs.db")
    assert not (tmp_path / "runs.db").exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="statfs numbers are Linux's")
def test_the_file_system_is_asked_from_the_kernel() -> None:
    assert migrations.file_system_type(Path("/proc")) == 0x9FA0
    assert migrations.file_system_type(Path("/no/such/folder")) == 0


def test_the_settings_hold_on_every_connection(store: Store) -> None:
    started(store)
    connection = migrations.connect(store.path)
    asked = {
        name: connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("foreign_keys", "mmap_size", "busy_timeout")
    }

    assert asked == {"foreign_keys": 1, "mmap_size": 0, "busy_timeout": 10_000}
    assert connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    with pytest.raises(sqlite3.IntegrityError):
        connection.execute("INSERT INTO tags VALUES (999, 'x')")
    connection.close()


# ------------------------------------------------------------------------------ many processes


def _write_one(path: Path, number: int, start_at: float) -> None:
    time.sleep(max(0.0, start_at - time.time()))
    with Store(path) as store:
        run_id = started(store, f"run-{number:04d}")
        for tag in range(3):
            store.tag(run_id, add=[f"t{tag}"])


@pytest.mark.slow
def test_32_writers_that_start_together_all_succeed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    path, start_at = tmp_path / "runs.db", time.time() + 0.3
    writers = [context.Process(target=_write_one, args=(path, number, start_at)) for number in range(32)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(timeout=200)

    assert [writer.exitcode for writer in writers] == [0] * 32
    runs = Reader(path).runs(limit=100)
    assert len(runs) == 32
    assert all(run.tags == ("t0", "t1", "t2") and run.attempt == 1 for run in runs)


def _read_until_there(path: Path, keeps_one: bool) -> None:
    """Looks from before there is a file until the run is seen; a screen keeps its reader, a verb opens a new one."""
    deadline = time.monotonic() + 180
    kept = Reader(path)
    while time.monotonic() < deadline:
        reader = kept if keeps_one else Reader(path)
        reader.data_version()
        found = reader.runs(kind=None)
        if not keeps_one:
            reader.close()
        if found:
            assert [run.id for run in found] == [RUN]
            return
    raise AssertionError("the run never came into sight")


@pytest.mark.slow
def test_readers_that_look_while_the_first_writer_makes_the_schema_see_nothing_or_all(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for number in range(4):
        path = tmp_path / str(number) / "runs.db"
        path.parent.mkdir()
        readers = [context.Process(target=_read_until_there, args=(path, bool(n % 2))) for n in range(8)]
        for reader in readers:
            reader.start()
        time.sleep(0.1)
        Store(path).create_run(new_run())
        for reader in readers:
            reader.join(timeout=200)

        assert [reader.exitcode for reader in readers] == [0] * 8


def _begin_and_end(path: Path, times: int) -> None:
    """So many attempts of its own, each ended, however often another process is in the way."""
    with Store(path) as store:
        while times:
            with contextlib.suppress(DraftyardError):
                attempt = store.new_attempt(RUN)
                assert store.set_state(RUN, State.FAILED, evidence=f"attempt {attempt}", attempt=attempt)
                times -= 1


@pytest.mark.slow
def test_racing_processes_never_begin_an_attempt_while_another_is_live(store: Store) -> None:
    store.create_run(new_run())
    store.close()
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_begin_and_end, args=(store.path, 10)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(timeout=200)

    assert [writer.exitcode for writer in writers] == [0] * 4
    attempts = Reader(store.path).attempts(RUN)
    assert [(row.number, row.evidence) for row in attempts] == [(n, f"attempt {n}") for n in range(1, 41)]


def _write_until_killed(path: Path, acknowledged: Connection) -> None:
    with Store(path) as store:
        step = store.position(RUN, 1, "rank0").last_seq
        while True:
            store.ingest(batch(steps(step + 1, step + 40), offset_bytes=step + 40))
            step += 40
            acknowledged.send(step)


@pytest.mark.parametrize("rounds", [8, pytest.param(30, marks=pytest.mark.slow)])
def test_a_killed_writer_loses_no_row_it_had_acknowledged(store: Store, rounds: int) -> None:
    started(store)
    store.close()
    chance = random.Random(7)
    context = multiprocessing.get_context("fork")
    acknowledged = 0
    for _ in range(rounds):
        reading, writing = context.Pipe(duplex=False)
        process = context.Process(target=_write_until_killed, args=(store.path, writing))
        process.start()
        for _ in range(chance.randint(1, 6)):
            acknowledged = reading.recv()
        time.sleep(chance.random() * 0.01)
        process.kill()
        process.join()
        reading.close()
        writing.close()

    with Reader(store.path) as reader:
        values = reader.metric_values(RUN, "loss")
        assert [value.step for value in values] == list(range(1, len(values) + 1))
        assert len(values) >= acknowledged
        assert reader.streams(RUN)[0].last_seq == len(values)
    connection = sqlite3.connect(store.path)
    assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    connection.close()


# ------------------------------------------------------------------------- states and attempts


def test_a_final_state_changes_only_by_mark(store: Store) -> None:
    started(store)
    assert store.set_state(RUN, State.FAILED, reason="exit:3", evidence="exit status 3 in the exit file", ended_s=5.0)

    assert not store.set_state(RUN, State.RUNNING, evidence="late news")
    assert store.reader.run(RUN).state == State.FAILED

    store.mark(RUN, State.SUCCEEDED, why="the failure came after the last checkpoint")
    run = store.reader.run(RUN)
    assert (run.state, run.reason) == (State.SUCCEEDED, "user")
    told = [event.text for event in store.reader.events(RUN, kinds=["state"])]
    assert told[-1] == "failed -> succeeded (user): marked by hand: the failure came after the last checkpoint"


def test_a_new_attempt_makes_the_run_live_again_and_keeps_the_old_one(store: Store) -> None:
    started(store)
    store.ingest(batch(steps(1, 5)))
    store.set_state(RUN, State.FAILED, reason="gpu_oom", evidence="x")

    assert store.new_attempt(RUN) == 2

    run = store.reader.run(RUN)
    assert (run.state, run.reason, run.ended_s, run.attempt) == (State.PENDING, None, None, 2)
    assert [(row.number, row.state, row.last_step) for row in store.reader.attempts(RUN)] == [
        (1, State.FAILED, 5),
        (2, State.PENDING, None),
    ]


@pytest.mark.parametrize("state", [State.PENDING, State.SETTING_UP, State.RUNNING, State.STOPPING])
def test_a_live_run_gets_no_other_attempt(store: Store, state: State) -> None:
    started(store)
    store.set_state(RUN, state, evidence="at work")

    with pytest.raises(DraftyardError, match=f"is {state} in its attempt 1 .*only a run that has ended"):
        store.new_attempt(RUN)

    assert [row.number for row in store.reader.attempts(RUN)] == [1]


def test_an_attempt_that_came_since_is_not_gone_past(store: Store) -> None:
    started(store)
    again(store)
    store.set_state(RUN, State.SUCCEEDED, evidence="it went well")

    with pytest.raises(DraftyardError, match=r"had its attempt 2 meanwhile and is succeeded \(it went well\)"):
        store.new_attempt(RUN, after=1)

    assert store.new_attempt(RUN, after=2) == 3


def test_an_imported_attempt_keeps_its_number_under_the_same_guard(store: Store) -> None:
    store.create_run(new_run())

    assert store.new_attempt(RUN, number=3) == 3
    with pytest.raises(DraftyardError, match="only a run that has ended"):
        store.new_attempt(RUN, number=4)

    assert store.reader.run(RUN).attempt == 3


def test_what_was_seen_of_an_older_attempt_never_moves_a_newer_one(store: Store) -> None:
    started(store)
    again(store)

    assert not store.set_state(RUN, State.LOST, evidence="seen of attempt 1", attempt=1)
    assert store.reader.run(RUN).state == State.PENDING
    assert store.set_state(RUN, State.LOST, evidence="seen of attempt 2", attempt=2)


def test_the_last_moment_to_call_a_start_off_is_one_transaction(store: Store) -> None:
    started(store)
    store.set_up(RUN, 1)
    assert store.reader.run(RUN).state == State.SETTING_UP

    again(store)
    store.ask(RUN, "stop")
    with pytest.raises(DraftyardError, match="was asked to stop; it is not started") as refused:
        store.set_up(RUN, 2)

    assert refused.value.reason == "stopped"
    assert store.reader.run(RUN).state == State.PENDING


def test_a_stop_is_for_the_attempt_it_was_asked_of(store: Store) -> None:
    started(store)
    store.ask(RUN, "stop")
    store.set_state(RUN, State.FAILED, evidence="it broke first")

    assert store.reader.intents(RUN) == []
    assert store.reader.intents(RUN, only_open=False)[0].outcome == "failed: it broke first"
    with pytest.raises(DraftyardError, match="has ended already: failed; it broke first"):
        store.ask(RUN, "stop")
    assert store.new_attempt(RUN) == 2


def test_a_retry_is_settled_by_whoever_starts_the_next_attempt(store: Store) -> None:
    started(store)
    store.set_state(RUN, State.FAILED, evidence="x")
    wish = store.ask(RUN, "retry")

    store.new_attempt(RUN)
    store.finish_intent(wish, outcome="too late a word")

    assert [row.outcome for row in store.reader.intents(RUN, only_open=False)] == ["a new attempt was started"]


def test_a_card_promised_to_a_live_run_is_seen_by_the_next_to_choose(store: Store) -> None:
    seen = []

    def choose(promised: Mapping[str, str]) -> tuple[str, ...]:
        seen.append(dict(promised))
        return ("GPU-a", "0")

    for run_id, host in (("first-run", "box"), ("second-run", "box"), ("other-host", "elsewhere")):
        store.create_run(new_run(run_id, host=host))
        store.promise_gpus(run_id, choose)
    store.set_state("first-run", State.FAILED, evidence="x")
    store.set_state("second-run", State.FAILED, evidence="x")

    assert seen[0] == {}
    assert seen[1] == {"GPU-a": "first-run", "0": "first-run"}
    assert seen[2] == {"GPU-a": "second-run"}  # the last to have it; an index says nothing of another host
    assert store.reader.promised_gpus("box") == {"GPU-a": "other-host"}
    assert store.reader.promised_gpus("elsewhere", but="other-host") == {}


def _promise(path: Path, run_id: str) -> None:
    def choose(promised: Mapping[str, str]) -> tuple[str, ...]:
        time.sleep(0.05)  # any other would have read by now, were this not one transaction
        return (next(card for card in ("GPU-a", "GPU-b", "GPU-c") if card not in promised),)

    with Store(path) as store:
        store.promise_gpus(run_id, choose)


@pytest.mark.slow
def test_racing_launches_take_different_cards(store: Store) -> None:
    run_ids = [f"run-{number}" for number in range(3)]
    for run_id in run_ids:
        store.create_run(new_run(run_id))
    store.close()
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_promise, args=(store.path, run_id)) for run_id in run_ids]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(timeout=200)

    assert sorted(Reader(store.path).promised_gpus("local").values()) == run_ids


def test_a_run_stopped_before_its_start_is_not_started_after_all(store: Store) -> None:
    store.create_run(new_run())
    store.set_state(RUN, State.STOPPED, reason="user", evidence="stopped before it was started")

    with pytest.raises(DraftyardError, match="is stopped already"):
        store.new_attempt(RUN)
    assert store.reader.run(RUN).state == State.STOPPED


def test_a_shorter_grace_is_said_once(store: Store) -> None:
    started(store)
    told = [store.set_state(RUN, State.STOPPING, reason="user", evidence=f"{grace} s") for grace in (60, 5, 5)]

    assert told == [True, True, False]


def test_a_refused_launch_leaves_no_row_but_an_event(store: Store) -> None:
    store.create_run(new_run())

    store.remove_pending(RUN, why="evidence is missing: fwd_bwd")

    assert store.reader.runs(kind=None) == []
    told = store.reader.events()
    assert [(row.kind, row.run_id) for row in told] == [("refused", None)]
    assert told[0].text == "smollm2/v6 on local: evidence is missing: fwd_bwd"


def test_a_run_that_started_cannot_be_taken_back(store: Store) -> None:
    started(store)

    with pytest.raises(DraftyardError, match="only a run that never started"):
        store.remove_pending(RUN, why="no")


def test_unreachable_is_a_view_that_ends_when_the_host_answers(store: Store) -> None:
    started(store)
    started(store, "other-run", host="gpu")

    store.host_unreachable("local", error="no route")
    run = store.reader.run(RUN)
    assert run.state == State.PENDING
    assert run.unreachable_since_s is not None
    assert store.reader.run("other-run").unreachable_since_s is None
    first_s = run.unreachable_since_s
    store.host_unreachable("local", error="still no route")
    assert store.reader.run(RUN).unreachable_since_s == first_s

    store.host_seen("local")
    assert store.reader.run(RUN).unreachable_since_s is None
    assert store.reader.hosts()[0].error is None


# ------------------------------------------------------------------------- finding and keeping


@pytest.mark.parametrize(
    ("selector", "found"),
    [
        ("20260102-b", "20260102-bbbb"),
        ("@last", "20260103-cccc"),
        ("@failed", "20260101-aaaa"),
        ("20260103-cccc", "20260103-cccc"),
    ],
)
def test_a_selector_finds_its_run(store: Store, selector: str, found: str) -> None:
    for run_id in ("20260101-aaaa", "20260102-bbbb", "20260103-cccc"):
        started(store, run_id)
    store.set_state("20260101-aaaa", State.FAILED, evidence="x")

    assert store.reader.run(selector).id == found


def test_the_last_run_is_the_newest_that_trains_and_without_any_the_newest_job(store: Store) -> None:
    store.create_run(new_run("20260101-prep", kind="prepare"))
    store.set_state("20260101-prep", State.FAILED, evidence="x")
    assert [store.reader.run(name).id for name in ("@last", "@failed")] == ["20260101-prep", "20260101-prep"]

    started(store, "20260102-aaaa")
    store.set_state("20260102-aaaa", State.FAILED, evidence="x")
    store.create_run(new_run("20260103-eval", kind="evaluate"))
    store.set_state("20260103-eval", State.FAILED, evidence="x")

    assert [store.reader.run(name).id for name in ("@last", "@failed")] == ["20260102-aaaa", "20260102-aaaa"]


def test_a_run_that_was_asked_to_stop_is_not_tried_again(store: Store) -> None:
    started(store)
    store.ask(RUN, "stop")

    assert store.set_state(RUN, State.FAILED, reason="exit:1", evidence="x", wish="retry")

    assert store.reader.intents(RUN) == []


def test_a_retry_that_was_called_off_begins_no_attempt_however_late_its_start_comes(store: Store) -> None:
    started(store)
    store.set_state(RUN, State.FAILED, reason="exit:1", evidence="x", wish="retry")
    (wish,) = store.reader.intents(RUN)
    assert store.call_off_retry(RUN)

    with pytest.raises(DraftyardError, match="called off by a stop") as caught:
        store.new_attempt(RUN, retry=wish.id)

    assert caught.value.reason == "stopped"
    assert store.new_attempt(RUN) == 2  # a person may


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ("2026010", "beginning of several ids: 20260102-bbbb, 20260101-aaaa"),
        ("202", "at least 4 characters"),
        ("2026-nope", "no run's id begins with"),
        ("@failed", "there is no failed run yet"),
        ("@newest", "names no run; known are @last, @failed"),
        ("2026%", "no run's id begins with"),
    ],
)
def test_a_selector_that_finds_nothing_says_why(store: Store, selector: str, message: str) -> None:
    for run_id in ("20260101-aaaa", "20260102-bbbb"):
        started(store, run_id)

    with pytest.raises(RunNotFound, match=message) as caught:
        store.reader.run(selector)
    assert caught.value.exit_code == 5


def test_a_run_in_the_bin_is_started_by_nobody(store: Store) -> None:
    started(store)
    store.set_state(RUN, State.FAILED, evidence="x")
    store.ask(RUN, "retry")
    store.remove(RUN)

    with pytest.raises(DraftyardError, match=f"draftyard restore {RUN}"):
        store.new_attempt(RUN)
    store.restore(RUN)

    assert not store.reader.intents(RUN)
    assert store.new_attempt(RUN) == 2


def test_an_ending_and_the_retry_it_calls_for_are_one_write(store: Store) -> None:
    started(store)

    assert store.set_state(RUN, State.FAILED, evidence="x", attempt=1, wish="retry")
    assert not store.set_state(RUN, State.FAILED, evidence="y", attempt=1, wish="retry")

    assert [wish.kind for wish in store.reader.intents(RUN)] == ["retry"]


def test_a_marked_run_is_not_retried(store: Store) -> None:
    started(store)
    store.set_state(RUN, State.FAILED, evidence="x")
    store.ask(RUN, "retry")

    store.mark(RUN, State.STOPPED, why="enough of it")

    assert not store.reader.intents(RUN)


def test_removed_runs_wait_in_the_bin_until_purged(store: Store) -> None:
    started(store)
    store.ingest(batch(steps(1, 300)))
    store.logs.write(RUN, 1, "stdout", offset=0, content=b"hello")
    with pytest.raises(DraftyardError, match="is running; stop it first"):
        store.remove(RUN)
    store.set_state(RUN, State.STOPPED, evidence="x")
    for take_out in (store.purge, store.restore):
        with pytest.raises(DraftyardError, match="not in the bin"):
            take_out(RUN)

    store.remove(RUN)
    assert store.reader.runs() == []
    assert [run.id for run in store.reader.runs(removed=True)] == [RUN]
    store.restore(RUN)
    assert [run.id for run in store.reader.runs()] == [RUN]
    store.remove(RUN)
    store.purge(RUN)

    connection = sqlite3.connect(store.path)
    tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    assert {
        table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables
    } == dict.fromkeys(tables, 0)
    assert not (store.logs.root / RUN).exists()
    connection.close()


def test_tags_and_notes_are_kept_as_written(store: Store) -> None:
    started(store)

    store.tag(RUN, add=["best", "a b", "é:?"])
    store.tag(RUN, add=["best"], remove=["a b"])
    store.note(RUN, "line 1\nline 2")

    run = store.reader.run(RUN)
    assert run.tags == ("best", "é:?")
    assert run.note == "line 1\nline 2"


def test_a_wish_asked_twice_is_one_wish_with_the_newer_grace(store: Store) -> None:
    started(store)

    first = store.ask(RUN, "stop", grace_s=60)
    again = store.ask(RUN, "stop", grace_s=5)

    assert first == again
    assert [(wish.kind, wish.grace_s) for wish in store.reader.intents(RUN)] == [("stop", 5)]
    store.finish_intent(first, outcome="stopped")
    assert store.reader.intents(RUN) == []
    assert store.reader.intents(RUN, only_open=False)[0].outcome == "stopped"


def test_reading_loads_neither_sqlmodel_nor_pydantic() -> None:
    code = "import sys, orchestrator.store.reads; print([m for m in ('sqlmodel', 'sqlalchemy', 'pydantic', 'torch') if m in sys.modules])"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_a_broken_constraint_stays_what_it_is(store: Store) -> None:
    started(store)
    _break(store.path, "raise(ABORT, 'never so')")

    with pytest.raises(sqlite3.IntegrityError, match="never so"):
        store.add_event(RUN, "note", "x")
    with pytest.raises(sqlite3.IntegrityError, match="never so"):
        store.ingest(batch([event(1, "note", text="x")]))
    assert store.reader.streams(RUN) == []  # nothing of the transaction stayed


def _break(path: Path, fault: str) -> None:
    """No event can be written from now on."""
    connection = sqlite3.connect(path)
    connection.execute(f"CREATE TRIGGER broken BEFORE INSERT ON events BEGIN SELECT {fault}; END")
    connection.close()


def _damage(path: Path) -> None:
    """The pages of the tables, not the header: what a bad disk leaves."""
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 4096))


def test_a_database_locked_for_too_long_is_a_store_error(store: Store) -> None:
    started(store)
    with Store(store.path, lock_wait_s=0.05) as quick, contextlib.closing(sqlite3.connect(store.path)) as other:
        other.execute("BEGIN IMMEDIATE")

        with pytest.raises(StoreError, match=r"runs\.db: database is locked; another process .* try again") as caught:
            quick.note(RUN, "x")

    assert caught.value.is_passing


def test_a_damaged_database_is_a_store_error_for_readers_and_writers(store: Store) -> None:
    started(store)
    store.close()
    _damage(store.path)

    for use in (lambda: Reader(store.path).runs(), lambda: Store(store.path).note(RUN, "x")):
        with pytest.raises(StoreError, match=r"runs\.db: .*malformed; it is damaged: .*recover.*--db") as caught:
            use()
        assert not caught.value.is_passing
        assert "\n" not in str(caught.value)


def test_a_folder_in_its_place_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "runs.db").mkdir()

    for open_it in (Store, Reader):
        with pytest.raises(StoreError, match=r"runs\.db is a folder; a database file was expected"):
            open_it(tmp_path / "runs.db")


def test_a_place_that_cannot_be_made_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")

    with pytest.raises(StoreError, match=r"cannot be used .*--db or DRAFTYARD_DB"):
        Store(tmp_path / "file" / "runs.db")


def test_a_full_disk_is_a_store_error(store: Store) -> None:
    """A limit on the pages stands for the disk: SQLite answers with the same code."""
    started(store)
    with store._session() as session:
        pages = session.connection().exec_driver_sql("PRAGMA page_count").scalar()
        session.connection().exec_driver_sql(f"PRAGMA max_page_count = {pages}")

    with pytest.raises(StoreError, match=r"full; its disk is full: make room there") as caught:
        store.note(RUN, "x" * 1_000_000)

    assert caught.value.is_passing
    assert store.reader.run(RUN).note == ""


def test_a_row_is_only_made_for_an_id_that_is_a_plain_name(store: Store) -> None:
    with pytest.raises(DraftyardError, match=r"'\.\./x' is no run id"):
        store.create_run(new_run("../x"))

    assert store.reader.runs(kind=None) == []


def test_a_secret_that_a_person_typed_is_kept_nowhere(store: Store) -> None:
    token = "hf_abcdefgh12345678"
    store.create_run(new_run(tags=(token,), why=f"with {token}", forced_reason=f"because {token}"))
    store.tag(RUN, add=[f"a-{token}"])
    store.note(RUN, f"note {token}")
    store.mark(RUN, State.FAILED, why=f"why {token}")
    store.add_event(RUN, "forced", f"went past: {token}", {"reason": token})

    run = store.reader.run(RUN)

    assert (run.note, run.why, run.forced_reason) == ("note [hidden]", "with [hidden]", "because [hidden]")
    assert sorted(run.tags) == ["[hidden]", "a-[hidden]"]
    assert run.evidence.startswith("marked by hand: why [hidden]")
    with contextlib.closing(sqlite3.connect(store.path)) as connection:
        assert not any(token in line for line in connection.iterdump())


def test_a_database_that_nobody_can_look_at_is_no_empty_one(tmp_path: Path) -> None:
    (tmp_path / "runs.db").symlink_to(tmp_path / "runs.db")

    with pytest.raises(StoreError, match="cannot be used"):
        Reader(tmp_path / "runs.db")


def test_an_input_fault_on_a_full_disk_says_that_it_is_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fault = sqlite3.OperationalError("disk I/O error")
    fault.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMSIZE
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 100, 0))  # type: ignore[attr-defined]

    told = store_error(tmp_path / "runs.db", fault)

    assert "its disk is full" in str(told)
    assert told.is_passing
