"""The memory plan beside measured peaks, on a CUDA card, with only `remote/` and torch.

    python -m benchmarks.plan [--out FOLDER] [--budget SECONDS] [--only TEXT] [--small]
    python -m benchmarks.plan --page       (the table of benchmarks/measured/plan.json, for docs)

Runs the smoke rungs at the configurations of `CASES`, one after the other in this process, and prints after each what was
predicted and what torch's allocator counted, by stage, and how long loading and the rung took. `plan.json` and `plan.md`
are written anew after every case, so that a run that is cut keeps what it has; `tests/remote/test_plan_measured.py` reads
one from `benchmarks/measured/`. Exit status 1 when a stage is off by more than 5 % and more than 1 GiB (of a small
configuration: by more than 5 %), or a case breaks.
On a machine without a card, or with --small, very small cases show that the benchmark works; they claim nothing.
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
from remote.drafter.kernels import gluon
from remote.drafter.measure import Meter, Peak
from remote.plan import GIB, plan
from remote.plan.checked import measures
from remote.report import Reporter
from remote.rundir import RunDir
from remote.spec import DataSpec, DFlashSpec, DrafterSpec, LossSpec, NoiseSpec, TargetSpec, TrainSpec

TOLERANCE_SHARE, TOLERANCE_BYTES = 0.05, GIB
MEASURED = Path(__file__).parent / "measured" / "plan.json"
SMALL_BYTES = 4 * GIB  # below it the share alone counts

Sections = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One configuration: a base, sections of it changed, the rung to climb, a cap on the card's memory."""

    name: str
    base: str
    changes: Sections = field(default_factory=dict)
    rung: str = "fwd_bwd"
    cap_gib: float | None = None
    is_compiled: bool = False  # by torch's compiler, whose first call takes memory that no plan has: climbed twice


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
        off, share = abs(self.predicted_bytes - self.measured_bytes), TOLERANCE_SHARE * self.measured_bytes
        return off <= (share if self.measured_bytes < SMALL_BYTES else max(share, TOLERANCE_BYTES))


SOFT = {"terms": {"ce": 1.0, "kl": 0.15}}
DDTREE: Sections = {"drafter": {"block_size": 32}, "data": {"max_anchors": 1024}, "loss": SOFT | {"gamma": 10.0}}
CHECKPOINTED = {"activation_checkpointing": "non_reentrant"}
PLAIN: Sections = {"drafter": {"attention": "flex"}, "train": {"kernels": "torch"}}
SDPA: Sections = {"drafter": {"attention": "sdpa"}, "train": {"kernels": "torch"}}


def both(*changes: Sections) -> Sections:
    """Changes one after the other, section by section."""
    merged: Sections = {}
    for each in changes:
        for name, values in each.items():
            merged[name] = merged.get(name, {}) | values
    return merged


V6: Sections = {"loss": SOFT}
FP8: Sections = {"loss": {"hidden_gradient": "fp8"}}
# Two tables and no layers: of a target beside the drafter what counts here are its rows, which a step then makes itself.
BESIDE: Sections = {"data": {"hidden_states": "online"}, "target": {"num_parameters": 2 * 248_320 * 5120}}
SLIDING: Sections = {"drafter": {"layer_types": ["sliding"] * 4 + ["full"], "sliding_window": 2048}}
SLIDING_TINY: Sections = {"drafter": {"layer_types": ["sliding", "sliding", "full"], "sliding_window": 256}}
# Of the recipes/qwen3.6-27b.yaml branch: four sliding layers, noise, confidence, streaks.
BUNDLED: Sections = {
    **both(DDTREE, SLIDING),
    "data": {"max_anchors": 1024, "noise": NoiseSpec("gaussian", 0.05)},
    "loss": {"terms": {"ce": 1.0, "kl": 0.15, "cap": 0.05}, "gamma": 10.0, "streak_beta": 0.5},
}
# As many anchor slots as a row has tokens, so a short one: 8 documents and the block tokens of ddtree.
BY_DOCUMENT: Sections = {"data": {"anchors_per": "document", "row_tokens": 2048, "max_anchors": 256}}
THREE: Sections = {"data": {"anchors_per": "document", "row_tokens": 12_000, "max_anchors": 256}}

