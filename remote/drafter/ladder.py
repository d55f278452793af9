"""Climbs the smoke ladder: each rung in a process of its own, one after the other.

A rung that dies takes nothing with it: its process writes `events.rung-<name>.jsonl`, and where a
signal ended it before it could say so, this one reports it as failed. One failed rung does not stop
the next; the job's exit status says whether all have passed.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

from remote.drafter.job import Job, failures_placed, say
from remote.drafter.measure import Meter
from remote.drafter.smoke import RUNGS, run_rung
from remote.report import UserFault
from remote.rungs import climb as climb_scripts

RUNG_FAILED = 3  # exit status of a rung's process that has reported its rung as failed

# Rungs that need two processes: the first leaves something for the second.
_BEFORE = {"checkpoint": "checkpoint_save"}


def climb(job: Job, names: Sequence[str], *, cap_bytes: int | None) -> bool:
    """Every named rung (none named: all of the recipe's); whether all have passed."""
    smoke = job.spec.smoke
    wanted = list(names) or [*smoke.rungs, *smoke.scripts]
    unknown = [name for name in wanted if name not in RUNGS and name not in smoke.scripts]
    if unknown:
        raise UserFault(f"rung {unknown[0]} is unknown; this recipe has {', '.join([*smoke.rungs, *smoke.scripts])}")
    passed = []
    for number, name in enumerate(wanted):
        job.reporter.stage(f"rung {name}")
        job.reporter.progress("smoke ladder", done=number, total=len(wanted), unit="rungs")
        if name in smoke.scripts:
            passed.append(climb_scripts([(name, smoke.scripts[name])], job.reporter))
        else:
            passed.append(_climb_one(job, name, cap_bytes=cap_bytes))
        say(f"rung {name}: {'passed' if passed[-1] else 'FAILED'}")
    job.reporter.progress("smoke ladder", done=len(wanted), total=len(wanted), unit="rungs")
    return all(passed)


def run_one(job: Job, name: str) -> int:
    """The rung, in this process; its exit status. Everything that escapes the rung is its failure."""
    meter = Meter(job.device)
    try:
        with failures_placed(job, meter, stage=name):
            values = run_rung(job, name, meter)
    except Exception as error:  # noqa: BLE001  # kept whole by failures_placed; here it becomes the rung's result
        job.reporter.rung(_rung_of(name), passed=False, values=meter.peak_values(), message=_one_line(error))
        meter.say_peaks(job.reporter)
        if isinstance(error, UserFault):
            sys.stderr.write(f"{error}\n")
        else:
            sys.excepthook(type(error), error, error.__traceback__)
        return RUNG_FAILED
    if name not in _BEFORE.values():
        job.reporter.rung(name, passed=True, values=values)
    return 0


def _climb_one(job: Job, name: str, *, cap_bytes: int | None) -> bool:
    for half in [_BEFORE[name], name] if name in _BEFORE else [name]:
        cap = [] if cap_bytes is None else ["--cap", str(cap_bytes)]
        command = [sys.executable, "-m", "remote.drafter", "rung", str(job.run.root), half, *cap]
        status = subprocess.run(command, check=False).returncode
        if status not in (0, RUNG_FAILED):
            job.reporter.rung(
                name, passed=False, message=f"its process ended by {_how(status)} before it could say why"
            )
        if status != 0:
            return False
    return True


def _rung_of(half: str) -> str:
    return next((name for name, before in _BEFORE.items() if before == half), half)


def _one_line(error: Exception) -> str:
    if isinstance(error, UserFault):
        return str(error)
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _how(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
