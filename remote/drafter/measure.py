"""Time and peak memory of the parts of a step, without waiting for the device inside it.

On CUDA the parts are bracketed by events that are read at log time, and peaks come from the
allocator's own books, which the host keeps and can reset at any moment. On a CPU the clock is the
process's and the peak is VmHWM, the most RAM the process held since it was reset, less the pages of
files it has mapped (libraries, safetensors): the kernel takes those back whenever memory is short, and
the plan counts none of them. What is left, heap and shared memory, is what a tensor is made of. Where
the kernel keeps no such books, or forbids the reset, a stage has no peak: one of another stage would be wrong.

It measures; what a number means (a plan exceeded, a queue too slow) is said elsewhere.
"""

from __future__ import annotations

import ctypes
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from remote.report import Reporter

# The memory stage of each timed part: before the steps (`target`, whose layers are gone when the drafter is made, unless hidden
# states are computed online), of each step, and after the last one.
STAGES = {
    "target": "target", "load": "load", "forward": "forward", "backward": "backward", "optimizer": "step",
    "evaluating": "evaluating",
}  # fmt: skip
_GROWTH = 1.01  # a peak is said again when it grew by more than a hundredth


@dataclass(frozen=True)
class Peak:
    """The most memory in use at one moment of a stage."""

    allocated_bytes: int | None  # CUDA: tensors; CPU: the process's own memory in RAM, without mapped files
    reserved_bytes: int | None = None  # CUDA: what the allocator holds from the driver


class Meter:
    """Sums seconds and keeps peaks per part, between one `seconds` call and the next."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.step: int | None = None  # set by the loop; a failure says it
        self.current: str | None = None  # the part that runs; a failure inside it leaves its name here
        self.peaks: dict[str, Peak] = {}  # by stage, over the whole life of the meter
        self._said: dict[str, Peak] = {}
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._started_s = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Brackets one part of a step; parts follow one another, they do not nest."""
        stage = STAGES.get(name)
        is_known = stage is not None and _reset_peak(self.device)
        self.current = stage or name
        started_s, opening = time.perf_counter(), self._event()
        yield
        self.current = None
        closing = self._event()
        if opening is not None and closing is not None and name != "wait":  # waiting is the host's own time
            self._events.append((name, opening, closing))
        else:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started_s
        if stage is not None:
            self._keep(stage, read_peak(self.device) if is_known else Peak(None))

    def seconds(self) -> dict[str, float]:
        """Seconds by part since the last call, and `step`: all of the time that passed. Waits for the device."""
        if self._events:
            torch.cuda.synchronize(self.device)
        for name, opening, closing in self._events:
            self._seconds[name] = self._seconds.get(name, 0.0) + opening.elapsed_time(closing) / 1000
        now_s = time.perf_counter()
        seconds = self._seconds | {"step": now_s - self._started_s}
        self._seconds, self._events, self._started_s = {}, [], now_s
        return seconds

    def say_peaks(self, reporter: Reporter) -> None:
        """Reports every stage's peak that is new or grew."""
        for stage, peak in self.peaks.items():
            said = self._said.get(stage)
            if said is None or (peak.allocated_bytes or 0) > _GROWTH * (said.allocated_bytes or 0):
                self._said[stage] = peak
                reporter.memory(
                    stage,
                    allocated_bytes=peak.allocated_bytes,
                    gpu=gpu_index(self.device),
                    reserved_bytes=peak.reserved_bytes,
                    driver_bytes=driver_bytes(self.device),
                )

    def peak_values(self) -> dict[str, float]:
        """Every peak as a number with a name: `<stage>_allocated_bytes`, `<stage>_reserved_bytes`."""
        named = {f"{stage}_allocated_bytes": peak.allocated_bytes for stage, peak in self.peaks.items()}
        named |= {f"{stage}_reserved_bytes": peak.reserved_bytes for stage, peak in self.peaks.items()}
        return {name: value for name, value in named.items() if value is not None}

    def _keep(self, stage: str, peak: Peak) -> None:
        old = self.peaks.get(stage, Peak(None))
        self.peaks[stage] = Peak(
            max(old.allocated_bytes or 0, peak.allocated_bytes or 0) or None,
            max(old.reserved_bytes or 0, peak.reserved_bytes or 0) or None,
        )

    def _event(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


def read_peak(device: torch.device) -> Peak:
    """The peak since the last reset."""
    if device.type == "cuda":
        return Peak(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
    highest, mapped = _status_bytes("VmHWM"), _status_bytes("RssFile")
    return Peak(None if highest is None or mapped is None else highest - mapped)


def memory_facts(device: torch.device) -> dict[str, int | None]:
    """Who holds how much now, the most there was, and the limit: for a failure."""
    if device.type != "cuda":
        soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
        resident_bytes = _status_bytes("VmRSS")
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kept in steps: may lag a few pages
        return {
            "resident_bytes": resident_bytes,
            "data_bytes": _status_bytes("VmData"),  # what the limit is held against, touched or not
            "peak_bytes": max(peak_bytes, resident_bytes or 0),  # resident, of the whole life
            "limit_bytes": None if soft == resource.RLIM_INFINITY else soft,
        }
    return {
        "allocated_bytes": torch.cuda.memory_allocated(device),
        "reserved_bytes": torch.cuda.memory_reserved(device),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
        "driver_bytes": driver_bytes(device),
        "capacity_bytes": torch.cuda.get_device_properties(device).total_memory,
    }


def driver_bytes(device: torch.device) -> int | None:
    """What the driver says is in use on the whole card, other processes included; None without one."""
    if device.type != "cuda":
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes


def gpu_index(device: torch.device) -> int | None:
    """The card as this process numbers it."""
    if device.type != "cuda":
        return None
    return torch.cuda.current_device() if device.index is None else device.index


def give_back(device: torch.device) -> None:
    """Hands freed memory back to the driver, or to the system, which allocators do not do by themselves."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    with suppress(AttributeError):  # glibc has it, musl does not
        ctypes.CDLL(None).malloc_trim(0)


def _reset_peak(device: torch.device) -> bool:
    """Whether the next `read_peak` speaks of what comes now and of nothing before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return True
    return False


def _status_bytes(field: str) -> int | None:
    """A `kB` line of /proc/self/status; None where there is no such file."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None
