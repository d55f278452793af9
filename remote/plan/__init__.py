"""The memory plan: what a training step will hold, line by line, from the recipe alone.

Standard library only, so a laptop without torch can plan. The numbers are predictions of three kinds that are never
mixed: *allocated* (bytes of tensors, as torch counts them), *reserved* (with the allocator's slack), *driver* (with the
CUDA context: what must fit on the card). What runs of the same shape were measured to take beyond their plan, and
no line explains, is a line of its own. `memory` holds the arithmetic, `advice` what each change would buy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from remote.allocator import grows_segments
from remote.plan.checked import Checked, checked
from remote.plan.evaluation import evaluation_components, path_bytes
from remote.plan.kernels import assumptions
from remote.plan.memory import Component
from remote.plan.moments import stage_components
from remote.plan.sizes import Sizes, compute_dtype, holds_target, sizes
from remote.plan.target import OUTBOX, conversion_bytes, pass_components
from remote.plan.time import CEILING_FLOP_PER_S, Work, work
from remote.spec import DFlashSpec

GIB = 1024**3
MULTI_DOC_DOCUMENTS = 3  # of the rung of that name
TARGET_PASS, EVALUATION = "target", "evaluating"  # stages before and after the steps, as the trainer names them

# Estimates, until measured on the machine at hand: they are part of no component.
CONTEXT_BYTES = {"cuda": 600 * 1024**2, "cpu": 0}  # driver context and kernels
SLACK_SHARE = {True: 0.02, False: 0.06}  # of allocated: with expandable segments, without
# Reserved beyond the planned peak, the least and the most of the cases of benchmarks/measured/plan.json: no rule from a
# recipe tells which. What of it is cached is given back when a step wants it, so it is in no verdict.
RESERVED_SEEN_BYTES = (round(0.04 * GIB), round(4.74 * GIB))
FITS_SHARE = 0.95  # a plan is right within 5 %: above this share of the capacity it is tight


@dataclass(frozen=True)
class StagePlan:
    """One stage at its worst moment.

    `unexplained_bytes`: measured less predicted, the most of `num_measured` runs: what no line explains
    (negative: every plan was too high). It is no part of what is predicted; what must fit has room for it.
    """

    name: str
    components: tuple[Component, ...]
    unexplained_bytes: int | None = None
    num_measured: int = 0

    @property
    def allocated_bytes(self) -> int:
        return sum(component.size_bytes for component in self.components)

    @property
    def seen_bytes(self) -> int:
        """Allocated, as predicted or, where runs took more, as they did; a plan that was too high earns nothing."""
        return self.allocated_bytes + max(0, self.unexplained_bytes or 0)


@dataclass(frozen=True)
class Plan:
    """What was asked, the four stages, and how they stand against a capacity."""

    device: str
    dtype: str
    sizes: Sizes
    stages: tuple[StagePlan, ...]
    slack_bytes: int  # at the peak: what the allocator holds beyond the tensors
    context_bytes: int
    host_queue_bytes: int  # hidden states read ahead, in the host's memory
    # Before training, computes hidden states once, as a target's rank does; None without one.
    target_pass: StagePlan | None
    target_pass_bytes: int  # what must fit of it, as predicted or, where trainings took more, as they did
    # After the last step; None where it is left out (evaluate.at_end), and of a rung.
    evaluation: StagePlan | None
    evaluation_bytes: int  # what must fit of it, likewise
    capacity_bytes: int | None
    # Of the card, beyond the capacity: left free by a step; the pass and the evaluation are no steps and may take it.
    reserve_bytes: int
    work: Work
    not_modelled: tuple[str, ...]
    checked: tuple[Checked, ...]  # the sizes that decide it, each with the range it was held against measured peaks in

    @property
    def peak(self) -> StagePlan:
        return max(self.stages, key=lambda stage: stage.seen_bytes)

    @property
    def driver_bytes(self) -> int:
        """What must fit: the peak stage, what runs took beyond it, the allocator's slack, the context."""
        return self.peak.seen_bytes + self.slack_bytes + self.context_bytes

    @property
    def unexplained_bytes(self) -> int:
        """What of that runs took beyond their plans, at the peak; 0 where none took more."""
        return self.peak.seen_bytes - self.peak.allocated_bytes

    @property
    def reserved_seen_bytes(self) -> tuple[int, int]:
        """Of reserved memory beyond a planned peak, the least and the most that were measured."""
        return RESERVED_SEEN_BYTES

    @property
    def headroom_bytes(self) -> int | None:
        return None if self.capacity_bytes is None else self.capacity_bytes - self.driver_bytes

    @property
    def verdict(self) -> str | None:
        """fits, tight or does not fit: the step, the pass before it or the evaluation after it; None without a capacity."""
        all_of = (self.step_verdict, self.pass_verdict, self.evaluation_verdict)
        return next((word for word in ("does not fit", "tight", "fits") if word in all_of), None)

    @property
    def step_verdict(self) -> str | None:
        return verdict_of(self.driver_bytes, self.capacity_bytes)

    @property
    def pass_verdict(self) -> str | None:
        """Of the target's pass before training; None where there is none, or no capacity."""
        return self._verdict_beside_steps(self.target_pass_bytes)

    @property
    def evaluation_verdict(self) -> str | None:
        """Of the evaluation at the end; None where there is none, or no capacity."""
        return self._verdict_beside_steps(self.evaluation_bytes)

    @property
    def least_step_s(self) -> float | None:
        """A step's arithmetic at the measured ceiling, so a lower bound for such a card; None where none was measured."""
        has_ceiling = self.device == "cuda" and self.dtype == "bfloat16"
        return self.work.seconds(CEILING_FLOP_PER_S) if has_ceiling else None

    @property
    def extrapolated(self) -> tuple[str, ...]:
        """Where it leaves the range it was checked in, one line each."""
        return tuple(size.told for size in self.checked if not size.is_inside)

    def _verdict_beside_steps(self, size_bytes: int) -> str | None:
        if self.capacity_bytes is None or not size_bytes:
            return None
        return verdict_of(size_bytes, self.capacity_bytes + self.reserve_bytes)

    def stage(self, name: str) -> StagePlan:
        return next(stage for stage in self.stages if stage.name == name)

    def table(self) -> list[tuple[str, dict[str, int]]]:
        """Rows (component, bytes by stage) in the order of the first stage that has them; zero lines left out."""
        rows: dict[str, dict[str, int]] = {}
        for stage in self.stages:
            for component in stage.components:
                cells = rows.setdefault(component.name, {})
                cells[stage.name] = cells.get(stage.name, 0) + component.size_bytes
        return [(name, cells) for name, cells in rows.items() if any(cells.values())]


