"""A job started once, over whatever way; it outlives the connection, and the evidence tells how it fares."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import launch
from orchestrator.errors import DraftyardError, HostError
from orchestrator.host import LOCAL, Host, Hosts
from orchestrator.launch import Job, Started
from orchestrator.observe import Evidence, observe, parse
from orchestrator.shell.connect import connect
from orchestrator.shell.local import LocalShell
from orchestrator.shell.stream import StreamShell
from orchestrator.ship import ship
from orchestrator.tree import bundled_tree
from orchestrator.workplace import Workplace, workplace
from remote.processes import kill_run
from remote.wire import decode
from tests import sshd
from tests.sshd import Server

pytestmark = pytest.mark.slow  # real supervisors over real ways

PATIENCE_S = 90.0

STEPS = """
import time
from remote.report import Reporter
reporter = Reporter.from_environment()
with reporter.job():
    for step in range(1, {steps} + 1):
        reporter.metrics(step, {{"loss": 1.0 / step}})
        print("step", step)
        time.sleep({pause})
"""


@dataclass
class Site:
    host: Host
    shell: StreamShell
    place: Workplace
    tree: str
    server: Server | None
    run_ids: list[str]

    def job(self, script: str = "import time; time.sleep(60)", **settings: Any) -> Job:
        run_id = f"run-{uuid.uuid4().hex[:12]}"
        self.run_ids.append(run_id)
        return Job(run_id, "script", 1, (self.place.python, "-c", script), self.tree, **settings)

    def start(self, job: Job) -> Started:
        return launch.start(self.shell, self.place, job)

    def until(self, run_dir: str, condition: Callable[[Evidence], bool], seconds: float = PATIENCE_S) -> Evidence:
        ends = time.monotonic() + seconds
        while not condition(found := observe(self.shell, run_dir)):
            assert time.monotonic() < ends, f"it did not happen in time: {found}"
            time.sleep(0.05)
        return found


@pytest.fixture(params=["local", "ssh"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        server = None
        host = replace(LOCAL, work_dir=str(tmp_path / "a work dir"))
        if request.param == "ssh":
            server = stack.enter_context(sshd.running(tmp_path / "sshd"))
            host = replace(Hosts.load(None, server.config_file).find("box"), python=sys.executable)
        shell = connect(host)
        stack.callback(shell.close)
        place = workplace(shell, host)
        made = Site(host, shell, place, ship(bundled_tree(), shell, place).path, server, [])
        yield made
        for run_id in made.run_ids:
            kill_run(run_id, None)


# Starting --------------------------------------------------------------------------------------------


def test_on_several_hosts_nothing_is_started_before_everything_is_in_place(site: Site, tmp_path: Path) -> None:
    """The second one shares the first one's folder, as two hosts with one disk would."""
    first = site.job("pass", env={"SECRET": "hidden word"})
    second = replace(first, node=1)
    elsewhere = replace(site.place, work_dir=str(tmp_path / "elsewhere"))
    looked: list[str] = []

    with pytest.raises(DraftyardError, match="is one folder for two hosts"):
        launch.start_all([launch.Part(site.shell, site.place, first), launch.Part(site.shell, site.place, second)])
    run_dir = Path(site.place.run_dir(first.run_id))
    assert not (run_dir / "attempts/1/claim").exists()
    assert not (run_dir / "env").exists()
    parts = [launch.Part(site.shell, site.place, first), launch.Part(site.shell, elsewhere, second)]
    launch.start_all(parts, before_spawn=lambda: looked.append(str(list(tmp_path.rglob("claim")))))

    assert looked == ["[]"]
    for part in parts:
        site.until(part.run_dir, lambda found: found.exit is not None)
    assert (Path(parts[1].run_dir) / "attempts/1/events.supervisor1.jsonl").exists()


