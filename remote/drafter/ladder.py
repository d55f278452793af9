"""Climbs the smoke ladder: each rung in a process of its own, one after the other.

A rung that dies takes nothing with it: its process writes `events.rung-<name>.jsonl`, and where a
signal ended it before it could say so, this one reports it as failed. One failed rung does not stop
the next; the job's exit status says whether all have passed.

On a card the next rung's process loads its libraries while the one before climbs, and touches nothing until it is
told to: a third of a short rung is loading.
"""

from __future__ import annotations

import importlib
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import torch

from remote.drafter.job import Job, failures_placed, say
from remote.drafter.measure import Meter
from remote.drafter.ranks import Place
from remote.drafter.ranks_rung import NUM_PROCESSES, run_ranks
from remote.drafter.smoke import RUNGS, run_rung
from remote.report import UserFault
from remote.rundir import read_json, write_json
from remote.rungs import climb as climb_scripts
from remote.spec import RANKS_RUNG, REAL_RUNG

RUNG_FAILED = 3  # exit status of a rung's process that has reported its rung as failed

# Rungs that need two processes: the first leaves something for the second.
_BEFORE = {"checkpoint": "checkpoint_save"}

_BUNDLED = (*RUNGS, RANKS_RUNG, REAL_RUNG)
_RESULT = "ranks-rung.json"  # left by the first of several processes; the ladder alone knows how all of them have ended


def climb(job: Job, names: Sequence[str], *, cap_bytes: int | None) -> bool:
    """Every named rung (none named: all of the recipe's); whether all have passed."""
    smoke = job.spec.smoke
    wanted = list(names) or [*smoke.rungs, *smoke.scripts]
    unknown = [name for name in wanted if name not in _BUNDLED and name not in smoke.scripts]
    if unknown:
        raise UserFault(f"rung {unknown[0]} is unknown; this recipe has {', '.join([*smoke.rungs, *smoke.scripts])}")
    passed = []
    halves = [half for name in wanted if name in _BUNDLED for half in _halves(name)]
    with closing(_Processes(job, halves, cap_bytes=cap_bytes)) as processes:
        for number, name in enumerate(wanted):
            started_s = time.monotonic()
            job.reporter.stage(f"rung {name}")
            job.reporter.progress("smoke ladder", done=number, total=len(wanted), unit="rungs")
            if name in smoke.scripts:
                passed.append(climb_scripts([(name, smoke.scripts[name])], job.reporter))
            else:
                passed.append(_climb_one(job, name, processes))
            say(f"rung {name}: {'passed' if passed[-1] else 'FAILED'}, {time.monotonic() - started_s:.1f} s")
    job.reporter.progress("smoke ladder", done=len(wanted), total=len(wanted), unit="rungs")
    return all(passed)


def run_one(job: Job, name: str, place: Place | None = None) -> int:
    """The rung, in this process; its exit status. Everything that escapes the rung is its failure.

    `place`: of one process among several, of which the first leaves what it measured, or why it failed, to the ladder.
    """
    meter, speaks = Meter(job.device), place is None or place.rank == 0
    try:
        with failures_placed(job, meter, stage=name):
            values = _run(job, name, place, meter)
    except Exception as error:  # noqa: BLE001  # kept whole by failures_placed; here it becomes the rung's result
        if speaks:
            _tell(job, name, passed=False, values=meter.peak_values(), message=_one_line(error))
        meter.say_peaks(job.reporter)
        if isinstance(error, UserFault):
            sys.stderr.write(f"{error}\n")
        else:
            sys.excepthook(type(error), error, error.__traceback__)
        return RUNG_FAILED
    if name not in _BEFORE.values() and speaks:
        _tell(job, name, passed=True, values=values)
    return 0


def _tell(job: Job, half: str, *, passed: bool, values: Mapping[str, float], message: str = "") -> None:
    """The rung's result: reported, or of several processes kept until all have ended."""
    if half == RANKS_RUNG:
        write_json(_result_of_ranks(job), {"passed": passed, "values": dict(values), "message": message})
    else:
        job.reporter.rung(_rung_of(half), passed=passed, values=values, message=message)


