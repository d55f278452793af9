"""A recipe's file and its presets as read: the layers of each branch, and faults of the file's shape.

It knows the words around the fields (name, why, base, branches, preset, extends) and leaves the
fields themselves to `orchestrator.recipe.field_check`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.errors import RecipeError
from orchestrator.given import read_given
from orchestrator.nearest import unknown
from orchestrator.recipe import strict_yaml
from orchestrator.recipe.layers import Layer
from orchestrator.recipe.strict_yaml import Document
from remote.spec import ENTRIES

TOP_KEYS = ("name", "why", "default_branch", "base", "branches")
MAX_LINEAGE = 64  # branches laid over one another; each costs every branch behind it
MAX_LAID = 1_000_000  # values of all branches with what lies below each: seconds of work
MAX_HINTS = 50
MAX_TOLD = 8  # names of a circle
BRANCH_NAME = r"letters, digits, '.', '_' and '-'"


@dataclass
class RecipeFile:
    """What the files say. `broken` branches cannot be merged; their faults are in `faults`."""

    shown: str  # the path as a person reads it in a fault
    document: Document
    preset_folders: tuple[Path, ...] = ()  # where a preset is looked for, the recipe's own first
    presets: dict[str, Document] = field(default_factory=dict)
    branches: dict[str, dict[str, Any]] = field(default_factory=dict)
    parents: dict[str, list[str]] = field(default_factory=dict)
    lineages: dict[str, list[str]] = field(default_factory=dict)  # ancestors, older first, each once; the branch last
    faults: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    missing_presets: set[str] = field(default_factory=set)

    @property
    def value(self) -> dict[str, Any]:
        return self.document.value if isinstance(self.document.value, dict) else {}

    def where(self, path: strict_yaml.Path) -> str:
        return str(self.document.locate(path))

    def where_key(self, path: strict_yaml.Path) -> str:
        return str(self.document.keys.get(path) or self.document.locate(path))

    def report(self, path: strict_yaml.Path, message: str, *, at_key: bool = False) -> None:
        place = self.where_key(path) if at_key else self.where(path)
        name = ".".join(map(str, path))
        self.faults.append(f"{place}: {name}: {message}" if name else f"{place}: {message}")

    def layers(self, branch: str) -> list[Layer]:
        """The recipe's sentence, base, every extended branch once, then the branch; presets left out."""
        why = {"why": self.value["why"]} if "why" in self.value else {}
        layers = [Layer("recipe", why, self.document)]
        layers += [self._layer("base", self.value.get("base"), ("base",))]
        for name in self.lineages[branch]:
            layers.append(self._layer(f"branch {name}", self.branches[name], ("branches", name)))
        return layers

    def lacks_preset(self, branch: str) -> bool:
        named = [layer.value["preset"] for layer in self.layers(branch) if "preset" in layer.value]
        return bool(named) and str(named[-1]) in self.missing_presets

    def with_preset(self, layers: list[Layer]) -> list[Layer]:
        """The newest layer that names a preset puts it under all others; the word itself is no field."""
        namer = next((layer for layer in reversed(layers) if "preset" in layer.value), None)
        plain = [
            Layer(
                layer.name,
                {key: value for key, value in layer.value.items() if key != "preset"},
                layer.document,
                layer.root,
                layer.typed,
            )
            for layer in layers
        ]
        if namer is None:
            return plain
        name = str(namer.value["preset"])
        document = self.presets.get(name) or self._override_preset(name, namer)
        return [Layer(f"preset {name}", _without(document.value, "why"), document), *plain]

    def _override_preset(self, name: str, namer: Layer) -> Document:
        """A preset named by an override: found among the presets that lie where the recipe looks."""
        folders = self.preset_folders
        path = find_preset(name, folders)
        if path is None:
            known = known_presets(folders)
            raise RecipeError([f"{namer.where(('preset',))}: preset: {unknown('preset', name, known)}"])
        return _read(path)

    def _layer(self, name: str, value: Any, root: strict_yaml.Path) -> Layer:
        body = value if isinstance(value, dict) else {}
        return Layer(name, _without(body, "extends"), self.document, root)


