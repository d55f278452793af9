"""A training by role, each role's side of it: what a rank holds, what a batch costs it, and the queue between the two.

A drafter rank is the plan itself; what is known of a target's is in `target`. A batch is a micro-batch: rows_per_step rows, of which a step has train.accumulation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from remote.allocator import grows_segments
from remote.plan import SLACK_SHARE, Plan, verdict_of
from remote.plan.memory import Component
from remote.plan.target import OUTBOX, batch_bytes, pass_components, target_batch_flop
from remote.plan.time import CEILING_FLOP_PER_S
from remote.spec import DFlashSpec

TARGET_RANK = "target rank"  # of residuals, beside the stages: a rank of the target at its worst moment


@dataclass(frozen=True)
class RolePlan:
    """The ranks of one role: memory of each at its worst moment, and the arithmetic of a batch."""

    name: str  # target, drafter
    num_ranks: int
    components: tuple[Component, ...]
    unexplained_bytes: int  # that runs took beyond them, of a target's trainings alone: no smoke run has such a rank
    slack_bytes: int
    context_bytes: int
    capacity_bytes: int | None
    batch_flop: float
    least_batch_s: float | None  # at the measured ceiling; None where none was measured
    num_measured: int = 0  # runs that told what is unexplained

    @property
    def driver_bytes(self) -> int:
        """What must fit on the card of each rank."""
        allocated = sum(line.size_bytes for line in self.components)
        return allocated + self.unexplained_bytes + self.slack_bytes + self.context_bytes

    @property
    def verdict(self) -> str | None:
        return verdict_of(self.driver_bytes, self.capacity_bytes)


@dataclass(frozen=True)
class RolesPlan:
    """Both sides. Without target ranks each drafter has its hidden states itself."""

    drafter: RolePlan
    target: RolePlan | None
    batches_a_step: int
    batch_bytes: int  # of hidden states
    queue_capacity: int  # batches

    @property
    def each(self) -> tuple[RolePlan, ...]:
        return (self.drafter,) if self.target is None else (self.target, self.drafter)

    @property
    def queue_bytes(self) -> int:
        """On each drafter's card."""
        return 0 if self.target is None else self.queue_capacity * self.batch_bytes

    @property
    def machine_bytes(self) -> int:
        """Of all ranks together: what processes without cards take of one machine."""
        return sum(role.num_ranks * role.driver_bytes for role in self.each)

    def step_s(self, target_batch_s: float, drafter_batch_s: float) -> float:
        """Of a step, where a batch takes a rank so long and the queue hides the rest: the slower side decides."""
        a_batch = drafter_batch_s / self.drafter.num_ranks
        if self.target is not None:
            a_batch = max(a_batch, target_batch_s / self.target.num_ranks)
        return self.batches_a_step * a_batch

    @property
    def least_step_s(self) -> float | None:
        drafter_s, target_s = self.drafter.least_batch_s, 0.0 if self.target is None else self.target.least_batch_s
        return None if drafter_s is None or target_s is None else self.step_s(target_s, drafter_s)


def roles_plan(spec: DFlashSpec, made: Plan, residuals: Mapping[str, Sequence[int]] | None = None) -> RolesPlan | None:
    """None where one process does all. `residuals`: as `made` was planned with; of them TARGET_RANK is a target's."""
    roles, at = spec.roles, made.sizes
    if roles.target + roles.drafter == 1:
        return None
    drafter = RolePlan(
        name="drafter",
        num_ranks=roles.drafter,
        components=made.peak.components,
        unexplained_bytes=made.unexplained_bytes,
        slack_bytes=made.slack_bytes,
        context_bytes=made.context_bytes,
        capacity_bytes=made.capacity_bytes,
        batch_flop=made.work.total / spec.train.accumulation,
        least_batch_s=_least_s(made, made.work.total / spec.train.accumulation),
        num_measured=made.peak.num_measured,
    )
    target = _target(spec, made, (residuals or {}).get(TARGET_RANK, ())) if roles.target else None
    return RolesPlan(drafter, target, spec.train.accumulation, batch_bytes(at), roles.queue)


def _target(spec: DFlashSpec, made: Plan, seen: Sequence[int]) -> RolePlan:
    at, flop = made.sizes, target_batch_flop(spec, made.sizes)
    components = pass_components(spec, at, num_batches=OUTBOX + 1)
    allocated = sum(line.size_bytes for line in components)
    beyond = max(0, *seen, 0)  # a plan that was too high earns nothing
    slack = round(SLACK_SHARE[grows_segments(spec.env)] * (allocated + beyond)) if at.is_cuda else 0
    return RolePlan(
        name="target",
        num_ranks=spec.roles.target,
        components=components,
        unexplained_bytes=beyond,
        slack_bytes=slack,
        context_bytes=made.context_bytes,
        capacity_bytes=made.capacity_bytes,
        batch_flop=flop,
        least_batch_s=_least_s(made, flop),
        num_measured=len(seen),
    )


def _least_s(made: Plan, flop: float) -> float | None:
    return None if made.least_step_s is None else flop / CEILING_FLOP_PER_S
