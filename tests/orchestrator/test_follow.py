"""The follower against real supervised jobs on this machine: every ending that can be made to happen here."""

import contextlib
import fcntl
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator import launch
from orchestrator.errors import DraftyardError, HostError, StoreError
from orchestrator.follow import secrets
from orchestrator.follow.alerts import CURSOR
from orchestrator.follow.desk import Desk
from orchestrator.follow.follower import Follower, follow
from orchestrator.follow.lease import ensure_follower, is_followed, lease, lock_file
from orchestrator.follow.one_run import look, settle_unstarted
from orchestrator.follow.threads import Connect
from orchestrator.launcher import this_process
from orchestrator.observe import Evidence
from orchestrator.shell.local import LocalShell
from orchestrator.shell.stream import StreamShell
from orchestrator.store.migrations import newest_version
from orchestrator.store.rows import Document, IntentRow, RunRow, State
from orchestrator.store.writes import Store
from orchestrator.workplace import Workplace
from tests.orchestrator.runs import life, new_run

pytestmark = pytest.mark.slow  # real followers

TREE = Path(__file__).resolve().parents[2]
PATIENCE_S = 90.0

STEPS = """
import sys, time
from remote.report import Reporter
reporter = Reporter.from_environment()
with reporter.job():
    reporter.start()
    for step in range(1, int(sys.argv[1]) + 1):
        reporter.metrics(step, {"loss": 1 / step, "step_s": 0.01})
        print("step", step, flush=True)
        time.sleep(float(sys.argv[2]))
"""

# The same until a file appears, so that no test depends on how fast this machine is.
UNTIL = """
import sys, time
from pathlib import Path
from remote.report import Reporter
with Reporter.from_environment().job() as reporter:
    step = 0
    while not Path(sys.argv[1]).exists():
        step += 1
        reporter.metrics(step, {"loss": 1 / step, "step_s": 0.01})
        print("step", step, flush=True)
        time.sleep(0.02)
"""


@dataclass
class Site:
    """A database, a work folder, and jobs started for real on this machine."""

    store: Store
    place: Workplace

    def start(
        self,
        run_id: str,
        *argv: str,
        kind: str = "train",
        grace_s: float = 2.0,
        gpus: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        **rules: Any,
    ) -> str:
        workdir = self.place.work_dir
        self.store.create_run(new_run(run_id, kind=kind, workdir=workdir, documents=life(grace_s=grace_s, **rules)))
        attempt = self.store.new_attempt(run_id)
        job = launch.Job(
            run_id, kind, attempt, (sys.executable, *argv), str(TREE), spec_json="{}", grace_s=grace_s, gpus=gpus
        )
        launch.start(LocalShell(), self.place, replace(job, env=env or {}))
        return run_id

    def follow(self, **options: Any) -> None:
        values: dict[str, Any] = {"connect_to": lambda name, kept: LocalShell(), "idle_s": 0.2, **options}
        assert follow(Follower(self.store.path, ending=threading.Event(), **values))

    def run(self, run_id: str) -> RunRow:
        return self.store.reader.run(run_id)

    def wait(self, run_id: str, reached: Callable[[RunRow], bool]) -> RunRow:
        deadline = time.monotonic() + PATIENCE_S
        while not reached(self.run(run_id)):
            assert time.monotonic() < deadline, self.run(run_id)
            time.sleep(0.05)
        return self.run(run_id)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    place = Workplace(str(tmp_path / "work dir"), sys.executable, str(tmp_path))
    site = Site(Store(tmp_path / "runs.db"), place)
    yield site
    live = [run.id for run in site.store.reader.live_runs()]
    launch.reap(LocalShell(), place, names=live)
    site.store.close()


def losses(site: Site, run_id: str) -> list[int]:
    return [value.step for value in site.store.reader.metric_values(run_id, "loss")]


def test_a_clean_run_succeeds_with_every_step_and_every_byte(site: Site) -> None:
    run_id = site.start("clean", "-c", STEPS, "40", "0.01")

    site.follow()

    run = site.run(run_id)
    assert (run.state, run.reason, run.step) == (State.SUCCEEDED, None, 40)
    assert run.evidence == "exit status 0 and the job's final event"
    assert losses(site, run_id) == list(range(1, 41))
    printed = site.store.logs.read(run_id, 1, "stdout", offset=0, size=10_000)
    assert printed == b"".join(b"step %d\n" % step for step in range(1, 41))
    told = [event.text for event in site.store.reader.events(run_id, kinds=["state"])]
    assert told[0].startswith("pending -> running")
    attempt = site.store.reader.attempts(run_id)[0]
    assert (attempt.exit_code, attempt.signal, attempt.final_outcome) == (0, None, "succeeded")
    assert attempt.pid is not None
    assert attempt.duration_s is not None
    assert attempt.duration_s > 0.3
    (host,) = site.store.reader.hosts()
    assert host.clock_offset_s is not None
    assert abs(host.clock_offset_s) < 60  # one clock; how long the look took is part of the doubt


def test_bytes_that_are_no_text_end_no_run_badly_and_are_kept(site: Site) -> None:
    """A glyph split between two writes, bytes of another encoding, a NUL."""
    spoil = "import os\nos.write(1, b'\\xe2\\x96'); os.write(1, b'\\x88 \\xff\\x00\\r\\n')\n"
    run_id = site.start("glyph", "-c", spoil + STEPS, "3", "0.01")

    site.follow()

    run = site.run(run_id)
    assert (run.state, run.step) == (State.SUCCEEDED, 3)
    assert site.store.logs.read(run_id, 1, "stdout", offset=0, size=8) == b"\xe2\x96\x88 \xff\x00\r\n"


