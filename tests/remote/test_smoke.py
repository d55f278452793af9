"""The smoke ladder: every rung on a tiny drafter, a leak that is found, an out-of-memory that is kept whole."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from remote.drafter import ladder, leak, smoke, synthetic, workbench
from remote.drafter.blocks import check_row
from remote.drafter.measure import Meter
from remote.drafter.model import tensor_shapes
from remote.drafter.smoke import RungFailed, run_rung
from remote.drafter.step import MicroBatch, anchor_slots, assemble, run_step
from remote.drafter.workbench import Workbench
from remote.spec import DFlashSpec, num_drafter_parameters
from tests import warm
from tests.remote.cuda import needs_cuda, never_waiting
from tests.remote.jobs import events, make_job, make_run, run_job
from tests.remote.specs import tiny_spec

pytestmark = pytest.mark.slow  # whole rungs

CPU = torch.device("cpu")


def make_bench(spec: DFlashSpec) -> Workbench:
    target = synthetic.stand_in(spec, device=CPU, dtype=torch.float32)
    return workbench.build(
        spec, workbench.choose(spec, CPU), meter=Meter(CPU), embed=target.embed, head_VH=target.head_VH
    )


def packed(bench: Workbench) -> MicroBatch:
    layout = synthetic.multi_doc_layout(bench.spec)
    batch = synthetic.batch(bench.spec, layout, like=torch.empty(0))
    return assemble(batch, bench, num_slots=anchor_slots(bench.spec.data, most_documents=len(layout)))


@pytest.mark.parametrize("name", ["fwd", "fwd_bwd", "multi_doc", "leak"])
@pytest.mark.parametrize("per", ["row", "document"])
def test_every_rung_passes_and_gives_time_peaks_loss_accuracy_and_streak(tmp_path: Path, name: str, per: str) -> None:
    spec = tiny_spec(data={"anchors_per": per, "max_anchors": 5}, train={"rows_per_step": 2, "accumulation": 2})
    job = make_job(tmp_path, spec)

    values = run_rung(job, name, Meter(CPU))

    assert {"loss", "accuracy", "streak", "load_allocated_bytes", "forward_allocated_bytes"} <= set(values)
    assert any(key.endswith("_s") for key in values)
    if name == "fwd_bwd":
        assert {"step_s", "warm_up_s", "backward_allocated_bytes", "step_allocated_bytes"} <= set(values)


@pytest.mark.parametrize("name", ["fwd_bwd", "multi_doc", "leak"])
def test_no_rung_depends_on_what_the_fingerprint_leaves_out(tmp_path: Path, name: str) -> None:
    """The learning rate reaches zero after one step here; the rung still takes its own few at the beginning of a schedule."""
    untested: dict[str, dict[str, Any]] = {
        "train": {"num_steps": 1, "log_every": 7, "checkpoint_every": 3, "keep_last": 9},
        "data": {"num_workers": 2, "answer_tokens": 9, "answer_temperature": 1.0, "answer_batch": 1},
        "evaluate": {"at_end": False, "num_prompts": 1, "compare_untrained": True},
        "life": {"grace_s": 1.0, "retries": 2, "max_duration_s": 9.0},
    }

    told = [
        run_rung(make_job(tmp_path / word, spec), name, Meter(CPU))
        for word, spec in (("one", tiny_spec()), ("two", tiny_spec(**untested)))
    ]

    first, second = ({key: value for key, value in each.items() if not key.endswith(("_s", "_bytes"))} for each in told)
    assert first == second


@pytest.mark.parametrize("wish", [False, True])
def test_the_timed_steps_record_who_allocates_what_only_where_the_training_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wish: bool
) -> None:
    order: list[str] = []
    step = smoke.run_step
    monkeypatch.setattr(smoke, "stop_recording", lambda device: order.append(f"stop {device}"))
    monkeypatch.setattr(smoke, "run_step", lambda *given: (order.append("step"), step(*given))[1])
    spec = tiny_spec(train={"record_allocations": wish}, smoke={"timed_steps": 3})

    run_rung(make_job(tmp_path, spec), "fwd_bwd", Meter(CPU))

    assert order == ["step", *([] if wish else ["stop cpu"]), "step", "step", "step"]


def test_the_round_trip_needs_its_first_half_and_gives_equal_losses(tmp_path: Path) -> None:
    job = make_job(tmp_path, tiny_spec())

    with pytest.raises(RungFailed, match="left none"):
        run_rung(job, "checkpoint", Meter(CPU))
    run_rung(job, "checkpoint_save", Meter(CPU))
    values = run_rung(job, "checkpoint", Meter(CPU))

    assert values["loss_after_step"] != values["loss"]
    assert not (job.attempt.artifacts / "smoke-checkpoint").exists()


def test_the_round_trip_fails_when_the_optimizer_state_is_not_what_was_saved(tmp_path: Path) -> None:
    job = make_job(tmp_path, tiny_spec())
    run_rung(job, "checkpoint_save", Meter(CPU))
    other = replace(job, spec=replace(job.spec, optim=replace(job.spec.optim, lr=0.5)))

    with pytest.raises(RungFailed, match="losses before the save"):
        run_rung(other, "checkpoint", Meter(CPU))


def test_the_round_trip_names_what_of_the_optimizer_came_back_otherwise(tmp_path: Path, monkeypatch) -> None:
    """A card's tolerance of the loss after a step would not notice it."""
    job = make_job(tmp_path, tiny_spec())
    run_rung(job, "checkpoint_save", Meter(CPU))
    load = smoke.checkpoint.load

    def forgetful(*arguments, optimizer, **named):
        load(*arguments, optimizer=optimizer, **named)
        optimizer.state()["exp_avg/norm.weight"].view(-1)[0].add_(1e-6)

    monkeypatch.setattr(smoke.checkpoint, "load", forgetful)

    with pytest.raises(RungFailed, match=r"tensors 1 came back otherwise, exp_avg/norm\.weight among them"):
        run_rung(job, "checkpoint", Meter(CPU))


