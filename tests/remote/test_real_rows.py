"""The rung `real`: the training's own first step, on real rows and a real target, and one line where that cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from remote.drafter import workbench
from remote.drafter.blocks import PAD_DOCUMENT
from remote.drafter.measure import Meter
from remote.drafter.prepare import load_rows
from remote.drafter.real_rows import read, run_real
from remote.drafter.smoke import RungFailed
from remote.drafter.teacher import Expectation, tensors_of
from tests.remote.conftest import make_tiny_folder
from tests.remote.jobs import ANSWERS, events, make_job, make_run, run_job, tiny_job_spec

pytestmark = pytest.mark.slow  # whole rungs

CPU = torch.device("cpu")


@pytest.mark.usefixtures("without_triton")
@pytest.mark.parametrize("terms", [{"ce": 1.0}, {"ce": 1.0, "kl": 0.15}], ids=["ce", "kl"])
@pytest.mark.parametrize("hidden_states", ["cached", "online"])
def test_its_rows_are_those_of_the_trainings_first_step(
    tmp_path: Path, tiny_target, tiny_target_spec, tiny_drafter_spec, hidden_states: str, terms: dict[str, float]
) -> None:
    spec = tiny_job_spec(
        tiny_target_spec,
        tiny_drafter_spec,
        data={"hidden_states": hidden_states},
        loss={"terms": terms},
        train={"rows_per_step": 2, "accumulation": 2},
    )
    job = make_job(tmp_path, spec)

    real = read(job, spec, workbench.choose(spec, CPU))

    rows = load_rows(spec, tiny_target, data_dir=job.data_dir, cache=tmp_path / "trainings")
    assert len(real.batches) == 2
    assert real.most_documents == rows.most_documents
    for position, batch in enumerate(real.batches):
        expected = rows.batch(position, num_rows=2)
        assert batch.keys == expected.keys
        assert torch.equal(batch.row.input_ids_S, expected.row.input_ids_S)
        assert torch.equal(batch.row.loss_mask_S, expected.row.loss_mask_S)
        torch.testing.assert_close(batch.features_SC, expected.features_SC)
        assert isinstance(batch.teacher, Expectation) == (hidden_states == "cached" and "kl" in terms)
        is_text_S = batch.row.document_S != PAD_DOCUMENT  # of padding nobody reads what the target expects there
        for found, wanted in zip(tensors_of(batch.teacher), tensors_of(expected.teacher), strict=True):
            torch.testing.assert_close(found[is_text_S], wanted[is_text_S], rtol=1e-4, atol=1e-5)
    assert torch.equal(real.head_VH, tiny_target.head_VH)
    assert not (tmp_path / "cache" / "hidden").exists()


@pytest.mark.parametrize("terms", [{"ce": 1.0}, {"ce": 1.0, "kl": 0.15}], ids=["ce", "kl"])
def test_it_is_climbed_where_it_is_named_and_gives_time_peaks_loss_accuracy_and_streak(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec, terms: dict[str, float]
) -> None:
    run = make_run(tmp_path, tiny_job_spec(tiny_target_spec, tiny_drafter_spec, loss={"terms": terms}))

    ended = run_job(run, "smoke", "real")

    (rung,) = events(run, writer="rung-real", kind="rung")
    assert ended.returncode == 0, ended.stderr
    assert (rung.fields["name"], rung.fields["passed"]) == ("real", True)
    wanted = {"loss", "accuracy", "streak", "step_s", "warm_up_s", "target_allocated_bytes", "step_allocated_bytes"}
    assert wanted <= set(rung.fields["values"])


def test_a_row_that_cannot_be_learnt_from_fails_it_in_one_line(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec
) -> None:
    job = make_job(tmp_path, tiny_job_spec(tiny_target_spec, tiny_drafter_spec))
    with (job.data_dir / ANSWERS).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({"messages": [{"role": "user", "content": "Why?"}]}) + "\n")

    with pytest.raises(ValueError, match=rf"^{ANSWERS} line 9: has no assistant turn$"):
        run_real(job, Meter(CPU))


def test_it_makes_no_answers_and_says_who_does(tmp_path: Path, tiny_target_spec, tiny_drafter_spec) -> None:
    job = make_job(tmp_path, tiny_job_spec(tiny_target_spec, tiny_drafter_spec))
    (job.data_dir / ANSWERS).unlink()

    with pytest.raises(ValueError, match=rf"data\.answers is {ANSWERS}: nobody has answers .* draftyard prepare"):
        run_real(job, Meter(CPU))

    assert not (job.cache / "answers").exists()


def test_hidden_states_that_are_not_finite_are_told_with_their_rows(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec
) -> None:
    folder = make_tiny_folder(tmp_path / "target")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3] = torch.inf
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    spec = tiny_job_spec(replace(tiny_target_spec, source=str(folder)), tiny_drafter_spec)

    with pytest.raises(RungFailed, match=r"the target's hidden states of row \d hold numbers that are not finite"):
        run_real(make_job(tmp_path, spec), Meter(CPU))
