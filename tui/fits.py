"""What would fit, or use the room there is: the largest step, and each change of the recipe with its peak and its cost. Pure drawing."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len

from tui.ordering import Change, Planned
from tui.outside import to_type
from tui.pieces import Line, Piece, heading, width_of, wrapped
from tui.wording import fit, gib

NAME_WIDTH = 30
MOST = 5  # changes shown
VERDICTS = {"fits": "good", "tight": "warn", "does not fit": "bad"}


def use_lines(plan: Planned, width: int) -> list[Line]:
    """Changes that take more of a card with room; empty where there is none, or nothing would."""
    if not plan.uses:
        return []
    return [_heading("What would use the room", width, _room(plan)), *_changes_lines(plan.uses, width, first=None)]


def fit_lines(plan: Planned, width: int, *, short_bytes: int = 0, first: int | None = None) -> list[Line]:
    """Changes that fit where the plan does not; otherwise those that lower its peak. `short_bytes`: of the card, left free
    for what the plan had not said. `first`: the number of the first, where `smoke --try` takes them by numbers.
    """
    if plan.note or plan.fault:
        return [heading("What would fit", width), *wrapped(to_type(plan.note or plan.fault), width, "muted")]
    title, _, but = plan.title.partition("; ")
    room = f"planned, {gib(short_bytes)} kept free" if plan.body.get("capacity_bytes") and short_bytes else _room(plan)
    lines: list[Line] = [_heading(title, width, room)]
    told = ": ".join(text for text in (but, plan.helps) if text)
    lines += wrapped(to_type(told), width, "warn") if told else []
    for line in plan.prepared:
        lines += wrapped(to_type(line), width, "strong")
    if plan.largest:
        label = "most that fits"
        has_room = NAME_WIDTH + 1 + cell_len(plan.largest) <= width
        rest = wrapped(plan.largest, width - 1, "strong")
        lines.append(
            [(fit(label, NAME_WIDTH), "muted"), (f" {plan.largest}", "strong")] if has_room else [(label, "muted")]
        )
        lines += [] if has_room else [[(" ", "text"), *line] for line in rest]
    lines += _changes_lines(plan.changes, width, first=first)
    return lines + (wrapped(plan.nothing, width, "warn") if plan.nothing else [])


def _heading(title: str, width: int, note: str) -> Line:
    """Without the note where that would be wider than the pane."""
    return heading(title, width, note if cell_len(title) + cell_len(note) + 2 <= width else "")


def _room(plan: Planned) -> str:
    capacity = plan.body.get("capacity_bytes")
    return f"planned, in {gib(capacity)}" if capacity else "planned"


def _changes_lines(changes: Sequence[Change], width: int, *, first: int | None) -> list[Line]:
    shown = changes[:MOST]
    cost_width = max((cell_len(change.cost) for change in shown), default=0)
    return [
        line
        for place, change in enumerate(shown, first or 1)
        for line in _change_lines(change, (width, cost_width), "" if first is None else f"{place}  ")
    ]


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
