"""Why a run is as fast as it is: its measured step beside a baseline's, in parts that sum to the difference.

Two runs may take different numbers of block tokens a step, so what is compared is seconds a thousand
block tokens (Ktok): there the parts of a step add up, and with them the difference of two runs. Only
what both runs timed is called a part; the rest is said to be in no timed part. It guesses nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from orchestrator.errors import UsageError
from orchestrator.store.reads import Reader
from orchestrator.store.rows import NUM_REPORTS, Document, Kind, RunRow, State
from orchestrator.units import is_measurable
from remote.balance import Pace, Sides, sentence
from remote.roles import Roles

# Metric of a part of a step -> what a person calls it; `wait_s` is the time a step waited for its data.
PARTS: Mapping[str, str] = {
    "wait_s": "data wait",
    "forward_s": "forward",
    "backward_s": "backward",
    "optimizer_s": "optimizer",
}
NUM_BASELINES = 8  # earlier runs looked at for one that told its step times
KTOK = 1000


@dataclass(frozen=True)
class MeanStep:
    """A run's step as its newest reports have it."""

    run_id: str
    branch: str
    step_s: float
    block_tokens: float  # of a step
    parts_s: Mapping[str, float] = field(default_factory=dict)  # by metric name; those that were timed
    num_reports: int = 1
    machine: Mapping[str, str] = field(default_factory=dict)  # GPU, torch, ... as launch saw them

    @property
    def block_tokens_per_s(self) -> float:
        return self.block_tokens / self.step_s

    def s_per_ktok(self, seconds: float) -> float:
        return seconds / self.block_tokens * KTOK


@dataclass(frozen=True)
class Part:
    """One timed part of a step, here and in the baseline."""

    name: str
    here_s: float
    there_s: float | None  # None: no baseline
    difference_s_per_ktok: float  # without a baseline: all of what it takes


@dataclass(frozen=True)
class Throughput:
    """A step explained. `parts` and `untimed_s_per_ktok` sum to `difference_s_per_ktok`."""

    here: MeanStep
    there: MeanStep | None
    difference_s_per_ktok: float  # positive: slower than the baseline; without one: all of the step
    parts: list[Part]  # the one that counts most first
    untimed_s_per_ktok: float
    machine: list[tuple[str, str, str]]  # what differs of the machines: name, here, there
    sentence: str


def of_run(reader: Reader, run: RunRow, *, against: RunRow | None = None) -> Throughput | None:
    """The run beside a baseline (default: the newest earlier succeeded training run of its recipe, else none).

    None when it has not told its step times. Raises UsageError when that is so of a baseline that was named.
    """
    here = mean_step(reader, run)
    if against is not None:
        there = mean_step(reader, against)
        if there is None or here is None:
            lacking = run if here is None else against
            known = reader.metric_names(lacking.id)
            missed = [name for name in ("step_s", "block_tokens_per_s") if name not in known]
            told = f"has reported no {' and no '.join(missed)}" if missed else "tells both in no step together"
            raise UsageError(
                f"run {lacking.id} {told}; speeds are held against each other by step_s and block_tokens_per_s"
            )
        return _with_roles(reader, run, explain(here, there))
    return None if here is None else _with_roles(reader, run, explain(here, _baseline(reader, run)))


def mean_step(reader: Reader, run: RunRow) -> MeanStep | None:
    """The mean of the newest reports of the newest attempt and lowest rank; None without step times and rates."""
    chosen = next(iter(reader.series(run.id, "block_tokens_per_s")), None)
    if chosen is None:
        return None
    told = {name: _newest(reader, run.id, name, chosen.attempt, chosen.rank) for name in ("step_s", *PARTS)}
    rates = _newest(reader, run.id, "block_tokens_per_s", chosen.attempt, chosen.rank)
    steps = [step for step, rate in rates.items() if rate > 0 and told["step_s"].get(step, 0) > 0]
    if not steps:
        return None
    timed = [name for name in PARTS if all(step in told[name] for step in steps)]
    return MeanStep(
        run.id,
        run.branch,
        step_s=_mean([told["step_s"][step] for step in steps]),
        block_tokens=_mean([told["step_s"][step] * rates[step] for step in steps]),
        parts_s={name: _mean([told[name][step] for step in steps]) for name in timed},
        num_reports=len(steps),
        machine=_machine(reader, run),
    )


