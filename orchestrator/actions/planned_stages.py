"""What a kept plan predicted of each stage of its run, and what beside it has to be known to read that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.store.rows import Kind, MemoryPeakRow

# Parts of a plan beside its steps, and why a run may take less in them.
SHORTER = {
    "target_pass": "predicted of a pass over every row; one that finds hidden states kept takes less",
    "evaluation": "predicted of prompts as long as a row; shorter ones take less",
}


def planned_stages(plan: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Planned bytes by stage; of a training what stands beside its steps among them, which no rung makes."""
    stages = [*(plan.get("stages") or ()), *(_beside(plan, name) for name in SHORTER if kind == Kind.TRAIN)]
    return {str(stage.get("name")): stage.get("allocated_bytes") for stage in stages if stage}


def beware_of_stages(plan: Mapping[str, Any], kind: str, peaks: Sequence[MemoryPeakRow]) -> list[str]:
    """What the planned column beside `peaks` speaks of, where its name says too little."""
    told = []
    if kind == Kind.SMOKE and plan.get("device") == "cpu":
        told.append("predicted of a rung, which reads no target: a training also holds transformers and the tokenizer")
    for name, why in SHORTER.items() if kind == Kind.TRAIN else ():
        stage = _beside(plan, name)
        took = [peak.allocated_bytes for peak in peaks if peak.stage == stage.get("name")]
        if any(size is not None and size < int(stage.get("allocated_bytes") or 0) for size in took):
            told.append(f"{stage.get('name')}: {why}")
    return told


def _beside(plan: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Empty of a plan that was kept before there was such a part, too."""
    stage = plan.get(name)
    return stage if isinstance(stage, Mapping) else {}
