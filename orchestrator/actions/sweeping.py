"""Old trees, run folders and temporary files on a host: listed, and taken away on request; never one that is in use."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from orchestrator.actions.history import open_reader
from orchestrator.actions.order import find_host
from orchestrator.actions.places import Places
from orchestrator.errors import RunNotFound
from orchestrator.shell.connect import connect
from orchestrator.sweep import RunThere, Swept, TemporaryThere, TreeThere, survey, sweep
from orchestrator.workplace import workplace


@dataclass(frozen=True)
class Collected:
    """What nothing needs any more, and what became of it; None while it was only listed."""

    trees: list[TreeThere]
    runs: list[RunThere]
    whose: dict[str, str]  # of those runs: recipe and branch, or that it is not of this database
    temporary: TemporaryThere | None  # None where there is nothing old, or a run that may need it
    leftover_bytes: int
    swept: Swept | None


def _whose(places: Places, runs: Iterable[RunThere]) -> dict[str, str]:
    found = {}
    with open_reader(places) as reader:
        for there in runs:
            found[there.run_id] = "another client's"
            with suppress(RunNotFound):
                run = reader.run(there.run_id)
                if run.id == there.run_id:  # it may be the beginning of one of ours
                    found[there.run_id] = f"{run.recipe} {run.branch}"
    return found


def _final(places: Places, runs: Iterable[RunThere], host_name: str) -> dict[str, int]:
    """Of those runs the ones that have ended on this host by this database, with their newest attempt."""
    found = {}
    with open_reader(places) as reader:
        for there in runs:
            with suppress(RunNotFound):
                run = reader.run(there.run_id)
                if run.id == there.run_id and run.state.is_final and host_name in run.hosts:
                    found[run.id] = run.attempt
    return found


def collect(places: Places, host_name: str, *, older_than_s: float, with_runs: bool, end: bool) -> Collected:
    """Trees that no run needs, temporary files while no run lives and, with `with_runs`, folders of ended runs (by
    exit.json, or by this database), when older than that; with `end`, removes them.

    The host looks again before each removal: what has come into use since then stays.
    """
    host = find_host(places, host_name)
    shell = connect(host)
    try:
        place = workplace(shell, host)
        there = survey(shell, place, min_age_s=older_than_s)
        trees = [tree for tree in there.trees if not tree.in_use and tree.age_s >= older_than_s]
        idle = [run for run in there.runs if with_runs and not run.is_alive and run.age_s >= older_than_s]
        final = _final(places, (run for run in idle if not run.has_ended), host.name)
        runs = [run for run in idle if run.has_ended or run.run_id in final]
        temporary = there.temporary if there.temporary.num_entries and not there.temporary.in_use else None
        ended = [f"{run.name}:{final[run.run_id]}" if run.run_id in final else run.name for run in runs]
        names = [*ended, *(tree.name for tree in trees), *([temporary.name] if temporary else [])]
        whose = _whose(places, runs)  # a fault of the database is told before anything is gone
        swept = sweep(shell, place, names, min_age_s=older_than_s) if end else None
    finally:
        shell.close()
    return Collected(trees, runs, whose, temporary, there.leftover_bytes, swept)
