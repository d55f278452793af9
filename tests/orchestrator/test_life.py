"""Waiting for a run's end, and what is left of the grace while it stops. Times are given, never waited for."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from shutil import disk_usage
from typing import Any

import pytest

from orchestrator.actions import life
from orchestrator.actions.places import Places, find_places
from orchestrator.actions.wishes import kill_in_s
from orchestrator.errors import NotFinished, StoreError
from orchestrator.store.faults import store_error
from orchestrator.store.rows import IntentRow, RunRow, State
from orchestrator.store.writes import Store
from tests.orchestrator.runs import RUN, new_run, started
from tests.orchestrator.runs import life as spec_of
from tests.orchestrator.yard import Yard


def wish(kind: str = "stop", grace_s: float | None = None) -> IntentRow:
    return IntentRow(1, RUN, kind, grace_s, asked_s=100.0, done_s=None, outcome=None)


@pytest.mark.parametrize(
    ("wishes", "spec", "now_s", "left_s"),
    [
        ([wish(grace_s=30.0)], {"life": {"grace_s": 5.0}}, 110.0, 20.0),
        ([wish()], {"life": {"grace_s": 15.0}}, 110.0, 5.0),
        ([wish()], {}, 110.0, 50.0),  # an imported run may have none: the default of every recipe
        ([wish(grace_s=0.0)], {}, 110.0, 0.0),
        ([wish(grace_s=30.0)], {}, 500.0, 0.0),
        ([wish("retry")], {}, 110.0, None),
        ([], {}, 110.0, None),
    ],
)
def test_what_is_left_of_the_grace(
    tmp_path: Path, wishes: list[IntentRow], spec: dict[str, object], now_s: float, left_s: float | None
) -> None:
    with Store(tmp_path / "runs.db") as store:
        store.create_run(new_run())
        store.set_state(RUN, State.STOPPING, evidence="asked to stop")
        stopping = store.reader.run(RUN)

    assert kill_in_s(stopping, wishes, spec, now_s) == left_s


def test_only_a_run_that_stops_has_a_grace_that_passes(tmp_path: Path) -> None:
    with Store(tmp_path / "runs.db") as store:
        run = store.create_run(new_run())

    assert kill_in_s(run, [wish()], {}, 110.0) is None


@pytest.mark.slow
def test_a_waiting_person_sees_the_grace_pass_though_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "ensure_follower", lambda places: None)
    monkeypatch.setattr(life, "COUNTDOWN_S", 0.05)
    places = find_places(tmp_path, {}, db=tmp_path / "runs.db")
    seen: list[float] = []
    with Store(places.db) as store:
        store.create_run(new_run(documents=spec_of(grace_s=400.0)))
        store.new_attempt(RUN)
        store.ask(RUN, "stop")
        store.set_state(RUN, State.STOPPING, evidence="asked to stop")

        def on_moment(moment: life.Moment) -> None:
            if moment.kill_in_s is not None:
                seen.append(moment.kill_in_s)
            if len(seen) == 3:
                store.set_state(RUN, State.STOPPED, evidence="stopped as asked")

        assert life.wait(places, RUN, timeout_s=120.0, on_moment=on_moment).state is State.STOPPED

    assert 400.0 > seen[0] > seen[1] > seen[2] > 280.0


# ------------------------------------------------------------------------------ deadlines


@contextlib.contextmanager
def locked(path: Path, how: str) -> Iterator[None]:
    """Somebody holds the database: IMMEDIATE keeps writers out, EXCLUSIVE without a write-ahead log readers too."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        if how == "EXCLUSIVE":
            other.execute("PRAGMA journal_mode = DELETE")
        other.execute(f"BEGIN {how}")
        yield


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    """Of a database with one live run, which nobody follows."""
    monkeypatch.setattr(life, "ensure_follower", lambda places: None)
    places = find_places(tmp_path, {}, db=tmp_path / "runs.db")
    with Store(places.db) as store:
        store.create_run(new_run())
    return places


