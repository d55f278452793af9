"""What each change of the recipe would buy, in bytes and time, and the largest step that fits.

Every change is a list of overrides, so that a person can type it and a smoke rung can try it. A change that does not
lower the peak is not offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from remote.coherence import cross_field_errors
from remote.plan import Plan, plan
from remote.spec import DFlashSpec

MIN_CHUNK_TOKENS = 128
MOST_DOUBLED = 4  # times that a use of room doubles a number: 16 of it

BEYOND = "beyond the sizes that plans were held against measured peaks in"

# Plans a changed spec as today's was: against the same capacity, on the same device, with what smoke runs have taught.
Planner = Callable[[DFlashSpec], Plan]
_Fields = dict[str, dict[str, Any]]  # sections with fields to replace


@dataclass(frozen=True)
class Switch:
    """One change: what to set, the plan with it, and the arithmetic it costs."""

    name: str
    overrides: tuple[str, ...]  # section.key=value
    spec: DFlashSpec
    plan: Plan
    saved_bytes: int  # of what must fit, its allocator's slack included
    work_factor: float  # FLOP of a step by those of today; an estimate of time where arithmetic decides it
    keeps_result: bool  # the same training up to rounding
    caution: str = ""


@dataclass(frozen=True)
class Largest:
    """The most anchors that fit at a block size, everything else as in the recipe."""

    max_anchors: int
    block_size: int
    block_tokens: int
    driver_bytes: int
    is_extrapolated: bool  # beyond the sizes that plans were held against measured peaks in


@dataclass(frozen=True)
class _Change:
    """Sections with fields to replace."""

    name: str
    fields: _Fields
    keeps_result: bool = True
    caution: str = ""


def switches(spec: DFlashSpec, planned: Planner = plan) -> list[Switch]:
    """Single changes that lower the peak, the best saving first, those that keep the result before those that do not."""
    today = planned(spec)
    found = []
    for change in _changes(spec, today, planned):
        changed = _with(spec, change.fields)
        then = planned(changed)
        saved = today.driver_bytes - then.driver_bytes
        if saved > 0:
            factor = then.work.total / today.work.total
            found.append(
                Switch(
                    change.name, _overrides(change), changed, then, saved, factor, change.keeps_result, change.caution
                )
            )
    return sorted(_folded(found, today), key=lambda switch: (not switch.keeps_result, -switch.saved_bytes))


def _folded(found: list[Switch], today: Plan) -> list[Switch]:
    """Of two chunk lengths one: the longer where it makes fit what did not, else the one that saves more."""
    chunks = [switch for switch in found if _keys(switch) == ["loss.chunk_tokens"]]
    if not chunks:
        return found
    makes_fit = [switch for switch in chunks if today.step_verdict != "fits" and switch.plan.step_verdict == "fits"]
    kept = makes_fit[0] if makes_fit else max(chunks, key=lambda switch: switch.saved_bytes)
    return [switch for switch in found if switch is kept or switch not in chunks]


def nearest_fits(spec: DFlashSpec, planned: Planner) -> list[Switch]:
    """Changes whose plan fits: single ones, else those that keep the result one after the other until it fits.

    Where none fits with room to spare, those that are tight: a plan may be off by more than they leave. None without a
    capacity.
    """
    for verdict in ("fits", "tight"):
        found = _nearest(spec, verdict, planned)
        if found:
            return found
    return []


def _nearest(spec: DFlashSpec, verdict: str, planned: Planner) -> list[Switch]:
    offered = switches(spec, planned)
    single = [switch for switch in offered if switch.plan.step_verdict == verdict]
    if single or not offered:
        return sorted(single, key=lambda switch: (not switch.keeps_result, switch.work_factor))
    first = offered[0]
    return [
        replace(
            then,
            name=then.name if set(_keys(first)) <= set(_keys(then)) else f"{first.name}, {then.name}",
            overrides=(*(text for text in first.overrides if _key(text) not in _keys(then)), *then.overrides),
            saved_bytes=first.saved_bytes + then.saved_bytes,
            work_factor=first.work_factor * then.work_factor,
            keeps_result=first.keeps_result and then.keeps_result,
        )
        for then in _nearest(first.spec, verdict, planned)
    ]


def largest_fit(spec: DFlashSpec, planned: Planner) -> Largest | None:
    """None where not even one anchor fits. Anchors beyond one a context token do not exist."""
    low, high = 0, spec.data.row_tokens  # `low` fits, or is 0
    best: Plan | None = None
    while low < high:
        middle = (low + high + 1) // 2
        then = planned(_with(spec, {"data": {"max_anchors": middle}}))
        if then.step_verdict == "fits":
            low, best = middle, then
        else:
            high = middle - 1
    if best is None:
        return None
    return Largest(low, spec.drafter.block_size, best.sizes.block_tokens, best.driver_bytes, bool(best.extrapolated))


def uses(spec: DFlashSpec, planned: Planner) -> list[Switch]:
    """Single changes that take more of a card with room and fit it with room to spare, the target's pass included: those that
    keep the result first, then the cheaper ones. None where today's plan does not fit so, or no capacity is known.
    """
    today = planned(spec)
    found = []
    for change in _uses(spec, today, planned) if today.verdict == "fits" else ():
        changed = _with(spec, change.fields)
        then = planned(changed)
        more = then.driver_bytes - today.driver_bytes
        if more > 0 and not cross_field_errors(changed) and then.verdict == "fits":
            factor = then.work.total / today.work.total
            texts = _overrides(change)
            is_far = bool(then.extrapolated) and not today.extrapolated
            beware = "; ".join(text for text in (change.caution, BEYOND if is_far else "") if text)
            found.append(Switch(change.name, texts, changed, then, -more, factor, change.keeps_result, beware))
    return sorted(found, key=lambda switch: (not switch.keeps_result, switch.work_factor))


def _uses(spec: DFlashSpec, today: Plan, planned: Planner) -> Iterator[_Change]:
    train, optim, data = spec.train, spec.optim, spec.data
    if train.activation_checkpointing != "none":
        yield _Change("keep all activations", {"train": {"activation_checkpointing": "none"}})
    if optim.moment_dtype != "float32":
        yield _Change("moments in float32", {"optim": {"moment_dtype": "float32"}}, False, "rounded less")
    if optim.master_dtype == "none" and today.dtype != "float32":
        yield _Change("fp32 masters", {"optim": {"master_dtype": "float32"}}, False, "small updates are kept")
    if spec.loss.hidden_gradient == "full":
        yield _Change(
            "hidden gradient in fp8",
            {"loss": {"hidden_gradient": "auto"}},
            False,
            "the loss is as exact as before, its gradient is not",
        )
    largest = largest_fit(spec, planned)
    if largest is not None and largest.max_anchors > data.max_anchors:
        fields = {"data": {"max_anchors": largest.max_anchors}}
        yield _Change(f"{largest.max_anchors:,} anchors", fields, False, "more training signal a row")
    if spec.roles.target:
        return  # what follows changes a target's batches too
    accumulated = _doubled(spec, planned, lambda more: _rows(spec, more) if not train.accumulation % more else None)
    if accumulated:
        times = train.accumulation // accumulated["train"]["accumulation"]
        yield _Change(f"{times} times the rows at once, accumulated less often", accumulated)
    rows = _doubled(spec, planned, lambda more: {"train": {"rows_per_step": train.rows_per_step * more}})
    if rows:
        name = f"{rows['train']['rows_per_step']:,} rows at once"
        yield _Change(name, rows, False, "as many more rows a step, with another best rate")
    longer = 2 * data.row_tokens  # no further: how much room there is says nothing of how long documents are
    if longer <= spec.drafter.max_position_embeddings:
        gain = f"only documents longer than {data.row_tokens:,} tokens gain, which are cut there now; as many anchors on more tokens"
        yield _Change(f"rows of {longer:,} tokens", {"data": {"row_tokens": longer}}, False, gain)


def _rows(spec: DFlashSpec, more: int) -> _Fields:
    train = spec.train
    return {"train": {"rows_per_step": train.rows_per_step * more, "accumulation": train.accumulation // more}}


def _doubled(spec: DFlashSpec, planned: Planner, fields_of: Callable[[int], _Fields | None]) -> _Fields | None:
    """Of twice, four times and so on the most that fits, None where twice does not."""
    best = None
    for power in range(1, MOST_DOUBLED + 1):
        fields = fields_of(2**power)
        if fields is None or cross_field_errors(_with(spec, fields)) or planned(_with(spec, fields)).verdict != "fits":
            break
        best = fields
    return best


def _changes(spec: DFlashSpec, today: Plan, planned: Planner) -> Iterator[_Change]:
    train, optim, loss = spec.train, spec.optim, spec.loss
    if train.activation_checkpointing == "none":
        yield _Change("checkpoint each layer", {"train": {"activation_checkpointing": "non_reentrant"}})
    for share in (2, 4):
        if loss.chunk_tokens // share >= MIN_CHUNK_TOKENS:
            chunk = loss.chunk_tokens // share
            yield _Change(f"loss chunks of {chunk:,} tokens", {"loss": {"chunk_tokens": chunk}})
    if loss.hidden_gradient != "full":
        more = {"loss": {"hidden_gradient": "full"}}
        yield _Change("hidden gradient in full", more, False, "as exact as its loss")
    if train.rows_per_step > 1 and train.rows_per_step % 2 == 0:
        fields = {"rows_per_step": train.rows_per_step // 2, "accumulation": train.accumulation * 2}
        yield _Change("half the rows at once, accumulated twice as often", {"train": fields})
    if spec.drafter.attention == "sdpa":
        half = spec.drafter.attention_workspace_bytes // 2
        yield _Change("half the attention workspace", {"drafter": {"attention_workspace_bytes": half}})
    if optim.moment_dtype == "float32":
        yield _Change(
            "moments in bfloat16",
            {"optim": {"moment_dtype": "bfloat16"}},
            False,
            "small updates may be lost in the second moment",
        )
    if optim.master_dtype == "float32" and today.dtype != "float32":
        yield _Change(
            "no fp32 masters", {"optim": {"master_dtype": "none"}}, False, "norm weights at 1.0 may never move"
        )
    if spec.data.max_anchors > 1:
        fewer = _fewer_anchors(spec, today, planned)
        yield _Change(
            f"{fewer:,} anchor{'s' if fewer > 1 else ''}",
            {"data": {"max_anchors": fewer}},
            False,
            "less training signal a row",
        )


def _fewer_anchors(spec: DFlashSpec, today: Plan, planned: Planner) -> int:
    """The most that fit where today's do not, as each one less is less training signal. Half where that would be more than
    the half of them gone: something else has to give as well."""
    half = spec.data.max_anchors // 2
    largest = largest_fit(spec, planned) if today.step_verdict == "does not fit" else None
    return max(largest.max_anchors, half) if largest is not None else half


def _with(spec: DFlashSpec, fields: _Fields) -> DFlashSpec:
    return replace(spec, **{section: replace(getattr(spec, section), **values) for section, values in fields.items()})


def _overrides(change: _Change) -> tuple[str, ...]:
    return tuple(
        f"{section}.{name}={value}" for section, values in change.fields.items() for name, value in values.items()
    )


def _keys(switch: Switch) -> list[str]:
    return [_key(text) for text in switch.overrides]


def _key(override: str) -> str:
    return override.partition("=")[0]
