"""The rung `real`: whole steps on the recipe's own rows, with the target's own hidden states, embedding and head.

It shows what rows made from shapes cannot: that target and data are there and fit the recipe, that every row can be
read, that hidden states are finite, and what the first loss really is. Its rows are those of the training's first
step, not the worst that the recipe allows, so it stands beside the other rungs and never for one of them. A recipe
wants it by name (`smoke.rungs`): a large target takes minutes to load.

Answers have to be there. Hidden states are computed here for the rows of that step alone, whatever lies in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from remote.drafter import workbench
from remote.drafter.data import Batch
from remote.drafter.job import Job, devices, versions
from remote.drafter.leak import label_findings, probe
from remote.drafter.measure import Meter, give_back
from remote.drafter.prepare import found_answers, load_rows
from remote.drafter.smoke import SCHEDULE_STEPS, Values, refuse, timed_steps
from remote.drafter.step import anchor_slots, assemble
from remote.drafter.target import load_target, tables
from remote.drafter.teacher import expect, tensors_of
from remote.drafter.workbench import Choices
from remote.plan.sizes import is_taught_ahead
from remote.report import UserFault
from remote.spec import DFlashSpec


@dataclass(frozen=True)
class Real:
    """What the target and the data give a step; the target itself is gone."""

    batches: tuple[Batch, ...]  # the micro-batches of the training's first step
    most_documents: int  # of any row of the data
    embedding_VH: Tensor
    head_VH: Tensor


def run_real(job: Job, meter: Meter) -> Values:
    """Climbs the rung; RungFailed, UserFault for what the user can mend, or whatever the step raises."""
    spec = replace(job.spec, train=replace(job.spec.train, num_steps=SCHEDULE_STEPS))
    choices = workbench.choose(spec, job.device)
    job.reporter.start(versions=versions(), devices=devices(job.device), choices=choices.reasons)
    with meter.part("target"):
        real = read(job, spec, choices)
        give_back(job.device)
    with meter.part("load"):
        embed = partial(F.embedding, weight=real.embedding_VH)
        bench = workbench.build(spec, choices, meter=meter, embed=embed, head_VH=real.head_VH)
    num_slots = anchor_slots(spec.data, most_documents=real.most_documents)
    micro_batches = [assemble(batch, bench, num_slots=num_slots) for batch in real.batches]
    labels = [finding for each in micro_batches[1:] for finding in label_findings(each.row, each.blocks)]
    refuse([*_not_finite(real.batches), *probe(micro_batches[0], bench), *labels])
    values = timed_steps(job, bench, micro_batches)
    meter.say_peaks(job.reporter)
    return values | meter.peak_values()


def read(job: Job, spec: DFlashSpec, choices: Choices) -> Real:
    """Reads every row of the data, as training does, and computes the hidden states of its first step."""
    progress = job.reporter.progress
    target = load_target(spec.target, cache=job.cache, device=job.device, dtype=choices.dtype, progress=progress)
    if found_answers(spec, target, data_dir=job.data_dir, cache=job.cache) is None:
        raise UserFault(
            f"data.answers is {spec.data.answers}: nobody has answers of this target yet, and a rung makes none; "
            "draftyard prepare makes them"
        )
    here = replace(spec, data=replace(spec.data, hidden_states="online", num_workers=0))
    dataset = load_rows(here, target, data_dir=job.data_dir, cache=job.cache, progress=progress)
    job.say(dataset.summary())
    count, num_rows = spec.train.accumulation, spec.train.rows_per_step
    batches = [dataset.batch(position, num_rows=num_rows) for position in range(count)]
    if is_taught_ahead(spec):  # as the training's cache holds it
        batches = [replace(batch, teacher=expect(tensors_of(batch.teacher)[0], target.head_VH)) for batch in batches]
    return Real(tuple(batches), dataset.most_documents, *tables(target, outlive_it=True))


def _not_finite(batches: Sequence[Batch]) -> list[str]:
    """Steps on such states would fail as well, and blame the loss."""
    bad = [batch.keys for batch in batches if not all(map(_is_finite, (batch.features_SC, *tensors_of(batch.teacher))))]
    rows = ", ".join(f"row {row}" for keys in bad for _, row in keys)
    return [f"the target's hidden states of {rows} hold numbers that are not finite"] if bad else []


def _is_finite(states: Tensor) -> bool:
    return bool(states.isfinite().all())
