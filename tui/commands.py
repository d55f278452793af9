"""What help and palette list: every action there is, those that work now first, of the others why they do not.

A key that belongs elsewhere is found by typing its words, or the command line's verb for the same; screens and tabs open
from wherever one is. What the command line alone does is found as well: choosing it copies the command.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from textual.binding import Binding
from textual.dom import DOMNode

from tui.acting import ACTING, ask_and_do, offered, why_not
from tui.deeds import DEEDS
from tui.keys import all_bindings, shown_key
from tui.keys_help import KeysHelp
from tui.outside import to_type
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


# A key's name -> the command line's verbs for what it does or shows.
_VERBS = {
    "home.runs": "ls watch", "home.hosts": "hosts", "home.smoke": "evidence", "home.launch": "plan",
    "run.tab_overview": "show", "run.tab_curves": "metrics plot", "run.tab_log": "logs", "run.tab_spec": "diff",
    "runs.compare": "compare diff", "hosts.orphans": "reap", "smoke.missing": "smoke", "launch.smoke": "smoke",
    "launch.launch": "launch", "app.follow": "follow",
}  # fmt: skip
# What is the command line's alone: its words, and what to type, of the run that is chosen.
ONLY_TYPED = {
    "tag": ("Add or remove the run's tags", "{run} TAG"),
    "note": ("Write the run's note", "{run} TEXT"),
    "mark": ("Set the run's final state by hand", "{run} STATE WHY"),
    "pull": ("Bring the run's checkpoints here", "{run}"),
    "wait": ("Wait in a script until the run ends", "{run}"),
    "restore": ("Take a run out of the bin", "RUN"),
    "purge": ("Forget a run of the bin for good", "RUN"),
    "import": ("Read in a run's folder brought from elsewhere", "FOLDER"),
    "recipe": ("Check, explain and compare recipes", "check {recipe}"),
    "prepare": ("Make a recipe's answers and hidden states on a host", "{recipe} --host {host}"),
    "deploy": ("Ship a recipe's tree to a host", "{recipe} --host {host}"),
    "doctor": ("Check a host, each fault with its repair", "{host}"),
    "gc": ("Remove old trees and run folders of a host", "{host}"),
    "config": ("Settings and where they came from", "show --origin"),
    "reset-term": ("Put a terminal right after its screen was killed", ""),
}


def open_help(app: Draftyard) -> None:
    keys = sorted(_keys(app), key=lambda item: str(item[1].id).startswith(_MOVING))  # the sort is stable
    rows: dict[str, list[str]] = {}  # what two widgets call the same stands there once
    for key, binding, _ in keys:
        rows.setdefault(_sentence(binding), []).append(key)
    app.push_screen(KeysHelp([(" ".join(shown), words) for words, shown in rows.items()]))


def open_palette(app: Draftyard) -> None:
    app.push_screen(Palette(commands(app)))


def commands(app: Draftyard) -> list[Command]:
    """Deeds that fit the chosen run, every key's action, what only moves the cursor; then what cannot be done, and why."""
    here = list(_of_keys(app))
    here.sort(key=lambda command: command.name.startswith(_MOVING))  # the sort is stable
    found = [*_deeds(app), *here, *_elsewhere(app, {command.name for command in here}), *_only_typed(app)]
    found.sort(key=lambda command: (command.is_far, bool(command.why_not)))
    return found


def _deeds(app: Draftyard) -> Iterator[Command]:
    chosen = app.chosen()
    for deed in DEEDS:
        key = _key(app, all_bindings()["app.stop"]) if deed.name == "stop" else ""
        if chosen is None:
            why = "no run is chosen here"
            yield Command(f"deed.{deed.name}", deed.words, key, why_not=why, is_far=True, also=deed.name)
            continue
        run = chosen[0]
        why = ONLY_LOOKS if app.readonly else why_not(app, deed, run)
        of = f"{run.recipe}/{run.branch} {run.id}"
        do = partial(ask_and_do, app, deed.name, chosen)
        yield Command(
            f"deed.{deed.name}", f"{deed.words}: {of}", key, do, why, also=deed.name, note=f"{deed.name} {of}"
        )


def _of_keys(app: Draftyard) -> Iterator[Command]:
    """Of the keys that work now."""
    for key, binding, node in _keys(app):
        if str(binding.id).startswith(_NOT_LISTED):
            continue
        do = partial(app.call_later, app.run_action, binding.action, node)
        yield Command(str(binding.id), _sentence(binding), key, do, also=_VERBS.get(str(binding.id), ""))


def _elsewhere(app: Draftyard, here: Collection[str]) -> Iterator[Command]:
    """Of every other key there is; of two for the same one is enough."""
    every = all_bindings()
    listed = {_meaning(name, every[name]) for name in here}
    for name, binding in every.items():
        if name.startswith(_NOT_LISTED) or _meaning(name, binding) in listed:
            continue
        listed.add(_meaning(name, binding))
        key, action, also = _key(app, binding), binding.action.partition("(")[0], _VERBS.get(name, "")
        if app.readonly and action in ACTING:
            yield Command(name, _sentence(binding), key, why_not=ONLY_LOOKS, is_far=action == "deed", also=also)
        elif (leads := _leads(app, name)) is not None:
            yield Command(name, f"Open {binding.description}", key, leads, is_far=True, also=also)
        else:
            why = f"it works {_WHERE.get(name) or _WHERE[name.partition('.')[0]]}"
            yield Command(name, _sentence(binding), key, why_not=why, is_far=True, also=also)


def _only_typed(app: Draftyard) -> Iterator[Command]:
    """Chosen, the command is in the clipboard, with the run's own names where one is chosen."""
    chosen = app.chosen()
    names = {"run": "RUN", "recipe": "RECIPE", "host": "HOST"}
    if chosen is not None:
        run = chosen[0]
        names = {"run": run.id, "recipe": shlex.quote(run.recipe), "host": shlex.quote(run.host)}
    for verb, (words, rest) in ONLY_TYPED.items():
        command = to_type(f"draftyard {verb} {rest.format(**names)}".rstrip())
        note = f"command line only; enter copies: {command}"
        yield Command(f"verb.{verb}", words, "", partial(_copy, app, command), is_far=True, also=verb, note=note)


def _copy(app: Draftyard, command: str) -> None:
    app.copy_to_clipboard(command)
    app.notify(f"Copied: {command}", timeout=6)


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


def _keys(app: Draftyard) -> list[tuple[str, Binding, DOMNode]]:
    """(key as shown, binding, whose it is) of everything that works now, once each: two widgets may name an action alike."""
    found: dict[tuple[DOMNode, str], tuple[list[str], Binding]] = {}
    for active in app.screen.active_bindings.values():
        binding = active.binding
        if active.enabled and binding.id and binding.description and offered(app, binding):  # ours have ids
            found.setdefault((active.node, binding.action), ([], binding))[0].append(_shown(app, active.binding))
    return [(" ".join(dict.fromkeys(keys)), binding, node) for (node, _), (keys, binding) in found.items()]


def _key(app: Draftyard, binding: Binding) -> str:
    """The first of those that a settings file or this program gives it."""
    return shown_key(app, binding)


def _shown(app: Draftyard, binding: Binding) -> str:
    """Its own key: what the line of keys shows (`+ -`, `←→`) may be that of a pair, whose other half has a row of its own."""
    return app.get_key_display(replace(binding, key_display=None))


def _sentence(binding: Binding) -> str:
    words = binding.tooltip or binding.description
    return words[:1].upper() + words[1:]
