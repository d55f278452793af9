"""Keeping order: tags, notes, the bin, and a person's word over the evidence. Writes rows, contacts nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from orchestrator.actions.places import Places
from orchestrator.errors import UsageError
from orchestrator.nearest import listed
from orchestrator.store.filter import check_tags
from orchestrator.store.rows import RunRow, State
from orchestrator.store.writes import Store


def tag(places: Places, selector: str, *, add: Iterable[str] = (), remove: Iterable[str] = ()) -> RunRow:
    """Adds and removes tags; a tag that is both is kept. Raises UsageError for one to take away that is not there."""
    add, remove = list(add), list(remove)
    check_tags(add)
    with Store(places.db) as store:
        run = store.reader.run(selector)
        for word in remove:
            if word not in (*run.tags, *add):
                known = listed(word, run.tags) or "none"
                raise UsageError(f"run {run.id} has no tag {word!r}; it has {known}")
        store.tag(run.id, add=add, remove=remove)
        return store.reader.run(run.id)


def note(places: Places, selector: str, text: str) -> RunRow:
    """Replaces the run's note."""
    with Store(places.db) as store:
        run = store.reader.run(selector)
        store.note(run.id, text)
        return store.reader.run(run.id)


def mark(places: Places, selector: str, state: State, *, why: str) -> RunRow:
    """A person's word over the evidence, logged for ever."""
    with Store(places.db) as store:
        run = store.reader.run(selector)
        store.mark(run.id, state, why=why)
        return store.reader.run(run.id)


def remove(places: Places, selectors: Sequence[str]) -> list[RunRow]:
    """Into the bin; live runs are refused."""
    return _each(places, selectors, Store.remove)


def restore(places: Places, selectors: Sequence[str]) -> list[RunRow]:
    """Out of the bin again."""
    return _each(places, selectors, Store.restore)


def purge(places: Places, selectors: Sequence[str]) -> list[RunRow]:
    """Forgets binned runs for good; files on their hosts stay."""
    return _each(places, selectors, Store.purge)


def _each(places: Places, selectors: Sequence[str], act: Callable[[Store, str], None]) -> list[RunRow]:
    """Every selector is looked up before the first run is touched."""
    with Store(places.db) as store:
        runs = {run.id: run for run in map(store.reader.run, selectors)}  # named twice is meant once
        for run_id in runs:
            act(store, run_id)
        return list(runs.values())
