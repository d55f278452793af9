"""The memory plan beside measured peaks, on a CUDA card, with only `remote/` and torch.

    python -m benchmarks.plan [--out FOLDER] [--budget SECONDS] [--only TEXT] [--small]

Runs the smoke rungs at the configurations of `CASES`, one after the other in this process, and prints after each what was
predicted and what torch's allocator counted, by stage. `plan.json` and `plan.md` are written anew after every case, so
that a run that is cut keeps what it has. Exit status 1 when a stage is off by more than 5 % and more than 1 GiB.
On a machine without a card, or with --small, the first case alone shows that the benchmark works; it claims nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from remote.drafter import smoke, synthetic, workbench
from remote.drafter.job import Job
from remote.drafter.measure import Meter
from remote.drafter.model import DFlashDrafter
from remote.drafter.optim import DrafterOptimizer
from remote.plan import GIB, plan
from remote.plan.checked import measures
from remote.report import Reporter
from remote.rundir import RunDir
from remote.spec import DataSpec, DFlashSpec, DrafterSpec, LossSpec, TargetSpec, TrainSpec

TOLERANCE_SHARE, TOLERANCE_BYTES = 0.05, GIB

Sections = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One configuration: a base, sections of it changed, the rung to climb, a cap on the card's memory."""

    name: str
    base: str
    changes: Sections = field(default_factory=dict)
    rung: str = "fwd_bwd"
    cap_gib: float | None = None


@dataclass(frozen=True)
class Line:
    """One stage of one case, in bytes. `reserved` is what the allocator held; no plan is made for it."""

    case: str
    stage: str
    predicted_bytes: int
    measured_bytes: int
    reserved_bytes: int

    @property
    def difference(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def is_within(self) -> bool:
        off = abs(self.predicted_bytes - self.measured_bytes)
        return off <= max(TOLERANCE_SHARE * self.measured_bytes, TOLERANCE_BYTES)


SOFT = {"terms": {"ce": 1.0, "kl": 0.15}}
DDTREE: Sections = {"drafter": {"block_size": 32}, "data": {"max_anchors": 1024}, "loss": SOFT | {"gamma": 10.0}}
CHECKPOINTED = {"activation_checkpointing": "non_reentrant"}

CASES = (
    Case("tiny", "tiny"),
    Case("tiny, sdpa", "tiny", {"drafter": {"attention": "sdpa"}}),
    Case("tiny, layers checkpointed", "tiny", {"train": CHECKPOINTED}),
    Case("27B v6, CE + KL", "27B", {"loss": SOFT}),
    Case("27B v6, forward alone", "27B", {"loss": SOFT}, rung="fwd"),
    Case("27B v6, sdpa", "27B", {"loss": SOFT, "drafter": {"attention": "sdpa"}}),
    Case("27B v6, loss chunks of 512", "27B", {"loss": SOFT | {"chunk_tokens": 512}}),
    Case("27B v6, bf16 moments, no masters", "27B", {"optim": {"moment_dtype": "bfloat16", "master_dtype": "none"}}),
    Case("27B ddtree", "27B", DDTREE),
    Case("27B ddtree, cap, capped at 95 GiB", "27B", DDTREE | {"loss": {"terms": {"ce": 1.0, "kl": 0.15, "cap": 0.05}}}, cap_gib=95),
    Case("27B ddtree, layers checkpointed", "27B", DDTREE | {"train": CHECKPOINTED}),
    Case("27B ddtree, checkpointed, loss chunks of 8192", "27B", DDTREE | {"train": CHECKPOINTED, "loss": SOFT | {"chunk_tokens": 8192}}),
    Case("8B, two rows a step", "8B", {"train": {"rows_per_step": 2}}),
    Case("8B, two micro-batches", "8B", {"train": {"accumulation": 2}}),
    Case("8B, muon", "8B", {"optim": {"name": "muon"}}),
    Case("27B v6, three documents", "27B", {"loss": SOFT, "data": {"row_tokens": 12_000}}, rung="multi_doc"),
    Case("27B v6, leak probe", "27B", {"loss": SOFT}, rung="leak"),
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    is_small = options.small or device.type == "cpu"
    torch._dynamo.config.recompile_limit = 64  # every case has shapes of its own; a training has one
    started_s, lines = time.monotonic(), list[Line]()
    print(_header(device), flush=True)
    for case in CASES:
        if options.only not in case.name or (is_small and case != CASES[0]):
            continue
        if time.monotonic() - started_s > options.budget:
            print(f"passed over, the budget of {options.budget:g} s is spent: {case.name}", flush=True)
            continue
        case_started_s = time.monotonic()
        found = measure(case, device)
        lines += found
        for line in found:
            print(_row(line), flush=True)
        print(f"  {case.name}: {time.monotonic() - case_started_s:.1f} s", flush=True)
        _write(options.out, lines, device)
    worst = max((abs(line.difference) for line in lines), default=0.0)
    outside = [line for line in lines if not line.is_within]
    print(f"{len(lines)} stages, worst {worst:.1%}, {len(outside)} outside the larger of 5 % and 1 GiB", flush=True)
    print(f"checked: {json.dumps(ranges(device))}", flush=True)
    return 1 if outside else 0


def measure(case: Case, device: torch.device) -> list[Line]:
    """Climbs the rung and sets its peaks beside the plan's. A case that runs out of memory has no lines."""
    spec = spec_of(case)
    _empty(device, case.cap_gib)
    try:
        peaks = _climb(spec, case.rung, device)
    except torch.OutOfMemoryError as error:
        print(f"  {case.name}: out of memory, {str(error).splitlines()[0]}", flush=True)
        return []
    stages = plan(spec, device=device.type, rung=case.rung).stages
    return [
        Line(
            case.name,
            stage.name,
            stage.allocated_bytes,
            peaks[stage.name].allocated_bytes or 0,
            peaks[stage.name].reserved_bytes or 0,
        )
        for stage in stages
        if stage.name in peaks
    ]


def spec_of(case: Case) -> DFlashSpec:
    spec = BASES[case.base]
    return replace(spec, **{name: replace(getattr(spec, name), **values) for name, values in case.changes.items()})


def ranges(device: torch.device) -> dict[str, tuple[int, int]]:
    """What `remote.plan.checked` may claim after a whole run."""
    found = [measures(plan(spec_of(case), device=device.type, rung=case.rung).sizes) for case in CASES]
    return {name: (min(each[name] for each in found), max(each[name] for each in found)) for name in found[0]}


def _climb(spec: DFlashSpec, rung: str, device: torch.device) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder))
        reporter = Reporter.from_environment()
        job = Job(spec, run, run.attempt(1), run.root, run.root, device, reporter)
        meter = Meter(device)
        with meter.part("load"):
            bench = _bench(spec, meter)
        smoke.RUNGS[rung](job, bench)
        reporter.close()
        return meter.peaks


