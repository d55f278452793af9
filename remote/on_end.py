"""What a recipe wants run on the host once a run is over (`life.on_end`): a rented machine switched off, say.

It runs after exit.json is written, so nothing that it does can cost the record of how the job ended.
Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remote.rundir import AttemptDir, RunDir, read_json

LIMIT_S = 60.0
KINDS = ("train", "script")  # a rung of the ladder or an evaluation is not the end of what the machine was rented for
SAID_BYTES = 300


@dataclass(frozen=True)
class Ending:
    """How the attempt ended, in the words that the command is told."""

    run_id: str
    attempt: int
    state: str  # succeeded, failed, stopped
    exit_code: int | None  # 128 + n for a job ended by signal n; None when it never started

    def environment(self) -> dict[str, str]:
        return {
            "DRAFTYARD_RUN_ID": self.run_id,
            "DRAFTYARD_ATTEMPT": str(self.attempt),
            "DRAFTYARD_STATE": self.state,
            "DRAFTYARD_EXIT_CODE": "" if self.exit_code is None else str(self.exit_code),
        }


def ending(run_id: str, attempt: int, exit_file: Mapping[str, Any]) -> Ending:
    """Exit status 0 that nobody asked for is succeeded; a stop that was asked for is stopped, whatever the status."""
    code, number = exit_file["exit_code"], exit_file["signal"]
    if exit_file["reason"] in ("user", "signal", "max_duration", "lonely"):
        state = "stopped"
    else:
        state = "succeeded" if code == 0 else "failed"
    return Ending(run_id, attempt, state, code if number is None else 128 + number)


def wished(run: RunDir, kind: str) -> list[str]:
    """The command of the run's spec, empty where it has none or the job is of a kind that ends nothing."""
    life = (read_json(run.spec_json) or {}).get("life")
    words = life.get("on_end") if isinstance(life, dict) and kind in KINDS else None
    return [str(word) for word in words] if isinstance(words, list) else []


def run_on_end(
    command: list[str], how: Ending, attempt: AttemptDir, environment: Mapping[str, str], limit_s: float = LIMIT_S
) -> str:
    """Runs it, its output in on_end.log; one line that says what became of it. Past `limit_s` its group is killed."""
    log, started = attempt.on_end_log, time.monotonic()
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                cwd=attempt.root,
                env={**environment, **how.environment()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
    except OSError as error:
        return f"life.on_end: cannot start {command[0]}: {error.strerror}"
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        return f"life.on_end: {command[0]} was killed after {limit_s:g} s{_said(log)}"
    took_s = time.monotonic() - started
    return f"life.on_end: {command[0]} ended with {process.returncode} after {took_s:.1f} s{_said(log)}"


def _said(log: Path) -> str:
    """The end of what it printed."""
    try:
        text = log.read_bytes()[-SAID_BYTES:].decode("utf-8", "replace")
    except OSError:
        return ""
    last = " ".join(text.split())
    return f": {last}" if last else ""
