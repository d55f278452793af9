"""Finding and ending our own processes, and nobody else's."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from remote import processes
from remote.processes import Identity, kill_run, marked, protected, read_stat, send
from tests.remote.jobs import has_begun

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def run_id() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex}"
    yield name
    kill_run(name, None)


def sleeper(run_id: str | None, *, attempt: str = "1", name: str = "sleep 99") -> subprocess.Popen[bytes]:
    environment = {**os.environ, **({processes.RUN_MARK: run_id, processes.ATTEMPT_MARK: attempt} if run_id else {})}
    process = subprocess.Popen(["sh", "-c", f"exec {name}"], env=environment, start_new_session=True)
    has_begun(process)
    return process


def test_a_process_is_found_by_its_marker_with_age_memory_and_command(run_id: str) -> None:
    with sleeper(run_id) as process:
        (found,) = marked({run_id})

        assert (found.pid, found.run_id, found.attempt) == (process.pid, run_id, "1")
        assert found.command in ("sleep 99", "sh -c exec sleep 99")
        assert 0 <= found.age_s < 3600
        assert found.rss_bytes > 0
        process.kill()


@pytest.mark.slow
def test_an_age_is_of_the_machines_clock_where_a_container_shows_its_own_uptime(tmp_path: Path) -> None:
    """lxcfs mounts an uptime that began with the container over /proc/uptime; start ticks stay the machine's."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("mounting over /proc/uptime in a namespace of one's own needs root and unshare")
    (tmp_path / "uptime").write_text("0.01 0.01\n")
    look = "import os; from remote import probe, processes; from pathlib import Path; pid = int(os.sys.argv[1])\n"
    look += "print(processes.age_s(pid), probe._age_s(Path(f'/proc/{pid}')))"
    inside = f'mount --bind "$1" /proc/uptime && exec {sys.executable} -c "{look}" "$2"'
    with subprocess.Popen(["sleep", "60"]) as process:
        began = processes.read_stat(process.pid)
        while began and time.clock_gettime(time.CLOCK_BOOTTIME) < began.start_ticks / os.sysconf("SC_CLK_TCK") + 0.2:
            time.sleep(0.01)
        command = ["unshare", "-m", "sh", "-c", inside, "sh", str(tmp_path / "uptime"), str(process.pid)]
        told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        process.kill()

    ages = [float(word) for word in told.stdout.split()]
    assert len(ages) == 2, told.stderr
    assert min(ages) >= 0.2


def test_an_attempt_is_told_from_the_next_one_and_a_run_from_its_neighbour(run_id: str) -> None:
    with (
        sleeper(run_id) as first,
        sleeper(run_id, attempt="2") as second,
        sleeper(run_id + "x") as other,
        sleeper(None) as foreign,
    ):
        assert [process.pid for process in marked({run_id}, "1")] == [first.pid]
        assert kill_run(run_id, "1") == (1, [])
        assert first.wait(60) == -signal.SIGKILL
        assert [second.poll(), other.poll(), foreign.poll()] == [None, None, None]
        for process in (second, other, foreign):
            process.kill()


def test_the_name_of_a_program_is_never_enough(run_id: str) -> None:
    """A command line that mentions the run is somebody's editor, not the run."""
    with subprocess.Popen([sys.executable, "-c", f"import time; '{run_id}'; time.sleep(99)"]) as editor:
        assert kill_run(run_id, None) == (0, [])
        assert editor.poll() is None
        editor.kill()


