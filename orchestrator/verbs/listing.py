"""The columns of `ls`: which there are, what stands in them, and those that a person chose."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import click

from orchestrator.actions.history import Listed
from orchestrator.units import duration
from orchestrator.verbs.table import Cell, Column, table
from orchestrator.verbs.words import ago, metric, number, state_cell

Shown = Callable[[Listed], str | Cell]

USUAL = ("run", "state", "recipe", "branch", "host", "step", "loss", "accept", "started")


def _step(item: Listed) -> str:
    run = item.run
    return "-" if run.step is None else str(run.step) + (f"/{run.num_steps}" if run.num_steps else "")


def _lasted(item: Listed) -> str:
    began, ended = item.run.started_s, item.run.ended_s
    return "-" if began is None else duration((time.time() if ended is None else ended) - began)


COLUMNS: dict[str, tuple[Column, Shown]] = {
    "run": (Column("run"), lambda item: item.run.id),
    "state": (Column("state", gives_way=True, least=9, is_last_to=True), lambda item: state_cell(item.run)),
    "recipe": (Column("recipe", gives_way=True), lambda item: item.run.recipe),
    "branch": (Column("branch", gives_way=True), lambda item: item.run.branch),
    "host": (Column("host", gives_way=True, least=5), lambda item: " ".join(item.run.hosts)),
    "step": (Column("step", is_number=True), _step),
    "accept": (Column("accept", is_number=True), lambda item: number(item.acceptance)),
    "started": (
        Column("started", is_number=True),
        lambda item: ago(item.run.started_s or item.run.created_s, time.time()),
    ),
    "lasted": (Column("lasted", is_number=True), _lasted),
    "kind": (Column("kind"), lambda item: item.run.kind),
    "attempt": (Column("attempt", is_number=True), lambda item: str(item.run.attempt)),
    "evidence": (Column("evidence", gives_way=True, least=12), lambda item: item.run.evidence),
    "tags": (Column("tags", gives_way=True), lambda item: " ".join(item.run.tags)),
    "note": (Column("note", gives_way=True), lambda item: item.run.note),
    "why": (Column("why", gives_way=True), lambda item: item.run.why),
    "commit": (Column("commit"), lambda item: (item.run.git_commit or "-")[:12] + ("+" if item.run.git_dirty else "")),
}


def metrics_of(names: Sequence[str]) -> list[str]:
    """The metrics among the names of columns."""
    return [name for name in names if name not in COLUMNS]


def lines(listed: Sequence[Listed], names: Sequence[str], *, width: int | None) -> list[str]:
    """A heading and a line for each run. Where they are too wide, usual columns without any value are left out."""
    chosen = [COLUMNS.get(name) or _metric(name) for name in names]
    rows = [[shown(item) for _, shown in chosen] for item in listed]
    made = table([column for column, _ in chosen], rows, width=width)
    if width is None or tuple(names) != USUAL or max(len(click.unstyle(line)) for line in made) <= width:
        return made
    kept = [place for place in range(len(names)) if any(row[place] != "-" for row in rows)]
    return table([chosen[place][0] for place in kept], [[row[place] for place in kept] for row in rows], width=width)


def _metric(name: str) -> tuple[Column, Shown]:
    column = Column(name, is_number=True, gives_way=len(name) > 20, least=12)  # a name may be hundreds of letters long
    return column, lambda item: metric(name, item.metrics.get(name))