def plan(
    spec: DFlashSpec,
    *,
    capacity_bytes: int | None = None,
    reserve_bytes: int = 0,
    has_pass: bool = True,
    device: str = "cuda",
    residuals: Mapping[str, Sequence[int]] | None = None,
    rung: str | None = None,
    is_hopper: bool | None = None,
    multiplies_float8: bool | None = None,
) -> Plan:
    """Predicts the peaks of one step at the worst batch the recipe allows.

    `residuals`: allocated peaks less what was planned of them, by stage, TARGET_PASS and EVALUATION among them, one of each run. `rung`: the smoke rung
    that is planned, None for a training, whose process holds more on a CPU. `is_hopper`: whether the card is of that
    kind, which has kernels of its own; `multiplies_float8`: whether it can; None: nobody said. `reserve_bytes`: `Plan` says.
    `has_pass` False: the hidden states are there already. ValueError: unknown device.
    """
    if device not in CONTEXT_BYTES:
        raise ValueError(f"device is {device!r}; a plan knows {' and '.join(CONTEXT_BYTES)}")
    documents = MULTI_DOC_DOCUMENTS if rung == "multi_doc" else None
    at = sizes(spec, device=device, documents=documents, is_hopper=is_hopper, multiplies_float8=multiplies_float8)
    seen = residuals or {}
    stages = tuple(_stage(name, lines, seen) for name, lines in stage_components(spec, at, rung=rung).items())
    before = _target_pass(spec, at, seen) if has_pass else None
    has_evaluation = spec.evaluate.at_end and rung is None
    after = _stage(EVALUATION, evaluation_components(spec, at), seen) if has_evaluation else None
    peak_bytes = max(stage.seen_bytes for stage in stages)
    return Plan(
        device=device,
        dtype=compute_dtype(spec, device),
        sizes=at,
        stages=stages,
        slack_bytes=round(SLACK_SHARE[grows_segments(spec.env)] * peak_bytes) if at.is_cuda else 0,
        context_bytes=CONTEXT_BYTES[device],
        host_queue_bytes=_host_queue_bytes(spec, at),
        target_pass=before,
        target_pass_bytes=0 if before is None else _must_fit(before.seen_bytes, spec, at),
        evaluation=after,
        evaluation_bytes=0 if after is None else _must_fit(after.seen_bytes, spec, at),
        capacity_bytes=capacity_bytes,
        reserve_bytes=reserve_bytes,
        work=work(spec, at),
        not_modelled=_not_modelled(spec, at, has_evaluation=after is not None),
        checked=checked(at),
    )


