"""What a training step takes: measured where the database has a step of the same shape, else the least it can take.

The two are never mixed: a bound is arithmetic at a rate that no training reaches, and is called a guess wherever it is
shown. It says nothing of a script of a user's own, and nothing of evaluation, start or data preparation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from orchestrator.actions.again import Words, command_line
from orchestrator.actions.shape import NUM_LOOKED_AT, gpu_of, is_of_shape, steps_climbed
from orchestrator.actions.throughput import mean_step
from orchestrator.store.reads import Reader
from orchestrator.store.rows import Kind
from orchestrator.units import duration
from remote.plan import Plan
from remote.plan.roles import roles_plan
from remote.plan.sizes import holds_target
from remote.plan.time import CEILING, CEILING_FLOP_PER_S
from remote.spec import DFlashSpec

SLOWER = "a card that does less takes as much longer"  # no rate of another card was measured


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, and who says so."""

    step_s: float
    num_steps: int
    is_measured: bool  # False: no less than this, a guess
    source: str

    @property
    def total_s(self) -> float:
        return self.step_s * self.num_steps


class Known(StrEnum):
    """How the cost of a change is known."""

    FLOP = "FLOP"  # a factor of a step's arithmetic: no time is known
    ESTIMATE = "est."  # seconds, by the arithmetic from measured ones
    LEAST = "least"  # seconds, a bound as today's are


class Cost(NamedTuple):
    """What a step takes with a change: seconds, or the factor of its arithmetic."""

    size: float
    known: Known

    @property
    def step_s(self) -> float | None:
        return None if self.known is Known.FLOP else self.size


def change_cost(time: StepTime | None, work_factor: float) -> Cost:
    """Of a change that makes `work_factor` of a step's arithmetic, from what a step takes today."""
    if time is None:
        return Cost(work_factor, Known.FLOP)
    return Cost(time.step_s * work_factor, Known.ESTIMATE if time.is_measured else Known.LEAST)


def time_sentence(time: StepTime | None, spec: DFlashSpec, measurer: str = "") -> str:
    """What is said of it on a page and on a screen. `measurer`: what `to_measure` says."""
    if time is None:
        return f"not measured yet: {measurer or to_measure(spec, None, host=None, has_gpu=None)}"
    all_of = f"{time_text(time.total_s)} for all {time.num_steps:,}{_not_counted(spec)}"
    steps = f"{time_text(time.step_s)} a step, {all_of}; {'measured: ' if time.is_measured else ''}{time.source}"
    return steps if time.is_measured else f"a guess: an H200 takes at least {steps}; {SLOWER}"


def _not_counted(spec: DFlashSpec) -> str:
    """What a training does beside its steps."""
    has_pass = spec.roles.target == 0 and not holds_target(spec)
    parts = [*(["the target's pass"] if has_pass else []), *(["the evaluation"] if spec.evaluate.at_end else [])]
    return f" without {' and '.join(parts)}" if parts else ""


def to_measure(spec: DFlashSpec, device: str | None, *, host: str | None, has_gpu: bool | None) -> str:
    """What would measure a step on such a device: a smoke run, but only where that would run on one.

    `has_gpu`: of the host that is named, or of this machine; None where that is not known. `device` None: whichever the
    smoke run takes.
    """
    if not _is_one_process(spec):
        return "a training with these roles does"
    is_there = _is_there(device, host, has_gpu)
    hosts = [host] if host is not None and is_there else [] if is_there else ["HOST"]
    line = command_line("smoke", Words(spec.recipe, spec.branch, hosts))
    kind = "with such a card" if device == "cuda" else "without a card"
    return f"{line} does" + ("" if is_there else f", on a host {kind}")


def _is_there(device: str | None, host: str | None, has_gpu: bool | None) -> bool:
    """Whether a smoke run, on the host or here, would run on such a device."""
    match device, has_gpu:
        case None, _:
            return True
        case _, None:  # a named host is believed to be what it was named for, this machine to have no card
            return host is not None or device == "cpu"
        case _:
            return has_gpu == (device == "cuda")


def time_text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 60 else duration(seconds)


def tflop(flop: float) -> str:
    """With the digits that count, and no power of ten: 1,820 TFLOP."""
    size = flop / 1e12
    return f"{size:,.0f} TFLOP" if size >= 100 else f"{size:.3g} TFLOP"


def bound(spec: DFlashSpec, made: Plan) -> StepTime | None:
    """None where no ceiling was measured: a processor, float32. Of several processes the slower role's."""
    roles = roles_plan(spec, made)
    if roles is not None and roles.least_step_s is not None:
        told = f"the slower role's {roles.batches_a_step} batches at {CEILING_FLOP_PER_S / 1e12:.0f} TFLOP/s, {CEILING}"
        return StepTime(roles.least_step_s, spec.train.num_steps, False, told)
    if made.least_step_s is None:
        return None
    told = f"{tflop(made.work.total)} at {CEILING_FLOP_PER_S / 1e12:.0f} TFLOP/s, {CEILING}"
    return StepTime(made.least_step_s, spec.train.num_steps, False, told)


def measured(reader: Reader, spec: DFlashSpec, made: Plan, *, host: str | None = None) -> StepTime | None:
    """Of the newest training of the same recipe, shape and kind of device, else of the newest rung `fwd_bwd`; on the
    host, where one is named."""
    rungs = _rungs(reader, spec) if _is_one_process(spec) else ()
    for run_id, on, step_s, what in (*_trainings(reader, spec), *rungs):
        gpu = gpu_of(reader, run_id)
        if host not in (None, on) or gpu is None or bool(gpu) != (made.device == "cuda"):
            continue
        if is_of_shape(reader, run_id, spec):
            where = f"{on}, {gpu}" if gpu else on
            return StepTime(step_s, spec.train.num_steps, True, f"{what} {run_id} on {where}")
    return None


def _is_one_process(spec: DFlashSpec) -> bool:
    """As a rung takes a step."""
    return spec.roles.target + spec.roles.drafter == 1


def _trainings(reader: Reader, spec: DFlashSpec) -> Iterator[tuple[str, str, float, str]]:
    """(run, host, seconds a step, in words), newest first."""
    for run in reader.runs(f"recipe:{spec.recipe}", kind=Kind.TRAIN, limit=NUM_LOOKED_AT):
        found = mean_step(reader, run)
        if found is not None:
            yield run.id, run.host, found.step_s, "run"


def _rungs(reader: Reader, spec: DFlashSpec) -> Iterator[tuple[str, str, float, str]]:
    for row in steps_climbed(reader, spec.recipe):
        step_s = row.values.get("step_s")
        if isinstance(step_s, float) and math.isfinite(step_s) and step_s > 0:
            yield row.run_id, row.host, step_s, "the worst batch, in smoke run"
