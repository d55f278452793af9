"""Real supervisors, real jobs, real signals: each ending leaves the evidence that tells it from the others."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from remote.claim import Claim
from remote.environment import cannot_start, job_environment
from remote.job import Job, read_job
from remote.limits import allocation_limit
from remote.processes import Identity, kill_run, marked
from remote.report import Reporter
from remote.rundir import AttemptDir, RunDir, read_json, write_json
from remote.sampler import GpuSampler
from remote.supervise import LEFTOVER_GRACE_S, Supervisor
from remote.wire import Event, decode

pytestmark = pytest.mark.slow  # real supervisors, real waits

ROOT = Path(__file__).parent.parent.parent
MIB = 1024**2


@dataclass
class Yard:
    """A work folder and the supervisors started in it."""

    root: Path
    started: list[subprocess.Popen[bytes]]
    # Folders of another process' tests may have the same name, and a run's processes are known by its id.
    mark: str = field(default_factory=lambda: uuid.uuid4().hex[:10])

    def run(self, name: str = "r1") -> RunDir:
        return RunDir(self.root / "runs" / f"{self.mark}-{name}")

    def place(self, script: str, name: str = "r1", *, env: dict[str, str] | None = None, **settings: Any) -> RunDir:
        run, spec = self.run(name), settings.pop("spec", {"a": 1})
        job = {"run_id": run.root.name, "kind": "script", "attempt": 1, "argv": [sys.executable, "-c", script]}
        request = {"attempt": 1, "spec": spec, "env": env or {}, "job": {**job, "cwd": str(ROOT), **settings}}
        done = self.call(run, "--place", stdin=json.dumps(request))
        assert done.returncode == 0, done.stderr
        return run

    def call(self, run: RunDir, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "remote.supervise", str(run.root), *words]
        return subprocess.run(command, cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=180, check=False)

    def start(self, run: RunDir, attempt: int = 1, **environment: str) -> AttemptDir:
        command = [sys.executable, "-m", "remote.supervise", str(run.root), "--attempt", str(attempt)]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.started.append(process)
        folder = run.attempt(attempt)
        wait_for(lambda: folder.supervisor_json.exists() or process.poll() is not None)
        return folder

    def end(self, attempt: AttemptDir) -> dict[str, Any]:
        self.started[-1].wait(180)
        body = read_json(attempt.exit_json)
        assert body is not None
        return body

    def complete(self, script: str, **settings: Any) -> tuple[AttemptDir, dict[str, Any]]:
        attempt = self.start(self.place(script, **settings))
        return attempt, self.end(attempt)


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    made = Yard(tmp_path / 'it\'s a "work" dir', [])
    yield made
    for process in made.started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
    for run in (made.root / "runs").glob("*"):
        kill_run(run.name, None)


def wait_for(condition: Any, seconds: float = 120.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not happen in time"
        time.sleep(0.02)


def until(path: Path) -> str:
    """A job that ends when this file is there."""
    return f"import os, time\nwhile not os.path.exists({str(path)!r}): time.sleep(0.05)"


def events(attempt: AttemptDir, writer: str = "supervisor") -> list[Event]:
    return [decode(line) for line in attempt.events(writer).read_bytes().splitlines()]


# Endings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, 3, 137, 255])
def test_an_exit_code_is_kept(yard: Yard, code: int) -> None:
    _, ending = yard.complete(f"raise SystemExit({code})")

    assert (ending["exit_code"], ending["signal"], ending["reason"]) == (code, None, None)
    assert ending["killed"] == 0
    assert 0 <= ending["duration_s"] < 30


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_job_ended_by_a_signal_that_nobody_wished_has_the_signal_and_no_reason(yard: Yard, number: int) -> None:
    _, ending = yard.complete(
        f"import os, resource; resource.setrlimit(4, (0, 0)); os.kill(os.getpid(), {int(number)})"
    )

    assert (ending["exit_code"], ending["signal"], ending["reason"]) == (None, number, None)


def test_a_job_without_a_gpu_is_refused_memory_past_its_limit_and_the_exit_file_says_peak_and_limit(yard: Yard) -> None:
    """A script that knows nothing of limits, and a process that it starts."""
    script = (
        "import subprocess, sys\n"
        "child = 'held = bytearray(200 * 2**20); print(len(held), flush=True); bytearray(2**30)'\n"
        "print(subprocess.run([sys.executable, '-c', child]).returncode, flush=True)\n"
        "bytearray(2**30)"
    )
    attempt, ending = yard.complete(script, memory_limit_bytes=512 * MIB)

    assert ending["exit_code"] == 1
    assert attempt.stdout_log.read_text().split() == [str(200 * MIB), "1"]
    assert attempt.stderr_log.read_text().count("MemoryError") == 2
    assert ending["memory_limit_bytes"] == 512 * MIB
    assert 200 * MIB < ending["peak_bytes"] < 300 * MIB


def test_a_job_with_a_gpu_gets_no_limit_on_what_it_allocates(tmp_path: Path) -> None:
    job = Job("r", "script", 1, [], ".", memory_limit_bytes=7)
    node = tmp_path / "nvidiactl"

    assert allocation_limit(job, nodes=(str(node),)) == 7
    assert allocation_limit(replace(job, gpus=["0"]), nodes=(str(node),)) is None
    node.touch()
    assert allocation_limit(job, nodes=(str(node),)) is None


def test_a_job_that_cannot_be_started_is_told_from_one_that_failed(yard: Yard) -> None:
    attempt = yard.start(yard.place("", argv=["/no/such/python", "x"]))
    ending = yard.end(attempt)

    assert (ending["exit_code"], ending["reason"]) == (None, "start_failed")
    assert "/no/such/python: No such file or directory" in ending["message"]


def test_a_wish_to_stop_ends_politely_within_the_grace(yard: Yard) -> None:
    script = (
        "import signal, sys, time\n"
        "def end(*_):\n    time.sleep(0.5); print('saved', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); print('up', flush=True); time.sleep(60)"
    )
    attempt = yard.start(yard.place(script, grace_s=30))
    wait_for(lambda: attempt.stdout_log.read_bytes() == b"up\n")

    write_json(attempt.stop_json, {"grace_s": 20})
    ending = yard.end(attempt)

    assert attempt.stdout_log.read_bytes() == b"up\nsaved\n"
    assert (ending["exit_code"], ending["reason"], ending["killed"]) == (0, "user", 0)
    assert any(
        "polite signal sent, the rest is killed in 20 s" in event.fields.get("text", "") for event in events(attempt)
    )


def test_nothing_is_killed_before_the_last_moment_of_the_grace(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save of 19.9 s in a grace of 20 s, in given time."""
    run = yard.place("pass", grace_s=20)
    job = replace(read_job(run), attempt=1)
    supervisor = Supervisor(run, run.attempt(1), job)
    supervisor._process = mock.Mock(pid=os.getpid())
    sent: list[int] = []
    monkeypatch.setattr("remote.supervise.ask_to_end", lambda *_: set())
    monkeypatch.setattr(supervisor, "_signal_group", sent.append)
    write_json(run.attempt(1).stop_json, {})
    told = []

    for now in (100.0, 100.5, 119.9, 120.0):
        supervisor._obey(now)
        told.append(len(sent))

    assert told == [0, 0, 0, 1]
    assert sent == [signal.SIGKILL]


