"""Recipes: YAML files that say what to train, why, and in which branches.

    name: smollm2                       why: one sentence
    default_branch: ce                  left out: the first branch
    base:      {entry: dflash, preset: smollm2-135m, data: {...}, train: {...}}
    branches:  {ce: {why: ...}, ce_kl: {why: ..., extends: ce, loss: {...}}}

Layers, older first: the schema's defaults, the preset, base, the branches extended, the branch,
overrides. A loaded Recipe is whole: every branch has been resolved and checked, and a fault
anywhere refuses the file. Faults come in this order: all of syntax, else all of single fields, else
all across fields.

It contacts no host and looks at no data file.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from orchestrator.errors import RecipeError, UsageError
from orchestrator.nearest import did_you_mean, nearest, unknown
from orchestrator.recipe import fields, strict_yaml
from orchestrator.recipe.field_check import check_across, check_fields, placed
from orchestrator.recipe.file import RecipeFile, read_recipe_file
from orchestrator.recipe.layers import Layer, Merged, Origin, dotted, leaves
from orchestrator.recipe.overrides import override_layer, split_override
from remote.spec import COSMETIC, ENTRIES, LOSS_TERMS, DFlashSpec, ScriptSpec, Spec

BUNDLED = Path(__file__).resolve().parents[2] / "recipes"


@dataclass(frozen=True)
class Branch:
    """A named variation of a recipe; `where` is `file:line:col`."""

    name: str
    why: str
    extends: tuple[str, ...]
    where: str


@dataclass(frozen=True)
class Explained:
    """One key's final value and every layer that wrote it, oldest first: the last one won. A term that is not used has none."""

    key: str
    value: Any
    origins: list[Origin]
    due: str  # its type, in words
    meaning: str  # what the schema says of the field, with unit and range


@dataclass(frozen=True)
class Difference:
    """One key of two resolved branches; None where a side has no such key."""

    key: str
    left: Any
    right: Any
    is_cosmetic: bool  # changes what a person reads, never what runs


@dataclass(frozen=True)
class Resolved:
    """A branch with every value decided. `origins`: dotted key -> layers, oldest first, the last one won."""

    spec: Spec
    origins: dict[str, list[Origin]]

    def explain(self, key: str) -> list[Explained]:
        """The key, or every key of the section, terms of the loss that are not used among them. Raises UsageError with the
        nearest name."""
        path, _ = split_override(f"{key}=")
        values = {dotted(at): (at, value) for at, value in leaves(self._with_every_term())}
        wanted = dotted(path)
        found = [name for name in values if name == wanted or name.startswith(f"{wanted}.")]
        if not found:
            raise UsageError(_unknown_key(key, wanted, list(values)))
        return [self._explained(name, *values[name]) for name in found]

    def _with_every_term(self) -> dict[str, Any]:
        tree = dataclasses.asdict(self.spec)
        if isinstance(self.spec, DFlashSpec):
            tree["loss"]["terms"] = {**dict.fromkeys(LOSS_TERMS), **tree["loss"]["terms"]}
        return tree

    def _explained(self, name: str, path: strict_yaml.Path, value: Any) -> Explained:
        kind = type(self.spec)
        due = fields.describe(fields.hint_at(kind, path))
        return Explained(name, value, self.origins.get(name, []), due, fields.meaning_at(kind, path))


@dataclass(frozen=True)
class Recipe:
    """A whole, checked recipe. `slug` is its name as a folder name can hold it."""

    path: Path
    name: str
    slug: str
    why: str
    branches: dict[str, Branch]
    default_branch: str
    file: RecipeFile
    doubts: tuple[str, ...] = ()  # what was asked of each branch beside its faults, with its place

    @property
    def folder(self) -> Path:
        """What `folder:` of a script and the data files are relative to."""
        return self.path.parent

    def resolve(self, branch: str | None = None, overrides: Sequence[str] = ()) -> Resolved:
        """The default branch where none is named. Raises RecipeError, or UsageError for a malformed override."""
        name = branch or self.default_branch
        if name not in self.branches:
            raise RecipeError([f"{self.file.shown}: branches: {unknown('branch', name, self.branches)}"])
        merged, kind = _merge(self.file, self.slug, name, overrides)
        spec, faults = check_fields(merged, kind)
        if spec is None:
            raise RecipeError(_ordered(faults))
        faults = check_across(spec, merged) + _missing_folder(spec, merged, self.folder)
        if faults:
            raise RecipeError(_ordered(faults))
        return Resolved(spec, _origins(spec, merged))


