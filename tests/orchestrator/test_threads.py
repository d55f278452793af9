"""The follower's threads: what ends one, and when another may begin."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import DraftyardError, HostError, StoreError
from orchestrator.follow.desk import Desk
from orchestrator.follow.ending import _wants_retry
from orchestrator.follow.one_run import LATE_S, look
from orchestrator.follow.status import GONE_S
from orchestrator.follow.threads import HostThread, Worker
from orchestrator.shell import Completed
from orchestrator.shell.local import LocalShell
from orchestrator.shell.stream import Ended, Sink, Source
from orchestrator.store.rows import Document, Reason, State
from orchestrator.store.writes import Store
from remote.coherence import RETRIED
from tests.orchestrator.runs import batch, event, life, new_run


class Broken(Worker):
    def __init__(self, error: Exception | None) -> None:
        super().__init__(name="broken")
        self._error = error

    def work(self) -> None:
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (StoreError("the disk is full"), "broken: the disk is full\n"),
        (OSError(11, "no process to be had"), "broken: [Errno 11] no process to be had\n"),
        (TypeError("a fault of this program"), "TypeError: a fault of this program"),
    ],
)
def test_whatever_ends_a_thread_is_said_and_the_next_one_waits(
    error: Exception, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that nobody foresaw too: begun anew five times a second, it would fill the follower's log."""
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # as in the follower: a traceback on stderr
    monkeypatch.setattr("orchestrator.follow.threads.AFTER_FAULT_S", 60.0)
    thread = Broken(error)

    thread.start()
    thread.join()

    assert thread.is_wanted
    assert said in capsys.readouterr().err
    monkeypatch.setattr("orchestrator.follow.threads.AFTER_FAULT_S", 0.0)
    assert not thread.is_wanted


def test_a_thread_that_has_done_its_work_leaves_room_at_once() -> None:
    thread = Broken(None)

    thread.start()
    thread.join()

    assert not thread.is_wanted


