"""What a recipe's hidden states take of a host's disk: bytes a token, and of as many tokens as a run of it has read."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from orchestrator.actions.shape import NUM_LOOKED_AT, spec_of
from orchestrator.store.reads import Reader
from orchestrator.store.rows import Kind
from remote.plan import Plan
from remote.plan.target import kept_bytes
from remote.spec import DFlashSpec

_READ = re.compile(r"\b\d+ documents?, (\d{1,18}) tokens? \(")  # as a job sums up the rows that it has read


@dataclass(frozen=True)
class Kept:
    """`num_tokens` and `run_id` are None where no run has told how many its answers are."""

    token_bytes: int
    num_tokens: int | None = None
    run_id: str | None = None

    @property
    def all_bytes(self) -> int | None:
        return None if self.num_tokens is None else self.num_tokens * self.token_bytes


def kept(reader: Reader | None, spec: DFlashSpec, made: Plan) -> Kept | None:
    """None where nothing is kept. Of the tokens that the newest run with the same target and answers read; contacts no host."""
    token_bytes = kept_bytes(spec, made.sizes)
    if not token_bytes:
        return None
    if reader is None:
        return Kept(token_bytes)
    runs = [
        run
        for kind in (Kind.TRAIN, Kind.PREPARE)
        for run in reader.runs(f"recipe:{spec.recipe}", kind=kind, limit=NUM_LOOKED_AT)
    ]
    for run in sorted(runs, key=lambda run: -run.created_s):
        theirs = spec_of(reader, run.id)
        if theirs is None or _answers(theirs) != _answers(spec):
            continue
        told = [_READ.search(str(row.fields.get("text"))) for row in reader.events(run.id, kinds=["note"])]
        found = [int(match[1]) for match in told if match]
        if found:
            return Kept(token_bytes, found[-1], run.id)
    return Kept(token_bytes)


def _answers(spec: DFlashSpec) -> tuple[object, ...]:
    """What decides which tokens are read."""
    data = spec.data
    target = replace(spec.target, keep_layers=None)
    return (target, data.prompts, data.answers, data.row_tokens, data.answer_tokens, data.answer_temperature)
