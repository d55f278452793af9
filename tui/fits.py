"""What would fit: the largest step, and each change of the recipe with its peak and its cost. Pure drawing."""

from __future__ import annotations

from rich.cells import cell_len

from tui.ordering import Change, Planned
from tui.outside import to_type
from tui.pieces import Line, Piece, heading, width_of, wrapped
from tui.wording import fit, gib

NAME_WIDTH = 30
MOST = 5  # changes shown
VERDICTS = {"fits": "good", "tight": "warn", "does not fit": "bad"}


def fit_lines(plan: Planned, width: int, *, short_bytes: int = 0, first: int | None = None) -> list[Line]:
    """Changes that fit where the plan does not; otherwise those that make room. `short_bytes`: of the card, left free
    for what the plan had not said. `first`: the number of the first, where `smoke --try` takes them by numbers.
    """
    if plan.note or plan.fault:
        return [heading("What would fit", width), *wrapped(to_type(plan.note or plan.fault), width, "muted")]
    capacity = plan.body.get("capacity_bytes")
    is_short = plan.body.get("step_verdict", plan.body.get("verdict")) == "does not fit"
    title = "What would fit" if is_short else "What would make room"
    room = f"planned, in {gib(capacity)}" if capacity else "planned"
    if capacity and short_bytes:
        room = f"planned, {gib(short_bytes)} kept free"
    lines: list[Line] = [heading(title, width, room)]
    if plan.body.get("pass_verdict") == "does not fit":
        told = f"The target's pass before training needs {gib(plan.body.get('target_pass_bytes'))}: no change of the recipe makes it fit."
        lines += wrapped(told, width, "warn")
    if plan.largest:
        label = "most that fits"
        has_room = NAME_WIDTH + 1 + cell_len(plan.largest) <= width
        lines.append([(fit(label, NAME_WIDTH) if has_room else label, "muted"), (f" {plan.largest}", "strong")])
    shown = plan.changes[:MOST]
    cost_width = max((cell_len(change.cost) for change in shown), default=0)
    for place, change in enumerate(shown, first or 1):
        lines += _change_lines(change, (width, cost_width), "" if first is None else f"{place}  ")
    if is_short and capacity and not plan.largest and not plan.changes:
        lines.append([("No single change fits; a smaller target or a shorter row is needed.", "warn")])
    return lines


def _change_lines(change: Change, widths: tuple[int, int], number: str) -> list[Line]:
    """The change with its numbers; below it what they have no room for, what to write in the recipe, and what to beware of."""
    width, cost_width = widths
    how = ("same result", "muted") if change.keeps_result else ("result differs", "warn")
    line: list[Piece] = [
        (number, "muted"),
        (fit(change.name, NAME_WIDTH - len(number)), "text"),
        (f" {gib(change.peak_bytes):>9}", VERDICTS.get(change.verdict, "text")),
    ]
    below: list[Piece] = []
    for text, meaning in ((fit(change.cost, cost_width), "muted"), how):
        has_room = not below and width_of(line) + 2 + cell_len(text) <= width
        (line if has_room else below).append((f"  {text}" if has_room or below else text, meaning))
    told = " ".join(change.overrides) + (f"; {change.caution}" if change.caution else "")
    before = " " * max(2, len(number))
    rest = [*([below] if below else []), *wrapped(told, width - len(before), "faint")]
    return [line, *([(before, "text"), *row] for row in rest)]
