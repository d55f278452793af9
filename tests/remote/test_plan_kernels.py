"""The memory plan of draftyard's own kernels: against torch's own books and autograd's, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.plan import BASES
from remote import own_attention
from remote.drafter import attention, smoke, synthetic, workbench
from remote.drafter.kernels import attention as attention_triton
from remote.drafter.kernels import attention_hopper, gluon
from remote.drafter.measure import Meter
from remote.drafter.step import anchor_slots, assemble, forward
from remote.plan import GIB, kernels, plan
from remote.plan.memory import kept_components
from remote.plan.sizes import sizes
from remote.spec import DFlashSpec, LossSpec, NoiseSpec, OptimSpec
from tests.remote.allocations import peaks
from tests.remote.cuda import CPU, in_interpreter
from tests.remote.interpreter import idle
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


SLIDING: dict[str, Any] = {"layer_types": ["sliding", "full"], "sliding_window": 16}
CASES = {
    "base": small_spec(),
    "cap": small_spec(loss={"terms": {"ce": 1.0, "kl": 0.15, "cap": 0.05}}),
    "cross-entropy alone": small_spec(loss={"terms": {"ce": 1.0}}),
    "layers checkpointed": small_spec(train={"activation_checkpointing": "non_reentrant"}),
    "one loss chunk": small_spec(loss={"chunk_tokens": 512}),
    "sliding layers": small_spec(drafter=SLIDING),
    "sliding layers, noise, anchors per document": small_spec(
        drafter=SLIDING,
        data={"anchors_per": "document", "max_anchors": 8, "noise": NoiseSpec("gaussian", 0.05)},
        loss={"terms": {"ce": 1.0, "kl": 0.15, "cap": 0.05}, "streak_beta": 0.5},
    ),
    "wide MLP": small_spec(drafter={"intermediate_size": 1024}, target={"vocab_size": 500}),
}


@pytest.mark.slow  # the interpreter takes seconds
@in_interpreter
def test_a_step_whose_launches_do_nothing_holds_to_the_byte_what_a_real_one_holds() -> None:
    """What lets the tests below leave the launches out."""
    spec = small_spec(
        target={"vocab_size": 500}, drafter={"intermediate_size": 64}, data={"row_tokens": 32, "max_anchors": 4}
    )

    real = peaks(spec, choices=by_kernels(spec))
    with idle():
        found = peaks(spec, choices=by_kernels(spec))

    assert found == real


@pytest.mark.slow
@in_interpreter
@pytest.mark.parametrize("name", CASES)
def test_every_stage_by_kernels_is_within_five_percent_of_torchs_own_books(name: str) -> None:
    spec = CASES[name]

    with idle():
        found = peaks(spec, choices=by_kernels(spec))

    for stage, predicted_bytes in tensors(plan(spec, device="cuda")).items():
        assert predicted_bytes == pytest.approx(found[stage], rel=0.05), stage


@pytest.mark.slow
@in_interpreter
@pytest.mark.parametrize("name", ["base", "cap", "sliding layers, noise, anchors per document"])
def test_the_drafter_of_the_rung_checkpoint_is_within_five_percent_too(name: str) -> None:
    """Smaller, with gathered attention and own kernels for the rest."""
    spec = smoke.small(CASES[name])
    plain = workbench.choose(replace(spec, train=replace(spec.train, kernels="torch")), CPU)

    with idle():
        found = peaks(spec, choices=replace(plain, is_fused=True))

    assert plain.backend.name == "sdpa"
    for stage, predicted_bytes in tensors(plan(spec, device="cuda", rung="checkpoint")).items():
        assert predicted_bytes == pytest.approx(found[stage], rel=0.05), stage


@pytest.mark.slow
@in_interpreter
def test_a_forward_by_kernels_without_gradients_is_within_five_percent_too() -> None:
    spec = CASES["base"]

    with idle():
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

    with idle(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
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

    assert {kernels.attention_of(spec, sizes(spec, device="cuda", is_hopper=kind)) for kind in (None, False)} == {taken}
    assert trains_by_own(spec, dtype, is_hopper=False) == (taken == "triton")
    assert kernels.MIN_FLEX_HEAD_DIM == attention.MIN_FLEX_HEAD_DIM


@pytest.mark.parametrize(
    ("drafter", "dtype", "taken"),
    [
        ({}, "bfloat16", "triton"),
        ({}, "float32", "flex"),
        ({"num_kv_heads": 2, "block_size": 4}, "bfloat16", "triton"),  # 16 heads on one key
        ({"num_kv_heads": 1, "block_size": 4}, "bfloat16", "triton"),
        ({"num_kv_heads": 1, "block_size": 8}, "bfloat16", "flex"),  # 256 rows
        ({"num_kv_heads": 2, "block_size": 6}, "bfloat16", "flex"),  # no whole copies
        ({"num_kv_heads": 2, "block_size": 4, "head_dim": 32}, "bfloat16", "flex"),
        ({"num_kv_heads": 2, "block_size": 4}, "float32", "flex"),
        ({"block_size": 6}, "bfloat16", "triton"),  # by those for all cards
    ],
)
def test_the_plans_choice_is_the_trainers_on_a_hopper_card(
    drafter: dict[str, Any], dtype: str, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gluon, "can_launch", lambda device: True)
    spec = large(drafter=drafter, train={"dtype": dtype})

    assert kernels.attention_of(spec, sizes(spec, device="cuda", is_hopper=True)) == taken
    assert trains_by_own(spec, dtype, is_hopper=True) == (taken == "triton")


def trains_by_own(spec: DFlashSpec, dtype: str, *, is_hopper: bool) -> bool:
    """Whether `auto` would take draftyard's own kernels on such a card, as the trainer finds it before it checks them."""
    case = attention_triton.Case.of(spec.drafter, device=torch.device("cuda"), dtype=getattr(torch, dtype))
    takes_hopper = is_hopper and attention_hopper.can_launch(case)
    tiles = attention_triton.HOPPER_TILES if takes_hopper else attention_triton.LARGE_TILES
    return attention_triton.misfit(case, tiles) is None


