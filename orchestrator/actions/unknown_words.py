"""Words of a person that no run has, and the nearest that some run has. Asked when a filter finds nothing, or of a column."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from orchestrator.actions.history import open_reader
from orchestrator.actions.places import Places
from orchestrator.errors import UsageError
from orchestrator.nearest import listed, nearest
from orchestrator.store import names
from orchestrator.store.filter import FIELDS, named
from orchestrator.store.reads import Reader

_KNOWN = {
    "recipe": "SELECT DISTINCT recipe FROM runs",
    "branch": "SELECT DISTINCT branch FROM runs",
    "host": "SELECT DISTINCT host FROM runs",
    "tag": "SELECT DISTINCT tag FROM tags",
}
_NUMBERS = ("step", "attempt", "num_steps")


def unknown_words(places: Places, where: str) -> list[str]:
    """A line for each name or value of the filter that no run has."""
    with open_reader(places) as reader:
        found = [_told(reader, name, operator, value) for name, operator, value in named(where)]
    return [line for line in found if line]


def require_metric(places: Places, name: str, columns: Collection[str]) -> None:
    """Raises UsageError where no run has reported a metric of this name, with the nearest one or the nearest column."""
    with open_reader(places) as reader:
        if not names.is_metric(reader, name):
            told = f"--columns: {name!r} is neither a column nor a metric of any run"
            raise UsageError(_line(told, name, [*columns, *names.metrics(reader)]))


def _told(reader: Reader, name: str, operator: str, value: str) -> str:
    if name in _KNOWN:
        known = [str(row[0]) for row in reader.database.all(_KNOWN[name])]
        missed = [word for word in value.split(",") if not set("*?") & set(word) and word not in known]
        return _line(f"no run has {name} {missed[0]!r}", missed[0], known) if missed else ""
    if operator == ":" or name in FIELDS or name in _NUMBERS or "." in name or names.is_metric(reader, name):
        return ""
    return _line(f"no run has reported {name!r}", name, names.metrics(reader))


def _line(told: str, word: str, known: Sequence[str]) -> str:
    near = nearest(word, known)
    return f"{told}; " + (f"did you mean {near!r}?" if near else f"there is {listed(word, known) or 'none'}")
