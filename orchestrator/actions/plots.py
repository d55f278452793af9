"""Curves of several runs as a picture in a file: which runs and metrics are meant, their values, the written file.

How it looks is in `chart`. Loads the drawing library only when a picture is made.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.actions import chart
from orchestrator.actions.chart import Curve, Panel
from orchestrator.actions.files import write_here
from orchestrator.actions.history import open_reader
from orchestrator.actions.places import Places
from orchestrator.errors import RunNotFound, UsageError
from orchestrator.nearest import listed, nearest
from orchestrator.store.reads import Reader
from orchestrator.store.rows import Document, RunRow
from orchestrator.units import unit_of

FORMATS = (".png", ".svg")
NUM_BUCKETS = 600  # about two pixels each
MOST_METRICS = 12  # a picture of more is read by nobody


@dataclass(frozen=True)
class Plotted:
    """A picture as it was written."""

    file: Path
    width_px: int
    height_px: int
    panels: list[Panel]


def plot(places: Places, words: Sequence[str], *, to: Path | None, is_dark: bool = False) -> Plotted:
    """Draws metrics of runs, a panel per metric, into a .png or .svg (default: named after them, here).

    Raises RunNotFound when the first word is no run, UsageError for a word that is neither run nor metric.
    """
    if to is not None and to.suffix.lower() not in FORMATS:
        raise UsageError(f"{to}: a plot is written as {' or '.join(FORMATS)}; end the name of the file in one of them")
    panels = gather(places, words)
    file = to or Path(f"{panels[0].curves[0].run.id}-{_slug(panels[0].metric)}.png")
    image, width_px, height_px = chart.render(panels, form=file.suffix.lower()[1:], is_dark=is_dark)
    write_here(file, image)
    return Plotted(file, width_px, height_px, panels)


def gather(places: Places, words: Sequence[str]) -> list[Panel]:
    """The curves that the words name: runs first, then metrics (default: loss)."""
    with open_reader(places) as reader:
        runs, metrics = _runs_and_metrics(reader, words)
        are_ours = all(_is_ours(reader, run) for run in runs)
        panels = [
            Panel(
                name, unit_of(name, is_ours=are_ours), [curve for run in runs for curve in _curves(reader, run, name)]
            )
            for name in metrics
        ]
    empty = [panel.metric for panel in panels if not panel.curves]
    if empty:
        raise UsageError(_unknown(empty[0], runs, _known(places, runs)))
    return panels


def _is_ours(reader: Reader, run: RunRow) -> bool:
    """Whether the bundled trainer ran: what the loss of somebody's own script is in, nobody has told."""
    return bool(json.loads(reader.document(run.id, Document.SPEC) or "{}").get("entry") == "dflash")


def _runs_and_metrics(reader: Reader, words: Sequence[str]) -> tuple[list[RunRow], list[str]]:
    """A word that one of the runs so far reports is a metric, any other is a run; the first is always a run."""
    runs, metrics = [reader.run(words[0])], []
    known = reader.metric_names(runs[0].id)
    for word in words[1:]:
        if word in known:
            metrics.append(word)
            continue
        try:
            run = reader.run(word)
        except RunNotFound as error:
            if word.startswith("@") or _is_beginning(reader, word):
                raise
            raise UsageError(_unknown(word, runs, known)) from error
        runs.append(run)
        known += reader.metric_names(run.id)
    if len(metrics) > MOST_METRICS:
        raise UsageError(f"{len(metrics)} metrics are named; one picture takes at most {MOST_METRICS}")
    return _distinct(runs), list(dict.fromkeys(metrics)) or ["loss"]


def _is_beginning(reader: Reader, word: str) -> bool:
    """Whether a run was meant: ids begin like this, too many or by too few letters. Asked when a word is wrong."""
    return any(run.id.startswith(word) for run in reader.runs(kind=None, limit=None))


def _distinct(runs: list[RunRow]) -> list[RunRow]:
    return list({run.id: run for run in runs}.values())


def _known(places: Places, runs: Sequence[RunRow]) -> list[str]:
    with open_reader(places) as reader:
        return [name for run in runs for name in reader.metric_names(run.id)]


def _unknown(word: str, runs: Sequence[RunRow], known: Sequence[str]) -> str:
    names = sorted(set(known))
    near = nearest(word, names)
    hint = f"did you mean {near!r}?" if near else f"they report {listed(word, names) or 'nothing yet'}"
    return f"{word!r} is neither a run nor a metric of {', '.join(run.id for run in runs)}; {hint}"


def _curves(reader: Reader, run: RunRow, name: str) -> list[Curve]:
    """Every attempt's curve of the lowest rank, oldest first."""
    attempts = sorted({row.attempt for row in reader.series(run.id, name)})
    return [
        Curve(
            run,
            attempt,
            is_newest=attempt == attempts[-1],
            points=reader.curve(run.id, name, buckets=NUM_BUCKETS, attempt=attempt),
        )
        for attempt in attempts
    ]


def _slug(name: str) -> str:
    """A metric's name as part of a file's: it may hold slashes, blanks and anything else."""
    return "".join(mark if mark.isascii() and (mark.isalnum() or mark in "._-") else "-" for mark in name)[:60]