@pytest.mark.parametrize(
    ("per", "max_anchors"), [("row", 6), ("document", 1), ("document", 6), ("document", 30), ("document", 90)]
)
def test_the_worst_batch_has_as_many_slots_as_any_row_and_wastes_none(per: str, max_anchors: int) -> None:
    spec = tiny_spec(data={"anchors_per": per, "row_tokens": 50, "max_anchors": max_anchors})
    bench = make_bench(spec)
    layout = synthetic.worst_layout(spec)
    batch = synthetic.batch(spec, layout, like=torch.empty(0))
    num_slots = anchor_slots(spec.data, most_documents=len(layout))

    micro_batch = assemble(batch, bench, num_slots=num_slots)

    check_row(batch.row)
    assert sum(layout) == 50
    assert num_slots == max(anchor_slots(spec.data, most_documents=count) for count in range(1, 26))
    expected = sum(min(max_anchors, length - 1) for length in layout)  # the last token of a document is no anchor
    assert int(micro_batch.blocks.keep_N.sum()) == expected
    assert expected >= num_slots - len(layout)


@pytest.mark.parametrize(
    ("row_tokens", "layout"), [(16384, [3000, 4000, 5000]), (12000, [3000, 4000, 5000]), (600, [150, 200, 250])]
)
def test_the_packed_row_is_that_of_the_issue_where_it_fits(row_tokens: int, layout: list[int]) -> None:
    spec = tiny_spec(data={"row_tokens": row_tokens})

    row = synthetic.batch(spec, synthetic.multi_doc_layout(spec), like=torch.empty(0)).row

    check_row(row)
    assert synthetic.multi_doc_layout(spec) == layout
    assert [int((row.document_S == index).sum()) for index in range(3)] == layout
    assert row.position_S[row.position_S == 0].numel() >= 3


