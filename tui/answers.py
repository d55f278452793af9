"""What the actions answer about one run: where its values came from, and what would fit instead. For drawing.

Blocks (it reads YAML), so it runs in the reading thread; asked once a run and attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from orchestrator.actions.places import Places
from tui.ordering import Planned, actions, advised

if TYPE_CHECKING:
    from orchestrator.actions.plans import Exceeded, Fits
    from orchestrator.actions.recipes import Told
    from tui.detail import RunDetail


@dataclass(frozen=True)
class Answers:
    told: Mapping[str, Told] = field(default_factory=dict)  # by dotted key
    fault: str = ""  # why the recipe could not be asked
    doubt: str = ""  # why it may not be the one that was launched
    fits: Planned | None = None  # of a run that ran out of memory
    pieces: str = ""  # memory was there, but in pieces: what is to be tried before any change of the plan
    setting: tuple[str, tuple[str, ...]] | None = (
        None  # that, as `smoke --try 1` takes it: its name, and NAME=VALUE of --env
    )
    try_line: str = ""  # the command that climbs the rungs with the first suggestion
    short_bytes: int = 0  # what it needed beyond its plan
    exceeded: Exceeded | None = None  # the stage that needed more than its plan had said


NO_ANSWERS = Answers()


def answers_of(places: Places | None, detail: RunDetail) -> Answers:
    """Everything asked about the run; a recipe that is gone is a fault that is told, not an error."""
    if places is None or not detail.spec:
        return NO_ANSWERS
    found = actions("recipes").origins(places, detail.run, spec=detail.spec, launch=detail.launch or {})
    fits = actions("plans").would_fit(places, detail)
    if fits is None:
        return Answers(found.told, found.fault, found.doubt)
    planned = Planned({}, note=fits.note) if fits.planned is None else advised(fits.planned)
    return Answers(
        found.told, found.fault, found.doubt, planned, short_bytes=fits.short_bytes, exceeded=fits.exceeded,
        **_tried(places, detail, fits),
    )  # fmt: skip


def _tried(places: Places, detail: RunDetail, fits: Fits) -> dict[str, Any]:
    """What of the answers `smoke --try` is about; of memory in pieces whose segments grow already there is nothing that it takes."""
    shortfall, again = actions("shortfall"), actions("again")
    launch = detail.launch or {}
    setting = shortfall.setting_of(fits.pieces, launch)
    pieces = shortfall.pieces_told(setting) if fits.pieces else ""
    changes = [change.overrides for change in fits.planned.switches] if fits.planned is not None else []
    if not setting and (fits.pieces or not changes):
        return {"pieces": pieces}
    words = replace(again.words_of_run(detail.run, launch), hosts=(detail.run.host,))
    newer = actions("trying").tried_instead(places, detail.run)
    named = (shortfall.GROW_NAME, tuple(again.assigned(setting))) if setting else None
    return {"pieces": pieces, "setting": named, "try_line": again.try_line(words, setting, changes, newer=newer)}
