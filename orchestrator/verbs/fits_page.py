"""What would fit instead of a run that ran out of memory, below its failure: as text and as a document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.actions.again import Words, assigned, try_line
from orchestrator.actions.plan_verdict import capacity_text, prepared_elsewhere
from orchestrator.actions.plans import Fits, Planned
from orchestrator.actions.shortfall import GROW_NAME, pieces_told, setting_of
from orchestrator.verbs.plan_page import advice, memory_items, plan_document, typed
from orchestrator.verbs.table import heading, pairs, wrapped
from orchestrator.verbs.words import gib, in_gib


def fits_lines(
    fits: Fits, words: Words, *, width: int | None, newer: str = "", launch: Mapping[str, Any] | None = None
) -> list[str]:
    """Of a run that ran out of memory, below its failure: what would fit, by the numbers that `smoke --try` takes.

    Where that would take the `newer` run's, the first is spelled out on top of the run's own `words`. `launch`: its document.
    """
    setting = setting_of(fits.pieces, launch or {})
    if fits.planned is None:
        head = [heading("What would fit"), fits.note]
        pieces = [*_pieces(setting, width=width), "", *_try_lines(None, words, setting, newer=newer)] if setting else []
        return [*head, *pieces]
    found = fits.planned
    (name, _), *rest = memory_items(found)
    capacity = capacity_text(found, card_bytes=fits.card_bytes)
    head = [
        heading(f"The run's own plan, against {gib(fits.card_bytes)}"),
        *pairs([(name, capacity), *_taken_off(fits), *rest], width=width),
    ]
    lines = [
        *head,
        *prepared_elsewhere(found),
        *(line for text in _exceeded_line(fits) for line in wrapped(text, width)),
        "",
    ]
    if fits.is_crowded:
        lines += [*wrapped(_beside(fits), width), ""]
    if not found.switches and fits.is_crowded and found.plan.step_verdict == "does not fit":
        return lines[:-1]
    if fits.pieces:
        lines += [*_pieces(setting, width=width), ""]
    if found.switches or not setting or found.plan.step_verdict == "does not fit":
        lines += [*advice(found, width=width, first=2 if setting else 1), ""]
    if fits.pieces and not setting:
        return lines[:-1]
    return [*lines, *_try_lines(found, words, setting, newer=newer)] if found.switches or setting else lines[:-1]


def fits_document(fits: Fits, *, launch: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`capacity_bytes` of the plan is the whole card's; `room_bytes` what of it the step may take; `setting` what is to be
    tried first where memory lay in pieces, else None. `launch`: the run's document.
    """
    planned = None if fits.planned is None else plan_document(fits.planned)
    room_bytes = None
    if planned is not None:
        room_bytes = planned["plan"]["capacity_bytes"]
        planned["plan"] = {**planned["plan"], "capacity_bytes": fits.card_bytes}
    names = ("short_bytes", "held_bytes", "holders", "note", "exceeded")
    env = setting_of(fits.pieces, launch or {})
    setting = {"name": GROW_NAME, "env": env} if env else None
    body = {"planned": planned, "room_bytes": room_bytes, "setting": setting}
    return {**body, **{name: getattr(fits, name) for name in names}}


def _taken_off(fits: Fits) -> list[tuple[str, str]]:
    """What of the card nothing that is offered may take."""
    items = []
    if fits.held_bytes:
        items.append(("  - others", f"{in_gib(fits.held_bytes)} GiB held by {_holders(fits)} when it ran out"))
    if fits.short_bytes:
        items.append(("  - left free", f"{gib(fits.short_bytes)} that it needed, more than its plan said"))
    return items


def _holders(fits: Fits) -> str:
    if not fits.holders:
        return "processes that it could not see"
    return f"process{'es' if len(fits.holders) > 1 else ''} {', '.join(str(pid) for pid in fits.holders)}"


def _beside(fits: Fits) -> str:
    """Memory that somebody else holds is given back by nothing that a recipe says."""
    assert fits.planned is not None
    held = f"{gib(fits.held_bytes)} that {_holders(fits)} {'holds' if len(fits.holders) == 1 else 'hold'}"
    end = "end it" if len(fits.holders) == 1 else "end them"
    do = f"{end}, or choose another card with --gpus"
    if fits.planned.switches and fits.planned.plan.step_verdict == "does not fit":
        return f"what is offered fits beside the {held}; to have the whole card: {do}"
    if fits.planned.plan.step_verdict == "does not fit":
        return f"nothing fits beside the {held}: {do}"
    return f"beside the {held} it is planned to fit; more room: {do}"


def _pieces(setting: Mapping[str, str], *, width: int | None) -> list[str]:
    """Memory was there, but in pieces: what to try first changes no plan."""
    told = wrapped(pieces_told(setting), width)
    return [*told, f"1 {GROW_NAME}", *typed("--env", assigned(setting), width)] if setting else told


def _try_lines(found: Planned | None, words: Words, setting: Mapping[str, str], *, newer: str) -> list[str]:
    changes = [] if found is None else [switch.overrides for switch in found.switches]
    return [try_line(words, setting, changes, newer=newer)]


def _exceeded_line(fits: Fits) -> list[str]:
    if fits.exceeded is None:
        return []
    over = fits.exceeded
    held = "" if over.held is None else f"; most that was alive, {gib(over.held[0])}, was made at {over.held[1]}"
    return [
        f"exceeded: {over.stage} was planned with {gib(over.planned_bytes)} allocated, {gib(over.component_bytes)} of it "
        f"{over.component}; it needed {gib(over.needed_bytes)}{held}"
    ]
