"""The plan of a branch: memory from the recipe alone, held against a capacity, and time, as it was measured where
the database knows it. No host is contacted."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from orchestrator.actions.history import MEMORY_REASONS, open_reader
from orchestrator.actions.host_facts import Card, NoGpu, can_name_gpu, card_of, gpu_fault, named_gpus
from orchestrator.actions.places import Places
from orchestrator.actions.recipes import Compared, resolve
from orchestrator.actions.residuals import Residuals, residuals
from orchestrator.actions.role_time import ByRole, by_role, step_time
from orchestrator.actions.step_time import StepTime, bound
from orchestrator.actions.telling import Tell, silent
from orchestrator.errors import StoreError, UsageError
from orchestrator.host import Hosts
from orchestrator.recipe import Resolved
from orchestrator.store.reads import Reader
from orchestrator.store.rows import FailureRow, Reason, RunRow
from remote.plan import FITS_SHARE, Plan, plan
from remote.plan.advice import Largest, Switch, largest_fit, nearest_fits, switches
from remote.spec import DFlashSpec, parse

Found = TypeVar("Found")
TIGHT = f"tight: less than {100 * (1 - FITS_SHARE):.0f} % is left, and a plan may be off by as much"
MOST_OFFERED = 5  # changes that a page shows, and that `smoke --try` takes

UNPLANNED = {  # stages of a training that no plan speaks of
    "target": "while the whole target was loaded or computed hidden states",
    "wait": "while data was read",
    "checkpoint": "while a checkpoint was written",
}


@dataclass(frozen=True)
class Planned:
    """A branch's memory plan, and against a capacity what would fit."""

    spec: DFlashSpec
    plan: Plan
    capacity_from: str  # who said the capacity: --gpu, a host as last seen, or nobody
    largest: Largest | None  # the most anchors that fit at this block size
    switches: list[Switch]  # single changes that lower the peak; what fits first where today's plan does not
    time: StepTime | None = None  # None: neither measured nor bounded
    by_role: ByRole | None = None  # where several processes share the training
    measured_in: tuple[str, ...] = ()  # the smoke runs whose unexplained memory it shows, newest first


@dataclass(frozen=True)
class Exceeded:
    """The stage that a run ended in, where it needed more than its plan had said; and the plan's largest line there."""

    stage: str
    planned_bytes: int  # allocated
    needed_bytes: int  # alive when it ended, and what was asked for
    component: str
    component_bytes: int


@dataclass(frozen=True)
class Fits:
    """What would fit instead of what ran out of memory."""

    planned: Planned | None
    short_bytes: int = 0  # what the run needed beyond its plan; what is offered leaves that free
    note: str = ""  # why nothing can be planned
    exceeded: Exceeded | None = None


class Ended(Protocol):
    """What is known of a run that has ended: the page of a verb, the detail of a screen."""

    @property
    def run(self) -> RunRow: ...
    @property
    def spec(self) -> Mapping[str, Any] | None: ...
    @property
    def plan(self) -> Mapping[str, Any] | None: ...
    @property
    def failures(self) -> Sequence[FailureRow]: ...


@dataclass(frozen=True)
class Effect:
    """What the differences of two recipes do."""

    name: str
    unit: str  # bytes, flop, tokens, s
    left: float
    right: float


def plan_memory(
    places: Places,
    word: str,
    *,
    branch: str | None = None,
    overrides: Sequence[str] = (),
    capacity_bytes: int | None = None,
    host: str | None = None,
    tell: Tell = silent,
) -> Planned:
    """Predicted memory and time of a step; the capacity is given, or that of a host's GPU as it was last seen.

    A database that cannot be read leaves the time a guess, and is told.
    """
    spec = _dflash(resolve(places, word, branch=branch, overrides=overrides)[1])
    told = "--gpu" if capacity_bytes is not None else "nobody"
    card = Card(capacity_bytes, "cuda" if capacity_bytes is not None else usual_device(spec), None)
    if host is not None:
        facts = _asked(places, lambda reader: _seen(reader, host, places), tell)
        if facts is None:  # whether the host was looked at is not known, nor anything that was measured
            return _unmeasured(_planned(spec, card, told))
        if capacity_bytes is None:
            card, told = _card(facts, host, device=usual_device(spec)), f"host {host} as last seen"
        elif facts.get("gpus"):
            card = card._replace(is_hopper=card_of(facts).is_hopper)
    seen = _asked(places, lambda reader: residuals(reader, spec, device=card.device, host=host), tell)
    found = _planned(spec, card, told, seen=seen)
    if seen is None:
        return _unmeasured(found)
    time, roles = _asked(
        places,
        lambda reader: (
            step_time(reader, spec, found.plan, host=host),
            by_role(reader, spec, found.plan, host=host),
        ),
        tell,
    ) or (None, by_role(None, spec, found.plan))
    return dataclasses.replace(found, time=time or bound(spec, found.plan), by_role=roles)


