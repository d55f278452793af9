"""Which card of a host counts for a plan, as the host was last seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.actions.host_facts import UNLISTED_BYTES, Card, card_of, gpu_fault
from orchestrator.errors import UsageError
from orchestrator.units import format_size


def card_told(facts: Mapping[str, Any], host: str) -> str:
    """Which card of a host is planned against, and that it was not empty: its whole size counts all the same."""
    gpus = [gpu for gpu in facts.get("gpus") or () if gpu.get("total_bytes")]
    if not gpus:
        return f"host {host} as last seen"
    least = min(gpus, key=lambda gpu: int(gpu["total_bytes"]))
    named = f"GPU {least['index']} of host {host}, the smallest of {len(gpus)}," if len(gpus) > 1 else f"host {host}"
    used_bytes = int(least.get("used_bytes") or 0)
    taken = f", when {format_size(used_bytes)} of it were held" if used_bytes > UNLISTED_BYTES else ""
    return f"{named} as last seen{taken}"


def card_seen(facts: Mapping[str, Any], host: str, *, device: str) -> Card:
    """The smallest GPU, or the machine where it has none. `device`: what the job is for. UsageError: nobody has looked at the
    host, or its driver failed when somebody did.
    """
    if not facts:
        raise UsageError(f"host {host} has not been looked at yet; draftyard doctor {host} does, or give --gpu 95GiB")
    fault = gpu_fault(facts)
    if device == "cuda" and fault is not None and not facts.get("gpus"):
        raise UsageError(
            f"host {host} told of no GPU when it was last seen, as its driver fails: {fault}; give --gpu 95GiB"
        )
    return card_of(facts)
