"""Runs of one shape: those whose steps take the same time and memory, and what of it the database keeps."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from orchestrator.store.reads import Reader
from orchestrator.store.rows import Document, EvidenceRow
from remote.coherence import against_fp8
from remote.spec import DFlashSpec, EvaluateSpec, LifeSpec, OptimSpec, SmokeSpec, parse

NUM_LOOKED_AT = 20  # newest runs, and newest rungs, of the recipe


def steps_climbed(reader: Reader, recipe: str) -> Iterator[EvidenceRow]:
    """The newest passed rungs `fwd_bwd` of the recipe: a whole step at the worst batch, as a training takes it."""
    rows = (row for row in reader.evidence(recipe=recipe) if row.rung == "fwd_bwd" and row.passed)
    return islice(rows, NUM_LOOKED_AT)


def is_of_shape(reader: Reader, run_id: str, spec: DFlashSpec) -> bool:
    """Whether a run's steps are of the shape of the spec's."""
    theirs = spec_of(reader, run_id)
    return theirs is not None and shape_of(theirs) == shape_of(spec)


def gpu_of(reader: Reader, run_id: str) -> str | None:
    """The model of the card it had, as its fingerprint has it; empty where it had none, None where nobody tells.

    A run that was imported has no fingerprint: there its own first word counts.
    """
    parts = json.loads(reader.document(run_id, Document.FINGERPRINT) or "{}")
    if "gpu" not in parts:
        return _gpu_told(reader, run_id)
    name = str(parts["gpu"])
    return "" if name == "none" else re.sub(r" \d+ bytes", "", name)


def _gpu_told(reader: Reader, run_id: str) -> str | None:
    """As the job said when it started."""
    for event in reader.events(run_id, kinds=["start"]):
        match event.fields.get("devices"):
            case [{"kind": "cuda", "name": str(name)}, *_]:
                return name
            case [{"kind": "cpu"}, *_]:
                return ""
    return None


def spec_of(reader: Reader, run_id: str) -> DFlashSpec | None:
    try:
        spec = parse(reader.document(run_id, Document.SPEC) or "{}", run_id)
    except (ValueError, TypeError, AttributeError):  # of another version, or brought from elsewhere
        return None
    return spec if isinstance(spec, DFlashSpec) else None


def shape_of(spec: DFlashSpec) -> DFlashSpec:
    """The spec with everything alike that a step's time and memory do not depend on: two of one shape are then equal."""
    data, loss, optim, train = spec.data, spec.loss, spec.optim, spec.train
    noise = replace(data.noise, scale=1.0)
    terms = {name: 1.0 for name, weight in loss.terms.items() if weight}
    auto = "full" if against_fp8(spec) else "fp8"  # as a plan takes it; what the card refused it measured as less
    gradient: Any = auto if loss.hidden_gradient == "auto" else loss.hidden_gradient
    return replace(
        spec,
        recipe="", branch="", why="", tags=[], evaluate=EvaluateSpec(), smoke=SmokeSpec(),
        life=LifeSpec(num_gpus=spec.life.num_gpus),
        target=replace(spec.target, source=""),
        drafter=replace(spec.drafter, init_from=None),
        data=replace(data, prompts="", answers="", held_out="", noise=noise, answer_tokens=1, answer_temperature=0.0, answer_batch=1),
        loss=replace(loss, terms=terms, hidden_gradient=gradient, gamma=1.0, dpace_alpha=1.0, streak_beta=0.0, normalization="weights"),
        optim=OptimSpec(optim.name, master_dtype=optim.master_dtype, moment_dtype=optim.moment_dtype),
        train=replace(train, num_steps=1, log_every=1, checkpoint_every=1, keep_last=1, seed=0),
    )  # fmt: skip
