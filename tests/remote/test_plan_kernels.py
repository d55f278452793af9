"""The memory plan of draftyard's own kernels: against torch's own books and autograd's, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.plan import BASES
from remote.drafter import attention, synthetic, workbench
from remote.drafter.kernels import attention as attention_triton
from remote.drafter.measure import Meter
from remote.drafter.step import anchor_slots, assemble, forward
from remote.plan import GIB, kernels, plan
from remote.plan.memory import kept_components
from remote.plan.sizes import sizes
from remote.spec import DFlashSpec, LossSpec, OptimSpec
from tests.remote.allocations import peaks
from tests.remote.cuda import CPU, in_interpreter
from tests.remote.specs import tiny_spec
from tests.remote.test_plan import large, tensors


def small_spec(**sections: dict[str, Any]) -> DFlashSpec:
    """By the kernels throughout; few programs, and tensors of 8 bytes do not matter beside the rest."""
    own: dict[str, dict[str, Any]] = {
        "target": {"hidden_size": 64, "vocab_size": 3000, "tied_embeddings": False},
        "drafter": {"intermediate_size": 256, "block_size": 4, "attention": "triton"},
        "data": {"row_tokens": 64, "max_anchors": 16},
        "loss": {"terms": {"ce": 1.0, "kl": 0.15}, "chunk_tokens": 24},
        "train": {"kernels": "triton", "dtype": "float32"},
    }
    return tiny_spec(**{name: own.get(name, {}) | sections.get(name, {}) for name in own | sections})


def by_kernels(spec: DFlashSpec) -> workbench.Choices:
    """What is chosen on a card that takes them."""
    chosen = workbench.choose(replace(spec, drafter=replace(spec.drafter, attention="sdpa"), train=replace(spec.train, kernels="torch")), CPU)  # fmt: skip
    return replace(chosen, backend=attention.Backend("triton", "test"), is_fused=True)


CASES = {
    "base": small_spec(),
    "cap": small_spec(loss={"terms": {"ce": 1.0, "kl": 0.15, "cap": 0.05}}),
    "cross-entropy alone": small_spec(loss={"terms": {"ce": 1.0}}),
    "layers checkpointed": small_spec(train={"activation_checkpointing": "non_reentrant"}),
    "one loss chunk": small_spec(loss={"chunk_tokens": 512}),
    "wide MLP": small_spec(drafter={"intermediate_size": 1024}, target={"vocab_size": 500}),
}


@pytest.mark.slow  # the interpreter takes seconds
@in_interpreter
@pytest.mark.parametrize("name", CASES)
def test_every_stage_by_kernels_is_within_five_percent_of_torchs_own_books(name: str) -> None:
    spec = CASES[name]

    found = peaks(spec, choices=by_kernels(spec))

    for stage, predicted_bytes in tensors(plan(spec, device="cuda")).items():
        assert predicted_bytes == pytest.approx(found[stage], rel=0.05), stage


@pytest.mark.slow
@in_interpreter
def test_a_forward_by_kernels_without_gradients_is_within_five_percent_too() -> None:
    spec = CASES["base"]

    found = peaks(spec, gradients=False, choices=by_kernels(spec))

    for stage, predicted_bytes in tensors(plan(spec, device="cuda", rung="fwd")).items():
        assert predicted_bytes == pytest.approx(found[stage], rel=0.05), stage


@pytest.mark.slow
@in_interpreter
@pytest.mark.parametrize("name", ["base", "wide MLP"])
def test_what_autograd_keeps_is_what_the_plan_says_is_kept(name: str) -> None:
    """To the byte, but for the loss's own indices: everything that is saved and no weight, input or rotary factor."""
    spec = CASES[name]
    target = synthetic.stand_in(spec, device=CPU, dtype=torch.float32)
    bench = workbench.build(spec, by_kernels(spec), meter=Meter(CPU), embed=target.embed, head_VH=target.head_VH)
    batch = synthetic.batch(spec, [spec.data.row_tokens], like=target.head_VH)
    micro_batch = assemble(batch, bench, num_slots=anchor_slots(spec.data, most_documents=1))
    given = {
        id_of(tensor) for tensor in (*bench.drafter.parameters(), micro_batch.features_SC, micro_batch.plan.index_M)
    }
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if id_of(tensor) not in given and not is_rotary(tensor):
            kept[id_of(tensor)] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        sums = forward(micro_batch, bench)

    at = sizes(spec, device="cuda")
    gradients_bytes = at.supervised_slots * at.hidden * at.element_bytes
    predicted = sum(line.size_bytes for line in kept_components(spec, at)) + gradients_bytes
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert sums.numerator.requires_grad
    assert found == pytest.approx(predicted, rel=0.01)


