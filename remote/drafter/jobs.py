"""The jobs that need the target, as `__main__` calls them: train, prepare, evaluate, export."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from remote.drafter import checkpoint, workbench
from remote.drafter.checkpoint import CheckpointError
from remote.drafter.export import export_drafter
from remote.drafter.job import Job, StopWish, devices, versions
from remote.drafter.model import DFlashDrafter
from remote.drafter.prepare import prepare
from remote.drafter.target_rank import run_target
from remote.drafter.train import load, measure_acceptance, train
from remote.drafter.workbench import Choices


def run_train(job: Job, stop: StopWish) -> str:
    """Trains, or serves those that do: each rank does what its role is."""
    return train(job, stop) if job.ranks.is_drafter else run_target(job, stop)


def run_prepare(job: Job, stop: StopWish) -> str:
    """Makes what training would make first, and leaves the answers among the attempt's artifacts."""
    target = load(job, _begin(job))
    job.reporter.stage("preparing")
    prepared = prepare(job.spec, target, data_dir=job.data_dir, cache=job.cache, progress=job.reporter.progress)
    job.attempt.artifacts.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(prepared.answers, job.attempt.artifacts / Path(job.spec.data.answers).name)  # it may be a path
    job.say(prepared.summary)
    return "succeeded"


def run_evaluate(job: Job, stop: StopWish) -> str:
    """Measures the newest whole checkpoint by decoding held-out prompts."""
    choices = _begin(job)
    drafter, step = _trained(job, choices)
    target = load(job, choices)
    job.reporter.stage("evaluating")
    measure_acceptance(job, drafter, target, step=step)
    return "succeeded"


def run_export(job: Job, stop: StopWish) -> str:
    """Writes the newest whole checkpoint as a folder that public tools load, among the attempt's artifacts."""
    drafter, step = _trained(job, _begin(job))
    folder = export_drafter(drafter, job.spec, job.attempt.artifacts / "export", step=step)
    job.say(f"exported to {folder.relative_to(job.run.root)}")
    return "succeeded"


JOBS: dict[str, Callable[[Job, StopWish], str]] = {
    "train": run_train,
    "prepare": run_prepare,
    "evaluate": run_evaluate,
    "export": run_export,
}


def _begin(job: Job) -> Choices:
    choices = workbench.choose(job.spec, job.device)
    job.reporter.start(versions=versions(), devices=devices(job.device), choices=choices.reasons)
    job.reporter.stage("loading")
    return choices


def _trained(job: Job, choices: Choices) -> tuple[DFlashDrafter, int]:
    """The drafter of the newest whole checkpoint, and its step."""
    whole = job.run.whole_checkpoints()
    if not whole:
        raise CheckpointError(f"{job.run.checkpoints} holds no checkpoint; train first")
    drafter = workbench.fresh_drafter(job.spec, choices, device=job.device)
    position = checkpoint.load(whole[-1], model=drafter, spec=job.spec)
    job.say(f"checkpoint of step {position.step}: {whole[-1].relative_to(job.run.root)}")
    return drafter, position.step
