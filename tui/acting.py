"""Deeds, help and palette for every screen: what the keys that are not about drawing do.

Deeds run in a thread, after a question where something could be lost; what they answer becomes a
toast. A read-only screen refuses them all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from textual.app import App, SuspendNotSupported
from textual.binding import Binding

from orchestrator.errors import DraftyardError
from orchestrator.store.rows import Document, RunRow
from tui.confirm import Confirm
from tui.deeds import DEEDS, Deed, asking, deed_named
from tui.detail import read_document
from tui.editor import Finding, edit, editor
from tui.keys_help import KeysHelp
from tui.ordering import TROUBLE, refusal
from tui.palette import Command, Palette

if TYPE_CHECKING:
    from tui.app import Draftyard

_ACTING = ("deed", "climb", "launch", "orphans", "edit", "follow")  # actions that start, stop or change something
_MOVING = ("table.", "sheet.")  # of the names of keys
Chosen = tuple[RunRow, tuple[int, ...]]  # a run and its GPUs


async def ask_and_do(app: Draftyard, name: str, chosen: Chosen) -> None:
    """Asks where the deed warns, then does it in a thread."""
    deed, (run, gpus) = deed_named(name), chosen
    if not fits(app, deed, run):
        app.notify(f"{run.id} is {run.state}: nothing to {deed.name}", severity="warning")
        return
    if not app.may_act():
        return

    def do(is_yes: bool | None) -> None:
        if is_yes:
            app.run_worker(partial(_do, app, deed, run.id), thread=True, group="deeds")

    if deed.warning:
        spec = await app.reading.do(lambda room: read_document(room.reader, run.id, Document.SPEC))
        app.push_screen(Confirm(asking(deed, run, gpus, spec or {})), do)
    else:
        do(True)


def fits(app: Draftyard, deed: Deed, run: RunRow) -> bool:
    """Whether the deed is for this run as it was last read, with what is wished of it."""
    wishes = app.shown.wishes if app.shown else ()
    if deed.is_for_ours and not _is_ours(app, run):
        return False
    return deed.fits(run, [wish for wish in wishes if wish.run_id == run.id])


def _is_ours(app: Draftyard, run: RunRow) -> bool:
    """Whether the bundled trainer ran it, as far as what is shown tells."""
    detail = app.shown.detail if app.shown else None
    if detail is not None and detail.run.id == run.id:
        return detail.is_ours
    numbers = app.shown.numbers.get(run.id) if app.shown else None
    return numbers is None or numbers.is_ours


def offered(app: Draftyard, binding: Binding) -> bool:
    """Whether footer, help and palette name the key: what acts not on a screen that only looks, a deed where it fits.

    Pressed all the same, it says why nothing is done.
    """
    action, _, rest = binding.action.partition("(")
    if app.readonly and action in _ACTING:
        return False
    chosen = app.chosen()
    return action != "deed" or (chosen is not None and fits(app, deed_named(rest.strip("')")), chosen[0]))


def _do(app: Draftyard, deed: Deed, run_id: str) -> None:
    assert app.places is not None
    try:
        told = deed.do(app.places, run_id)
    except TROUBLE as error:
        app.fail_from_thread(refusal(error))
        return
    app.tell_from_thread(told)


async def find_and_edit(app: Draftyard, finding: Finding) -> None:
    """Leaves the terminal to the editor; the runs and the follower go on meanwhile."""
    try:
        path, words = await app.reading.do(finding), editor(os.environ)
        with app.suspend():
            edit(path, words)
    except (DraftyardError, SuspendNotSupported) as error:
        app.notify(str(error).splitlines()[0], severity="error")
    app.refresh(layout=True)


def open_help(app: Draftyard) -> None:
    app.push_screen(KeysHelp([(key, _sentence(binding)) for key, binding in _keys(app)]))


def open_palette(app: Draftyard, chosen: Chosen | None) -> None:
    """The deeds that fit the chosen run, then every key's action; what only moves the cursor comes last."""
    keys = [(key, binding) for key, binding in _keys(app) if binding.action != "palette"]
    keys.sort(key=lambda item: str(item[1].id).startswith(_MOVING))  # the sort is stable
    commands = [Command(_sentence(binding), key, _runner(app, binding)) for key, binding in keys]
    if chosen is not None and not app.readonly:
        run = chosen[0]
        deeds = [
            Command(
                f"{deed.words}: {run.recipe}/{run.branch} {run.id}",
                deed.name,
                partial(ask_and_do, app, deed.name, chosen),
            )
            for deed in DEEDS
            if fits(app, deed, run)
        ]
        commands = [*deeds, *commands]
    app.push_screen(Palette(commands))


def _keys(app: Draftyard) -> list[tuple[str, Binding]]:
    """(key as shown, binding) of everything that works now, once each."""
    found: dict[str, tuple[list[str], Binding]] = {}
    for active in app.screen.active_bindings.values():
        binding = active.binding
        if active.enabled and binding.id and binding.description and offered(app, binding):  # ours have ids
            found.setdefault(binding.action, ([], binding))[0].append(app.get_key_display(active.binding))
    return [(" ".join(dict.fromkeys(keys)), binding) for keys, binding in found.values()]


def _runner(app: App[None], binding: Binding) -> Callable[[], None]:
    nodes = {active.binding.action: active.node for active in app.screen.active_bindings.values()}

    def run() -> None:
        app.call_later(app.run_action, binding.action, nodes[binding.action])

    return run


def _sentence(binding: Binding) -> str:
    words = binding.tooltip or binding.description
    return words[:1].upper() + words[1:]
