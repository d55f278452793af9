"""Twelve programs, each out of memory for one known cause: is the cause named, and does the first suggestion run?

    python -m benchmarks.oom --out FOLDER [--budget SECONDS] [--only NAME] [--cap 8GiB] [--ring]
    python -m benchmarks.oom_page               the table of benchmarks/measured/oom.json, for docs
    python -m benchmarks.oom --read FOLDER      the table again, from the evidence that FOLDER/evidence.tar.gz holds

Each program is a process of its own under `remote.supervise`, which keeps what it keeps of any job: its report, its log,
the exit file. What it died of is told by `orchestrator.failure` from that evidence alone; then the first suggestion is
applied and it runs again. Two programs are rungs of the bundled trainer, whose suggestions are the plan's overrides; the
others are scripts (`benchmarks.oom_programs`), which know how to take the suggestion that is named.

One card is enough, capped by fraction so that all programs but two run side by side. It needs torch and nothing else of
the local side. Without a card a counted limit stands in (`benchmarks.oom_card`): that shows that the plumbing works and
what is told from shapes, stacks and live frames; pieces, other processes and workspaces are a card's alone.
`--ring` times steps of the trainer with and without the recording of allocations.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.failure import Failure, Findings, Told, causes
from orchestrator.units import format_size
from remote.placing import place
from remote.plan import plan
from remote.plan.advice import nearest_fits, switches
from remote.rundir import AttemptDir, RunDir, read_json, write_json
from remote.spec import DataSpec, DFlashSpec, DrafterSpec, LossSpec, TargetSpec, TrainSpec, dump
from remote.wire import WireError, decode

ROOT = Path(__file__).resolve().parent.parent
GIB, MIB = 1024**3, 1024**2
CAP_BYTES, STAND_IN_BYTES = 8 * GIB, 64 * MIB
TOGETHER = 5  # programs at once on one card; a stand-in has two cores and runs them in turn
LONGEST_S = 120.0
GROW = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
PIECES = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}

Sections = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Program:
    """A program of `oom_programs`, or with `changes` a rung of the bundled trainer."""

    name: str
    cause: str  # what is known to be the cause
    what: str  # it does, for a person
    env: dict[str, str] = field(default_factory=dict)
    changes: Sections | None = None
    stand_in_bytes: int | None = STAND_IN_BYTES  # None: only a card shows it
    takes_card: bool = False  # all of it: nothing may run beside it


CHECKPOINTED = {"activation_checkpointing": "non_reentrant"}
PROGRAMS = (
    Program("attention_chunks", "kept_chunks", "16 chunks of attention, K and V expanded in each"),
    Program("math_fallback", "math_fallback", "grouped heads and a boolean mask"),
    Program("full_logits", "full_logits", "student's and teacher's at once"),
    Program("backward", "backward", "a forward that fits"),
    Program("layers", "layer_activations", "the bundled trainer, none checkpointed", changes={}, stand_in_bytes=40 * MIB),
    Program("anchors", "too_many_tokens", "the same, checkpointed, too many", changes={"train": CHECKPOINTED, "data": {"max_anchors": 4096}}, stand_in_bytes=18 * MIB),
    Program("optimizer_state", "optimizer_state", "AdamW's first step"),
    Program("kept_over_steps", "kept_over_steps", "outputs remembered with their graphs"),
    Program("process_limit", "process_limit", "the limit is too low, nothing else"),
    Program("fragmentation", "fragmentation", "segments that do not grow", env=PIECES, stand_in_bytes=None),
    Program("other_process", "other_process", "another one holds all but 6 GiB", stand_in_bytes=None, takes_card=True),
    Program("library_workspace", "library_workspace", "no room for cuBLAS", stand_in_bytes=None, takes_card=True),
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    name: str
    cause: str
    named: str
    told: str  # the failure's one line
    hint: str
    suggestion: str  # the first one, as it was applied
    ran: bool
    seconds: float

    @property
    def is_right(self) -> bool:
        return self.named == self.cause


@dataclass(frozen=True)
class Bench:
    """Where and how the programs run."""

    folder: Path
    cap_bytes: int
    is_stand_in: bool

    def limit_bytes(self, program: Program) -> int:
        return (program.stand_in_bytes or 0) if self.is_stand_in else self.cap_bytes

    def run_dir(self, program: Program, number: int) -> RunDir:
        return RunDir(self.folder / "runs" / f"{program.name}-{number}")


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    if options.read is not None:
        return _read(options.read)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="oom-", dir="/tmp") as folder:
        bench = Bench(Path(folder), options.cap, options.stand_in or not _has_card())
        print(f"{_where(bench)}\n\n{HEAD}", flush=True)
        results: list[Result] = []
        try:
            for result in _results(bench, options):
                results.append(result)
        finally:
            _write(options.out, bench, results)
    _say_score(results)
    if options.ring and not bench.is_stand_in:
        _ring()
    return 0 if sum(result.is_right and result.ran for result in results) >= len(results) - 1 else 1


def _results(bench: Bench, options: argparse.Namespace) -> Iterator[Result]:
    """Prints each row as it is known."""
    started_s = time.monotonic()
    wanted = [program for program in PROGRAMS if options.only in program.name]
    if bench.is_stand_in:
        for program in [program for program in wanted if program.stand_in_bytes is None]:
            print(f"only a card shows {program.name}", flush=True)
        wanted = [program for program in wanted if program.stand_in_bytes is not None]

    def one(program: Program) -> Result | None:
        if time.monotonic() - started_s > options.budget:
            print(f"passed over, the budget of {options.budget:g} s is spent: {program.name}", flush=True)
            return None
        result = measure(program, bench)
        print(_row(result), flush=True)
        return result

    with ThreadPoolExecutor(1 if bench.is_stand_in else TOGETHER) as pool:
        yield from (found for found in pool.map(one, [each for each in wanted if not each.takes_card]) if found)
    for program in wanted:
        if program.takes_card and (found := one(program)) is not None:
            yield found


def measure(program: Program, bench: Bench) -> Result:
    """Runs out of memory, is told why, and runs again with the first suggestion."""
    started_s = time.monotonic()
    run = bench.run_dir(program, 1)
    with _beside(program, bench):
        ending = _run(program, bench, 1, spec=spec_of(program, bench), remedy=None)
    failure = explained(run.attempt(1), ending)
    word, text, spec = _first_suggestion(program, bench, failure)
    again = {} if word is None else _run(program, bench, 2, spec=spec, remedy=word)
    write_json(run.root / "about.json", {"name": program.name, "cause": program.cause, "suggestion": text})
    return _result(program.name, program.cause, failure, text, again, time.monotonic() - started_s)


def explained(attempt: AttemptDir, ending: dict[str, Any] | None) -> Failure | None:
    """The first cause that the attempt's own evidence shows, as the follower asks for it; None where it ended well."""
    told = [
        Told(path.name.split(".")[1], event.wall_s, event.fields)
        for path in sorted(attempt.root.glob("events.*.jsonl"))
        for event in _events(path)
        if event.kind == "failure"
    ]
    stderr = attempt.stderr_log.read_text("utf-8", "replace") if attempt.stderr_log.exists() else ""
    return next(iter(causes(Findings(told=told, stderr=stderr, exit_file=ending or {}))), None)


