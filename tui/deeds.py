"""What a person can do to a run from the screens: each deed is one function of orchestrator.actions.

The modules behind them are heavy and are loaded when the first deed is done. Deeds block: the
screens run them in a thread, after asking where something could be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.actions.places import Places
from orchestrator.actions.wishes import can_stop, grace_s
from orchestrator.store.rows import IntentRow, RunRow
from tui.detail import RunDetail, newest_samples
from tui.ordering import actions
from tui.wording import hosts_told, state_word


@dataclass(frozen=True)
class Deed:
    name: str  # as the CLI's verb
    words: str  # what it does, for the palette
    why_not: Callable[[RunRow, Sequence[IntentRow]], str]  # with the run's open wishes; empty where it can be done
    do: Callable[[Places, str], str]  # (places, run id) -> one line that says what was done
    warning: str = ""  # what may be lost; asked before it is done
    is_for_ours: bool = (
        False  # the bundled trainer's runs alone: what a script of one's own wrote, nobody else can read
    )


def _stop(places: Places, run_id: str) -> str:
    done = actions("life").stop(places, run_id)
    if done.has_called_off_retry:
        return f"{run_id}: its retry is called off; it stays {state_word(done.run.state)}"
    return f"{run_id}: asked to stop; it is stopped when its processes are gone and the GPU memory is back"


def _resume(places: Places, run_id: str) -> str:
    launched = actions("jobs").resume(places, run_id)
    return f"{run_id}: attempt {launched.attempt} started on {launched.host}"


def _evaluate(places: Places, run_id: str) -> str:
    launched = actions("jobs").evaluate(places, run_id)
    return f"{run_id}: evaluation {launched.run_id} started on {launched.host}"


def _export(places: Places, run_id: str) -> str:
    launched = actions("jobs").export(places, run_id)
    return f"{run_id}: export {launched.run_id} started on {launched.host}"


def _remove(places: Places, run_id: str) -> str:
    actions("keeping").remove(places, [run_id])
    return f"{run_id}: in the bin; draftyard restore {run_id} takes it out again"


def _not_live(run: RunRow, wishes: Sequence[IntentRow]) -> str:
    return "" if can_stop(run, wishes) else f"it is {state_word(run.state)}, and no retry is to come"


def _not_ended(run: RunRow, _wishes: Sequence[IntentRow]) -> str:
    return "" if run.state.is_final else f"it is {state_word(run.state)}: stop it first"


def _no_ended_training(run: RunRow, wishes: Sequence[IntentRow]) -> str:
    return _not_ended(run, wishes) if run.kind == "train" else f"it is a job of kind {run.kind}, no training"


_STOP_WARNING = "The job is asked to end and may save first."
_CALL_OFF_WARNING = "It has ended; what is called off is the retry that is to come."

DEEDS = (
    Deed("stop", "Stop the run and free its GPUs", _not_live, _stop, _STOP_WARNING),
    Deed("resume", "Start a new attempt from the last checkpoint", _no_ended_training, _resume),
    Deed(
        "evaluate",
        "Measure the acceptance length of the newest checkpoint",
        _no_ended_training,
        _evaluate,
        is_for_ours=True,
    ),
    Deed(
        "export", "Write the drafter as a folder that public tools load", _no_ended_training, _export, is_for_ours=True
    ),
    Deed("rm", "Move the run to the bin", _not_ended, _remove, "Nothing is deleted; `restore` takes it out again."),
)


def deed_named(name: str) -> Deed:
    return next(deed for deed in DEEDS if deed.name == name)


def asking(deed: Deed, run: RunRow, gpus: tuple[int, ...], spec: Mapping[str, Any] | None) -> list[str]:
    """The question before a deed: it names the run, the host and the GPUs; `spec`: the run's own, None until it is read."""
    where = f"on {hosts_told(run, gpus)}"
    step = f", step {run.step:,}" if run.step is not None else ""
    warning = _stop_warning(run, spec) if deed.name == "stop" else deed.warning
    return [f"{deed.name} {run.recipe}/{run.branch}  {run.id}", where + step, warning]


def _stop_warning(run: RunRow, spec: Mapping[str, Any] | None) -> str:
    """A checkpoint is promised of the bundled trainer alone; what another job saves is its own affair."""
    if run.state.is_final:
        return _CALL_OFF_WARNING
    if spec is None:
        return f"{_STOP_WARNING} What has not ended after its grace is killed."
    saves = " The trainer writes a checkpoint." if run.kind == "train" and spec.get("entry") == "dflash" else ""
    return f"{_STOP_WARNING}{saves} What has not ended after its grace of {grace_s(spec):g} s is killed."


def gpus_of(detail: RunDetail) -> tuple[int, ...]:
    return tuple(sample.gpu for sample in newest_samples(detail.gpu_samples))