def test_a_secret_in_a_traceback_of_stderr_is_not_in_the_database(site: Site) -> None:
    """A script that reports nothing: the failure is read from its stderr alone. The raw log is the job's."""
    canary = "hf_" + "c4nary" * 5
    raises = f"token = '{canary}'\nraise RuntimeError(f'401 for Bearer {{token}}')"
    run_id = site.start("leaky", "-c", raises, kind="script")

    site.follow()

    (found,) = site.store.reader.failures(run_id)
    assert "RuntimeError: 401 for Bearer [hidden]" in found.traceback
    assert site.run(run_id).state is State.FAILED
    with contextlib.closing(sqlite3.connect(site.store.path)) as connection:
        assert canary not in "\n".join(connection.iterdump())


@pytest.mark.parametrize("off_s", [-360, 4000])
def test_a_host_whose_clock_is_off_has_runs_of_the_right_age(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off_s: int
) -> None:
    wrong = tmp_path / "wrong clock"
    wrong.mkdir()
    (wrong / "sitecustomize.py").write_text(f"import time\nright = time.time\ntime.time = lambda: right() + {off_s}\n")
    (wrong / "date").write_text(f"#!/bin/sh\nexec /bin/date -d '{off_s} seconds' \"$@\"\n")
    (wrong / "date").chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrong}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(wrong))
    before_s = time.time()
    run_id = site.start("off", "-c", STEPS, "10", "0.01")

    site.follow()

    after_s = time.time()
    run, attempt = site.run(run_id), site.store.reader.attempts(run_id)[0]
    assert run.state is State.SUCCEEDED
    assert host_offset(site) == pytest.approx(off_s, abs=3)
    for moment_s in (run.started_s, run.last_event_s, run.ended_s, attempt.ended_s, attempt.last_step_s):
        assert moment_s is not None
        assert before_s - 3 < moment_s < after_s + 3
    assert attempt.duration_s is not None
    assert 0 < attempt.duration_s < after_s - before_s + 1


def host_offset(site: Site) -> float | None:
    return site.store.reader.hosts()[0].clock_offset_s


# Card 5 is the job's; it holds 13,312 MiB once a job has begun, and 1,024 again from the third look after its end,
# where `returns` is there. Card 6 is another's. Where `silent` is there, it fails once a job has begun.
CARDS = """\
#!/bin/sh
case "$*" in *memory.used*) ;; *) exit 0;; esac
cd "$(dirname "$0")"
used=1024
if [ -e begun ]; then used=13312; [ -e silent ] && exit 9; fi
if [ -e ended ]; then echo >>looks; [ -e returns ] && [ "$(wc -l <looks)" -gt 2 ] && used=1024; fi
echo "5, GPU-5555, $used, 97887, 40"
echo "6, GPU-6666, $((used * 2)), 97887, 40"
"""
# It holds the card's memory from its first moment on, as one may whose supervisor asks late.
ON_A_CARD = """
import pathlib, signal, sys, time
def end(*_):
    folder.joinpath("ended").touch()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)
folder = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, end)
folder.joinpath("begun").touch()
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "proof"),
    [
        ("returns", "no process is left; GPU 5 is back at 1.00 GiB"),
        ("silent", "no process is left; unknown whether GPU memory is back: nvidia-smi did not say"),
    ],
)
def test_a_stopped_run_says_whether_the_memory_of_its_cards_is_back(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, proof: str
) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(CARDS)
    program.chmod(0o755)
    (program.parent / way).touch()
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    run_id = site.start("cards", "-c", ON_A_CARD, str(program.parent), gpus=("GPU-5555",))
    site.store.keep_document(run_id, Document.LAUNCH, '{"gpus": ["GPU-5555"]}')
    _wait_until((program.parent / "begun").exists)
    site.store.ask(run_id, "stop", grace_s=20.0)

    site.follow()

    run = site.run(run_id)
    assert run.state is State.STOPPED
    assert run.evidence == f"stopped as asked, ended by signal 15; {proof}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "state", "reason", "evidence"),
    [
        ("import sys; sys.exit(3)", State.FAILED, "exit:3", "exit status 3 in the exit file"),
        ("pass", State.FAILED, "unmarked_exit", "exit status 0 without the final event"),
        ("import os; os.kill(os.getpid(), 15)", State.STOPPED, "signal:15", "SIGTERM that was not ours"),
        ("import os; os.kill(os.getpid(), 9)", State.FAILED, "signal:9", "killed by signal 9 without our asking"),
        ("import os; os.kill(os.getpid(), 11)", State.FAILED, "signal:11", "killed by signal 11"),
        ("import surely_not_there", State.FAILED, "missing_dependency", "No module named 'surely_not_there'"),
        ("raise MemoryError('no room')", State.FAILED, "host_oom", "MemoryError: no room"),
        ("raise OSError(28, 'No space left on device')", State.FAILED, "disk_full", "No space left on device"),
    ],
)
def test_each_ending_has_its_state_and_its_evidence(
    site: Site, program: str, state: State, reason: str, evidence: str
) -> None:
    run_id = site.start("ending", "-c", program)

    site.follow()

    run = site.run(run_id)
    assert (run.state, run.reason) == (state, reason)
    assert evidence in run.evidence
    assert run.ended_s is not None


@pytest.mark.slow
def test_a_script_that_reports_nothing_may_succeed(site: Site) -> None:
    run_id = site.start("script", "-c", "print('done')", kind="script")

    site.follow()

    assert site.run(run_id).state == State.SUCCEEDED


@pytest.mark.slow
def test_a_reported_exception_is_kept_whole_with_its_frame(site: Site) -> None:
    program = """
