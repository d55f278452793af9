"""What the spec's dataclasses say about a field: its type in words, its neighbours' names, its meaning.

The dataclasses of `remote.spec` are the only schema; nothing here repeats one of their fields.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import threading
import types
import typing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from orchestrator.nearest import did_you_mean, nearest, unknown
from orchestrator.recipe import strict_yaml
from remote import spec as spec_module
from remote.ranges import range_of

_DECLARING = (
    threading.Lock()
)  # CPython 3.11 counts the depth of all threads' syntax trees in one number, and breaks on it

# Filled in by the loader from the recipe's name and the branch asked for, never written in a file.
FILLED_IN = ("recipe", "branch")
# What people look for under a name of their own, and how it is written here.
OTHERWISE: dict[strict_yaml.Path, str] = {
    ("roles", "colocated"): "without target processes each drafter has its target beside it: write target: 0",
}
# The last word of a key as other trainers have it, and the key here.
USUAL = {
    "learning_rate": "optim.lr",
    "batch_size": "train.rows_per_step",
    "micro_batch_size": "train.rows_per_step",
    "gradient_accumulation_steps": "train.accumulation",
    "max_steps": "train.num_steps",
    "total_steps": "train.num_steps",
    "warmup": "optim.warmup_steps",
    "scheduler": "optim.schedule",
    "grad_clip": "optim.clip_norm",
    "max_grad_norm": "optim.clip_norm",
    "save_steps": "train.checkpoint_every",
    "logging_steps": "train.log_every",
    "gradient_checkpointing": "train.activation_checkpointing",
    "num_layers": "drafter.num_layers",
    "num_anchors": "data.max_anchors",
    "seq_len": "data.row_tokens",
    "max_length": "data.row_tokens",
}


@dataclass(frozen=True)
class Declared:
    """Where a field is declared, and the docstring below it: what it means, in a sentence with its unit."""

    line: int
    meaning: str


@cache
def hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def hint_at(kind: type, path: strict_yaml.Path) -> Any | None:
    """The type due at `path`, or None where no such field exists. Free keys of a map have its value type."""
    due: Any = kind
    for key in path:
        due = _inner(due, key)
        if due is None:
            return None
    return due


def _inner(due: Any, key: str | int) -> Any | None:
    due = without_none(due)
    if dataclasses.is_dataclass(due):
        return hints(typing.cast("type", due)).get(str(key))
    match get_origin(due), get_args(due):
        case origin, (_, value) if origin is dict:
            return value
        case origin, (item,) if origin is list and isinstance(key, int):
            return item
    return None


def without_none(due: Any) -> Any:
    """`int | None` -> `int`; anything else as it is."""
    if get_origin(due) in (types.UnionType, typing.Union):
        (rest,) = [part for part in get_args(due) if part is not type(None)]
        return rest
    return due


def is_optional(due: Any) -> bool:
    return type(None) in get_args(due)


def is_free_map(due: Any) -> bool:
    return get_origin(due) is dict


def is_text(due: Any) -> bool:
    due = without_none(due)
    return due is str or get_origin(due) is Literal


def describe(due: Any) -> str:
    """The type due, in a reader's words."""
    if is_optional(due):
        return f"{describe(without_none(due))} or null"
    simple = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if due in simple:
        return simple[due]
    if get_origin(due) is Literal:
        words = [str(word) for word in get_args(due)]
        return words[0] if len(words) == 1 else f"one of {', '.join(words)}"
    if get_origin(due) is list:
        return f"a list whose items are each {describe(get_args(due)[0])}"
    if get_origin(due) is dict:
        return f"a map from names to {describe(get_args(due)[1]).removeprefix('a ')}"
    return f"a section with the keys {', '.join(_required(due) or hints(due))}"


def _required(kind: Any) -> list[str]:
    return [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]


def names_at(kind: type, path: strict_yaml.Path) -> list[str]:
    """The keys a file may write in the section at `path`."""
    due = without_none(hint_at(kind, path))
    if not dataclasses.is_dataclass(due):
        return []
    return [name for name in hints(typing.cast("type", due)) if path or name not in FILLED_IN]


def unknown_field(kind: type, path: strict_yaml.Path) -> str:
    """`no key 'gama'; known: …`, and what it may have meant: a neighbour spelt like it, the same name in another section."""
    name, neighbours = str(path[-1]), names_at(kind, path[:-1])
    hint = OTHERWISE.get(path) or did_you_mean(USUAL.get(name)) or None
    if hint is None and nearest(name, neighbours) is None:
        homes = [f"{section}.{name}" for section in names_at(kind, ()) if name in names_at(kind, (section,))]
        hint = did_you_mean(homes[0] if homes else None)
    return unknown("key", name, neighbours, hint=hint)


def declarations() -> dict[tuple[str, str], Declared]:
    """(dataclass name, field name) -> its line in the schema's source and its meaning; a section means what its class says."""
    with _DECLARING:
        return _declarations()


@cache
def _declarations() -> dict[tuple[str, str], Declared]:
    found = {}
    for node in ast.parse(Path(spec_module.__file__).read_text(encoding="utf-8")).body:
        parts = node.body if isinstance(node, ast.ClassDef) else []
        for part, below in itertools.zip_longest(parts, parts[1:]):
            if isinstance(node, ast.ClassDef) and isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                found[node.name, part.target.id] = Declared(
                    part.lineno, _docstring(below) or _of_section(part.annotation)
                )
    return found


def declared_at(kind: type, path: strict_yaml.Path) -> Declared | None:
    """The field at `path`; a key of a map with free keys is declared where its map is."""
    owner = without_none(hint_at(kind, path[:-1])) if path else None
    if is_free_map(owner):
        return declared_at(kind, path[:-1])
    return declarations().get((getattr(owner, "__name__", ""), str(path[-1]))) if path else None


def meaning_at(kind: type, path: strict_yaml.Path) -> str:
    """A sentence with unit and range; empty where no such field exists."""
    declared = declared_at(kind, path)
    if declared is None:
        return ""
    term = spec_module.LOSS_TERMS[str(path[-1])] if is_loss_term(path) else None
    due = range_of(".".join(map(str, path)))
    return (term or declared.meaning) + (f" It must {due}." if due else "")


def is_loss_term(path: strict_yaml.Path) -> bool:
    return path[:-1] == ("loss", "terms") and path[-1] in spec_module.LOSS_TERMS


def _docstring(node: ast.stmt | None) -> str:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return inspect.cleandoc(node.value.value) if is_text else ""  # type: ignore[union-attr]


def _of_section(annotation: ast.expr) -> str:
    """The docstring of the dataclass that the annotation names."""
    named = getattr(spec_module, annotation.id, None) if isinstance(annotation, ast.Name) else None
    return inspect.getdoc(named) or "" if dataclasses.is_dataclass(named) else ""
