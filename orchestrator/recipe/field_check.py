"""A merged tree checked against the spec's dataclasses: every fault with its place and what is due.

pydantic decides what is right (strict, unknown keys refused, over the standard library's
dataclasses); the words of a fault come from the dataclass, because a reader wants to know what to
write. Checks across fields are `remote.coherence.cross_field_errors`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from orchestrator import units
from orchestrator.nearest import did_you_mean, nearest
from orchestrator.recipe import fields
from orchestrator.recipe.layers import Merged, dotted, leaves
from orchestrator.recipe.strict_yaml import Path
from orchestrator.redact import is_secret
from remote import spec as spec_module
from remote.coherence import cross_field_errors

_UNKNOWN_KEY = ("unexpected_keyword_argument", "extra_forbidden")


def check_fields(merged: Merged, kind: type, *, is_partial: bool = False) -> tuple[spec_module.Spec | None, list[str]]:
    """The spec, or None and every fault of a single field as `where: path: message`.

    `is_partial`: a layer could not be read, so what is missing is no fault of its own.
    """
    tree = _without_removed(merged.tree, kind, ())
    faults: list[tuple[Path, str]] = [
        ((name,), _line(merged, kind, (name,), "extra_forbidden", None)) for name in merged.filled_in if name in tree
    ]
    tree |= merged.filled_in
    faults += _read_units(tree, merged, kind) + _refuse_unkept(tree, merged)
    said = {path for path, _ in faults}
    # Values already at fault have no place in JSON or stand for another type: check the rest without them.
    tree = _without_paths(tree, said.difference((name,) for name in merged.filled_in))
    try:
        spec = _adapter(kind).validate_json(json.dumps(tree, allow_nan=False), strict=True, extra="forbid")
    except ValidationError as error:
        for item in error.errors(include_url=False):
            path = tuple(item["loc"])
            if path not in said and not (is_partial and item["type"] == "missing"):
                faults.append((path, _line(merged, kind, path, item["type"], item["input"])))
        return None, [line for _, line in faults]
    if faults:
        return None, [line for _, line in faults]
    built: spec_module.Spec = spec
    return built, []


def check_across(spec: spec_module.Spec, merged: Merged) -> list[str]:
    """Every fault that one field alone cannot show."""
    return placed(cross_field_errors(spec), type(spec), merged)


def placed(found: list[tuple[str, str]], kind: type, merged: Merged) -> list[str]:
    """(dotted path, message) as lines that begin with where the value was written."""
    lines = []
    for path, message in found:
        keys = tuple(path.split("."))
        lines.append(f"{merged.where(keys) or _default_place(kind, keys)}: {path}: {message}")
    return lines


LARGEST_WHOLE = 2**62
# What no spec may hold, since it goes to programs and tensors, and is kept in the database, in the run folder, on every page.
_UNKEPT: tuple[tuple[Callable[[str, Any], bool], str], ...] = (
    (lambda _, item: isinstance(item, float) and not math.isfinite(item), "is not finite; write a finite number"),
    (lambda _, item: isinstance(item, str) and "\0" in item, "holds a NUL byte; no program takes one"),
    (
        lambda _, item: isinstance(item, int) and abs(item) >= LARGEST_WHOLE,
        "is larger than 2^62, which nothing here holds",
    ),
    (
        lambda name, item: isinstance(item, str) and is_secret(name, item),
        "holds a secret; a recipe is kept with its runs; give it with --env KEY, or in the file that env_file: of the host names",
    ),
)


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _without_removed(tree: dict[str, Any], kind: type, path: Path) -> dict[str, Any]:
    """A copy without the free keys that a layer took away with a null."""
    is_free = fields.is_free_map(fields.hint_at(kind, path))
    return {
        key: _without_removed(value, kind, (*path, key)) if isinstance(value, dict) else value
        for key, value in tree.items()
        if not (is_free and value is None)
    }


_UNITS: dict[str, Callable[[str], float]] = {"_bytes": units.parse_bytes, "_s": units.parse_duration}


def _read_units(tree: dict[str, Any], merged: Merged, kind: type) -> list[tuple[Path, str]]:
    """Turns `2h30m` and `95GiB` into numbers, in place, where the field's name ends in a unit."""
    faults = []
    for path, read in _fields_with_unit(kind):
        section = _at(tree, path[:-1])
        value = section.get(path[-1]) if isinstance(section, dict) else None
        if not isinstance(value, str):
            continue
        try:
            section[path[-1]] = read(value)
        except ValueError as error:
            faults.append((path, f"{merged.where(path)}: {dotted(path)}: {error}"))
    return faults