@pytest.mark.slow
@pytest.mark.parametrize("how", ["IMMEDIATE", "EXCLUSIVE"])
def test_a_stop_that_cannot_be_written_gives_up_at_its_deadline_and_says_why(places: Places, how: str) -> None:
    began_s = time.monotonic()

    with locked(places.db, how), pytest.raises(StoreError, match="is locked; another process has kept it"):
        life.stop(places, RUN, timeout_s=0.2)

    assert 0.2 <= time.monotonic() - began_s < 20.0  # without a deadline it is patient for half a minute


@pytest.mark.slow
def test_a_wait_that_cannot_read_gives_up_at_its_deadline_and_says_why(places: Places) -> None:
    began_s = time.monotonic()

    with locked(places.db, "EXCLUSIVE"), pytest.raises(NotFinished, match=f"of run {RUN} after 0.2 s: .* is locked;"):
        life.wait(places, RUN, timeout_s=0.2)

    assert 0.2 <= time.monotonic() - began_s < 20.0


@pytest.mark.parametrize("has_ended", [True, False])
def test_who_leaves_a_run_that_has_ended_is_not_told_that_it_goes_on(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, *, has_ended: bool
) -> None:
    with Store(yard.root / "runs.db") as store:
        started(store)
        if has_ended:
            store.set_state(RUN, State.FAILED, evidence="exit status 3")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(life, "wait", interrupted)

    assert yard.run("wait", RUN) == 130
    assert (f"run {RUN} has ended, failed: draftyard show {RUN}" in yard.err) is has_ended
    assert ("the run goes on; come back with one of:" in yard.err) is not has_ended


@pytest.mark.parametrize("error_number", [errno.EDQUOT, errno.EOPNOTSUPP])
def test_waiting_beside_a_used_up_quota_says_why_nothing_comes(
    places: Places, monkeypatch: pytest.MonkeyPatch, error_number: int
) -> None:
    """The disk has room, and not for this user. A file system that reserves none says nothing about it."""
    with Store(places.db, clock=lambda: time.time() - 300) as store:
        started(store, "kxxxfull")

    def refused(descriptor: int, offset: int, num_bytes: int) -> None:
        raise OSError(error_number, os.strerror(error_number))

    monkeypatch.setattr(os, "posix_fallocate", refused)

    with pytest.raises(NotFinished) as told:
        life.wait(places, "kxxxfull", timeout_s=0.1)

    is_told = (
        f"the quota on the disk of {places.db} is used up, so nothing new of live runs is written, for 5 min"
        in str(told.value)
    )
    assert is_told is (error_number == errno.EDQUOT)
    assert {path.name.split("-")[0] for path in places.db.parent.iterdir()} <= {"runs.db", "logs"}
    written = sqlite3.OperationalError("disk I/O error")
    written.sqlite_errorcode = sqlite3.SQLITE_IOERR_WRITE
    assert ("quota" in str(store_error(places.db, written))) is is_told


