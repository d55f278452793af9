"""Processes of our own runs that outlived them: found by their marker, never by name, and ended on request."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.actions.history import open_reader
from orchestrator.actions.order import find_host
from orchestrator.actions.places import Places
from orchestrator.errors import DraftyardError
from orchestrator.launch import Orphan, attempt_name, find_processes
from orchestrator.launch import reap as end_processes
from orchestrator.shell.connect import connect
from orchestrator.workplace import workplace


@dataclass(frozen=True)
class Reaped:
    """Processes of runs that have ended, and whether they were ended now."""

    orphans: list[Orphan]
    were_ended: bool


def reap(places: Places, host_name: str, *, end: bool) -> Reaped:
    """Lists processes of runs this database knows to have ended; with `end`, ends them.

    Runs that are live, or that another database started, are left alone.
    """
    host = find_host(places, host_name)
    ended = _ended(places, host_name)
    if not ended:
        return Reaped([], were_ended=False)
    shell = connect(host)
    try:
        place = workplace(shell, host)
        found = [item for item in find_processes(shell, place) if item.run_id in ended]
        if not end or not found:
            return Reaped(found, were_ended=False)
        # Looking took a while: what was resumed meanwhile is not touched; an attempt that begins from now on is not named.
        found = [item for item in found if item.run_id in _ended(places, host_name)]
        stubborn = end_processes(shell, place, names={attempt_name(item.run_id, item.attempt) for item in found})
    finally:
        shell.close()
    if stubborn:
        raise DraftyardError(f"host {host_name}: these processes would not die: {', '.join(map(str, stubborn))}")
    return Reaped(found, were_ended=True)


def _ended(places: Places, host_name: str) -> set[str]:
    """Runs in the bin too: that nobody wants to see them frees no GPU."""
    with open_reader(places) as reader:
        runs = reader.runs("", kind=None) + reader.runs("", kind=None, removed=True)
    return {run.id for run in runs if host_name in run.hosts and run.state.is_final}
