"""What a kept plan predicted of each stage of its run, and what beside it has to be known to read that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.store.rows import Kind, MemoryPeakRow


def planned_stages(plan: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Planned bytes by stage; of a training the target's pass before it among them, which no rung makes."""
    stages = list(plan.get("stages") or ())
    before = plan.get("target_pass")  # None of a plan that was kept before there was one, too
    if isinstance(before, Mapping) and kind == Kind.TRAIN:
        stages.append(before)
    return {str(stage.get("name")): stage.get("allocated_bytes") for stage in stages}


def beware_of_stages(plan: Mapping[str, Any], kind: str, peaks: Sequence[MemoryPeakRow]) -> list[str]:
    """What the planned column beside `peaks` speaks of, where its name says too little."""
    told = []
    before = plan.get("target_pass")
    if kind == Kind.SMOKE and plan.get("device") == "cpu":
        told.append("predicted of a rung, which reads no target: a training also holds transformers and the tokenizer")
    if isinstance(before, Mapping) and kind == Kind.TRAIN:
        took = [peak.allocated_bytes for peak in peaks if peak.stage == before.get("name")]
        if any(size is not None and size < int(before.get("allocated_bytes") or 0) for size in took):
            told.append(
                f"{before.get('name')}: predicted of a pass over every row; one that finds hidden states kept takes less"
            )
    return told
