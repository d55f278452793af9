"""Clocks of `benchmarks.step`: marks on the device's own time line, peaks between them, the ceiling, and one step kernel by kernel."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

# What the kernels of attention are called, in every variant; a gathered copy of keys is not among them.
ATTENTION_KERNELS = (
    "forward_kernel", "query_gradient_kernel", "context_gradient_kernel", "own_gradient_kernel",  # this project's
    "flex", "fmha", "flash", "mem_eff", "cudnn_generated", "sdpa",
)  # fmt: skip


GIB = 1024**3
CEILING_SIZE = {"cuda": 8192, "cpu": 256}  # of the square product whose rate is the ceiling
MOST_LISTED, LONGEST_NAME = 25, 120  # a template's name may take 400 characters
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


@dataclass(frozen=True)
class Timed:
    """A kernel, or a product of one shape, over one step."""

    name: str
    calls: int
    ms: float
    tflop_s: float | None = None  # of a product


@dataclass(frozen=True)
class Peak:
    """What the allocator had given out, in GiB: at most within one part of a step, and when it ended."""

    highest: float
    left: float


class _Marks:
    """Call it with the name of the part that ends now; nothing waits until `milliseconds` is asked."""

    def __init__(self, device: torch.device, *, with_peaks: bool) -> None:
        self.device, self.with_peaks = device, with_peaks and device.type == "cuda"
        self.marks: list[tuple[str, object]] = []
        self.peaks: dict[str, Peak] = {}  # by part; the allocator works on the host, so none of it waits

    def __call__(self, part: str) -> None:
        if self.with_peaks:
            highest, left = (
                read(self.device) / GIB for read in (torch.cuda.max_memory_allocated, torch.cuda.memory_allocated)
            )
            self.peaks[part] = Peak(highest, left)
            torch.cuda.reset_peak_memory_stats(self.device)
        if self.device.type != "cuda":
            self.marks.append((part, time.monotonic() * 1e3))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append((part, event))

    def milliseconds(self, part: str) -> list[float]:
        """Of every occurrence of the part, since the mark before it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [_between(before, now) for (_, before), (name, now) in pairs if name == part]


def clock(device: torch.device, *, with_peaks: bool = False) -> _Marks:
    return _Marks(device, with_peaks=with_peaks)


def _between(before: object, now: object) -> float:
    if isinstance(before, torch.cuda.Event) and isinstance(now, torch.cuda.Event):
        return before.elapsed_time(now)
    assert isinstance(before, float)
    assert isinstance(now, float)
    return now - before


def ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of one large square product, the median of ten."""
    size = CEILING_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    marks = clock(device)
    for _ in range(12):
        marks("start")
        left @ right
        marks("product")
    return 2.0 * size**3 / (statistics.median(marks.milliseconds("product")[2:]) / 1e3)


@dataclass(frozen=True)
class Profile:
    """One step by the profiler, longest first; on a CPU operators stand for kernels, and attention is not told apart."""

    kernels: tuple[Timed, ...]
    products: tuple[Timed, ...]  # by the shapes of their inputs
    attention_ms: float | None


def profiled(step: Callable[[], object], device: torch.device) -> Profile:
    """Runs the step once more under the profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=activities, record_shapes=True, with_flops=True, acc_events=True) as seen:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    kernels = _longest(_kernels(seen.key_averages(), device))
    shaped = (event for event in seen.key_averages(group_by_input_shape=True) if event.key in PRODUCTS)
    attention = [each.ms for each in kernels if any(name in each.name.lower() for name in ATTENTION_KERNELS)]
    return Profile(
        tuple(kernels[:MOST_LISTED]),
        tuple(_longest(_product(event, device) for event in shaped)[:MOST_LISTED]),
        sum(attention) if device.type == "cuda" else None,
    )


def _kernels(events: Iterable[Any], device: torch.device) -> list[Timed]:
    if device.type != "cuda":
        return [Timed(event.key, event.count, event.self_cpu_time_total / 1e3) for event in events]
    return [
        Timed(event.key, event.count, event.self_device_time_total / 1e3)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def _product(event: Any, device: torch.device) -> Timed:
    ms = (event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total) / 1e3
    shapes = " ".join("×".join(map(str, shape)) for shape in event.input_shapes if shape)
    return Timed(
        f"{event.key.removeprefix('aten::')} {shapes}", event.count, ms, event.flops / ms / 1e9 if ms else None
    )


def _longest(times: Iterable[Timed]) -> list[Timed]:
    ordered = sorted(times, key=lambda each: -each.ms)
    return [replace(each, name=each.name[:LONGEST_NAME]) for each in ordered if each.ms > 0]


def in_a_line(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def header_of(device: torch.device, rate: float) -> str:
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU, tiny shapes (no claim)"
    return (
        f"{card}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; `python -m benchmarks.step`; "
        f"ceiling: a {CEILING_SIZE[device.type]}³ product at {rate / 1e12:.3g} TFLOP/s"
    )