def _unknown_key(typed: str, wanted: str, values: list[str]) -> str:
    """Known are the keys beside it; where there is no such section either, the sections."""
    section, _, name = wanted.rpartition(".")
    homes = [value for value in values if value.rpartition(".")[2] == name]
    meant = [fields.USUAL[name]] if fields.USUAL.get(name) in values else homes
    hint = did_you_mean(meant[0]) if meant else None
    beside = [name for name in values if section and name.startswith(f"{section}.")]
    if beside:
        return unknown("key", typed, beside, hint=hint)
    sections = dict.fromkeys(name.split(".")[0] for name in values)
    near = nearest(wanted, [*sections, *values])
    hint = hint or did_you_mean(near)
    return f"no key {typed!r}; sections: {', '.join(sections)}" + (f"; {hint}" if hint else "")


def load_recipe(word: str | Path, *, doubt: Callable[[Spec], list[tuple[str, str]]] = lambda _: []) -> Recipe:
    """Finds, reads and checks a recipe with all its branches. Raises RecipeError with every fault.

    `doubt`: asked of every branch for (dotted path, message) of what is no fault of the file.
    """
    path = word if isinstance(word, Path) else find_recipe(word)
    file = read_recipe_file(path, BUNDLED)
    recipe = _recipe(path, file)
    faults, across, doubts = list(file.faults), list[str](), list[str]()
    for branch in recipe.branches:
        if branch in file.broken:
            continue
        merged, kind = _merge(file, recipe.slug, branch, ())
        spec, found = check_fields(merged, kind, is_partial=file.lacks_preset(branch))
        faults += found
        if spec is not None and not faults:
            across += check_across(spec, merged) + _missing_folder(spec, merged, recipe.folder)
            doubts += placed(doubt(spec), kind, merged)
    if faults or across:
        raise RecipeError(_ordered(faults or across))
    return dataclasses.replace(recipe, doubts=tuple(_ordered(doubts)))


def find_recipe(word: str, cwd: Path | None = None) -> Path:
    """A path, else ./recipes/NAME.yaml, else a bundled recipe. Raises RecipeError naming what is known."""
    folder = (cwd or Path()) / "recipes"
    if word.endswith((".yaml", ".yml")) or "/" in word:
        path = (cwd or Path()) / word
        if _is_there(path):
            return path
        raise RecipeError([f"{word}: there is no such file; expected a recipe's path or name"])
    for candidate in (folder / f"{word}.yaml", BUNDLED / f"{word}.yaml"):
        if _is_there(candidate):
            return candidate
    raise RecipeError([unknown("recipe", word, known_recipes(cwd))])


def _is_there(path: Path) -> bool:
    """What no file can be called is not there. Raises OSError for what cannot be looked at."""
    try:
        return path.exists()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False


def known_recipes(cwd: Path | None = None) -> list[str]:
    """Names that `find_recipe` finds, sorted: those of ./recipes and the bundled ones."""
    folders = ((cwd or Path()) / "recipes", BUNDLED)
    return sorted({path.stem for folder in folders for path in folder.glob("*.yaml") if path.is_file()})


def diff(left: Resolved, right: Resolved) -> list[Difference]:
    """Keys whose final values differ, in the schema's order; recipe and branch names are left out."""
    values = [dict(leaves(dataclasses.asdict(side.spec))) for side in (left, right)]
    sections = list(dict.fromkeys(path[0] for side in values for path in side))
    paths = sorted(values[0] | values[1], key=lambda path: sections.index(path[0]))
    found = []
    for path in paths:
        pair = [side.get(path) for side in values]
        if path[0] not in fields.FILLED_IN and pair[0] != pair[1] and {} not in pair:
            found.append(Difference(dotted(path), pair[0], pair[1], path[0] in COSMETIC))
    return found


