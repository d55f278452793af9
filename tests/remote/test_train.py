"""Training end to end on a tiny target: it learns, resumes bit for bit, stops when wished, says what went wrong."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.follow.importing import import_folder
from orchestrator.store.writes import Store
from remote import wire
from remote.drafter import checkpoint, hidden, real_rows, self_check, synthetic, teacher, workbench
from remote.drafter import train as training
from remote.drafter.blocks import join_rows
from remote.drafter.checkpoint import CheckpointError
from remote.drafter.data import Batch
from remote.drafter.job import StopWish
from remote.drafter.measure import Meter
from remote.drafter.optim import DrafterOptimizer, NonFiniteError
from remote.drafter.step import MicroBatch, assemble, run_step
from remote.drafter.teacher import Expectation
from remote.drafter.train import train
from remote.processes import Identity, send
from remote.report import Reporter
from remote.rundir import RunDir, write_json
from remote.spec import DFlashSpec, NoiseSpec
from tests import warm
from tests.remote.disks import disk_that_takes
from tests.remote.jobs import TREE, events, make_job, make_run, run_job, start_job, tiny_job_spec, wait_for

pytestmark = pytest.mark.slow  # whole trainings, however small


def losses(run: RunDir, attempt: int = 1) -> dict[int, float]:
    found = events(run, attempt=attempt, kind="metrics")
    return {event.fields["step"]: event.fields["values"]["loss"] for event in found}


class StopAfter(StopWish):
    """Wishes to stop in the step of that number; the loop looks once a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._steps_left = step

    @property
    def is_wanted(self) -> bool:
        self._steps_left -= 1
        return self._steps_left <= 0

    @is_wanted.setter
    def is_wanted(self, value: bool) -> None:
        pass


def test_a_training_learns_and_says_what_it_did(tmp_path: Path, tiny_target_spec, tiny_drafter_spec) -> None:
    spec = tiny_job_spec(
        tiny_target_spec,
        tiny_drafter_spec,
        train={"num_steps": 20, "checkpoint_every": 8, "keep_last": 1},
        optim={"lr": 3e-3},
    )
    job = make_job(tmp_path, spec)

    assert train(job, StopWish()) == "succeeded"

    found = list(losses(job.run).values())
    values = events(job.run, kind="metrics")[-1].fields["values"]
    memory = {event.fields["stage"] for event in events(job.run, kind="memory")}
    assert len(found) == 20
    assert sum(found[-4:]) < 0.8 * sum(found[:4])
    assert set(values) <= set(wire.METRIC_UNITS)
    assert {"loss_ce", "accuracy", "accuracy_at", "streak", "grad_norm", "lr", "step_s", "wait_s"} <= set(values)
    assert values["step_s"] >= values["forward_s"] + values["backward_s"] + values["optimizer_s"]
    assert memory == {"target", "load", "forward", "backward", "step"}
    assert [event.fields["step"] for event in events(job.run, kind="checkpoint")] == [8, 16, 20]
    assert 1 <= len(job.run.whole_checkpoints()) <= 2  # the last and the best
    gone = {event.fields["path"] for event in events(job.run, kind="checkpoint_removed")}
    kept = {str(folder.relative_to(job.run.root)) for folder in job.run.whole_checkpoints()}
    assert gone == {event.fields["path"] for event in events(job.run, kind="checkpoint")} - kept
    assert gone
    assert events(job.run, kind="start")[0].fields["choices"]["attention"].startswith("sdpa: auto")


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss", [{}, {"terms": {"ce": 1.0, "kl": 0.15, "cap": 0.05}, "decay": "dpace"}], ids=["ce", "all terms"]
)
def test_a_resumed_training_is_bit_equal_to_the_uninterrupted_one(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec, loss
) -> None:
    spec = tiny_job_spec(
        tiny_target_spec,
        tiny_drafter_spec,
        train={"num_steps": 6, "accumulation": 2, "rows_per_step": 2, "checkpoint_every": 2},
        data={"noise": NoiseSpec("gaussian", 0.05)},
        loss=loss,
    )
    whole = make_job(tmp_path / "whole", spec)
    train(whole, StopWish())

    first = make_job(tmp_path / "parts", spec)
    assert train(first, StopAfter(3)) == "stopped"
    torch.manual_seed(123)  # nothing of a training may hang on what this process drew before
    second = make_job(tmp_path / "parts", spec, attempt=2)
    assert train(second, StopWish()) == "succeeded"

    assert list(losses(first.run)) == [1, 2, 3]
    assert list(losses(second.run, attempt=2)) == [4, 5, 6]
    assert losses(first.run) | losses(second.run, attempt=2) == losses(whole.run)