# They show that the benchmark works, and claim nothing: every rung, and what a row and a layer may be.
VERY_SMALL: Sections = {"data": {"row_tokens": 256, "max_anchors": 8}}
SMALL = (
    Case("very small", "tiny", VERY_SMALL),
    Case("very small, forward alone", "tiny", VERY_SMALL, rung="fwd"),
    Case("very small, three documents", "tiny", VERY_SMALL, rung="multi_doc"),
    Case("very small, leak probe", "tiny", VERY_SMALL, rung="leak"),
    Case("very small, checkpoint", "tiny", VERY_SMALL, rung="checkpoint"),
    Case("very small, sliding layers", "tiny", both(VERY_SMALL, SLIDING_TINY, {"drafter": {"sliding_window": 64}})),
    Case("very small, anchors of each document", "tiny", {"data": {"anchors_per": "document", "row_tokens": 64, "max_anchors": 16}}),
)  # fmt: skip

# What no card had measured before comes first; a case that names no backend takes what `auto` does: own kernels.
CASES = (
    Case("27B ddtree as bundled, fp8", "27B", both(BUNDLED, FP8)),
    Case("27B ddtree, fp8", "27B", both(DDTREE, FP8)),
    Case("27B, anchors of each of 8 documents, fp8", "27B", both(V6, BY_DOCUMENT, FP8)),
    Case("27B, anchors of each of three documents, fp8", "27B", both(V6, THREE, FP8), rung="multi_doc"),
    Case("8B, checkpoint, fp8", "8B", FP8, rung="checkpoint"),
    Case("27B v6", "27B", V6),
    Case("tiny, sliding layers, fp8", "tiny", both(SLIDING_TINY, FP8)),
    Case("tiny, anchors of each of 16 documents, fp8", "tiny", both(FP8, {"data": {"anchors_per": "document"}})),
    Case("tiny, sliding layers, sdpa, torch's kernels", "tiny", both(SLIDING_TINY, SDPA)),
    Case("tiny, sliding layers, flex, torch's kernels", "tiny", both(SLIDING_TINY, PLAIN), is_compiled=True),
    Case("tiny", "tiny"),
    Case("tiny, layers checkpointed", "tiny", {"train": CHECKPOINTED}),
    Case("27B ddtree", "27B", DDTREE),
    Case("27B ddtree, cap, capped at 95 GiB", "27B", both(DDTREE, {"loss": {"terms": {"ce": 1.0, "kl": 0.15, "cap": 0.05}}}), cap_gib=95),
    Case("27B ddtree, layers checkpointed", "27B", both(DDTREE, {"train": CHECKPOINTED})),
    Case("27B ddtree, checkpointed, loss chunks of 8192", "27B", both(DDTREE, {"train": CHECKPOINTED, "loss": {"chunk_tokens": 8192}})),
    Case("8B, muon", "8B", {"optim": {"name": "muon"}}),
    Case("8B, two rows a step", "8B", {"train": {"rows_per_step": 2}}),
    Case("8B, two micro-batches", "8B", {"train": {"accumulation": 2}}),
    Case("27B v6, three documents", "27B", both(V6, {"data": {"row_tokens": 12_000}}), rung="multi_doc"),
    Case("27B v6, leak probe", "27B", V6, rung="leak"),
    Case("27B v6, forward alone", "27B", V6, rung="fwd"),
    Case("27B v6, bf16 moments", "27B", both(V6, {"optim": {"moment_dtype": "bfloat16"}})),
    Case("27B v6, bf16 moments, no masters", "27B", both(V6, {"optim": {"moment_dtype": "bfloat16", "master_dtype": "none"}})),
    Case("27B v6, loss chunks of 512", "27B", both(V6, {"loss": {"chunk_tokens": 512}})),
    Case("27B ddtree, torch's kernels", "27B", both(DDTREE, {"train": {"kernels": "torch"}})),
    Case("27B ddtree, torch's kernels, layers checkpointed", "27B", both(DDTREE, {"train": CHECKPOINTED | {"kernels": "torch"}})),
    Case("tiny, flex, torch's kernels", "tiny", PLAIN, is_compiled=True),
    Case("tiny, sdpa, torch's kernels", "tiny", SDPA),
    Case("tiny, sdpa, torch's kernels, checkpointed", "tiny", both(SDPA, {"train": CHECKPOINTED})),
    Case("27B v6, flex, torch's kernels", "27B", both(V6, PLAIN)),
    Case("27B v6, flex, torch's kernels, forward alone", "27B", both(V6, PLAIN), rung="fwd"),
    Case("27B v6, flex, torch's kernels, loss chunks of 512", "27B", both(V6, PLAIN, {"loss": {"chunk_tokens": 512}})),
    Case("27B ddtree, flex, torch's kernels", "27B", both(DDTREE, PLAIN)),
    Case("27B v6, sdpa, torch's kernels", "27B", both(V6, SDPA)),
    Case("27B ddtree, target beside", "27B", both(DDTREE, BESIDE)),
    Case("27B v6, target beside, torch's kernels", "27B", both(V6, BESIDE, {"train": {"kernels": "torch"}})),
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    if options.page:
        print(page(measured_lines()), end="")
        return 0
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch._dynamo.config.recompile_limit = 64  # every case has shapes of its own; a training has one
    started_s, lines, broken = time.monotonic(), list[Line](), list[str]()
    print(_header(device), flush=True)
    for case in _chosen(options, device):
        if time.monotonic() - started_s > options.budget:
            print(f"passed over, the budget of {options.budget:g} s is spent: {case.name}", flush=True)
            continue
        try:
            found = measure(case, device)
        except Exception as error:  # noqa: BLE001 - a case that breaks must not cost the others their lines
            found, text = [], " ".join(str(error).split())[:300]
            broken.append(case.name)
            print(f"  {case.name}: {type(error).__name__}: {text}", flush=True)
        lines += found
        for line in found:
            print(_row(line), flush=True)
        _write(options.out, lines, device)
    worst = max((abs(line.difference) for line in lines), default=0.0)
    outside = [line for line in lines if not line.is_within]
    print(f"{len(lines)} stages, worst {worst:.1%}, {len(outside)} outside the tolerance, {len(broken)} cases broken")
    print(f"checked: {json.dumps(ranges(lines, device))}; {time.monotonic() - started_s:.0f} s", flush=True)
    return 1 if broken or (outside and device.type == "cuda") else 0


def _chosen(options: argparse.Namespace, device: torch.device) -> list[Case]:
    if options.small or device.type == "cpu":
        return list(SMALL)
    return [case for case in CASES if options.only in case.name]


def measure(case: Case, device: torch.device) -> list[Line]:
    """Climbs the rung and sets its peaks beside the plan's."""
    spec = spec_of(case)
    if case.is_compiled:
        _climb(spec, case, device)
    started_s = time.monotonic()
    peaks, loaded_s, reasons = _climb(spec, case, device)
    print(f"  {case.name}: {time.monotonic() - started_s:.1f} s, {loaded_s:.1f} s of it loading; {reasons}", flush=True)
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == gluon.CAPABILITY
    stages = plan(spec, device=device.type, rung=case.rung, is_hopper=is_hopper).stages
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
    """What its rung climbs with: `checkpoint` has a smaller drafter of its own."""
    spec = BASES[case.base]
    spec = replace(spec, **{name: replace(getattr(spec, name), **values) for name, values in case.changes.items()})
    return smoke.small(spec) if case.rung == "checkpoint" else spec


def ranges(lines: Sequence[Line], device: torch.device) -> dict[str, tuple[int, int]]:
    """What `remote.plan.checked` may claim of the cases that have lines."""
    names = {line.case for line in lines}
    found = [
        measures(plan(spec_of(case), device=device.type, rung=case.rung).sizes)
        for case in (*CASES, *SMALL)
        if case.name in names
    ]
    return (
        {name: (min(each[name] for each in found), max(each[name] for each in found)) for name in found[0]}
        if found
        else {}
    )


def _climb(spec: DFlashSpec, case: Case, device: torch.device) -> tuple[dict[str, Peak], float, str]:
    """The peaks by stage, the seconds until the first step, and what was chosen. `checkpoint` saves, and then loads with all
    made anew: the higher peak of each stage counts."""
    halves = ("checkpoint_save", "checkpoint") if case.rung == "checkpoint" else (case.rung,)
    found: dict[str, Peak] = {}
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder))
        for half in halves:
            _empty(device, case.cap_gib)
            peaks, loaded_s, reasons = _climb_once(spec, half, run, device)
            for stage, peak in peaks.items():
                known = found.get(stage, peak)
                found[stage] = max(known, peak, key=lambda each: each.allocated_bytes or 0)
    return found, loaded_s, reasons


