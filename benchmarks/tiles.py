"""Which tiles the kernels are fastest with on this card, kernel by kernel, at the shapes of a large step.

    python -m benchmarks.tiles [--budget SECONDS] [--out FOLDER] [--only TEXT] [--small]

Each kernel is launched with every setting of a small grid. A setting that does not compile, does not fit the shared
memory or gives other numbers than the standing one is named and passed over; the fastest three are timed once more, in
turns with the standing one, so that a card that has grown warm in the meantime slows all alike. `tiles.json` and
`tiles.md` are written anew after every kernel. What is found is written into the kernels' files by hand. Without a card,
or with --small, tiny shapes in Triton's interpreter show that it works (TRITON_INTERPRET=1); their numbers claim nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.step_parts import clock
from benchmarks.tiles_trials import Setting, Trial, trials

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of a result's norm
NUM_FINALISTS = 3
TIMED, TURNS = {"cuda": 5, "cpu": 1}, {"cuda": 10, "cpu": 1}  # launches of a setting, and of a finalist, after one more
SMALL_GRID = 2  # settings of a kernel in the interpreter


@dataclass(frozen=True)
class Outcome:
    """One kernel with one setting; without a time it was passed over."""

    kernel: str
    setting: Setting
    is_standing: bool
    ms: float | None = None
    note: str = ""  # equal bit for bit, how far off, or why it was passed over

    def line(self) -> str:
        words = " ".join(f"{name} {value}" for name, value in self.setting.items())
        time_ms = "        -" if self.ms is None else f"{self.ms:9.3f}"
        return f"{self.kernel:28s} {words:36s} {time_ms} ms  {'standing, ' * self.is_standing}{self.note}"


def search(trial: Trial, device: torch.device, *, stop_s: float = float("inf")) -> list[Outcome]:
    """Every setting tried, the standing one first; none begins once the monotonic clock says `stop_s`."""
    failures = _compile(trial, device)
    if failures[0]:
        return [Outcome(trial.name, trial.settings[0], True, note=failures[0])]
    oracle = [result.clone() for result in trial.run(**trial.settings[0])]
    outcomes = []
    for index, (setting, failure) in enumerate(zip(trial.settings, failures, strict=True)):
        note, ms = failure, None
        if not failure and time.monotonic() > stop_s:
            note = "passed over: the budget is spent"
        elif not failure:
            note, is_right = _compare(trial.run(**setting), oracle)
            ms = _time_ms([partial(trial.run, **setting)], TIMED[device.type], device)[0] if is_right else None
        outcomes.append(Outcome(trial.name, setting, index == 0, ms, note))
        print(outcomes[-1].line(), flush=True)
    return outcomes


def finals(trial: Trial, outcomes: Sequence[Outcome], device: torch.device) -> list[Outcome]:
    """The fastest and the standing setting, timed in turns; fastest first."""
    timed = sorted((each for each in outcomes if each.ms is not None), key=lambda each: each.ms or 0.0)
    chosen = timed[:NUM_FINALISTS] + [each for each in timed[NUM_FINALISTS:] if each.is_standing]
    times = _time_ms([partial(trial.run, **each.setting) for each in chosen], TURNS[device.type], device)
    again = [
        Outcome(each.kernel, each.setting, each.is_standing, ms, each.note)
        for each, ms in zip(chosen, times, strict=True)
    ]
    return sorted(again, key=lambda each: each.ms or 0.0)


def _compile(trial: Trial, device: torch.device) -> list[str]:
    """Launches each setting once, several compiling at a time; what went wrong with each, or nothing."""

    def attempt(setting: Setting) -> str:
        try:
            trial.run(**setting)
        except Exception as error:  # noqa: BLE001 - the compiler has many ways to refuse; each costs its setting alone
            return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        return ""

    first = attempt(trial.settings[0])  # alone, so that what all share is there
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1) if device.type == "cuda" else 1) as pool:
        failures = [first, *pool.map(attempt, trial.settings[1:])]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return failures


def _compare(results: Sequence[Tensor], oracle: Sequence[Tensor]) -> tuple[str, bool]:
    """Equal, or how far off the worst result is, and whether that is rounding."""
    worst, is_right = 0.0, True
    for result, expected in zip(results, oracle, strict=True):
        if torch.equal(result, expected):
            continue
        difference = (result.float() - expected.float()).norm() / expected.float().norm()
        off = float(difference)
        is_right &= off < TOLERANCE.get(result.dtype, 0.0)  # false for a NaN and for any other whole number
        worst = max(worst, off)
    return ("equal" if not worst and is_right else f"off by {worst:.1e}{'' if is_right else ': WRONG'}"), is_right


def _time_ms(runs: Sequence[Callable[[], object]], count: int, device: torch.device) -> list[float]:
    """The median of each, in turns."""
    marks = clock(device)
    for turn in range(device.type == "cpu", 1 + count):  # the interpreter does not grow warm
        for index, run in enumerate(runs):
            marks("start")
            run()
            marks(f"{index}" if turn else "warm")
    return [statistics.median(marks.milliseconds(f"{index}")) for index in range(len(runs))]


def _page(header: str, best: Sequence[Sequence[Outcome]], tried: Sequence[Outcome]) -> str:
    lines = [header, "", "| kernel | setting | ms | |", "|---|---|---|---|"]
    for each in (each for ranked in best for each in ranked):
        words = ", ".join(f"{name} {value}" for name, value in each.setting.items())
        lines.append(f"| {each.kernel} | {words} | {each.ms:.3f} | {'standing' if each.is_standing else each.note} |")
    return "\n".join([*lines, "", "Everything tried:", "", "```", *(each.line() for each in tried), "```"]) + "\n"


def _write(folder: Path, header: str, best: Sequence[Sequence[Outcome]], tried: Sequence[Outcome]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    body = {
        "header": header,
        "best": [[asdict(each) for each in ranked] for ranked in best],
        "tried": [asdict(each) for each in tried],
    }
    (folder / "tiles.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    (folder / "tiles.md").write_text(_page(header, best, tried), encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    device = torch.device("cuda", 0) if torch.cuda.is_available() and not options.small else torch.device("cpu")
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU, tiny shapes (no claim)"
    header = f"{card}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; `python -m benchmarks.tiles`"
    print(header, flush=True)
    started_s, best, tried = time.monotonic(), list[list[Outcome]](), list[Outcome]()
    for make in trials(device):
        trial = make()
        if options.only not in trial.name:
            continue
        if time.monotonic() - started_s > options.budget:
            print(f"{trial.name}: passed over, the budget of {options.budget:g} s is spent", flush=True)
            continue
        if device.type == "cpu":
            trial = trial.cut(SMALL_GRID)
        outcomes = search(trial, device, stop_s=started_s + options.budget)
        tried += outcomes
        best.append(finals(trial, outcomes, device))
        print("\n".join(f"  {'best: ' if not index else '      '}{each.line()}" for index, each in enumerate(best[-1])))
        _write(options.out, header, best, tried)
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiles", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results"), help="folder of tiles.json and tiles.md"
    )
    parser.add_argument("--budget", type=float, default=120.0, help="seconds after which no further setting begins")
    parser.add_argument("--only", default="", help="kernels whose name holds this text")
    parser.add_argument("--small", action="store_true", help="tiny shapes on the CPU")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
