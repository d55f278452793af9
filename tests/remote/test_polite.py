"""Whom the polite word of a stop reaches: real processes, some in sessions of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from remote.job import Job
from remote.polite import ask_to_end
from remote.processes import members
from tests.remote.jobs import wait_for

RANK = (
    "import os, signal, sys, time\n"
    "def end(*_):\n    open(sys.argv[1] + '.told', 'w').close(); sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, end); open(sys.argv[1] + '.up', 'w').write(str(os.getpid())); time.sleep(60)"
)
LAUNCHER = (
    "import signal, subprocess, sys\n"
    "def end(*_):\n    open('launcher.told', 'w').close()\n"
    "signal.signal(signal.SIGTERM, end)\n"
    f"ranks = [subprocess.Popen([sys.executable, '-c', {RANK!r}, f'rank{{n}}'], start_new_session=True) for n in range(2)]\n"
    "sys.exit(max(rank.wait() for rank in ranks))"
)


@pytest.mark.slow  # three interpreters
@pytest.mark.parametrize(("word", "told"), [("torchrun", ["rank0", "rank1"]), ("train.py", ["launcher"])])
def test_under_a_launcher_its_ranks_are_told_and_elsewhere_the_group(
    tmp_path: Path, word: str, told: list[str]
) -> None:
    argv = [sys.executable, "-c", LAUNCHER, word]
    process = subprocess.Popen(argv, cwd=tmp_path, start_new_session=True)
    ready = [tmp_path / f"rank{number}.up" for number in range(2)]
    wait_for(lambda: all(path.exists() and path.read_text() for path in ready))

    ask_to_end(Job("r", "train", 1, argv, str(tmp_path)), process.pid, set())

    wait_for(lambda: all((tmp_path / f"{name}.told").exists() for name in told))
    assert sorted(path.stem for path in tmp_path.glob("*.told")) == told
    for number in range(2):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((tmp_path / f"rank{number}.up").read_text()), signal.SIGKILL)
    process.wait(timeout=60)


def test_a_rank_that_a_launcher_starts_anew_after_the_stop_is_told_too(tmp_path: Path) -> None:
    argv = ["sh", "-c", "sleep 600 & wait $!; sleep 600 & wait $!", "torchrun"]
    process = subprocess.Popen(argv, cwd=tmp_path, start_new_session=True)
    job = Job("r", "train", 1, argv, str(tmp_path))

    wait_for(lambda: bool(members(parent=process.pid)))
    asked = ask_to_end(job, process.pid, set())
    wait_for(lambda: bool(members(parent=process.pid) - asked))
    again = ask_to_end(job, process.pid, asked)

    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert len(again) == len(asked) == 1


COUNTING = (
    "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: print('told', flush=True))\n"
    "print('up', flush=True); sys.stdin.read()"
)


def test_who_was_told_is_not_told_again(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", COUNTING]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        job = Job("r", "train", 1, argv, str(tmp_path))

        asked = ask_to_end(job, process.pid, set())
        assert process.stdout.readline() == b"told\n"
        again = ask_to_end(job, process.pid, asked)
        process.stdin.close()

        assert again == set()
        assert {pid for pid, _ in asked} == {process.pid}
        assert process.stdout.read() == b""