def test_a_started_job_has_its_files_and_says_so(site: Site) -> None:
    job = site.job(
        "import os; print(os.environ['SECRET'], os.getcwd())",
        spec_json='{"a": [1, "é"]}',
        env={"SECRET": "it's $x"},
        gpus=("5", "6"),
        grace_s=7.5,
        max_duration_s=3600,
        memory_limit_bytes=2**40,
        facts={"recipe": "r"},
    )

    started = site.start(job)
    site.until(started.run_dir, lambda found: found.exit is not None)

    assert started.run_dir == site.place.run_dir(job.run_id)
    assert not started.was_adopted
    assert started.supervisor["argv"] == list(job.argv)
    run = Path(started.run_dir)
    assert json.loads((run / "spec.json").read_text()) == {"a": [1, "é"]}
    body = json.loads((run / "job.json").read_text())
    assert (body["gpus"], body["grace_s"], body["max_duration_s"], body["memory_limit_bytes"]) == (
        ["5", "6"],
        7.5,
        3600,
        2**40,
    )
    assert (run / "attempts/1/stdout.log").read_text() == f"it's $x {site.tree}\n"


def test_a_lost_reply_leads_to_adoption_and_never_to_a_second_start(site: Site, tmp_path: Path) -> None:
    job = site.job(f"open({str(tmp_path / 'count')!r}, 'a').write('x'); import time; time.sleep(60)")

    first = site.start(job)
    again = site.start(job)
    elsewhere = launch.start(LocalShell(), site.place, job)  # another client, another connection

    assert (first.was_adopted, again.was_adopted, elsewhere.was_adopted) == (False, True, True)
    assert first.supervisor == again.supervisor == elsewhere.supervisor
    site.until(first.run_dir, lambda _: (tmp_path / "count").exists())
    assert (tmp_path / "count").read_text() == "x"


@pytest.mark.parametrize(
    ("other", "named"),
    [({"spec_json": '{"lr": 2}'}, "spec"), ({"facts": {"branch": "main"}}, "facts"), ({"argv": ("true",)}, "argv")],
)
def test_another_job_that_has_the_id_there_is_not_taken_for_ours(site: Site, other: dict[str, Any], named: str) -> None:
    """Two databases that share a work folder may give one id to two runs."""
    job = site.job("import time; time.sleep(60)", spec_json='{"lr": 1}', facts={"branch": "slow"})
    site.start(job)

    with pytest.raises(DraftyardError, match=f"another job of the id {job.run_id} .*: its {named} is not ours; .*--id"):
        site.start(replace(job, **other))


def test_a_run_whose_folder_is_away_is_seen_alive_by_its_processes(site: Site) -> None:
    job = site.job("import time; time.sleep(60)")
    started = site.start(job)
    site.until(started.run_dir, lambda found: found.job_alive)
    work_dir = Path(site.place.work_dir)

    work_dir.rename(work_dir.with_name("away"))
    away = observe(site.shell, started.run_dir, attempt=1)
    work_dir.with_name("away").rename(work_dir)
    back = observe(site.shell, started.run_dir, attempt=1)

    assert (away.attempt, away.job_alive, away.supervisor_alive) == (None, True, False)
    assert (back.attempt, back.job_alive, back.supervisor_alive) == (1, True, True)