def slug(name: str) -> str:
    """The name with only letters, digits, `.`, `_` and `-`, so that it can name a folder.

    A name of other letters gets a mark of its own: `é` and `ü` are two recipes, with their own evidence and history.
    """
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")
    if re.search(r"[^\W_]", re.sub(r"[A-Za-z0-9]", "", name)):
        plain = f"{plain or 'recipe'}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
    return plain or "recipe"


def _recipe(path: Path, file: RecipeFile) -> Recipe:
    branches = {
        name: Branch(
            name, _text(body.get("why")), tuple(file.parents.get(name, ())), file.where_key(("branches", name))
        )
        for name, body in file.branches.items()
    }
    default = file.value.get("default_branch") or next(iter(branches), "")
    name = _text(file.value.get("name")) or path.stem
    return Recipe(path, name, slug(name), _text(file.value.get("why")), branches, str(default), file)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _merge(file: RecipeFile, name: str, branch: str, overrides: Iterable[str]) -> tuple[Merged, type]:
    """The layers of a branch laid over one another, and the dataclass its `entry` picks."""
    layers = file.layers(branch)
    kind = _kind(layers, next(iter(ENTRIES.values())))
    layers += [override_layer(text, kind) for text in overrides]
    kind = _kind(layers, kind)
    merged = Merged()
    for layer in (_free_defaults(kind), *file.with_preset(layers)):
        merged.lay(layer)
    merged.filled_in = dict(zip(fields.FILLED_IN, (name, branch), strict=True))
    return merged, kind


def _kind(layers: list[Layer], fallback: type) -> type:
    """The dataclass that the newest `entry` picks."""
    entry = next((layer.value["entry"] for layer in reversed(layers) if "entry" in layer.value), None)
    return ENTRIES.get(str(entry), fallback)


def _missing_folder(spec: Spec, merged: Merged, folder: Path) -> list[str]:
    if not isinstance(spec, ScriptSpec) or (folder / spec.folder).is_dir():
        return []
    return [f"{merged.where(('folder',))}: folder: is {spec.folder!r}; there is no such folder beside the recipe"]


@cache
def _free_defaults(kind: type) -> Layer:
    """Defaults of maps with free keys, as the oldest layer: they merge key by key like any other."""
    free: dict[str, Any] = {}
    for path, value in leaves(_defaults(kind)):
        if fields.is_free_map(fields.hint_at(kind, path[:-1])):
            free.setdefault(str(path[0]), {}).setdefault(str(path[1]), {})[str(path[2])] = value
    return Layer("default", free, typed="remote/spec.py")


def _origins(spec: Spec, merged: Merged) -> dict[str, list[Origin]]:
    """The layers of every leaf, the schema's default first where it has one."""
    kind = type(spec)
    defaults = dict(leaves(_defaults(kind)))
    result = {}
    for path, value in leaves(dataclasses.asdict(spec)):
        written = [origin for origin in merged.origins(path) if origin.layer != "default"]
        if path in defaults:
            declared = fields.declared_at(kind, path)
            written = [
                Origin(
                    "default", f"remote/spec.py:{declared.line}:5" if declared else "remote/spec.py", defaults[path]
                ),
                *written,
            ]
        result[dotted(path)] = written or [Origin("recipe", merged.where(path), value)]
    return result


def _defaults(kind: type) -> dict[str, Any]:
    """Every default of the dataclass and of the sections below it, required fields left out."""
    result: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        due = fields.hints(kind)[field.name]
        if dataclasses.is_dataclass(due):
            result[field.name] = _defaults(due)  # type: ignore[arg-type]
        elif field.default is not dataclasses.MISSING:
            result[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            result[field.name] = field.default_factory()
    return result


def _ordered(faults: list[str]) -> list[str]:
    """Each fault once, by file, then line and column as numbers."""

    def place(line: str) -> tuple[str, int, int]:
        found = re.match(r"(.*?):(\d+):(\d+): ", line)
        return (found[1], int(found[2]), int(found[3])) if found else (line, 0, 0)

    return sorted(dict.fromkeys(faults), key=place)
