"""A dataclass of ours from plain JSON values, each held to the type its field has. Standard library only.

The local side validates recipes with more words; this is for the host, where a spec may have been written by hand. What
a number may be is `remote.ranges`, what fields must agree `remote.coherence`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_WORDS = {bool: "true or false", int: "a whole number of at most 64 bits", float: "a finite number", str: "a text"}
_SHOWN = 60  # characters of a wrong value


def build(kind: Any, tree: Any, where: str, path: str = "") -> Any:
    """ValueError, one line with the key, what was seen and what is due: an unknown key, a missing one, a wrong type.

    `where` is the file; `path` the dotted key of the tree in it, empty at the top.
    """
    if not isinstance(tree, dict):
        raise ValueError(
            f"{where}: {path or 'it'} is {_shown(tree)}; it must be an object with the keys of {kind.__name__}"
        )
    hints = get_type_hints(kind)
    inside = f"{where}: {path}" if path else where
    if unknown := set(tree) - set(hints):
        raise ValueError(f"{inside}: unknown key {sorted(unknown)[0]!r} in {kind.__name__}")
    needed = (each for each in dataclasses.fields(kind) if each.default is each.default_factory is dataclasses.MISSING)
    missing = [each.name for each in needed if each.name not in tree]
    if missing:
        raise ValueError(f"{inside}: {kind.__name__} has no {missing[0]!r}, which it needs")
    prefix = f"{path}." if path else ""
    return kind(**{name: _value(hints[name], value, where, prefix + name) for name, value in tree.items()})


def _value(hint: Any, value: Any, where: str, path: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return build(hint, value, where, path)
    if not _is(hint, value):
        raise ValueError(f"{where}: {path} is {_shown(value)}; it must be {_due(hint)}")
    return value


def _is(hint: Any, value: Any) -> bool:
    """As strict JSON has it: a whole number may stand for any number, and nothing else for anything else."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_is(each, value) for each in inner)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in inner)
    if origin is list:
        return isinstance(value, list) and all(_is(inner[0], each) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is(inner[1], each) for each in value.values())
    if hint is float and type(value) is float:
        return math.isfinite(value)
    if hint in (int, float):
        return type(value) is int and abs(value) < 2**63  # no database or tensor holds more, and many a float does not
    return type(value) is hint


def _due(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_due(each) for each in inner)
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin is list:
        return f"a list, each of it {_due(inner[0])}"
    if origin is dict:
        return f"an object, each value of it {_due(inner[1])}"
    return "null" if hint is type(None) else _WORDS[hint]


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode("utf-8")  # no half a surrogate pair
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
