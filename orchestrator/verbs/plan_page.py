"""The memory plan as text and as a document: components by stage, what must fit, what would fit."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from orchestrator.actions.log_text import inert
from orchestrator.actions.plans import MOST_OFFERED, Effect, Fits, Planned, plan_body
from orchestrator.actions.step_time import time_sentence, time_text
from orchestrator.units import counted
from orchestrator.verbs.table import Cell, Column, heading, pairs, table
from orchestrator.verbs.words import gib, number

if TYPE_CHECKING:
    from orchestrator.store.rows import RunRow
    from remote.plan import Plan
    from remote.plan.advice import Switch


def plan_page(found: Planned, *, width: int | None) -> list[str]:
    made, spec = found.plan, found.spec
    lines = [heading(f"{spec.recipe}, branch {spec.branch}: memory of one training step, predicted, in GiB")]
    lines += ["", *stage_table(made, width=width), "", *pairs(_totals(found))]
    if found.switches:
        lines += ["", *_advice(found, width=width)]
    if made.extrapolated:
        lines += [
            "",
            heading("Outside the range this plan was checked in"),
            *(f"  {text}" for text in made.extrapolated),
        ]
    return [*lines, "", heading("Not in the plan"), *(f"  {text}" for text in made.not_modelled)]


def stage_table(made: Plan, *, width: int | None) -> list[str]:
    """One row a component; the last rows are what was predicted, and measured where a smoke run has."""
    columns = [Column("component", gives_way=True), *(Column(stage.name, is_number=True) for stage in made.stages)]
    rows: list[list[str | Cell]] = [
        [name, *(_cell(cells.get(stage.name)) for stage in made.stages)] for name, cells in made.table()
    ]
    rows.append([Cell("allocated", is_bold=True), *(Cell(_cell(s.allocated_bytes), is_bold=True) for s in made.stages)])
    if any(stage.measured_bytes is not None for stage in made.stages):
        rows.append(["measured", *(_cell(stage.measured_bytes) for stage in made.stages)])
        rows.append(["unexplained", *(_cell(stage.unexplained_bytes) for stage in made.stages)])
    return table(columns, rows, width=width)


def plan_document(found: Planned) -> dict[str, Any]:
    """The plan for --json: bytes as integers, the sums that the text shows included."""
    made = found.plan
    return {
        "recipe": found.spec.recipe,
        "branch": found.spec.branch,
        "plan": plan_body(made),
        "capacity_from": found.capacity_from,
        "largest": found.largest,
        "time": None if found.time is None else {**vars(found.time), "total_s": found.time.total_s},
        "switches": [_switch_body(switch) for switch in found.switches],
    }


def fits_lines(
    fits: Fits, run: RunRow, *, width: int | None, is_tried: bool = True, own: Sequence[str] = ()
) -> list[str]:
    """Of a run that ran out of memory, below its failure: what would fit, by the numbers that `smoke --try` takes.

    Where that would take a newer run's (`is_tried` False), the first is spelled out on top of the run's own overrides.
    """
    if fits.planned is None:
        return [heading("What would fit"), fits.note]
    found = fits.planned
    head = [heading(f"The run's own plan, against {gib(found.plan.capacity_bytes)}"), *pairs(_totals(found)[:-3])]
    short = f"it needed {gib(fits.short_bytes)} more than its plan said; what is offered leaves that free"
    over = _exceeded_line(fits)
    none = ["no single change fits; a smaller target or a shorter row is needed"]
    advice = _advice(found, width=width, is_numbered=True) if found.switches else none
    try_it = ["", _try_line(found, run, is_tried=is_tried, own=own)] if found.switches else []
    return [*head, *over, *([short] if fits.short_bytes else []), "", *advice, *try_it]


def _try_line(found: Planned, run: RunRow, *, is_tried: bool, own: Sequence[str]) -> str:
    words = ["draftyard", "smoke", run.recipe, "-b", run.branch, "--host", run.host]
    if is_tried:
        words += ["--try", "1"]
        told = "the rungs with the first of these; N for the Nth"
    else:
        for override in (*own, *found.switches[0].overrides):
            words += ["--set", override]
        told = "the rungs with the first of these; --try takes those of a newer run"
    return f"{shlex.join([inert(word) for word in words])}    # {told}"


def fits_document(fits: Fits) -> dict[str, Any]:
    planned = None if fits.planned is None else plan_document(fits.planned)
    return {"planned": planned, "short_bytes": fits.short_bytes, "note": fits.note, "exceeded": fits.exceeded}


def _exceeded_line(fits: Fits) -> list[str]:
    if fits.exceeded is None:
        return []
    over = fits.exceeded
    return [
        f"exceeded: {over.stage} was planned with {gib(over.planned_bytes)} allocated, {gib(over.component_bytes)} of it "
        f"{over.component}; it needed {gib(over.needed_bytes)}"
    ]


def effect_text(effect: Effect, value: float) -> str:
    match effect.unit:
        case "bytes":
            return gib(value)
        case "flop":
            return f"{value / 1e12:.3g} TFLOP"
        case "s":
            return time_text(value)
        case _:
            return number(value)


def _totals(found: Planned) -> list[tuple[str, str]]:
    made = found.plan
    items = [("peak", f"{gib(made.peak.allocated_bytes)} allocated, in {made.peak.name}")]
    if made.slack_bytes:
        items.append(("+ allocator", f"{gib(made.slack_bytes)}, an estimate"))
    items.append(("+ context", f"{gib(made.context_bytes)}, an estimate"))
    items.append(("must fit", gib(made.driver_bytes)))
    if made.capacity_bytes is not None and made.headroom_bytes is not None:
        left = (
            f"{gib(made.headroom_bytes)} left" if made.headroom_bytes >= 0 else f"{gib(-made.headroom_bytes)} too much"
        )
        items.append(("capacity", f"{gib(made.capacity_bytes)} ({found.capacity_from}): {made.verdict}, {left}"))
    else:
        items.append(("capacity", "not given; --gpu 95GiB or --host HOST says whether it fits"))
    if found.largest is not None:
        largest = found.largest
        items.append(
            (
                "largest",
                f"{counted(largest.max_anchors, 'anchor')} x block {largest.block_size} = {largest.block_tokens:,} block tokens fit",
            )
        )
    work = made.work
    items.append(
        (
            "a step",
            f"{work.block_tokens:,} block tokens, {work.context_tokens:,} context tokens, {work.total / 1e12:.3g} TFLOP",
        )
    )
    items.append(("time", time_sentence(found.time, found.spec)))
    items.append(("computed in", f"{made.dtype} on {made.device}; drafter of {made.sizes.parameters:,} parameters"))
    return items


def _advice(found: Planned, *, width: int | None, is_numbered: bool = False) -> list[str]:
    told = "What would fit" if found.plan.verdict == "does not fit" else "What would lower the peak"
    return [heading(told), *_switches(found.switches[:MOST_OFFERED], width=width, is_numbered=is_numbered)]


def _switches(found: list[Switch], *, width: int | None, is_numbered: bool) -> list[str]:
    """A line for what a change buys and, whole, what to type for it."""
    columns = [Column("change"), Column("saves", is_number=True), Column("work", is_number=True), Column("result")]
    rows = [
        [
            f"{place} {switch.name}" if is_numbered else switch.name,
            gib(switch.saved_bytes),
            f"x{switch.work_factor:.2f}",
            "same" if switch.keeps_result else "differs",
        ]
        for place, switch in enumerate(found, 1)
    ]
    head, *lines = table(columns, rows, width=width)
    told = [head]
    for switch, line in zip(found, lines, strict=True):
        typed = "  " + " ".join(f"--set {override}" for override in switch.overrides)
        told += [line, click.style(typed + (f"  ({switch.caution})" if switch.caution else ""), dim=True)]
    return told


def _switch_body(switch: Switch) -> dict[str, Any]:
    names = ("name", "overrides", "saved_bytes", "work_factor", "keeps_result", "caution")
    body = {name: getattr(switch, name) for name in names}
    return {**body, "driver_bytes": switch.plan.driver_bytes, "verdict": switch.plan.verdict}


def _cell(size_bytes: int | None) -> str:
    """GiB with two digits; three significant ones where the plan is that of a small model."""
    if size_bytes is None:
        return ""
    size = size_bytes / 2**30
    if 0 < abs(size) < 0.0005:
        return "<0.001"
    return f"{size:.2f}" if abs(size) >= 1 or size == 0 else f"{size:.3f}"
