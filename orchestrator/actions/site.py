"""A host with its door open: the shell, where work lies there, and what a probe found.

Loads the transports, so only actions that contact a machine import it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from orchestrator.actions.host_facts import MissingDependency
from orchestrator.actions.telling import Tell
from orchestrator.errors import DraftyardError
from orchestrator.host import Host
from orchestrator.launch import probe
from orchestrator.parcel import Progress
from orchestrator.shell.connect import connect
from orchestrator.shell.stream import StreamShell
from orchestrator.ship import Shipped, ship
from orchestrator.tree import DiskFull, Tree
from orchestrator.units import counted
from orchestrator.workplace import Workplace, workplace

FIRST_WORD_S, NEXT_WORD_S = 2.0, 5.0  # what is over sooner needs no progress


@dataclass(frozen=True)
class Site:
    host: Host
    shell: StreamShell
    place: Workplace
    facts: Mapping[str, Any]  # what remote/probe.py answered


@contextmanager
def open_site(host: Host) -> Iterator[Site]:
    """Reaches the host and looks at it once. Raises HostError, exit 4; MissingDependency where it has no Python."""
    shell = connect(host)
    try:
        place = _place(shell, host)
        yield Site(host, shell, place, checked_facts(probe(shell, place), shell.label))
    finally:
        shell.close()


def ship_told(site: Site, tree: Tree, tell: Tell) -> Shipped:
    """Makes the host have the tree; says so where something is missing there, and how far it is. Raises ShipError."""
    head = f"shipping {counted(len(tree.entries), 'file')} to {site.host.name}"
    try:
        return ship(tree, site.shell, site.place, on_progress=paced(tell, head))
    except DiskFull as full:
        raise DiskFull(
            f"{full}\n  `draftyard gc {site.host.name} --older-than 0s` removes what nothing there needs: trees and what cut ships left, "
            "with --runs folders of ended runs; or name a larger disk with work_dir: in hosts.yaml; ship again then"
        ) from full


def paced(tell: Tell, head: str, clock: Callable[[], float] = time.monotonic) -> Callable[[Progress], None]:
    """The head once something moves; amount, whole and rate after two seconds and then every five."""
    due = clock() + FIRST_WORD_S
    is_begun = False

    def say(now: Progress) -> None:
        nonlocal due, is_begun
        if not is_begun:
            tell(head)
        is_begun = True
        if clock() >= due:
            due = clock() + NEXT_WORD_S
            if now.waits_for:
                tell(f"  waiting: {now.waits_for} sends the same content")
                return
            sent, total, rate = (amount / 2**20 for amount in (now.sent_bytes, now.total_bytes, now.bytes_per_s))
            tell(f"  {sent:.1f} of {total:.1f} MiB, {rate:.1f} MiB/s")

    return say


def checked_facts(facts: Mapping[str, Any], label: str) -> Mapping[str, Any]:
    """The facts, if what the local side reads of them is of its kind; DraftyardError names the first that is not.

    Any of them may be absent or null, but a GPU has a number. What is not in the list below is let through unread.
    """
    fault = _fault(_FACTS, facts, "facts")
    if fault is None:
        fault = next(
            (f"{gpu!a:.50} as a GPU without index" for gpu in facts.get("gpus") or [] if gpu.get("index") is None), None
        )
    if fault is not None:
        raise DraftyardError(f"{label}: remote/probe.py gives {fault}; is its Python or its output tampered with?")
    return facts


_GPU = {
    "index": int,
    "uuid": str,
    "name": str,
    "total_bytes": int,
    "used_bytes": int,
    "processes": [{"pid": int, "used_bytes": int, "user": str, "command": str, "age_s": float}],
}
_FACTS = {
    "time_s": float,
    "torch_cuda": str,
    "driver": str,
    "gpu_error": str,
    "shm_free_bytes": int,
    "user": str,
    "container": str,
    "python": {"version": str, "is_venv": bool, "packages": {"*": str}},
    "gpus": [_GPU],
    "nvidia_nodes": {"*": {"is_there": bool, "major": int, "driver_major": int}},
    "disk": {"path": str, "free_bytes": int},
    "memory": {"total_bytes": int, "available_bytes": int},
    "session": {"linger": bool, "kill_user_processes": bool},
    "tools": {"*": str},
}


def _fault(shape: Any, value: Any, where: str) -> str | None:
    """The first place where the value is not of the shape: a type, a list of one shape, or shapes by key (`*`: any key)."""
    if isinstance(shape, dict) and isinstance(value, Mapping):
        parts = [(shape.get(key, shape.get("*")), item, f"{where}.{key}") for key, item in value.items()]
        is_by_name = isinstance(shape.get("*"), dict)  # things by name: none of them is null
        found = (
            _fault(inner, item, at)
            for inner, item, at in parts
            if inner is not None and (item is not None or is_by_name)
        )
    elif isinstance(shape, list) and isinstance(value, list):
        found = (_fault(shape[0], item, f"{where}[{number}]") for number, item in enumerate(value))
    else:
        return None if _is_of(shape, value) else f"{where} as {value!a:.50}"
    return next((fault for fault in found if fault is not None), None)


def _is_of(shape: Any, value: Any) -> bool:
    if shape is float:
        return (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and abs(value) < 1e12
        )
    if shape is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(shape, type) and isinstance(value, shape)


def _place(shell: StreamShell, host: Host) -> Workplace:
    try:
        return workplace(shell, host)
    except DraftyardError as error:
        if error.reason == MissingDependency.reason:
            raise MissingDependency(str(error)) from error
        raise