def test_after_the_grace_the_whole_tree_is_gone_even_what_left_the_group_and_shrugs_off_signals(yard: Yard) -> None:
    script = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "deaf = 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(99)'\n"
        "subprocess.Popen([sys.executable, '-c', deaf])\n"
        "subprocess.Popen([sys.executable, '-c', deaf], start_new_session=True)\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(99)\n    os._exit(0)\n"
        "print('up', flush=True); time.sleep(99)"
    )
    run = yard.place(script)
    attempt = yard.start(run)
    wait_for(lambda: attempt.stdout_log.read_bytes() == b"up\n" and len(marked({run.root.name})) == 4)
    job = read_json(attempt.supervisor_json)
    assert job is not None

    write_json(attempt.stop_json, {"grace_s": 0.5})
    ending = yard.end(attempt)

    assert (ending["signal"], ending["reason"], ending["stubborn"]) == (signal.SIGKILL, "user", [])
    assert marked({run.root.name}) == []
    assert not Path(f"/proc/{job['job_pid']}").exists()  # reaped, no zombie


def test_a_second_wish_with_less_grace_shortens_the_first(yard: Yard) -> None:
    attempt = yard.start(
        yard.place("import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(99)")
    )
    wait_for(lambda: attempt.stdout_log.read_bytes() == b"1\n")
    began = time.monotonic()

    write_json(attempt.stop_json, {"grace_s": 3600})
    time.sleep(0.7)
    write_json(attempt.stop_json, {"grace_s": 0})
    ending = yard.end(attempt)

    assert time.monotonic() - began < 90  # of 3600
    assert ending["signal"] == signal.SIGKILL


def test_a_torn_wish_still_stops_with_the_recipes_grace(yard: Yard) -> None:
    attempt = yard.start(yard.place("import time; time.sleep(99)", grace_s=5))

    attempt.stop_json.write_text('{"grace_')
    ending = yard.end(attempt)

    assert (ending["signal"], ending["reason"]) == (signal.SIGTERM, "user")


def test_a_folder_in_the_place_of_a_wish_is_none(yard: Yard) -> None:
    run = yard.place("import time; time.sleep(0.7)")  # a supervisor looks for one twice a second
    run.attempt(1).stop_json.mkdir(parents=True)

    ending = yard.end(yard.start(run))

    assert (ending["exit_code"], ending["reason"]) == (0, None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"BIG": "x" * 200_000}, "variable BIG is 200004 bytes, and Linux takes less than 131072 in one"),
        ({f"V{number}": "x" * 100_000 for number in range(80)}, "arguments and variables are 8"),
    ],
)
def test_what_is_too_long_for_the_kernel_is_named(words: dict[str, str], said: str) -> None:
    with pytest.raises(OSError, match="Argument list too long") as raised:
        subprocess.Popen([sys.executable, "-c", ""], env=words)

    assert said in cannot_start(raised.value, [sys.executable, "-c", ""], words)


