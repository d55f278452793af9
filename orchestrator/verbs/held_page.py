"""Who held the card when it ran out, as rows of the failure's page: other changes, shapes at hand, frames, loops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.actions.log_text import inert
from orchestrator.verbs.words import gib

TELLING = ("remedies", "tensors", "memory_held", "memory_kept", "memory_unrecorded")


def held_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Of the facts in TELLING; a job may write anything there, so what has another shape is left out."""
    more = [str(item.get("text")) for item in _items(facts.get("remedies"))[1:]]
    rows = [("or", text) for text in more]
    shapes = [_shape(item) for item in _items(facts.get("tensors"))]
    rows += [("shapes", "; ".join(shapes))] if shapes else []
    rows += [("held", _place(item)) for item in _items(facts.get("memory_held"))]
    unrecorded = facts.get("memory_unrecorded")
    rows += [("held", unrecorded)] if isinstance(unrecorded, str) else []
    kept = facts.get("memory_kept")
    for kind, item in kept.items() if isinstance(kept, Mapping) else ():
        if isinstance(item, Mapping):
            rows.append((f"kept, {inert(str(kind))}", _place(item)))
    return [(name, inert(text)) for name, text in rows]


def _items(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _shape(tensor: Mapping[str, Any]) -> str:
    shape = tensor.get("shape")
    sizes = [f"{size:,}" if isinstance(size, int) else str(size) for size in shape] if isinstance(shape, list) else []
    return f"{tensor.get('name')} {' x '.join(sizes) or 'scalar'} {tensor.get('dtype')}"


def _place(item: Mapping[str, Any]) -> str:
    size, count = item.get("bytes"), item.get("num_blocks")
    told = gib(size) if isinstance(size, int | float) else "-"
    return f"{told} in {count} {'tensor' if count == 1 else 'tensors'}, {item.get('frame')}"