def _unmeasured(found: Planned) -> Planned:
    spec, made = found.spec, found.plan
    return dataclasses.replace(found, time=bound(spec, made), by_role=by_role(None, spec, made))


def _asked(places: Places, ask: Callable[[Reader], Found], tell: Tell) -> Found | None:
    """What the database says; None, and a word of why, where it cannot be read: arithmetic needs it for nothing."""
    try:
        with open_reader(places) as reader:
            return ask(reader)
    except StoreError as error:
        tell(f"what was measured before is not known: {error}")
        return None


def would_fit(places: Places, ended: Ended) -> Fits | None:
    """What would fit instead of a run that ran out of memory: planned with the run's own spec, whatever its recipe says
    today, against its card less what its plan had been short of. None for any other run.
    """
    kept = ended.plan or {}
    if not _is_of_the_plan(ended.run.reason, str(kept.get("device"))):
        return None
    short_bytes = _short_bytes(ended.failures, kept)
    try:
        spec = parse(json.dumps(dict(ended.spec or {})), f"run {ended.run.id}")
    except (ValueError, TypeError, AttributeError) as error:  # of another version, or brought from elsewhere
        return Fits(None, short_bytes, f"the stored spec cannot be read: {error}")
    if not isinstance(spec, DFlashSpec):
        return Fits(None, short_bytes, "a script of its own has no plan")
    stage = ended.failures[0].stage if ended.failures else None
    if stage in UNPLANNED:
        return Fits(
            None, note=f"it ran out {UNPLANNED[stage]}, of which its plan says nothing: no change of a step would help"
        )
    capacity_bytes, told = kept.get("capacity_bytes"), "the run's own"
    if capacity_bytes is None:
        with suppress(UsageError):  # a host that nobody has looked at
            capacity_bytes, told = (
                _seen_card(places, ended.run.host, device=str(kept["device"])).capacity_bytes,
                f"host {ended.run.host} as last seen",
            )
    capacity_bytes, told = _allowed(ended.failures, capacity_bytes, told)
    room_bytes = None if capacity_bytes is None else max(capacity_bytes - short_bytes, 0)
    kind = (kept.get("sizes") or {}).get("is_hopper")
    planned = _planned(spec, Card(room_bytes, str(kept["device"]), kind), told)
    return Fits(planned, short_bytes, exceeded=_exceeded(ended.failures, kept))


def _allowed(failures: Sequence[FailureRow], capacity_bytes: int | None, told: str) -> tuple[int | None, str]:
    """The card or the machine, or less where the process was allowed less: what fits must fit there."""
    facts = failures[0].facts if failures else {}
    limits = [facts.get(name) for name in ("allowed_bytes", "limit_bytes")]
    least = min((size for size in limits if isinstance(size, int)), default=None)
    if least is None or (capacity_bytes is not None and capacity_bytes <= least):
        return capacity_bytes, told
    return least, "what the process was allowed"


def usual_device(spec: DFlashSpec) -> str:
    """Where nobody says which: a recipe in float32 is for a processor, any other for a card."""
    return "cpu" if spec.train.dtype == "float32" else "cuda"


def effects(places: Places, compared: Compared, *, tell: Tell = silent) -> list[Effect]:
    """Memory, arithmetic and time of both sides on the left one's usual device, from their plans.

    A database that cannot be read leaves the times guesses, and is told. Raises UsageError for scripts of a user's own.
    """
    specs = [_dflash(side) for side in (compared.left, compared.right)]
    left, right = (plan(spec, device=usual_device(specs[0])) for spec in specs)
    stages = [
        Effect(f"{stage.name} allocated", "bytes", stage.allocated_bytes, right.stage(stage.name).allocated_bytes)
        for stage in left.stages
    ]
    return [
        *stages,
        Effect(f"must fit ({left.device})", "bytes", left.driver_bytes, right.driver_bytes),
        Effect("arithmetic of a step", "flop", left.work.total, right.work.total),
        Effect("block tokens of a step", "tokens", left.work.block_tokens, right.work.block_tokens),
        Effect("context tokens of a step", "tokens", left.work.context_tokens, right.work.context_tokens),
        *_time_effects(places, specs, [left, right], tell),
    ]


def _time_effects(places: Places, specs: Sequence[DFlashSpec], made: Sequence[Plan], tell: Tell) -> list[Effect]:
    """Measured on both sides, or guessed on both: a measured time beside a bound would compare nothing."""
    pairs = list(zip(specs, made, strict=True))
    times, told = _asked(places, lambda reader: [step_time(reader, *pair) for pair in pairs], tell), "measured"
    if times is None or None in times:
        times, told = [bound(*pair) for pair in pairs], "at least: a guess"
    left, right = times
    if left is None or right is None:
        return []
    return [
        Effect(f"time of a step, {told}", "s", left.step_s, right.step_s),
        Effect("time of all steps", "s", left.total_s, right.total_s),
    ]