@pytest.mark.parametrize("is_told_before", [False, True])
def test_a_part_that_is_stopped_because_another_has_fallen_says_so_unless_it_was_told_to_stop_before(
    yard: Yard, is_told_before: bool
) -> None:
    script = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(99)"
    attempt = yard.start(yard.place(script, grace_s=3600))
    wait_for(lambda: attempt.stdout_log.read_bytes() == b"1\n")
    if is_told_before:
        yard.started[-1].terminate()
        wait_for(lambda: any("SIGTERM" in event.fields.get("text", "") for event in events(attempt)))

    write_json(attempt.stop_json, {"grace_s": 0.2, "why": "lonely"})
    ending = yard.end(attempt)

    assert ending["reason"] == ("signal" if is_told_before else "lonely")
    assert ending["signal"] == signal.SIGKILL  # the shorter grace counts all the same
    assert ("SIGTERM" in ending["message"]) is is_told_before


def test_a_wish_that_was_there_first_starts_nothing(yard: Yard) -> None:
    run = yard.place("print('ran')")
    write_json(run.attempt(1).stop_json, {"grace_s": 1})
    yard.start(run)
    ending = yard.end(run.attempt(1))

    assert (ending["exit_code"], ending["reason"]) == (None, "user")
    assert not run.attempt(1).stdout_log.exists()


def test_sigterm_to_the_supervisor_stops_the_job_and_is_told_from_a_users_wish(yard: Yard) -> None:
    attempt = yard.start(yard.place("import time; time.sleep(99)", grace_s=5))

    yard.started[-1].terminate()
    ending = yard.end(attempt)

    assert (ending["signal"], ending["reason"]) == (signal.SIGTERM, "signal")
    assert "SIGTERM" in ending["message"]


def test_a_hang_up_disturbs_neither_supervisor_nor_job(yard: Yard) -> None:
    attempt = yard.start(yard.place("import time; time.sleep(1.5); print('done')"))

    os.killpg(yard.started[-1].pid, signal.SIGHUP)
    ending = yard.end(attempt)

    assert ending["exit_code"] == 0
    assert attempt.stdout_log.read_bytes() == b"done\n"


def test_max_duration_ends_the_job(yard: Yard) -> None:
    _, ending = yard.complete("import time; time.sleep(99)", max_duration_s=0.6, grace_s=5)

    assert (ending["signal"], ending["reason"]) == (signal.SIGTERM, "max_duration")
    assert "0.6 s" in ending["message"]


def test_children_that_outlive_the_job_are_ended_and_counted(yard: Yard) -> None:
    script = "import subprocess, sys; subprocess.Popen(['sh', '-c', \"trap '' TERM; while :; do sleep 0.1; done\"])"
    run = yard.place(script)
    attempt = yard.start(run)
    ending = yard.end(attempt)

    assert ending["exit_code"] == 0
    assert ending["killed"] >= 1
    assert marked({run.root.name}) == []


