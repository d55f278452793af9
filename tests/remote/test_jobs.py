"""The jobs beside training, one after the other on one run folder, as `__main__` calls them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from remote.drafter.checkpoint import CheckpointError
from remote.drafter.export import load_exported
from remote.drafter.job import StopWish
from remote.drafter.jobs import JOBS
from remote.drafter.workbench import choose, fresh_drafter
from tests.remote.jobs import ANSWERS, events, make_job, make_run, run_job, tiny_job_spec
from tests.remote.specs import tiny_spec

CPU = torch.device("cpu")


@pytest.mark.slow
def test_prepare_train_evaluate_and_export_follow_one_another(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec
) -> None:
    spec = tiny_job_spec(
        tiny_target_spec,
        tiny_drafter_spec,
        train={"num_steps": 3},
        evaluate={
            "at_end": True,
            "num_prompts": 2,
            "max_new_tokens": 6,
            "tree_budgets": [4],
            "compare_untrained": True,
        },
    )
    jobs = [make_job(tmp_path, spec, attempt=attempt) for attempt in (1, 2, 3, 4)]

    outcomes = [
        JOBS[name](job, StopWish()) for name, job in zip(("prepare", "train", "evaluate", "export"), jobs, strict=True)
    ]

    measured = [events(job.run, attempt=attempt, kind="evaluation") for attempt, job in enumerate(jobs, 1)]
    exported = jobs[3].attempt.artifacts / "export"
    assert outcomes == ["succeeded"] * 4
    assert (jobs[0].attempt.artifacts / ANSWERS).is_file()
    assert [event.fields["step"] for event in measured[1]] == [3] * len(measured[1])
    assert {event.fields["protocol"]["method"] for event in measured[2]} >= {"plain", "chain", "tree"}
    assert json.loads((exported / "config.json").read_text())["block_size"] == 4

    again = replace(spec, drafter=replace(spec.drafter, init_from=str(exported)))
    drafter = fresh_drafter(again, choose(again, CPU), device=CPU)
    load_exported(exported, drafter, spec.target)
    continued = make_job(tmp_path / "continued", replace(again, evaluate=replace(spec.evaluate, at_end=False)))
    assert JOBS["train"](continued, StopWish()) == "succeeded"
    assert str(exported) in events(continued.run, kind="start")[0].fields["choices"]["start"]


@pytest.mark.parametrize("name", ["evaluate", "export"])
def test_a_run_without_checkpoints_is_one_clear_line(
    tmp_path: Path, name: str, tiny_target_spec, tiny_drafter_spec
) -> None:
    job = make_job(tmp_path, tiny_job_spec(tiny_target_spec, tiny_drafter_spec))

    with pytest.raises(CheckpointError, match="holds no checkpoint; train first"):
        JOBS[name](job, StopWish())


@pytest.mark.slow
def test_a_job_that_cannot_start_reports_why_and_exits_1(tmp_path: Path) -> None:
    run = make_run(tmp_path, tiny_spec())

    ended = run_job(run, "train")

    failure, final = events(run)[-2:]
    assert ended.returncode == 1
    assert failure.fields["failure"] == "remote.report.UserFault"
    assert failure.fields["traceback"] == ""
    assert ended.stderr.splitlines() == [failure.fields["message"]]
    assert "/nowhere" in failure.fields["message"]
    assert final.fields == {"outcome": "failed", "exit_code": 1}


@pytest.mark.slow
@pytest.mark.parametrize("job", ["train", "rung"])
def test_a_users_mistake_is_one_line_in_the_log_and_a_bug_keeps_its_traceback(
    tmp_path: Path, job: str, tiny_target_spec, tiny_drafter_spec
) -> None:
    """Muon on a processor is refused for every job alike; a layer of no kind is no mistake that anybody foresaw."""
    spec = tiny_job_spec(tiny_target_spec, tiny_drafter_spec, optim={"name": "muon"})
    run = make_run(tmp_path, spec)
    words = ["rung", "fwd"] if job == "rung" else ["train"]
    writer = "rung-fwd" if job == "rung" else "rank0"

    ended = run_job(run, *words)

    (failure,) = events(run, writer=writer, kind="failure")
    assert ended.returncode != 0
    assert len(ended.stderr.splitlines()) == 1
    assert "muon" in ended.stderr
    assert (failure.fields["message"], failure.fields["traceback"]) == (ended.stderr.strip(), "")

    broken = make_run(
        tmp_path / "bug",
        replace(
            spec, drafter=replace(spec.drafter, layer_types=["odd", "full"]), optim=replace(spec.optim, name="adamw")
        ),
    )
    ended = run_job(broken, *words)

    failure = events(broken, writer=writer, kind="failure")[0]
    assert ended.returncode != 0
    assert failure.fields["traceback"].startswith("Traceback (most recent call last)")
    assert "Traceback (most recent call last)" in ended.stderr


@pytest.mark.slow  # a process that imports torch
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"mask_token_id": 2}, r"drafter\.mask_token_id is 2, the eos token; .*; drafter\.mask_token_id is 2, the pad"),
        ({"mask_token_id": 96}, r"drafter\.mask_token_id is 96; the vocabulary runs from 0 to 95"),
        ({"captured_layers": [1, 3]}, r"drafter\.captured_layers is \[1, 3\]; ids run from 0 to 2: the last layer"),
        ({"block_size": 64}, r"data\.row_tokens is 48; one block alone has 64 tokens"),
        ({"mask_token_id": None}, r"DrafterSpec has no 'mask_token_id', which it needs"),  # None here: taken away
    ],
)
def test_a_spec_that_no_recipe_could_give_is_refused_on_the_host_too(tmp_path: Path, changed, words) -> None:
    """Written by hand or by an older side, it would train a drafter that nobody can serve, and say nothing."""
    run = make_run(tmp_path, tiny_spec())
    written = json.loads(run.spec_json.read_text())
    for name, value in changed.items():
        written["drafter"].pop(name)
        written["drafter"] |= {} if value is None else {name: value}
    run.spec_json.write_text(json.dumps(written))

    ended = run_job(run, "train")

    assert ended.returncode == 1
    assert re.search(words, ended.stderr)
    assert len(ended.stderr.strip().splitlines()) == 1
    assert [event.fields["failure"] for event in events(run, kind="failure")] == ["remote.report.UserFault"]
    assert not run.checkpoints.exists()
