"""GPU samples for a supervisor: what nvidia-smi says every few seconds, however slow it is.

nvidia-smi runs as a child of the supervisor's own loop, never waited for: it takes over 30 s in some
containers. A host without it costs one look at the PATH.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from remote.probe import SAMPLE_FIELDS, give_up, parse_samples, query_command
from remote.report import Reporter

SAMPLE_S = 10.0
LIMIT_S = 60.0
FIRST_LIMIT_S = LAST_LIMIT_S = 60.0  # over 30 s have been seen
BACK_S = 30.0  # drivers give memory back some time after the last process that held it
BACK_LOOK_S = 1.0
HELD_BYTES = 256 * 2**20  # less is what a driver keeps to itself, or a screen that was drawn
HEALTH_FIELDS = ("index", "uuid", "pci.bus_id", "ecc.errors.uncorrected.volatile.total")


@dataclass(frozen=True)
class Answer:
    exit_code: int
    text: str  # both streams together


def ask(command: list[str], limit_s: float) -> Answer | None:
    """What a program prints; None when it cannot be started or takes too long, however deep it hangs."""
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError:
        return None
    try:
        printed = child.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        give_up(child)
        return None
    return Answer(child.returncode, printed.decode("utf-8", "replace"))


class GpuSampler:
    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._program = shutil.which("nvidia-smi")
        self._child: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._next = 0.0
        self._own: set[str] = set()  # the job's cards, by index and UUID as the job names them
        self.used_before: list[dict[str, Any]] | None = None  # what those cards held before the job was started
        self.before: str | None = None  # what nvidia-smi said of the cards' health when the job began

    def turn(self, now: float) -> None:
        """Starts the next question when it is due; gives up on one that takes too long."""
        if self._child is not None:
            if now - self._started > LIMIT_S:
                self._child.kill()
        elif self._program is not None and now >= self._next:
            self._next, self._started = now + SAMPLE_S, now
            try:
                self._child = self._ask(self._program)
            except OSError:
                self._program = None

    def take(self, pid: int, exit_code: int) -> bool:
        """The supervisor reaped a child; whether it was ours: then its answer becomes an event."""
        child = self._child
        if child is None or child.pid != pid:
            return False
        self._child, child.returncode = None, exit_code
        assert child.stdout is not None
        with child.stdout:
            printed = child.stdout.read()
        if self.before is None:
            self.before, self._next = printed.decode("utf-8", "replace"), 0.0
        elif exit_code == 0:
            self._report(printed.decode("utf-8", "replace"))
        return True

    def stop(self) -> None:
        if self._child is not None:
            give_up(self._child)
            self._child = None

    def first(self, gpus: Sequence[str], limit_s: float = FIRST_LIMIT_S) -> None:
        """Asks what the job's cards hold before it is started: nothing of its own can be in that answer."""
        self._own = set(gpus)
        if self._own:
            samples = self._look(limit_s)
            self.used_before = None if samples is None else [gpu for gpu in samples if self._is_own(gpu)]

    def last(self, limit_s: float = LAST_LIMIT_S, back_s: float = BACK_S) -> list[dict[str, Any]] | None:
        """What the GPUs hold once the job's last process is gone: looks until its cards hold no more than before the
        job, `back_s` at most. None where nvidia-smi is not there or gives no answer."""
        ends = time.monotonic() + back_s
        while (samples := self._look(limit_s)) is not None:
            if not any(map(self._holds_more, samples)) or time.monotonic() >= ends:
                break
            time.sleep(BACK_LOOK_S)
        return samples

    def _look(self, limit_s: float) -> list[dict[str, Any]] | None:
        if self._program is None:
            return None
        answer = ask(query_command(self._program, "gpu", SAMPLE_FIELDS), limit_s)
        return None if answer is None or answer.exit_code else self._report(answer.text)

    def _is_own(self, gpu: dict[str, Any]) -> bool:
        return bool({gpu["uuid"], str(gpu["index"])} & self._own)

    def _holds_more(self, gpu: dict[str, Any]) -> bool:
        before = [old["used_bytes"] for old in self.used_before or () if old["uuid"] == gpu["uuid"]]
        is_told = bool(before) and before[0] is not None and gpu["used_bytes"] is not None
        return is_told and gpu["used_bytes"] - before[0] > HELD_BYTES

    def _ask(self, program: str) -> subprocess.Popen[bytes]:
        """The first question is about health: what is wrong already is not the job's."""
        command = query_command(program, "gpu", HEALTH_FIELDS if self.before is None else SAMPLE_FIELDS)
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def _report(self, printed: str) -> list[dict[str, Any]]:
        samples = parse_samples(printed)
        if samples:
            self._reporter.gpu(samples)
        return samples