COUNTING = """\
import signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
print("up", file=sys.stderr, flush=True)
while not told:
    time.sleep(0.01)
time.sleep(0.4)  # it cleans up; another signal now means "at once" to many programs
print(len(told), flush=True)
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_child_that_cleans_up_after_the_job_is_told_once(yard: Yard, is_stopped: bool) -> None:
    """It carries the marker, descends from the job, and on a stop it is in the group that was told already."""
    wait = "time.sleep(99)" if is_stopped else "pass"
    child = f"child = subprocess.Popen([sys.executable, '-c', {COUNTING!r}], stderr=subprocess.PIPE)"
    attempt = yard.start(
        yard.place(f"import subprocess, sys, time; {child}; child.stderr.readline(); print('left', flush=True); {wait}")
    )
    wait_for(lambda: attempt.stdout_log.read_bytes().startswith(b"left\n"))

    if is_stopped:
        write_json(attempt.stop_json, {"grace_s": 30})
    ending = yard.end(attempt)

    assert attempt.stdout_log.read_bytes() == b"left\n1\n"
    assert ending["killed"] == 0


def test_on_a_stop_the_grace_is_that_of_the_whole_tree_and_a_shorter_one_still_counts(yard: Yard) -> None:
    """A shell around a trainer dies of the polite signal at once; the trainer saves its checkpoint meanwhile."""

    def around_one_that_cleans_up_for(seconds: float) -> str:
        child = COUNTING.replace("time.sleep(0.4)", f"time.sleep({seconds})")
        parent = f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stderr=subprocess.PIPE)"
        return (
            f"import subprocess, sys, time; {parent}; child.stderr.readline(); print('up', flush=True); time.sleep(99)"
        )

    runs = [
        yard.place(around_one_that_cleans_up_for(seconds), name)
        for name, seconds in (("saving", LEFTOVER_GRACE_S + 1.5), ("hasty", 200))
    ]
    attempts = [yard.start(run) for run in runs]
    wait_for(lambda: all(attempt.stdout_log.read_bytes() == b"up\n" for attempt in attempts))

    for attempt in attempts:
        write_json(attempt.stop_json, {"grace_s": 60})
    first = (read_json(attempts[1].supervisor_json) or {})["job_pid"]
    wait_for(lambda: not Path(f"/proc/{first}").exists())  # its supervisor knows that it is gone
    time.sleep(0.5)
    write_json(attempts[1].stop_json, {"grace_s": 0})
    for process in yard.started:
        process.wait(120)

    assert [attempt.stdout_log.read_bytes() for attempt in attempts] == [b"up\n1\n", b"up\n"]
    endings = [read_json(attempt.exit_json) or {} for attempt in attempts]
    assert [ending["killed"] for ending in endings] == [0, 1]
    assert [ending["reason"] for ending in endings] == ["user", "user"]


def test_a_second_ctrl_c_never_cuts_the_clean_up_short(yard: Yard, tmp_path: Path) -> None:
    """A supervisor that somebody runs by hand, in a terminal that sends its whole group a signal with each Ctrl-C."""
    go = tmp_path / "go"
    waiting = f"print('cleaning', flush=True)\n    while not os.path.exists({str(go)!r}): time.sleep(0.05)"
    script = (
        "import os, signal, sys, time; told = []\n"
        f"def end(*_):\n    told.append(1)\n    if len(told) > 1: sys.exit(9)\n    {waiting}\n"
        "    print('done', len(told)); sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, end); signal.signal(signal.SIGINT, end); print('up', flush=True); time.sleep(60)"
    )
    attempt = yard.start(yard.place(script, grace_s=30))
    wait_for(lambda: attempt.stdout_log.read_bytes() == b"up\n")

    os.killpg(yard.started[-1].pid, signal.SIGINT)
    wait_for(lambda: b"cleaning" in attempt.stdout_log.read_bytes())
    for _ in range(3):
        os.killpg(yard.started[-1].pid, signal.SIGINT)
        time.sleep(0.1)
    go.touch()
    ending = yard.end(attempt)

    assert attempt.stdout_log.read_bytes() == b"up\ncleaning\ndone 1\n"
    assert (ending["exit_code"], ending["reason"], ending["killed"]) == (3, "signal", 0)


def test_a_child_without_environment_and_in_a_session_of_its_own_ends_with_its_run(yard: Yard, tmp_path: Path) -> None:
    """It holds nothing of the run's either: what tells is that it descends from the job."""
    script = (
        "import subprocess, pathlib, time\n"
        "null = subprocess.DEVNULL\n"
        "child = subprocess.Popen(['/bin/sh', '-c', 'setsid sleep 99 & echo $!'], env={'PATH': '/usr/bin:/bin'}, start_new_session=True,"
        " stdin=null, stderr=null, stdout=subprocess.PIPE)\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_bytes(child.stdout.readline())\n"
        "time.sleep(99)"
    )
    attempt = yard.start(yard.place(script, grace_s=0.2))
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
    child = Identity.of(int((tmp_path / "pid").read_text()))
    assert child is not None

    write_json(attempt.stop_json, {"grace_s": 0.2})
    ending = yard.end(attempt)

    assert not child.is_alive
    assert ending["stubborn"] == []


def test_a_neighbour_run_is_left_alone(yard: Yard) -> None:
    neighbour = yard.place("import time; time.sleep(99)", "other")
    yard.start(neighbour)
    attempt = yard.start(yard.place("import time; time.sleep(99)"))

    write_json(attempt.stop_json, {"grace_s": 1})
    yard.end(attempt)

    assert [process.run_id for process in marked({neighbour.root.name})] == [neighbour.root.name]


def test_killing_the_supervisor_leaves_a_job_that_is_found_and_ended_by_its_marker(yard: Yard) -> None:
    run = yard.place("import time; time.sleep(99)")
    attempt = yard.start(run)

    yard.started[-1].kill()
    yard.started[-1].wait()

    orphans = marked({run.root.name})
    assert [(orphan.run_id, orphan.attempt) for orphan in orphans] == [(run.root.name, "1")]
    assert kill_run(run.root.name, "1") == (1, [])
    assert not attempt.exit_json.exists()
    assert yard.call(run, "--attempt", "1").returncode == 71  # and nobody starts this attempt again


# Once ------------------------------------------------------------------------------------------------


