"""What a training step takes: measured where the database has a step of the same shape, else the least it can take.

The two are never mixed: a bound is arithmetic at a rate that no training reaches, and is called a guess wherever it is
shown. It says nothing of a script of a user's own, and nothing of evaluation, start or data preparation.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from orchestrator.actions.throughput import mean_step
from orchestrator.store.reads import Reader
from orchestrator.store.rows import Document, Kind
from orchestrator.units import duration
from remote.plan import Plan
from remote.plan.time import CEILING, CEILING_FLOP_PER_S
from remote.spec import DFlashSpec, EvaluateSpec, LifeSpec, LossSpec, OptimSpec, SmokeSpec, parse

NUM_LOOKED_AT = 20  # newest runs, and newest rungs, of the recipe


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


def time_sentence(time: StepTime | None, spec: DFlashSpec) -> str:
    """What is said of it on a page and on a screen."""
    if time is None:
        return f"not measured yet: draftyard smoke {spec.recipe} -b {spec.branch} does"
    steps = f"{time_text(time.step_s)} a step, {time_text(time.total_s)} for all {time.num_steps:,}"
    return f"{steps}; measured: {time.source}" if time.is_measured else f"a guess: at least {steps}; {time.source}"


def time_text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 60 else duration(seconds)


def bound(spec: DFlashSpec, made: Plan) -> StepTime | None:
    """None where no ceiling was measured: a processor, float32."""
    if made.least_step_s is None:
        return None
    told = f"{made.work.total / 1e12:,.3g} TFLOP at {CEILING_FLOP_PER_S / 1e12:.0f} TFLOP/s, {CEILING}"
    return StepTime(made.least_step_s, spec.train.num_steps, False, told)


def measured(reader: Reader, spec: DFlashSpec, made: Plan, *, host: str | None = None) -> StepTime | None:
    """Of the newest training of the same recipe, shape and kind of device, else of the newest rung `fwd_bwd`; on the
    host, where one is named."""
    wanted = _timed(spec)
    for run_id, on, step_s, what in (*_trainings(reader, spec), *_rungs(reader, spec)):
        gpu = _gpu(reader, run_id)
        if host not in (None, on) or gpu is None or bool(gpu) != (made.device == "cuda"):
            continue
        theirs = _spec_of(reader, run_id)
        if theirs is not None and _timed(theirs) == wanted:
            where = f"{on}, {gpu}" if gpu else on
            return StepTime(step_s, spec.train.num_steps, True, f"{what} {run_id} on {where}")
    return None


def _trainings(reader: Reader, spec: DFlashSpec) -> Iterator[tuple[str, str, float, str]]:
    """(run, host, seconds a step, in words), newest first."""
    for run in reader.runs(f"recipe:{spec.recipe}", kind=Kind.TRAIN, limit=NUM_LOOKED_AT):
        found = mean_step(reader, run)
        if found is not None:
            yield run.id, run.host, found.step_s, "run"


def _rungs(reader: Reader, spec: DFlashSpec) -> Iterator[tuple[str, str, float, str]]:
    rows = (row for row in reader.evidence(recipe=spec.recipe) if row.rung == "fwd_bwd" and row.passed)
    for row in islice(rows, NUM_LOOKED_AT):
        step_s = row.values.get("step_s")
        if isinstance(step_s, float) and math.isfinite(step_s) and step_s > 0:
            yield row.run_id, row.host, step_s, "the worst batch, in smoke run"


def _gpu(reader: Reader, run_id: str) -> str | None:
    """The model of the card it had, as its fingerprint has it; empty where it had none, None where nobody tells.

    A run that was imported has no fingerprint.
    """
    parts = json.loads(reader.document(run_id, Document.FINGERPRINT) or "{}")
    if "gpu" not in parts:
        return None
    name = str(parts["gpu"])
    return "" if name == "none" else re.sub(r" \d+ bytes", "", name)


def _spec_of(reader: Reader, run_id: str) -> DFlashSpec | None:
    try:
        spec = parse(reader.document(run_id, Document.SPEC) or "{}", run_id)
    except (ValueError, TypeError, AttributeError):  # of another version, or brought from elsewhere
        return None
    return spec if isinstance(spec, DFlashSpec) else None


def _timed(spec: DFlashSpec) -> DFlashSpec:
    """The spec with everything alike that a step's time does not depend on: two of one shape are then equal."""
    data, loss, optim, train = spec.data, spec.loss, spec.optim, spec.train
    noise = replace(data.noise, scale=1.0)
    terms = {name: 1.0 for name, weight in loss.terms.items() if weight}
    return replace(
        spec,
        recipe="", branch="", why="", tags=[], evaluate=EvaluateSpec(), smoke=SmokeSpec(),
        life=LifeSpec(num_gpus=spec.life.num_gpus),
        target=replace(spec.target, source=""),
        drafter=replace(spec.drafter, init_from=None),
        data=replace(data, prompts="", answers="", held_out="", noise=noise, answer_tokens=1, answer_temperature=0.0, answer_batch=1),
        loss=LossSpec(terms, label=loss.label, decay=loss.decay, chunk_tokens=loss.chunk_tokens),
        optim=OptimSpec(optim.name, master_dtype=optim.master_dtype, moment_dtype=optim.moment_dtype),
        train=replace(train, num_steps=1, log_every=1, checkpoint_every=1, keep_last=1, seed=0),
    )  # fmt: skip
