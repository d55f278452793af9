"""Layers of a recipe laid over one another, remembering who wrote each value and where.

Maps merge key by key; every other value, lists too, replaces what an older layer wrote. A null in
a map with free keys (loss terms, environment, settings) takes the key away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from orchestrator.recipe.strict_yaml import Document, Path


@dataclass(frozen=True)
class Origin:
    """One layer's word on one key. `where` is `file:line:col`, or the override as it was typed."""

    layer: str  # default, preset NAME, base, branch NAME, --set
    where: str
    value: Any


@dataclass(frozen=True)
class Layer:
    """A map of spec fields: where its values stand is asked of `document` below `root`, or is `typed`."""

    name: str
    value: dict[str, Any]
    document: Document | None = None
    root: Path = ()
    typed: str = ""

    def where(self, path: Path) -> str:
        return str(self.document.locate((*self.root, *path))) if self.document else self.typed

    def where_key(self, path: Path) -> str:
        """Where the key itself stands: what a person must correct when the key is unknown."""
        position = self.document.keys.get((*self.root, *path)) if self.document else None
        return str(position) if position else self.where(path)


@dataclass
class Merged:
    """The tree so far; for each leaf every layer that wrote it, oldest first."""

    tree: dict[str, Any] = field(default_factory=dict)
    written: dict[Path, list[tuple[Layer, Any]]] = field(default_factory=dict)
    writers: dict[Path, Layer] = field(default_factory=dict)  # who wrote each section or leaf last
    filled_in: dict[str, str] = field(default_factory=dict)  # fields the loader knows and no layer may write

    def lay(self, layer: Layer) -> None:
        self._lay(self.tree, layer.value, (), layer)

    def _lay(self, tree: dict[str, Any], value: dict[str, Any], path: Path, layer: Layer) -> None:
        for key, child in value.items():
            at = (*path, key)
            self.writers[at] = layer
            if isinstance(child, dict):
                if not isinstance(tree.get(key), dict):
                    tree[key] = {}
                self._lay(tree[key], child, at, layer)
            else:
                tree[key] = child
                self.written.setdefault(at, []).append((layer, child))

    def origins(self, path: Path) -> list[Origin]:
        """Every layer's word on the leaf, oldest first."""
        return [Origin(layer.name, layer.where(path), value) for layer, value in self.written.get(path, [])]

    def where(self, path: Path) -> str:
        """Where the value at `path`, or its nearest written parent, was last written."""
        for length in range(len(path), 0, -1):
            layer = self.writers.get(path[:length])
            if layer is not None:
                return layer.where(path)
        return ""

    def where_key(self, path: Path) -> str:
        layer = self.writers.get(path)
        return layer.where_key(path) if layer else self.where(path)


def leaves(tree: dict[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value that is not a map with keys, with its path, in order."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def dotted(path: Path) -> str:
    """`a.b`; a key that holds a dot, an equals sign or a quote is quoted, as an override writes it."""
    return ".".join(f'"{key}"' if isinstance(key, str) and set(key) & set('.="') else str(key) for key in path)