LOSSES = {
    "ce and kl": {"terms": {"ce": 1.0, "kl": 0.15}, "gamma": 10.0},
    "kl alone": {"terms": {"kl": 1.0}},
    "the target's label": {
        "terms": {"ce": 1.0, "soft_ce": 0.5, "cap": 0.05},
        "label": "teacher_argmax",
        "decay": "dpace",
    },
}


@pytest.mark.usefixtures("without_triton")
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_loss_that_is_taught_ahead_trains_as_with_the_target_beside_the_drafter(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec, loss: dict[str, Any]
) -> None:
    found = {}
    for hidden_states in ("online", "cached"):
        spec = tiny_job_spec(
            tiny_target_spec,
            tiny_drafter_spec,
            train={"num_steps": 12, "accumulation": 2, "dtype": "float32"},
            data={"hidden_states": hidden_states},
            loss=loss,
            optim={"lr": 3e-3},
        )
        job = make_job(tmp_path / hidden_states, spec)
        assert train(job, StopWish()) == "succeeded"
        found[hidden_states] = [event.fields["values"] for event in events(job.run, kind="metrics")]

    assert len(list((tmp_path / "cached" / "cache" / "hidden").glob("*/expected-*.safetensors"))) == 1
    terms = {"loss", *(f"loss_{term}" for term in loss["terms"])}
    for beside, ahead in zip(found["online"], found["cached"], strict=True):
        for name in terms:
            assert ahead[name] == pytest.approx(beside[name], rel=1e-5), name
    assert found["cached"][-1]["loss"] != pytest.approx(found["cached"][0]["loss"], rel=1e-2)  # it has learnt something


@pytest.mark.parametrize("is_forbidden", [True, False])
def test_a_target_beside_the_drafter_is_never_asked_what_it_expects(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec, monkeypatch: pytest.MonkeyPatch, is_forbidden: bool
) -> None:
    """And a cached one is, by the same name: what is forbidden here is what is used there."""

    def never(*_: object) -> Expectation:
        raise AssertionError("nobody reads an expectation here")

    for module in (teacher, hidden, real_rows, self_check):
        monkeypatch.setattr(module, "expect", never)
    spec = tiny_job_spec(
        tiny_target_spec,
        tiny_drafter_spec,
        loss=LOSSES["ce and kl"],
        train={"num_steps": 2},
        data={"hidden_states": "online" if is_forbidden else "cached"},
    )
    job = make_job(tmp_path, spec)

    if is_forbidden:
        assert train(job, StopWish()) == "succeeded"
        assert real_rows.run_real(job, Meter(job.device))["loss"] > 0
        return
    for work in (lambda: train(job, StopWish()), lambda: real_rows.run_real(job, Meter(job.device))):
        with pytest.raises(AssertionError, match="nobody reads an expectation here"):
            work()


def test_accumulation_changes_memory_and_nothing_else(tmp_path: Path, tiny_target_spec, tiny_drafter_spec) -> None:
    """Four rows at once, or one by one, are the same step, up to the order of float additions."""
    found = []
    for rows_per_step, accumulation in ((4, 1), (1, 4)):
        spec = tiny_job_spec(
            tiny_target_spec,
            tiny_drafter_spec,
            train={"num_steps": 3, "rows_per_step": rows_per_step, "accumulation": accumulation},
            loss={"terms": {"ce": 1.0, "cap": 0.1}, "decay": "dpace"},
        )
        job = make_job(tmp_path / str(accumulation), spec)
        train(job, StopWish())
        found.append([event.fields["values"] for event in events(job.run, kind="metrics")])

    for at_once, one_by_one in zip(*found, strict=True):
        assert one_by_one["loss"] == pytest.approx(at_once["loss"], rel=1e-4)
        assert one_by_one["grad_norm"] == pytest.approx(at_once["grad_norm"], rel=1e-3)