def test_a_plan_for_a_card_of_unknown_kind_says_what_only_a_hopper_card_takes() -> None:
    spec = large(drafter={"num_kv_heads": 2, "block_size": 4})

    unknown, hopper, other = (plan(spec, is_hopper=kind) for kind in (None, True, False))

    assert any(
        "a Hopper card, where draftyard's own kernels take 16 query heads" in line for line in unknown.not_modelled
    )
    assert not any("a Hopper card, where" in line for made in (hopper, other) for line in made.not_modelled)
    assert hopper.peak.allocated_bytes < unknown.peak.allocated_bytes == other.peak.allocated_bytes
    for made, taken in ((unknown, "kernels"), (hopper, "attention and kernels"), (other, "kernels")):
        told = f"own kernels do not run: auto is planned as triton for {taken}, and"
        assert any(told in line for line in made.not_modelled), "the other assumption is told as well"


def test_a_hopper_cards_log_sums_have_no_padding() -> None:
    spec = large(drafter={"block_size": 24})

    hopper, other = (kernels.log_sums_bytes(sizes(spec, device="cuda", is_hopper=kind)) for kind in (True, False))

    assert hopper == 4 * 32 * 1024 * 24
    assert other == 4 * 8 * 1024 * 32 * 4


def test_the_tiles_hold_what_the_rule_says_they_do() -> None:
    """A tile of the kernels for all cards sums over its own tokens: its rows by the heads of a group."""
    for tiles in (attention_triton.LARGE_TILES, attention_triton.SMALL_TILES):
        least = min(tiles.forward.rows, tiles.query.rows)
        assert (least, least // own_attention.MIN_PRODUCT) == (own_attention.MAX_BLOCK_ROWS, own_attention.MAX_GROUP)
