"""The memory plan as text and as a document: components by stage, what must fit, what would fit."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from orchestrator.actions.again import Words, command_line
from orchestrator.actions.log_text import inert
from orchestrator.actions.plans import MOST_OFFERED, Effect, Planned, caution, plan_body, target_loaded_bytes
from orchestrator.actions.residuals import Runs
from orchestrator.actions.step_time import Known, StepTime, change_cost, tflop, time_sentence, time_text
from orchestrator.units import counted
from orchestrator.verbs.roles_page import roles_document, roles_section
from orchestrator.verbs.table import Cell, Column, heading, pairs, table, wrapped
from orchestrator.verbs.words import gib, gib_places, in_gib, number

if TYPE_CHECKING:
    from remote.plan import Plan
    from remote.plan.advice import Switch

NOTHING_FITS = (
    "nothing that draftyard can change makes it fit, alone or with others; a smaller target or a shorter row is needed"
)
_DRIVER = {"cuda": "on the card, as its driver counts", "cpu": "of the machine's memory"}


def plan_page(found: Planned, *, width: int | None) -> list[str]:
    """The answer first, then what it is made of, what would change it, and how far it is to be trusted."""
    made, spec = found.plan, found.spec
    lines = [heading(f"{spec.recipe}, branch {spec.branch}: memory of one training step, predicted, in GiB")]
    lines += ["", *pairs(_totals(found), width=width), *prepared_elsewhere(found)]
    lines += ["", *stage_table(made, width=width)]
    if found.by_role is not None:
        lines += ["", *roles_section(found.by_role, width=width)]
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
    items = [*memory_items(found)]
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


def memory_items(found: Planned) -> list[tuple[str, str]]:
    made, places = found.plan, gib_places(found.plan.driver_bytes)
    peak, slack, context = (
        f"{in_gib(size, places=places)} GiB"
        for size in (made.peak.allocated_bytes, made.slack_bytes, made.context_bytes)
    )
    items = [
        ("capacity", capacity_text(found)),
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
    if made.pass_verdict in ("does not fit", "tight"):
        items.append(("target pass", _pass_told(found)))
    elif made.target_pass is not None and made.target_pass.num_measured:
        items.append(("target pass", f"{_pass_size(made)}{_pass_seen(made)}"))
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


def _pass_told(found: Planned) -> str:
    made = found.plan
    verdict = "tight" if made.pass_verdict == "tight" else f"{made.pass_verdict}, whatever is changed below"
    return f"{_pass_size(made)}: {verdict}{_pass_seen(made)}"


def _pass_size(made: Plan) -> str:
    return f"{gib(made.target_pass_bytes)} once before training, with the whole target loaded"


def _pass_seen(made: Plan) -> str:
    """What trainings took in it, beside the estimate; empty where none was measured."""
    before = made.target_pass
    if before is None or before.unexplained_bytes is None:
        return ""
    trainings = counted(before.num_measured, "training")
    if before.unexplained_bytes > 0:
        return f"; measured in {trainings}; the estimate was {gib(before.allocated_bytes)} allocated"
    took = gib(before.allocated_bytes + before.unexplained_bytes)
    return f", an estimate; {trainings} took {took} at most, as where hidden states are found kept"


def prepared_elsewhere(found: Planned) -> list[str]:
    """What to type where the pass does not fit: no change of a step makes it less. A training loads the target even where
    nothing is left to compute, so a card that its weights alone fill is too small.
    """
    made = found.plan
    if made.pass_verdict != "does not fit" or made.capacity_bytes is None:
        return []
    loaded_bytes = target_loaded_bytes(found)
    if loaded_bytes > made.capacity_bytes + made.reserve_bytes:
        return [f"it takes a larger card: a training loads the target first, {gib(loaded_bytes)}"]
    line = command_line("prepare", Words(found.spec.recipe, found.spec.branch, ("HOST",)))
    folder = ".local/share/draftyard/cache/"
    then = "# then this, on the host with the smaller card (docs/recipes.md tells more)"
    return [f"{line}    # on a larger card", then, f"rsync -a HOST:{folder} ~/{folder}"]


def capacity_text(found: Planned, card_bytes: int | None = None) -> str:
    """The verdict over the step and over the target's pass before it: "fits" stands here for a job that can begin alone."""
    made = found.plan
    if made.capacity_bytes is None or made.headroom_bytes is None:
        return "not given; --gpu 95GiB or --host HOST says whether it fits"
    left = f"{gib(made.headroom_bytes)} left" if made.headroom_bytes >= 0 else f"{gib(-made.headroom_bytes)} too much"
    if made.verdict != made.step_verdict:
        over = made.target_pass_bytes - made.capacity_bytes - made.reserve_bytes
        wants = f"wants {gib(over)} more" if over > 0 else f"leaves {gib(-over)}"
        left = f"the target's pass before training {wants}; a step leaves {gib(made.headroom_bytes)}"
    far = ", extrapolated" if made.extrapolated else ""
    told = f"{gib(card_bytes or made.capacity_bytes)} ({found.capacity_from}): {made.verdict}, {left}{far}"
    target = None if found.by_role is None else found.by_role.plan.target
    if target is not None and target.verdict == "does not fit":
        more = gib(target.driver_bytes - made.capacity_bytes)
        step = f"a drafter rank {'leaves' if made.headroom_bytes >= 0 else 'lacks'} {gib(abs(made.headroom_bytes))}"
        return f"{gib(made.capacity_bytes)} ({found.capacity_from}): does not fit, a target rank wants {more} more; {step}{far}"
    return told if target is None else f"{told}, of a drafter rank; a target rank: {target.verdict}"


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
    return f"{anchors} x block {size} = {found.largest.block_tokens:,} block tokens fit{far}"


