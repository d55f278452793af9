"""The names of all keys, under which a settings file may give them others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
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


def _first(binding: Binding) -> str:
    return binding.key_display or binding.key.split(",")[0]


_key_of: list[Callable[[str], str]] = [lambda name: _first(all_bindings()[name])]


def tell_keys_of(app: App[Any]) -> None:
    """From now on `key_of` knows the keys that a settings file gave this app. Set once, by the app: every line may need it."""
    _key_of[:] = [lambda name: shown_key(app, all_bindings()[name])]


def key_of(name: str) -> str:
    """For a sentence that tells which key to press: how the key of that name is shown."""
    return _key_of[0](name)


def shown_key(app: App[Any], binding: Binding) -> str:
    """The first of those that a settings file or this program gives it, its own: what the line of keys shows (`+ -`, `←→`) may be
    that of a pair.
    """
    key = app._keymap.get(str(binding.id), binding.key).split(",")[0]
    return app.get_key_display(replace(binding, key=key, key_display=None))


# Signs of keys that have no likeness in ASCII: `^` would read as ctrl.
_KEY_NAMES = {"⏎": "enter", "↑": "up", "↓": "down", "←": "left", "→": "right", "←→": "left/right", "⌫": "backspace"}


def spelled(shown: str) -> str:
    """Keys as they are shown, in ASCII."""
    return " ".join(_KEY_NAMES.get(sign, sign) for sign in shown.split())
