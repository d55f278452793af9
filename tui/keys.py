"""The names of all keys, under which a settings file may give them others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from textual.app import App
from textual.binding import Binding
from textual.dom import DOMNode


def binding_names() -> list[str]:
    """Every key of every screen by the name under which a settings file may give it another."""
    return sorted(all_bindings())


def all_bindings() -> dict[str, Binding]:
    """Name -> key, of every screen."""
    rooms = [kind for kind in (App, *_kinds_below(DOMNode)) if kind.__module__.startswith("tui.")]
    bound = [binding for kind in rooms for binding in kind.__dict__.get("BINDINGS", [])]
    return {binding.id: binding for binding in bound if isinstance(binding, Binding) and binding.id}


def _kinds_below(kind: type[Any]) -> Iterator[type[Any]]:
    below: type[Any]
    for below in kind.__subclasses__():
        yield below
        yield from _kinds_below(below)


# Signs of keys that have no likeness in ASCII: `^` would read as ctrl.
_KEY_NAMES = {"⏎": "enter", "↑": "up", "↓": "down", "←": "left", "→": "right", "←→": "left/right", "⌫": "backspace"}


def spelled(shown: str) -> str:
    """Keys as they are shown, in ASCII."""
    return " ".join(_KEY_NAMES.get(sign, sign) for sign in shown.split())