def recent_mean(reader: Reader, run_id: str, name: str, *, attempt: int, rank: int = 0) -> float | None:
    """A metric over the newest reports of an attempt: what a step takes now. None where none was a finite number."""
    values = _newest(reader, run_id, name, attempt, rank)
    return _mean(list(values.values())) if values else None


def time_left_s(reader: Reader, run: RunRow) -> float | None:
    """Seconds to the last step of a run that takes steps, wherever it is told. None before the first step of its newest
    attempt, and where none is left: what comes before and after has a pace of its own."""
    if run.state is not State.RUNNING or run.step is None or not run.num_steps or run.step >= run.num_steps:
        return None
    step_s = step_s_now(reader, run)
    return None if step_s is None else step_s * (run.num_steps - run.step)


def step_s_now(reader: Reader, run: RunRow) -> float | None:
    """What a step of the newest attempt takes: as its newest reports say, of a job that does not time them by its clock."""
    ranks = [row.rank for row in reader.series(run.id, "step_s") if row.attempt == run.attempt]
    told = recent_mean(reader, run.id, "step_s", attempt=run.attempt, rank=min(ranks)) if ranks else None
    if told is not None:
        return told
    attempt = next((row for row in reader.attempts(run.id) if row.number == run.attempt), None)
    if attempt is None or attempt.first_step is None or attempt.last_step is None or not attempt.duration_s:
        return None
    num_steps = attempt.last_step - attempt.first_step
    return attempt.duration_s / num_steps if num_steps > 0 else None


def roles_told(reader: Reader, run: RunRow) -> str | None:
    """Which role of a training with target processes holds the other up; None for any other run, or before it has told."""
    spec = json.loads(reader.document(run.id, Document.SPEC) or "{}")
    roles, queue, sides = roles_of(run, spec), _count(spec, "roles", "queue"), sides_of(reader, run)
    if roles is None or queue is None or sides is None:
        return None
    depth, bytes_per_s = (
        recent_mean(reader, run.id, name, attempt=run.attempt, rank=roles.drafters[0])
        for name in ("queue_depth", "transfer_bytes_per_s")
    )
    return None if depth is None else sentence(sides, depth=depth, capacity=queue, bytes_per_s=bytes_per_s)


def sides_of(reader: Reader, run: RunRow) -> Sides | None:
    """Seconds a micro-batch, of the first drafter and the first target, which stand for their like; None as above."""
    spec = json.loads(reader.document(run.id, Document.SPEC) or "{}")
    roles, accumulation = roles_of(run, spec), _count(spec, "train", "accumulation")
    if roles is None or accumulation is None:
        return None
    a_step = accumulation / roles.num_drafters  # micro-batches of a drafter; a target tells each of its own
    drafter = _pace(reader, run, rank=roles.drafters[0], micro_batches=a_step)
    target = _pace(reader, run, rank=roles.targets[0], micro_batches=1)
    if drafter is None or target is None:
        return None
    return Sides(roles.num_targets, roles.num_drafters, target, drafter)


def roles_of(run: RunRow, spec: Mapping[str, Any]) -> Roles | None:
    """Who does what over the run's hosts, as its ranks count it themselves.

    None where every rank does both, or where an imported spec has no numbers.
    """
    targets, drafters = _count(spec, "roles", "target"), _count(spec, "roles", "drafter")
    return None if targets is None or drafters is None else Roles(drafters, targets, num_nodes=len(run.hosts))


def role_name(roles: Roles | None, rank: int) -> str:
    """`drafter` or `target`; empty where every rank is both."""
    return "" if roles is None else "drafter" if roles.is_drafter(rank) else "target"


def explain(here: MeanStep, there: MeanStep | None) -> Throughput:
    """Splits the difference of two steps into their timed parts; pure arithmetic."""
    shared = [name for name in here.parts_s if there is None or name in there.parts_s]
    parts = [
        Part(
            PARTS.get(name, name),
            here.parts_s[name],
            there.parts_s[name] if there else None,
            here.s_per_ktok(here.parts_s[name]) - (there.s_per_ktok(there.parts_s[name]) if there else 0.0),
        )
        for name in shared
    ]
    parts.sort(key=lambda part: -abs(part.difference_s_per_ktok))
    difference = here.s_per_ktok(here.step_s) - (there.s_per_ktok(there.step_s) if there else 0.0)
    untimed = difference - sum(part.difference_s_per_ktok for part in parts)
    machine = _differing(here.machine, there.machine) if there else []
    found = Throughput(here, there, difference, parts, untimed, machine, sentence="")
    return Throughput(**{**vars(found), "sentence": _sentence(found)})


