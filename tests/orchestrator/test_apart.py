"""What a job starts with draftyard itself is a run of its own, and one database has one follower by any name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import cli
from orchestrator.actions import followed, life
from orchestrator.actions.places import find_places
from orchestrator.errors import StoreError
from orchestrator.follow import lease
from orchestrator.launch import SPAWN_SUPERVISOR
from orchestrator.store.writes import Store
from remote import processes
from remote.processes import ATTEMPT_MARK, RUN_DIR_MARK, RUN_MARK
from tests.orchestrator.runs import RUN, new_run


def test_a_supervisor_and_a_follower_started_by_a_job_do_not_carry_its_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = (RUN_MARK, RUN_DIR_MARK, ATTEMPT_MARK)
    for mark in marks:
        monkeypatch.setenv(mark, "outer")
    log = tmp_path / "log"

    subprocess.run(
        ["sh", "-c", SPAWN_SUPERVISOR, "sh", str(log), "env"], check=True, env={**os.environ, "PATH": "/usr/bin:/bin"}
    )

    assert {f"{mark}=" for mark in marks} <= set(log.read_text().splitlines())
    assert [lease.environment()[mark] for mark in marks] == ["", "", ""]


@pytest.mark.parametrize(("state", "is_stopped"), [("T", True), ("t", False), ("S", False)])
def test_one_that_a_tracer_looks_at_is_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, *, is_stopped: bool
) -> None:
    own = processes.read_stat(os.getpid())
    assert own is not None
    monkeypatch.setattr(lease, "holder_pid", lambda db: own.group)
    ended: list[int] = []
    for module in (lease, processes):
        monkeypatch.setattr(module, "read_stat", lambda pid: replace(own, state=state))
    monkeypatch.setattr(processes, "send", lambda pid, *_: ended.append(pid))
    (tmp_path / "attempts" / "1").mkdir(parents=True)
    claim = f"supervisor {os.getpid()} {own.start_ticks} {processes.boot_id()}\n"
    (tmp_path / "attempts" / "1" / "claim").write_text(claim)

    processes._kill_stopped_supervisors(tmp_path, "1")

    assert bool(ended) is is_stopped
    assert (lease.stopped_pid(tmp_path / "runs.db") is not None) is is_stopped


def test_a_follower_that_is_stopped_is_said_with_what_wakes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It holds the lease, so none can be started, and carries out nothing."""
    places = find_places(tmp_path, {}, db=tmp_path / "runs.db")
    holder = (
        "import fcntl, os, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, 2);"
        "file.write(f'{os.getpid()} 99'); file.flush(); print(flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", holder]
    with subprocess.Popen([*command, str(lease.lock_file(places.db))], stdout=subprocess.PIPE) as follower:
        assert follower.stdout is not None
        follower.stdout.readline()
        life.ensure_follower(places)
        follower.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, follower.pid, os.WSTOPPED)

        with pytest.raises(StoreError, match=rf"process {follower.pid}\b.* is stopped.*kill -CONT {follower.pid}"):
            life.ensure_follower(places)
        with pytest.raises(SystemExit) as ended:
            cli.main(["--db", str(places.db), "follow"])
        assert ended.value.code == 1
        assert f"kill -CONT {follower.pid}" in capsys.readouterr().err
        assert not followed.is_followed(places)
        with Store(places.db) as store:
            store.create_run(new_run())
            runs = [store.reader.run(RUN)]
        assert followed.unfollowed_s(places, runs, now_s=runs[0].created_s + 1000) == pytest.approx(1000)
        follower.kill()


def test_a_database_reached_by_a_link_has_the_one_follower(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link.db").symlink_to(tmp_path / "real" / "runs.db")
    (tmp_path / "folder").symlink_to(tmp_path / "real")

    with lease.lease(tmp_path / "real" / "runs.db") as is_ours:
        assert is_ours
        assert lease.is_followed(tmp_path / "link.db")
        assert lease.is_followed(tmp_path / "folder" / "runs.db")


def test_a_database_behind_a_circle_of_links_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, target in (("a.db", "b.db"), ("b.db", "a.db")):
        (tmp_path / name).symlink_to(target)

    with pytest.raises(SystemExit) as ended:
        cli.main(["--db", str(tmp_path / "a.db"), "follow"])

    assert ended.value.code == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("following")]
    assert line.startswith(f"error: {tmp_path / 'a.db'} cannot be used (Too many levels of symbolic links")