def verdict_of(driver_bytes: int, capacity_bytes: int | None) -> str | None:
    """fits, tight or does not fit; None without a capacity."""
    if capacity_bytes is None:
        return None
    if driver_bytes > capacity_bytes:
        return "does not fit"
    return "fits" if driver_bytes <= FITS_SHARE * capacity_bytes else "tight"


def _host_queue_bytes(spec: DFlashSpec, at: Sizes) -> int:
    """Batches read ahead: two a worker, and the one being handed over."""
    batch = at.context_tokens * at.state_bytes
    return batch * (2 * spec.data.num_workers + 1)


def _stage(name: str, lines: Sequence[Component], seen: Mapping[str, Sequence[int]]) -> StagePlan:
    return StagePlan(name, tuple(lines), max(seen.get(name, ()), default=None), len(seen.get(name, ())))


def _target_pass(spec: DFlashSpec, at: Sizes, seen: Mapping[str, Sequence[int]]) -> StagePlan | None:
    """Where a job of one role computes hidden states before it trains: what a rank of the target alone holds."""
    if spec.roles.target > 0 or holds_target(spec):
        return None
    return _stage(TARGET_PASS, pass_components(spec, at, num_batches=OUTBOX + 1), seen)


def _must_fit(allocated_bytes: int, spec: DFlashSpec, at: Sizes) -> int:
    """With the allocator's slack and the driver's context."""
    slack = round(SLACK_SHARE[grows_segments(spec.env)] * allocated_bytes) if at.is_cuda else 0
    return allocated_bytes + slack + (CONTEXT_BYTES["cuda"] if at.is_cuda else 0)


def _not_modelled(spec: DFlashSpec, at: Sizes, *, has_evaluation: bool) -> tuple[str, ...]:
    found = ["first calls: compilation and kernel selection (the first step may take more)"]
    if at.is_cuda:
        found += [
            "other processes on the card",
            "workspaces of libraries beyond cuBLAS",
            "fragmentation beyond the slack estimate",
        ]
    else:
        found += ["pages of mapped files, which the kernel takes back when memory is short"]
    found += assumptions(spec, at)
    if spec.optim.name == "muon":
        found.append("muon's temporaries are an estimate")
    if spec.roles.drafter > 1:
        found.append("time: what drafters wait for one another and for the sum of their gradients")
    if spec.roles.target > 0:
        found.append("a target's experts and states of linear attention, and its attention in a processor's memory")
    elif holds_target(spec):
        found.append("activations of the target while it computes hidden states")
    if converted := conversion_bytes(spec):
        size = converted / 2**30
        found.append(
            f"the first reading of a GGUF target on a host, which converts it: {size:.2f} GiB of the host's memory, an estimate"
        )
    if has_evaluation and (beyond := path_bytes(spec, at)):
        found.append(
            "in the evaluation, a target without a cache of keys (linear attention, experts): each path of a tree is read with "
            f"its whole text, up to {beyond / GIB:.2f} GiB more for 1,000 tokens of it"
        )
    return tuple(found)