def read_recipe_file(path: Path, bundled: Path) -> RecipeFile:
    """Raises RecipeError with every fault of syntax, in the recipe or a preset; faults of shape are kept in it."""
    document = _read(path)
    file = RecipeFile(document.file, document, preset_folders=(path.parent / "presets", bundled / "presets"))
    _check_top(file)
    _read_branches(file)
    _read_presets(file)
    _check_laid(file)
    return file


def find_preset(name: str, folders: tuple[Path, ...]) -> Path | None:
    return next((folder / f"{name}.yaml" for folder in folders if (folder / f"{name}.yaml").is_file()), None)


def known_presets(folders: tuple[Path, ...]) -> list[str]:
    return sorted({path.stem for folder in folders for path in folder.glob("*.yaml") if path.is_file()})


def shown_path(path: Path) -> str:
    """Relative to the working folder where it lies below it."""
    resolved, here = path.resolve(), Path.cwd()
    return str(resolved.relative_to(here)) if resolved.is_relative_to(here) else str(path)


def _read(path: Path) -> Document:
    shown = shown_path(path)
    try:
        return strict_yaml.parse(read_given(path), shown)
    except strict_yaml.YamlFaults as faults:
        raise RecipeError([str(fault) for fault in faults.faults]) from faults
    except OSError as error:
        raise RecipeError([f"{shown}: cannot be read: {error.strerror}"]) from error


def _check_top(file: RecipeFile) -> None:
    if not isinstance(file.document.value, dict):
        file.report((), f"expected a map with the keys {', '.join(TOP_KEYS)}")
        return
    for key in file.value:
        if key not in TOP_KEYS:
            file.report((key,), unknown("key", key, TOP_KEYS), at_key=True)
    for key in ("name", "base", "branches"):
        if key not in file.value:
            file.report((), f"{key} is missing; a recipe has the keys {', '.join(TOP_KEYS)}")
    for key in ("name", "why", "default_branch"):
        value = file.value.get(key)
        if key in file.value and not (isinstance(value, str) and value.strip()):
            file.report((key,), f"is {value!r}; expected text")
    _check_entry(file)


def _check_entry(file: RecipeFile) -> None:
    base = file.value.get("base", {})
    if not isinstance(base, dict):
        file.report(("base",), "expected a section with the fields every branch shares")
        return
    if "base" in file.value and base.get("entry") not in ENTRIES:
        seen = f"is {base['entry']!r}" if "entry" in base else "is missing"
        file.faults.append(f"{file.where(('base', 'entry'))}: entry: {seen}; expected one of {', '.join(ENTRIES)}")


def _read_branches(file: RecipeFile) -> None:
    branches = file.value.get("branches")
    if "branches" in file.value and not (isinstance(branches, dict) and branches):
        file.report(("branches",), "expected a map from branch names to what each changes")
    for name, body in branches.items() if isinstance(branches, dict) else ():
        if not name.replace("-", "").replace("_", "").replace(".", "").isalnum() or not name.isascii():
            file.report(("branches", name), f"a branch name has {BRANCH_NAME} only", at_key=True)
        if body is not None and not isinstance(body, dict):
            file.report(("branches", name), "expected a section with what this branch changes, or nothing")
        file.branches[name] = body if isinstance(body, dict) else {}
    default = file.value.get("default_branch")
    if isinstance(default, str) and file.branches and default not in file.branches:
        file.report(("default_branch",), unknown("branch", default, file.branches))
    _read_parents(file)


def _read_parents(file: RecipeFile) -> None:
    for name, body in file.branches.items():
        extends = body.get("extends", [])
        parents = extends if isinstance(extends, list) else [extends]
        at = ("branches", name, "extends")
        for parent in parents:
            if not isinstance(parent, str):
                file.report(at, f"is {parent!r}; expected a branch name or a list of them")
            elif parent not in file.branches:
                # Looking for the nearest of thousands takes its time: after so many faults a person knows what is meant.
                is_early = len(file.faults) < MAX_HINTS
                file.report(at, unknown("branch", parent, file.branches) if is_early else f"no branch {parent!r}")
        file.parents[name] = [parent for parent in parents if isinstance(parent, str) and parent in file.branches]
    _settle_lineages(file)