def test_of_many_starts_at_once_one_runs(yard: Yard) -> None:
    run = yard.place("open('../count', 'a').write('x'); import time; time.sleep(0.5)", cwd=str(ROOT))
    command = [sys.executable, "-m", "remote.supervise", str(run.root), "--attempt", "1"]
    run_script = f"open({str(yard.root / 'count')!r}, 'a').write('x'); import time; time.sleep(0.5)"
    body = read_json(run.job_json)
    assert body is not None
    write_json(run.job_json, {**body, "argv": [sys.executable, "-c", run_script]})

    starts = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) for _ in range(6)]
    codes = sorted(start.wait(60) for start in starts)

    assert codes == [0, 71, 71, 71, 71, 71]
    assert (yard.root / "count").read_text() == "x"


def test_a_start_after_the_end_is_refused(yard: Yard) -> None:
    attempt, ending = yard.complete("print('once')")

    again = yard.call(yard.run(), "--attempt", "1")

    assert again.returncode == 71
    assert "claimed already" in again.stderr
    assert read_json(attempt.exit_json) == ending
    assert attempt.stdout_log.read_bytes() == b"once\n"


def test_a_supervisor_that_died_before_its_first_word_may_be_replaced(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path / "runs" / "r").attempt(1)
    Claim(attempt)  # opened, never taken: as if it had been killed in between

    assert Claim(attempt).take()
    assert not Claim(attempt).take()


def test_placing_again_after_the_start_changes_nothing(yard: Yard) -> None:
    run = yard.place("import time; time.sleep(1)", env={"A": "1"})
    yard.start(run)
    before = run.job_json.read_bytes()

    answer = yard.call(run, "--place", stdin=json.dumps({"attempt": 1, "spec": None, "env": {}, "job": {"x": 1}}))

    assert json.loads(answer.stdout) == {"is_claimed": True, "differs": ["kind", "argv", "cwd", "spec"]}
    assert run.job_json.read_bytes() == before


# What the job sees -----------------------------------------------------------------------------------


def test_the_job_has_the_environment_that_was_promised(yard: Yard) -> None:
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    run = yard.place(
        script, env={"TOKEN": "s3cret ' $x\n2", "LANG": "de_DE.UTF-8"}, gpus=["GPU-1", "3"], memory_limit_bytes=7
    )
    attempt = yard.start(run, SSH_CONNECTION="1 2 3 4", DRAFTYARD_DB="/laptop/runs.db", LANG="C")
    yard.end(attempt)

    seen = json.loads(attempt.stdout_log.read_text())
    expected = {
        "TOKEN": "s3cret ' $x\n2",
        "LANG": "de_DE.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "GPU-1,3",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "DRAFTYARD_RUN_ID": run.root.name,
        "DRAFTYARD_ATTEMPT": "1",
        "DRAFTYARD_RUN_DIR": str(run.root),
        "DRAFTYARD_WORK_DIR": str(yard.root),
        "DRAFTYARD_MEMORY_LIMIT_BYTES": "7",
    }
    assert {name: seen.get(name) for name in expected} == expected
    assert "SSH_CONNECTION" not in seen
    assert "DRAFTYARD_DB" not in seen
    assert seen["PYTHONPATH"].split(":")[0] == str(ROOT)
    assert seen["PATH"].split(":")[0] == str(Path(sys.executable).parent)


