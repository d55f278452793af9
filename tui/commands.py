"""What help and palette list: every action there is, those that work now first, of the others why they do not.

A key that belongs elsewhere is found by typing its words; screens and tabs open from wherever one is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from textual.binding import Binding

from tui.acting import ACTING, ask_and_do, offered, why_not
from tui.deeds import DEEDS
from tui.keys import all_bindings
from tui.keys_help import KeysHelp
from tui.palette import Command, Palette

if TYPE_CHECKING:
    from tui.app import Draftyard

_MOVING = ("table.", "sheet.")  # of the names of keys
# Those of dialogues work where they are shown; the stop is a deed.
_NOT_LISTED = ("confirm.", "help.", "palette.", "app.palette", "app.stop")
ONLY_LOOKS = "this screen only looks (--readonly)"
# A key's name, or the first part of it -> where it works.
_WHERE = {
    "runs": "in the list of runs", "run": "on the page of a run", "curves": "on the curves of a run", "log": "in the log of a run",
    "compare": "where runs are compared", "hosts": "among the hosts", "smoke": "in the smoke matrix", "launch": "on the launch screen",
    "log.older": "in the log of a run with several attempts", "log.newer": "in the log of a run with several attempts",
    "screen": "above the runs", "table": "in a list", "sheet": "on a page of lines", "app": "with a run chosen",
}  # fmt: skip


def open_help(app: Draftyard) -> None:
    keys = sorted(_keys(app), key=lambda item: str(item[1].id).startswith(_MOVING))  # the sort is stable
    app.push_screen(KeysHelp([(key, _sentence(binding)) for key, binding in keys]))


def open_palette(app: Draftyard) -> None:
    app.push_screen(Palette(commands(app)))


def commands(app: Draftyard) -> list[Command]:
    """Deeds that fit the chosen run, every key's action, what only moves the cursor; then what cannot be done, and why."""
    here = list(_of_keys(app))
    here.sort(key=lambda command: command.name.startswith(_MOVING))  # the sort is stable
    found = [*_deeds(app), *here, *_elsewhere(app, {command.name for command in here})]
    found.sort(key=lambda command: (command.is_far, bool(command.why_not)))
    return found


def _deeds(app: Draftyard) -> Iterator[Command]:
    chosen = app.chosen()
    for deed in DEEDS:
        if chosen is None:
            yield Command(f"deed.{deed.name}", deed.words, deed.name, why_not="no run is chosen here", is_far=True)
            continue
        run = chosen[0]
        why = ONLY_LOOKS if app.readonly else why_not(app, deed, run)
        words = f"{deed.words}: {run.recipe}/{run.branch} {run.id}"
        key = _key(app, all_bindings()["app.stop"]) if deed.name == "stop" else deed.name
        yield Command(f"deed.{deed.name}", words, key, partial(ask_and_do, app, deed.name, chosen), why)


def _of_keys(app: Draftyard) -> Iterator[Command]:
    """Of the keys that work now."""
    nodes = {active.binding.action: active.node for active in app.screen.active_bindings.values()}
    for key, binding in _keys(app):
        if str(binding.id).startswith(_NOT_LISTED):
            continue
        do = partial(app.call_later, app.run_action, binding.action, nodes[binding.action])
        yield Command(str(binding.id), _sentence(binding), key, do)


def _elsewhere(app: Draftyard, here: Collection[str]) -> Iterator[Command]:
    """Of every other key there is; of two for the same one is enough."""
    every = all_bindings()
    listed = {_meaning(name, every[name]) for name in here}
    for name, binding in every.items():
        if name.startswith(_NOT_LISTED) or _meaning(name, binding) in listed:
            continue
        listed.add(_meaning(name, binding))
        key, action = _key(app, binding), binding.action.partition("(")[0]
        if app.readonly and action in ACTING:
            yield Command(name, _sentence(binding), key, why_not=ONLY_LOOKS, is_far=action == "deed")
        elif (leads := _leads(app, name)) is not None:
            yield Command(name, f"Open {binding.description}", key, leads, is_far=True)
        else:
            why = f"it works {_WHERE.get(name) or _WHERE[name.partition('.')[0]]}"
            yield Command(name, _sentence(binding), key, why_not=why, is_far=True)


def _meaning(name: str, binding: Binding) -> tuple[str, str]:
    return name.partition(".")[0], binding.action


def _leads(app: Draftyard, name: str) -> Callable[[], object] | None:
    """To one of the screens at the top, or to a tab of the chosen run."""
    room, _, rest = name.partition(".")
    if room == "home":
        return partial(app.go_home, rest)
    chosen = app.chosen()
    if room == "run" and rest.startswith("tab_") and chosen is not None:
        return partial(app.open_run, chosen[0].id, rest.removeprefix("tab_"))
    return None


def _keys(app: Draftyard) -> list[tuple[str, Binding]]:
    """(key as shown, binding) of everything that works now, once each."""
    found: dict[str, tuple[list[str], Binding]] = {}
    for active in app.screen.active_bindings.values():
        binding = active.binding
        if active.enabled and binding.id and binding.description and offered(app, binding):  # ours have ids
            found.setdefault(binding.action, ([], binding))[0].append(app.get_key_display(active.binding))
    return [(" ".join(dict.fromkeys(keys)), binding) for keys, binding in found.values()]


def _key(app: Draftyard, binding: Binding) -> str:
    """The first of those that a settings file or this program gives it."""
    return app.get_key_display(replace(binding, key=app._keymap.get(str(binding.id), binding.key).split(",")[0]))


def _sentence(binding: Binding) -> str:
    words = binding.tooltip or binding.description
    return words[:1].upper() + words[1:]
