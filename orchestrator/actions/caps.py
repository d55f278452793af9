"""A cap on the memory of a smoke run's card: it stands for a smaller card, so it must be smaller."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from orchestrator.actions.host_facts import card_of
from orchestrator.actions.telling import Tell
from orchestrator.errors import UsageError
from orchestrator.units import format_size


def refuse_cap_above(cap_bytes: int | None, facts: Mapping[str, Any], gpus: Sequence[str], host: str) -> None:
    """UsageError for a cap that nothing would reach: the rungs would pass for a card that was never stood in for."""
    if cap_bytes is None:
        return
    capacity_bytes, device, *_ = card_of(facts, gpus or None)
    if device != "cuda":
        raise UsageError(
            f"--cap is {format_size(cap_bytes)} of a GPU's memory, and host {host} has no GPU: leave it out;"
            " life.memory_limit_bytes limits what a process allocates on such a host"
        )
    if capacity_bytes is not None and cap_bytes > capacity_bytes:
        raise UsageError(
            f"--cap is {format_size(cap_bytes)}, and the GPU of host {host} has {format_size(capacity_bytes)};"
            " a cap stands for a smaller card: give less, or leave it out"
        )


def refuse_cap_of_scripts(cap_bytes: int | None, rungs: Sequence[str], scripts: Collection[str], tell: Tell) -> None:
    """Scripts set no cap on themselves: UsageError where all rungs are scripts, a warning where some are."""
    outside = [rung for rung in rungs if rung in scripts]
    if cap_bytes is None or not outside:
        return
    named = f"script rung {outside[0]}" if len(outside) == 1 else f"script rungs {', '.join(outside)}"
    if len(outside) == len(rungs):
        raise UsageError(f"--cap does not reach {named}: {OWN_CAP}")
    tell(f"warning: --cap does not reach {named}: {OWN_CAP}")


OWN_CAP = "a script takes what it takes; torch.cuda.set_per_process_memory_fraction in it is a cap of its own"