from remote.report import Reporter
def deep(n):
    if n == 0:
        raise RuntimeError("CUDA out of memory. Tried to allocate 22.31 GiB. GPU 0 has a total capacity of 94.97 GiB "
            "of which 21.00 GiB is free.")
    deep(n - 1)
with Reporter.from_environment().job():
    deep(60)
"""
    run_id = site.start("oom", "-c", program)

    site.follow()

    run = site.run(run_id)
    assert (run.state, run.reason) == (State.FAILED, "gpu_oom")
    failure = site.store.reader.failures(run_id)[0]
    assert failure.is_first_cause
    assert failure.kind == "gpu_oom"
    assert failure.source == "rank0"
    assert failure.facts["requested_bytes"] == round(22.31 * 1024**3)
    assert failure.traceback.count("in deep") >= 3
    assert failure.traceback.rstrip().endswith("21.00 GiB is free.")
    assert len(site.store.reader.failures(run_id)) == 1  # stderr says the same and is not counted again


def test_a_stop_is_carried_out_and_said_when_the_processes_are_gone(site: Site) -> None:
    run_id = site.start("stopped", "-c", STEPS, "10000", "0.02")
    follower = threading.Thread(target=site.follow)
    follower.start()
    site.wait(run_id, lambda run: run.state == State.RUNNING)

    wish = site.store.ask(run_id, "stop", grace_s=5)
    run = site.wait(run_id, lambda run: run.state.is_final)
    follower.join(timeout=PATIENCE_S)

    assert (run.state, run.reason) == (State.STOPPED, "user")
    assert launch.find_processes(LocalShell(), site.place, run_ids=[run_id]) == []
    assert losses(site, run_id) == list(range(1, (run.step or 0) + 1))
    done = next(item for item in site.store.reader.intents(run_id, only_open=False) if item.id == wish)
    assert done.outcome is not None
    assert done.outcome.startswith("stopped: stopped as asked")
    told = [event.fields["to"] for event in site.store.reader.events(run_id, kinds=["state"])]
    assert told == ["running", "stopping", "stopped"]


UNSAVED = """
import signal, threading
from remote.report import Reporter
told = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: told.set())
with Reporter.from_environment().job() as reporter:
    reporter.metrics(1, {"loss": 1.0})
    while not told.wait(0.05):
        pass
    raise OSError(28, "the checkpoint of step 1 could not be written: No space left on device")
