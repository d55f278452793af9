"""What the smoke and launch screens ask of orchestrator.actions: recipes, plans, the gate, starting.

Plain answers for drawing; every function blocks and runs in a thread. The modules behind them are
loaded when first asked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.actions.places import Places
from orchestrator.errors import DraftyardError, GateRefused, RunNotFound
from orchestrator.lazy import loaded
from orchestrator.store.rows import Document, RunRow
from orchestrator.units import counted
from tui.wording import gib, long_words_cut

# What an action may answer instead: a refusal, a database that is busy, a fault of this machine.
TROUBLE = (DraftyardError, OSError)


@dataclass(frozen=True)
class Wish:
    """What a person has chosen to run, and where."""

    recipe: str
    branch: str
    host: str = "local"
    gpus: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Offer:
    """A branch that can be launched, or a recipe that cannot be read and why."""

    recipe: str
    branch: str
    fault: str = ""
    path: str = ""  # of the recipe's file, its links followed

    @property
    def key(self) -> str:
        return f"{self.recipe}/{self.branch}"


@dataclass(frozen=True)
class Aim:
    """Which offer is what a run was told, where and with which overrides; or why none of them is."""

    key: str = ""  # of the offer
    host: str = ""
    gpus: tuple[str, ...] = ()  # those named at its launch
    overrides: tuple[str, ...] = ()
    why_none: str = ""


@dataclass(frozen=True)
class Change:
    """One change of the recipe: what must fit with it, and what it costs."""

    name: str
    overrides: tuple[str, ...]  # section.key=value
    peak_bytes: int  # what must fit with it
    saved_bytes: int
    verdict: str  # against the capacity; empty without one
    cost: str  # of a step: seconds, or where no time is known its arithmetic by that of today
    keeps_result: bool
    caution: str


@dataclass(frozen=True)
class Planned:
    """The memory plan of a wish as plain values, or the fault in the wish."""

    body: Mapping[str, Any]
    capacity_from: str = ""
    largest: str = ""  # the most anchors that fit
    title: str = "What would fit"  # of the changes: what they would do
    changes: tuple[Change, ...] = ()  # that lower the peak; where the plan does not fit, only such that do
    uses: tuple[Change, ...] = ()  # that take more of a card with room
    helps: str = ""  # where changes of a step alone do not
    prepared: tuple[str, ...] = ()  # what to type for that, on a larger card
    nothing: str = ""  # that no change makes it fit
    fault: str = ""  # the wish is wrong
    time: str = ""  # of a step and of all, in a sentence
    note: str = ""  # the wish is right, there is no plan for it


@dataclass(frozen=True)
class Standing:
    """The gate's answer for a wish."""

    is_allowed: bool
    rungs: tuple[tuple[str, str, str], ...] = ()  # rung, how it stands, why
    gpus: tuple[str, ...] = ()
    fingerprint: str = ""
    fault: str = ""
    caution: str = ""  # what an open gate does not mean


def actions(module: str) -> Any:
    """A group of actions, loaded when first asked."""
    return loaded(f"orchestrator.actions.{module}")


def offers(places: Places) -> list[Offer]:
    """Every branch of the project's recipes, then of the bundled ones."""
    folders = [folder for folder in (places.recipes, places.bundled) if folder is not None]
    found: dict[str, Offer] = {}
    for folder in dict.fromkeys(folders):
        try:
            checked = actions("recipes").check(places, [str(folder)])
        except DraftyardError:
            continue  # a folder without a recipe offers none
        for recipe in checked:
            name, path = recipe.path.stem, str(recipe.path.resolve())
            made = [Offer(name, branch, path=path) for branch in recipe.branches]
            made = made or [Offer(name, "", recipe.faults[0], path)]
            for offer in made:
                found.setdefault(offer.key, offer)
    return list(found.values())


def aimed(places: Places, run: RunRow, found: Sequence[Offer]) -> Aim:
    """The offer of the recipe's very file: another one may have its name."""
    if run.more_hosts:
        return Aim(why_none=f"it ran on {' and '.join(run.hosts)}; from here one host is launched on")
    try:
        told = told_again(places, run.id)
    except DraftyardError as error:
        return Aim(why_none=str(error).splitlines()[0])
    if told is None:
        return Aim(why_none="the run is gone")
    own = [offer for offer in found if offer.path == str(Path(told.recipe).resolve())]
    key = next((offer.key for offer in own if offer.branch == told.branch), "")
    if key:
        return Aim(key, told.host, told.gpus, told.overrides)
    branches = ", ".join(offer.branch for offer in own)
    outside = f"{told.recipe} lies in none of the recipe folders; draftyard launch takes its path"
    return Aim(why_none=f"its recipe has the branches {branches}" if own else outside)


def planned(places: Places, wish: Wish) -> Planned:
    """Checks every value on the way; a fault is an answer, not an error."""
    try:
        actions("order").find_host(places, wish.host)
        actions("recipes").resolve(places, wish.recipe, branch=wish.branch, overrides=wish.overrides)
        if wish.gpus:
            actions("plans").check_gpus(places, wish.host, wish.gpus)
    except DraftyardError as error:
        return Planned({}, fault=_line(error))
    try:
        made = _plan(places, wish)
    except DraftyardError as error:  # a script of the user's own has no plan
        return Planned({}, note=_line(error))
    return advised(made)