def _settle_lineages(file: RecipeFile) -> None:
    """Parents before children. What lies on a circle of `extends`, or behind one, or in too long a line, is broken."""
    children: dict[str, list[str]] = {}
    num_open = {name: len(parents) for name, parents in file.parents.items()}
    for name, parents in file.parents.items():
        for parent in parents:
            children.setdefault(parent, []).append(name)
    settled = [name for name in file.branches if num_open[name] == 0]
    for name in settled:  # grows while it is read
        lineage = dict.fromkeys(older for parent in file.parents[name] for older in file.lineages[parent])
        if len(lineage) >= MAX_LINEAGE:
            file.report(("branches", name, "extends"), f"extends {len(lineage)} branches; at most {MAX_LINEAGE - 1}")
            continue
        file.lineages[name] = [*lineage, name]
        for child in children.get(name, []):
            num_open[child] -= 1
            if num_open[child] == 0:
                settled.append(child)
    _report_circles(file, {name for name in file.branches if num_open[name]})
    file.broken |= file.branches.keys() - file.lineages.keys()


def _report_circles(file: RecipeFile, unsettled: set[str]) -> None:
    """Each way up that leads back to itself, once: with all of them mended, no circle is left."""
    done: set[str] = set()
    for name in (name for name in file.branches if name in unsettled):
        if name not in done:
            _climb(file, name, unsettled, done)


def _climb(file: RecipeFile, name: str, unsettled: set[str], done: set[str]) -> None:
    """Goes up every way from a branch, depth first, and reports where a way meets itself. `done` grows."""
    way, depths = [name], {name: 0}  # the branches above each other, and how high each stands
    open_parents = [iter(dict.fromkeys(file.parents[name]))]
    while way:
        parent = next(open_parents[-1], None)
        if parent is None:
            done.add(way.pop())
            depths.popitem()
            open_parents.pop()
        elif parent in depths:
            at = depths[parent]
            told = [*way[at : at + MAX_TOLD], parent if len(way) - at < MAX_TOLD else "..."]
            file.report(("branches", parent, "extends"), f"extends itself: {' -> '.join(told)}")
        elif parent in unsettled and parent not in done:
            depths[parent] = len(way)
            way.append(parent)
            open_parents.append(iter(dict.fromkeys(file.parents[parent])))


def _read_presets(file: RecipeFile) -> None:
    """Reads every preset named in base or a branch. Syntax faults of all presets are raised together."""
    faults: list[str] = []
    places: list[tuple[strict_yaml.Path, Any]] = [(("base",), file.value.get("base"))]
    places += [(("branches", name), body) for name, body in file.branches.items()]
    for root, body in places:
        if not isinstance(body, dict) or "preset" not in body or str(body["preset"]) in file.presets:
            continue
        name = str(body["preset"])
        file.presets[name] = Document(name, {})
        path = find_preset(name, file.preset_folders)
        if path is None:
            file.report((*root, "preset"), unknown("preset", name, known_presets(file.preset_folders)))
            file.missing_presets.add(name)
            continue
        try:
            file.presets[name] = _read(path)
        except RecipeError as error:
            faults += error.items
            continue
        if not isinstance(file.presets[name].value, dict):
            faults.append(f"{shown_path(path)}:1:1: expected a map of fields, such as target and drafter")
    if faults:
        raise RecipeError(faults)


def _check_laid(file: RecipeFile) -> None:
    """Each branch is resolved with all layers below it, so a short text can ask for hours. Raises RecipeError."""
    base = file.value.get("base")
    in_base, own = _num_values(base), {name: _num_values(body) for name, body in file.branches.items()}
    in_presets = {name: _num_values(document.value) for name, document in file.presets.items()}
    num_laid = 0
    for lineage in file.lineages.values():
        bodies = (file.branches[name] for name in reversed(lineage))
        namer = next((body for body in (*bodies, base) if isinstance(body, dict) and "preset" in body), {})
        num_laid += in_base + in_presets.get(str(namer.get("preset")), 0) + sum(own[name] for name in lineage)
    if num_laid > MAX_LAID:
        told = f"the branches together write {num_laid} values, those of base and of what each extends counted for each"
        file.report(("branches",), f"{told}; at most {MAX_LAID}")
        raise RecipeError(file.faults)


def _num_values(value: Any) -> int:
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(1 + _num_values(child) for child in below)


def _without(body: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != key}
