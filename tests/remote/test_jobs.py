"""The jobs beside training, one after the other on one run folder, as `__main__` calls them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
import torch
from safetensors.torch import load_file, save_file

from remote.drafter import checkpoint
from remote.drafter.checkpoint import CheckpointError
from remote.drafter.decode import Setting, decode_chain
from remote.drafter.export import load_exported
from remote.drafter.job import StopWish
from remote.drafter.jobs import JOBS
from remote.drafter.target import load_target
from remote.drafter.workbench import choose, fresh_drafter
from remote.spec import TargetSpec
from tests.remote.conftest import make_tiny_folder, tiny_tokenizer
from tests.remote.jobs import ANSWERS, events, make_job, make_run, run_job, tiny_job_spec
from tests.remote.specs import tiny_spec

CPU = torch.device("cpu")


@pytest.mark.slow
def test_answers_under_an_absolute_path_are_kept_among_the_artifacts_too(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec
) -> None:
    """As launch advises for data that lies on the host: joined to the folder of artifacts it would be itself."""
    spec = tiny_job_spec(tiny_target_spec, tiny_drafter_spec)
    first = make_job(tmp_path, spec)
    assert JOBS["prepare"](first, StopWish()) == "succeeded"
    own = tmp_path / "elsewhere" / "answers.jsonl"
    own.parent.mkdir()
    own.write_bytes((first.attempt.artifacts / ANSWERS).read_bytes())
    second = make_job(tmp_path, replace(spec, data=replace(spec.data, answers=str(own))), attempt=2)

    assert JOBS["prepare"](second, StopWish()) == "succeeded"

    assert (second.attempt.artifacts / "answers.jsonl").read_bytes() == own.read_bytes()


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
    (peak,) = [each for each in events(jobs[1].run, attempt=2, kind="memory") if each.fields["stage"] == "evaluating"]
    assert peak.fields["allocated_bytes"] > 0
    assert {event.fields["protocol"]["method"] for event in measured[2]} >= {"plain", "chain", "tree"}
    assert json.loads((exported / "config.json").read_text())["block_size"] == 4

    again = replace(spec, drafter=replace(spec.drafter, init_from=str(exported)))
    drafter = fresh_drafter(again, choose(again, CPU), device=CPU)
    load_exported(exported, drafter, spec.target)
    continued = make_job(tmp_path / "continued", replace(again, evaluate=replace(spec.evaluate, at_end=False)))
    assert JOBS["train"](continued, StopWish()) == "succeeded"
    assert str(exported) in events(continued.run, kind="start")[0].fields["choices"]["start"]


def letters_target(folder: Path, tiny_target_spec: TargetSpec) -> TargetSpec:
    """A target that says small letters alone: a random one says bytes that are no text, and an answer is kept as text."""
    make_tiny_folder(folder, tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    letters = tiny_tokenizer()("abcdefghijklmnopqrstuvwxyz", add_special_tokens=False)["input_ids"]
    others = [token for token in range(260) if token not in letters]
    weights["lm_head.weight"][others] = 0.0  # some letter's logit is above that
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    more = 260 * tiny_target_spec.hidden_size
    return replace(
        tiny_target_spec,
        source=str(folder),
        tied_embeddings=False,
        num_parameters=tiny_target_spec.num_parameters + more,
    )


@pytest.mark.slow  # a training that learns
def test_an_exported_drafter_accepts_what_its_training_measured(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec
) -> None:
    """On three prompts whose answers it has learnt: as before the export to the token, and as the training's estimate."""
    spec = tiny_job_spec(
        letters_target(tmp_path / "target", tiny_target_spec),
        tiny_drafter_spec,
        data={"answer_tokens": 40, "max_anchors": 32},
        train={"num_steps": 320, "checkpoint_every": 320},
        optim={"lr": 3e-3},
    )
    jobs = [make_job(tmp_path, spec, attempt=attempt) for attempt in (1, 2, 3)]
    prompts = (jobs[0].data_dir / "tiny.prompts.jsonl").read_text().splitlines()[:3]
    (jobs[0].data_dir / "tiny.prompts.jsonl").write_text("\n".join(prompts))
    (jobs[0].data_dir / ANSWERS).unlink()  # the target's own are made in their place
    for name, job in zip(("prepare", "train", "export"), jobs, strict=True):
        assert JOBS[name](job, StopWish()) == "succeeded"

    trained, served = (fresh_drafter(spec, choose(spec, CPU), device=CPU) for _ in range(2))
    checkpoint.load(jobs[1].run.whole_checkpoints()[-1], model=trained, spec=spec)
    for parameter in trained.parameters():
        parameter.data = parameter.data.bfloat16().float()  # what an export holds
    load_exported(jobs[2].attempt.artifacts / "export", served, spec.target)
    target = load_target(spec.target, cache=tmp_path / "cache", device=CPU, dtype=torch.float32)
    texts = [target.prompt_ids(json.loads(line)["messages"]) for line in prompts]
    before, after = (
        [decode_chain(target, drafter, text, Setting(32)) for text in texts] for drafter in (trained, served)
    )

    logged = events(jobs[1].run, attempt=2, kind="metrics")[-20:]
    estimate = mean(event.fields["values"]["acceptance_length"] for event in logged)
    measured = mean(mean(text.accepted) for text in after)
    assert [(text.ids, text.accepted) for text in after] == [(text.ids, text.accepted) for text in before]
    assert estimate > 2.5  # it has learnt, or this test shows nothing
    assert measured >= estimate - 1


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
    """Muon on a processor is refused for every job alike; a width of 2**40 is no mistake that anybody foresaw."""
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
        replace(spec, drafter=replace(spec.drafter, intermediate_size=2**40), optim=replace(spec.optim, name="adamw")),
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
        ({"num_layers": "2"}, r'drafter\.num_layers is "2"; it must be a whole number of at most 64 bits$'),
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

    assert ended.returncode == 2
    assert events(run)[-1].fields == {"outcome": "failed", "exit_code": 2}
    assert re.search(words, ended.stderr)
    assert len(ended.stderr.strip().splitlines()) == 1
    assert [event.fields["failure"] for event in events(run, kind="failure")] == ["remote.report.UserFault"]
    assert not run.checkpoints.exists()
