"""Recipes as a person asks about them: find, check, resolve, explain, compare. Nothing is contacted."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from orchestrator.actions import doubts
from orchestrator.actions.places import Places
from orchestrator.errors import DraftyardError, RecipeError, UsageError
from orchestrator.given import read_given
from orchestrator.nearest import did_you_mean
from orchestrator.recipe import (
    BUNDLED,
    Branch,
    Difference,
    Explained,
    Recipe,
    Resolved,
    diff,
    find_recipe,
    known_recipes,
    load_recipe,
)
from orchestrator.recipe.layers import dotted, leaves
from orchestrator.store.rows import RunRow
from orchestrator.units import counted
from remote.spec import DFlashSpec, ScriptSpec, Spec

BRANCH, OVERRIDE = "branch ", "--set"  # layers above a recipe's base


@dataclass(frozen=True)
class Checked:
    """One recipe file; no faults means that every branch of it resolves. Warnings: what a launch from here would lack, or is hardly meant."""

    path: Path
    branches: tuple[str, ...]
    faults: tuple[str, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Known:
    """A recipe that its name finds; without branches where it has faults."""

    name: str
    path: Path
    why: str
    branches: tuple[Branch, ...]
    default_branch: str | None
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Compared:
    left: Resolved
    right: Resolved
    differences: list[Difference]


@dataclass(frozen=True)
class Told:
    """Who decided one value of a run, what base alone would say, what the recipe says today."""

    layer: str  # default, preset NAME, base, branch NAME, --set
    where: str  # file:line:column
    base: Any
    now: Any

    @property
    def is_override(self) -> bool:
        return self.layer == OVERRIDE

    @property
    def is_above_base(self) -> bool:
        return self.layer.startswith((BRANCH, OVERRIDE))


PROGRAMS = (".py", ".sh")  # what behind an interpreter is a program, not an option's value


@dataclass(frozen=True)
class Origins:
    """Where the values of a run came from, as far as its recipe can still say."""

    told: Mapping[str, Told] = field(default_factory=dict)  # by dotted key
    fault: str = ""  # why the recipe cannot be asked
    doubt: str = ""  # why what it says may not be what was launched


def load(places: Places, word: str) -> Recipe:
    """The recipe of a path, a name in the project's recipes/, or a bundled name. Raises RecipeError."""
    looks_like_path = word.endswith((".yaml", ".yml")) or "/" in word
    project = None if looks_like_path or places.recipes is None else places.recipes.parent
    try:
        path = find_recipe(word, project)
    except RecipeError as error:
        hint = "" if looks_like_path else _meant(places, word, str(error))
        raise RecipeError([f"{error}; {hint}" if hint else str(error)]) from None
    return load_recipe(path)


def known(places: Places) -> list[Known]:
    """Every recipe that a name finds, by name; one that cannot be read with its faults."""
    project = None if places.recipes is None else places.recipes.parent
    found = []
    for name in known_recipes(project):
        path = find_recipe(name, project)
        try:
            recipe = load_recipe(path)
        except RecipeError as error:
            found.append(Known(name, path, "", (), None, tuple(error.items)))
        else:
            found.append(Known(name, path, recipe.why, tuple(recipe.branches.values()), recipe.default_branch))
    return found


def _meant(places: Places, word: str, told: str) -> str:
    """What helps who typed a name that no recipe has: it may be a branch's, or hold one."""
    name, _, branch = word.partition(":")
    found = known(places)
    if branch and any(branch in (item.name for item in recipe.branches) for recipe in found if recipe.name == name):
        return f"a branch is named with -b: {name} -b {branch}"
    homes = [recipe.name for recipe in found if word in (item.name for item in recipe.branches)]
    if homes:
        return f"it is a branch: {' or '.join(f'{home} -b {word}' for home in homes)}"
    return "" if "did you mean" in told else "all branches: draftyard recipe list"


def resolve(
    places: Places, word: str, *, branch: str | None = None, overrides: Sequence[str] = ()
) -> tuple[Recipe, Resolved]:
    """The recipe and one branch of it with every value decided."""
    recipe = load(places, word)
    return recipe, recipe.resolve(branch, overrides)


def check(places: Places, words: Sequence[str]) -> list[Checked]:
    """Checks files, every recipe of a folder, or recipes by name; faults are returned, not raised."""
    paths = [path for word in words for path in _files(places, word)]
    return [_checked(path) for path in paths]


def lacking_data(spec: Spec, folder: Path) -> list[tuple[str, str]]:
    """Data that a training would look for in vain, at its start or, the held-out prompts, only at its end, by dotted path.

    `folder` is the recipe's. An absolute path means a file on the host, which is asked there. Answers may be missing:
    the target gives them.
    """
    if not isinstance(spec, DFlashSpec):
        return []
    wanted = {} if _is_data(spec.data.answers, folder) else {"prompts": spec.data.prompts}
    wanted |= {"held_out": spec.data.held_out} if spec.evaluate.at_end else {}
    to_do = "put it there"
    if folder == BUNDLED:  # it is draftyard's own: an update would take away whatever was put there
        copy = shlex.join(["cp", str(folder / f"{spec.recipe}.yaml")])
        to_do = f"copy the recipe ({copy} recipes/) and put it into recipes/data"
    told = f"is neither in {folder / 'data'} nor bundled; {to_do}, or name an absolute path on the host"
    return [(f"data.{key}", f"{name!r} {told}") for key, name in wanted.items() if not _is_data(name, folder)]


