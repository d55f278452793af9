"""The job `train`: from a spec to a trained, evaluated drafter. Read `train` from top to bottom.

Everything the loop does is said as it happens: choices with their reasons, sizes before the first
step, metrics by the names of `remote.wire`, peaks by stage, every checkpoint. The same spec and seed
give the same steps; a second attempt goes on from the newest whole checkpoint as if nothing had been.

The arithmetic of a step lives in `step`, of the loss in `loss`, of the update in `optim`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial

from torch.nn import functional as F

from remote.drafter import checkpoint, workbench
from remote.drafter.checkpoint import CorruptCheckpoint, Position
from remote.drafter.data import Dataset, read_chats
from remote.drafter.evaluate import EvaluationRow, evaluate
from remote.drafter.feed import Feed, OwnFeed, QueuedFeed
from remote.drafter.job import Job, StopWish, devices, failures_placed, versions
from remote.drafter.log import Window, log_step, stop_at_non_finite
from remote.drafter.measure import Meter, give_back
from remote.drafter.metrics import Metrics
from remote.drafter.model import DFlashDrafter
from remote.drafter.prepare import load_rows
from remote.drafter.queue import Inbox, Shape
from remote.drafter.snapshot import stop_recording
from remote.drafter.step import MicroBatch, anchor_slots, assemble, run_step
from remote.drafter.target import Target, load_target, tables
from remote.drafter.target_files import target_folder
from remote.drafter.workbench import Choices, Workbench
from remote.plan.sizes import holds_target
from remote.rundir import step_of
from remote.spec import DFlashSpec

RECORDED_STEPS = 10  # who allocates what; every step has the same shapes, so later ones take what these took


def train(job: Job, stop: StopWish) -> str:
    """Trains to the last step, or to the end of the step in which a stop is wished. Returns the outcome.

    ValueError for what the user can mend, NonFiniteError when a loss or gradient is not finite.
    """
    meter = Meter(job.device)
    choices = choose(job, meter)
    bench, dataset, target = load_all(job, choices, meter)
    if take_steps(job, stop, bench, dataset) == "stopped":
        return "stopped"
    if job.spec.evaluate.at_end and job.ranks.peers.is_first:
        job.reporter.stage("evaluating")
        meter.step, drafter = None, bench.drafter
        # The whole target comes back: what only the steps needed, most of all masters and moments, makes room for it.
        del bench
        give_back(job.device)
        with failures_placed(job, meter, stage="evaluating"), meter.part("evaluating"):
            measure_acceptance(job, drafter, target or load(job, choices), step=job.spec.train.num_steps)
        meter.say_peaks(job.reporter)
    return "succeeded"


def choose(job: Job, meter: Meter) -> Choices:
    """Choices and sizes, said before anything heavy."""
    choices = workbench.choose(job.spec, job.device)
    with failures_placed(job, meter):
        choices = workbench.agree(choices, job.ranks)
    job.reporter.start(versions=versions(), devices=devices(job.device), choices=choices.reasons)
    job.say(workbench.numbers(job.spec))
    for name, reason in choices.reasons.items():
        job.log(f"  {name}: {reason}")
    return choices


def load_all(job: Job, choices: Choices, meter: Meter) -> tuple[Workbench, Dataset, Target | None]:
    """The drafter with what trains it, and the rows. The target is None where steps need it no longer: its layers' memory
    is the drafter's until the evaluation.
    """
    job.reporter.stage("loading")
    with failures_placed(job, meter), meter.part("target"):
        loaded = load(job, choices)
        dataset = read_rows(job, loaded)
        is_needed = holds_target(job.spec)
        embedding_VH, head_VH = tables(loaded, outlive_it=not is_needed)
        target = loaded if is_needed else None
        del loaded
    give_back(job.device)
    with failures_placed(job, meter), meter.part("load"):
        embed = partial(F.embedding, weight=embedding_VH)
        bench = workbench.build(job.spec, choices, meter=meter, embed=embed, head_VH=head_VH, peers=job.ranks.peers)
    job.say(f"data: {dataset.summary()}")
    meter.say_peaks(job.reporter)
    return bench, dataset, target


def take_steps(job: Job, stop: StopWish, bench: Workbench, dataset: Dataset) -> str:
    """From the newest checkpoint to the last step, or to the one in which a stop is wished; the outcome."""
    train, peers, meter = job.spec.train, job.ranks.peers, bench.meter
    position = resume_all(job, bench)
    feed, first = _feed(job, dataset, bench, position), position.step + 1
    num_slots = anchor_slots(job.spec.data, most_documents=dataset.most_documents)
    window, logged = Window(), list[Metrics]()  # since the last log line; of each step since the last checkpoint
    micro_batches: list[MicroBatch] = []
    is_stopping = False
    job.reporter.stage("training")
    meter.seconds()  # the clock of the first step starts here
    with failures_placed(job, meter), stop.finishing_steps(), closing(feed):
        for step in range(first, train.num_steps + 1):
            meter.step = step
            with meter.part("wait"):
                micro_batches = [
                    assemble(feed.take(), bench, num_slots=num_slots) for _ in range(train.accumulation // peers.num)
                ]
            if step == first + RECORDED_STEPS and not train.record_allocations:
                stop_recording(job.device)
            window.add(step, run_step(step, micro_batches, bench), micro_batches)
            # Once: a wish that comes while it is logged waits for the next.
            is_stopping = peers.agree(stop.is_wanted or feed.is_stop_wished)
            is_last = step == train.num_steps or is_stopping
            is_saved = step % train.checkpoint_every == 0 or is_last
            if step % train.log_every == 0 or is_saved:
                logged += _log(job, step, window, bench, feed)
                window = Window()
            if is_saved:
                position, logged = _saved(job, bench, position, step, logged, is_last=is_last), []
            if is_stopping:
                job.say(f"stopped after step {step}, as wished")
                break
        told = feed.finish()
        if told is not None:
            job.say(told)
        job.ranks.leave()
    return "stopped" if is_stopping else "succeeded"


def _log(job: Job, step: int, window: Window, bench: Workbench, feed: Feed) -> list[Metrics]:
    """The line of a window, once for each of its steps: every step counts alike."""
    values = log_step(job, step, window, bench, feed.told())
    stop_at_non_finite(job, window, bench)
    bench.meter.say_peaks(job.reporter)
    return [values] * window.num_steps


def _saved(
    job: Job, bench: Workbench, before: Position, step: int, logged: Sequence[Metrics], *, is_last: bool
) -> Position:
    """Where the training stands after the step, written by the first drafter."""
    train = job.spec.train
    rows_seen = before.rows_seen + (step - before.step) * train.rows_per_step * train.accumulation
    position = Position(step, rows_seen, _mean("loss", logged), _mean("acceptance_length", logged))
    with bench.meter.part("checkpoint"):
        if job.ranks.peers.is_first:
            with job.ranks.saving():
                save(job, bench, position, is_last=is_last)
    return position


def _mean(name: str, logged: Sequence[Metrics]) -> float | None:
    """Over the steps that have it: acceptance is left out where a window had no block to count."""
    values = [value for step in logged if isinstance(value := step.get(name), float)]
    return sum(values) / len(values) if values else None


def measure_acceptance(job: Job, drafter: DFlashDrafter, target: Target, *, step: int) -> None:
    """Decodes held-out prompts with and without the drafter and reports what came of it, each row when it is known."""

    def report(row: EvaluationRow) -> None:
        for text in row.notes:
            job.say(text)
        job.reporter.evaluation(step, protocol=row.protocol, values=row.values)

    prompts = read_chats(job.data_dir / job.spec.data.held_out)
    progress = job.reporter.progress
    job.say(evaluate(drafter, target, job.spec, prompts=prompts, progress=progress, on_row=report).summary)


def load(job: Job, choices: Choices) -> Target:
    """The target on the job's device; what takes long is said on the way."""
    progress = job.reporter.progress
    # transformers saves on rank 0 alone once ranks have met: on another one a conversion would leave no weights.
    job.ranks.before_others(lambda: target_folder(job.spec.target.source, cache=job.cache, progress=progress))
    return load_target(job.spec.target, cache=job.cache, device=job.device, dtype=choices.dtype, progress=progress)