SIGHTS = [
    {},
    {"layer_types": ["sliding", "full"], "sliding_window": 8},
    *(
        {"layer_types": ["sliding", "sliding"], "sliding_window": 8, "window_rule": rule}
        for rule in ("specforge", "automodel", "modelopt", "speculators")
    ),
]


@pytest.mark.parametrize(
    "sight", SIGHTS, ids=lambda sight: sight.get("window_rule", str(sight.get("layer_types", "full")))
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_probe_finds_no_leak_in_any_layer_rule(sight: dict[str, object], attention: str) -> None:
    bench = make_bench(tiny_spec(drafter={**sight, "attention": attention}))

    assert leak.probe(packed(bench), bench, num_blocks=6) == []


class Leaky:
    """The drafter with something more in sight than it should have."""

    def __init__(self, bench: Workbench, shift: int = 0, *, all_documents: bool = False) -> None:
        self._drafter, self._shift, self._all_documents = bench.drafter, shift, all_documents

    def __call__(self, features_SC: Tensor, embeddings_TH: Tensor, row, blocks) -> Tensor:
        ranges = tuple((0 if self._all_documents else a, b + self._shift) for a, b in blocks.ranges)
        start_N = torch.zeros_like(blocks.context_start_N) if self._all_documents else blocks.context_start_N
        seen = replace(blocks, anchors_N=blocks.anchors_N + self._shift, context_start_N=start_N, ranges=ranges)
        return self._drafter(features_SC, embeddings_TH, row, seen)


def test_the_probe_finds_an_anchor_that_sees_its_own_hidden_state() -> None:
    bench = make_bench(tiny_spec())

    findings = leak.probe(packed(bench), replace(bench, drafter=Leaky(bench, shift=1)))  # type: ignore[arg-type]

    assert any("sees hidden states it must not see" in finding for finding in findings)


def test_the_probe_finds_a_block_that_sees_another_document() -> None:
    bench = make_bench(tiny_spec())

    findings = leak.probe(packed(bench), replace(bench, drafter=Leaky(bench, all_documents=True)))  # type: ignore[arg-type]

    assert any("sees hidden states it must not see" in finding for finding in findings)


def test_the_probe_finds_a_block_that_misses_the_state_before_its_anchor() -> None:
    bench = make_bench(tiny_spec())

    findings = leak.probe(packed(bench), replace(bench, drafter=Leaky(bench, shift=-1)))  # type: ignore[arg-type]

    assert any("does not see the hidden state right before its anchor" in finding for finding in findings)


def test_the_probe_finds_labels_of_the_next_document() -> None:
    bench = make_bench(tiny_spec())
    micro_batch = packed(bench)
    blocks = micro_batch.blocks
    everywhere = (blocks.slot_T >= 1) & blocks.keep_N.repeat_interleave(blocks.block_size)
    last = replace(blocks, anchors_N=torch.full_like(blocks.anchors_N, 10), supervised_T=everywhere)

    findings = leak.label_findings(micro_batch.row, last)

    assert findings == [f"{2 * len(blocks.anchors_N)} label slots belong to another document than their anchor"]


def test_a_non_finite_worst_batch_fails_the_rung(tmp_path: Path) -> None:
    job = make_job(tmp_path, tiny_spec(optim={"lr": 1e38, "clip_norm": 0.0}))

    with pytest.raises(RungFailed, match="not finite at step"):
        run_rung(job, "fwd_bwd", Meter(CPU))


@pytest.mark.slow
def test_the_ladder_climbs_each_rung_in_a_process_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text("raise SystemExit('no luck')\n", encoding="utf-8")
    spec = tiny_spec(smoke={"scripts": {"mine": str(script)}})
    run = make_run(tmp_path, spec)

    ended = run_job(run, "smoke", "fwd_bwd", "checkpoint", "mine")

    results = {
        writer: events(run, writer=writer, kind="rung") for writer in ("rung-fwd_bwd", "rung-checkpoint", "rank0")
    }
    assert ended.returncode == 1, ended.stderr
    assert [event.fields["passed"] for event in results["rung-fwd_bwd"]] == [True]
    assert [event.fields["passed"] for event in results["rung-checkpoint"]] == [True]
    assert [(event.fields["name"], event.fields["passed"]) for event in results["rank0"]] == [("mine", False)]
    assert events(run)[-1].fields == {"outcome": "failed", "exit_code": 1}


@pytest.mark.slow
def test_a_rung_out_of_memory_is_kept_whole_and_failed_and_the_next_one_runs(tmp_path: Path) -> None:
    spec = tiny_spec(
        drafter={"intermediate_size": 4_000_000}, life={"memory_limit_bytes": 4 * 1024**3}, smoke={"timed_steps": 3}
    )
    run = make_run(tmp_path, spec)

    ended = run_job(run, "smoke", "fwd", "fwd_bwd")

    assert ended.returncode == 1
    for name in ("fwd", "fwd_bwd"):
        (rung,) = events(run, writer=f"rung-{name}", kind="rung")
        (failure,) = events(run, writer=f"rung-{name}", kind="failure")
        assert not rung.fields["passed"]
        assert "can't allocate memory" in rung.fields["message"]
        assert failure.fields["traceback"].startswith("Traceback (most recent call last)")
        assert failure.fields["stage"] == "load"


def test_norms_that_bfloat16_cannot_move_are_a_note_where_the_recipe_wants_no_masters(tmp_path: Path) -> None:
    spec = tiny_spec(train={"dtype": "bfloat16"}, optim={"master_dtype": "none", "lr": 1e-4})
    job = make_job(tmp_path, spec)

    run_rung(job, "fwd_bwd", Meter(CPU))

    (note,) = [event.fields["text"] for event in events(job.run, kind="note")]
    assert "norms did not move" in note
    assert "optim.master_dtype: float32 trains them" in note


def test_a_matrix_that_never_moves_fails_the_rung_whatever_the_masters(tmp_path: Path) -> None:
    spec = tiny_spec(train={"dtype": "bfloat16"}, optim={"master_dtype": "none", "lr": 1e-12})

    with pytest.raises(RungFailed, match="trained tensors never moved"):
        run_rung(make_job(tmp_path, spec), "fwd_bwd", Meter(CPU))


def test_an_unknown_rung_is_one_clear_line(tmp_path: Path) -> None:
    from remote.drafter.ladder import climb

    job = make_job(tmp_path, tiny_spec())

    with pytest.raises(ValueError, match="rung fdw is unknown; this recipe has fwd, fwd_bwd"):
        climb(job, ["fdw"], cap_bytes=None)


@needs_cuda
def test_a_cap_stands_in_for_a_smaller_card_and_its_out_of_memory_is_kept_whole(tmp_path: Path) -> None:
    spec = tiny_spec(
        target={"vocab_size": 32_000},
        data={"row_tokens": 8192, "max_anchors": 512},
        loss={"chunk_tokens": 1024},
        drafter={"attention": "sdpa", "block_size": 16, "max_position_embeddings": 8192},
    )
    run = make_run(tmp_path, spec)

    roomy = run_job(run, "smoke", "fwd_bwd")
    tight = run_job(run, "smoke", "fwd_bwd", "--cap", str(96 * 1024**2), attempt=2)

    (passed,) = events(run, writer="rung-fwd_bwd", kind="rung")
    (failed,) = events(run, attempt=2, writer="rung-fwd_bwd", kind="rung")
    (failure,) = events(run, attempt=2, writer="rung-fwd_bwd", kind="failure")
    assert (roomy.returncode, tight.returncode) == (0, 1), roomy.stderr
    assert passed.fields["values"]["forward_allocated_bytes"] > 96 * 1024**2
    assert passed.fields["values"]["step_reserved_bytes"] > 0
    assert not failed.fields["passed"]
    assert failed.fields["message"].startswith("OutOfMemoryError: CUDA out of memory")
    assert failure.fields["failure"] == "torch.OutOfMemoryError"
    assert failure.fields["stage"] in ("load", "forward", "backward", "step")
    assert failure.fields["traceback"].startswith("Traceback (most recent call last)")
    assert failure.fields["facts"]["capacity_bytes"] > failure.fields["facts"]["peak_allocated_bytes"] > 0


@needs_cuda
def test_on_a_cuda_card_a_whole_step_never_waits_for_the_device() -> None:
    device = torch.device("cuda", 0)
    spec = tiny_spec(
        loss={"terms": {"ce": 1.0, "kl": 0.15, "cap": 0.05}}, drafter={"attention": "sdpa"}, train={"accumulation": 2}
    )
    target = synthetic.stand_in(spec, device=device, dtype=torch.bfloat16)
    bench = workbench.build(
        spec, workbench.choose(spec, device), meter=Meter(device), embed=target.embed, head_VH=target.head_VH
    )
    layout = synthetic.multi_doc_layout(spec)
    batches = [synthetic.batch(spec, layout, like=bench.head_VH, position=position) for position in (0, 1)]
    micro_batches = [assemble(batch, bench, num_slots=6) for batch in batches]
    run_step(1, micro_batches, bench)

    with never_waiting():
        run_step(2, micro_batches, bench)

    assert bench.optimizer.latch.read() is None


def test_on_a_card_the_next_rungs_process_waits_until_it_is_told_and_ends_when_nobody_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that says its device is a card; the rungs themselves run here."""
    monkeypatch.setattr(sys, "executable", warm.executable("remote.drafter", tmp_path))
    job = replace(make_job(tmp_path, tiny_spec()), device=torch.device("cuda"))
    processes = ladder._Processes(job, ["fwd", "leak", "multi_doc"], cap_bytes=None)

    assert processes.run("fwd") == 0
    early = dict(processes._early)
    assert list(early) == ["leak"]
    assert events(job.run, writer="rung-leak") == []
    assert processes.run("leak") == 0
    last = processes._early["multi_doc"]
    processes.close()

    assert early["leak"].returncode == 0
    assert last.returncode == 1
    assert [event.fields["passed"] for event in events(job.run, writer="rung-leak", kind="rung")] == [True]
    assert events(job.run, writer="rung-multi_doc") == []


def test_the_checkpoint_rung_of_a_large_drafter_stores_every_kind_of_tensor_and_few_bytes() -> None:
    """A 27B target's drafter has 1.7 billion parameters, 14 bytes each in a checkpoint."""
    wide = tiny_spec(
        target={"hidden_size": 5120, "num_layers": 64},
        drafter={
            "num_layers": 5,
            "intermediate_size": 17_408,
            "layer_types": ["sliding", "sliding", "sliding", "sliding", "full"],
            "sliding_window": 2048,
            "captured_layers": [1, 16, 31, 46, 61],
            "init_from": "/drafters/other",
        },
    )

    small = smoke.small(wide)

    assert small.drafter.layer_types == ["sliding", "full"]
    assert small.drafter.init_from is None, "that folder's tensors have other shapes"
    assert num_drafter_parameters(small.target, small.drafter) < 0.1 * num_drafter_parameters(wide.target, wide.drafter)
    kinds = {name.split(".", 2)[-1] if name.startswith("layers.") else name for name in shapes(wide)}
    assert kinds == {name.split(".", 2)[-1] if name.startswith("layers.") else name for name in shapes(small)}
    assert smoke.small(tiny_spec()).drafter.num_layers == tiny_spec().drafter.num_layers


def shapes(spec: DFlashSpec) -> dict[str, tuple[int, ...]]:
    return tensor_shapes(spec.target, spec.drafter)