def advice(found: Planned, *, width: int | None, first: int | None = None) -> list[str]:
    """`first`: the number of the first change, where `smoke --try` takes them by numbers."""
    told = heading("What would fit" if found.plan.step_verdict == "does not fit" else "What would lower the peak")
    if not found.switches:
        return [told, *wrapped(NOTHING_FITS, width)]
    more = len(found.switches) - MOST_OFFERED
    rest = [f"{more} more: --json has all"] if more > 0 else []
    shown = found.switches[:MOST_OFFERED]
    return [told, *_switches(shown, found.time, width=width, first=first), *rest]


def _switches(found: list[Switch], time: StepTime | None, *, width: int | None, first: int | None) -> list[str]:
    """A line for what a change buys; below it what to beware of and, whole, what to type.

    Its time is today's by the arithmetic of both, so an estimate, or as today's is a bound; the arithmetic where none is known.
    """
    costs = [change_cost(time, switch.work_factor) for switch in found]
    known = costs[0].known
    of_step = known if known is Known.FLOP else f"s a step, {known}"
    numbers = (Column(name, is_number=True) for name in ("must fit GiB", "saves GiB", of_step))
    columns = [Column("change"), *numbers, Column("result")]
    places = gib_places(*(switch.plan.driver_bytes for switch in found))
    saved_places = gib_places(*(switch.saved_bytes for switch in found))
    rows = [
        [
            "",  # its name comes last, into the room that the numbers leave
            in_gib(switch.plan.driver_bytes, places=places),
            in_gib(switch.saved_bytes, places=saved_places),
            f"x{cost.size:.2f}" if cost.step_s is None else f"{cost.step_s:.3g}",
            "same" if switch.keeps_result else "differs",
        ]
        for switch, cost in zip(found, costs, strict=True)
    ]
    numbers_wide = max(len(click.unstyle(line)) for line in table(columns, rows, width=None)) - len(columns[0].heading)
    room = None if width is None else width - numbers_wide
    labels = [
        switch.name if first is None else f"{place} {switch.name}" for place, switch in enumerate(found, first or 1)
    ]
    names = [wrapped(label, room) for label in labels]
    head, *lines = table(columns, [[name[0], *row[1:]] for name, row in zip(names, rows, strict=True)], width=width)
    told = [head]
    for switch, line, name in zip(found, lines, names, strict=True):
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
