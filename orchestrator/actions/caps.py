"""A cap on the memory of a smoke run's card: it stands for a smaller card, so it must be smaller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.actions.host_facts import capacity_of
from orchestrator.errors import UsageError
from orchestrator.units import format_size


def refuse_cap_above(cap_bytes: int | None, facts: Mapping[str, Any], gpus: Sequence[str], host: str) -> None:
    """UsageError for a cap that nothing would reach: the rungs would pass for a card that was never stood in for."""
    if cap_bytes is None:
        return
    capacity_bytes, device = capacity_of(facts, gpus or None)
    if device == "cuda" and capacity_bytes is not None and cap_bytes > capacity_bytes:
        raise UsageError(
            f"--cap is {format_size(cap_bytes)}, and the GPU of host {host} has {format_size(capacity_bytes)};"
            " a cap stands for a smaller card: give less, or leave it out"
        )