def read_rows(job: Job, target: Target) -> Dataset:
    """The training rows; where ranks have the target to themselves, their hidden states are not this dataset's."""
    return load_rows(
        job.spec,
        target,
        data_dir=job.data_dir,
        cache=job.cache,
        progress=job.reporter.progress,
        has_states=not job.ranks.roles.num_targets,
    )


def _feed(job: Job, dataset: Dataset, bench: Workbench, start: Position) -> Feed:
    """This rank's micro-batches that are still to come, from the first row not yet seen."""
    spec, ranks = job.spec, job.ranks
    mine = ranks.roles.share(ranks.rank, *span(spec, start))
    rows = spec.train.rows_per_step
    if not ranks.roles.num_targets:
        return OwnFeed(dataset.batches(mine, num_rows=rows, num_workers=spec.data.num_workers))
    shape = Shape.of(spec, bench.head_VH.dtype)
    return QueuedFeed(dataset, Inbox(ranks.roles, shape, mine, job.device), ranks.roles, shape, spec.train)


def span(spec: DFlashSpec, start: Position) -> tuple[int, int]:
    """The micro-batches of the stream that are still to be trained on, by all ranks: first, and one after the last."""
    first = start.rows_seen // spec.train.rows_per_step
    return first, first + (spec.train.num_steps - start.step) * spec.train.accumulation


