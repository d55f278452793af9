"""The whole path under stress: a run over a real SSH server whose link is cut and whose follower is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from remote.rundir import RunDir
from remote.wire import decode
from tests import sshd
from tests.orchestrator.yard import Yard


def follower_pids(db: Path) -> list[int]:
    """The follower of this database: the process that holds it open and says `follow` in its arguments."""
    listed = subprocess.run(["ps", "-eww", "-o", "pid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 1) for line in listed.splitlines()]
    return [int(pid) for pid, arguments in rows if "follow" in arguments and str(db) in arguments]


def step_of(yard: Yard, run_id: str) -> int:
    return yard.json("show", run_id)["run"]["step"] or 0


def wait_for_step(yard: Yard, run_id: str, step: int, deadline_s: float = 120) -> None:
    end = time.monotonic() + deadline_s
    while step_of(yard, run_id) < step:
        assert time.monotonic() < end, f"step {step} did not arrive in {deadline_s:g} s"
        time.sleep(0.2)


def steps_on(host: Path, run_id: str) -> list[int]:
    """Of the metrics that the run wrote on its host."""
    lines = RunDir(host / "runs" / run_id).attempt(1).events("rank0").read_bytes().splitlines()
    return [event.fields["step"] for event in map(decode, lines) if event.kind == "metrics"]


@pytest.mark.slow
def test_a_cut_link_and_a_killed_follower_lose_and_double_no_step(yard: Yard, tmp_path: Path) -> None:
    """The run ends by a stop alone, so no step of this is too late on any machine."""
    with sshd.running(tmp_path / "sshd", alias="box") as server:
        hosts = server.hosts_yaml(work_dir=json.dumps(str(tmp_path / "there")), python=json.dumps(sys.executable))
        (yard.root / "hosts.yaml").write_text(hosts)
        assert yard.run("launch", "tiny", "-b", "slow", "--host", "box", "--force", "a test of lost links") == 0, (
            yard.err
        )
        run_id = yard.json("ls")["runs"][0]["id"]
        db = yard.root / "runs.db"

        wait_for_step(yard, run_id, 20)
        server.cut()
        wait_for_step(yard, run_id, step_of(yard, run_id) + 1)
        killed = follower_pids(db)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        step_without_follower = step_of(yard, run_id)
        assert yard.run("wait", run_id, "--timeout", "1s") == 6, yard.err  # starts another one
        wait_for_step(yard, run_id, step_without_follower + 1)
        assert yard.run("stop", run_id) == 0, yard.err

        values = yard.json("metrics", run_id, "loss")["values"]["loss"]
        kept = [value["step"] for value in values]
        assert len(killed) == 1, "one follower per database"
        assert kept == list(range(1, kept[-1] + 1))
        assert kept == steps_on(tmp_path / "there", run_id)
        assert yard.json("show", run_id)["run"]["state"] == "stopped"
        assert (yard.root / "logs").is_dir()
