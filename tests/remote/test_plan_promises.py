"""What is promised of a plan, sentence by sentence, where no other test would fail if the sentence stopped being true."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.plan import BASES, CASES, GIB, SMALL_BYTES, Case, Line, measured_lines, spec_of
from orchestrator.recipe import load_recipe
from remote.plan import Plan, plan
from remote.plan.advice import switches
from remote.spec import DFlashSpec

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "benchmarks.md"


def _large(*overrides: str) -> Plan:
    spec = load_recipe("qwen3.6-27b").resolve("v6", overrides).spec
    assert isinstance(spec, DFlashSpec)
    return plan(spec, capacity_bytes=95 * GIB)


def test_each_component_that_a_step_holds_is_a_line_with_bytes_in_its_stages() -> None:
    plain = {name: set(cells) for name, cells in _large().table()}
    checkpointed = dict(_large("train.activation_checkpointing=non_reentrant").table())
    always = {"load", "forward", "backward", "step"}

    for name in ("drafter weights", "fp32 masters", "optimizer moments", "target embedding", "target head"):
        assert plain[name] == always, name
    assert plain["gradients"] >= {"backward", "step"}
    assert plain["inputs"] == {"forward", "backward", "step"}
    assert plain["context keys and values"] == plain["activations kept"] == {"forward", "backward"}
    assert plain["head workspace"] == {"forward"}
    assert plain["gradients made by the loss"] >= {"forward"}
    assert "one live layer" in checkpointed, "what is recomputed is alive one layer at a time"
    assert checkpointed["activations kept"]["forward"] < dict(_large().table())["activations kept"]["forward"]
    assert _large().context_bytes > 0
    assert _large().slack_bytes > 0
    split = dict(_large("data.hidden_states=online", "roles.target=1", "roles.drafter=1", "life.num_gpus=2").table())
    assert split["hidden-state queue"]["step"] > 0


def test_each_of_the_four_switches_is_offered_with_what_it_saves_and_costs() -> None:
    spec = load_recipe("qwen3.6-27b").resolve("v6", ["loss.chunk_tokens=4096"]).spec
    assert isinstance(spec, DFlashSpec)

    by_key = {text.partition("=")[0]: switch for switch in switches(spec) for text in switch.overrides}

    due = {"train.activation_checkpointing", "loss.chunk_tokens", "optim.master_dtype", "optim.moment_dtype"}
    assert due <= set(by_key)
    assert all(by_key[key].saved_bytes > 0 for key in due)
    assert by_key["train.activation_checkpointing"].work_factor > 1.1, "a forward more"
    assert by_key["optim.master_dtype"].work_factor == by_key["optim.moment_dtype"].work_factor == 1.0


@pytest.mark.slow
def test_a_plan_is_made_where_no_torch_can_be_imported() -> None:
    code = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\nfrom orchestrator import cli\ncli.main()"
    argv = [sys.executable, "-c", code, "plan", "smollm2", "--gpu", "95GiB", "--json"]

    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plan"]["verdict"] == "fits"


def test_the_conversion_of_a_gguf_target_is_said_of_the_hosts_memory_with_its_size() -> None:
    """Measured once, of SmolLM2-135M on a processor, 2026-12-02: a peak of 1.385 GiB; afterwards 0.405 GiB to load it."""
    spec = load_recipe("smollm2").resolve("ce").spec
    assert isinstance(spec, DFlashSpec)
    told = "the first reading of a GGUF target on a host, which converts it: 1.38 GiB of the host's memory, an estimate"

    assert told in plan(spec, device="cpu").not_modelled
    assert told in plan(spec, device="cuda").not_modelled
    assert not any("GGUF" in line for line in _large().not_modelled)


# ------------------------------------------------------------------------------ checked on a card


def _measured() -> dict[str, tuple[Case, set[str]]]:
    """Cases that have lines, each with the stages that were measured."""
    lines = measured_lines()
    return {
        case.name: (case, {line.stage for line in lines if line.case == case.name})
        for case in CASES
        if any(line.case == case.name for line in lines)
    }


def test_what_was_measured_on_a_card_has_every_variety_that_is_promised() -> None:
    specs = [spec_of(case) for case, _ in _measured().values()]

    assert len(specs) >= 8
    assert {case.rung for case, _ in _measured().values()} >= {"fwd", "fwd_bwd", "multi_doc", "leak", "checkpoint"}
    assert set.union(*(stages for _, stages in _measured().values())) >= {"load", "forward", "backward", "step"}
    assert {spec.train.activation_checkpointing for spec in specs} >= {"none", "non_reentrant"}
    assert len({spec.loss.chunk_tokens for spec in specs}) >= 3
    assert len({(spec.optim.name, spec.optim.master_dtype, spec.optim.moment_dtype) for spec in specs}) >= 3
    assert len({spec.drafter.attention for spec in specs}) >= 2
    assert any(max(line.measured_bytes for line in measured_lines() if line.case == name) < GIB for name in _measured())


@pytest.mark.parametrize(
    ("measured_gib", "off_gib", "is_within"),
    [(50, 2.4, True), (50, 2.6, False), (6, 0.9, True), (6, 1.1, False), (2, 0.09, True), (2, 0.11, False)],
    ids=[
        "5 % of much",
        "more",
        "1 GiB where that is more",
        "more than both",
        "5 % of a tiny one",
        "1 GiB is no excuse",
    ],
)
def test_a_line_is_right_within_the_larger_of_a_share_and_a_gib_and_a_tiny_one_within_the_share(
    measured_gib: float, off_gib: float, is_within: bool
) -> None:
    for sign in (1, -1):
        sizes = (round((measured_gib + sign * off_gib) * GIB), round(measured_gib * GIB))
        assert Line("case", "step", *sizes, 0).is_within is is_within
    assert SMALL_BYTES <= 4 * GIB


# ------------------------------------------------------------------------------ beside another trainer


@pytest.mark.parametrize(
    ("row_tokens", "anchors", "own_gib", "plain_gib"), [(65_536, 1536, 30, 40), (147_456, 2048, 41, 54)]
)
def test_what_our_plan_says_of_another_trainers_ceilings_is_what_the_page_says(
    row_tokens: int, anchors: int, own_gib: int, plain_gib: int
) -> None:
    base = BASES["8B"]
    spec = replace(
        base,
        drafter=replace(base.drafter, block_size=16, num_layers=5, max_position_embeddings=262_144),
        data=replace(base.data, row_tokens=row_tokens, max_anchors=anchors),
        loss=replace(base.loss, terms={"ce": 1.0}, decay="dpace"),
        optim=replace(base.optim, name="muon"),
    )
    without = replace(spec, drafter=replace(spec.drafter, attention="flex"), train=replace(spec.train, kernels="torch"))

    told = " ".join(DOCS.read_text(encoding="utf-8").split())

    assert round(plan(spec, is_hopper=True).driver_bytes / GIB) == pytest.approx(own_gib, abs=1)
    assert round(plan(without, is_hopper=True).driver_bytes / GIB) == pytest.approx(plain_gib, abs=1)
    assert "Our plan of the same is about 30 GiB and 41 GiB" in told
    assert "and 40 and 54 GiB without own kernels" in told
    assert f"{anchors:,}" in told