@pytest.mark.slow
def test_init_ourselves_and_our_ancestors_are_out_of_reach(monkeypatch: pytest.MonkeyPatch, run_id: str) -> None:
    spared = protected()

    assert {0, 1, os.getpid(), os.getppid()} <= spared
    for pid in (1, os.getpid(), os.getppid()):
        found = read_stat(pid)
        assert found is not None
        assert not send(pid, found.start_ticks, signal.SIGKILL)
    # A marked child asks for the end of its whole run, whose oldest process is its own parent.
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from remote.processes import *; print(kill_run({run_id!r}, None))"
    parent = f"import subprocess, sys; print(subprocess.run([sys.executable, '-c', {code!r}], capture_output=True, text=True).stdout)"
    done = subprocess.run(
        [sys.executable, "-c", parent],
        env={**os.environ, processes.RUN_MARK: run_id},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "(0, [])"


def test_a_pid_that_changed_hands_is_not_signalled(run_id: str) -> None:
    with sleeper(run_id) as process:
        found = read_stat(process.pid)
        assert found is not None

        assert not send(process.pid, found.start_ticks - 1, signal.SIGKILL)
        assert process.poll() is None
        assert send(process.pid, found.start_ticks, signal.SIGKILL)


def test_a_zombie_is_dead(run_id: str) -> None:
    process = sleeper(run_id)
    identity = Identity.of(process.pid)
    assert identity is not None
    assert identity.is_alive

    process.kill()
    while (found := read_stat(process.pid)) and found.state != "Z":
        time.sleep(0.01)

    assert not identity.is_alive
    assert marked({run_id}) == []
    process.wait()


def test_a_name_with_blanks_and_brackets_does_not_shift_the_fields(tmp_path: Path) -> None:
    program = tmp_path / "a) R 1 (b"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "99"]) as process:
        while b") R" not in Path(f"/proc/{process.pid}/stat").read_bytes():
            time.sleep(0.01)
        found = read_stat(process.pid)

        assert found is not None
        assert (found.parent, found.state in "SRD") == (os.getpid(), True)
        process.kill()


@pytest.mark.slow
def test_processes_that_keep_forking_are_all_caught(run_id: str) -> None:
    script = "while :; do sleep 0.02 & done"
    environment = {**os.environ, processes.RUN_MARK: run_id, processes.ATTEMPT_MARK: "1"}
    with subprocess.Popen(["sh", "-c", script], env=environment, start_new_session=True) as process:
        time.sleep(0.3)

        killed, stubborn = kill_run(run_id, None)

        assert killed >= 1
        assert stubborn == []
        process.wait(60)
    assert marked({run_id}) == []


