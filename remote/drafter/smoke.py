"""The rungs of the smoke ladder: short checks of the whole training step at the worst batch a recipe allows.

| rung       | passes when |
|---|---|
| fwd        | the loss of the worst batch is finite |
| fwd_bwd    | after a warm-up, the timed optimizer steps are finite and move every trained tensor |
| multi_doc  | a packed row of three documents trains, positions restart, no label crosses a document |
| leak       | no block sees what it must not see, and each sees what it may; see `leak` |
| checkpoint | a new process that loads the checkpoint gets the same loss |
| ranks      | two processes train as a launch of the recipe's roles would; see `ranks_rung` |

Each gives time, peaks by stage, loss, accuracy and streak. A rung runs in a process of its own,
started by `ladder`; forward alone never unlocks a launch.
"""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from remote.drafter import checkpoint, synthetic, workbench
from remote.drafter.checkpoint import Position
from remote.drafter.data import Batch
from remote.drafter.job import Job, devices, versions
from remote.drafter.leak import label_findings, probe
from remote.drafter.loss import LossSums
from remote.drafter.measure import Meter
from remote.drafter.metrics import metrics
from remote.drafter.snapshot import stop_recording
from remote.drafter.step import MicroBatch, anchor_slots, assemble, forward, run_step
from remote.drafter.workbench import Workbench
from remote.rundir import read_json, write_json
from remote.spec import DFlashSpec

Values = dict[str, float]

WARM_UP_STEPS = 1
CHECKPOINT_STEPS = 2
SMALL_ROW_TOKENS, SMALL_ANCHORS = 512, 16  # of the checkpoint rung, and its drafter's layers and width:
SMALL_LAYERS, SMALL_CAPTURED, SMALL_INNER = 2, 1, 1024  # 2 GiB on disk where the 27B drafter's would be 23
SCHEDULE_STEPS = 10_000  # a rung's few steps stand at the beginning of the schedule, however short the training is
# Relative, of the loss now and after a step: sums may go in another order, on a card and on a processor whose library looks
# at where operands lie in memory (9e-7 was seen), and AdamW's first steps turn the sign of a gradient that is nearly zero
# into a whole step (7e-5 was seen on an H200). That the state is the same is held bit for bit.
TOLERANCES = (1e-5, 1e-3)


class RungFailed(RuntimeError):
    """A rung found what it looks for."""


def run_rung(job: Job, name: str, meter: Meter) -> Values:
    """Sets a workbench up and runs one rung on it; RungFailed, or whatever the step raises."""
    spec = replace(job.spec, train=replace(job.spec.train, num_steps=SCHEDULE_STEPS))
    spec = small(spec) if name.startswith("checkpoint") else spec
    choices = workbench.choose(spec, job.device)
    job.reporter.start(versions=versions(), devices=devices(job.device), choices=choices.reasons)
    with meter.part("load"):
        target = synthetic.stand_in(spec, device=job.device, dtype=choices.dtype)
        bench = workbench.build(spec, choices, meter=meter, embed=target.embed, head_VH=target.head_VH)
    values = RUNGS[name](job, bench)
    meter.say_peaks(job.reporter)
    return values | meter.peak_values()


def fwd(job: Job, bench: Workbench) -> Values:
    micro_batch = _micro_batch(bench, synthetic.worst_layout(bench.spec))
    with torch.no_grad():
        bench.meter.seconds()
        for _ in range(WARM_UP_STEPS):
            with bench.meter.part("forward"):
                forward(micro_batch, bench)
        warm_up_s = bench.meter.seconds()["forward"]
        with bench.meter.part("forward"):
            sums = forward(micro_batch, bench)
    return learnt(sums) | {"warm_up_s": warm_up_s, "forward_s": bench.meter.seconds()["forward"]}


def fwd_bwd(job: Job, bench: Workbench) -> Values:
    return timed_steps(job, bench, _micro_batches(bench, synthetic.worst_layout(bench.spec)))


def timed_steps(job: Job, bench: Workbench, micro_batches: Sequence[MicroBatch]) -> Values:
    """A warm-up and the timed optimizer steps, all on these; RungFailed: not finite, or a tensor that never moves."""
    before = _samples(bench)
    parts = []
    bench.meter.seconds()
    for step in range(1, WARM_UP_STEPS + max(3, bench.spec.smoke.timed_steps) + 1):
        if step == WARM_UP_STEPS + 1 and not bench.spec.train.record_allocations:
            stop_recording(job.device)  # these are timed as a training's are, and take what the warm-up took
        bench.meter.step = step
        result = run_step(step, micro_batches, bench)
        parts.append(bench.meter.seconds())
    refuse_non_finite(bench)
    still = [name for name, sample in _samples(bench).items() if torch.equal(sample, before[name])]
    _judge_still(job, bench, still)
    timed = parts[WARM_UP_STEPS:]
    split = {f"{name}_s": statistics.median(each[name] for each in timed) for name in _TIMED}
    return learnt(result.sums) | split | {"warm_up_s": parts[0]["step"]}