def advised(made: Any) -> Planned:
    """A plan of `actions.plans` with what it advises, as plain values."""
    verdict, most = actions("plan_verdict"), made.largest
    largest = "" if most is None else f"{counted(most.max_anchors, 'anchor')} × block {most.block_size}"
    if most is not None and verdict.too_small_for(made):
        largest += f", in {verdict.step_name(made)} alone"
    is_hopeless = not made.switches and made.plan.step_verdict == "does not fit"
    return Planned(
        actions("plans").plan_body(made.plan),
        made.capacity_from,
        largest,
        verdict.changes_title(made),
        tuple(_change(made, item) for item in made.switches),
        tuple(_change(made, item) for item in made.uses),
        verdict.what_helps(made),
        tuple(verdict.prepared_elsewhere(made)),
        verdict.NOTHING_FITS if is_hopeless else "",
        time=actions("step_time").time_sentence(made.time, made.spec, made.to_measure),
    )


def _change(made: Any, item: Any) -> Change:
    return Change(
        item.name,
        tuple(item.overrides),
        item.plan.driver_bytes,
        item.saved_bytes,
        item.plan.verdict or "",
        _cost(made.time, item.work_factor),
        item.keeps_result,
        actions("plans").caution(item),
    )


def _cost(time: Any, work_factor: float) -> str:
    """Its seconds are estimated, or the least it takes: said before them, as a column's heading is not there to say it."""
    size, known = actions("step_time").change_cost(time, work_factor)
    return f"×{size:.2f} work" if time is None else f"{known} {size:.3g} s a step"


def _plan(places: Places, wish: Wish) -> Any:
    """Against the host as last seen; for one that has not been looked at, without a capacity."""
    settings: dict[str, Any] = {"branch": wish.branch, "overrides": wish.overrides}
    plan_memory = actions("plans").plan_memory
    try:
        return plan_memory(places, wish.recipe, host=wish.host, **settings)
    except DraftyardError:
        return plan_memory(places, wish.recipe, **settings)


def standing(places: Places, wish: Wish) -> Standing:
    """Looks at the host and asks the gate, without starting anything."""
    try:
        found = actions("jobs").rehearse(places, _order(wish))
    except TROUBLE as error:
        return Standing(False, fault=refusal(error))
    rungs = tuple((item.rung, str(item.standing), _why(item)) for item in found.verdict.rungs)
    caution = "" if rungs else str(actions("jobs").gate.UNTESTED_RECIPE)
    return Standing(found.verdict.is_allowed, rungs, tuple(found.gpus), found.fingerprint, caution=caution)


def launch(places: Places, wish: Wish, tell: Callable[[str], None]) -> str:
    """Starts it; the run's id. Raises DraftyardError."""
    return str(actions("jobs").launch(places, _order(wish), tell=tell).run_id)


def smoke(
    places: Places, wish: Wish, tell: Callable[[str], None], *, rungs: Sequence[str] = (), again: bool = False
) -> str | None:
    """Climbs the missing rungs, those named, or all again; the run's id, None when nothing is missing."""
    climbed = actions("jobs").smoke(places, _order(wish), rungs=rungs, again=again, tell=tell)
    return None if climbed.launched is None else str(climbed.launched.run_id)


def named_hosts(places: Places) -> list[str]:
    """Every host that hosts.yaml and ~/.ssh/config name. Raises UsageError."""
    return list(actions("order").host_names(places))


def orphans(places: Places, host: str) -> list[str]:
    """One line for each process on the host of a run that has ended."""
    found = actions("reaping").reap(places, host, end=False).orphans
    return [f"pid {item.pid}, run {item.run_id}, {gib(item.rss_bytes)}, {item.command}" for item in found]


def reap(places: Places, host: str) -> str:
    """Ends them; what was done, in one line."""
    done = actions("reaping").reap(places, host, end=True)
    return f"{host}: ended {processes(len(done.orphans))}" if done.were_ended else f"{host}: nothing was left to end"


def processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"


def refusal(error: Exception) -> str:
    """One line for a toast; the gate's repair command included."""
    last = str(error).splitlines()[-1:]
    return f"{_line(error)}; {last[0].strip()}" if isinstance(error, GateRefused) and last else _line(error)


def _line(error: Exception) -> str:
    """What is wrong, in one line, no word of it a screen long."""
    return long_words_cut((str(error).splitlines() or [type(error).__name__])[0])


def told_again(places: Places, run_id: str) -> Wish | None:
    """What a run was told, to be told again: its recipe's file, not whatever has that name now. None for one that is gone.

    Raises RecipeError where the recipe is gone.
    """
    history, recipes = actions("history"), actions("recipes")
    try:
        run = history.find(places, run_id)
    except RunNotFound:
        return None
    launch = json.loads(history.document(places, run.id, Document.LAUNCH) or "{}")
    words = {name: tuple(map(str, launch.get(name) or ())) for name in ("named_gpus", "overrides")}
    recipe = recipes.of_run(places, run, launch)
    return Wish(str(recipe.path), run.branch, run.host, words["named_gpus"], words["overrides"])


def start_follower(places: Places) -> None:
    """Starts the one that records live runs, unless it is at work. Raises StoreError."""
    actions("life").ensure_follower(places)


def _order(wish: Wish) -> Any:
    return actions("order").Order(
        recipe=wish.recipe, branch=wish.branch, host=wish.host, overrides=wish.overrides, gpus=wish.gpus
    )


def _why(item: Any) -> str:
    """What changed since, where that is why a rung does not count."""
    if item.changes:
        return "changed since: " + ", ".join(change.part for change in item.changes[:4])
    return str(item.message)
