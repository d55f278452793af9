"""The plan of a branch: memory from the recipe alone, held against a capacity, and time, as it was measured where
the database knows it. No host is contacted."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from orchestrator.actions.card_names import KnownCard
from orchestrator.actions.history import MEMORY_REASONS, open_reader
from orchestrator.actions.host_facts import (
    Card,
    NoGpu,
    can_name_gpu,
    card_of,
    named_gpus,
    no_name_of_a_gpu,
)
from orchestrator.actions.kept import Kept, kept
from orchestrator.actions.places import Places
from orchestrator.actions.recipes import Compared, resolve
from orchestrator.actions.residuals import Residuals, residuals
from orchestrator.actions.role_time import ByRole, by_role, step_time
from orchestrator.actions.seen_card import card_seen, card_told
from orchestrator.actions.shortfall import GROW, allowed, exceeded, held, remedy_of_pieces, short_bytes
from orchestrator.actions.shortfall import Exceeded as Exceeded
from orchestrator.actions.step_time import StepTime, bound, to_measure
from orchestrator.actions.telling import Tell, silent
from orchestrator.errors import StoreError, UsageError
from orchestrator.failure.oom_text import FOREIGN_SHARE
from orchestrator.host import Hosts
from orchestrator.recipe import Resolved
from orchestrator.store.reads import Reader
from orchestrator.store.rows import FailureRow, Reason, RunRow
from remote.plan import EVALUATION, FITS_SHARE, Plan, plan
from remote.plan.advice import Largest, Switch, largest_fit, nearest_fits, switches, uses
from remote.plan.memory import target_bytes
from remote.spec import DFlashSpec, parse

Found = TypeVar("Found")
TIGHT = f"tight: less than {100 * (1 - FITS_SHARE):.0f} % is left, and a plan may be off by as much"
MOST_OFFERED = 5  # changes that a page shows, and that `smoke --try` takes

PAST_THE_PASS = ("forward", "backward", "step")  # stages that no training reaches before its hidden states are made
LEAST_CARD_BYTES = 64 * 2**20  # below it a size is a slip: of its unit, mostly
UNPLANNED = {  # stages of a training that no plan speaks of
    "target": "while the whole target was loaded or computed hidden states",
    "wait": "while data was read",
    "checkpoint": "while a checkpoint was written",
}
OF_THE_END = (
    "it ran out in the evaluation, after its last step and its last checkpoint: no change of a step would help; fewer "
    "evaluate.tree_budgets and evaluate.max_new_tokens take less, and evaluate.at_end=false leaves it out"
)


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
    measured: Residuals = field(default_factory=Residuals)  # by which runs what it calls unexplained was measured
    to_measure: str = ""  # what would measure its time, where nothing has
    uses: list[Switch] = field(default_factory=list)  # changes that take more of a card with room, and fit
    kept: Kept | None = None  # what its hidden states take on disk; None: nothing, or of a run that has ended


@dataclass(frozen=True)
class Fits:
    """What would fit instead of what ran out of memory: in the card, less what others held of it and the plan was short of."""

    planned: Planned | None
    short_bytes: int = 0  # what the run needed beyond its plan; what is offered leaves that free
    note: str = ""  # why nothing can be planned
    exceeded: Exceeded | None = None
    card_bytes: int | None = None  # the whole of it, or the machine; what the process was allowed, where that was less
    held_bytes: int = 0  # of the card, by other processes when the run ended: not free to anybody
    holders: tuple[int, ...] = ()  # their pids, where the failure names them
    pieces: str = ""  # the first thing to try where memory was there, but in pieces: no change of a plan

    @property
    def is_crowded(self) -> bool:
        """Whether what others hold is more than a display's or a context's: to free it is worth a word."""
        return self.held_bytes > FOREIGN_SHARE * (self.card_bytes or 0)


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
    gpu: KnownCard | None = None,
    host: str | None = None,
    tell: Tell = silent,
) -> Planned:
    """Predicted memory and time of a step; the capacity is given, or a known card's, or a host's GPU's as it was last seen.

    A database that cannot be read leaves the time a guess, and is told.
    """
    spec = _dflash(resolve(places, word, branch=branch, overrides=overrides)[1])
    if capacity_bytes is not None and capacity_bytes < LEAST_CARD_BYTES:
        raise UsageError(f"--gpu: {capacity_bytes:,} bytes are no card's memory; write a size such as 95GiB")
    told = "--gpu" if capacity_bytes is not None else "nobody"
    if gpu is not None:
        capacity_bytes, told = gpu.total_bytes, f"--gpu {gpu.name}, {gpu.told}"
    card = Card(capacity_bytes, "cuda" if capacity_bytes is not None else usual_device(spec), None)
    card = card if gpu is None else card._replace(**gpu.kind)
    if host is not None:
        facts = _asked(places, lambda reader: _seen(reader, host, places), tell)
        if facts is None:  # whether the host was looked at is not known, nor anything that was measured
            return _unmeasured(_planned(spec, card, told))
        if capacity_bytes is None:
            card, told = card_seen(facts, host, device=usual_device(spec)), card_told(facts, host)
        elif facts.get("gpus") and gpu is None:
            card = card_of(facts)._replace(capacity_bytes=card.capacity_bytes, device=card.device)
    seen = _asked(places, lambda reader: residuals(reader, spec, device=card.device, host=host), tell)
    found = _planned(spec, card, told, seen=seen)
    if seen is None:
        return _unmeasured(found)
    time, roles, has_gpu, on_disk = _asked(
        places,
        lambda reader: (
            step_time(reader, spec, found.plan, host=host),
            by_role(reader, spec, found.plan, host=host, residuals=seen.by_stage),
            _has_gpu(reader, host or places.host),
            kept(reader, spec, found.plan),
        ),
        tell,
    ) or (None, by_role(None, spec, found.plan, residuals=seen.by_stage), None, kept(None, spec, found.plan))
    measurer = to_measure(spec, card.device, host=host, has_gpu=has_gpu)
    return dataclasses.replace(
        found, time=time or bound(spec, found.plan), by_role=roles, to_measure=measurer, kept=on_disk
    )


def _unmeasured(found: Planned) -> Planned:
    spec, made = found.spec, found.plan
    measurer = to_measure(spec, made.device, host=None, has_gpu=None)
    roles, on_disk = by_role(None, spec, made), kept(None, spec, made)
    return dataclasses.replace(found, time=bound(spec, made), by_role=roles, to_measure=measurer, kept=on_disk)


def _has_gpu(reader: Reader, host: str) -> bool | None:
    """As the host was last seen; None for one that nobody has looked at."""
    return next((bool(row.facts.get("gpus")) for row in reader.hosts() if row.name == host and row.facts), None)


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
    today, against its card less what its plan had been short of. Of a script of one's own the allocator's setting alone, where
    memory lay in pieces. None for any other run.
    """
    kept = ended.plan or {}
    facts = ended.failures[0].facts if ended.failures else {}
    if (ended.spec or {}).get("entry") == "script" and remedy_of_pieces(facts) == GROW:
        return Fits(None, note="a script of its own has no plan", pieces=GROW)
    if not _is_of_the_plan(ended.run.reason, str(kept.get("device"))):
        return None
    beyond_bytes = short_bytes(ended.failures, kept)
    try:
        spec = parse(json.dumps(dict(ended.spec or {})), f"run {ended.run.id}")
    except (ValueError, TypeError, AttributeError) as error:  # of another version, or brought from elsewhere
        return Fits(None, beyond_bytes, f"the stored spec cannot be read: {error}")
    if not isinstance(spec, DFlashSpec):
        return Fits(None, beyond_bytes, "a script of its own has no plan")
    stage = ended.failures[0].stage if ended.failures else None
    if stage == EVALUATION:
        return Fits(None, note=OF_THE_END)
    if stage in UNPLANNED:
        return Fits(
            None, note=f"it ran out {UNPLANNED[stage]}, of which its plan says nothing: no change of a step would help"
        )
    capacity_bytes, told = kept.get("capacity_bytes"), "the run's own"
    if capacity_bytes is None and isinstance(facts.get("total_bytes"), int):
        capacity_bytes, told = facts["total_bytes"], "as its failure names it"
    if capacity_bytes is None:
        with suppress(UsageError):  # a host that nobody has looked at
            capacity_bytes, told = (
                _seen_card(places, ended.run.host, device=str(kept["device"])).capacity_bytes,
                f"host {ended.run.host} as last seen",
            )
    held_bytes, holders = held(facts) if kept["device"] == "cuda" else (0, ())
    card_bytes, told = allowed(facts, capacity_bytes, told)
    room_bytes = card_bytes
    if capacity_bytes is not None and card_bytes is not None:
        room_bytes = min(max(capacity_bytes - held_bytes, 0), card_bytes)
    kind = kept.get("sizes") or {}
    room = Card(room_bytes, str(kept["device"]), kind.get("is_hopper"), kind.get("multiplies_float8"))
    planned = _planned(spec, room, told, reserve_bytes=beyond_bytes, is_begun=stage in PAST_THE_PASS)
    time = _asked(places, lambda reader: step_time(reader, spec, planned.plan, host=ended.run.host), silent)
    return Fits(
        dataclasses.replace(planned, time=time or bound(spec, planned.plan)),
        beyond_bytes,
        "",
        exceeded(ended.failures, kept),
        card_bytes,
        held_bytes,
        holders,
        remedy_of_pieces(facts),
    )


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


