"""Rungs that are scripts of the user's own: the exit status decides, everything they say is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from remote.report import Reporter
from remote.rungs import Outcome, climb, run_script
from remote.wire import Event, decode

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    for name, text in {
        "good.py": "print('fine')\n",
        "bad.py": "import sys\nprint('first', file=sys.stderr)\nraise ValueError('too slow')\n",
        "killed.py": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
        "loud.py": "import sys\nsys.stderr.write('x' * 300_000 + '\\nlast words\\n')\nsys.exit(2)\n",
        "large.py": "hoard = bytearray(60_000_000)\n",
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def _events(attempt: Path) -> list[Event]:
    return [decode(line) for line in (attempt / "events.rungs.jsonl").read_bytes().splitlines()]


def test_each_script_is_a_rung_and_a_failed_one_does_not_stop_the_next(scripts: Path) -> None:
    reporter = Reporter(scripts / "1", writer="rungs")

    passed = climb([("a", str(scripts / "bad.py")), ("b", str(scripts / "good.py"))], reporter)

    rungs = [event.fields for event in _events(scripts / "1") if event.kind == "rung"]
    assert not passed
    assert [(rung["name"], rung["passed"]) for rung in rungs] == [("a", False), ("b", True)]
    assert rungs[0]["message"] == "exit status 1: ValueError: too slow"
    assert rungs[1]["values"]["duration_s"] > 0


@pytest.mark.parametrize(
    ("script", "message"),
    [("good.py", ""), ("killed.py", "signal SIGKILL"), ("loud.py", "exit status 2: last words")],
)
def test_how_a_script_ended_is_said_in_one_line(scripts: Path, script: str, message: str) -> None:
    assert run_script(str(scripts / script)).message == message


def test_the_peak_is_that_of_the_script(scripts: Path) -> None:
    small, large = run_script(str(scripts / "good.py")), run_script(str(scripts / "large.py"))

    assert large.peak_bytes - small.peak_bytes > 40_000_000


def test_everything_a_script_writes_goes_through_whole(scripts: Path) -> None:
    (scripts / "run").mkdir()
    command = [sys.executable, "-m", "remote.rungs", str(scripts / "run"), f"loud={scripts / 'loud.py'}"]

    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "DRAFTYARD_ATTEMPT": "1"}, capture_output=True, check=False
    )

    assert done.returncode == 1
    assert done.stderr == b"x" * 300_000 + b"\nlast words\n"
    finals = [event.fields for event in _events(scripts / "run" / "attempts" / "1") if event.kind == "final"]
    assert finals == [{"outcome": "failed", "exit_code": 1}]


def test_a_status_without_a_last_line_is_still_said() -> None:
    assert Outcome(exit_code=3, duration_s=0.1, peak_bytes=0, last_line="").message == "exit status 3"
