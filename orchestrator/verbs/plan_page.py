"""The memory plan as text and as a document: components by stage, what must fit, what would fit."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from orchestrator.actions.kept import Kept
from orchestrator.actions.log_text import inert
from orchestrator.actions.plan_verdict import (
    NOTHING_FITS,
    USE,
    capacity_text,
    changes_title,
    prepared_elsewhere,
    step_name,
    target_items,
    too_small_for,
    what_helps,
)
from orchestrator.actions.plans import MOST_OFFERED, Effect, Planned, caution, plan_body
from orchestrator.actions.residuals import Runs
from orchestrator.actions.step_time import Known, StepTime, change_cost, tflop, time_sentence, time_text
from orchestrator.units import counted
from orchestrator.verbs.roles_page import roles_document, roles_section
from orchestrator.verbs.table import Cell, Column, heading, pairs, table, wrapped
from orchestrator.verbs.words import gib, gib_places, in_gib, number

if TYPE_CHECKING:
    from remote.plan import Plan
    from remote.plan.advice import Switch

_DRIVER = {"cuda": "on the card, as its driver counts", "cpu": "of the machine's memory"}


def plan_page(found: Planned, *, width: int | None) -> list[str]:
    """The answer first, then what it is made of, what would change it, and how far it is to be trusted."""
    made, spec = found.plan, found.spec
    lines = [heading(f"{spec.recipe}, branch {spec.branch}: memory of one training step, predicted, in GiB")]
    lines += ["", *pairs(_totals(found), width=width), *prepared_elsewhere(found)]
    lines += ["", *stage_table(made, width=width)]
    if found.by_role is not None:
        lines += ["", *roles_section(found.by_role, width=width)]
    lines += room_use(found, width=width)
    if found.switches or made.step_verdict == "does not fit":
        lines += ["", *advice(found, width=width)]
    lines += ["", heading("Checked against measured peaks"), *_checked(made, width=width)]
    left_out = [line for text in made.not_modelled for line in wrapped(text, width, indent=2)]
    return [*lines, "", heading("Not in the plan"), *left_out]


def stage_table(made: Plan, *, width: int | None) -> list[str]:
    """One row a component; the last rows are their sum, and what runs took beyond it."""
    columns = [Column("component", gives_way=True), *(Column(stage.name, is_number=True) for stage in made.stages)]
    places = gib_places(made.peak.allocated_bytes)
    rows: list[list[str | Cell]] = [
        [name, *(in_gib(cells.get(stage.name) or None, places=places) for stage in made.stages)]
        for name, cells in made.table()
    ]
    sums = [in_gib(stage.allocated_bytes, places=places) for stage in made.stages]
    rows.append([Cell(text, is_bold=True) for text in ("allocated", *sums)])
    if any(stage.num_measured for stage in made.stages):
        left = [in_gib(stage.unexplained_bytes, places=places, is_signed=True) for stage in made.stages]
        rows.append(["unexplained", *left])
    return table(columns, rows, width=width)


def _checked(made: Plan, *, width: int | None) -> list[str]:
    """The range that the plan was held against measured peaks in; a size outside it makes it an extrapolation."""
    columns = [Column("size"), Column("here", is_number=True), Column("checked"), Column("")]
    rows: list[list[str | Cell]] = [
        [
            size.name,
            f"{size.value:,}",
            f"{size.low:,} to {size.high:,}",
            "" if size.is_inside else Cell("extrapolated", colour="yellow"),
        ]
        for size in made.checked
    ]
    return table(columns, rows, width=width)


def plan_document(found: Planned) -> dict[str, Any]:
    """The plan for --json: bytes as integers, the sums that the text shows included."""
    made = found.plan
    return {
        "recipe": found.spec.recipe,
        "branch": found.spec.branch,
        "plan": plan_body(made),
        "capacity_from": found.capacity_from,
        "measured_in": found.measured.runs.run_ids,
        "num_smoke_runs": found.measured.runs.num_smoke_runs,
        "num_trainings": found.measured.runs.num_trainings,
        "measured_by_stage": {
            stage: {**vars(runs), "num_smoke_runs": runs.num_smoke_runs}
            for stage, runs in found.measured.told_by.items()
        },
        "largest": found.largest,
        "time": None if found.time is None else {**vars(found.time), "total_s": found.time.total_s},
        "by_role": None if found.by_role is None else roles_document(found.by_role),
        "switches": [_switch_body(switch, found.time) for switch in found.switches],
        "uses": [_switch_body(switch, found.time) for switch in found.uses],
        "kept": None if found.kept is None else {**vars(found.kept), "all_bytes": found.kept.all_bytes},
    }


def effect_text(effect: Effect, value: float) -> str:
    match effect.unit:
        case "bytes":
            return gib(value)
        case "flop":
            return tflop(value)
        case "s":
            return time_text(value)
        case _:
            return number(value)


def _totals(found: Planned) -> list[tuple[str, str]]:
    """What must fit against what there is, and what it is the sum of; then what is told of the whole training."""
    made, work = found.plan, found.plan.work
    tokens = f"{work.block_tokens:,} block tokens, {work.context_tokens:,} context tokens"
    items = memory_items(found, is_whole=True)
    if found.kept is not None:
        items.append(("on disk", _kept(found.kept)))
    if found.spec.data.num_workers:
        workers = counted(found.spec.data.num_workers, "worker")
        items.append(("read ahead", f"{in_gib(made.host_queue_bytes)} GiB of the host's memory, by {workers}"))
    data = found.spec.data
    most = (
        f"; of {data.max_anchors:,} anchors no more than a row's {data.row_tokens:,} tokens"
        if data.max_anchors > data.row_tokens
        else ""
    )
    items.append(("a step", f"{tokens}, {tflop(work.total)}{most}"))
    items.append(("time", time_sentence(found.time, found.spec, found.to_measure)))
    items.append(("computed in", f"{made.dtype} on {made.device}; drafter of {made.sizes.parameters:,} parameters"))
    return items


def memory_items(found: Planned, *, is_whole: bool = False) -> list[tuple[str, str]]:
    """The verdict and what it is made of; with `is_whole` also what of the target has room."""
    made, places = found.plan, gib_places(found.plan.driver_bytes)
    peak, slack, context = (
        f"{in_gib(size, places=places)} GiB"
        for size in (made.peak.allocated_bytes, made.slack_bytes, made.context_bytes)
    )
    items = [
        ("capacity", capacity_text(found)),
        *([("what helps", helps)] if (helps := what_helps(found)) else []),
        ("must fit", f"{in_gib(made.driver_bytes, places=places)} GiB {_DRIVER[made.device]}"),
    ]
    items.append(("  peak", _peak(made, peak, places)))
    if made.unexplained_bytes:
        more = in_gib(made.unexplained_bytes, places=places)
        most = " at most" if made.peak.num_measured > 1 else ""
        took = f"{more} GiB that {_told(found.measured.told_by[made.peak.name])} took{most} in {made.peak.name}"
        items.append(("  + unexplained", f"{took} and no line of the plan explains"))
    if made.slack_bytes:
        items.append(("  + allocator", f"{slack} reserved beyond it, an estimate{_seen_reserved(made)}"))
    if made.context_bytes:
        items.append(("  + context", f"{context} of the driver, an estimate"))
    items += target_items(found, is_whole=is_whole)
    if any(stage.num_measured for stage in made.stages):
        items.append(("measured", _measured(found)))
    if made.capacity_bytes is not None:
        items.append(("largest", _largest(found)))
    return items


def _peak(made: Plan, told: str, places: int) -> str:
    """The stage that decides: by plan and what runs took beyond it together, and so not always the highest of the table."""
    highest = max(made.stages, key=lambda stage: stage.allocated_bytes)
    if highest.allocated_bytes == made.peak.allocated_bytes:
        return f"{told} allocated, in {made.peak.name}"
    alone = f"planned alone, {highest.name} does, {in_gib(highest.allocated_bytes, places=places)} GiB"
    return f"{told} planned of {made.peak.name}, which with the next line comes highest; {alone}"


def _seen_reserved(made: Plan) -> str:
    """That a driver's count may stand far above the plan: what the allocator only caches is in no verdict."""
    least, most = made.reserved_seen_bytes
    outside = ", below" if made.slack_bytes < least else ", above" if made.slack_bytes > most else ""
    all_of = f"{outside} all that was measured:" if outside else "; measured"
    return f"{all_of} {in_gib(least)} to {in_gib(most)}, cached memory that it gives back on demand"