def target_loaded_bytes(found: Planned) -> int:
    """What a training holds of a card before its first step, prepared or not: the target's weights and the context."""
    return target_bytes(found.spec, found.plan.sizes) + found.plan.context_bytes


def caution(switch: Switch) -> str:
    """What to beware of with a change: what it does to the training, and how little room it leaves."""
    return "; ".join(text for text in (switch.caution, TIGHT if switch.plan.step_verdict == "tight" else "") if text)


def plan_body(made: Plan) -> dict[str, Any]:
    """The plan as plain values, its sums included: what a document and the store keep."""
    sums = {
        "peak_stage": made.peak.name,
        "extrapolated": list(made.extrapolated),
        "unexplained_bytes": made.unexplained_bytes,
        "driver_bytes": made.driver_bytes,
        "headroom_bytes": made.headroom_bytes,
    }
    stages = [{**dataclasses.asdict(stage), "allocated_bytes": stage.allocated_bytes} for stage in made.stages]
    beside = {
        name: stage and {**dataclasses.asdict(stage), "allocated_bytes": stage.allocated_bytes}
        for name, stage in (("target_pass", made.target_pass), ("evaluation", made.evaluation))
    }
    names = ("verdict", "step_verdict", "pass_verdict", "evaluation_verdict")
    return {
        **dataclasses.asdict(made),
        "stages": stages,
        **beside,
        **sums,
        **{name: getattr(made, name) for name in names},
    }


