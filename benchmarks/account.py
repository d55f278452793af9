"""One training step accounted for: every kernel by part, operation and shapes, and the time in which the card did nothing.

    python -m benchmarks.account [--case ddtree ...] [--out FILE]

Needs a card and what `benchmarks.step` needs. Of each case it prints JSON lines: a step's time without the profiler, and then one
step under it, from the end of the last kernel of the step before to the end of its own last one: all that lies in between is a
kernel or a gap, so the lines add up to the step. What products could do alone is `benchmarks.products`'s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import step
from benchmarks.step_parts import clock

DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_KINDS = ("cuda_runtime", "cuda_driver")
STEP_MARK, PART_MARK = "account step", "account part "
GAP_BOUNDS_US = (2.0, 5.0, 20.0, 100.0)
LONGEST_NAME = 110


@dataclass(frozen=True)
class Launch:
    """One kernel, copy or fill of the device; times in microseconds of one clock."""

    name: str
    start_us: float
    end_us: float
    launched_us: float  # on the host
    part: str  # of the step
    operation: str
    shapes: str
    grid: str

    @property
    def us(self) -> float:
        return self.end_us - self.start_us


@dataclass(frozen=True)
class Account:
    """A step's time on the device, in milliseconds; span = kernels + gaps − overlap."""

    span_ms: float
    kernels_ms: float
    gaps_ms: float
    overlap_ms: float
    launches: tuple[Launch, ...]
    gaps_us: tuple[tuple[float, Launch], ...]  # each with the kernel after it


def read_trace(trace: dict[str, Any]) -> list[list[Launch]]:
    """The launches of each marked step, in the order of the device, out of a Chrome trace of torch's profiler."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    operations = {
        event["args"]["External id"]: event
        for event in events
        if event.get("cat") == "cpu_op" and "External id" in event.get("args", {})
    }
    hosts = {event["args"]["correlation"]: event for event in events if event.get("cat") in LAUNCH_KINDS}
    marks = [event for event in events if event.get("cat") == "user_annotation"]
    steps = sorted((event for event in marks if event["name"].startswith(STEP_MARK)), key=lambda event: event["ts"])
    ends = sorted((event["ts"], event["name"]) for event in marks if event["name"].startswith(PART_MARK))
    found: list[list[Launch]] = [[] for _ in steps]
    for event in events:
        if event.get("cat") not in DEVICE_KINDS:
            continue
        launched_us = hosts.get(event["args"].get("correlation"), event)["ts"]
        for number, mark in enumerate(steps):
            if mark["ts"] <= launched_us <= mark["ts"] + mark["dur"]:
                part = next((name for ts, name in ends if ts >= launched_us), "after the last part")
                found[number].append(_launch(event, operations, launched_us, part.removeprefix(PART_MARK)))
    return [sorted(launches, key=lambda launch: launch.start_us) for launches in found]


def account(before: Sequence[Launch], launches: Sequence[Launch]) -> Account:
    """Of a step that follows another one."""
    began_us = latest_us = max(launch.end_us for launch in before)
    gaps, overlap_us = [], 0.0
    for launch in launches:
        if launch.start_us >= latest_us:
            gaps.append((launch.start_us - latest_us, launch))
        else:
            overlap_us += min(latest_us, launch.end_us) - launch.start_us
        latest_us = max(latest_us, launch.end_us)
    return Account(
        (latest_us - began_us) / 1e3,
        sum(launch.us for launch in launches) / 1e3,
        sum(gap for gap, _ in gaps) / 1e3,
        overlap_us / 1e3,
        tuple(launches),
        tuple(gaps),
    )


def lines(case: str, found: Account) -> Iterable[dict[str, Any]]:
    """The total, the parts, the gaps by length and by what follows them, and the kernels, longest first."""
    yield {
        "kind": "total", "case": case, "span_ms": _round(found.span_ms), "kernels_ms": _round(found.kernels_ms),
        "gaps_ms": _round(found.gaps_ms), "overlap_ms": _round(found.overlap_ms), "launches": len(found.launches),
    }  # fmt: skip
    for (part,), calls, ms in _summed(((launch.part,), launch.us) for launch in found.launches):
        yield {"kind": "part", "case": case, "part": part, "launches": calls, "kernels_ms": ms}
    for (bound,), calls, ms in _summed((((_bound(gap),), gap) for gap, _ in found.gaps_us)):
        yield {"kind": "gaps", "case": case, "up_to_us": bound, "number": calls, "ms": ms}
    after = _summed((((launch.part, launch.operation, launch.name), gap) for gap, launch in found.gaps_us))
    for (part, operation, name), calls, ms in after[:20]:
        yield {
            "kind": "gap before",
            "case": case,
            "part": part,
            "op": operation,
            "kernel": name,
            "number": calls,
            "ms": ms,
        }
    keys = (((each.part, each.operation, each.shapes, each.name, each.grid), each.us) for each in found.launches)
    for (part, operation, shapes, name, grid), calls, ms in _summed(keys):
        yield {
            "kind": "kernel", "case": case, "ms": ms, "calls": calls, "part": part, "op": operation, "kernel": name,
            "shapes": shapes, "grid": grid,
        }  # fmt: skip


def measured(case: step.Case, device: torch.device) -> tuple[dict[str, Any], Account]:
    """A case's steps timed and without the profiler, and one accounted for; the card is warm by then."""
    bench = step.Bench(case, step.FUSED, step.LARGE, device)
    for number in range(1, 5):  # as training counts them
        bench.step(number)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    marks = clock(device)
    marks("start")
    for seed in range(5):
        bench.step(10 + seed)
        marks("step")
    times = marks.milliseconds("step")
    peak = torch.cuda.max_memory_allocated(device) / step.GIB
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True, acc_events=True) as seen:
        for seed in range(3):
            with record_function(f"{STEP_MARK} {seed}"):
                bench.step(20 + seed, _mark)
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        seen.export_chrome_trace(str(file))
        steps = read_trace(json.loads(file.read_text(encoding="utf-8")))
    plain = {
        "kind": "plain", "case": case.name, "step_ms": [_round(time) for time in times],
        "median_ms": _round(statistics.median(times)), "peak_gib": _round(peak),
    }  # fmt: skip
    return plain, account(steps[-2], steps[-1])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.account", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", nargs="+", default=["ddtree"], choices=[case.name for case in step.CASES])
    parser.add_argument("--out", type=Path, help="a file for the lines, beside standard output")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("a step is accounted for on a card; this machine has none")
    device = torch.device("cuda", 0)
    with options.out.open("a", encoding="utf-8") if options.out else tempfile.TemporaryFile("w") as file:
        for case in (case for case in step.CASES if case.name in options.case):
            plain, found = measured(case, device)
            for line in (plain, *lines(case.name, found)):
                say(line, file)
            step.empty(device)
    return 0