def _measured(found: Planned) -> str:
    """How far off the plan was where it was held against a card or a machine: the stage that it knew least of."""
    off = [stage for stage in found.plan.stages if stage.unexplained_bytes is not None]
    most = max(off, key=lambda stage: abs(stage.unexplained_bytes or 0))
    size = in_gib(most.unexplained_bytes, places=gib_places(most.unexplained_bytes), is_signed=True)
    runs = found.measured.told_by[most.name]
    return f"{size} GiB off at most, in {most.name}, by {_told(runs)} of this shape; the newest {runs.run_ids[0]}"


def _told(runs: Runs) -> str:
    """`2 smoke runs and 1 training`"""
    numbers = ((runs.num_smoke_runs, "smoke run"), (runs.num_trainings, "training"))
    return " and ".join(counted(number, name) for number, name in numbers if number)


def _largest(found: Planned) -> str:
    if found.largest is None:
        return "not one anchor fits"
    anchors, size = counted(found.largest.max_anchors, "anchor"), found.largest.block_size
    far = ", extrapolated" if found.largest.is_extrapolated else ""
    alone = f" in {step_name(found)} alone" if too_small_for(found) else ""
    key = f"data.max_anchors={found.largest.max_anchors}"
    what = "" if found.largest.max_anchors == found.spec.data.max_anchors else f": --set {key}"
    return f"{anchors} x block {size} = {found.largest.block_tokens:,} block tokens fit{alone}{far}{what}"


