"""Snapshots of the CUDA allocator: made-up ones of torch's own shape, read by torch's own viewer; a real one on a card."""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz as viewer

from orchestrator.verbs.held_page import held_rows
from remote.drafter import __main__ as entry
from remote.drafter import held, snapshot
from remote.drafter.held import summarise
from remote.drafter.job import failures_placed
from remote.drafter.measure import Meter
from remote.drafter.snapshot import (
    bounded,
    facts_of,
    failures_explained,
    record_allocations,
    snapshot_facts,
    stop_recording,
    tensors_at,
)
from remote.report import Reporter
from remote.rundir import RunDir
from remote.spec import DrafterSpec, TargetSpec
from tests.remote.cuda import needs_cuda
from tests.remote.jobs import events, make_job, make_run, tiny_job_spec

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
MIB = 1024**2
LINEAR = {"filename": "/v/lib/python3.12/site-packages/torch/nn/functional.py", "line": 9, "name": "linear"}
LOSS = {"filename": "/w/tree/remote/drafter/loss.py", "line": 70, "name": "drafter_loss"}
MODEL = {"filename": "/w/tree/remote/drafter/model.py", "line": 12, "name": "forward"}


@pytest.fixture(autouse=True)
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that ends it ends it for no other one."""
    monkeypatch.setattr(snapshot, "_RECORDING", snapshot._Recording())


def block(size: int, *frames: dict[str, Any], state: str = "active_allocated") -> dict[str, Any]:
    return {"address": 0, "size": size, "requested_size": size, "state": state, "frames": list(frames)}


def made(num_entries: int = 4) -> dict[str, Any]:
    """Twenty MiB reserved: 12 held by the loss in two blocks, 4 by the model, 1 by nobody known, 3 free."""
    blocks = [
        block(8 * MIB, LINEAR, LOSS, MODEL),
        block(4 * MIB, LOSS),
        block(4 * MIB, LINEAR, MODEL),
        block(MIB),
        block(3 * MIB, state="inactive"),
    ]
    segment = {
        "device": 0,
        "address": 0,
        "total_size": 20 * MIB,
        "allocated_size": 17 * MIB,
        "active_size": 17 * MIB,
        "requested_size": 17 * MIB,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "blocks": blocks,
        "frames": [],
    }
    trace = [{"action": "alloc", "addr": n, "size": MIB, "stream": 0, "frames": [LOSS]} for n in range(num_entries)]
    return {"segments": [segment], "device_traces": [trace], "allocator_settings": {}}


def test_memory_in_use_is_summed_by_the_frame_of_our_own_that_asked_for_it() -> None:
    found = summarise(made())

    assert [(item["frame"].rsplit("/", 1)[-1], item["bytes"], item["num_blocks"]) for item in found["held"]] == [
        ("loss.py:70 drafter_loss", 12 * MIB, 2),
        ("model.py:12 forward", 4 * MIB, 1),
        (held.NO_STACK, MIB, 1),
    ]
    assert found["held_bytes"] + found["free_bytes"] == found["reserved_bytes"] == 20 * MIB
    assert (found["largest_free_bytes"], found["num_entries"]) == (3 * MIB, 4)


def test_an_out_of_memory_error_leaves_a_file_that_the_viewer_opens_and_a_summary(tmp_path: Path) -> None:
    facts = snapshot_facts(OOM, CUDA, tmp_path / "artifacts", "rank0", take=made)

    file = tmp_path / "artifacts" / "memory-rank0.pickle"
    assert facts["memory_snapshot"] == file.name
    assert facts["memory_held"][0]["bytes"] == 12 * MIB
    opened = pickle.loads(file.read_bytes())
    assert "segments: 1" in viewer.segsum(opened)
    assert viewer.trace_plot(opened).startswith("\n<!DOCTYPE html>")
    assert json.loads(file.with_suffix(".json").read_text()) == summarise(made())


def test_the_file_is_bounded_and_keeps_the_newest_history() -> None:
    whole = made(4000)
    limit_bytes = len(pickle.dumps(made(1000)))

    content = bounded(whole, limit_bytes)

    assert content is not None
    assert len(content) <= limit_bytes
    kept = pickle.loads(content)["device_traces"][0]
    assert kept == whole["device_traces"][0][-len(kept) :]
    assert 250 <= len(kept) <= 1000
    assert bounded(whole, 10) is None


@pytest.mark.parametrize(
    "error", [RuntimeError("no history\nmore"), AttributeError("gone"), MemoryError(), KeyError("segments")]
)
def test_where_there_is_none_the_failure_says_why(tmp_path: Path, error: Exception) -> None:
    def take() -> dict[str, Any]:
        raise error

    facts = snapshot_facts(OOM, CUDA, tmp_path, "rank0", take=take)

    assert facts["memory_snapshot"] is None
    assert facts["memory_snapshot_why"].startswith(type(error).__name__)
    assert "\n" not in facts["memory_snapshot_why"]


def test_a_folder_that_cannot_be_written_costs_the_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    facts = snapshot_facts(OOM, CUDA, tmp_path / "file", "rank0", take=made)

    assert facts["memory_snapshot"] is None
    assert "Error" in facts["memory_snapshot_why"]


@pytest.mark.parametrize(("error", "device"), [(ValueError("x"), CUDA), (OOM, CPU), (MemoryError(), CPU)])
def test_other_failures_and_processors_have_none_and_miss_none(
    tmp_path: Path, error: Exception, device: torch.device
) -> None:
    take = None if device == CPU else made  # no processor has one to take

    assert snapshot_facts(error, device, tmp_path, "rank0", take=take) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_torch_that_cannot_record_is_said_in_one_line() -> None:
    assert record_allocations(CPU) is None
    if not torch.cuda.is_available():
        said = record_allocations(CUDA)
        assert said is None or said.startswith("no stacks in memory snapshots: ")


def test_what_is_recorded_takes_no_stack_of_c_and_none_at_a_free_and_does_not_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: asked.append(options))

    assert record_allocations(CUDA) is None

    assert asked == [{"context": "alloc", "stacks": "python", "max_entries": snapshot.MAX_ENTRIES}]
    assert set(asked[0]) <= set(inspect.signature(torch.cuda.memory._record_memory_history_impl).parameters)


def test_recording_ends_with_torchs_own_word_and_on_a_processor_there_is_none_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: asked.append(options))

    stop_recording(CPU)
    stop_recording(CUDA)

    assert asked == [{"enabled": None}]


@pytest.mark.parametrize(("job", "wish", "is_recorded"), [
    ("rung", False, True), ("train", False, True), ("train", True, True), ("prepare", True, False), ("smoke", True, False),
])  # fmt: skip
def test_a_training_and_a_rung_begin_by_recording(
    tmp_path: Path, tiny_target_spec: TargetSpec, tiny_drafter_spec: DrafterSpec, job: str, wish: bool, is_recorded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    began: list[torch.device] = []
    monkeypatch.setattr(entry, "record_allocations", began.append)
    spec = tiny_job_spec(tiny_target_spec, tiny_drafter_spec, train={"record_allocations": wish})
    run = make_run(tmp_path, spec)
    options = argparse.Namespace(job=job, run_dir=run.root, names=["fwd"], cap=None)

    entry._job(options, run.attempt(1), Reporter(run.attempt(1).root))

    assert bool(began) is is_recorded


def test_where_nothing_was_recorded_the_failure_says_how_to_have_it_and_blames_no_backward(tmp_path: Path) -> None:
    facts = snapshot_facts(OOM, CUDA, tmp_path, "rank0", take=lambda: unrecorded())

    assert (facts["memory_held"], facts["memory_kept"]) == ([], {})
    assert "train.record_allocations=true" in facts["memory_unrecorded"]
    assert facts["memory_held_bytes"] == 17 * MIB
    assert held_rows(facts) == [("held", facts["memory_unrecorded"])]


def test_after_recording_has_ended_the_rest_is_said_to_be_unrecorded_and_no_backward_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and moments of the first steps still carry their stacks; what the later steps made has none."""
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: None)
    record_allocations(CUDA)
    stop_recording(CUDA)

    facts = snapshot_facts(OOM, CUDA, tmp_path, "rank0", take=made)

    assert [item["bytes"] for item in facts["memory_held"]] == [12 * MIB, 4 * MIB]  # as far as it is known
    assert "backward" not in facts["memory_kept"]
    assert "train.record_allocations=true" in facts["memory_unrecorded"]
    assert facts["memory_held_bytes"] == 17 * MIB
    assert held_rows(facts)[-1] == ("held", facts["memory_unrecorded"])
    summary = json.loads((tmp_path / "memory-rank0.json").read_text())
    assert "backward" not in summary["kept"]
    assert not any("backward" in item["frame"] for item in summary["held"])


