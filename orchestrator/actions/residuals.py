"""What smoke runs of the same shape took beyond their plan: memory that no line of the next plan explains either."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.actions.host_facts import is_hopper
from orchestrator.actions.shape import gpu_of, is_of_shape, steps_climbed
from orchestrator.store.reads import Reader
from remote.plan import plan
from remote.spec import DFlashSpec


@dataclass(frozen=True)
class Residuals:
    """Measured less planned bytes by stage, one of each run, the newest first; and those runs."""

    by_stage: dict[str, list[int]]
    run_ids: tuple[str, ...]


def residuals(reader: Reader, spec: DFlashSpec, *, device: str, host: str | None = None) -> Residuals:
    """Of the newest rungs `fwd_bwd` on this kind of device; on the host, where one is named.

    Held against today's plan of the rung: what an older plan did not know has been learnt since. Rungs of other code than
    the recipe's newest say nothing of what today's takes; those of imported runs, whose code nobody tells, count where
    none is told.
    """
    plans = {
        is_of: {
            stage.name: stage.allocated_bytes
            for stage in plan(spec, device=device, rung="fwd_bwd", is_hopper=is_of).stages
        }
        for is_of in (False, True)
    }
    by_stage: dict[str, list[int]] = {name: [] for name in plans[False]}
    run_ids = []
    climbed = list(steps_climbed(reader, spec.recipe))
    tree = next((row.fingerprint_parts["tree"] for row in climbed if "tree" in row.fingerprint_parts), None)
    for row in climbed:
        if row.fingerprint_parts.get("tree") != tree:
            continue
        gpu = gpu_of(reader, row.run_id)
        if host not in (None, row.host) or gpu is None or bool(gpu) != (device == "cuda"):
            continue
        planned = plans[is_hopper(gpu)]
        peaks = {name: row.values.get(f"{name}_allocated_bytes") for name in planned}
        known = {name: size for name, size in peaks.items() if isinstance(size, int | float)}
        if not known or not is_of_shape(reader, row.run_id, spec):
            continue
        run_ids.append(row.run_id)
        for name, size in known.items():
            by_stage[name].append(round(size) - planned[name])
    return Residuals({name: sizes for name, sizes in by_stage.items() if sizes}, tuple(run_ids))