def test_one_attempt_is_ended_and_the_one_that_began_meanwhile_is_not(
    run_id: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with sleeper(run_id) as first, sleeper(run_id, attempt="2") as second:
        assert processes.main(["end", str(tmp_path), f"{run_id}/1"]) == 0

        assert [found["pid"] for found in json.loads(capsys.readouterr().out)["processes"]] == [first.pid]
        assert first.wait(60) == -signal.SIGKILL
        assert second.poll() is None
        second.kill()


@pytest.mark.slow
def test_as_one_text_it_lists_and_ends(run_id: str, tmp_path: Path) -> None:
    text = (ROOT / "remote" / "processes.py").read_text()
    with sleeper(run_id) as process:
        listed = json.loads(
            subprocess.run(
                [sys.executable, "-I", "-S", "-", "list", str(tmp_path), run_id],
                input=text,
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        ended = json.loads(
            subprocess.run(
                [sys.executable, "-I", "-S", "-", "end", str(tmp_path), run_id],
                input=text,
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )

        assert [found["pid"] for found in listed["processes"]] == [process.pid]
        assert ended["stubborn"] == []
        assert process.wait(60) == -signal.SIGKILL


def test_a_run_of_the_same_name_in_another_work_folder_is_left_alone(
    run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two databases may give one id; the folder of a run tells them apart, by whatever link it is named."""
    (tmp_path / "q").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "q")
    sleepers = []
    for work_dir in ("p", "q"):
        monkeypatch.setenv(processes.RUN_DIR_MARK, str(tmp_path / work_dir / "runs" / run_id))
        sleepers.append(sleeper(run_id))
    with sleepers[0] as other, sleepers[1] as own:
        assert processes.main(["list", str(tmp_path / "link")]) == 0
        listed = [item["pid"] for item in json.loads(capsys.readouterr().out)["processes"]]
        assert processes.main(["end", str(tmp_path / "link"), run_id]) == 0

        assert own.pid in listed
        assert other.pid not in listed
        assert own.wait(60) == -signal.SIGKILL
        assert other.poll() is None
        found = {item.pid for item in processes.of_attempt(run_id, "1", str(tmp_path / "p" / "runs"))}
        assert found & {own.pid, other.pid} == {
            other.pid
        }  # beside them, what else descends from the process of the tests
        other.kill()


# Without a marker ------------------------------------------------------------------------------------


def _bare(output: Path, mode: str) -> subprocess.Popen[bytes]:
    """A process in a session of its own with an empty environment, that has `output` open."""
    with output.open(mode) as stream:
        return subprocess.Popen(["/bin/sleep", "99"], env={}, stdin=stream, start_new_session=True)


def test_an_orphan_without_environment_is_known_by_the_log_it_writes(tmp_path: Path, run_id: str) -> None:
    """A reader of the same log, who may be a person, and a writer of another file are left alone."""
    folder = tmp_path / "runs" / run_id / "attempts" / "2"
    folder.mkdir(parents=True)
    for name in ("stdout.log", "mine.txt"):
        (folder / name).touch()
    with (
        _bare(folder / "stdout.log", "ab") as orphan,
        _bare(folder / "stdout.log", "rb") as reader,
        _bare(folder / "mine.txt", "ab") as other,
    ):
        (found,) = processes.writers(str(tmp_path))

        assert (found.pid, found.run_id, found.attempt) == (orphan.pid, run_id, "2")
        assert kill_run(run_id, "1", work_dir=str(tmp_path)) == (0, [])
        assert kill_run(run_id, "2", work_dir=str(tmp_path)) == (1, [])
        assert orphan.wait(60) == -signal.SIGKILL
        assert (reader.poll(), other.poll()) == (None, None)
        for process in (reader, other):
            process.kill()


def test_a_supervisor_that_is_stopped_is_ended_with_its_run_and_one_that_works_is_not(
    tmp_path: Path, run_id: str
) -> None:
    with sleeper(None) as stopped, sleeper(None) as working, sleeper(run_id) as job:
        for number, process in (("1", stopped), ("2", working)):
            identity = Identity.of(process.pid)
            assert identity is not None
            folder = tmp_path / "runs" / run_id / "attempts" / number
            folder.mkdir(parents=True)
            (folder / "claim").write_text(f"supervisor {identity.pid} {identity.start_ticks} {identity.boot_id}\n")
        stopped.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)

        assert processes.main(["end", str(tmp_path), run_id]) == 0

        assert stopped.wait(60) == job.wait(60) == -signal.SIGKILL
        assert working.poll() is None
        working.kill()


@pytest.mark.slow
def test_what_descends_from_a_supervisor_in_another_session_is_its_jobs(run_id: str) -> None:
    code = f"""
import json, os, subprocess, sys
sys.path.insert(0, {str(ROOT)!r})
from remote.processes import kill_all, offspring
own = subprocess.Popen(["sleep", "99"])
job = subprocess.Popen(["sh", "-c", "sleep 99 & exec sleep 99"], env={{"PATH": os.environ["PATH"]}}, start_new_session=True)
while [item.command for item in offspring({run_id!r}, '1')] != ["sleep 99"] * 2:
    pass
killed = kill_all(lambda: offspring({run_id!r}, '1'), reap=True)
print(json.dumps([killed, own.poll()]))
own.kill()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert json.loads(done.stdout) == [[2, []], None]


def test_what_a_job_launches_as_a_run_of_its_own_does_not_end_with_it(run_id: str) -> None:
    """Its supervisor carries an empty marker, its job another run's; both descend from ours."""
    code = f"""
import json, os, subprocess, sys
sys.path.insert(0, {str(ROOT)!r})
from remote.processes import RUN_MARK, kill_all, offspring
def start(command, mark):
    return subprocess.Popen(["sh", "-c", command], env={{**os.environ, RUN_MARK: mark}}, start_new_session=True)
job = start("exec sleep 99", {run_id!r})
inner = start("env -u DRAFTYARD_RUN_ID sleep 98 & echo; exec sleep 99", "")
other = start("exec sleep 99", "inner")
while not [item for item in offspring({run_id!r}, '1') if item.command == "sleep 99"]:
    pass
killed = kill_all(lambda: offspring({run_id!r}, '1'))
print(json.dumps([killed, job.wait(), inner.poll(), other.poll()]))
os.killpg(inner.pid, 9), other.kill()
"""
    environment = {name: value for name, value in os.environ.items() if name != processes.RUN_MARK}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=environment
    )

    assert json.loads(done.stdout.strip().splitlines()[-1]) == [[1, []], -9, None, None]
