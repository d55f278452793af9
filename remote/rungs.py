"""Climbs the rungs of a trainer of the user's own: each a script, in a process of its own, one after the other.

    python -m remote.rungs RUN_DIR NAME=FILE…

A rung has passed when its script exits with status 0. Its time, its peak memory and the last line it
wrote to stderr are reported; everything it writes goes through to this process's own streams, whole.
A failed rung does not stop the next one. It looks into no script and knows no framework.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from remote.report import Reporter
from remote.rundir import RunDir

TAIL_BYTES = 64 * 1024  # of stderr, for the one line that is reported


@dataclass(frozen=True)
class Outcome:
    """How one script ended; `peak_bytes` is the resident memory of its largest process."""

    exit_code: int  # negative: ended by that signal
    duration_s: float
    peak_bytes: int
    last_line: str

    @property
    def message(self) -> str:
        if self.exit_code == 0:
            return ""
        how = (
            f"exit status {self.exit_code}" if self.exit_code > 0 else f"signal {signal.Signals(-self.exit_code).name}"
        )
        return f"{how}: {self.last_line}" if self.last_line else how


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m remote.rungs", description="Climbs rungs that are scripts.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("rungs", nargs="+", metavar="NAME=FILE")
    options = parser.parse_args(arguments)
    attempt = RunDir(options.run_dir).attempt(int(os.environ.get("DRAFTYARD_ATTEMPT", "1")))
    reporter = Reporter(attempt.root, writer="rungs")
    with reporter.job():
        reporter.start()
        if not climb([word.partition("=")[::2] for word in options.rungs], reporter):
            raise SystemExit(1)
    return 0


def climb(rungs: list[tuple[str, str]], reporter: Reporter) -> bool:
    """Every rung, in order; whether all have passed."""
    all_passed = True
    for name, file in rungs:
        reporter.stage(f"rung {name}")
        outcome = run_script(file)
        values = {"duration_s": outcome.duration_s, "peak_bytes": outcome.peak_bytes}
        reporter.memory(f"rung {name}", allocated_bytes=outcome.peak_bytes)
        reporter.rung(name, passed=outcome.exit_code == 0, values=values, message=outcome.message)
        all_passed = all_passed and outcome.exit_code == 0
    return all_passed


# Linux starts a process's peak at that of its parent (exec keeps the old one). So the script's parent is
# this lean interpreter, of some 10 MB, and not the caller, which may hold a gigabyte of torch.
_LEAN_PARENT = """
import os, sys
pid = os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ)
_, status, usage = os.wait4(pid, 0)
os.write(int(sys.argv[1]), b"%d %d" % (status, usage.ru_maxrss * 1024))  # Linux counts in KiB
"""


def run_script(file: str) -> Outcome:
    """One script with this interpreter, in this process's folder and environment."""
    began_s, tail = time.monotonic(), b""
    told_fd, tell_fd = os.pipe()
    command = [sys.executable, "-I", "-S", "-c", _LEAN_PARENT, str(tell_fd), sys.executable, file]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, pass_fds=[tell_fd]) as process:
        os.close(tell_fd)
        assert process.stderr is not None
        while chunk := os.read(process.stderr.fileno(), TAIL_BYTES):
            _write_all(2, chunk)
            tail = (tail + chunk)[-TAIL_BYTES:]
    with os.fdopen(told_fd, "rb") as told:
        words = told.read().split()
    # Without a word the parent itself was ended, by the same signal as its script.
    status, peak_bytes = (os.waitstatus_to_exitcode(int(words[0])), int(words[1])) if words else (process.returncode, 0)
    lines = [line for line in tail.decode("utf-8", errors="replace").splitlines() if line.strip()]
    return Outcome(status, time.monotonic() - began_s, peak_bytes, lines[-1].strip() if lines else "")


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


if __name__ == "__main__":
    sys.exit(main())