class Looking(LocalShell):
    """Keeps who has been looked at through it, and whether it is open."""

    def __init__(self, kept: Path | None) -> None:
        super().__init__()
        self.kept = str(kept)
        self.looked_at: list[str] = []
        self.is_open = True

    def run(self, argv: list[str], *, stdin: bytes = b"", timeout_s: float = 60.0) -> Completed:
        self.looked_at += [run for run in ("first", "second") if any(f"runs/{run}" in word for word in argv)]
        return super().run(argv, stdin=stdin, timeout_s=timeout_s)

    def close(self) -> None:
        self.is_open = False
        super().close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first_ends", "file", "opened"),
    [
        (True, "/b/hosts.yaml", ["/a/hosts.yaml", "/b/hosts.yaml"]),
        (True, "/a/hosts.yaml", ["/a/hosts.yaml", "/a/hosts.yaml"]),  # which may have been edited since
        (False, "/a/hosts.yaml", ["/a/hosts.yaml"]),
    ],
)
def test_a_connection_is_to_where_the_runs_that_live_were_launched(
    first_ends: bool, file: str, opened: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One name may be another machine from one look to the next: with a run of it still alive that is refused, else not."""
    for name in ("YOUNG_S", "QUIET_S"):
        monkeypatch.setattr(f"orchestrator.follow.threads.{name}", 600.0)  # a new run alone is a reason to look
    ending, shells = threading.Event(), list[Looking]()

    def connect(name: str, kept: Path | None) -> Looking:
        shells.append(Looking(kept))
        return shells[-1]

    with Store(tmp_path / "runs.db") as store:
        thread = HostThread(store.path, "gpu", connect, ending)
        _begin(store, "first", "/a/hosts.yaml")
        thread.start()
        _until(lambda: any("first" in shell.looked_at for shell in shells))
        if first_ends:
            store.mark("first", State.LOST, why="as a look would have said it")
        _begin(store, "second", file)
        _until(lambda: any("second" in shell.looked_at for shell in shells))
        ending.set()
        thread.join()

    assert [shell.kept for shell in shells] == opened
    assert [shell.kept for shell in shells if "second" in shell.looked_at] == [file]
    assert not any(shell.is_open for shell in shells)


def _begin(store: Store, run_id: str, file: str) -> None:
    documents = {**life(), Document.HOSTS_FILE: file}
    store.create_run(new_run(run_id, host="gpu", workdir=str(store.path.parent), documents=documents))
    store.new_attempt(run_id)
    store.set_up(run_id, 1)


def _until(is_so: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + 60.0
    while not is_so():
        assert time.monotonic() < ends_s
        time.sleep(0.01)


class Idle(LocalShell):
    """A machine whose supervisor lives and does nothing; what is asked of it is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[str] = []
        self.uptime_s = 0.0
        self.is_cut = False
        self.is_full = False
        self.is_away = False

    def run(self, argv: list[str], *, stdin: bytes = b"", timeout_s: float = 60.0) -> Completed:
        if self.is_cut and "stop.json" in argv[2]:
            raise HostError("the line was cut")
        if self.is_full and "stop.json" in argv[2]:
            return Completed(1, b"", b"printf: I/O error")
        if "rec files" in argv[2]:
            stat = b"7 (python) T " + b"0 " * 18 + b"99 0"
            records = [
                b"host\nb\n%.1f 1.0\n1.0\n" % self.uptime_s,
                b"attempt\n1\n",
                b"claim\nsupervisor 7 99 b\n",
                b"stat supervisor\n" + stat,
            ]
            if self.is_away:
                records = [records[0], b"marked\n"]
            return Completed(0, b"\x1e" + b"\x1e".join(records) + b"\x1e", b"")
        return super().run(argv, stdin=stdin, timeout_s=timeout_s)

    def stream(self, argv: list[str], *, source: Source, sink: Sink, timeout_s: float, idle: bool = False) -> Ended:
        if argv[-1] != "idle/1":
            return super().stream(argv, source=source, sink=sink, timeout_s=timeout_s, idle=idle)
        self.ended.append(argv[-1])
        sink(b'{"stubborn": []}')
        return Ended(0, b"")


def _asked_to_stop(folder: Path, **more: Any) -> Desk:
    store = Store(folder / "runs.db")
    store.create_run(new_run("idle", workdir=str(folder)))
    store.new_attempt("idle")
    store.ask("idle", "stop", grace_s=5)
    return Desk(store, store.reader, time.time, **more)


def test_a_supervisor_that_does_not_act_within_the_grace_is_ended_by_the_follower(tmp_path: Path) -> None:
    desk, shell = _asked_to_stop(tmp_path), Idle()
    told = []

    for shell.uptime_s in (1.0, 2.0, 7.0 + LATE_S, 8.0 + LATE_S):
        look(desk, shell, desk.reader.run("idle"))
        told.append(len(shell.ended))

    assert told == [0, 0, 0, 1]


def test_no_time_counts_in_which_a_supervisor_could_not_know_that_it_should_stop(tmp_path: Path) -> None:
    """A line cut at the wish and away for an hour; then a host that is paused for another."""
    now_s = [0.0]
    desk, shell = _asked_to_stop(tmp_path, monotonic=lambda: now_s[0]), Idle()
    shell.uptime_s, shell.is_cut = 1.0, True
    with pytest.raises(HostError):
        look(desk, shell, desk.reader.run("idle"))
    shell.is_cut = False

    for now_s[0], shell.uptime_s in ((3600.0, 3601.0), (3601.0, 3602.0), (7200.0, 3603.0)):
        look(desk, shell, desk.reader.run("idle"))

    assert shell.ended == []
    assert (tmp_path / "runs" / "idle" / "attempts" / "1" / "stop.json").is_file()


def test_a_job_whose_folder_is_away_for_a_moment_is_stopped_by_its_supervisor(tmp_path: Path) -> None:
    now_s = [0.0]
    desk, shell = _asked_to_stop(tmp_path, monotonic=lambda: now_s[0]), Idle()
    wish = tmp_path / "runs" / "idle" / "attempts" / "1" / "stop.json"
    told = []

    for now_s[0], shell.is_away in ((1.0, True), (GONE_S, True), (61.0, False), (62.0, True), (63.0 + GONE_S, True)):
        look(desk, shell, desk.reader.run("idle"))
        told.append((wish.is_file(), len(shell.ended)))

    assert told == [(False, 0), (False, 0), (True, 0), (True, 0), (True, 1)]


def test_a_wish_that_cannot_be_written_is_told_and_the_follower_ends_the_job_itself(tmp_path: Path) -> None:
    """A full disk, often why somebody stops a run; what the looks bring in and judge does not wait for room there."""
    desk, shell = _asked_to_stop(tmp_path), Idle()
    shell.is_full = True
    told = []

    for shell.uptime_s in (1.0, 2.0, 7.0 + LATE_S, 8.0 + LATE_S):
        look(desk, shell, desk.reader.run("idle"))
        told.append(len(shell.ended))

    run, said = desk.reader.run("idle"), desk.reader.events("idle", kinds=["state"])
    assert told == [0, 0, 0, 1]
    assert run.state is State.STOPPING
    assert "host local does not take the wish" in run.evidence
    assert "printf: I/O error" in run.evidence
    assert sum("does not take" in row.text for row in said) == 1  # however often it is tried


def test_a_wish_that_finds_room_later_leaves_the_supervisor_its_whole_time(tmp_path: Path) -> None:
    desk, shell = _asked_to_stop(tmp_path), Idle()
    shell.is_full = True
    told = []

    for shell.uptime_s, shell.is_full in (
        (1.0, True),
        (LATE_S, False),
        (9.0 + LATE_S, False),
        (15.0 + 2 * LATE_S, False),
    ):
        look(desk, shell, desk.reader.run("idle"))
        told.append((desk.reader.run("idle").evidence == "asked to stop, 5 s of grace", len(shell.ended)))

    assert told == [(False, 0), (True, 0), (True, 0), (True, 1)]


def test_a_folder_that_takes_no_wish_keeps_no_run_from_its_end(tmp_path: Path) -> None:
    """Something else stands in the place of the attempt's folder, and no process of it lives."""
    desk = _asked_to_stop(tmp_path)
    (tmp_path / "runs" / "idle" / "attempts").mkdir(parents=True)
    (tmp_path / "runs" / "idle" / "attempts" / "1").touch()
    desk.store.ingest(batch([event(1, "start")], run_id="idle"))

    look(desk, LocalShell(), desk.reader.run("idle"))

    assert desk.reader.run("idle").state is State.STOPPED


class Blind(LocalShell):
    """A machine on which the folder of a run can be written into, and not looked at."""

    def run(self, argv: list[str], *, stdin: bytes = b"", timeout_s: float = 60.0) -> Completed:
        if "rec files" in argv[2]:
            return Completed(1, b"", b"cd: no way in")
        return super().run(argv, stdin=stdin, timeout_s=timeout_s)


def test_a_run_whose_folder_cannot_be_looked_at_is_stopped_all_the_same(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs.db")
    store.create_run(new_run("closed", workdir=str(tmp_path)))
    store.new_attempt("closed")
    attempt = tmp_path / "runs" / "closed" / "attempts" / "1"
    attempt.mkdir(parents=True)
    store.ask("closed", "stop", grace_s=5)

    with pytest.raises(DraftyardError, match="cannot look at"):
        look(Desk(store, store.reader, time.time), Blind(), store.reader.run("closed"))

    assert (attempt / "stop.json").read_bytes() == b'{"grace_s": 5.0}\n'
    assert store.reader.run("closed").state is State.STOPPING


def test_a_retry_is_wished_for_each_reason_that_a_recipe_may_name(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs.db")
    store.create_run(new_run("again", workdir=str(tmp_path), documents=life(retries=1, retry_on=list(RETRIED))))
    store.new_attempt("again")
    desk, run = Desk(store, store.reader, time.time), store.reader.run("again")
    never = {Reason.STALLED, Reason.UNREACHABLE, Reason.MAX_DURATION, Reason.USER}

    wished = {reason for reason in Reason if _wants_retry(desk, run, State.FAILED, reason)}

    assert wished == set(Reason) - never
    assert _wants_retry(desk, run, State.LOST, Reason.REBOOT)
    assert not _wants_retry(desk, run, State.LOST, None)
    assert not _wants_retry(desk, run, State.STOPPED, "signal:15")