def _planned(
    spec: DFlashSpec,
    card: Card,
    told: str,
    *,
    seen: Residuals | None = None,
    reserve_bytes: int = 0,
    is_begun: bool = False,
) -> Planned:
    """The plan of a spec with what it advises, each change planned as the spec is; of the card so much is left free.

    `is_begun`: its hidden states were made, so that no pass of the target has to fit any more.
    """
    known = seen or Residuals()
    capacity_bytes, device, is_hopper, multiplies_float8 = card
    if capacity_bytes is not None:
        capacity_bytes = max(capacity_bytes - reserve_bytes, 0)
    planned = partial(
        plan,
        capacity_bytes=capacity_bytes,
        reserve_bytes=reserve_bytes,
        device=device,
        is_hopper=is_hopper,
        multiplies_float8=multiplies_float8,
        residuals=known.by_stage,
        has_pass=not is_begun,
    )
    made = planned(spec)
    offered = nearest_fits if made.step_verdict == "does not fit" else switches
    largest = None if capacity_bytes is None else largest_fit(spec, planned)
    advised = offered(spec, planned)
    spent = [] if capacity_bytes is None else uses(spec, planned)
    return Planned(spec, made, told, largest, advised, measured=known, uses=spent)


def _is_of_the_plan(reason: str | None, device: str) -> bool:
    """Whether the memory that ran out is the one that the plan speaks of: a card's, or on a CPU the machine's own."""
    return reason == Reason.GPU_OOM if device == "cuda" else device == "cpu" and reason in MEMORY_REASONS


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
        raise NoGpu(f"GPU {no_name_of_a_gpu(wrong[0])}")


def _seen_card(places: Places, host: str, *, device: str) -> Card:
    with open_reader(places) as reader:
        return card_seen(_seen(reader, host, places), host, device=device)


def _seen(reader: Reader, host: str, places: Places) -> Mapping[str, Any]:
    """The host's facts when it was last looked at, empty if never; UsageError for a name that nobody knows."""
    seen = next((row for row in reader.hosts() if row.name == host and row.facts), None)
    if seen is None:
        Hosts.load(places.hosts_file).find(host)
    return {} if seen is None else seen.facts