def test_many_clients_at_once_start_one_job(site: Site, tmp_path: Path) -> None:
    job = site.job(f"open({str(tmp_path / 'count')!r}, 'a').write('x'); import time; time.sleep(60)")
    pids: list[int] = []

    threads = [threading.Thread(target=lambda: pids.append(site.start(job).supervisor["pid"])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(pids) == 4
    assert len(set(pids)) == 1
    site.until(site.place.run_dir(job.run_id), lambda _: (tmp_path / "count").exists())
    assert (tmp_path / "count").read_text() == "x"


def test_a_next_attempt_is_started_beside_the_first(site: Site) -> None:
    job = site.job("print('over')")
    started = site.start(job)
    site.until(started.run_dir, lambda found: found.exit is not None)

    site.start(replace(job, attempt=2))

    found = site.until(started.run_dir, lambda found: found.exit is not None)
    assert found.attempt == 2
    assert observe(site.shell, started.run_dir, attempt=1).exit is not None


def test_a_job_that_cannot_start_is_an_ending_like_any_other(site: Site) -> None:
    started = site.start(replace(site.job(), argv=("/no/such/program",)))

    found = site.until(started.run_dir, lambda found: found.exit is not None)
    assert found.exit is not None
    assert found.exit["reason"] == "start_failed"
    assert "/no/such/program" in found.exit["message"]


def test_a_supervisor_that_does_not_come_up_is_an_error_with_what_it_said(site: Site) -> None:
    tree = Path(site.place.work_dir) / "broken tree"
    shutil.copytree(site.tree, tree)
    (tree / "remote" / "claim.py").write_text("raise RuntimeError('broken on purpose')")
    whole = tree / "remote" / "supervise.py"
    whole.write_text(
        whole.read_text().replace(
            "from remote.claim import Claim", "if '--place' not in sys.argv:\n    from remote.claim import Claim"
        )
    )

    with pytest.raises(DraftyardError, match="broken on purpose"):
        launch.start(site.shell, site.place, replace(site.job(), cwd=str(tree)), timeout_s=6.0)


def test_a_supervisor_killed_before_it_could_speak_is_told_as_that(tmp_path: Path) -> None:
    class Killed(LocalShell):
        def spawn(self, argv: list[str], *, cwd: str) -> None:
            """It was started and is gone."""

    place = Workplace(str(tmp_path), sys.executable, str(tmp_path))
    job = Job("run-killed", "script", 1, ("true",), str(Path(__file__).resolve().parents[2]))

    with pytest.raises(DraftyardError, match=r"within 1 s: it said nothing, so it was killed, .*attempts/1"):
        launch.start(Killed(), place, job, timeout_s=1.0)


def test_a_start_that_is_called_off_leaves_no_secret_behind(site: Site) -> None:
    job = site.job(env={"HF_TOKEN": f"canary-{uuid.uuid4().hex}"})

    def called_off() -> None:
        raise DraftyardError("a stop was asked")

    with pytest.raises(DraftyardError, match="a stop was asked"):
        launch.start(site.shell, site.place, job, before_spawn=called_off)

    assert not Path(site.place.run_dir(job.run_id), "env").exists()


def test_secrets_are_in_no_argument_no_file_that_others_may_read_and_no_repr(site: Site) -> None:
    canary = f"canary-{uuid.uuid4().hex}"
    job = site.job(env={"HF_TOKEN": canary})
    seen: list[str] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            seen.append(subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout)

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = site.start(job)
    is_over.set()
    watcher.join()

    assert seen
    assert not any(canary in listed for listed in seen)
    assert canary not in repr(job)
    holding = [
        path for path in Path(site.place.work_dir).rglob("*") if path.is_file() and canary.encode() in path.read_bytes()
    ]
    assert [path.name for path in holding] == ["env"]
    assert Path(started.run_dir, "env").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("is_granted", [True, False])
def test_where_systemd_answers_the_supervisor_gets_a_scope_and_starts_once_either_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_granted: bool
) -> None:
    """No systemd runs here: both programs are stand-ins that answer as its manual says."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "systemctl").write_text("#!/bin/sh\nexit 0\n")
    grant = 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"' if is_granted else "echo denied >&2; exit 1"
    (programs / "systemd-run").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n{grant}\n')
    for file in programs.iterdir():
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    shell, place = LocalShell(), Workplace(str(tmp_path / "work"), sys.executable, str(tmp_path))
    job = Job(f"run-{uuid.uuid4().hex[:10]}", "script", 1, (sys.executable, "-c", "print('ran')"), "")
    job = replace(job, cwd=ship(bundled_tree(), shell, place).path)

    started = launch.start(shell, place, job)

    while observe(shell, started.run_dir).exit is None:
        time.sleep(0.05)
    assert Path(started.run_dir, "attempts/1/stdout.log").read_text() == "ran\n"
    assert "--scope --quiet --collect -- " in (tmp_path / "asked").read_text()


# Living ----------------------------------------------------------------------------------------------


def test_a_run_outlives_the_connection_and_every_step_is_there_once(tmp_path: Path) -> None:
    with sshd.running(tmp_path / "sshd") as server:
        host = replace(Hosts.load(None, server.config_file).find("box"), python=sys.executable)
        shell = connect(host)
        place = workplace(shell, host)
        tree = ship(bundled_tree(), shell, place).path
        job = Job("survivor", "script", 1, (place.python, "-c", STEPS.format(steps=60, pause=0.03)), tree)
        started = launch.start(shell, place, job)
        events = f"{started.run_dir}/attempts/1/events.rank0.jsonl"

        content = b""
        for number in range(200):
            if number % 4 == 1:
                server.cut()
            with contextlib.suppress(HostError, FileNotFoundError):
                content += shell.read_range(events, len(content), 700)
                found = observe(shell, started.run_dir)
                if found.exit and (file := found.file("events.rank0.jsonl")) and file.size_bytes == len(content):
                    break
            time.sleep(0.02)
        shell.close()
        ends = time.monotonic() + PATIENCE_S
        while (left := _naming(started.run_dir)) and time.monotonic() < ends:
            time.sleep(0.05)

    steps = [decode(line).fields["step"] for line in content.splitlines() if decode(line).kind == "metrics"]
    assert steps == list(range(1, 61))
    assert left == []  # no reader of ours is left on the host, of however many cut connections


def _naming(folder: str) -> list[bytes]:
    """Command lines that name it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.append((process / "cmdline").read_bytes())
    return [line for line in found if folder.encode() in line]


def test_an_observation_costs_as_much_as_a_handful_of_tiny_programs(site: Site) -> None:
    """About 15 ms over loopback on a quiet machine; here against eight forks, whatever else is running."""
    started = site.start(site.job(STEPS.format(steps=1000, pause=0.01)))
    site.until(started.run_dir, lambda found: found.file("events.rank0.jsonl") is not None)

    def quickest(act: Callable[[], object]) -> float:
        times = []
        for _ in range(15):
            began = time.perf_counter()
            act()
            times.append(time.perf_counter() - began)
        return min(times)

    observed_s = quickest(lambda: observe(site.shell, started.run_dir))
    eight_forks_s = quickest(lambda: site.shell.run(["sh", "-c", "/bin/true;" * 8]))
    assert observed_s < 3 * eight_forks_s


def test_evidence_of_a_live_run(site: Site) -> None:
    started = site.start(site.job(STEPS.format(steps=1000, pause=0.05)))
    found = site.until(started.run_dir, lambda found: found.file("events.rank0.jsonl") is not None)

    assert found.attempt == 1
    assert (found.is_claimed, found.supervisor_alive, found.job_alive, found.rebooted) == (True, True, True, False)
    assert found.supervisor == started.supervisor
    assert found.exit is None
    events = found.file("events.rank0.jsonl")
    assert events is not None
    assert events.inode == Path(started.run_dir, "attempts/1/events.rank0.jsonl").stat().st_ino
    assert abs(found.host_time_s - time.time()) < PATIENCE_S  # of decades
    assert found.disk_free_bytes is not None
    assert abs(found.disk_free_bytes - shutil.disk_usage(started.run_dir).free) < 2**30


def test_evidence_of_nothing(site: Site) -> None:
    found = observe(site.shell, site.place.run_dir("never-was"))

    assert (found.attempt, found.exit, found.is_claimed) == (None, None, False)
    assert found.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


# Stopping --------------------------------------------------------------------------------------------


def test_stop_ends_the_whole_tree_and_is_seen_in_the_evidence(site: Site) -> None:
    job = site.job("import subprocess, time; subprocess.Popen(['setsid', 'sleep', '99']); time.sleep(99)")
    started = site.start(job)
    site.until(started.run_dir, lambda _: len(launch.find_processes(site.shell, site.place, run_ids=[job.run_id])) == 2)

    launch.stop(site.shell, started.run_dir, attempt=1, grace_s=1)

    found = site.until(started.run_dir, lambda found: found.exit is not None and not found.supervisor_alive)
    assert found.exit is not None
    assert found.exit["reason"] == "user"
    assert not found.job_alive
    assert launch.find_processes(site.shell, site.place, run_ids=[job.run_id]) == []


def test_a_killed_supervisor_leaves_evidence_and_an_orphan_that_reap_ends(site: Site) -> None:
    job, other = site.job(), site.job()
    started = site.start(job)
    site.start(other)

    os.kill(started.supervisor["pid"], signal.SIGKILL)
    found = site.until(started.run_dir, lambda found: not found.supervisor_alive)

    assert (found.is_claimed, found.exit, found.job_alive) == (True, None, True)
    orphans = launch.find_processes(site.shell, site.place, run_ids=[job.run_id])
    assert [(orphan.pid, orphan.run_id, orphan.attempt) for orphan in orphans] == [
        (started.supervisor["job_pid"], job.run_id, "1")
    ]
    assert orphans[0].rss_bytes > 1_000_000
    assert 0 <= orphans[0].age_s < 3600
    assert launch.reap(site.shell, site.place, names=[job.run_id]) == []
    assert not observe(site.shell, started.run_dir).job_alive
    assert len(launch.find_processes(site.shell, site.place, run_ids=[other.run_id])) == 1


def test_reap_without_runs_ends_nothing(site: Site) -> None:
    job = site.job()
    site.start(job)

    assert launch.reap(site.shell, site.place, names=[]) == []
    assert len(launch.find_processes(site.shell, site.place, run_ids=[job.run_id])) == 1


def test_a_probe_answers_over_every_way(site: Site) -> None:
    facts = launch.probe(site.shell, site.place)

    assert facts["python"]["executable"] == site.place.python
    assert facts["disk"]["path"] == site.place.work_dir


# Reading evidence that was recorded elsewhere --------------------------------------------------------

ALIVE = b"77 (python -m x) S 1 77 77 0 -1 4194560 1 0 0 0 1 0 0 0 20 0 1 0 %d 9 9 9"


def recorded(
    *,
    boot: str = "boot-1",
    ticks: int = 500,
    state: bytes = b"S",
    claim: str = "supervisor 77 500 boot-1\n",
    tail: bytes = b"",
) -> Evidence:
    stat = ALIVE.replace(b") S", b") " + state) % ticks
    return parse(
        b"\x1ehost\n"
        + f"{boot}\n100.5 1\n1700000000.25\n".encode()
        + b"\x1edisk\nFilesystem 1024-blocks Used Available Capacity Mounted on\n/dev/x 100 60 40 60% /data dir\n"
        + b"\x1eattempt\n3\n\x1eclaim\n"
        + claim.encode()
        + b"\x1estat supervisor\n"
        + stat
        + b"\n"
        + tail
        + b"\x1efiles\n120 42 81a4 ./events.rank0.jsonl/\n7 43 8180 ./a name with blanks/\n"
        + b"4096 44 41ed ./events.folder.jsonl/\n0 45 11a4 ./events.pipe.jsonl/\n9 46 a1ff ./events.link.jsonl/\nstat: cannot\n\x1eend\n"
    )


def test_a_live_supervisor_is_known_by_pid_start_and_boot() -> None:
    found = recorded()

    assert (found.attempt, found.supervisor_alive, found.rebooted) == (3, True, False)
    assert (found.uptime_s, found.host_time_s, found.disk_free_bytes) == (100.5, 1700000000.25, 40 * 1024)
    assert {(file.name, file.size_bytes, file.inode) for file in found.files} == {
        ("events.rank0.jsonl", 120, 42),
        ("a name with blanks", 7, 43),
    }


@pytest.mark.parametrize(
    "changes",
    [{"ticks": 501}, {"state": b"Z"}, {"state": b"X"}, {"boot": "boot-2"}, {"claim": ""}, {"claim": "supervisor 77\n"}],
    ids=["pid reused", "zombie", "dead", "rebooted", "no claim", "torn claim"],
)
def test_everything_else_is_a_dead_supervisor(changes: dict[str, Any]) -> None:
    assert not recorded(**changes).supervisor_alive


def test_a_reboot_shows_in_the_boot_id() -> None:
    assert recorded(boot="boot-2").rebooted


@pytest.mark.parametrize(
    ("init", "is_new"),
    [(ALIVE % 501, True), (ALIVE % 500, False), (ALIVE % 3, False), (b"", False), (b"1 (x) S 1", False)],
    ids=["younger", "as old", "a machine's", "hidden", "torn"],
)
def test_a_container_that_was_restarted_shows_in_its_first_process(init: bytes, is_new: bool) -> None:
    """Its boot id is that of the machine, which has not been restarted."""
    assert recorded(tail=b"\x1einit\n" + init + b"\n").rebooted is is_new


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"exit_code": 1', b"null", b"\xff\xfe"])
def test_an_exit_file_that_is_not_whole_counts_as_absent(body: bytes) -> None:
    assert recorded(tail=b"\x1eexit\n" + body).exit is None


def test_no_name_of_a_file_breaks_the_reading_or_forges_another(tmp_path: Path) -> None:
    attempt = tmp_path / "attempts" / "1"
    attempt.mkdir(parents=True)
    for name in ("x\n\u00b2 5 8180 y", "events.rank0.jsonl\n1 2 8180 z", "-n", "two words"):
        (attempt / name).write_bytes(b"1")
    (tmp_path / os.fsdecode(b"attempts/1/events.\xff.jsonl")).write_bytes(b"1")

    found = observe(LocalShell(), str(tmp_path))

    assert [file.name for file in found.files] == ["-n", os.fsdecode(b"events.\xff.jsonl"), "two words"]


def test_an_exit_file_without_end_is_looked_at_in_part(tmp_path: Path) -> None:
    attempt = tmp_path / "attempts" / "1"
    attempt.mkdir(parents=True)
    with (attempt / "exit.json").open("wb") as stream:
        stream.truncate(2**33)

    assert observe(LocalShell(), str(tmp_path)).exit is None


@pytest.mark.parametrize(
    "name", ["\N{SUPERSCRIPT TWO}", "0", "9" * 25, "-1", "1\n"], ids=["superscript", "zero", "huge", "negative", "line"]
)
def test_a_folder_whose_name_is_no_number_of_an_attempt_is_none(tmp_path: Path, name: str) -> None:
    (tmp_path / "attempts" / name).mkdir(parents=True)

    assert observe(LocalShell(), str(tmp_path)).attempt is None


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"[" * 200_000, None),
        (b'{"a":' * 900 + b"1" + b"}" * 900, None),
        (b'{"ended_s": 1' + b"0" * 400 + b"}", {"ended_s": math.inf}),
        (b'{"message": "\\ud800"}', {"message": "?"}),
    ],
    ids=["deep list", "deep object", "huge number", "half a pair"],
)
def test_an_exit_file_is_read_into_what_the_store_can_hold(body: bytes, found: object) -> None:
    assert recorded(tail=b"\x1eexit\n" + body).exit == found


@given(st.binary(max_size=400) | st.text(max_size=100).map(str.encode))
def test_no_output_whatever_it_holds_breaks_the_reading(printed: bytes) -> None:
    parse(printed)
    parse(b"\x1ehost\n" + printed + b"\x1eattempt\n1\n\x1eclaim\n" + printed + b"\x1efiles\n" + printed)
