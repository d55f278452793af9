"""Whether a card failed that only the machine knows of: what the kernel's log and nvidia-smi said once the job had failed.

Pure functions over the supervisor's exit file, which holds no line about another job's cards and none
that was true before the job began. A driver's word on a program's own mistake is no fault of the card.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from orchestrator.failure.texts import Meaning, meaning
from orchestrator.failure.xid import is_of_the_job
from orchestrator.store.rows import Reason

_FAULT = meaning("", "GPU is lost")
_SICK = re.compile(r"ERR!|\[Unknown Error\]|No devices were found")


def fault_of_card(exit_file: Mapping[str, Any]) -> tuple[str, Meaning] | None:
    """The line that tells, in a sentence, and its meaning; the kernel before nvidia-smi, which only shows the result."""
    for line in _texts(exit_file.get("kernel")):
        found = meaning("", line)
        if found.kind == Reason.GPU_FAULT and is_of_the_job(line, exit_file):
            return f"the kernel's log says {line!r}", found
    health = exit_file.get("gpu_health")
    told = _told_by_nvidia_smi(health) if isinstance(health, Mapping) else None
    return None if told is None else (told, _FAULT)


def _told_by_nvidia_smi(health: Mapping[str, Any]) -> str | None:
    for line in _texts(health.get("said")):
        if meaning("", line).kind == Reason.GPU_FAULT or _SICK.search(line):
            return f"nvidia-smi says {line!r}"
    gone, risen = _texts(health.get("gone")), health.get("ecc_uncorrected")
    if gone and health.get("exit_code") == 0:
        return f"nvidia-smi no longer lists {', '.join(gone)}"
    pairs = risen.items() if isinstance(risen, Mapping) else ()
    counts = [
        f"{uuid} from {pair[0]} to {pair[1]}" for uuid, pair in pairs if isinstance(pair, list) and len(pair) == 2
    ]
    return f"uncorrectable ECC errors rose: {', '.join(counts)}" if counts else None


def _texts(value: object) -> list[str]:
    return [line for line in value if isinstance(line, str)] if isinstance(value, list) else []