def resume_all(job: Job, bench: Workbench) -> Position:
    """The first rank resumes; every rank hears where, and drafters take its weights and the optimizer's tensors."""
    position = resume(job, bench) if job.ranks.rank == 0 else Position(step=0, rows_seen=0)
    step, rows_seen = job.ranks.from_first([position.step, position.rows_seen])
    if step > 0:
        bench.peers.take_from_first([*bench.drafter.state_dict().values(), *bench.optimizer.state().values()])
    return position if job.ranks.rank == 0 else Position(step, rows_seen)


def resume(job: Job, bench: Workbench) -> Position:
    """Fills the workbench from the newest whole checkpoint; a corrupt one is said and passed over for an older one."""
    checkpoint.sweep(job.run.checkpoints)
    for folder in reversed(job.run.whole_checkpoints()):
        try:
            position = checkpoint.load(folder, model=bench.drafter, optimizer=bench.optimizer, spec=job.spec)
        except CorruptCheckpoint as error:
            job.say(f"passed over: {error}")
            continue
        job.say(f"resumed after step {position.step} from {folder.relative_to(job.run.root)}")
        return position
    return Position(step=0, rows_seen=0)


def save(job: Job, bench: Workbench, position: Position, *, is_last: bool) -> None:
    """Saves, prunes and reports; a full disk costs this checkpoint and a note, not the run, unless it is the last one."""
    folder = job.run.checkpoint(position.step)
    try:
        size_bytes = checkpoint.save(folder, position, model=bench.drafter, optimizer=bench.optimizer, spec=job.spec)
    except OSError as error:
        told = f"the checkpoint of step {position.step} could not be written: {error}"
        if is_last:  # what the run has learnt since the one before would be lost without a word
            raise OSError(error.errno, told) from None
        job.say(told)
        return
    whole = job.run.whole_checkpoints()
    removed = checkpoint.prune(whole, saved=folder, keep_last=job.spec.train.keep_last, tell=job.say)
    is_best = checkpoint.best_of([kept for kept in whole if kept not in removed]) == folder
    path = str(folder.relative_to(job.run.root))
    job.reporter.checkpoint(position.step, path=path, size_bytes=size_bytes, is_best=is_best)
    for gone in removed:
        job.reporter.checkpoint_removed(step_of(gone), path=str(gone.relative_to(job.run.root)))