def _run(program: Program, bench: Bench, number: int, *, spec: DFlashSpec | None, remedy: str | None) -> dict[str, Any]:
    """One job under a supervisor, as every job is run; its exit file."""
    run = bench.run_dir(program, number)
    env = GROW if remedy == "expandable_segments" else program.env
    job = {"run_id": run.root.name, "kind": "script", "attempt": 1, "argv": _argv(program, bench, run, remedy)}
    job |= {"cwd": str(ROOT), "max_duration_s": LONGEST_S, "grace_s": 2.0}
    body = None if spec is None else json.loads(dump(spec))
    place(run, {"attempt": 1, "env": env, "job": job, "spec": body})
    command = [sys.executable, "-m", "remote.supervise", str(run.root), "--attempt", "1"]
    subprocess.run(command, cwd=ROOT, check=False, start_new_session=True, stdin=subprocess.DEVNULL)
    return read_json(run.attempt(1).exit_json) or {}


def _argv(program: Program, bench: Bench, run: RunDir, remedy: str | None) -> list[str]:
    limit = str(bench.limit_bytes(program))
    if program.changes is not None and not bench.is_stand_in:
        return [sys.executable, "-m", "remote.drafter", "rung", str(run.root), "fwd_bwd", "--cap", limit]
    name = program.name if program.changes is None else "rung-fwd_bwd"
    more = ["--stand-in"] if bench.is_stand_in else []
    more += ["--remedy", remedy] if remedy is not None and program.changes is None else []
    return [sys.executable, "-m", "benchmarks.oom_programs", name, "--limit", limit, *more]