def _run(job: Job, name: str, place: Place | None, meter: Meter) -> dict[str, float]:
    if name == RANKS_RUNG:
        return run_ranks(job, place, meter)
    return _run_real(job, meter) if name == REAL_RUNG else run_rung(job, name, meter)


def _result_of_ranks(job: Job) -> Path:
    job.attempt.artifacts.mkdir(parents=True, exist_ok=True)
    return job.attempt.artifacts / _RESULT


def _run_real(job: Job, meter: Meter) -> dict[str, float]:
    # Loaded only now: the other rungs need no target, and transformers costs each of their processes two seconds.
    real_rows = importlib.import_module("remote.drafter.real_rows")
    values: dict[str, float] = real_rows.run_real(job, meter)
    return values


class _Processes:
    """One process a half of a rung, in their order. One that was started early waits for a line on its stdin."""

    def __init__(self, job: Job, halves: Sequence[str], *, cap_bytes: int | None) -> None:
        self._job, self._cap_bytes = job, cap_bytes
        self._next = dict(itertools.pairwise(halves))
        self._early: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, half: str) -> int:
        """Its exit status."""
        process = self._early.pop(half, None) or self._start(half)
        following = self._next.get(half)
        if following not in (None, RANKS_RUNG) and self._job.device.type == "cuda":
            self._early[following] = self._start(following)
        process.communicate(b"go\n")
        return process.returncode

    def close(self) -> None:
        """Those that were never told to go see the end of their stdin, and end."""
        for process in self._early.values():
            process.communicate()

    def _start(self, half: str) -> subprocess.Popen[bytes]:
        cap = [] if self._cap_bytes is None else ["--cap", str(self._cap_bytes)]
        rung = ["-m", "remote.drafter", "rung", str(self._job.run.root), half, *cap]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_PROCESSES)]
        command = [sys.executable, *(launcher if half == RANKS_RUNG else []), *rung]
        command += [] if half == RANKS_RUNG else ["--when-told"]
        return subprocess.Popen(command, stdin=subprocess.PIPE)


def _climb_one(job: Job, name: str, processes: _Processes) -> bool:
    num_cards = torch.cuda.device_count() if job.device.type == "cuda" else NUM_PROCESSES
    if name == RANKS_RUNG and num_cards < NUM_PROCESSES:
        job.reporter.rung(name, passed=False, message=f"it wants {NUM_PROCESSES} GPUs, one for each process, and has 1")
        return False
    if name == RANKS_RUNG:
        return _climb_ranks(job, processes)
    for half in _halves(name):
        status = processes.run(half)
        if status not in (0, RUNG_FAILED):
            job.reporter.rung(
                name, passed=False, message=f"its process ended by {_how(status)} before it could say why"
            )
        if status != 0:
            return False
    return True


def _climb_ranks(job: Job, processes: _Processes) -> bool:
    """Told once, when the launcher has ended: its status is 1 whatever the processes ended with, 0 where all ended well."""
    file = _result_of_ranks(job)
    file.unlink(missing_ok=True)
    status = processes.run(RANKS_RUNG)
    told = read_json(file) or {}
    has_passed, values, message = told.get("passed") is True, told.get("values"), str(told.get("message", ""))
    if not told:
        message = f"its processes ended by {_how(status)} before the first could say why"
    elif has_passed and status != 0:
        message = f"one of its processes ended badly after the first had passed: the launcher ended by {_how(status)}"
    has_passed = has_passed and status == 0
    job.reporter.rung(RANKS_RUNG, passed=has_passed, values=values, message=message)
    file.unlink(missing_ok=True)
    return has_passed


def _halves(name: str) -> list[str]:
    return [_BEFORE[name], name] if name in _BEFORE else [name]


def _rung_of(half: str) -> str:
    return next((name for name, before in _BEFORE.items() if before == half), half)


def _one_line(error: Exception) -> str:
    if isinstance(error, UserFault):
        return str(error)
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _how(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
