"""The benchmark of the fp8 gradient's quality: whole on a processor, where fp8 is rebuilt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import hidden_gradient
from remote.spec import DrafterSpec, TargetSpec, dump
from tests.remote.jobs import tiny_job_spec, write_data


@pytest.mark.slow
def test_it_tells_the_gradients_errors_and_what_a_training_came_to(
    tmp_path: Path,
    tiny_target_spec: TargetSpec,
    tiny_drafter_spec: DrafterSpec,
    capfd: pytest.CaptureFixture[str],
) -> None:
    loss, evaluate = {"terms": {"ce": 1.0, "kl": 0.15}}, {"num_prompts": 2, "max_new_tokens": 4}
    spec = tiny_job_spec(tiny_target_spec, tiny_drafter_spec, loss=loss, evaluate=evaluate, train={"num_steps": 10})
    (tmp_path / "spec.json").write_text(dump(spec), encoding="utf-8")
    words = [
        "--data",
        str(write_data(tmp_path / "data")),
        "--cache",
        str(tmp_path / "cache"),
        "--seeds",
        "2",
        "--at-once",
        "2",
    ]

    assert hidden_gradient.main([str(tmp_path / "spec.json"), *words, "--out", str(tmp_path / "out.jsonl")]) == 0

    told = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    assert sorted(capfd.readouterr().out.splitlines()) == sorted(told)
    lines = sorted(map(json.loads, told), key=lambda line: line.get("seed", 2))  # each seed's stand in order
    gradients = [line for line in lines if line["kind"] == "gradient"]
    assert [line["step"] for line in gradients] == [1, 5, 10] * 8
    assert all(line["full_error"] < 1e-5 < line["fp8_error"] < 0.02 for line in gradients)
    trained = [line for line in lines if line["kind"] == "trained"]
    assert [line["why"] for line in trained] == [
        "full: by the recipe",
        *["rebuilt on a processor"] * 2,
        "full: by the recipe",
    ] * 2
    coarse, uncorrected = (
        [line["loss"] for line in trained if line["hidden_gradient"] == way]
        for way in ("fp8", hidden_gradient.UNCORRECTED)
    )
    assert all(ours != theirs for ours, theirs in zip(coarse, uncorrected, strict=True)), (
        "the correction does something"
    )
    assert any(line["kind"] == "decoded" and line["protocol"].get("drafter") == "trained" for line in lines)
    differences = {line["hidden_gradient"]: line for line in lines if line.get("of") == "loss"}
    assert list(differences) == ["fp8", hidden_gradient.UNCORRECTED, hidden_gradient.TWIN]
    assert sum(line["kind"] == "difference" for line in lines) == 6
    found = [line["loss"] - trained[4 * line["seed"]]["loss"] for line in trained if line["hidden_gradient"] == "fp8"]
    assert differences["fp8"]["mean"] == pytest.approx(sum(found) / 2)
    assert differences["fp8"]["standard_error"] == pytest.approx(abs(found[0] - found[1]) / 2)
    assert abs(differences[hidden_gradient.TWIN]["mean"]) < 1e-3


def test_the_tables_in_the_docs_are_those_of_the_measured_file() -> None:
    """`python -m benchmarks.hidden_gradient --page` prints them."""
    docs = Path(__file__).parents[2] / "docs" / "benchmarks.md"

    told = hidden_gradient.page(json.loads(hidden_gradient.MEASURED.read_text(encoding="utf-8")))

    assert all(table in docs.read_text(encoding="utf-8") for table in told.split("\n\n"))


def test_ways_without_the_full_head_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        hidden_gradient.main(["spec.json", "--data", ".", "--cache", ".", "--ways", "fp8"])

    assert "full is what the others are held against" in capsys.readouterr().err
