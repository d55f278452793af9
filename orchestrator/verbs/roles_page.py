"""The part of a plan that speaks of roles: a rank's card, a batch's time, the queue, which side will hold the other up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.actions.step_time import time_text
from orchestrator.units import counted
from orchestrator.verbs.table import Cell, Column, heading, pairs, table
from orchestrator.verbs.words import gib, gib_places, in_gib, number

if TYPE_CHECKING:
    from orchestrator.actions.role_time import BatchTime, ByRole
    from remote.balance import Sides
    from remote.plan.roles import RolePlan


def roles_section(found: ByRole, *, width: int | None) -> list[str]:
    """A line a role, then what lies between them and which of them decides."""
    columns = [
        Column("role"),
        Column("ranks", is_number=True),
        Column("must fit GiB", is_number=True),
        Column("verdict"),
        Column("a batch", is_number=True),
        Column("by", gives_way=True),
    ]
    places = gib_places(*(role.driver_bytes for role in found.plan.each))
    rows = [_role(role, found.time_of(role), places) for role in found.plan.each]
    lines = [heading(f"By role: {_sum(found)}"), *table(columns, rows, width=width)]
    lines += ["", *pairs(_between(found), width=width)]
    if found.plan.target is not None:
        lines += ["", *_target_lines(found.plan.target, width=width)]
    return lines


def roles_document(found: ByRole) -> dict[str, Any]:
    """The same for --json; a role that has no ranks is null."""
    plan, sides = found.plan, found.sides
    roles = {role.name: _role_body(role, found.time_of(role)) for role in plan.each}
    return {
        "target": roles.get("target"),
        "drafter": roles["drafter"],
        "queue": {
            "capacity": plan.queue_capacity,
            "batch_bytes": plan.batch_bytes,
            "size_bytes": plan.queue_bytes,
        }
        if plan.target is not None
        else None,
        "batches_a_step": plan.batches_a_step,
        "bound": None if sides is None else sides.bound,
        "balanced": None if sides is None else dict(zip(("target", "drafter"), sides.balanced, strict=True)),
        "is_measured": found.is_measured,
        "machine_bytes": plan.machine_bytes,
    }


def _sum(found: ByRole) -> str:
    parts = " + ".join(f"{role.num_ranks} {role.name}" for role in found.plan.each)
    return f"{parts} = {sum(role.num_ranks for role in found.plan.each)} processes, one on each GPU where there are any"


def _role(role: RolePlan, time: BatchTime | None, places: int) -> list[str | Cell]:
    verdict = role.verdict or "-"
    size = in_gib(role.driver_bytes, places=places)
    judged = Cell(verdict, colour="red") if verdict == "does not fit" else verdict
    if time is None:
        return [role.name, str(role.num_ranks), size, judged, "-", "not measured yet"]
    told = f"measured: {time.source}" if time.is_measured else f"a bound: {time.source}"
    return [role.name, str(role.num_ranks), size, judged, _batch(time), told]


def _batch(time: BatchTime) -> str:
    return time_text(time.batch_s) if time.is_measured else f">= {time_text(time.batch_s)}"


def _between(found: ByRole) -> list[tuple[str, str]]:
    plan, items = found.plan, []
    if plan.target is not None:
        each = f"{plan.queue_capacity} batches x {in_gib(plan.batch_bytes, places=3)} GiB of hidden states"
        items.append(("queue", f"{each} = {gib(plan.queue_bytes)} on each drafter's card, counted there"))
    if plan.drafter.context_bytes == 0:  # no card: all processes of a host share its memory
        items.append(("one host", f"all processes together {gib(plan.machine_bytes)} of its memory"))
    items.append(("a step", _shares(found)))
    if plan.target is not None:
        items.append(("bottleneck", _bottleneck(found)))
    return items


def _shares(found: ByRole) -> str:
    plan = found.plan
    each = " and ".join(f"{plan.batches_a_step / role.num_ranks:.3g} a {role.name}" for role in plan.each)
    return f"{number(plan.batches_a_step)} {'batch' if plan.batches_a_step == 1 else 'batches'}: {each}"


def _bottleneck(found: ByRole) -> str:
    sides = found.sides
    if sides is None:
        return "not known: measured by a training with these roles, `draftyard show RUN` then says it as well"
    guess = "" if found.is_measured else "a guess, as not both times are measured: "
    rates = f"targets give {_rate(sides.num_targets, sides.target.busy_s)} batches a second, drafters take " + _rate(
        sides.num_drafters, sides.drafter.busy_s
    )
    waits = f"targets would wait {sides.target.wait_share:.0%} of their time, drafters {sides.drafter.wait_share:.0%}"
    return f"{guess}{_word(sides)}; {rates}; {waits}\n{_balance(sides)}"


def _word(sides: Sides) -> str:
    return {"target-bound": "the targets", "drafter-bound": "the drafters"}.get(sides.bound, "neither role")


def _rate(num_ranks: int, batch_s: float) -> str:
    return f"{num_ranks} / {batch_s:.3g} s = {num_ranks / batch_s:.3g}"


def _balance(sides: Sides) -> str:
    targets, drafters = sides.balanced
    ratio = f"{sides.target.busy_s:.3g} : {sides.drafter.busy_s:.3g}"
    if (targets, drafters) == (sides.num_targets, sides.num_drafters):
        return f"no other division of as many ranks is nearer to {ratio}"
    return f"{targets} target + {drafters} drafter would balance them, as {ratio}; train.accumulation a multiple of {drafters}"


def _target_lines(role: RolePlan, *, width: int | None) -> list[str]:
    """Of what a target's memory is made; a drafter's is the table above."""
    places = gib_places(role.driver_bytes)
    columns = [Column("a target rank"), Column("GiB", is_number=True), Column("", gives_way=True)]
    sizes = [(line.name, line.size_bytes, line.why) for line in role.components if line.size_bytes]
    runs = f"that {counted(role.num_measured, 'training')} took{' at most' if role.num_measured > 1 else ''}"
    sizes += [
        ("unexplained", role.unexplained_bytes, f"{runs} and no line of the plan explains"),
        ("allocator", role.slack_bytes, "an estimate"),
        ("context", role.context_bytes, "of the driver, an estimate"),
    ]
    rows: list[Sequence[str | Cell]] = [[name, in_gib(size, places=places), why] for name, size, why in sizes if size]
    return table(columns, rows, width=width)


def _role_body(role: RolePlan, time: BatchTime | None) -> dict[str, Any]:
    names = (
        "num_ranks",
        "components",
        "unexplained_bytes",
        "num_measured",
        "driver_bytes",
        "verdict",
        "batch_flop",
        "least_batch_s",
    )
    return {**{name: getattr(role, name) for name in names}, "batch": time}
