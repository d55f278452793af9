"""What a batch takes a rank of each role of a training: measured where the database has one of its shape, else a bound.

A rank's own work is the same however many there are of its role, so any division measures it, and a training or a rung
in one process measures a drafter. What they will wait for one another is arithmetic on both: see `remote.balance`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.actions.shape import NUM_LOOKED_AT, gpu_of, shape_of, spec_of, steps_climbed
from orchestrator.actions.step_time import StepTime, measured, tflop
from orchestrator.actions.throughput import mean_step, sides_of
from orchestrator.store.reads import Reader
from orchestrator.store.rows import Kind
from orchestrator.units import is_measurable
from remote.balance import Sides, predicted
from remote.plan import Plan
from remote.plan.roles import RolePlan, RolesPlan, roles_plan
from remote.plan.sizes import is_taught_ahead
from remote.plan.time import CEILING, CEILING_FLOP_PER_S
from remote.spec import DFlashSpec, RolesSpec


@dataclass(frozen=True)
class BatchTime:
    """Seconds of a batch at one rank, waiting left out, and who says so."""

    batch_s: float
    is_measured: bool  # False: no less than this, a guess
    source: str


@dataclass(frozen=True)
class ByRole:
    """Memory and time of both roles. A time is None where it is neither measured nor bounded."""

    plan: RolesPlan
    target: BatchTime | None
    drafter: BatchTime | None

    @property
    def sides(self) -> Sides | None:
        """Who will wait for whom; None without target ranks, or where a time is not known."""
        if self.plan.target is None or self.target is None or self.drafter is None:
            return None
        ranks = (self.plan.target.num_ranks, self.plan.drafter.num_ranks)
        return predicted(*ranks, self.target.batch_s, self.drafter.batch_s)

    @property
    def is_measured(self) -> bool:
        """Whether no time is a guess."""
        times = [self.drafter] if self.plan.target is None else [self.target, self.drafter]
        return all(time is not None and time.is_measured for time in times)

    def time_of(self, role: RolePlan) -> BatchTime | None:
        return self.target if role is self.plan.target else self.drafter


def by_role(
    reader: Reader | None,
    spec: DFlashSpec,
    made: Plan,
    *,
    host: str | None = None,
    residuals: Mapping[str, Sequence[int]] | None = None,
) -> ByRole | None:
    """None where one process does all. On the host, where one is named; without a database every time is a bound.
    `residuals`: as `made` was planned with.
    """
    found = roles_plan(spec, made, residuals)
    if found is None:
        return None
    seen = list(_measured(reader, spec, made, host)) if reader is not None else []
    target, drafter = (
        next((time for name, time in seen if name == role), None) or _bound(plan)
        for role, plan in (("target", found.target), ("drafter", found.drafter))
    )
    return ByRole(found, target, drafter)


def step_time(reader: Reader, spec: DFlashSpec, made: Plan, *, host: str | None = None) -> StepTime | None:
    """Of the whole training, as `measured` has it; where its roles are measured one by one, the slower side's."""
    whole = measured(reader, spec, made, host=host)
    return whole or _composed(by_role(reader, spec, made, host=host), spec)


def _composed(found: ByRole | None, spec: DFlashSpec) -> StepTime | None:
    if found is None or found.drafter is None or not found.is_measured:
        return None
    target_s = found.target.batch_s if found.target is not None else 0.0
    step_s = found.plan.step_s(target_s, found.drafter.batch_s)
    told = f"the slower role's {found.plan.batches_a_step} batches, each role as it was measured below"
    return StepTime(step_s, spec.train.num_steps, True, told)


def _bound(role: RolePlan | None) -> BatchTime | None:
    if role is None or role.least_batch_s is None:
        return None
    told = f"{tflop(role.batch_flop)} at {CEILING_FLOP_PER_S / 1e12:.0f} TFLOP/s, {CEILING}"
    return BatchTime(role.least_batch_s, False, told)


def _measured(reader: Reader, spec: DFlashSpec, made: Plan, host: str | None) -> Iterator[tuple[str, BatchTime]]:
    """(role, its batch), trainings first, the newest first."""
    for role, run_id, on, batch_s, what in (*_trainings(reader, spec), *_rungs(reader, spec)):
        gpu = gpu_of(reader, run_id)
        if host not in (None, on) or gpu is None or bool(gpu) != (made.device == "cuda") or not batch_s > 0:
            continue
        yield role, BatchTime(batch_s, True, f"{what} {run_id} on {f'{on}, {gpu}' if gpu else on}")


def _trainings(reader: Reader, spec: DFlashSpec) -> Iterator[tuple[str, str, str, float, str]]:
    """(role, run, host, seconds a batch, in words)"""
    for run in reader.runs(f"recipe:{spec.recipe}", kind=Kind.TRAIN, limit=NUM_LOOKED_AT):
        theirs = spec_of(reader, run.id)
        if theirs is None or not _is_alike(theirs, spec):
            continue
        sides, step = sides_of(reader, run), mean_step(reader, run)
        if sides is not None:
            yield "target", run.id, run.host, sides.target.busy_s, "run"
            yield "drafter", run.id, run.host, sides.drafter.busy_s, "run"
        elif step is not None and theirs.roles.target == 0:
            share = theirs.roles.drafter / theirs.train.accumulation
            yield "drafter", run.id, run.host, (step.step_s - step.parts_s.get("wait_s", 0.0)) * share, "run"


def _rungs(reader: Reader, spec: DFlashSpec) -> Iterator[tuple[str, str, str, float, str]]:
    for row in steps_climbed(reader, spec.recipe):
        theirs, step_s = spec_of(reader, row.run_id), row.values.get("step_s")
        if theirs is None or not isinstance(step_s, float) or not is_measurable(step_s):
            continue
        if _is_alike(theirs, spec):
            batch_s = step_s / theirs.train.accumulation
            yield "drafter", row.run_id, row.host, batch_s, "the worst batch, in smoke run"


def _is_alike(one: DFlashSpec, other: DFlashSpec) -> bool:
    """Whether a batch costs a rank the same: where the loss is not taught ahead it makes the target's logits itself."""
    return _work_of(one) == _work_of(other) and is_taught_ahead(one) == is_taught_ahead(other)


def _work_of(spec: DFlashSpec) -> DFlashSpec:
    """The shape, whatever the division: of what a batch costs a rank."""
    shape = shape_of(spec)
    return replace(
        shape,
        roles=RolesSpec(),
        life=replace(shape.life, num_gpus=1),
        data=replace(shape.data, hidden_states="online", num_workers=0),
        train=replace(shape.train, accumulation=1),
    )