"""


def test_a_stop_at_which_the_last_checkpoint_was_lost_is_a_stop_and_says_so(site: Site) -> None:
    run_id = site.start("unsaved", "-c", UNSAVED, grace_s=10.0)
    follower = threading.Thread(target=site.follow)
    follower.start()
    site.wait(run_id, lambda run: run.state == State.RUNNING and run.step == 1)

    site.store.ask(run_id, "stop", grace_s=10.0)
    run = site.wait(run_id, lambda run: run.state.is_final)
    follower.join(timeout=PATIENCE_S)

    assert (run.state, run.reason) == (State.STOPPED, "user")
    assert (
        "stopped as asked, exit status 1; OSError: [Errno 28] the checkpoint of step 1 could not be written"
        in run.evidence
    )
    assert [failure.kind for failure in site.store.reader.failures(run_id)] == ["disk_full"]


@pytest.mark.slow
def test_a_killed_supervisor_leaves_a_running_job_and_then_its_last_word(site: Site) -> None:
    enough = site.store.path.with_name("enough")
    run_id = site.start("orphan", "-c", UNTIL, str(enough))
    follower = threading.Thread(target=site.follow)
    follower.start()
    site.wait(run_id, lambda run: run.state == State.RUNNING)
    supervisor = _supervisor(site, run_id)

    os.kill(supervisor, signal.SIGKILL)
    told = site.wait(run_id, lambda run: "its supervisor was killed" in run.evidence)
    enough.touch()
    run = site.wait(run_id, lambda run: run.state.is_final)
    follower.join(timeout=PATIENCE_S)

    assert told.state is State.RUNNING
    assert run.state == State.SUCCEEDED
    assert "its supervisor was killed" in run.evidence
    assert losses(site, run_id) == list(range(1, (run.step or 0) + 1))


@pytest.mark.slow
def test_everything_killed_without_an_exit_file_is_lost(site: Site) -> None:
    run_id = site.start("lost", "-c", STEPS, "10000", "0.02")
    follower = threading.Thread(target=site.follow)
    follower.start()
    site.wait(run_id, lambda run: run.state == State.RUNNING)

    secrets = Path(site.place.run_dir(run_id), "env")
    assert secrets.exists()

    os.kill(_supervisor(site, run_id), signal.SIGKILL)
    launch.reap(LocalShell(), site.place, names=[run_id])
    run = site.wait(run_id, lambda run: run.state.is_final)
    follower.join(timeout=PATIENCE_S)

    assert not secrets.exists()
    assert run.state == State.LOST
    assert run.evidence.startswith("supervisor and job are gone without an exit file")


@pytest.mark.parametrize("is_asked_before", [False, True])
def test_of_a_killed_supervisor_the_host_still_tells_where_secrets_stand_in_the_log(
    site: Site, tmp_path: Path, is_asked_before: bool
) -> None:
    """Its last words came when nobody was left to write an exit file, and whoever follows knows no such value; also where a
    follower was killed after it had taken away what lay on the host, before it wrote the end."""
    asks = "import os, pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists():\n    time.sleep(0.02)\n"
    raises = "raise RuntimeError('401 for ' + os.environ['PW'])\n"
    run_id = site.start("told", "-c", asks + raises, str(tmp_path / "go"), kind="script", env={"PW": "a canary"})
    os.kill(_supervisor(site, run_id), signal.SIGKILL)
    (tmp_path / "go").touch()
    folder = Path(site.place.run_dir(run_id))
    log = folder / "attempts" / "1" / "stderr.log"
    if is_asked_before:
        _until(lambda: log.exists() and b"canary\n" in log.read_bytes())
        asked = (Desk(site.store, site.store.reader, time.time), LocalShell(), site.run(run_id), str(folder))
        first = secrets.taken(*asked, Evidence.nothing())
        assert not (folder / "env").exists()
        assert first
        assert secrets.taken(*asked, Evidence.nothing()) == first

    site.follow()

    run = site.run(run_id)
    assert run.state is State.LOST
    assert run.evidence.endswith("; RuntimeError: 401 for [hidden]")
    with contextlib.closing(sqlite3.connect(site.store.path)) as connection:
        assert "a canary" not in "\n".join(connection.iterdump())
    assert b"a canary" not in site.store.logs.read(run_id, 1, "stderr", offset=0, size=9999)
    assert not Path(site.place.run_dir(run_id), "env").exists()


@pytest.mark.slow
def test_a_stop_of_a_job_without_supervisor_ends_that_attempt_and_no_newer_one(site: Site) -> None:
    """The look began before the run was said to have failed and was started again."""
    run_id = site.start("orphan", "-c", STEPS, "100000", "0.02")
    os.kill(_supervisor(site, run_id), signal.SIGKILL)
    stale = site.run(run_id)
    site.store.mark(run_id, State.FAILED, why="its supervisor is gone")
    attempt = site.store.new_attempt(run_id)
    job = launch.Job(run_id, "train", attempt, (sys.executable, "-c", STEPS, "100000", "0.02"), str(TREE))
    launch.start(LocalShell(), site.place, job)
    site.store.ask(run_id, "stop", grace_s=5)
    desk = Desk(site.store, site.store.reader, time.time)

    look(desk, LocalShell(), stale)

    left = launch.find_processes(LocalShell(), site.place, run_ids=[run_id])
    assert {item.attempt for item in left} == {"2"}


def _until(is_so: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < ends_s
        time.sleep(0.05)


def _supervisor(site: Site, run_id: str) -> int:
    from remote.rundir import RunDir, read_json

    found = read_json(RunDir(Path(site.place.run_dir(run_id))).attempt(1).supervisor_json)
    assert found is not None
    return int(found["pid"])


# --------------------------------------------------------------------------- hosts that are away


class Away(LocalShell):
    """A host that does not answer while `is_away`."""

    is_away = True

    def run(self, argv: list[str], *, stdin: bytes = b"", timeout_s: float = 60.0):  # type: ignore[no-untyped-def]
        if Away.is_away:
            raise HostError("no route to host")
        return super().run(argv, stdin=stdin, timeout_s=timeout_s)


@pytest.mark.slow
def test_one_dead_host_never_stops_the_others_and_comes_back_as_itself(site: Site) -> None:
    away = site.start("away", "-c", STEPS, "5", "0.01")
    site.store.close()
    site.store = Store(site.store.path)
    near = "near"
    site.store.create_run(new_run(near, host="other", workdir=site.place.work_dir, documents=life()))
    site.store.new_attempt(near)
    job = launch.Job(near, "train", 1, (sys.executable, "-c", STEPS, "5", "0.01"), str(TREE), spec_json="{}")
    launch.start(LocalShell(), site.place, job)
    Away.is_away = True
    connect: Connect = lambda name, kept: Away() if name == "local" else LocalShell()  # noqa: E731
    follower = threading.Thread(target=site.follow, kwargs={"connect_to": connect})
    follower.start()

    assert site.wait(near, lambda run: run.state.is_final).state == State.SUCCEEDED
    lost_sight = site.wait(away, lambda run: run.unreachable_since_s is not None)
    assert lost_sight.state == State.PENDING  # a view, never a state
    assert site.store.reader.hosts()[0].error == "no route to host"
    Away.is_away = False
    run = site.wait(away, lambda run: run.state.is_final)
    follower.join(timeout=PATIENCE_S)

    assert (run.state, run.unreachable_since_s) == (State.SUCCEEDED, None)
    assert losses(site, away) == [1, 2, 3, 4, 5]


# ------------------------------------------------------------------------------- one per database


@pytest.mark.slow
def test_a_follower_starts_on_demand_follows_to_the_end_and_goes(site: Site) -> None:
    enough = site.store.path.with_name("enough")
    run_id = site.start("demand", "-c", UNTIL, str(enough))

    assert ensure_follower(site.store.path)
    # It has no lease yet, but is on its way: `launch --follow` asks again at once.
    assert not ensure_follower(site.store.path)
    site.wait(run_id, lambda run: run.step is not None)
    assert is_followed(site.store.path)
    assert not ensure_follower(site.store.path)
    enough.touch()
    run = site.wait(run_id, lambda run: run.state == State.SUCCEEDED)
    deadline = time.monotonic() + PATIENCE_S
    while is_followed(site.store.path):
        assert time.monotonic() < deadline
        time.sleep(0.1)

    assert losses(site, run_id) == list(range(1, (run.step or 0) + 1))
    assert site.store.path.with_name("runs.db.follow.log").read_text() == ""


@pytest.mark.slow
def test_a_killed_follower_is_replaced_and_no_step_is_lost_or_doubled(site: Site) -> None:
    enough = site.store.path.with_name("enough")
    run_id = site.start("killed", "-c", UNTIL, str(enough))
    argv = [sys.executable, "-m", "orchestrator.follow.follower", "--db", str(site.store.path), "--idle", "0.2"]
    for _ in range(3):
        follower = subprocess.Popen(argv, cwd=TREE)
        seen = site.run(run_id).step or 0
        site.wait(run_id, lambda run, seen=seen: (run.step or 0) > seen)  # type: ignore[misc]
        follower.kill()
        follower.wait()
        assert not is_followed(site.store.path)  # the kernel gave the lease back

    enough.touch()
    subprocess.run(argv, cwd=TREE, timeout=PATIENCE_S, check=True)

    run = site.run(run_id)
    assert run.state == State.SUCCEEDED
    assert losses(site, run_id) == list(range(1, (run.step or 0) + 1))
    printed = site.store.logs.read(run_id, 1, "stdout", offset=0, size=100_000)
    assert printed == b"".join(b"step %d\n" % step for step in range(1, (run.step or 0) + 1))


def test_only_one_holds_the_lease(tmp_path: Path) -> None:
    db = tmp_path / "runs.db"
    assert not is_followed(db)

    with lease(db) as first:
        assert first
        assert is_followed(db)
        with lease(db, wait_s=0) as second:
            assert not second

    assert not is_followed(db)


@pytest.mark.parametrize("change", ["removed", "replaced", "without its lease"])
def test_a_follower_whose_database_is_another_file_or_gone_ends(tmp_path: Path, change: str) -> None:
    """Its lease is on what nobody sees any more: in that place the next follower begins, and there were two."""
    db = tmp_path / "runs.db"
    Store(db).close()
    lock_file(db).touch()
    later = threading.Timer(0.3, _changed, (db, change))
    later.start()

    began = time.monotonic()
    Follower(db, lambda host: LocalShell(), threading.Event(), idle_s=60.0).run()

    assert time.monotonic() - began < 30.0
    later.join()


def _changed(db: Path, change: str) -> None:
    if change == "without its lease":
        lock_file(db).unlink()
        return
    for file in db.parent.glob("runs.db*"):
        if file.is_file():
            file.unlink()
    if change == "replaced":
        Store(db).close()


def test_a_second_follower_leaves_at_once(site: Site) -> None:
    descriptor = os.open(lock_file(site.store.path), os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)

    assert not follow(Follower(site.store.path, lambda name, kept: LocalShell(), threading.Event()))
    os.close(descriptor)


HOLDER = """
import fcntl, os, signal, sys, time
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
file = open(sys.argv[1], "r+")
fcntl.flock(file, fcntl.LOCK_EX)
if sys.argv[2] != "-":
    file.write(f"{os.getpid()} {sys.argv[2]}".ljust(30)), file.flush()
