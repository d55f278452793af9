"""The smoke ladder of one resolved recipe, rung by rung, on this machine: with only `remote/` and torch.

    python -m benchmarks.ladder SPEC.json [--out FOLDER] [RUNG...]

    python -m benchmarks.ladder --resolve RECIPE.yaml BRANCH SPEC.json       (needs the local side)

SPEC.json is a resolved branch, as a run folder's `spec.json`. Climbs as a host would, each rung in a process of its own,
and prints each one's time and peaks, their sum beside the goal of 90 s, the time from a new process to the end of its
first step, and what reporting a step costs beside a step.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remote.report import Reporter
from remote.rundir import RunDir
from remote.spec import dump
from remote.wire import decode

GIB = 1024**3
GOAL_S, FIRST_STEP_GOAL_S, REPORTING_GOAL = 90.0, 15.0, 0.005
NUM_REPORTS = 200
TREE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Climbed:
    """What one rung said."""

    name: str
    is_passed: bool
    values: dict[str, Any]
    message: str

    def line(self) -> str:
        peaks = {name: value for name, value in self.values.items() if name.endswith("allocated_bytes")}
        told = ", ".join(f"{name.removesuffix('_allocated_bytes')} {value / GIB:.2f}" for name, value in peaks.items())
        times = ", ".join(f"{name} {value:.2f}" for name, value in self.values.items() if name.endswith("_s"))
        return f"  {self.name}: {'passed' if self.is_passed else f'FAILED: {self.message}'}; {times}; GiB {told}"


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    if options.resolve:
        return _resolve(*options.words)
    spec, *rungs = options.words
    with tempfile.TemporaryDirectory() as folder:
        run = _run_folder(Path(folder), Path(spec))
        environment = os.environ | {"DRAFTYARD_WORK_DIR": folder, "DRAFTYARD_ATTEMPT": "1"}
        environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as a supervisor sets it
        started_s = time.monotonic()
        command = [sys.executable, "-m", "remote.drafter", "smoke", str(run.root), *rungs]
        status = subprocess.run(command, cwd=TREE, env=environment, check=False).returncode
        total_s = time.monotonic() - started_s
        climbed, reasons = _told(run)
        facts = {"total_s": total_s, "exit_status": status, "choices": reasons}
        facts |= _first_step(run, environment) if not rungs or "fwd_bwd" in rungs else {}
        facts |= _reporting(Path(folder), climbed)
    for each in climbed:
        print(each.line())
    _print(facts)
    options.out.mkdir(parents=True, exist_ok=True)
    body = facts | {"rungs": {each.name: {"passed": each.is_passed, **each.values} for each in climbed}}
    (options.out / "ladder.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    return status


def _run_folder(root: Path, spec: Path) -> RunDir:
    run = RunDir(root / "runs" / "ladder")
    run.root.mkdir(parents=True)
    run.spec_json.write_text(spec.read_text(encoding="utf-8"), encoding="utf-8")
    return run


def _told(run: RunDir) -> tuple[list[Climbed], dict[str, str]]:
    """Every rung's result and the first one's choices, out of the events."""
    found, reasons = [], dict[str, str]()
    for path in sorted(run.attempt(1).root.glob("events.*.jsonl"), key=lambda path: path.stat().st_mtime):
        for event in map(decode, path.read_bytes().splitlines(keepends=True)):
            if event.kind == "start":
                reasons = reasons or dict(event.fields.get("choices") or {})
            if event.kind == "rung":
                values = event.fields.get("values") or {}
                message = event.fields.get("message", "")
                found.append(Climbed(event.fields["name"], event.fields["passed"], values, message))
    return found, reasons


def _first_step(run: RunDir, environment: dict[str, str]) -> dict[str, float]:
    """A rung's whole process once more, with every cache warm, less the steps after the first."""
    started_s = time.monotonic()
    command = [sys.executable, "-m", "remote.drafter", "rung", str(run.root), "fwd_bwd"]
    environment = environment | {"DRAFTYARD_ATTEMPT": "2"}
    subprocess.run(command, cwd=TREE, env=environment, check=False)
    whole_s = time.monotonic() - started_s
    path = run.attempt(2).events("rung-fwd_bwd")
    events = [decode(line) for line in path.read_bytes().splitlines(keepends=True)]
    values = next((event.fields.get("values") or {} for event in events if event.kind == "rung"), {})
    return {"first_step_s": whole_s - 3 * values.get("step_s", 0.0)}


def _reporting(folder: Path, climbed: Sequence[Climbed]) -> dict[str, float]:
    """Seconds of the host for one step's metrics, progress and peaks, as a training writes them."""
    reporter = Reporter(folder / "reporting", writer="rank0")
    values = {f"metric_{index}": 0.1 * index for index in range(40)}
    started_s = time.monotonic()
    for step in range(NUM_REPORTS):
        reporter.metrics(step, values)
        reporter.memory("forward", allocated_bytes=GIB, gpu=0, reserved_bytes=GIB, driver_bytes=GIB)
        reporter.progress("steps", done=step, total=NUM_REPORTS, unit="steps")
    seconds = (time.monotonic() - started_s) / NUM_REPORTS
    reporter.close()
    step_s = next(
        (each.values["step_s"] for each in climbed if each.name == "fwd_bwd" and "step_s" in each.values), None
    )
    return {"report_s": seconds} | ({"report_share": seconds / step_s} if step_s else {})


def _print(facts: dict[str, Any]) -> None:
    for name, reason in facts["choices"].items():
        print(f"  {name}: {reason}")
    print(f"all rungs: {facts['total_s']:.1f} s; the goal is {GOAL_S:g} s", flush=True)
    if "first_step_s" in facts:
        print(
            f"a new process to the end of its first step: {facts['first_step_s']:.1f} s; the goal is {FIRST_STEP_GOAL_S:g} s"
        )
    if "report_share" in facts:
        told = f"{facts['report_s'] * 1e3:.2f} ms, {facts['report_share']:.2%} of a step"
        print(f"reporting a step: {told}; the goal is {REPORTING_GOAL:.1%}")


def _resolve(name: str, branch: str, path: str) -> int:
    """Writes the branch as `draftyard launch` would resolve it."""
    recipe = importlib.import_module("orchestrator.recipe").load_recipe(
        Path(name)
    )  # only here: a card has no local side
    Path(path).write_text(dump(recipe.resolve(branch).spec), encoding="utf-8")
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ladder", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="+", metavar="SPEC.json [RUNG...]")
    parser.add_argument(
        "--resolve", action="store_true", help="RECIPE.yaml BRANCH SPEC.json: write the resolved branch"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of ladder.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
