"""What the actions answer about one run: where its values came from, and what would fit instead. For drawing.

Blocks (it reads YAML), so it runs in the reading thread; asked once a run and attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.actions.places import Places
from tui.ordering import Planned, actions, advised

if TYPE_CHECKING:
    from orchestrator.actions.plans import Exceeded
    from orchestrator.actions.recipes import Told
    from tui.detail import RunDetail


@dataclass(frozen=True)
class Answers:
    told: Mapping[str, Told] = field(default_factory=dict)  # by dotted key
    fault: str = ""  # why the recipe could not be asked
    doubt: str = ""  # why it may not be the one that was launched
    fits: Planned | None = None  # of a run that ran out of memory
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
    return Answers(found.told, found.fault, found.doubt, planned, fits.short_bytes, fits.exceeded)