print(flush=True)
time.sleep(600)
"""


@contextmanager
def _held(site: Site, *says: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that has the lease, of a database that this one's own follower has had before."""
    with lease(site.store.path) as is_ours:
        assert is_ours
    words = [sys.executable, "-c", HOLDER, str(lock_file(site.store.path)), *says]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        try:
            yield holder
        finally:
            holder.kill()


@pytest.mark.slow
@pytest.mark.parametrize("says", [("-",), ("1",), ("-", "deaf")])
def test_a_follower_of_an_older_draftyard_is_replaced(site: Site, says: tuple[str, ...]) -> None:
    """It knows nothing of what newer code writes: it said of a run over two hosts that it was stopped."""
    with _held(site, *says, "orchestrator.follow.follower") as holder:
        run_id = site.start("new", "-c", STEPS, "2", "0.01")

        assert ensure_follower(site.store.path)
        site.wait(run_id, lambda run: run.state == State.SUCCEEDED)

        assert holder.wait(PATIENCE_S) == (-signal.SIGKILL if "deaf" in says else -signal.SIGTERM)


@pytest.mark.slow
def test_a_holder_that_is_no_follower_is_named_and_left_alone(site: Site) -> None:
    with _held(site, "-") as holder:
        with pytest.raises(StoreError, match=rf"process {holder.pid} .*older than this draftyard.*kill {holder.pid}"):
            ensure_follower(site.store.path)

        assert holder.poll() is None


def test_a_follower_that_knows_as_much_is_left_at_work(site: Site) -> None:
    with _held(site, str(newest_version()), "orchestrator.follow.follower") as holder:
        assert not ensure_follower(site.store.path)
        assert holder.poll() is None


# ------------------------------------------------------------------------------ retries and alerts


@pytest.mark.slow
def test_a_retry_happens_for_the_reasons_and_times_the_recipe_names(site: Site) -> None:
    asked: list[str] = []

    def resume(wish: IntentRow) -> str:
        asked.append(wish.run_id)
        attempt = site.store.new_attempt(wish.run_id, retry=wish.id)
        job = launch.Job(wish.run_id, "train", attempt, (sys.executable, "-c", "import sys; sys.exit(3)"), str(TREE))
        launch.start(LocalShell(), site.place, job)
        return "a new attempt was started"

    run_id = site.start("again", "-c", "import sys; sys.exit(3)", retries=2, retry_on=["exit"])
    other = site.start("once", "-c", "import sys; sys.exit(3)", retries=2, retry_on=["gpu_oom"])
    site.follow(resume=resume)

    assert asked == [run_id, run_id]
    assert [row.reason for row in site.store.reader.attempts(run_id)] == ["exit:3"] * 3
    assert len(site.store.reader.attempts(other)) == 1
    assert {wish.outcome for wish in site.store.reader.intents(run_id, only_open=False)} == {
        "a new attempt was started"
    }