def _climb_once(spec: DFlashSpec, rung: str, run: RunDir, device: torch.device) -> tuple[dict[str, Peak], float, str]:
    reporter = Reporter.from_environment()
    job = Job(spec, run, run.attempt(1), run.root, run.root, device, reporter)
    started_s, meter = time.monotonic(), Meter(device)
    choices = workbench.choose(spec, device)
    with meter.part("load"):
        target = synthetic.stand_in(spec, device=device, dtype=choices.dtype)
        bench = workbench.build(spec, choices, meter=meter, embed=target.embed, head_VH=target.head_VH)
    loaded_s = time.monotonic() - started_s
    smoke.RUNGS[rung](job, bench)
    reporter.close()
    return meter.peaks, loaded_s, f"attention {choices.reasons['attention']}; kernels {choices.reasons['kernels']}"


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
    body = {"header": _header(device), "lines": [asdict(line) for line in lines], "checked": ranges(lines, device)}
    (folder / "plan.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    (folder / "plan.md").write_text(f"{_header(device)}\n\n{page(lines)}", encoding="utf-8")


def page(lines: Sequence[Line]) -> str:
    """A table, a row a case: GiB by stage, predicted / measured. docs/benchmarks.md has it of the measured file."""
    stages = ("load", "forward", "backward", "step")
    rows = [f"| configuration | {' | '.join(stages)} |", f"|---{'|---' * len(stages)}|"]
    for name in dict.fromkeys(line.case for line in lines):
        cells = {line.stage: _cell(line) for line in lines if line.case == name}
        rows.append(f"| {name} | {' | '.join(cells.get(stage, '') for stage in stages)} |")
    return "\n".join(rows) + "\n"


def _cell(line: Line) -> str:
    digits = 3 if line.measured_bytes < SMALL_BYTES else 2
    return f"{line.predicted_bytes / GIB:.{digits}f} / {line.measured_bytes / GIB:.{digits}f}"


def measured_lines(path: Path = MEASURED) -> list[Line]:
    """What a card measured, beside what today's plan says."""
    found, named = [], {case.name: case for case in CASES}
    for row in json.loads(path.read_text(encoding="utf-8"))["lines"]:
        case = named[row["case"]]
        stage = plan(spec_of(case), device="cuda", rung=case.rung, is_hopper=True).stage(row["stage"])  # an H200
        found.append(
            Line(case.name, stage.name, stage.allocated_bytes, row["measured_bytes"], row.get("reserved_bytes", 0))
        )
    return found


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of plan.json and plan.md")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds after which no further case begins")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--page", action="store_true", help="print the table of what was measured, and run nothing")
    parser.add_argument("--small", action="store_true", help="very small cases alone")
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