def multi_doc(job: Job, bench: Workbench) -> Values:
    micro_batches = _micro_batches(bench, synthetic.multi_doc_layout(bench.spec))
    findings = [finding for each in micro_batches for finding in label_findings(each.row, each.blocks)]
    bench.meter.seconds()
    result = run_step(1, micro_batches, bench)
    seconds = bench.meter.seconds()
    refuse_non_finite(bench)
    refuse(findings)
    return learnt(result.sums) | {f"{name}_s": seconds[name] for name in _TIMED}


def leak(job: Job, bench: Workbench) -> Values:
    micro_batch = _micro_batch(bench, synthetic.multi_doc_layout(bench.spec))
    bench.meter.seconds()
    with bench.meter.part("forward"), torch.no_grad():
        sums = forward(micro_batch, bench)
        findings = probe(micro_batch, bench)
    refuse(findings)
    return learnt(sums) | {"probe_s": bench.meter.seconds()["forward"]}


def checkpoint_save(job: Job, bench: Workbench) -> Values:
    """First half of the round trip: two steps, a checkpoint, and what the run does next."""
    micro_batches = _micro_batches(bench, synthetic.worst_layout(bench.spec))
    for step in range(1, CHECKPOINT_STEPS + 1):
        run_step(step, micro_batches, bench)
    refuse_non_finite(bench)
    with bench.meter.part("checkpoint"):
        position = Position(CHECKPOINT_STEPS, rows_seen=0)
        size_bytes = checkpoint.save(
            _saved(job), position, model=bench.drafter, optimizer=bench.optimizer, spec=bench.spec
        )
    save_s = bench.meter.seconds()["checkpoint"]
    kept = {"bits": _bits(bench), "losses": _next_losses(bench, micro_batches)}
    write_json(_saved(job).with_suffix(".json"), kept)
    return {"size_bytes": size_bytes, "save_s": save_s}


def checkpoint_load(job: Job, bench: Workbench) -> Values:
    """Second half, in a new process: what the optimizer keeps is the same bit for bit, and the loss, and the loss after one
    more step, but for the order of sums: a card's, and a processor's where operands lie otherwise in memory."""
    micro_batches = _micro_batches(bench, synthetic.worst_layout(bench.spec))
    kept = read_json(_saved(job).with_suffix(".json"))
    if kept is None:
        raise RungFailed("the process that should have saved the checkpoint left none")
    try:
        bench.meter.seconds()
        with bench.meter.part("checkpoint"):
            checkpoint.load(_saved(job), model=bench.drafter, optimizer=bench.optimizer, spec=bench.spec)
        load_s = bench.meter.seconds()["checkpoint"]
    finally:
        shutil.rmtree(_saved(job), ignore_errors=True)
    wrong = [name for name, bits in _bits(bench).items() if kept["bits"].get(name) != bits]
    if wrong:
        raise RungFailed(
            f"of the optimizer's {len(kept['bits'])} tensors {len(wrong)} came back otherwise, {wrong[0]} among them"
        )
    found = _next_losses(bench, micro_batches)
    for expected, again, tolerance in zip(kept["losses"], found, TOLERANCES, strict=True):
        if not math.isclose(expected, again, rel_tol=tolerance):
            raise RungFailed(
                f"losses before the save {kept['losses']}, after the load {found}; they must be equal but for rounding"
            )
    return {"loss": found[0], "loss_after_step": found[1], "load_s": load_s}


def small(spec: DFlashSpec) -> DFlashSpec:
    """A shorter and thinner drafter on little work, with the attention that compiles nothing.

    A round trip is about what is stored: every kind of tensor under its name, in its type, with the optimizer's. How
    many there are shows nothing more, and twenty gigabytes there and back take longer than the rest of the ladder.
    """
    data = replace(
        spec.data,
        row_tokens=min(spec.data.row_tokens, SMALL_ROW_TOKENS),
        max_anchors=min(spec.data.max_anchors, SMALL_ANCHORS),
        anchors_per="row",
    )
    drafter = replace(
        spec.drafter,
        num_layers=min(spec.drafter.num_layers, SMALL_LAYERS),
        layer_types=spec.drafter.layer_types[-SMALL_LAYERS:],  # the last two: where kinds are mixed, both
        intermediate_size=min(spec.drafter.intermediate_size, SMALL_INNER),
        captured_layers=spec.drafter.captured_layers[:SMALL_CAPTURED],
        attention="sdpa",
        init_from=None,
    )
    return replace(spec, data=data, drafter=drafter)