def lacking_files(spec: Spec, folder: Path) -> list[tuple[str, str]]:
    """Programs of a script's own that its folder does not hold, by dotted path; `folder` is the recipe's."""
    if not isinstance(spec, ScriptSpec):
        return []
    place = folder / spec.folder
    wanted = [("command", word) for word in spec.command[1:3] if word.endswith(PROGRAMS) and " " not in word]
    wanted += [(f"smoke.scripts.{rung}", name) for rung, name in spec.smoke.scripts.items()]
    return [
        (key, f"{name!r} is not in {place}, which is what is shipped")
        for key, name in wanted
        if not PurePosixPath(name).is_absolute() and not (place / name).is_file()
    ]


def _is_data(name: str, folder: Path) -> bool:
    path = PurePosixPath(name)
    return path.is_absolute() or (
        ".." not in path.parts and any((place / "data" / path).is_file() for place in (folder, BUNDLED))
    )


def explain(
    places: Places, word: str, key: str, *, branch: str | None = None, overrides: Sequence[str] = ()
) -> list[Explained]:
    """Where the value of a key, or of every key of a section, came from."""
    return resolve(places, word, branch=branch, overrides=overrides)[1].explain(key)


def identity(recipe: Recipe) -> dict[str, str]:
    """Which file a launch has read: kept with the run, because a name may be another file's one day."""
    path = recipe.path.resolve()
    return {"recipe_file": str(path), "recipe_hash": hashlib.sha256(read_given(path)).hexdigest()}


def of_run(places: Places, run: RunRow, launch: Mapping[str, Any]) -> Recipe:
    """The recipe that a run was launched with: the file that the launch kept, or a copy of it under its name. Of a run
    that kept none, whatever has its name. Raises RecipeError.
    """
    kept = str(launch.get("recipe_file") or "")
    is_there = bool(kept) and Path(kept).is_file()
    recipe = load(places, kept if is_there else run.recipe)
    other = f"{recipe.path} is another file of that name"
    if kept and not is_there and identity(recipe)["recipe_hash"] != launch.get("recipe_hash"):
        raise RecipeError([f"{other}: the run was launched from {kept}, which is gone"])
    if recipe.slug != run.recipe:
        raise RecipeError([f"{other}: its recipe is called {recipe.name}"])
    return recipe


def origins(places: Places, run: RunRow, *, spec: Mapping[str, Any], launch: Mapping[str, Any]) -> Origins:
    """Asks the recipe of a run again: its file as the launch kept it, else whatever has its name. Faults are told, not raised.

    `spec` and `launch` are the documents that the run was launched with.
    """
    overrides = [str(item) for item in launch.get("overrides") or ()]
    try:
        recipe = of_run(places, run, launch)
        resolved = recipe.resolve(run.branch, overrides)
        told = _told(resolved)
        return Origins(told, doubt=_doubt(recipe, told, spec, launch))
    except (DraftyardError, OSError) as error:
        return Origins(fault=str(error).splitlines()[0])


def compare(places: Places, left: str, right: str) -> Compared:
    """Two of `RECIPE` or `RECIPE:BRANCH`; the right one may be `:BRANCH`, a branch of the left recipe."""
    left_word, left_branch = _split(left)
    right_word, right_branch = _split(right)
    sides = [
        resolve(places, left_word, branch=left_branch)[1],
        resolve(places, right_word or left_word, branch=right_branch)[1],
    ]
    return Compared(sides[0], sides[1], diff(sides[0], sides[1]))


def _told(resolved: Resolved) -> dict[str, Told]:
    now = _by_key(dataclasses.asdict(resolved.spec))
    told = {}
    for key, layers in resolved.origins.items():
        below = [origin.value for origin in layers if not origin.layer.startswith((BRANCH, OVERRIDE))]
        told[key] = Told(layers[-1].layer, layers[-1].where, below[-1] if below else None, now.get(key))
    return told


def _by_key(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Values as a document keeps them, by dotted key."""
    return {dotted(path): value for path, value in leaves(json.loads(json.dumps(tree)))}


def _doubt(recipe: Recipe, told: Mapping[str, Told], spec: Mapping[str, Any], launch: Mapping[str, Any]) -> str:
    """Empty where the file is the launch's own; what was edited in it is said value by value."""
    if launch.get("recipe_file"):
        return ""
    ran_with = _by_key(spec)
    differing = [key for key, one in told.items() if key in ran_with and ran_with[key] != one.now]
    if not differing:
        return ""
    values = counted(len(differing), "value")
    return f"{recipe.path} says {values} differently: it was edited since, or another file of that name was launched"


def _split(word: str) -> tuple[str, str | None]:
    name, _, branch = word.partition(":")
    return name, branch or None


def _files(places: Places, word: str) -> list[Path]:
    folder = Path(word)
    if not folder.is_dir():
        return [
            find_recipe(word, places.recipes.parent if places.recipes and "/" not in word and "." not in word else None)
        ]
    found = sorted(folder.glob("*.yaml"))
    if not found:
        inside = folder / "recipes"
        hint = f"; {did_you_mean(str(inside))}" if any(inside.glob("*.yaml")) else ""
        raise UsageError(f"{word}: the folder holds no recipe; recipes are files named *.yaml{hint}")
    return found


def _checked(path: Path) -> Checked:
    try:
        recipe = load_recipe(path, doubt=lambda spec: _doubted(spec, path.parent))
    except RecipeError as error:
        return Checked(path, (), tuple(error.items))
    return Checked(
        path, tuple(recipe.branches), (), (*doubts.of_name(recipe), *doubts.of_schema(recipe), *recipe.doubts)
    )


def _doubted(spec: Spec, folder: Path) -> list[tuple[str, str]]:
    return [*lacking_data(spec, folder), *lacking_files(spec, folder), *doubts.of_schedule(spec)]
