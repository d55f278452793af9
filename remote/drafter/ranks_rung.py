"""The rung `ranks`: the recipe's roles at their smallest, started as a training is, by torch's own launcher.

A target and a drafter where the recipe has targets, else two drafters; a process each. Rows and hidden states are made
from shapes, as in the other rungs, at the worst batch the recipe allows; they travel through the queue, gradients are
added up, and what ranks wait for one another is real. It passes when every step is finite and all drafters have the
same weights afterwards. How many more processes do, and other hosts, it cannot tell.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from remote.drafter import synthetic, workbench
from remote.drafter.data import HiddenStates, batch_of
from remote.drafter.job import Job, devices, versions
from remote.drafter.queue import Inbox, Outbox, Shape
from remote.drafter.ranks import Place, Ranks, joined
from remote.drafter.smoke import SCHEDULE_STEPS, RungFailed, Values, learnt, micro_batch_of, refuse_non_finite
from remote.drafter.step import run_step
from remote.roles import Roles
from remote.spec import DFlashSpec, RolesSpec

if TYPE_CHECKING:
    from remote.drafter.measure import Meter

NUM_PROCESSES = 2
WARM_UP_STEPS, TIMED_STEPS = 1, 3


def smallest(spec: DFlashSpec) -> DFlashSpec:
    """The recipe with two processes, one micro-batch a step for each drafter."""
    pair = RolesSpec(1, 1, spec.roles.queue) if spec.roles.target else RolesSpec(0, 2, spec.roles.queue)
    train = replace(spec.train, num_steps=SCHEDULE_STEPS, accumulation=pair.drafter)
    return replace(spec, roles=pair, train=train)


def run_ranks(job: Job, place: Place | None, meter: Meter) -> Values:
    """What this rank measured; RungFailed, the loss of the other rank, or whatever a step raises."""
    spec = smallest(job.spec)
    with joined(place, Roles.of(spec), job.device, job.reporter) as ranks:
        try:
            return _steps(replace(job, spec=spec, ranks=ranks), meter)
        except Exception as error:
            cause = ranks.cause_of(error)
            if cause is error:
                raise
            raise cause from error


def _steps(job: Job, meter: Meter) -> Values:
    spec, ranks = job.spec, job.ranks
    checks = workbench.Checks() if ranks.is_drafter else workbench.UNASKED
    choices = workbench.agree(workbench.choose(spec, job.device, checks=checks), ranks)
    job.reporter.start(versions=versions(), devices=devices(job.device), choices=choices.reasons | {"role": ranks.name})
    order = range((WARM_UP_STEPS + TIMED_STEPS) * spec.roles.drafter)
    if not ranks.is_drafter:
        _send(job, order, choices.dtype)
        ranks.leave()
        return {}
    with meter.part("load"):
        target = synthetic.stand_in(spec, device=job.device, dtype=choices.dtype)
        bench = workbench.build(
            spec, choices, meter=meter, embed=target.embed, head_VH=target.head_VH, peers=ranks.peers
        )
    layout, mine = synthetic.worst_layout(spec), ranks.roles.share(ranks.rank, order.start, order.stop)
    inbox = Inbox(ranks.roles, Shape.of(spec, choices.dtype), mine, job.device) if spec.roles.target else None
    parts = []
    meter.seconds()
    for step, number in enumerate(mine, start=1):
        meter.step = step
        own = synthetic.batch(spec, layout, like=bench.head_VH, position=number)
        with meter.part("wait"):
            batch = own if inbox is None else batch_of(own.parts, own.keys, inbox.take().states)
        result = run_step(step, [micro_batch_of(bench, batch, layout)], bench)
        parts.append(meter.seconds())
    if inbox is not None:
        inbox.finish()
    refuse_non_finite(bench)
    _refuse_other_weights(ranks, bench)
    values = learnt(result.sums)
    ranks.leave()
    timed = parts[WARM_UP_STEPS:]
    split = {f"{name}_s": statistics.median(each[name] for each in timed) for name in ("wait", "step")}
    return values | split | {"processes": float(NUM_PROCESSES), "warm_up_s": parts[0]["step"]}


def _send(job: Job, order: range, dtype: torch.dtype) -> None:
    """A target rank without a target: hidden states of the right shape, through the queue."""
    spec = job.spec
    outbox, like = Outbox(job.ranks.roles, Shape.of(spec, dtype)), torch.empty(0, device=job.device, dtype=dtype)
    for number in order:
        batch = synthetic.batch(spec, synthetic.worst_layout(spec), like=like, position=number)
        outbox.put(number, batch.row.input_ids_S, HiddenStates(batch.features_SC, batch.teacher))
    outbox.finish()


def _refuse_other_weights(ranks: Ranks, bench: workbench.Workbench) -> None:
    """Gradients were added up on all drafters, or they drift apart from the first step on."""
    sums = torch.stack([tensor.detach().double().sum() for tensor in bench.drafter.parameters()])
    spread = ranks.peers.largest(sums) + ranks.peers.largest(-sums)
    if bool((spread != 0).any()):
        names = [
            name for name, differs in zip(dict(bench.drafter.named_parameters()), spread != 0, strict=True) if differs
        ]
        raise RungFailed(f"{len(names)} of {len(sums)} tensors differ between two drafters, {names[0]} among them")
