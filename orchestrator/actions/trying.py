"""What an out-of-memory page offers, tried: a branch's newest run that ran out, and its Nth suggestion as overrides.

Nothing is started here. The page is `draftyard show RUN --oom`; its suggestions are planned with the run's own values, so
what is tried is those values with one suggestion on top. The allocator's setting is one of them where memory lay in pieces.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.actions import history
from orchestrator.actions.history import MEMORY_REASONS, RunPage, open_reader
from orchestrator.actions.log_text import inert
from orchestrator.actions.places import Places
from orchestrator.actions.plans import MOST_OFFERED, would_fit
from orchestrator.actions.recipes import resolve
from orchestrator.actions.shortfall import GROW_NAME, remedy_of_pieces, setting_of
from orchestrator.errors import RunNotFound, UsageError
from orchestrator.store.rows import Kind, Reason, RunRow


@dataclass(frozen=True)
class _Offer:
    """One suggestion of a page: what it sets of the recipe, or of the job's environment."""

    name: str
    overrides: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True)
class Trial:
    """One suggestion of one run's page."""

    run_id: str
    number: int
    name: str
    overrides: tuple[str, ...]  # the run's own, then the suggestion's
    env: Mapping[str, str]  # what the suggestion sets: the allocator's setting, where memory lay in pieces
    cap_bytes: int | None  # of the GPU memory that the run was allowed, where it was a capped smoke run

    @property
    def typed(self) -> str:
        """The same by hand, safe to print and to paste."""
        words = [word for override in self.overrides for word in ("--set", override)]
        words += [word for name, value in self.env.items() for word in ("--env", f"{name}={value}")]
        return shlex.join(inert(word) for word in words)


def trial(places: Places, word: str, *, branch: str | None, number: int) -> Trial:
    """RunNotFound (exit 5) where no run of the branch ran out of memory, UsageError where its page offers no such number."""
    spec = resolve(places, word, branch=branch)[1].spec
    run = _newest(places, spec.recipe, spec.branch)
    if run is None:
        raise RunNotFound(
            f"no run of recipe {spec.recipe}, branch {spec.branch}, ran out of memory; --try N takes the Nth suggestion of"
            " such a run's page: draftyard show RUN --oom"
        )
    page = history.show(places, run.id)
    offered = _offered(places, page)
    if not 1 <= number <= len(offered):
        named = "; ".join(f"{place} {offer.name}" for place, offer in enumerate(offered, 1))
        raise UsageError(f"--try {number}: the page of run {run.id} offers {named or 'nothing that fits'}")
    chosen = offered[number - 1]
    own = tuple(str(item) for item in page.launch.get("overrides") or ())
    return Trial(run.id, number, chosen.name, (*own, *chosen.overrides), chosen.env, _cap_of(page))


def tried_instead(places: Places, run: RunRow) -> str:
    """The newer run of its branch whose suggestions --try takes; empty where it takes this run's."""
    newest = _newest(places, run.recipe, run.branch)
    return "" if newest is None or newest.id == run.id else newest.id


def _newest(places: Places, recipe: str, branch: str) -> RunRow | None:
    with open_reader(places) as reader:
        runs = reader.runs(kind=None)
    ours = (run for run in runs if (run.recipe, run.branch) == (recipe, branch))
    return next((run for run in ours if run.reason in MEMORY_REASONS), None)


def _offered(places: Places, page: RunPage) -> list[_Offer]:
    """As the page numbers them: the allocator's setting first, where memory lay in pieces, then changes of the plan.

    UsageError where nothing can be planned; for a script with what its page suggests in words.
    """
    if page.spec.get("entry") != "dflash":
        pieces = remedy_of_pieces(page.failures[0].facts) if page.failures else ""
        if env := setting_of(pieces, page.launch):
            return [_Offer(GROW_NAME, (), env)]
        remedies = page.failures[0].facts.get("remedies") if page.failures else None
        said = [str(item["text"]) for item in remedies or () if isinstance(item, dict) and "text" in item]
        told = "".join(
            f"\n  {text}" for text in said or [page.failures[0].hint if page.failures else "look at its log"]
        )
        raise UsageError(f"run {page.run.id}: a script of its own has no plan, so --try has nothing to set{told}")
    fits = would_fit(places, page)
    if fits is None:
        what = "the host's memory" if page.run.reason != Reason.GPU_OOM else "GPU memory"
        raise UsageError(f"run {page.run.id} ran out of {what}, of which its plan says nothing")
    if fits.planned is None:
        raise UsageError(f"run {page.run.id}: {fits.note}, so --try has nothing to set")
    env = setting_of(fits.pieces, page.launch)
    changes = [_Offer(switch.name, switch.overrides, {}) for switch in fits.planned.switches[:MOST_OFFERED]]
    return [_Offer(GROW_NAME, (), env), *changes] if env else changes


def _cap_of(page: RunPage) -> int | None:
    if page.run.kind != Kind.SMOKE or page.run.reason != Reason.GPU_OOM or not page.failures:
        return None
    allowed = page.failures[0].facts.get("allowed_bytes")
    return allowed if isinstance(allowed, int) else None