@pytest.fixture
def short_yard(yard: Yard) -> Iterator[Yard]:
    """As hosts have it: pytest's own folders are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="dy-") as folder:
        yard.root = Path(folder) / "work"
        yield yard


def test_temporary_files_and_caches_lie_under_the_work_folder(short_yard: Yard) -> None:
    """Whatever the login says: its /tmp may hold 100 MB. Sockets and locks of multiprocessing fit there."""
    script = (
        "import json, multiprocessing, os, tempfile\n"
        "with multiprocessing.Manager() as manager:\n"
        "    print(json.dumps([tempfile.gettempdir(), os.environ['HF_HOME'], list(manager.list([1]))]))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "HF_HOME"}
    with mock.patch.dict(os.environ, environment, clear=True):
        attempt = short_yard.start(short_yard.place(script), TMPDIR="/dev/shm")
        assert short_yard.end(attempt)["exit_code"] == 0, attempt.stderr_log.read_text()

    root = short_yard.root
    assert json.loads(attempt.stdout_log.read_text()) == [f"{root}/tmp", f"{root}/cache/huggingface", [1]]


@pytest.mark.parametrize(("length", "is_ours"), [(76, True), (77, False)])
def test_a_work_folder_whose_sockets_would_be_too_long_leaves_tmpdir_alone(length: int, is_ours: bool) -> None:
    run = RunDir(Path("/" + "w" * (length - len("//tmp"))) / "runs" / "r1")
    job = Job("r1", "script", 1, ["x"], "/tree")

    found = job_environment(run, job, inherited={"TMPDIR": "/scratch", "HF_HOME": "/models"})

    assert found["TMPDIR"] == (f"{run.root.parent.parent}/tmp" if is_ours else "/scratch")
    assert found["HF_HOME"] == "/models"  # a host's own word on where models lie


def test_an_owners_tmpdir_wins(tmp_path: Path) -> None:
    run = RunDir(Path("/w/runs/r1"))
    owner = RunDir(tmp_path / "runs" / "r2")
    write_json(owner.env_file, {"TMPDIR": "/mine"})

    assert job_environment(run, Job("r1", "script", 1, ["x"], "/tree"), inherited={})["TMPDIR"] == "/w/tmp"
    assert job_environment(owner, Job("r2", "script", 1, ["x"], "/tree"), inherited={})["TMPDIR"] == "/mine"


def test_a_host_with_lang_c_prints_letters_of_any_language(yard: Yard) -> None:
    """LANG=C is what a container entered without a login shell has. `set -u` of a shell finds every name we promise."""
    inner = "import sys; print('\\u00e9', sys.stdout.encoding, sys.getfilesystemencoding())"
    shell = f'set -u; echo "$LANG $HOME $PATH $PYTHONPATH" >&2; exec "$1" -c "{inner}"'
    run = yard.place("", argv=["/bin/sh", "-c", shell, "sh", sys.executable])
    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith("LC_")]:
            del os.environ[name]
        attempt = yard.start(run, LANG="C")
        assert yard.end(attempt)["exit_code"] == 0, attempt.stderr_log.read_text()

    assert attempt.stdout_log.read_bytes() == "é utf-8 utf-8\n".encode()
    assert attempt.stderr_log.read_text().startswith("C.UTF-8 ")


def test_an_allocator_setting_of_the_recipe_is_the_only_one(yard: Yard) -> None:
    script = "import os; print(os.environ.get('PYTORCH_ALLOC_CONF'), os.environ.get('PYTORCH_CUDA_ALLOC_CONF'))"
    attempt, _ = yard.complete(script, env={"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"})

    assert attempt.stdout_log.read_text() == "max_split_size_mb:64 None\n"


def test_secrets_lie_in_a_file_of_mode_0600_only_and_are_gone_with_the_job(yard: Yard, tmp_path: Path) -> None:
    canary = "canary-7f3a9"
    run = yard.place(until(tmp_path / "go"), env={"HF_TOKEN": canary})
    mode = run.env_file.stat().st_mode & 0o777
    attempt = yard.start(run)
    command_lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    others = [path for path in run.root.rglob("*") if path.is_file() and path != run.env_file]

    assert mode == 0o600
    assert run.root.stat().st_mode & 0o777 == 0o700, "what the job says is nobody else's"
    assert canary not in command_lines
    assert all(canary.encode() not in path.read_bytes() for path in others)
    (tmp_path / "go").touch()
    yard.end(attempt)
    assert not run.env_file.exists()


def test_the_first_line_a_job_prints_is_in_the_log_at_once(yard: Yard, tmp_path: Path) -> None:
    attempt = yard.start(yard.place("print('first')\n" + until(tmp_path / "go")))

    wait_for(lambda: attempt.stdout_log.read_bytes() == b"first\n")
    (tmp_path / "go").touch()
    yard.end(attempt)


def test_logs_are_raw_bytes(yard: Yard) -> None:
    attempt, _ = yard.complete(r"import os; os.write(1, b'\xff\r50%\r\x1b[31m\0'); os.write(2, b'err\xfe')")

    assert attempt.stdout_log.read_bytes() == b"\xff\r50%\r\x1b[31m\0"
    assert attempt.stderr_log.read_bytes() == b"err\xfe"


# Evidence --------------------------------------------------------------------------------------------


def test_beats_and_gpu_samples_become_events_even_while_nvidia_smi_is_slow(yard: Yard, tmp_path: Path) -> None:
    stub = tmp_path / "bin" / "nvidia-smi"
    stub.parent.mkdir()
    stub.write_text("#!/bin/sh\nsleep 1\necho '0, GPU-abc, 1024, 97887, 42'\necho '1, GPU-def, [N/A], 97887, [N/A]'\n")
    stub.chmod(0o755)
    run = yard.place(
        "import os, pathlib, time\n"
        "told = pathlib.Path(os.environ['DRAFTYARD_RUN_DIR'], 'attempts', '1', 'events.supervisor.jsonl')\n"
        "while b'GPU-def' not in told.read_bytes(): time.sleep(0.05)"
    )
    attempt = yard.start(run, PATH=f"{stub.parent}:{os.environ['PATH']}")
    ending = yard.end(attempt)

    kinds = [event.kind for event in events(attempt)]
    (sample, *_) = [event.fields["samples"] for event in events(attempt) if event.kind == "gpu"]
    assert kinds[0] == "beat"
    assert sample[0] == {
        "index": 0,
        "uuid": "GPU-abc",
        "used_bytes": 1024 * 2**20,
        "total_bytes": 97887 * 2**20,
        "utilisation": 0.42,
    }
    assert sample[1]["used_bytes"] is None
    assert ending["exit_code"] == 0
    assert [gpu["uuid"] for gpu in ending["gpus"]] == ["GPU-abc", "GPU-def"]


def test_the_exit_file_fits_on_a_full_disk(yard: Yard, tmp_path: Path) -> None:
    """The reserve is given back before it is written."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", small], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        yard.root = small / "work"
        script = (
            "import os\n"
            "try:\n    open(os.environ['DRAFTYARD_WORK_DIR'] + '/fill', 'wb').write(bytes(9_000_000))\n"
            "except OSError as error:\n    raise SystemExit(28 if error.errno == 28 else 1)"
        )
        attempt, ending = yard.complete(script)

        assert ending["exit_code"] == 28
        assert ending["disk"]["free_bytes"] < 200_000
        assert attempt.exit_json.stat().st_size > 100
    finally:
        subprocess.run(["umount", "-l", small], check=True)


