"""The cases of `benchmarks.plan`: what they cover, and that each kind of them runs without a card."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.plan import CASES, SMALL, main, spec_of
from orchestrator.recipe import load_recipe
from remote.plan import plan
from remote.spec import DFlashSpec

RUNGS = {"fwd", "fwd_bwd", "multi_doc", "leak", "checkpoint"}


@pytest.mark.parametrize("cases", [CASES, SMALL], ids=["on a card", "without one"])
def test_every_rung_and_every_kind_of_row_and_layer_is_among_the_cases(cases: tuple) -> None:  # type: ignore[type-arg]
    specs = [spec_of(case) for case in cases]

    assert {case.rung for case in cases} == RUNGS
    assert {spec.data.anchors_per for spec in specs} == {"row", "document"}
    assert any("sliding" in spec.drafter.layer_types and "full" in spec.drafter.layer_types for spec in specs)
    assert len({case.name for case in cases}) == len(cases)


def test_the_bundled_ddtree_is_a_case_as_its_recipe_says_it() -> None:
    """But for the gradient of its hidden states, which the case makes in fp8."""
    (case,) = (case for case in CASES if case.name == "27B ddtree as bundled, fp8")
    ours, bundled = spec_of(case), load_recipe("qwen3.6-27b").resolve("ddtree").spec
    assert isinstance(bundled, DFlashSpec)
    ours = replace(ours, loss=replace(ours.loss, hidden_gradient=bundled.loss.hidden_gradient))

    assert plan(ours, rung="fwd_bwd").table() == plan(bundled, rung="fwd_bwd").table()
    for found, due in ((ours.drafter, bundled.drafter), (ours.data.noise, bundled.data.noise)):
        assert found == due
    assert (ours.loss.terms, ours.loss.streak_beta) == (bundled.loss.terms, bundled.loss.streak_beta)


@pytest.mark.slow
def test_the_small_cases_run_and_every_stage_of_theirs_is_written(tmp_path: Path) -> None:
    assert main(["--small", "--out", str(tmp_path)]) == 0 or torch.cuda.is_available()

    lines = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))["lines"]
    for case in SMALL:
        stages = {"load", "forward"} if case.rung in ("fwd", "leak") else {"load", "forward", "backward", "step"}
        assert {line["stage"] for line in lines if line["case"] == case.name} == stages, case.name
    assert all(line["measured_bytes"] > 0 for line in lines)
    assert "| very small, checkpoint |" in (tmp_path / "plan.md").read_text(encoding="utf-8")