def test_a_row_without_anchors_never_skips_a_step(tmp_path: Path, tiny_target_spec, tiny_drafter_spec) -> None:
    """Real rows always have anchors, so here one is taken away: the step runs, the weights stay, nothing is NaN."""
    spec = tiny_job_spec(tiny_target_spec, tiny_drafter_spec)
    bench = synthetic_bench(spec)
    batch = synthetic.batch(spec, [96], like=torch.empty(0))
    empty = replace(batch.row, loss_mask_S=torch.zeros_like(batch.row.loss_mask_S))
    micro_batch = assemble(replace(batch, row=empty, parts=(empty,)), bench, num_slots=6)
    before = [weight.detach().clone() for weight in bench.drafter.parameters()]

    result = run_step(1, [micro_batch], bench)

    assert result.grad_norm == 0
    assert bench.optimizer.latch.read() is None
    assert all(torch.equal(a, b) for a, b in zip(before, bench.drafter.parameters(), strict=True))


def synthetic_bench(spec: DFlashSpec) -> workbench.Workbench:
    device = torch.device("cpu")
    target = synthetic.stand_in(spec, device=device, dtype=torch.float32)
    choices = workbench.choose(spec, device)
    return workbench.build(spec, choices, meter=Meter(device), embed=target.embed, head_VH=target.head_VH)


def test_anchors_and_noise_hang_on_seed_epoch_and_row_alone(tiny_target_spec, tiny_drafter_spec) -> None:
    spec = tiny_job_spec(tiny_target_spec, tiny_drafter_spec, data={"noise": NoiseSpec("uniform", 0.1)})
    bench = synthetic_bench(spec)
    one, two = (synthetic.batch(spec, [96], like=torch.empty(0), position=position) for position in (0, 1))
    joined = Batch(
        row=join_rows([one.row, two.row]),
        features_SC=torch.cat([one.features_SC, two.features_SC]),
        teacher=torch.cat([one.teacher, two.teacher]),
        parts=(one.row, two.row),
        keys=(*one.keys, *two.keys),
    )

    alone = [assemble(batch, bench, num_slots=6) for batch in (one, two)]
    together = assemble(joined, bench, num_slots=6)

    anchors = [each.blocks.anchors_N[each.blocks.keep_N] for each in alone]
    assert torch.equal(together.blocks.anchors_N, torch.cat([anchors[0], anchors[1] + 96]))
    assert torch.equal(together.features_SC, torch.cat([each.features_SC for each in alone]))
    assert not torch.equal(together.features_SC[:96], one.features_SC)
    assert (together.features_SC[:96] - one.features_SC).abs().max() <= 0.1


def test_a_non_finite_loss_stops_with_step_term_and_rows_and_moves_no_weight(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec
) -> None:
    """An infinite learning rate makes the second step's loss NaN, as a diverged training does."""
    spec = tiny_job_spec(
        tiny_target_spec,
        tiny_drafter_spec,
        optim={"lr": 1e38, "clip_norm": 0.0},
        train={"num_steps": 9, "log_every": 4},
    )
    job = make_job(tmp_path, spec)

    with pytest.raises(NonFiniteError, match=r"step \d: loss_ce is not finite in micro-batch 1 \(row \d of epoch 0\)"):
        train(job, StopWish())

    (failure,) = events(job.run, kind="failure")
    assert failure.fields["failure"] == "remote.drafter.optim.NonFiniteError"
    assert failure.fields["step"] < 4
    assert failure.fields["facts"]["term"] == "loss_ce"
    assert len(failure.fields["facts"]["rows"]) == 1
    assert list(losses(job.run)) == [4]


