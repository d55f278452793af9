"""How the processes of a training are spread over hosts, by arithmetic alone: refused here, before any host is asked.

Each host has as many as every other; the first one is node 0, has rank 0, and keeps the checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.errors import UsageError
from remote.spec import DFlashSpec, Spec


@dataclass(frozen=True)
class Node:
    """A host's place in a job: which of how many."""

    number: int = 0
    num_nodes: int = 1


ALONE = Node()


def num_ranks(spec: Spec) -> int:
    """Processes of the bundled trainer, one on each GPU; 1 where a script of the user's own is all there is."""
    return spec.roles.target + spec.roles.drafter if isinstance(spec, DFlashSpec) else 1


def gpus_each(spec: Spec, num_nodes: int) -> int:
    """GPUs that the job wants of each host."""
    return spec.life.num_gpus // num_nodes


def refuse_uneven(spec: Spec, hosts: Sequence[str]) -> None:
    """UsageError, exit 2, where the processes cannot be shared out evenly among these hosts."""
    if len(hosts) == 1:
        return
    twice = next((name for at, name in enumerate(hosts) if name in hosts[:at]), None)
    if twice is not None:
        raise UsageError(f"--host {twice} is named twice; each host has one share of the job")
    if not isinstance(spec, DFlashSpec):
        raise UsageError(
            f"recipe {spec.recipe} runs a script of its own; several hosts are for the bundled trainer, whose processes "
            "find one another: name one --host"
        )
    ranks = num_ranks(spec)
    if ranks % len(hosts):
        fitting = [str(num) for num in range(1, ranks + 1) if ranks % num == 0]
        raise UsageError(
            f"{arithmetic(spec)}, and {ranks} / {len(hosts)} hosts is no whole number; name "
            f"{', '.join(fitting[:-1]) + ' or ' if len(fitting) > 1 else ''}{fitting[-1]} of them, or change roles"
        )


def refuse_other_number(spec: Spec, host: str, gpus: Sequence[str], num_nodes: int) -> None:
    """UsageError where the GPUs named for a host are not one for each of its processes."""
    if not isinstance(spec, DFlashSpec) or num_ranks(spec) == 1 or not gpus:
        return
    each = gpus_each(spec, num_nodes)
    if len(gpus) != each:
        shared = f"; {each} on each of {num_nodes} hosts" if num_nodes > 1 else ""
        raise UsageError(
            f"{arithmetic(spec)}{shared}; for host {host} {len(gpus)} are named: {', '.join(gpus)}\n"
            f"  name {each} with --gpus, or change roles"
        )


def arithmetic(spec: DFlashSpec) -> str:
    """`5 target + 3 drafter = 8 processes, one on each GPU`."""
    roles, ranks = spec.roles, num_ranks(spec)
    return f"{roles.target} target + {roles.drafter} drafter = {ranks} processes, one on each GPU"