def test_a_recording_that_begins_again_tells_of_a_backward_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: None)
    stop_recording(CUDA)
    record_allocations(CUDA)

    facts = snapshot_facts(OOM, CUDA, tmp_path, "rank0", take=made)

    assert facts["memory_kept"]["backward"]["bytes"] == MIB
    assert "memory_unrecorded" not in facts


def unrecorded() -> dict[str, Any]:
    whole = made(0)
    for segment in whole["segments"]:
        segment["blocks"] = [{**each, "frames": []} for each in segment["blocks"]]
    return whole


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card that answers is here")
def test_a_card_that_does_not_answer_costs_its_numbers_and_never_the_error(tmp_path: Path) -> None:
    facts = facts_of(OOM, CUDA, tmp_path, "rank0")

    assert list(facts) == ["memory_facts_why"]
    assert "\n" not in facts["memory_facts_why"]


def test_shapes_are_those_of_the_innermost_own_frames_and_no_value_is_among_them() -> None:
    def attend(queries: torch.Tensor) -> None:
        keys = queries.repeat(4, 1)
        raise torch.OutOfMemoryError(str(keys.shape))

    token = "secret"  # a local of this frame that is no tensor
    with pytest.raises(torch.OutOfMemoryError) as raised:
        attend(torch.full((2, 3), 7.5, dtype=torch.float64))

    found = tensors_at(raised.value)

    assert [(item["name"], item["shape"], item["dtype"], item["function"]) for item in found] == [
        ("keys", [8, 3], "float64", "attend"),
        ("queries", [2, 3], "float64", "attend"),
    ]
    assert token not in str(found)
    assert "7.5" not in str(found)


