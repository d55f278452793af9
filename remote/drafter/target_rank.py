"""A rank that only runs the target: it computes the hidden states of its micro-batches and sends them to the drafters.

It reads the same rows as the drafters, from the same files, in the same order, and never sees a weight of theirs. It
ends when its last micro-batch is sent, or when the drafters, who alone decide, want no more: that it was told to stop, as
where its host holds targets alone, goes to them with its batches.
"""

from __future__ import annotations

from remote.balance import Pace
from remote.drafter import workbench
from remote.drafter.blocks import PAD_DOCUMENT, Row, join_rows
from remote.drafter.checkpoint import Position
from remote.drafter.data import Dataset, HiddenStates
from remote.drafter.job import Job, StopWish, devices, failures_placed, versions
from remote.drafter.measure import Meter
from remote.drafter.queue import Outbox, Shape
from remote.drafter.target import Target
from remote.drafter.train import load, read_rows, span


def run_target(job: Job, stop: StopWish) -> str:
    """Computes and sends until the drafters have all they want. Returns the outcome."""
    spec, reporter, meter = job.spec, job.reporter, Meter(job.device)
    choices = workbench.choose(spec, job.device, checks=workbench.UNASKED)
    with failures_placed(job, meter):
        choices = workbench.agree(choices, job.ranks)
    reporter.start(versions=versions(), devices=devices(job.device), choices={"role": job.ranks.name})
    reporter.stage("loading")
    with failures_placed(job, meter), meter.part("target"):
        target = load(job, choices)
        dataset = read_rows(job, target)
    with failures_placed(job, meter), stop.finishing_steps():
        step, rows_seen = job.ranks.from_first([0, 0])
        reporter.stage("serving hidden states")
        mine = job.ranks.roles.share(job.ranks.rank, *span(spec, Position(step, rows_seen)))
        told = serve(job, target, dataset, mine, meter=meter, stop=stop)
        job.say(told)
        job.ranks.leave()
    return "stopped" if stop.is_wanted else "succeeded"


def serve(job: Job, target: Target, dataset: Dataset, mine: range, *, meter: Meter, stop: StopWish) -> str:
    """Sends micro-batch after micro-batch; a line for a person about what was sent and what was dropped."""
    outbox = Outbox(job.ranks.roles, Shape.of(job.spec, target.dtype), is_stop_wished=lambda: stop.is_wanted)
    for count, micro_batch in enumerate(mine):
        row = join_text(dataset, micro_batch, num_rows=job.spec.train.rows_per_step)
        with meter.part("forward"):
            states = HiddenStates(
                *target.capture(
                    row.input_ids_S, row.document_S, row.position_S, layers=job.spec.drafter.captured_layers
                )
            )
        pace = outbox.put(micro_batch, row.input_ids_S, states)
        if pace is None:
            outbox.finish()
            return (
                f"{count} of {len(mine)} batches sent, then the drafters wanted no more; 1 that was computed is dropped"
            )
        _tell(job, micro_batch, pace, num_tokens=int((row.document_S != PAD_DOCUMENT).sum()))
        meter.say_peaks(job.reporter)
    outbox.finish()
    return f"all of {len(mine)} batches sent"


def join_text(dataset: Dataset, micro_batch: int, *, num_rows: int) -> Row:
    """The tokens of a micro-batch, its rows joined as the drafter joins them."""
    parts = [dataset.packed(row) for _, row in dataset.keys(micro_batch, num_rows=num_rows)]
    return parts[0] if num_rows == 1 else join_rows(parts)


def _tell(job: Job, micro_batch: int, pace: Pace, *, num_tokens: int) -> None:
    """Seconds of a micro-batch, as the metrics of the step it belongs to, where that step is logged."""
    step = micro_batch // job.spec.train.accumulation + 1
    if step % job.spec.train.log_every == 0:
        seconds = pace.busy_s + pace.wait_s
        values = {"step_s": seconds, "forward_s": pace.busy_s, "wait_s": pace.wait_s}
        job.reporter.metrics(step, values | {"context_tokens_per_s": num_tokens / seconds})