def test_waiting_beside_a_full_disk_says_why_nothing_comes(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its follower lives, and neither the database nor its log takes a word."""
    with Store(places.db, clock=lambda: time.time() - 300) as store:
        started(store, "kxxxfull")
    monkeypatch.setattr(life, "FOLLOWER_CHECK_S", 0.05)
    room, said = disk_usage(places.db.parent), list[str | None]()
    monkeypatch.setattr("orchestrator.actions.followed.shutil.disk_usage", lambda _: room._replace(free=4096))

    with pytest.raises(NotFinished) as told:
        life.wait(places, "kxxxfull", timeout_s=1.0, on_moment=lambda moment: said.append(moment.unwritten))

    due = f"the disk of {places.db} is full (4.0 KiB left), so nothing new of live runs is written, for 5 min"
    assert due in str(told.value)
    assert f"make room there (df {places.db.parent})" in str(told.value)
    assert any(text is not None and text.startswith(due) for text in said)
    assert len(said) < 4  # news, not a drum
    monkeypatch.setattr("orchestrator.actions.followed.shutil.disk_usage", lambda _: room._replace(free=2**30))
    with pytest.raises(NotFinished) as told:
        life.wait(places, "kxxxfull", timeout_s=0.1)
    assert "disk" not in str(told.value)


@pytest.mark.slow  # it is longer than one question is patient for
def test_a_wait_beside_a_locked_database_lasts_as_long_as_was_asked(places: Places) -> None:
    timeout_s = 2.5 * life.PATIENCE_S
    began_s = time.monotonic()

    with locked(places.db, "EXCLUSIVE"), pytest.raises(NotFinished, match=f"after {timeout_s:g} s: .* is locked;"):
        life.wait(places, RUN, timeout_s=timeout_s)

    assert timeout_s <= time.monotonic() - began_s < timeout_s + 20.0


@pytest.mark.slow
def test_a_lock_that_comes_while_one_waits_moves_no_deadline(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    held = contextlib.ExitStack()
    with locked(places.db, "EXCLUSIVE"):
        pass  # no write-ahead log from now on; somebody who reads would keep it

    def lock(_: Places) -> None:
        held.enter_context(locked(places.db, "EXCLUSIVE"))

    monkeypatch.setattr(life, "ensure_follower", lock)  # asked for once, after the first look
    began_s = time.monotonic()

    with held, pytest.raises(NotFinished, match="is locked;"):
        life.wait(places, RUN, timeout_s=0.4)

    assert 0.4 <= time.monotonic() - began_s < 20.0


@pytest.mark.parametrize(
    ("asks", "is_silent", "told"),
    [
        (True, True, "was pending when host local was last reached, and the host is unreachable after 0 s; the wish"),
        (True, False, "is pending after 0 s; the wish to stop it stays, and is carried out when the host answers"),
        (False, True, f"is unreachable after 0 s; it may well go on; gone for good: draftyard mark {RUN} lost WHY$"),
        (False, False, "is pending after 0 s; it goes on$"),
    ],
)
def test_giving_up_says_what_is_known_and_what_becomes_of_a_wish(
    places: Places, asks: bool, is_silent: bool, told: str
) -> None:
    with Store(places.db) as store:
        store.new_attempt(RUN)
        if asks:
            store.ask(RUN, "stop")
        if is_silent:
            store.host_unreachable("local", error="no answer")

    with pytest.raises(NotFinished, match=told):
        life.wait(places, RUN, timeout_s=0.0)


def test_giving_up_on_a_stop_says_what_keeps_it(places: Places) -> None:
    with Store(places.db) as store:
        store.new_attempt(RUN)
        store.ask(RUN, "stop")
        store.set_state(RUN, State.STOPPING, evidence="asked to stop, but its disk is full")

    with pytest.raises(NotFinished, match="the wish to stop it stays; asked to stop, but its disk is full"):
        life.wait(places, RUN, timeout_s=0.0)


@pytest.mark.parametrize(
    ("silent", "told"),
    [
        (["b"], "was pending when host b was last reached, and the host is unreachable after"),
        (["c", "b"], "was pending when hosts b, c were last reached, and the hosts are unreachable after"),
    ],
)
def test_giving_up_names_those_of_several_hosts_that_are_silent(places: Places, silent: list[str], told: str) -> None:
    with Store(places.db) as store:
        store.create_run(new_run("20260101-120000-bbbb", host="a", more_hosts=("b", "c")))
        store.place_nodes("20260101-120000-bbbb", ["/a", "/b", "/c"])
        store.new_attempt("20260101-120000-bbbb")
        for host in silent:
            store.host_unreachable(host, error="no answer")

    with pytest.raises(NotFinished, match=told):
        life.wait(places, "20260101-120000-bbbb", timeout_s=0.0)


@pytest.mark.slow
def test_a_lock_that_begins_at_the_deadline_changes_no_answer(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    held, look = contextlib.ExitStack(), life._until_its_end

    def last_look(*words: Any) -> RunRow:
        run = look(*words)
        words[1].close()  # what reads would keep the write-ahead log
        held.enter_context(locked(places.db, "EXCLUSIVE"))
        return run

    monkeypatch.setattr(life, "_until_its_end", last_look)
    began_s = time.monotonic()

    with held, pytest.raises(NotFinished, match="is pending after 0 s; it goes on"):
        life.wait(places, RUN, timeout_s=0.0)

    assert time.monotonic() - began_s < 20.0


def test_what_a_verb_did_before_it_waits_is_part_of_its_time(places: Places) -> None:
    with pytest.raises(NotFinished, match=f"run {RUN} is pending after 60 s"):
        life.wait(places, RUN, timeout_s=60.0, since_s=time.monotonic() - 61.0)