def _first_suggestion(
    program: Program, bench: Bench, failure: Failure | None
) -> tuple[str | None, str, DFlashSpec | None]:
    """A word, what a person reads, and for the bundled trainer the changed spec."""
    spec = spec_of(program, bench)
    if spec is None:
        remedies = failure.facts.get("remedies") if failure is not None else None
        return (None, "none", None) if not remedies else (remedies[0]["word"], remedies[0]["text"], None)
    # A stand-in is too small for the plan's constants: there it is the first change that lowers the peak.
    offered = switches(spec) if bench.is_stand_in else nearest_fits(spec, partial(plan, capacity_bytes=bench.cap_bytes))
    if failure is None or not offered:
        return None, "none", None
    return "overrides", " ".join(f"--set {text}" for text in offered[0].overrides), offered[0].spec


@contextmanager
def _beside(program: Program, bench: Bench) -> Iterator[None]:
    """The foreign process, for the one program that dies of it; it is gone when the suggestion, to free the card, is tried."""
    if program.name != "other_process":
        yield
        return
    leave = str(bench.cap_bytes * 3 // 4)
    command = [sys.executable, "-m", "benchmarks.oom_programs", "hold", "--limit", leave]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdout.readline()  # it holds
        try:
            yield
        finally:
            holder.stdin.close()


# --------------------------------------------------------------------------------------- shapes


def spec_of(program: Program, bench: Bench) -> DFlashSpec | None:
    """Of the bundled trainer: a small target's shapes on a card, smaller ones on a stand-in."""
    if program.changes is None:
        return None
    base, changes = (_TINY, dict(program.changes)) if bench.is_stand_in else (SMALL, dict(program.changes))
    if bench.is_stand_in:
        changes.pop("data", None)
    return replace(base, **{name: replace(getattr(base, name), **values) for name, values in changes.items()})


SMALL = DFlashSpec(
    recipe="oom", branch="card", entry="dflash",
    target=TargetSpec("none", 2048, 24, 65_536, True, 1_500_000_000, 2, 2),
    drafter=DrafterSpec(6, 6144, 16, 8, 128, [1, 11, 21], 16, 3, 1e6, 8192, attention="sdpa"),
    data=DataSpec("p", "a", "h", row_tokens=4096, max_anchors=1024, anchors_per="row"),
    train=TrainSpec(num_steps=100, kernels="torch"),  # which compiles nothing, and keeps what eager operations keep
    loss=LossSpec(chunk_tokens=512),
)  # fmt: skip
_TINY = DFlashSpec(
    recipe="oom", branch="stand-in", entry="dflash",
    target=TargetSpec("none", 64, 24, 512, True, 1_000_000, 2, 2),
    drafter=DrafterSpec(6, 192, 4, 2, 16, [1, 11, 21], 8, 3, 1e6, 8192, attention="sdpa", attention_workspace_bytes=4 * MIB),
    data=DataSpec("p", "a", "h", row_tokens=512, max_anchors=256, anchors_per="row"),
    train=TrainSpec(num_steps=100, dtype="float32", kernels="torch"),
    loss=LossSpec(chunk_tokens=256),
)  # fmt: skip


# ---------------------------------------------------------------------------------- the table

HEAD = "| program | known cause | named as | right | first suggestion | ran | s |\n|---|---|---|---|---|---|---|"


def _result(
    name: str, cause: str, failure: Failure | None, suggestion: str, again: dict[str, Any], seconds: float
) -> Result:
    if failure is None:
        return Result(name, cause, "did not run out", "", "", suggestion, False, seconds)
    named = str(failure.facts.get("cause") or failure.facts.get("shortage") or failure.kind)
    return Result(name, cause, named, failure.message, failure.hint, suggestion, again.get("exit_code") == 0, seconds)


def _row(result: Result) -> str:
    right, ran = ("yes" if known else "NO" for known in (result.is_right, result.ran))
    return f"| {result.name} | {result.cause} | {result.named} | {right} | {result.suggestion} | {ran} | {result.seconds:.0f} |"


def _say_score(results: Sequence[Result]) -> None:
    right, ran = sum(result.is_right for result in results), sum(result.ran for result in results)
    print(f"\n{right} of {len(results)} named right; with the first suggestion {ran} of {len(results)} run", flush=True)
    for result in results:
        print(f"  {result.name}: {result.hint or result.told}", flush=True)


def _write(out: Path, bench: Bench, results: Sequence[Result]) -> None:
    """The table, the same as values, and one archive of all evidence but the snapshots, whose summaries it holds."""
    table = "\n".join([_where(bench), "", HEAD, *map(_row, results)])
    (out / "oom.md").write_text(f"{table}\n", encoding="utf-8")
    body = {"where": _where(bench), "results": [asdict(result) for result in results]}
    (out / "oom.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    with tarfile.open(out / "evidence.tar.gz", "w:gz") as archive:
        for path in sorted((bench.folder / "runs").rglob("*")):
            if path.is_file() and path.suffix != ".pickle":
                archive.add(path, path.relative_to(bench.folder))


def _read(out: Path) -> int:
    """What the evidence says today: the classifier may have changed since."""
    print(HEAD, flush=True)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(out / "evidence.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        for path in sorted(Path(folder).glob("runs/*/about.json")):
            about, run = json.loads(path.read_text(encoding="utf-8")), RunDir(path.parent)
            again = RunDir(path.parent.parent / f"{about['name']}-2").attempt(1)
            failure = explained(run.attempt(1), read_json(run.attempt(1).exit_json))
            ending = read_json(again.exit_json) or {}
            results.append(_result(about["name"], about["cause"], failure, about["suggestion"], ending, 0.0))
            print(_row(results[-1]), flush=True)
    _say_score(results)
    return 0 if sum(result.is_right for result in results) >= len(results) - 1 else 1


def _events(path: Path) -> Iterator[Any]:
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            yield decode(line)
        except WireError:
            continue


def _ring() -> None:
    subprocess.run([sys.executable, "-m", "benchmarks.oom_ring"], cwd=ROOT, check=False)


def _has_card() -> bool:
    """Asked in a process of its own: a context here would hold memory beside every program."""
    ask = "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 1)"
    return subprocess.run([sys.executable, "-c", ask], check=False).returncode == 0


def _where(bench: Bench) -> str:
    day = time.strftime("%Y-%m-%d")
    if bench.is_stand_in:
        return f"A counted limit of {format_size(STAND_IN_BYTES)} stands in for a card, {day}: this shows plumbing, no card"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        said = []
    return f"{said[0] if said else 'a card'}, capped at {format_size(bench.cap_bytes)}, {day}"


def _size(text: str) -> int:
    for unit, size in (("GiB", GIB), ("MiB", MIB)):
        if text.endswith(unit):
            return round(float(text.removesuffix(unit)) * size)
    raise argparse.ArgumentTypeError(f"{text}: a size such as 8GiB is due")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.oom", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results"), help="folder of the table and the evidence"
    )
    parser.add_argument("--budget", type=float, default=150.0, help="seconds after which no further program begins")
    parser.add_argument("--only", default="", help="programs whose name holds this text")
    parser.add_argument(
        "--cap", type=_size, default=CAP_BYTES, help="what a program may take of the card, such as 8GiB"
    )
    parser.add_argument("--stand-in", action="store_true", help="a counted limit on the CPU, even where a card is")
    parser.add_argument("--ring", action="store_true", help="also what recording allocations costs a step")
    parser.add_argument("--read", type=Path, metavar="FOLDER", help="the table from the evidence in FOLDER")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
