"""Deeds for every screen, and which keys are offered: what the keys that are not about drawing do.

Deeds run in a thread, after a question where something could be lost; what they answer becomes a
toast. A read-only screen refuses them all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from textual.app import SuspendNotSupported
from textual.binding import Binding

from orchestrator.store.rows import Document, RunRow
from tui.confirm import Confirm
from tui.deeds import Deed, asking, deed_named
from tui.detail import read_document
from tui.editor import Finding, edit, editor
from tui.ordering import TROUBLE

if TYPE_CHECKING:
    from tui.app import Draftyard

ACTS = ("deeds", "start", "smoke", "reap")  # groups of work that starts, stops or changes something
ACTING = ("deed", "climb", "launch", "orphans", "edit", "follow")  # actions that start, stop or change something
Chosen = tuple[RunRow, tuple[int, ...]]  # a run and its GPUs


def ask_and_do(app: Draftyard, name: str, chosen: Chosen) -> None:
    """Asks where the deed warns, then does it in a thread."""
    deed, (run, gpus) = deed_named(name), chosen
    if why := why_not(app, deed, run):
        app.notify(f"{run.id}: nothing to {deed.name}; {why}", severity="warning")
        return
    if not app.may_act():
        return

    def do(is_yes: bool | None) -> None:
        if is_yes:
            app.do_beside(partial(_do, app, deed, run.id), group="deeds")

    if not deed.warning:
        do(True)
        return
    question = Confirm(asking(deed, run, gpus, None))
    app.push_screen(question, do)
    words = partial(asking, deed, run, gpus)
    app.run_worker(partial(_complete, app, question, words, run.id), group="question", exclusive=True)  # type: ignore[arg-type]


async def _complete(
    app: Draftyard, question: Confirm, words: Callable[[Mapping[str, Any]], list[str]], run_id: str
) -> None:
    """Adds to the question what the run's spec tells. It stands there before that: a busy database holds no key up."""
    try:
        spec = await app.reading.do(lambda room: read_document(room.reader, run_id, Document.SPEC))
    except TROUBLE:
        return  # what is known is asked; the top line says what is the matter
    question.ask(words(spec or {}))


def why_not(app: Draftyard, deed: Deed, run: RunRow) -> str:
    """Why the deed is not for this run as it was last read, with what is wished of it; empty where it is."""
    wishes = app.shown.wishes if app.shown else ()
    if deed.is_for_ours and not _is_ours(app, run):
        return "only the bundled trainer's runs have what it reads"
    return deed.why_not(run, [wish for wish in wishes if wish.run_id == run.id])


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
    if app.readonly and action in ACTING:
        return False
    chosen = app.chosen()
    return action != "deed" or (chosen is not None and not why_not(app, deed_named(rest.strip("')")), chosen[0]))


def _do(app: Draftyard, deed: Deed, run_id: str) -> None:
    assert app.places is not None
    app.tell_from_thread(deed.do(app.places, run_id))


async def find_and_edit(app: Draftyard, finding: Finding) -> None:
    """Leaves the terminal to the editor; the runs and the follower go on meanwhile."""
    try:
        path, words = await app.reading.do(finding), editor(os.environ)
        with app.suspend():
            edit(path, words)
    except (*TROUBLE, SuspendNotSupported) as error:
        app.notify((str(error).splitlines() or [type(error).__name__])[0], severity="error")
    app.refresh(layout=True)
