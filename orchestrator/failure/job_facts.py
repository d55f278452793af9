"""The facts of a failure as its job told them, in the form that everything reads which explains or shows them.

A job may write anything there. Of the names that mean something here only what has its right form is kept: sizes are
whole numbers that a card or a host could have, shapes have no empty dimension, words are short. The rest is left out, so
that it neither names a cause nor covers what the error's own text says. Facts of other names are the job's own and are
kept as they are: nothing reads them, and they are only shown. Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.units import LARGEST_BYTES

MOST_ITEMS, MOST_DIMENSIONS, LONGEST_WORD = 64, 8, 2000
LARGEST_COUNT = 2**53

_SIZES = (
    *("requested", "total", "free", "own_use", "allowed", "private_pool", "allocated", "idle_reserved", "reserved"),
    *("limit", "memory_held", "capacity", "peak", "peak_allocated", "driver", "resident", "data"),
)


def checked(given: Any) -> dict[str, Any]:
    """Facts of a failure event, each of a known name in its own form; none where they are no mapping."""
    facts: dict[str, Any] = {}
    for name, value in given.items() if isinstance(given, Mapping) else ():
        read = _FORMS.get(name)
        found = value if read is None else read(value)
        if read is None or found is not None:
            facts[name] = found
    return facts


def whole(value: Any, largest: int = LARGEST_COUNT) -> int | None:
    """A count from 0; None for anything else, true and 1.0 among it."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= largest
    return value if is_count else None


def _size(value: Any) -> int | None:
    return whole(value, LARGEST_BYTES)


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) and len(value) <= LONGEST_WORD else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _shape(value: Any) -> list[int] | None:
    if not isinstance(value, list) or len(value) > MOST_DIMENSIONS:
        return None
    sizes = [whole(size) for size in value]
    return [size for size in sizes if size] if all(sizes) else None


def _tensor(value: Mapping[str, Any]) -> dict[str, Any] | None:
    """Name, shape, dtype, and the function where it is told."""
    return _all_of(value, {"name": _word, "shape": _shape, "dtype": _word}, {"function": _word})


def _place(value: Mapping[str, Any]) -> dict[str, Any] | None:
    """What one place in the code holds: `bytes` at least."""
    return _all_of(value, {"bytes": _size}, {"num_blocks": whole, "repeats": whole, "frame": _word})


def _keeps(value: Any) -> dict[str, Any] | None:
    """The same of one kind of place, with how often a loop has kept it: a sentence names them all."""
    return _all_of(value, {"bytes": _size, "num_blocks": whole, "repeats": whole, "frame": _word})


def _process(value: Mapping[str, Any]) -> dict[str, Any] | None:
    return _all_of(value, {"pid": whole, "used_bytes": _size})


def _remedy(value: Mapping[str, Any]) -> dict[str, Any] | None:
    return _all_of(value, {"text": _word}, {"word": _word})


def _frame(value: Any) -> dict[str, Any] | None:
    return _all_of(value, {}, {"file": _word, "line": whole, "function": _word, "source": _word}) or None


def _all_of(
    value: Any, needed: Mapping[str, Callable[[Any], Any]], more: Mapping[str, Callable[[Any], Any]] | None = None
) -> dict[str, Any] | None:
    """None where one that is needed is missing or malformed; of the others those that are well formed."""
    if not isinstance(value, Mapping):
        return None
    found = {name: read(value.get(name)) for name, read in {**needed, **(more or {})}.items()}
    if any(found[name] is None for name in needed):
        return None
    return {name: found[name] for name in value if found.get(name) is not None}  # in the order in which they were told


def _each(read: Callable[[Any], Any]) -> Callable[[Any], list[Any] | None]:
    """Of a list those that are well formed, the first MOST_ITEMS of them."""

    def items(value: Any) -> list[Any] | None:
        found = [read(item) for item in value[:MOST_ITEMS]] if isinstance(value, list) else None
        return None if found is None else [item for item in found if item is not None]

    return items


def _kept(value: Any) -> dict[str, Any] | None:
    """Kind of place -> what it keeps."""
    if not isinstance(value, Mapping):
        return None
    kinds = {kind: _keeps(item) for kind, item in list(value.items())[:MOST_ITEMS] if _word(kind) is not None}
    return {kind: place for kind, place in kinds.items() if place is not None}


_FORMS: Mapping[str, Callable[[Any], Any]] = {
    **{f"{name}_bytes": _size for name in _SIZES},
    **dict.fromkeys(("level", "shortage", "memory_unrecorded", "cause"), _word),
    "expandable_segments": _flag,
    "frame": _frame,
    "gpu": whole,
    "memory_held": _each(_place),
    "memory_kept": _kept,
    "other_processes": _each(_process),
    "remedies": _each(_remedy),
    "tensors": _each(_tensor),
}