def test_the_supervisor_file_names_both_processes_of_this_boot(yard: Yard) -> None:
    attempt = yard.start(yard.place("import time; time.sleep(99)"))
    body = read_json(attempt.supervisor_json)

    assert body is not None
    assert body["pid"] == yard.started[-1].pid
    assert Identity(body["pid"], body["start_ticks"], body["boot_id"]).is_alive
    assert Identity(body["job_pid"], body["job_start_ticks"], body["boot_id"]).is_alive
    assert not Identity(body["job_pid"], body["job_start_ticks"] + 1, body["boot_id"]).is_alive  # a reused pid
    assert not Identity(body["job_pid"], body["job_start_ticks"], "another boot").is_alive
    assert os.getsid(body["job_pid"]) == body["job_pid"]


def test_status_tells_what_is_known(yard: Yard) -> None:
    run = yard.place("import time; time.sleep(99)")
    assert json.loads(yard.call(run, "--status").stdout)["supervisor"] is None

    attempt = yard.start(run)
    alive = json.loads(yard.call(run, "--status").stdout)
    write_json(attempt.stop_json, {"grace_s": 1})
    yard.end(attempt)
    ended = json.loads(yard.call(run, "--status").stdout)

    assert (alive["attempt"], alive["supervisor_alive"], alive["exit"]) == (1, True, None)
    assert (ended["supervisor_alive"], ended["exit"]["reason"]) == (False, "user")


def test_a_supervisor_at_rest_costs_nearly_nothing(yard: Yard) -> None:
    attempt = yard.start(yard.place("import time; time.sleep(99)"))
    body = read_json(attempt.supervisor_json)
    assert body is not None

    def ticks() -> int:
        words = Path(f"/proc/{body['pid']}/stat").read_text().rpartition(")")[2].split()
        return int(words[11]) + int(words[12])

    def cost() -> int:
        before = ticks()
        time.sleep(2)
        return ticks() - before

    # Hundredths of a second in two seconds; it may still be on its first steps, or share a crowded core's cache.
    assert any(cost() <= 4 for _ in range(4))


def stub(folder: Path, name: str, script: str) -> str:
    """A program that is found first; the PATH that finds it."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


# A card that answers with one line to each question, and is lost once `lost` is there. What a supervisor asks first is its
# health; when it asks on, it has taken that answer: `seen`.
CARD = """
case "$*" in
*compute-apps*) [ -f holder ] && cat holder;;
*ecc*) if [ -f lost ]; then echo "Unable to determine the device handle for GPU0000:17:00.0: GPU is lost"; exit 15
       else echo "0, GPU-a, 00000000:17:00.0, 0"; fi;;
