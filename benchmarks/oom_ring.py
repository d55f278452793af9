"""What it costs to record who allocates what: the bundled trainer's step with the ring and without.

    python -m benchmarks.oom_ring [--steps 10]

Stretches of steps alternate, so that a clock that drifts falls on both. Needs a card: on a CPU nothing is recorded.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace

import torch

from benchmarks.oom import SMALL
from remote.drafter import synthetic, workbench
from remote.drafter.held import summarise
from remote.drafter.measure import Meter
from remote.drafter.snapshot import MAX_ENTRIES, bounded, record_allocations, stop_recording
from remote.drafter.step import anchor_slots, assemble, run_step

ROUNDS = 3  # stretches of each kind, after a warm-up


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.oom_ring")
    parser.add_argument("--steps", type=int, default=10, help="of a stretch")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no card: nothing is recorded on a CPU, so nothing is measured")
        return 0
    device = torch.device("cuda", 0)
    spec = replace(SMALL, train=replace(SMALL.train, activation_checkpointing="non_reentrant"))
    choices, meter = workbench.choose(spec, device), Meter(device)
    target = synthetic.stand_in(spec, device=device, dtype=choices.dtype)
    bench = workbench.build(spec, choices, meter=meter, embed=target.embed, head_VH=target.head_VH)
    layout = synthetic.worst_layout(spec)
    batch = synthetic.batch(spec, layout, like=bench.head_VH)
    micro_batches = [assemble(batch, bench, num_slots=anchor_slots(spec.data, most_documents=len(layout)))]
    number, times = 0, {False: list[float](), True: list[float]()}

    def stretch(steps: int) -> float:
        nonlocal number
        torch.cuda.synchronize(device)
        started_s = time.perf_counter()
        for _ in range(steps):
            number += 1
            run_step(number, micro_batches, bench)
        torch.cuda.synchronize(device)
        return (time.perf_counter() - started_s) / steps * 1000

    stretch(3)
    for _ in range(ROUNDS):
        for is_recorded in (False, True):
            if is_recorded:
                record_allocations(device)
            times[is_recorded].append(stretch(options.steps))
            entries = sum(map(len, torch.cuda.memory._snapshot()["device_traces"])) if is_recorded else 0
            stop_recording(device)
    without, recorded = (statistics.median(times[kind]) for kind in (False, True))
    print(
        f"the ring: a step of {spec.data.max_anchors} x {spec.drafter.block_size} block tokens: {without:.2f} ms without the ring,"
        f" {recorded:.2f} ms with it ({recorded / without - 1:+.2%}; {entries} of {MAX_ENTRIES} entries used;"
        f" stretches {' '.join(f'{ms:.2f}' for ms in times[False])} and {' '.join(f'{ms:.2f}' for ms in times[True])})",
        flush=True,
    )
    record_allocations(device)
    stretch(2)
    began_s = time.perf_counter()
    snapshot = torch.cuda.memory._snapshot()
    content, held = bounded(snapshot), summarise(snapshot)["held_bytes"]
    took_s, size = time.perf_counter() - began_s, len(content or b"") / 1024**2
    print(f"a snapshot of it: {took_s:.2f} s, {size:.1f} MiB, {held / 1024**3:.2f} GiB alive", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