def _kept(kept: Kept) -> str:
    """What hidden states take, of all tokens where a run has told how many they are."""
    of_one = f"{kept.token_bytes:,} bytes a token of hidden states, {gib(kept.token_bytes * 10**6)} a million"
    if kept.num_tokens is None or kept.all_bytes is None:
        return f"{of_one}; how many tokens the answers are, the first run that reads them tells"
    return f"{gib(kept.all_bytes)} for the {kept.num_tokens:,} tokens that run {kept.run_id} read; {of_one}"


def advice(found: Planned, *, width: int | None, first: int | None = None) -> list[str]:
    """`first`: the number of the first change, where `smoke --try` takes them by numbers."""
    title = heading(changes_title(found))
    if not found.switches:
        return [title, *wrapped(NOTHING_FITS, width)]
    more = len(found.switches) - MOST_OFFERED
    rest = [f"{more} more: --json has all"] if more > 0 else []
    return [title, *_switches(found.switches[:MOST_OFFERED], found.time, width=width, first=first), *rest]


def room_use(found: Planned, *, width: int | None) -> list[str]:
    """How a card with room to spare can be used; empty where nothing would."""
    if not found.uses:
        return []
    lines = _switches(found.uses, found.time, width=width, first=None, is_use=True)
    return ["", heading(USE), *lines]


def _switches(
    found: list[Switch], time: StepTime | None, *, width: int | None, first: int | None, is_use: bool = False
) -> list[str]:
    """A line for what a change buys; below it what to beware of and, whole, what to type.

    Its time is today's by the arithmetic of both, so an estimate, or as today's is a bound; the arithmetic where none is
    known. `is_use`: it takes more of the card, of which it says what is left.
    """
    costs = [change_cost(time, switch.work_factor) for switch in found]
    known = costs[0].known
    of_step = known if known is Known.FLOP else f"s a step, {known}"
    names = ("must fit GiB", "left GiB" if is_use else "saves GiB", of_step)
    columns = [Column("change"), *(Column(name, is_number=True) for name in names), Column("result")]
    places = gib_places(*(switch.plan.driver_bytes for switch in found))
    others = [switch.plan.headroom_bytes or 0 if is_use else switch.saved_bytes for switch in found]
    rows = [
        [
            "",  # its name comes last, into the room that the numbers leave
            in_gib(switch.plan.driver_bytes, places=places),
            in_gib(other, places=gib_places(*others)),
            f"x{cost.size:.2f}" if cost.step_s is None else f"{cost.step_s:.3g}",
            "same" if switch.keeps_result else "differs",
        ]
        for switch, cost, other in zip(found, costs, others, strict=True)
    ]
    numbers_wide = max(len(click.unstyle(line)) for line in table(columns, rows, width=None)) - len(columns[0].heading)
    room = None if width is None else width - numbers_wide
    labels = [
        switch.name if first is None else f"{place} {switch.name}" for place, switch in enumerate(found, first or 1)
    ]
    names_wrapped = [wrapped(label, room) for label in labels]
    table_rows = [[name[0], *row[1:]] for name, row in zip(names_wrapped, rows, strict=True)]
    head, *lines = table(columns, table_rows, width=width)
    told = [head]
    for switch, line, name in zip(found, lines, names_wrapped, strict=True):
        beware = caution(switch)
        cautions = wrapped(beware, width, indent=2) if beware else []
        told += [line, *(f"  {part}" for part in name[1:])]
        told += [click.style(text, dim=True) for text in (*cautions, *typed("--set", switch.overrides, width))]
    return told


def typed(flag: str, values: Sequence[str], width: int | None) -> list[str]:
    """What to type, in as many lines as it takes; each value is whole with its flag, quoted for a shell."""
    lines = [""]
    for word in (f"{flag} {shlex.quote(inert(value))}" for value in values):
        longer = f"{lines[-1]} {word}"
        if lines[-1] and width is not None and len(longer) + 2 > width:
            lines.append(word)
        else:
            lines[-1] = longer.strip()
    return [f"  {line}" for line in lines]


def _switch_body(switch: Switch, time: StepTime | None) -> dict[str, Any]:
    names = ("name", "overrides", "saved_bytes", "work_factor", "keeps_result", "caution")
    body = {name: getattr(switch, name) for name in names}
    step_s = change_cost(time, switch.work_factor).step_s
    verdicts = {"verdict": switch.plan.verdict, "step_verdict": switch.plan.step_verdict}
    return {**body, "step_s": step_s, "driver_bytes": switch.plan.driver_bytes, **verdicts}
