"""Clocks of `benchmarks.step`: marks on the device's own time line, and attention's share by the names of its kernels."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

# What the kernels of attention are called, in every variant; a gathered copy of keys is not among them.
ATTENTION_KERNELS = (
    "forward_kernel", "query_gradient_kernel", "context_gradient_kernel",  # this project's
    "flex", "fmha", "flash", "mem_eff", "cudnn_generated", "sdpa",
)  # fmt: skip


class _Marks:
    """Call it with the name of the part that ends now; nothing waits until `milliseconds` is asked."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[tuple[str, object]] = []

    def __call__(self, part: str) -> None:
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


def clock(device: torch.device) -> _Marks:
    return _Marks(device)


def _between(before: object, now: object) -> float:
    if isinstance(before, torch.cuda.Event) and isinstance(now, torch.cuda.Event):
        return before.elapsed_time(now)
    assert isinstance(before, float)
    assert isinstance(now, float)
    return now - before


def attention_ms(step: Callable[[], object], device: torch.device) -> float | None:
    """Milliseconds of attention's kernels in one step, by the profiler; None without a card."""
    if device.type != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize(device)
    return sum(
        event.device_time_total / 1e3
        for event in seen.key_averages()
        if any(name in event.key.lower() for name in ATTENTION_KERNELS)
    )