def _bench(spec: DFlashSpec, meter: Meter) -> workbench.Workbench:
    """As `workbench.build` makes it, the weights drawn on the device: a CPU takes 12 s for 1.7 billion numbers."""
    choices = workbench.choose(spec, meter.device)
    target = synthetic.stand_in(spec, device=meter.device, dtype=choices.dtype)
    with torch.device("meta"):
        drafter = DFlashDrafter(
            spec.target,
            spec.drafter,
            backend=choices.backend,
            activation_checkpointing=spec.train.activation_checkpointing,
        )
    drafter = drafter.to(choices.dtype).to_empty(device=meter.device)
    drafter.init_weights(torch.Generator(meter.device).manual_seed(0))
    optimizer = DrafterOptimizer(drafter.named_parameters(), spec.optim, num_steps=spec.train.num_steps)
    return workbench.Workbench(spec, meter.device, drafter, target.embed, target.head_VH, optimizer, meter)


def _empty(device: torch.device, cap_gib: float | None) -> None:
    """The allocator as in a new process: nothing cached, no library workspace, the cap of this case."""
    gc.collect()
    if device.type != "cuda":
        return
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (cap_gib or 1e6) * GIB / total_bytes), device)
    torch.cuda.reset_peak_memory_stats(device)


def _header(device: torch.device) -> str:
    card = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else "a CPU (resident memory of the process; no claim)"
    )
    return f"plan against measured on {card}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"


def _row(line: Line) -> str:
    mark = "" if line.is_within else "  OUTSIDE"
    return (
        f"  {line.case:46s} {line.stage:9s} predicted {line.predicted_bytes / GIB:8.3f}  "
        f"measured {line.measured_bytes / GIB:8.3f} GiB  {line.difference:+7.1%}{mark}"
    )


def _write(folder: Path, lines: Sequence[Line], device: torch.device) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    body = {"header": _header(device), "lines": [asdict(line) for line in lines], "checked": ranges(device)}
    (folder / "plan.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    table = ["| case | stage | predicted GiB | measured GiB | difference | reserved GiB |", "|---|---|---|---|---|---|"]
    table += [
        f"| {line.case} | {line.stage} | {line.predicted_bytes / GIB:.2f} | {line.measured_bytes / GIB:.2f} "
        f"| {line.difference:+.1%} | {line.reserved_bytes / GIB:.2f} |"
        for line in lines
    ]
    (folder / "plan.md").write_text(f"{_header(device)}\n\n" + "\n".join(table) + "\n", encoding="utf-8")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of plan.json and plan.md")
    parser.add_argument("--budget", type=float, default=210.0, help="seconds after which no further case begins")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--small", action="store_true", help="the first case alone")
    return parser.parse_args(arguments)


def _base(target: TargetSpec, drafter: DrafterSpec, data: DataSpec) -> DFlashSpec:
    return DFlashSpec(
        recipe="plan",
        branch="case",
        entry="dflash",
        target=target,
        drafter=drafter,
        data=data,
        train=TrainSpec(num_steps=100),
        loss=LossSpec(),
    )


BASES = {
    "tiny": _base(
        TargetSpec("none", 256, 12, 8192, False, 0, 2, 2),
        DrafterSpec(3, 768, 8, 4, 32, [1, 5, 9], 16, 3, 1e4, 8192),
        DataSpec("p", "a", "h", row_tokens=2048, max_anchors=128, anchors_per="row"),
    ),
    "8B": _base(
        TargetSpec("none", 4096, 36, 151_936, False, 0, 151_645, 151_643),
        DrafterSpec(5, 12_288, 32, 8, 128, [1, 9, 17, 25, 33], 16, 151_669, 1e6, 40_960),
        DataSpec("p", "a", "h", row_tokens=8192, max_anchors=512, anchors_per="row"),
    ),
    "27B": _base(
        TargetSpec("none", 5120, 64, 248_320, False, 0, 248_044, 248_044),
        DrafterSpec(5, 17_408, 32, 8, 128, [1, 16, 31, 46, 61], 16, 248_070, 1e7, 262_144),
        DataSpec("p", "a", "h", row_tokens=8000, max_anchors=512, anchors_per="row"),
    ),
}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