def caution(switch: Switch) -> str:
    """What to beware of with a change: what it does to the training, and how little room it leaves."""
    return "; ".join(text for text in (switch.caution, TIGHT if switch.plan.verdict == "tight" else "") if text)


def plan_body(made: Plan) -> dict[str, Any]:
    """The plan as plain values, its sums included: what a document and the store keep."""
    sums = {
        "peak_stage": made.peak.name,
        "unexplained_bytes": made.unexplained_bytes,
        "driver_bytes": made.driver_bytes,
        "headroom_bytes": made.headroom_bytes,
    }
    stages = [{**dataclasses.asdict(stage), "allocated_bytes": stage.allocated_bytes} for stage in made.stages]
    return {**dataclasses.asdict(made), "stages": stages, **sums, "verdict": made.verdict}


def _planned(spec: DFlashSpec, card: Card, told: str, *, seen: Residuals | None = None) -> Planned:
    """The plan of a spec with what it advises, each change planned as the spec is."""
    known = seen or Residuals({}, ())
    capacity_bytes, device, is_hopper = card
    planned = partial(plan, capacity_bytes=capacity_bytes, device=device, is_hopper=is_hopper, residuals=known.by_stage)
    made = planned(spec)
    offered = nearest_fits if made.verdict == "does not fit" else switches
    largest = None if capacity_bytes is None else largest_fit(spec, planned)
    return Planned(spec, made, told, largest, offered(spec, planned), measured_in=known.run_ids)


def _is_of_the_plan(reason: str | None, device: str) -> bool:
    """Whether the memory that ran out is the one that the plan speaks of: a card's, or on a CPU the machine's own."""
    return reason == Reason.GPU_OOM if device == "cuda" else device == "cpu" and reason in MEMORY_REASONS


def _short_bytes(failures: Sequence[FailureRow], kept: Mapping[str, Any]) -> int:
    """What the failure shows to have been needed, less what the plan said must fit; never below zero."""
    facts = failures[0].facts if failures else {}
    sizes = [facts.get(name) for name in ("own_use_bytes", "requested_bytes")]
    needed_bytes = sum(size for size in sizes if isinstance(size, int))
    return max(0, needed_bytes - int(kept.get("driver_bytes") or 0)) if None not in sizes else 0


def _exceeded(failures: Sequence[FailureRow], kept: Mapping[str, Any]) -> Exceeded | None:
    """None where the failure names no stage, or says too little, or its plan was kept."""
    first = failures[0] if failures else None
    stage = next((each for each in kept.get("stages") or () if first is not None and each["name"] == first.stage), None)
    sizes = [first.facts.get(name) for name in ("allocated_bytes", "requested_bytes")] if first is not None else []
    known = [size for size in sizes if isinstance(size, int)]
    if stage is None or len(known) < 2 or sum(known) <= stage["allocated_bytes"]:
        return None
    most = max(stage["components"], key=lambda component: int(component["size_bytes"]))
    return Exceeded(stage["name"], stage["allocated_bytes"], sum(known), most["name"], most["size_bytes"])


def _dflash(resolved: Resolved) -> DFlashSpec:
    if not isinstance(resolved.spec, DFlashSpec):
        raise UsageError(f"recipe {resolved.spec.recipe} runs a script of its own; a plan is for the bundled trainer")
    return resolved.spec


def check_gpus(places: Places, host: str, names: Sequence[str]) -> None:
    """Contacts no host. Raises NoGpu for a name that fits no GPU of the host as last seen; of one never seen, for none that is."""
    with open_reader(places) as reader:
        facts = _seen(reader, host, places)
    if facts:
        named_gpus(facts.get("gpus") or (), names, host)
    elif wrong := [name for name in names if not can_name_gpu(name)]:
        raise NoGpu(f"GPU {wrong[0]!r} is neither an index, as 5, nor the beginning of a UUID, as GPU-4f1c88de")


def _seen_card(places: Places, host: str, *, device: str) -> Card:
    with open_reader(places) as reader:
        return _card(_seen(reader, host, places), host, device=device)


def _seen(reader: Reader, host: str, places: Places) -> Mapping[str, Any]:
    """The host's facts when it was last looked at, empty if never; UsageError for a name that nobody knows."""
    seen = next((row for row in reader.hosts() if row.name == host and row.facts), None)
    if seen is None:
        Hosts.load(places.hosts_file).find(host)
    return {} if seen is None else seen.facts


def _card(facts: Mapping[str, Any], host: str, *, device: str) -> Card:
    """The smallest GPU, or the machine where it has none. `device`: what the job is for."""
    if not facts:
        raise UsageError(f"host {host} has not been looked at yet; draftyard doctor {host} does, or give --gpu 95GiB")
    fault = gpu_fault(facts)
    if device == "cuda" and fault is not None and not facts.get("gpus"):
        raise UsageError(
            f"host {host} told of no GPU when it was last seen, as its driver fails: {fault}; give --gpu 95GiB"
        )
    return card_of(facts)