@pytest.mark.slow
def test_a_retry_that_takes_long_holds_up_neither_a_stop_nor_the_end(site: Site) -> None:
    asked, may_end = threading.Event(), threading.Event()

    def resume(wish: IntentRow) -> str:
        asked.set()
        assert may_end.wait(PATIENCE_S)
        return "the host did not answer"

    broken = site.start("broken", "-c", "import sys; sys.exit(3)", retries=1, retry_on=["exit"])
    other = site.start("other", "-c", STEPS, "100000", "0.02")
    follower = threading.Thread(target=site.follow, kwargs={"resume": resume})
    follower.start()
    assert asked.wait(PATIENCE_S)

    site.store.ask(other, "stop", grace_s=5)
    assert site.wait(other, lambda run: run.state.is_final).state == State.STOPPED
    assert follower.is_alive()  # it waits for the retry to be settled
    may_end.set()
    follower.join(timeout=PATIENCE_S)

    assert [wish.outcome for wish in site.store.reader.intents(broken, only_open=False)] == ["the host did not answer"]


@pytest.mark.slow
def test_a_stop_calls_a_retry_off_even_when_its_start_is_under_way(site: Site) -> None:
    asked, may_end = threading.Event(), threading.Event()

    def resume(wish: IntentRow) -> str:
        asked.set()
        assert may_end.wait(PATIENCE_S)
        with pytest.raises(DraftyardError) as refused:
            site.store.new_attempt(wish.run_id, retry=wish.id)
        return str(refused.value)

    run_id = site.start("again", "-c", "import sys; sys.exit(3)", retries=5, retry_on=["exit"])
    follower = threading.Thread(target=site.follow, kwargs={"resume": resume})
    follower.start()
    assert asked.wait(PATIENCE_S)

    assert site.store.call_off_retry(run_id)
    assert not site.store.call_off_retry(run_id)
    may_end.set()
    follower.join(timeout=PATIENCE_S)

    assert (site.run(run_id).state, site.run(run_id).attempt) == (State.FAILED, 1)
    assert [row.outcome for row in site.store.reader.intents(run_id, only_open=False)] == ["called off by a stop"]


# ------------------------------------------------------------------------------ launches that died


def _gone() -> str:
    """A process that has ended, as its launch would have kept it."""
    code = "from orchestrator.launcher import this_process; print(this_process())"
    return subprocess.run([sys.executable, "-c", code], cwd=TREE, check=True, capture_output=True, text=True).stdout


def _nobody(name: str, kept: Path | None) -> StreamShell:
    raise HostError(f"nobody may ask host {name}")


@pytest.mark.parametrize("attempts", [0, 1])
def test_a_launch_that_was_killed_is_said_at_once_and_without_its_host(site: Site, attempts: int) -> None:
    site.store.create_run(new_run("dead", workdir="/w", documents={**life(), Document.LAUNCHER: _gone()}))
    for _ in range(attempts):
        site.store.new_attempt("dead")

    site.follow(connect_to=_nobody)

    run = site.run("dead")
    assert (run.state, run.reason) == (State.FAILED, None)
    assert run.evidence == "the launch was killed before it started the job"
    assert site.store.reader.hosts() == []


def _with_secrets(site: Site, run_id: str, *, more: tuple[str, ...] = ()) -> list[Path]:
    """A pending run whose launch was killed when everything lay on its hosts: the files with its secrets."""
    workdirs = [f"{site.place.work_dir}{number or ''}" for number in range(1 + len(more))]
    gone = {**life(), Document.LAUNCHER: _gone()}
    site.store.create_run(new_run(run_id, workdir=workdirs[0], documents=gone, more_hosts=more))
    if more:
        site.store.place_nodes(run_id, workdirs)
    site.store.new_attempt(run_id)
    files = [Path(workdir, "runs", run_id, "env") for workdir in workdirs]
    for file in files:
        (file.parent / "attempts" / "1").mkdir(parents=True)
        file.write_text('{"SECRET_TOK": "x"}')
    return files


@pytest.mark.parametrize("more", [(), ("second",)])
def test_the_secrets_of_a_launch_that_was_killed_go_from_every_host(site: Site, more: tuple[str, ...]) -> None:
    files = _with_secrets(site, "dead", more=more)

    site.follow()

    assert site.run("dead").state == State.FAILED
    assert not any(file.exists() for file in files)


def test_secrets_on_a_host_that_was_away_go_when_it_is_followed_next(site: Site) -> None:
    (file,) = _with_secrets(site, "dead")
    site.follow(connect_to=_nobody)
    assert site.run("dead").state == State.FAILED
    assert file.exists()
    site.start("next", "-c", STEPS, "2", "0.01")

    site.follow()

    assert not file.exists()
    assert site.run("next").state == State.SUCCEEDED


def test_secrets_that_a_supervisor_has_claimed_are_left_to_it(site: Site) -> None:
    """Another database's run of the same id."""
    (file,) = _with_secrets(site, "dead")
    (file.parent / "attempts" / "1" / "claim").touch()

    site.follow()

    assert file.exists()


def test_a_launch_that_is_at_work_is_left_alone_and_can_be_stopped_while_its_host_is_away(site: Site) -> None:
    site.store.create_run(new_run("alive", documents={**life(), Document.LAUNCHER: this_process()}))
    follower = threading.Thread(target=site.follow, kwargs={"connect_to": _nobody})
    follower.start()
    time.sleep(0.5)
    assert site.run("alive").state == State.PENDING

    site.store.ask("alive", "stop")
    run = site.wait("alive", lambda run: run.state.is_final)
    follower.join(timeout=PATIENCE_S)

    assert (run.state, run.reason) == (State.STOPPED, "user")
    assert site.store.reader.intents("alive") == []