def test_a_script_of_ones_own_keeps_what_the_trainer_keeps_and_its_error_goes_on(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    reporter = Reporter(run.attempt(1).root)

    with pytest.raises(torch.OutOfMemoryError), reporter.job(), failures_explained(reporter, take=made):
        raise OOM

    (failure,) = events(run, kind="failure")
    assert failure.fields["facts"]["memory_held"][0]["bytes"] == 12 * MIB
    assert failure.fields["facts"]["memory_snapshot"] == "memory-rank0.pickle"
    assert (run.attempt(1).artifacts / "memory-rank0.json").is_file()


def test_a_script_run_by_hand_has_no_folder_and_says_so() -> None:
    facts = snapshot_facts(OOM, CUDA, None, "rank0", take=made)

    assert facts["memory_snapshot"] is None
    assert "by hand" in facts["memory_snapshot_why"]
    assert facts["memory_held"]


@needs_cuda
def test_a_real_out_of_memory_error_names_who_held_the_card(
    tmp_path: Path, tiny_target_spec: TargetSpec, tiny_drafter_spec: DrafterSpec
) -> None:
    gc.collect()  # what earlier tests left on the card was not recorded
    torch.cuda.empty_cache()
    job = make_job(tmp_path, tiny_job_spec(tiny_target_spec, tiny_drafter_spec))
    assert record_allocations(CUDA) is None
    job = replace(job, device=CUDA)

    held = torch.empty(64 * MIB, dtype=torch.uint8, device=CUDA)
    with pytest.raises(torch.OutOfMemoryError), failures_placed(job, Meter(CUDA)):
        torch.empty(1 << 50, dtype=torch.uint8, device=CUDA)

    (failure,) = events(job.run, kind="failure")
    facts = failure.fields["facts"]
    file = job.attempt.artifacts / facts["memory_snapshot"]
    opened = pickle.loads(file.read_bytes())
    assert any(entry["action"] == "oom" for trace in opened["device_traces"] for entry in trace)
    (own,) = (each for each in facts["memory_held"] if "test_snapshot.py" in each["frame"])
    assert own["bytes"] >= held.nbytes
    assert file.stat().st_size <= snapshot.LIMIT_BYTES