def id_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def is_rotary(tensor: Tensor) -> bool:
    return tensor.ndim == 3 and tensor.shape[1] == 1  # one for all heads


@pytest.mark.parametrize(
    ("row_tokens", "anchors", "kernels", "driver_gib"),
    [
        (65_536, 1536, "auto", 30),
        (147_456, 2048, "auto", 41),
        (65_536, 1536, "torch", 40),
        (147_456, 2048, "torch", 54),
    ],
)
def test_the_plan_of_what_another_trainer_reports_is_the_one_in_the_docs(
    row_tokens: int, anchors: int, kernels: str, driver_gib: int
) -> None:
    base = BASES["8B"]
    spec = replace(
        base,
        data=replace(base.data, row_tokens=row_tokens, max_anchors=anchors),
        loss=LossSpec(terms={"ce": 1.0}, decay="dpace"),
        optim=OptimSpec(name="muon"),
        train=replace(base.train, kernels=kernels),  # type: ignore[arg-type]
    )

    assert plan(spec).driver_bytes / GIB == pytest.approx(driver_gib, abs=1)


def test_auto_is_planned_as_the_kernels_on_a_card_and_the_plan_says_so() -> None:
    assert any("auto is planned as triton for attention and kernels" in line for line in plan(large()).not_modelled)
    asked = large(drafter={"attention": "triton"}, train={"kernels": "triton"})
    assert not any("auto" in line for line in plan(asked).not_modelled)
    assert plan(asked).peak.allocated_bytes == plan(large()).peak.allocated_bytes
    assert not any("auto" in line for line in plan(large(), device="cpu").not_modelled)


@pytest.mark.parametrize(
    ("drafter", "dtype", "taken"),
    [
        ({}, "bfloat16", "triton"),
        ({}, "float32", "flex"),
        ({"head_dim": 96}, "bfloat16", "flex"),
        ({"head_dim": 8}, "bfloat16", "sdpa"),
        ({"head_dim": 256}, "bfloat16", "flex"),
        ({"block_size": 33}, "bfloat16", "flex"),
        ({"num_heads": 40}, "bfloat16", "flex"),
        ({"num_kv_heads": 2, "block_size": 4}, "bfloat16", "flex"),
    ],
)
def test_the_plans_choice_is_the_trainers(drafter: dict[str, Any], dtype: str, taken: str) -> None:
    """But for what only the card knows."""
    spec = large(drafter=drafter, train={"dtype": dtype})
    at = sizes(spec, device="cuda")
    rows = attention_triton.block_rows(at.block_size, at.heads // at.kv_heads)
    torch_dtype = getattr(torch, dtype)
    case = attention_triton.Case.of(spec.drafter, device=torch.device("cuda"), dtype=torch_dtype)
    misfit = attention_triton.misfit(case, attention_triton.LARGE_TILES)

    assert kernels.attention_of(spec, at) == taken
    assert (misfit is None) == (taken == "triton")
    assert kernels.block_rows(at) == rows
    assert kernels.MIN_FLEX_HEAD_DIM == attention.MIN_FLEX_HEAD_DIM