def test_a_host_that_is_away_delays_no_stop_of_what_it_never_saw(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_BACKOFF_S", "LAST_BACKOFF_S"):
        monkeypatch.setattr(f"orchestrator.follow.threads.{name}", 10 * PATIENCE_S)
    site.store.create_run(new_run("away", workdir="/w", documents=life()))
    site.store.new_attempt("away")
    site.store.set_up("away", 1)
    for name in ("first", "second"):
        site.store.create_run(new_run(name, documents={**life(), Document.LAUNCHER: this_process()}))
    follower = threading.Thread(target=site.follow, kwargs={"connect_to": _nobody})
    follower.start()
    site.wait("away", lambda run: run.unreachable_since_s is not None)

    site.store.ask("first", "stop")
    site.wait("first", lambda run: run.state is State.STOPPED)
    site.store.mark("away", State.LOST, why="the box was returned")
    time.sleep(0.6)
    site.store.ask("second", "stop")
    site.wait("second", lambda run: run.state is State.STOPPED)
    follower.join(timeout=PATIENCE_S)

    assert not follower.is_alive()


def test_the_lease_is_kept_until_the_last_look_has_ended(site: Site) -> None:
    asked, may_end = threading.Event(), threading.Event()

    def connect_to(name: str, kept: Path | None) -> StreamShell:
        asked.set()
        assert may_end.wait(PATIENCE_S)
        raise HostError("no route")

    site.store.create_run(new_run("away", workdir="/w", documents=life()))
    site.store.new_attempt("away")
    site.store.set_up("away", 1)
    ending = threading.Event()
    follower = threading.Thread(target=lambda: follow(Follower(site.store.path, connect_to, ending)))
    follower.start()
    assert asked.wait(PATIENCE_S)

    ending.set()
    time.sleep(6.0)
    with lease(site.store.path) as is_ours:
        assert not is_ours
    may_end.set()
    follower.join(timeout=PATIENCE_S)
    with lease(site.store.path) as is_ours:
        assert is_ours


def test_once_the_job_may_live_the_death_of_its_launch_says_nothing(site: Site) -> None:
    site.start("spawned", "-c", STEPS, "5", "0.01")
    site.store.keep_document("spawned", Document.LAUNCHER, _gone())
    site.store.set_up("spawned", 1)

    site.follow()

    assert site.run("spawned").state == State.SUCCEEDED


# ------------------------------------------------------------------------------ faults on this side


@pytest.mark.slow
def test_bytes_that_cannot_be_kept_hold_up_neither_a_stop_nor_another_run(site: Site) -> None:
    in_the_way = site.store.logs.root / "first"
    in_the_way.parent.mkdir()
    in_the_way.touch()
    first = site.start("first", "-c", STEPS, "100000", "0.02")
    second = site.start("second", "-c", STEPS, "20", "0.01")
    follower = threading.Thread(target=site.follow)
    follower.start()

    assert site.wait(second, lambda run: run.state.is_final).state == State.SUCCEEDED
    _wait_until(lambda: bool(site.store.reader.events(first, kinds=["follower_error"])))
    site.store.ask(first, "stop", grace_s=5)
    _wait_until(lambda: launch.find_processes(LocalShell(), site.place, run_ids=[first]) == [])
    told = site.store.reader.events(first, kinds=["follower_error"])
    assert len(told) == 1
    assert "logs cannot be used (File exists" in told[0].text or "Not a directory" in told[0].text
    assert not site.run(first).state.is_final  # nothing is decided before its last bytes are here
    in_the_way.unlink()
    run = site.wait(first, lambda run: run.state.is_final)
    follower.join(timeout=PATIENCE_S)

    assert run.state == State.STOPPED
    assert losses(site, first) == list(range(1, (run.step or 0) + 1))


@pytest.mark.slow
def test_a_run_that_cannot_be_written_at_all_is_stopped_all_the_same(
    site: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    first = site.start("first", "-c", STEPS, "100000", "0.02")
    second = site.start("second", "-c", STEPS, "100000", "0.02")
    site.store.ask(first, "stop", grace_s=5)
    with contextlib.closing(sqlite3.connect(site.store.path)) as connection:
        connection.execute(
            "CREATE TRIGGER broken BEFORE INSERT ON events WHEN NEW.run_key = 1"
            " BEGIN SELECT raise(ABORT, 'no event of this run'); END"
        )
    follower = threading.Thread(target=site.follow)
    follower.start()

    _wait_until(lambda: launch.find_processes(LocalShell(), site.place, run_ids=[first]) == [])
    site.wait(second, lambda run: (run.step or 0) > 0)
    site.store.ask(second, "stop", grace_s=5)
    assert site.wait(second, lambda run: run.state.is_final).state == State.STOPPED
    assert "IntegrityError: no event of this run" in capfd.readouterr().err  # its own log, once
    with contextlib.closing(sqlite3.connect(site.store.path)) as connection:
        connection.execute("DROP TRIGGER broken")
    run = site.wait(first, lambda run: run.state.is_final)
    follower.join(timeout=PATIENCE_S)

    assert run.state == State.STOPPED
    assert [row.text for row in site.store.reader.events(first, kinds=["follower_error"])] == [
        "IntegrityError: no event of this run"
    ]


def _wait_until(is_reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_reached():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_follower_of_a_database_that_cannot_be_used_says_so_at_once(tmp_path: Path) -> None:
    (tmp_path / "runs.db").mkdir()

    with pytest.raises(StoreError, match="is a folder"):
        follow(Follower(tmp_path / "runs.db", _nobody, threading.Event()))


def test_a_clock_that_is_set_back_ends_no_wait_and_starts_none_anew(site: Site) -> None:
    site.store.create_run(new_run("late"))
    now_s = [time.time() - 7 * 86400.0]  # the row seems to be of next week
    watch_s = [100.0]
    desk = Desk(site.store, site.store.reader, lambda: now_s[0], monotonic=lambda: watch_s[0])

    assert settle_unstarted(desk, site.run("late"))
    assert site.run("late").state == State.PENDING
    watch_s[0] += 2 * 3600.0
    assert settle_unstarted(desk, site.run("late"))

    assert site.run("late").reason == "start_timeout"


def test_a_look_at_an_older_attempt_ends_no_newer_one(site: Site) -> None:
    run_id = site.start("twice", "-c", "import sys; sys.exit(3)")
    stale = site.run(run_id)
    site.store.set_state(run_id, State.FAILED, reason="exit:3", evidence="x")
    site.store.new_attempt(run_id)
    desk = Desk(site.store, site.store.reader, time.time)

    _wait_until(lambda: look(desk, LocalShell(), stale).has_ended)

    assert site.run(run_id).state == State.PENDING
    assert site.store.reader.intents(run_id) == []


@pytest.mark.slow
def test_alerts_tell_of_states_bad_numbers_and_memory_once_each(site: Site) -> None:
    program = """
from remote.report import Reporter
OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {"__module__": "torch"})
with Reporter.from_environment().job() as reporter:
    for step in range(1, 9):
        reporter.metrics(step, {"val/loss": float("nan") if step > 4 else 1.0})
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
"""
    sent: list[dict[str, Any]] = []
    run_id = site.start("alert", "-c", program)

    site.follow(post=sent.append)

    told = [(body["kind"], body["state"], body["reason"]) for body in sent if body["run"] == run_id]
    assert [kind for kind, *_ in told].count("nonfinite") == 1
    states = [told[1:] for told in told if told[0] == "state"]
    assert (states[-2:], len(set(states))) == ([("running", None), ("failed", "gpu_oom")], len(states))
    assert "val/loss is not a number in 4 of 8 steps" in next(
        body["text"] for body in sent if body["kind"] == "nonfinite"
    )
    assert all(body["text"].startswith("smollm2/v6 on local (alert): ") for body in sent)


def test_what_happens_once_a_host_is_looked_at_is_news_and_no_history(site: Site) -> None:
    """The first follower with a webhook may find a run that has ended: its alerts must have begun by then."""
    run_id = site.start("ended", "-c", "import sys; sys.exit(3)")
    begun: list[bool] = []

    def connect_to(name: str, kept: Path | None) -> StreamShell:
        begun.append(site.store.cursor(CURSOR) is not None)
        return LocalShell()

    site.follow(connect_to=connect_to, post=lambda body: None)

    assert site.run(run_id).state is State.FAILED
    assert begun[0]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB, so that it can be filled."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_here_holds_up_the_record_but_neither_the_run_nor_the_truth(site: Site, small_disk: Path) -> None:
    workdir = site.place.work_dir
    with Store(small_disk / "runs.db") as store:
        store.create_run(new_run("full", workdir=workdir, documents=life()))
        store.new_attempt("full")
    _fill(small_disk / "filler")
    job = launch.Job("full", "train", 1, (sys.executable, "-c", STEPS, "30", "0.01"), str(TREE), spec_json="{}")
    launch.start(LocalShell(), site.place, job)
    ending = threading.Event()
    follower = Follower(small_disk / "runs.db", lambda name, kept: LocalShell(), ending, idle_s=0.2)
    thread = threading.Thread(target=follow, args=(follower,))
    thread.start()
    time.sleep(2.0)
    assert thread.is_alive()

    (small_disk / "filler").unlink()
    thread.join(timeout=PATIENCE_S)

    with Store(small_disk / "runs.db") as store:
        assert store.reader.run("full").state == State.SUCCEEDED
        assert [value.step for value in store.reader.metric_values("full", "loss")] == list(range(1, 31))


@pytest.mark.slow
def test_a_stop_on_a_host_whose_disk_is_full_ends_the_run(
    site: Site, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.follow.one_run.LATE_S", 0.0)
    site.place = Workplace(str(small_disk / "work"), sys.executable, str(small_disk))
    silent = UNTIL.replace("print(", "id((").replace(", flush=True)", "))")  # what prints on a full disk ends by itself
    site.start("full", "-c", silent, str(small_disk / "never"), grace_s=0.5)
    attempt = small_disk / "work" / "runs" / "full" / "attempts" / "1"
    _wait_until(lambda: any(b'"metrics"' in file.read_bytes() for file in attempt.glob("events*")))
    _fill(small_disk / "filler")
    site.store.ask("full", "stop", grace_s=0.5)

    site.follow()

    run = site.run("full")
    told = [row.text for row in site.store.reader.events("full", kinds=["state"]) if "does not take" in row.text]
    assert (run.state, run.reason) == (State.STOPPED, "user")
    assert len(told) == 1
    assert losses(site, "full")
    assert launch.find_processes(LocalShell(), site.place, run_ids=["full"]) == []


def _fill(path: Path) -> None:
    """Until not one more block fits."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as stream:
        while True:
            stream.write(b"x" * 4096)
