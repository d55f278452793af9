"""Likely words for the shell's completion, from local state only: folders, hosts.yaml, ~/.ssh/config, runs.db."""

from __future__ import annotations

from orchestrator.actions import history, order, recipes
from orchestrator.actions.places import Places
from orchestrator.errors import DraftyardError


def words(kind: str, places: Places, *, first: str | None) -> list[tuple[str, str]]:
    """Words of a kind with a line that tells them apart, of the run or recipe that came `first`; empty rather than an error."""
    try:
        match kind:
            case "recipe":
                return _recipes(places)
            case "branch":
                return _branches(places, first)
            case "host":
                return _hosts(places)
            case "metric":
                return _metrics(places, first)
            case "run_or_metric":
                return _metrics(places, first) + _runs(places)
            case "sort":
                return _sorts(places)
        return _runs(places)
    except DraftyardError:
        return []  # a broken file must not print into somebody's prompt; the verb itself will say it


def _recipes(places: Places) -> list[tuple[str, str]]:
    folders = [folder for folder in (places.recipes, places.bundled) if folder is not None]
    return [(name, "") for name in sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})]


def _branches(places: Places, recipe: str | None) -> list[tuple[str, str]]:
    return [(branch.name, branch.why) for branch in recipes.load(places, recipe).branches.values()] if recipe else []


def _metrics(places: Places, selector: str | None) -> list[tuple[str, str]]:
    return [(row.name, "") for row in history.series(places, selector)[1]] if selector else []


def _sorts(places: Places) -> list[tuple[str, str]]:
    return [(name, "") for name in history.sort_words(places)]


def _runs(places: Places) -> list[tuple[str, str]]:
    runs = history.list_runs(places, kind=None, limit=50)
    return [*((run.id, f"{run.recipe} {run.branch} {run.state}") for run in runs), ("@last", ""), ("@failed", "")]


def _hosts(places: Places) -> list[tuple[str, str]]:
    return [(name, "") for name in order.host_names(places)]