RUNGS: dict[str, Callable[[Job, Workbench], Values]] = {
    "fwd": fwd,
    "fwd_bwd": fwd_bwd,
    "multi_doc": multi_doc,
    "leak": leak,
    "checkpoint_save": checkpoint_save,
    "checkpoint": checkpoint_load,
}

_TIMED = ("forward", "backward", "optimizer", "step")


def _micro_batch(bench: Workbench, layout: Sequence[int], *, position: int = 0) -> MicroBatch:
    return micro_batch_of(bench, synthetic.batch(bench.spec, layout, like=bench.head_VH, position=position), layout)


def micro_batch_of(bench: Workbench, batch: Batch, layout: Sequence[int]) -> MicroBatch:
    """A batch of that layout, ready for a step."""
    return assemble(batch, bench, num_slots=anchor_slots(bench.spec.data, most_documents=len(layout)))


def _micro_batches(bench: Workbench, layout: Sequence[int]) -> list[MicroBatch]:
    """Those of one optimizer step."""
    return [_micro_batch(bench, layout, position=index) for index in range(bench.spec.train.accumulation)]


def _bits(bench: Workbench) -> dict[str, int]:
    """A checksum of the bits of each tensor that the optimizer keeps."""
    as_integers = {2: torch.int16, 4: torch.int32}
    state = bench.optimizer.state()
    return {
        name: int(each.view(as_integers[each.element_size()]).sum(dtype=torch.int64)) for name, each in state.items()
    }


def _next_losses(bench: Workbench, micro_batches: Sequence[MicroBatch]) -> list[float]:
    """The loss now, and once more after another step: the second needs the optimizer's state to be right."""
    losses = []
    for step in (CHECKPOINT_STEPS + 1, None):
        with torch.no_grad():
            losses.append(_loss(forward(micro_batches[0], bench)))
        if step is not None:
            run_step(step, micro_batches, bench)
    return losses


def learnt(sums: LossSums) -> Values:
    """Loss, accuracy and streak; RungFailed where the loss is not finite."""
    values = metrics(sums)
    found = {name: values[name] for name in ("loss", "accuracy", "streak") if name in values}
    if not math.isfinite(_loss(sums)):
        raise RungFailed(f"the loss is {found['loss']}")
    return found  # type: ignore[return-value]  # these three are single numbers


def _loss(sums: LossSums) -> float:
    return float(metrics(sums)["loss"])  # type: ignore[arg-type]  # a single number


def _judge_still(job: Job, bench: Workbench, still: Sequence[str]) -> None:
    """A trained tensor that never moved fails the rung, but for what the recipe chose: norms without fp32 masters.

    A bfloat16 weight near 1.0 has steps of 2^-8, far above a learning rate, so rounding takes each update back.
    """
    trained = bench.optimizer.trained()
    rounded = [name for name in still if trained[name].ndim == 1 and trained[name].dtype == torch.bfloat16]
    wrong = [name for name in still if name not in rounded]
    if wrong:
        raise RungFailed(f"{len(wrong)} of {len(trained)} trained tensors never moved, {wrong[0]} among them")
    if rounded:
        job.say(
            f"{len(rounded)} norms did not move, {rounded[0]} among them: optim.master_dtype is none, and in bfloat16 "
            "such small updates round away; optim.master_dtype: float32 trains them"
        )


def _samples(bench: Workbench) -> dict[str, Tensor]:
    """About a thousand numbers of each trained tensor: a whole copy would be a peak that training has not."""
    trained = {name: tensor.flatten() for name, tensor in bench.optimizer.trained().items()}
    return {name: flat[:: max(1, flat.numel() // 1024)].clone() for name, flat in trained.items()}


def _saved(job: Job) -> Path:
    return job.attempt.artifacts / "smoke-checkpoint"


def refuse(findings: Sequence[str]) -> None:
    """RungFailed, one line of all of them, where there are any."""
    if findings:
        raise RungFailed("; ".join(findings))


def refuse_non_finite(bench: Workbench) -> None:
    found = bench.optimizer.latch.read()
    if found is not None:
        raise RungFailed(f"{found.term} is not finite at step {found.step}")
