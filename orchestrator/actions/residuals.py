"""What runs of the same shape took beyond their plan, smoke runs and trainings: memory that no line of the next plan explains
either."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from orchestrator.actions.card_names import kind_of
from orchestrator.actions.rank_places import rank_places
from orchestrator.actions.shape import NUM_LOOKED_AT, gpu_of, is_of_shape, spec_of, steps_climbed
from orchestrator.store.reads import Reader
from orchestrator.store.rows import Document, Kind, RunRow
from remote.plan import EVALUATION, Plan, plan
from remote.plan.roles import TARGET_RANK, roles_plan
from remote.spec import DFlashSpec


@dataclass(frozen=True)
class Runs:
    """Which runs measured something, the newest first."""

    run_ids: tuple[str, ...] = ()
    num_trainings: int = 0  # of those

    @property
    def num_smoke_runs(self) -> int:
        return len(self.run_ids) - self.num_trainings


@dataclass(frozen=True)
class Residuals:
    """Measured less planned bytes by stage, the target's pass, its ranks and the evaluation among them, one of each run; and the runs that told each, as a
    run need not reach every stage."""

    by_stage: dict[str, list[int]] = field(default_factory=dict)
    told_by: dict[str, Runs] = field(default_factory=dict)
    runs: Runs = Runs()  # all that told any stage


@dataclass(frozen=True)
class _Measured:
    """A run's peaks by stage. `tree`: the code it ran, None where nobody tells."""

    at_s: float
    run_id: str
    host: str
    tree: str | None
    rung: str | None  # None: a training
    peaks: Mapping[str, int]


def residuals(reader: Reader, spec: DFlashSpec, *, device: str, host: str | None = None) -> Residuals:
    """Of the newest rungs `fwd_bwd` and the newest trainings on this kind of device; on the host, where one is named.

    Held against today's plan of the rung or of the training: what an older plan did not know has been learnt since. Runs of
    other code than the recipe's newest say nothing of what today's takes; imported ones, whose code nobody tells, count
    where none is told.
    """
    planned = lru_cache(partial(_planned, spec, device))
    seen = sorted((*_rungs(reader, spec), *_trainings(reader, spec)), key=lambda run: run.at_s, reverse=True)
    tree = next((run.tree for run in seen if run.tree is not None), None)
    by_stage: dict[str, list[int]] = {}
    told_by: dict[str, list[_Measured]] = {}
    counted = []
    for run in seen:
        gpu = gpu_of(reader, run.run_id)
        if run.tree != tree or host not in (None, run.host) or gpu is None or bool(gpu) != (device == "cuda"):
            continue
        sizes = planned(run.rung, gpu)
        known = {name: size for name, size in run.peaks.items() if name in sizes}
        if EVALUATION in known and not _evaluates_alike(reader, run.run_id, spec):
            del known[EVALUATION]
        if not known or not is_of_shape(reader, run.run_id, spec):
            continue
        counted.append(run)
        for name, size in known.items():
            by_stage.setdefault(name, []).append(size - sizes[name])
            told_by.setdefault(name, []).append(run)
    return Residuals(by_stage, {name: _named(runs) for name, runs in told_by.items()}, _named(counted))


def _evaluates_alike(reader: Reader, run_id: str, spec: DFlashSpec) -> bool:
    """Steps of one shape may be followed by evaluations of other trees and answers."""
    theirs = spec_of(reader, run_id)
    return theirs is not None and replace(theirs.evaluate, num_prompts=1) == replace(spec.evaluate, num_prompts=1)


def _named(runs: Sequence[_Measured]) -> Runs:
    return Runs(tuple(run.run_id for run in runs), sum(run.rung is None for run in runs))


def _planned(spec: DFlashSpec, device: str, rung: str | None, gpu: str) -> dict[str, int]:
    made: Plan = plan(spec, device=device, rung=rung, **kind_of([gpu]))
    planned = {stage.name: stage.allocated_bytes for stage in made.stages}
    beside = (made.target_pass, made.evaluation) if rung is None else ()
    planned |= {stage.name: stage.allocated_bytes for stage in beside if stage is not None}
    roles = roles_plan(spec, made) if rung is None else None
    if roles is not None and roles.target is not None:
        planned[TARGET_RANK] = sum(line.size_bytes for line in roles.target.components)
    return planned


def _rungs(reader: Reader, spec: DFlashSpec) -> Iterator[_Measured]:
    for row in steps_climbed(reader, spec.recipe):
        ending = "_allocated_bytes"
        sizes = {name: size for name, size in row.values.items() if name.endswith(ending)}
        peaks = {
            name.removesuffix(ending): round(size) for name, size in sizes.items() if isinstance(size, int | float)
        }
        yield _Measured(row.at_s, row.run_id, row.host, row.fingerprint_parts.get("tree"), "fwd_bwd", peaks)


def _trainings(reader: Reader, spec: DFlashSpec) -> Iterator[_Measured]:
    """Of each its newest attempt, whose code its fingerprint is of."""
    for run in reader.runs(f"recipe:{spec.recipe}", kind=Kind.TRAIN, limit=NUM_LOOKED_AT):
        parts = json.loads(reader.document(run.id, Document.FINGERPRINT) or "{}")
        peaks = _peaks(reader, run)
        if peaks:
            yield _Measured(run.created_s, run.id, run.host, parts.get("tree"), None, peaks)


def _peaks(reader: Reader, run: RunRow) -> dict[str, int]:
    """Of the newest attempt by stage, the fullest drafter's; of ranks of the target, whose plan is one moment, the most."""
    rows = [row for row in reader.memory_peaks(run.id) if row.attempt == run.attempt and row.allocated_bytes]
    told = json.loads(reader.document(run.id, Document.SPEC) or "{}")
    targets = {place.rank for place in rank_places(run, told, {row.rank for row in rows}) if place.role == "target"}
    peaks: dict[str, int] = {}
    for row in rows:
        stage = TARGET_RANK if row.rank in targets else row.stage
        peaks[stage] = max(peaks.get(stage, 0), row.allocated_bytes or 0)
    return peaks