*) echo "0, GPU-a, 100, 97887, 0"; touch seen;;
esac"""


@pytest.mark.parametrize("code", [1, 0])
def test_a_job_that_failed_keeps_what_nvidia_smi_and_the_kernel_said(yard: Yard, tmp_path: Path, code: int) -> None:
    xid = "NVRM: Xid (PCI:0000:17:00): 79, pid=7, GPU has fallen off the bus."
    bin_dir = tmp_path / "bin"
    stub(bin_dir, "dmesg", f'cd {bin_dir}; [ -f lost ] && echo "[  99.5] {xid}"; echo "[   1.5] usb 1-1: new"')
    path = stub(bin_dir, "nvidia-smi", f"cd {bin_dir}{CARD}")
    script = (
        "import pathlib, time\n"
        f"folder = pathlib.Path({str(bin_dir)!r})\n"
        "while not (folder / 'seen').exists(): time.sleep(0.02)\n"
        f"(folder / 'lost').touch(); raise SystemExit({code})"
    )
    ending = yard.end(yard.start(yard.place(script, gpus=["GPU-a"]), PATH=path))

    if code == 0:
        assert (ending["kernel"], ending["gpu_health"]) == (None, None)
    else:
        assert ending["kernel"] == [xid]
        assert ending["gpu_health"]["exit_code"] == 15
        assert "GPU is lost" in ending["gpu_health"]["said"][0]


def test_a_process_that_came_through_a_daemon_is_said_and_left_alone(yard: Yard, tmp_path: Path) -> None:
    """It is no child of the job's and carries no mark, as a container's: only the card that it holds tells of it."""
    bin_dir = tmp_path / "bin"
    path = stub(bin_dir, "nvidia-smi", f"cd {bin_dir}{CARD}")
    run = yard.place(until(bin_dir / "go"), gpus=["GPU-a"])
    attempt = yard.start(run, PATH=path)
    with subprocess.Popen(["sleep", "60"], env={}) as stranger:
        (bin_dir / "holder").write_text(f"GPU-a, {stranger.pid}, 300\n")
        (bin_dir / "go").touch()
        ending = yard.end(attempt)
        is_alive = stranger.poll() is None
        stranger.kill()

    (left,) = ending["left"]
    assert (left["pid"], left["gpu"], left["command"]) == (stranger.pid, "GPU-a", "sleep 60")
    assert is_alive
    notes = [event.fields["text"] for event in events(attempt) if event.kind == "note"]
    assert any(f"process {stranger.pid} (sleep 60) holds GPU GPU-a" in note for note in notes)


def test_on_end_runs_after_the_exit_file_and_knows_how_it_ended(yard: Yard) -> None:
    script = 'ls exit.json; echo "$DRAFTYARD_RUN_ID $DRAFTYARD_STATE $DRAFTYARD_EXIT_CODE $TOKEN"; exit 3'
    spec = {"life": {"on_end": ["/bin/sh", "-c", script]}}
    run = yard.place("raise SystemExit(7)", env={"TOKEN": "t"}, spec=spec)
    attempt = yard.start(run)
    yard.end(attempt)

    assert attempt.on_end_log.read_text() == f"exit.json\n{run.root.name} failed 7 t\n"
    last = events(attempt)[-1]
    assert last.kind == "note"
    assert last.fields["text"].startswith("life.on_end: /bin/sh ended with 3 after ")


def test_a_supervisor_waits_for_no_nvidia_smi_that_cannot_be_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something of it holds the pipe open after the kill, as a process that hangs in the driver does."""
    stub = tmp_path / "nvidia-smi"
    stub.write_text(f"#!/bin/sh\nsleep 40 & echo $! >> {tmp_path}/pids\nwait\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sampler = GpuSampler(Reporter(tmp_path))
    started = time.monotonic()

    sampler.turn(started)
    wait_for(lambda: (tmp_path / "pids").exists())
    sampler.stop()
    held = sampler.last(limit_s=0.5)

    seconds = time.monotonic() - started
    for pid in (tmp_path / "pids").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    assert held is None
    assert seconds < 30  # of 40


# Card 5 holds what `used` says, and from the fifth look on 1,100 MiB, where `returns` is there.
LOOKS = """cd {folder}; echo >>looks; used=$(cat used); [ -e returns ] && [ "$(wc -l <looks)" -gt 4 ] && used=1100
echo "5, GPU-a, $used, 97887, 0"; echo '6, GPU-b, 50000, 97887, 0'"""


def test_the_last_look_waits_until_the_cards_hold_what_they_held_before_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", stub(tmp_path / "bin", "nvidia-smi", LOOKS.format(folder=tmp_path)))
    monkeypatch.setattr("remote.sampler.BACK_LOOK_S", 0.01)
    sampler = GpuSampler(Reporter(tmp_path))
    (tmp_path / "used").write_text("1024")

    sampler.first(["5"])
    (tmp_path / "used").write_text("13312")
    held = sampler.last(back_s=0.0)
    (tmp_path / "returns").touch()
    back = sampler.last(back_s=600.0)

    assert [(gpu["uuid"], gpu["used_bytes"]) for gpu in sampler.used_before or ()] == [("GPU-a", 2**30)]
    assert [gpu["used_bytes"] for gpu in held or ()] == [13 * 2**30, 50_000 * 2**20]
    assert [gpu["used_bytes"] for gpu in back or ()] == [1100 * 2**20, 50_000 * 2**20]
    assert len((tmp_path / "looks").read_text()) == 5


@pytest.mark.slow
def test_a_job_is_not_started_before_it_is_known_what_its_cards_hold(yard: Yard, tmp_path: Path) -> None:
    """An nvidia-smi so slow that the job could have taken its memory meanwhile; whoever waits sees the supervisor."""
    script = 'case "$*" in *memory.used*) ;; *) exit 0;; esac\n'
    script += f"cd {tmp_path}; [ -e asked ] || {{ touch asked; sleep 0.5; }}\n"
    script += "used=1024; [ -e begun ] && used=9000; echo 5, GPU-a, $used, 97887, 0"
    job = f"import pathlib, time; p = pathlib.Path({str(tmp_path / 'begun')!r}); p.touch(); time.sleep(0.7); p.unlink()"
    attempt = yard.start(yard.place(job, gpus=["5"]), PATH=stub(tmp_path / "bin", "nvidia-smi", script))
    ending = yard.end(attempt)

    assert [gpu["used_bytes"] for gpu in ending["gpus_before"]] == [2**30]
    assert [gpu["used_bytes"] for gpu in ending["gpus"]] == [2**30]