@cache
def _fields_with_unit(kind: type, path: Path = ()) -> tuple[tuple[Path, Callable[[str], float]], ...]:
    found: list[tuple[Path, Callable[[str], float]]] = []
    for name in fields.names_at(kind, path):
        at = (*path, name)
        read = next((read for ending, read in _UNITS.items() if name.endswith(ending)), None)
        if read is not None and fields.without_none(fields.hint_at(kind, at)) in (int, float):
            found.append((at, read))
        found += _fields_with_unit(kind, at)
    return tuple(found)


def _at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _refuse_unkept(tree: dict[str, Any], merged: Merged) -> list[tuple[Path, str]]:
    """A fault for each value, or part of one, that no spec may hold."""
    return [
        (path, f"{merged.where(path)}: {dotted(path)}: {told}")
        for path, value in leaves(tree)
        for item in (_flat(value) if isinstance(value, list | dict) else (value,))
        for told in _unkept(str(path[-1]), item)
    ]


@lru_cache(maxsize=4096)  # branches share most of their values
def _unkept(name: str, item: Any) -> tuple[str, ...]:
    return tuple(told for is_wrong, told in _UNKEPT if is_wrong(name, item))


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list):
        return [leaf for item in value for leaf in _flat(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _flat(item)]
    return [value]


def _without_paths(tree: dict[str, Any], dropped: set[Path], path: Path = ()) -> dict[str, Any]:
    return {
        key: _without_paths(value, dropped, (*path, key)) if isinstance(value, dict) else value
        for key, value in tree.items()
        if (*path, key) not in dropped
    }


def _line(merged: Merged, kind: type, path: Path, fault: str, seen: Any) -> str:
    if fault in _UNKNOWN_KEY:
        where, message = merged.where_key(path), fields.unknown_field(kind, path)
    elif fault == "missing":
        where = merged.where(path[:-1]) or merged.where(("entry",))
        message = f"is missing; expected {fields.describe(fields.hint_at(kind, path))}"
    else:
        where, message = merged.where(path), _wrong_type(fields.hint_at(kind, path), seen)
    return f"{where}: {dotted(path)}: {message}"


def _wrong_type(due: Any, seen: Any) -> str:
    wanted = fields.describe(due)
    plain = fields.without_none(due)
    match seen:
        case None:
            return f"is empty; expected {wanted}"
        case dict():
            return f"is a section; expected {wanted}"
        case list():
            return f"is a list; expected {wanted}"
        case bool():
            return f"is {str(seen).lower()}; expected {wanted}{_quoted(str(seen).lower(), plain)}"
        case float() if plain is int and seen.is_integer():
            return f"is {seen!r}; expected {wanted}: write {int(seen)}"
        case int() | float():
            return f"is {seen!r}; expected {wanted}{_quoted(str(seen), plain)}"
        case str() if plain is bool and seen.lower() in ("yes", "on", "no", "off"):
            return f"is {seen!r}, which is text; expected {wanted}"
        case str() if plain in (int, float, bool):
            return f"is {seen!r}, which is text; expected {wanted}"
        case str():
            near = nearest(seen, [str(word) for word in getattr(plain, "__args__", ())])
            return f"is {seen!r}; expected {wanted}" + (f"; {did_you_mean(near)}" if near else "")
    return f"is {seen!r}; expected {wanted}"


def _quoted(text: str, due: Any) -> str:
    return f': write "{text}"' if due is str else ""


def _default_place(kind: type, path: Path) -> str:
    declared = fields.declared_at(kind, path)
    return f"remote/spec.py:{declared.line}:5" if declared else "remote/spec.py:1:1"
