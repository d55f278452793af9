"""SIGTERM and SIGHUP as interrupts: heard once, never lost, and never a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import tomllib

from orchestrator.interrupts import Interrupted, heard_as_interrupts
from tests.test_architecture import ROOT

LOST = """
import os, signal, time
from orchestrator.interrupts import heard_as_interrupts

class Deaf:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)

with heard_as_interrupts({grace}):
    Deaf()  # Python lets no exception out of there
    os.kill(os.getpid(), signal.SIGTERM)
    print("a second one at once is the same one", flush=True)
    time.sleep({pause_s})
    os.kill(os.getpid(), signal.SIGTERM)
    print("lives on")
"""
OUTSIDE = """
import os, signal, sys
from orchestrator import cli

def answer(arguments):
    if {is_before}:
        os.kill(os.getpid(), signal.SIGTERM)
    return 0

class Late:
    def __enter__(self):
        pass
    def __exit__(self, *_):
        os.kill(os.getpid(), signal.SIGTERM)

cli._run = answer
cli._quiet_in_a_prompt = Late
cli.main([])
"""


def _ran(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


def test_a_signal_whose_exception_was_lost_does_not_make_the_process_deaf() -> None:
    """Raised in a destructor it reaches nobody, and what cleans up may hang: only SIGKILL ended it then."""
    done = _ran(LOST.format(grace="grace_s=0.2", pause_s=0.3))

    assert done.returncode == -signal.SIGTERM, done.stderr
    assert done.stdout == "a second one at once is the same one\n"


def test_what_cleans_up_is_given_time_before_a_second_signal_ends_it() -> None:
    done = _ran(LOST.format(grace="grace_s=60", pause_s=0.3))

    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "lives on"), done.stderr


@pytest.mark.parametrize("is_before", [True, False], ids=["where nothing answers", "as all is done"])
def test_a_signal_outside_of_what_answers_it_ends_the_process_without_a_traceback(is_before: bool) -> None:
    done = _ran(OUTSIDE.format(is_before=is_before))

    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_ctrl_c_while_the_command_is_loaded_is_silent(tmp_path: Path, is_ignored: bool) -> None:
    """A person who changes their mind at once saw the traceback of an import; nohup's Ctrl-C stays ignored."""
    loads = "import os, signal; os.kill(os.getpid(), signal.SIGINT); raise SystemExit('went on')\n"
    (tmp_path / "click.py").write_text(loads)
    entry = EntryPoint(
        "draftyard", tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["draftyard"], ""
    )
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" if is_ignored else ""
    code += f"from {entry.module} import {entry.attr}; {entry.attr}()"

    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False, timeout=60
    )

    assert (done.returncode, done.stderr) == ((1, "went on\n") if is_ignored else (-signal.SIGINT, ""))


def test_a_ctrl_c_is_heard_again_once_the_command_is_loaded() -> None:
    code = "import os, signal\nfrom orchestrator import cli, entry\n"
    code += "cli.main = lambda: print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)\nentry.main()"

    assert _ran(code).stdout == "True\n"


@pytest.fixture
def defaults() -> Iterator[None]:
    """As a process begins: a test before this one may have left handlers in it."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not of Python's making


@pytest.mark.usefixtures("defaults")
def test_no_handler_is_left_behind_by_a_signal() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        with pytest.raises(Interrupted), heard_as_interrupts() as came:
            signal.raise_signal(number)
        assert came == [number]
        assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
