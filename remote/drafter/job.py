"""What every job of the bundled trainer is given: its spec, its folders, its device, its reporter.

It also holds the wish to stop: SIGTERM ends a training after the step it is in, and anything else
at once. The environment is read in `__main__`, never here.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from remote.drafter.measure import Meter
from remote.drafter.ranks import Ranks
from remote.drafter.snapshot import facts_of
from remote.drafter.watch import RankStopped
from remote.report import Reporter
from remote.rundir import AttemptDir, RunDir
from remote.spec import DFlashSpec


@dataclass(frozen=True)
class Job:
    """One start of a job on this host."""

    spec: DFlashSpec
    run: RunDir
    attempt: AttemptDir
    cache: Path  # <work>/cache: converted targets, hidden states, answers
    data_dir: Path  # the recipe's data files
    device: torch.device
    reporter: Reporter
    ranks: Ranks = field(default_factory=Ranks)

    def say(self, text: str) -> None:
        """A line for a person, in the log and among the run's notes."""
        self.log(text)
        self.reporter.note(text)

    def log(self, text: str) -> None:
        """A line in the log alone. Where several ranks write one, it begins with the rank, as `logs --rank` looks for it."""
        say(text if self.ranks.roles.num_ranks == 1 else f"{self.ranks.name}: {text}")


class StopWish:
    """A signal handler: inside `finishing_steps` it only remembers the wish, elsewhere it ends the job at once."""

    def __init__(self) -> None:
        self.is_wanted = False
        self._is_patient = False

    def __call__(self, signal_number: int, frame: FrameType | None) -> None:
        self.is_wanted = True
        if not self._is_patient:
            raise KeyboardInterrupt(f"signal {signal_number}")

    @contextmanager
    def finishing_steps(self) -> Iterator[None]:
        self._is_patient = True
        try:
            yield
        finally:
            self._is_patient = False


@contextmanager
def failures_placed(job: Job, meter: Meter, *, stage: str = "training") -> Iterator[None]:
    """An exception that passes is reported with the part of the step it came from and who held how much memory."""
    try:
        yield
    except Exception as error:
        facts = facts_of(error, job.device, job.attempt.artifacts, job.reporter.writer)
        cause = job.ranks.cause_of(error)
        if isinstance(cause, RankStopped):
            raise cause from error
        job.reporter.failure(cause, stage=meter.current or stage, step=meter.step, facts=facts)
        if cause is error:
            raise
        raise cause from error


def say(text: str) -> None:
    """A line for a person in the log."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def versions() -> dict[str, str]:
    """Versions that change what a run computes."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def devices(device: torch.device) -> list[dict[str, Any]]:
    """The card the job uses, or the processor."""
    if device.type != "cuda":
        return [{"name": platform.processor() or platform.machine(), "kind": "cpu", "threads": torch.get_num_threads()}]
    card = torch.cuda.get_device_properties(device)
    return [{"name": card.name, "kind": "cuda", "index": device.index or 0, "total_bytes": card.total_memory}]
