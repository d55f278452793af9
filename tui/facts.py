"""Mappings from the job (facts, values, settings) as lines: names without underscores, sizes with their unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len

from orchestrator.units import format_size, spoken
from tui.pieces import Line, field, wrapped
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
    text = fact_text("", item)
    return (
        wrapped(indent + text, width, "text", indent=indent)
        if not isinstance(item, Mapping)
        else [[(indent, "text"), *_pairs(item)]]
    )


def _pairs(item: Mapping[str, Any]) -> Line:
    pieces: list[tuple[str, str]] = []
    for name, fact in item.items():
        pieces += [(f"{spoken(str(name))} ", "muted"), (f"{fact_text(str(name), fact)}  ", "text")]
    return pieces
