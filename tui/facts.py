"""Mappings from the job (facts, values, settings) as lines: names without underscores, sizes with their unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.cells import cell_len

from orchestrator.units import format_size, spoken
from tui.pieces import Line, broken, field, flowed, width_of, wrapped
from tui.wording import count, duration, value


def fact_lines(facts: Mapping[str, Any], width: int, *, indent: str = "") -> list[Line]:
    """One field a fact; what is nested stands below its name, indented."""
    label_width = min(28, max((cell_len(indent + spoken(name)) for name in facts), default=0) + 1)
    lines: list[Line] = []
    for name, fact in facts.items():
        label = indent + spoken(name)
        if isinstance(fact, Mapping) and fact:
            lines += [[(label, "muted")], *fact_lines(fact, width, indent=indent + "  ")]
        elif isinstance(fact, list | tuple) and any(isinstance(item, Mapping) for item in fact):
            lines.append([(label, "muted")])
            for item in fact:
                lines += _item_lines(item, width, indent + "  ")
        else:
            words = wrapped(fact_text(name, fact), max(8, width - label_width - 1))
            for index, line in enumerate(words or [[("–", "faint")]]):
                lines.append(field(label if index == 0 else "", line, label_width=label_width))
    return lines


def fact_text(name: str, fact: Any) -> str:
    """The fact by the unit that its name tells."""
    if fact is None:
        return "–"
    if isinstance(fact, bool):
        return "yes" if fact else "no"
    if isinstance(fact, int | float):
        if name.endswith("_bytes"):
            return format_size(fact)
        if name.endswith("_s"):
            return f"{fact:.3g} s" if abs(fact) < 60 else duration(float(fact))
        return count(fact) if isinstance(fact, int) else value(fact)
    if isinstance(fact, list | tuple):
        return ", ".join(fact_text(name, item) for item in fact)
    if isinstance(fact, Mapping):
        return ", ".join(f"{spoken(key)} {fact_text(str(key), item)}" for key, item in fact.items())
    return str(fact)


def _item_lines(item: Any, width: int, indent: str) -> Sequence[Line]:
    if not isinstance(item, Mapping):
        return wrapped(indent + fact_text("", item), width, "text", indent=indent)
    room = max(8, width - len(indent))
    return [[(indent, "text"), *line] for pair in _pairs(item, room) for line in pair]


def _pairs(item: Mapping[str, Any], room: int) -> Iterator[list[Line]]:
    """Names with their values, as many a line as fit; one that is longer than a line has lines of its own."""
    short: list[Line] = []
    for name, fact in item.items():
        word: Line = [(f"{spoken(str(name))} ", "muted"), (fact_text(str(name), fact), "text")]
        if width_of(word) <= room:
            short.append(word)
            continue
        yield flowed(short, room)
        yield broken(word, room)
        short = []
    yield flowed(short, room)