def _with_roles(reader: Reader, run: RunRow, found: Throughput) -> Throughput:
    told = roles_told(reader, run)
    return found if told is None else replace(found, sentence=f"{found.sentence}; {told}")


def _count(spec: Mapping[str, Any], section: str, key: str) -> int | None:
    """A number of a spec that is 1 or more; None for any other, as an imported spec may hold anything."""
    told = spec.get(section)
    count = told.get(key) if isinstance(told, Mapping) else None
    return count if isinstance(count, int) and count >= 1 else None


def _pace(reader: Reader, run: RunRow, *, rank: int, micro_batches: float) -> Pace | None:
    step_s, wait_s = (
        recent_mean(reader, run.id, name, attempt=run.attempt, rank=rank) for name in ("step_s", "wait_s")
    )
    if step_s is None or wait_s is None:
        return None
    return Pace((step_s - wait_s) / micro_batches, wait_s / micro_batches)


def _sentence(found: Throughput) -> str:
    here, there = found.here, found.there
    if there is None:
        parts = "".join(f"{part.name} {_s(part.here_s)}, " for part in found.parts)
        untimed_s = found.untimed_s_per_ktok * here.block_tokens / KTOK
        return f"{_rate(here)} block tokens/s: {_step(here)}: {parts}in no timed part {_s(untimed_s)}"
    parts = "".join(
        f"{part.name} {_ms(part.difference_s_per_ktok)} ({_s(part.here_s)} a step, there {_s(part.there_s or 0)}), "
        for part in found.parts
    )
    machine = "".join(f"; {name} {ours}, there {theirs}" for name, ours, theirs in found.machine)
    return (
        f"{_rate(here)} against {_rate(there)} block tokens/s of run {there.run_id} ({there.branch}): "
        f"{_step(here)}, there {_step(there)}; {_ms(found.difference_s_per_ktok)} a Ktok: "
        f"{parts}in no timed part {_ms(found.untimed_s_per_ktok)}{machine}"
    )


def _step(step: MeanStep) -> str:
    return f"{_s(step.step_s)} a step of {step.block_tokens:,.0f} block tokens"


def _rate(step: MeanStep) -> str:
    """In the unit that lists, tables and progress have it in."""
    rate = step.block_tokens_per_s
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _s(seconds: float) -> str:
    """Never `-0.00 s`: what cannot be told from nothing is 0."""
    return f"{seconds:.2f} s" if abs(seconds) >= 0.995 or abs(seconds) < 0.0005 else f"{seconds:.3f} s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:+.1f} ms"


def _baseline(reader: Reader, run: RunRow) -> MeanStep | None:
    """Of the newest earlier succeeded training run of the same recipe that has told its step times."""
    if not run.recipe:
        return None
    pattern = re.sub(r"[^\w.-]", "?", run.recipe)  # a name brought from elsewhere may hold the filter's own marks
    until = datetime.fromtimestamp(run.created_s, UTC).isoformat()
    where = f"status:{State.SUCCEEDED} recipe:{pattern} until:{until}"
    earlier = reader.runs(where, kind=Kind.TRAIN, limit=NUM_BASELINES)
    found = (mean_step(reader, other) for other in earlier if other.recipe == run.recipe and other.id != run.id)
    return next((step for step in found if step is not None), None)


def _newest(reader: Reader, run_id: str, name: str, attempt: int, rank: int) -> dict[int, float]:
    """Step -> value of the newest reports; what is no number is left out."""
    values = reader.metric_values(run_id, name, attempt=attempt, rank=rank, last=NUM_REPORTS)
    return {value.step: value.value for value in values if is_measurable(value.value)}


def _machine(reader: Reader, run: RunRow) -> dict[str, str]:
    """What launch saw of the machine: GPUs, torch, CUDA, driver."""
    parts = json.loads(reader.document(run.id, Document.FINGERPRINT) or "{}")
    gpus = json.loads(reader.document(run.id, Document.LAUNCH) or "{}").get("gpus") or []
    told = {name: str(parts[name]) for name in ("torch", "cuda", "driver") if name in parts}
    return ({"GPUs": f"{len(gpus)} x {parts['gpu']}"} if "gpu" in parts else {}) | told


def _differing(here: Mapping[str, str], there: Mapping[str, str]) -> list[tuple[str, str, str]]:
    return [(name, here[name], there[name]) for name in here if name in there and here[name] != there[name]]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