def test_a_changed_mask_id_is_refused_on_resume_and_an_old_corrupt_checkpoint_passed_over(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec
) -> None:
    spec = tiny_job_spec(tiny_target_spec, tiny_drafter_spec, train={"num_steps": 4, "checkpoint_every": 2})
    train(make_job(tmp_path, spec), StopWish())
    other = replace(spec, drafter=replace(spec.drafter, mask_token_id=7))

    with pytest.raises(CheckpointError, match=r"drafter\.mask_token_id was 3, is now 7"):
        train(make_job(tmp_path, other, attempt=2), StopWish())

    longer = replace(spec, train=replace(spec.train, num_steps=5))
    (tmp_path / "runs/tiny/checkpoints/step-00000004/model.safetensors").write_bytes(b"torn")
    job = make_job(tmp_path, longer, attempt=3)
    train(job, StopWish())
    notes = [event.fields["text"] for event in events(job.run, attempt=3, kind="note")]
    assert any("passed over" in note and "corrupt" in note for note in notes)
    assert list(losses(job.run, attempt=3)) == [3, 4, 5]


@pytest.mark.slow
def test_sigterm_finishes_the_step_saves_and_ends_with_status_0(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec
) -> None:
    run = make_run(tmp_path, tiny_job_spec(tiny_target_spec, tiny_drafter_spec, train={"num_steps": 100_000}))
    with start_job(run, "train", python=warm.python("remote.drafter")) as process:
        wait_for(lambda: len(losses(run)) >= 2)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)

    last = max(losses(run))
    assert process.returncode == 0, output
    assert events(run)[-1].fields == {"outcome": "stopped", "exit_code": 0}
    assert [path.name for path in run.whole_checkpoints()] == [f"step-{last:08d}"]


def test_a_training_goes_on_when_an_old_checkpoint_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_target_spec, tiny_drafter_spec
) -> None:
    sections = {"num_steps": 3, "checkpoint_every": 1, "keep_last": 1}
    job = make_job(
        tmp_path, tiny_job_spec(tiny_target_spec, tiny_drafter_spec, train=sections, evaluate={"at_end": False})
    )

    let_go = shutil.rmtree

    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if ignore_errors:
            return let_go(path, ignore_errors=True)
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)

    assert train(job, StopWish()) == "succeeded"

    notes = [event.fields["text"] for event in events(job.run, kind="note")]
    assert any("could not be removed" in note for note in notes)
    assert [event.fields["step"] for event in events(job.run, kind="checkpoint")] == [1, 2, 3]


def test_the_numbers_of_a_checkpoint_are_means_over_its_steps_however_they_are_logged(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec
) -> None:
    """Steps 1 to 3 in windows of two: the last window holds one step and counts as one."""
    sections = {"num_steps": 3, "checkpoint_every": 3, "log_every": 2}
    job = make_job(tmp_path, tiny_job_spec(tiny_target_spec, tiny_drafter_spec, train=sections))

    train(job, StopWish())

    logged = losses(job.run)
    assert list(logged) == [2, 3]
    found = checkpoint.position_of(job.run.checkpoint(3))
    assert found.mean_loss == pytest.approx((2 * logged[2] + logged[3]) / 3, rel=1e-12)
    lengths = [event.fields["values"]["acceptance_length"] for event in events(job.run, kind="metrics")]
    assert found.acceptance_length == pytest.approx((2 * lengths[0] + lengths[1]) / 3, rel=1e-12)


class Listener(Reporter):
    """Counts the optimizers and micro-batches that still live while held-out prompts are decoded."""

    alive: tuple[int, int] | None = None

    def progress(self, what: str, *, done: float, total: float | None, unit: str) -> None:
        super().progress(what, done=done, total=total, unit=unit)
        if what == "decoding: plain" and self.alive is None:
            kinds = [type(item) for item in gc.get_objects()]
            self.alive = (kinds.count(DrafterOptimizer), kinds.count(MicroBatch))


@pytest.mark.slow
def test_the_evaluation_at_the_end_holds_nothing_of_the_trainings_steps(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec
) -> None:
    """The whole target comes back to a card that was filled without it: masters, moments and rows have to be gone."""
    spec = tiny_job_spec(tiny_target_spec, tiny_drafter_spec, train={"num_steps": 2})
    short = replace(spec.evaluate, at_end=True, num_prompts=1, max_new_tokens=8, tree_budgets=[4])
    job = make_job(tmp_path, replace(spec, evaluate=short))
    listener = Listener(job.attempt.root)
    gc.collect()

    assert train(replace(job, reporter=listener), StopWish()) == "succeeded"

    assert listener.alive == (0, 0)