def _launch(event: dict[str, Any], operations: dict[int, dict[str, Any]], launched_us: float, part: str) -> Launch:
    args = event["args"]
    operation = operations.get(args.get("External id"), {"name": "?", "args": {}})
    shapes = [
        f"{list(dims)}{_order(dims, strides)}"
        for dims, strides in zip(
            operation["args"].get("Input Dims", []), operation["args"].get("Input Strides", []), strict=False
        )
        if dims
    ]
    grid = "x".join(map(str, args.get("grid", [])))
    name = event["name"][:LONGEST_NAME]
    start_us = event["ts"]
    return Launch(name, start_us, start_us + event["dur"], launched_us, part, operation["name"], " ".join(shapes), grid)


def _order(dims: Sequence[Any], strides: Sequence[Any]) -> str:
    """T: a matrix that lies transposed."""
    return "T" if len(dims) == 2 and len(strides) == 2 and strides[0] == 1 and strides[1] != 1 else ""


def _summed(keyed: Iterable[tuple[tuple[Any, ...], float]]) -> list[tuple[tuple[Any, ...], int, float]]:
    """Calls and milliseconds by key, longest first."""
    times: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for key, us in keyed:
        times[key].append(us)
    summed = [(key, len(found), _round(sum(found) / 1e3)) for key, found in times.items()]
    return sorted(summed, key=lambda each: -each[2])


def _bound(gap_us: float) -> float | str:
    return next((bound for bound in GAP_BOUNDS_US if gap_us <= bound), "more")


def _mark(part: str) -> None:
    with record_function(f"{PART_MARK}{part}"):
        pass


def _round(number: float) -> float:
    return round(number, 3)


def say(line: dict[str, Any], file: TextIO) -> None:
    text = json.dumps(line)
    print(text, flush=True)
    file.write(text + "\n")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