def test_what_comes_after_the_last_step_is_told_from_its_first_moment(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec
) -> None:
    """Else whoever follows reads `700/700 left 0 s` for as long as the target is loaded again."""
    spec = tiny_job_spec(tiny_target_spec, tiny_drafter_spec, train={"num_steps": 2}, data={"hidden_states": "cached"})
    short = replace(spec.evaluate, at_end=True, num_prompts=1, max_new_tokens=8, tree_budgets=[4])
    job = make_job(tmp_path, replace(spec, evaluate=short))

    assert train(job, StopWish()) == "succeeded"

    said = [event for event in events(job.run) if event.kind in ("stage", "progress")]
    start = next(i for i, event in enumerate(said) if event.fields.get("name") == "evaluating")
    steps = [(event.fields["what"], event.fields["done"]) for event in said[start + 1 :]]
    assert steps[:6] == [*(("loading the target", part) for part in range(5)), ("decoding: plain", 0)]
    assert {what.partition(":")[0] for what, _ in steps[6:]} == {"decoding", "estimating acceptance"}


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_an_evaluation_that_ends_in_its_second_way_leaves_the_first_in_the_store(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec, sent: signal.Signals
) -> None:
    """Killed, or stopped: what decoding of hours had measured by then is not thrown away."""
    spec = tiny_job_spec(tiny_target_spec, tiny_drafter_spec, train={"num_steps": 1})
    short = replace(spec.evaluate, at_end=True, num_prompts=3, max_new_tokens=96, tree_budgets=[4])
    run = make_run(tmp_path, replace(spec, evaluate=short))
    write_json(run.job_json, {"run_id": "20270101-tiny", "kind": "train", "attempt": 1, "cwd": str(TREE)})

    with start_job(run, "train", python=warm.python("remote.drafter")) as process:
        wait_for(lambda: bool(events(run, kind="evaluation")))
        process.send_signal(sent)
        process.communicate(timeout=60)

    with Store(tmp_path / "runs.db") as store:
        import_folder(store, run.root)
        told = [row.protocol["method"] for row in store.reader.evaluations("20270101-tiny")]
    assert told[0] == "plain"
    assert "offline" not in told, "it ended in the middle"
    outcomes = [event.fields["outcome"] for event in events(run, kind="final")]
    assert outcomes == ([] if sent == signal.SIGKILL else ["stopped"])


@pytest.mark.slow
def test_a_full_disk_costs_a_checkpoint_but_a_training_that_ends_without_its_last_one_has_failed(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec
) -> None:
    spec = tiny_job_spec(
        tiny_target_spec,
        replace(tiny_drafter_spec, intermediate_size=20_000),
        train={"num_steps": 3, "checkpoint_every": 1},
    )
    first = make_job(tmp_path, spec)
    assert train(first, StopAfter(1)) == "stopped"
    job = make_job(tmp_path, spec, attempt=2)

    with disk_that_takes(4 * 1024**2), pytest.raises(OSError, match="the checkpoint of step 3 could not be written"):
        train(job, StopWish())

    notes = [event.fields["text"] for event in events(job.run, attempt=2, kind="note")]
    assert list(losses(job.run, attempt=2)) == [2, 3]
    assert any(note.startswith("the checkpoint of step 2 could not be written: ") for note in notes)
    assert [path.name for path in job.run.checkpoints.iterdir()] == ["step-00000001"]
    (failure,) = events(job.run, attempt=2, kind="failure")
    assert failure.fields["stage"] == "checkpoint"


def pid_of(run: RunDir) -> int:
    """The training's own process, which leads a group of its own: what started it waits for it."""
    return int(events(run, kind="start")[0].fields["pid"])


def readers_of(pid: int) -> list[int]:
    """The processes that read batches ahead: children of the training's."""
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        found += [int(word) for word in (thread / "children").read_text().split()]
    return found


@pytest.mark.slow
def test_a_polite_signal_to_the_whole_group_leaves_the_reading_processes_until_the_step_is_saved(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec
) -> None:
    """Either signal: each reader gets both of them."""
    spec = tiny_job_spec(tiny_target_spec, tiny_drafter_spec, train={"num_steps": 100_000}, data={"num_workers": 2})
    run = make_run(tmp_path, spec)
    with start_job(run, "train", python=warm.python("remote.drafter")) as process:
        wait_for(lambda: len(losses(run)) >= 2 or process.poll() is not None)
        trainer = pid_of(run)
        readers = readers_of(trainer)
        for reader in readers:
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(reader, number)
        seen = len(losses(run))
        wait_for(lambda: len(losses(run)) >= seen + 8)  # more than had been read ahead
        os.killpg(trainer, signal.SIGTERM)
        output, errors = process.communicate(timeout=60)

    assert process.returncode == 0, output + errors
    assert len(readers) == 2
    assert events(run)[-1].fields == {"outcome": "stopped", "exit_code": 0}
    assert [path.name for path in run.whole_checkpoints()] == [f"step-{max(losses(run)):08d}"]
    assert not any(Path(f"/proc/{reader}").exists() for reader in readers)


@pytest.mark.slow
def test_the_reading_processes_end_with_a_training_that_was_killed(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec
) -> None:
    spec = tiny_job_spec(tiny_target_spec, tiny_drafter_spec, train={"num_steps": 100_000}, data={"num_workers": 2})
    run = make_run(tmp_path, spec)
    with start_job(run, "train", python=warm.python("remote.drafter")) as process:
        wait_for(lambda: len(losses(run)) >= 2)
        readers = [Identity.of(reader) for reader in readers_of(pid_of(run))]
        for reader in readers:  # a stopped one cannot look for its parent itself, as torch's own would in the end
            os.kill(reader.pid, signal.SIGSTOP)
        os.kill(pid_of(run), signal.SIGKILL)
        process.wait()

        try:
            wait_for(lambda: not any(reader.is_alive for reader in readers), timeout_s=30)
        finally:
            for reader in readers:
                send(reader.pid, reader.start_ticks, signal.SIGKILL)

    assert len(readers) == 2


@pytest.mark.slow
def test_a_host_without_enough_memory_keeps_the_whole_traceback(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec
) -> None:
    spec = tiny_job_spec(
        tiny_target_spec,
        replace(tiny_drafter_spec, intermediate_size=4_000_000),
        life={"memory_limit_bytes": 4 * 1024**3},
    )
    run = make_run(tmp_path, spec)

    ended = run_job(run, "train", is_warm=False)

    (failure,) = events(run, kind="failure")
    assert ended.returncode == 1
    assert "can't allocate memory" in failure.fields["message"]
    assert failure.fields["traceback"].startswith("Traceback (most recent call last)")
    assert "in fresh_drafter" in failure.fields["traceback"]
    facts = failure.fields["facts"]
    assert facts["limit_bytes"] == 4 * 1024**3
    assert 100 * 1024**2 < facts["resident_bytes"] <= facts["peak_bytes"] < 4 * 1024**3
    assert failure.fields["traceback"].strip().splitlines()[-1] in ended.stderr
    assert events(run)[-1].fields == {"outcome": "failed", "exit_code": 1}


@pytest.mark.parametrize("wish", [False, True])
def test_only_the_first_steps_of_a_training_record_who_allocates_what(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec, monkeypatch: pytest.MonkeyPatch, wish: bool
) -> None:
    order: list[str] = []
    step = training.run_step
    monkeypatch.setattr(training, "RECORDED_STEPS", 2)
    monkeypatch.setattr(training, "stop_recording", lambda device: order.append(f"stop {device}"))
    monkeypatch.setattr(training, "run_step", lambda *given: (order.append("step"), step(*given))[1])
    spec = tiny_job_spec(tiny_target_spec, tiny_drafter_spec, train={"num_steps": 4, "record_allocations": wish})

    assert train(make_job(tmp_path, spec), StopWish()) == "succeeded"

    assert order == ["step", "step", *([] if wish else ["stop cpu"]), "step", "step"]
