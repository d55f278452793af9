"""The drafter against its description written out, the public Qwen3 parts, its own decoding, and leak probes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from remote.drafter.attention import Backend
from remote.drafter.blocks import Blocks, Row, build_blocks
from remote.drafter.model import DFlashDrafter, DraftCache, RMSNorm, tensor_shapes
from remote.drafter.rope import rotary, rotate
from remote.spec import DrafterSpec, TargetSpec, num_drafter_parameters
from tests.remote.cuda import needs_cuda
from tests.remote.drafter_oracle import oracle_forward
from tests.remote.packed import MASK_ID, blocks_of, packed_row, relative_error
from tests.remote.specs import tiny_spec

pytestmark = pytest.mark.slow  # whole models in float64

TARGET = tiny_spec().target
PLAIN = replace(tiny_spec().drafter, head_dim=10)  # 4 heads × 10 ≠ hidden 32
MIXED = replace(PLAIN, layer_types=["sliding", "full"], sliding_window=6)
SLIDING = replace(PLAIN, layer_types=["sliding", "sliding"], sliding_window=6)

QWEN_27B = TargetSpec("x", 5120, 64, 248_320, False, 27_000_000_000, 248_044, 248_044)
QWEN_27B_DRAFTER = DrafterSpec(
    num_layers=5,
    intermediate_size=17_408,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    captured_layers=[1, 16, 31, 46, 61],
    block_size=16,
    mask_token_id=248_070,
    rope_theta=1e7,
    max_position_embeddings=262_144,
)


def make(
    drafter: DrafterSpec = PLAIN, *, backend: str = "sdpa", checkpointing="none", dtype=torch.float64
) -> DFlashDrafter:
    model = DFlashDrafter(TARGET, drafter, backend=Backend(backend, "test"), activation_checkpointing=checkpointing)
    model.init_weights(torch.Generator().manual_seed(5))
    with torch.no_grad():  # larger than at the start of training, so that attention is far from uniform
        for parameter in model.parameters():
            parameter.mul_(1 + 9 * (parameter.ndim == 2))
            parameter.add_(
                0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            )
    return model.to(dtype)


def batch(row: Row | None = None, *, num_slots: int = 7, dtype=torch.float64) -> tuple[Row, Blocks, Tensor, Tensor]:
    row = row or packed_row([17, 9, 5], padding=2)
    blocks = blocks_of(row, num_slots=num_slots, max_anchors=num_slots - 1, block_size=4)
    return row, blocks, features_of(row, dtype), table(dtype)[blocks.ids_T]


def features_of(row: Row, dtype=torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    return torch.randn(len(row.input_ids_S), 3 * TARGET.hidden_size, generator=generator, dtype=torch.float64).to(dtype)


def table(dtype=torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(12)
    return torch.randn(TARGET.vocab_size, TARGET.hidden_size, generator=generator, dtype=torch.float64).to(dtype)


def test_forward_equals_the_description_written_out() -> None:
    model = make()
    row, blocks, features_SC, embedded_TH = batch()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    hidden_TH = model(features_SC, embedded_TH, row, blocks)

    oracle = oracle_forward(weights, PLAIN, row, blocks, features_SC=features_SC, embedded_TH=embedded_TH)
    assert relative_error(hidden_TH.detach(), oracle) < 1e-13


def test_27b_drafter_has_its_published_number_of_parameters() -> None:
    with torch.device("meta"):
        model = DFlashDrafter(QWEN_27B, QWEN_27B_DRAFTER, backend=Backend("sdpa", "count"))

    counted = sum(parameter.numel() for parameter in model.parameters())

    assert counted == 1_730_213_120 == num_drafter_parameters(QWEN_27B, QWEN_27B_DRAFTER)


def test_tensor_names_and_shapes_are_the_exported_ones() -> None:
    shapes = tensor_shapes(QWEN_27B, QWEN_27B_DRAFTER)

    expected = {"fc.weight": (5120, 25_600), "hidden_norm.weight": (5120,), "norm.weight": (5120,)}
    for i in range(5):
        expected |= {
            f"layers.{i}.input_layernorm.weight": (5120,),
            f"layers.{i}.post_attention_layernorm.weight": (5120,),
            f"layers.{i}.self_attn.q_proj.weight": (4096, 5120),
            f"layers.{i}.self_attn.k_proj.weight": (1024, 5120),
            f"layers.{i}.self_attn.v_proj.weight": (1024, 5120),
            f"layers.{i}.self_attn.o_proj.weight": (5120, 4096),
            f"layers.{i}.self_attn.q_norm.weight": (128,),
            f"layers.{i}.self_attn.k_norm.weight": (128,),
            f"layers.{i}.mlp.gate_proj.weight": (17_408, 5120),
            f"layers.{i}.mlp.up_proj.weight": (17_408, 5120),
            f"layers.{i}.mlp.down_proj.weight": (5120, 17_408),
        }
    assert shapes == expected
    assert len(shapes) == 11 * 5 + 3
    assert set(make().state_dict()) == set(tensor_shapes(TARGET, PLAIN))


def test_norm_and_rotary_are_those_of_qwen3_bit_for_bit() -> None:
    from transformers import Qwen3Config
    from transformers.models.qwen3 import modeling_qwen3 as public

    generator = torch.Generator().manual_seed(0)
    x_NHD = torch.randn(50, 4, 64, generator=generator)
    position_N = torch.randint(0, 30_000, (50,), generator=generator)
    norm, theirs = RMSNorm(64, 1e-6), public.Qwen3RMSNorm(64, 1e-6)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(64, generator=generator))
        theirs.weight.copy_(norm.weight)
    config = Qwen3Config(head_dim=64, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    cos, sin = public.Qwen3RotaryEmbedding(config)(x_NHD, position_N[None])
    turned, _ = public.apply_rotary_pos_emb(x_NHD.transpose(0, 1)[None], x_NHD.transpose(0, 1)[None], cos, sin)

    ours = rotate(x_NHD, rotary(position_N, head_dim=64, theta=1e6, dtype=torch.float32))

    assert torch.equal(norm(x_NHD), theirs(x_NHD))
    assert torch.equal(ours, turned[0].transpose(0, 1))


@pytest.mark.parametrize("drafter", [PLAIN, MIXED, SLIDING, replace(MIXED, window_rule="speculators")])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_decoding_with_a_cache_equals_the_training_forward(drafter: DrafterSpec, backend: str) -> None:
    """One text; the context arrives in pieces of uneven size, as rounds of decoding accept it."""
    model, row = make(drafter, backend=backend), packed_row([20])
    anchors = torch.tensor([3, 4, 9, 15])
    blocks = build_blocks(row, anchors, torch.ones(4, dtype=torch.bool), block_size=4, mask_token_id=MASK_ID)
    features_SC, embedded_TH = features_of(row), table()[blocks.ids_T]
    trained = model(features_SC, embedded_TH, row, blocks)

    cache, done = DraftCache(drafter.num_layers), 0
    for number, anchor in enumerate(anchors.tolist()):
        rows = slice(number * 4, number * 4 + 4)
        decoded = model.draft(features_SC[done:anchor], cache, embedded_TH[rows])
        done = anchor

        assert cache.num_tokens == anchor
        assert relative_error(decoded, trained[rows].detach()) < 1e-13


def test_packed_documents_give_what_each_gives_alone() -> None:
    model, (row, blocks, features_SC, embedded_TH) = make(MIXED), batch()
    packed = model(features_SC, embedded_TH, row, blocks).detach().view(-1, 4, TARGET.hidden_size)

    for document in (0, 1, 2):
        where = row.document_S == document
        alone = Row(row.input_ids_S[where], row.document_S[where], row.position_S[where], row.loss_mask_S[where])
        mine = (blocks.document_N == document).nonzero().flatten()
        anchors = blocks.anchors_N[mine] - int(where.nonzero()[0])
        piece = build_blocks(
            alone, anchors, torch.ones_like(anchors, dtype=torch.bool), block_size=4, mask_token_id=MASK_ID
        )
        own = model(features_SC[where], table()[piece.ids_T], alone, piece).detach()

        assert relative_error(own.view(-1, 4, TARGET.hidden_size), packed[mine]) < 1e-13


@pytest.mark.parametrize("mode", ["non_reentrant", "reentrant"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_activation_checkpointing_changes_no_gradient(mode: str, backend: str) -> None:
    row, blocks, features_SC, embedded_TH = batch()

    def gradients(checkpointing: str) -> list[Tensor]:
        model = make(MIXED, backend=backend, checkpointing=checkpointing)
        model(features_SC, embedded_TH, row, blocks).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    for kept, again in zip(gradients("none"), gradients(mode), strict=True):
        # reentrant checkpoints add the context's gradients of the layers up in another order
        assert relative_error(again, kept) <= (1e-14 if mode == "reentrant" else 0)


@pytest.mark.parametrize("checkpointing", ["none", "non_reentrant", "reentrant"])
def test_rows_that_are_asked_for_are_those_of_the_whole_with_their_gradients(checkpointing: str) -> None:
    row, blocks, features_SC, embedded_TH = batch()
    rows_M = blocks.supervised_T.nonzero().flatten()
    whole, some = make(MIXED, checkpointing=checkpointing), make(MIXED, checkpointing=checkpointing)

    expected_MH = whole(features_SC, embedded_TH, row, blocks)[rows_M]
    found_MH = some(features_SC, embedded_TH, row, blocks, rows_M)
    weight_MH = features_of(row)[: len(rows_M), : TARGET.hidden_size].repeat(len(rows_M), 1)[: len(rows_M)]
    (expected_MH * weight_MH).sum().backward()
    (found_MH * weight_MH).sum().backward()

    assert 0 < len(rows_M) < len(blocks.supervised_T)
    assert relative_error(found_MH.detach(), expected_MH.detach()) < 1e-14
    for ours, theirs in zip(some.parameters(), whole.parameters(), strict=True):
        assert relative_error(ours.grad, theirs.grad) < 1e-12


def test_rows_that_nobody_reads_cost_no_work_in_the_last_mlp() -> None:
    row, blocks, features_SC, embedded_TH = batch()
    rows_M = blocks.supervised_T.nonzero().flatten()
    model = make(MIXED)

    def operations(wanted_M: Tensor | None) -> int:
        with FlopCounterMode(display=False) as counter:
            model(features_SC, embedded_TH, row, blocks, wanted_M).sum().backward()
        return counter.get_total_flops()

    spared = len(blocks.supervised_T) - len(rows_M)
    a_row = PLAIN.num_heads * PLAIN.head_dim * TARGET.hidden_size + 3 * TARGET.hidden_size * PLAIN.intermediate_size
    assert operations(None) - operations(rows_M) == 3 * 2 * spared * a_row


@pytest.mark.parametrize("checkpointing", ["none", "non_reentrant", "reentrant"])
@pytest.mark.parametrize("drafter", [MIXED, replace(PLAIN, num_layers=1)])
def test_mask_slots_given_once_are_the_mask_slots_given_each(drafter: DrafterSpec, checkpointing: str) -> None:
    row, blocks, features_SC, embedded_TH = batch()
    each, once = (make(drafter, checkpointing=checkpointing) for _ in range(2))
    weight_TH = embedded_TH.flip(0)

    expected_TH = each(features_SC, embedded_TH, row, blocks)
    found_TH = once(features_SC, table()[blocks.distinct_ids], row, blocks)
    (expected_TH * weight_TH).sum().backward()
    (found_TH * weight_TH).sum().backward()

    assert blocks.distinct_ids.tolist() == [*blocks.ids_T[:: blocks.block_size].tolist(), MASK_ID]
    assert relative_error(found_TH.detach(), expected_TH.detach()) < 1e-14
    for ours, theirs in zip(once.parameters(), each.parameters(), strict=True):
        assert relative_error(ours.grad, theirs.grad) < 1e-12


def test_mask_slots_given_once_cost_the_first_layer_one_row_of_queries_keys_and_values() -> None:
    row, blocks, features_SC, embedded_TH = batch()
    model = make(MIXED)

    def operations(embeddings: Tensor) -> int:
        with FlopCounterMode(display=False) as counter:
            model(features_SC, embeddings, row, blocks).sum().backward()
        return counter.get_total_flops()

    spared = len(blocks.ids_T) - len(blocks.distinct_ids)
    a_row = (PLAIN.num_heads + 2 * PLAIN.num_kv_heads) * PLAIN.head_dim * TARGET.hidden_size
    assert operations(embedded_TH) - operations(table()[blocks.distinct_ids]) == 3 * 2 * spared * a_row


def test_no_row_at_all_reaches_every_parameter_with_a_gradient_of_zero() -> None:
    row, blocks, features_SC, embedded_TH = batch()
    model = make(MIXED)

    model(features_SC, embedded_TH, row, blocks, torch.empty(0, dtype=torch.int64)).sum().backward()

    assert all(not parameter.grad.any() for parameter in model.parameters())


def test_every_parameter_gets_a_gradient() -> None:
    row, blocks, features_SC, embedded_TH = batch()
    model = make(MIXED)

    model(features_SC, embedded_TH, row, blocks).square().sum().backward()

    assert [name for name, parameter in model.named_parameters() if not parameter.grad.any()] == []


def test_row_without_anchors_reaches_every_parameter_with_a_finite_gradient() -> None:
    row, blocks, features_SC, embedded_TH = batch(packed_row([1, 1, 1], padding=3))
    model = make(MIXED)

    model(features_SC, embedded_TH, row, blocks).square().sum().backward()

    assert not blocks.keep_N.any()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_initial_weights_depend_on_the_seed_alone() -> None:
    models = [DFlashDrafter(TARGET, PLAIN, backend=Backend("sdpa", "test")) for _ in range(3)]

    for model, seed in zip(models, (1, 1, 2), strict=True):
        model.init_weights(torch.Generator().manual_seed(seed))

    first, twin, other = (model.layers[1].mlp.up_proj.weight for model in models)
    assert torch.equal(first, twin)
    assert not torch.equal(first, other)
    assert float(first.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert models[0].norm.weight.eq(1).all()


def test_bfloat16_stays_near_float64() -> None:
    row, blocks, features_SC, embedded_TH = batch()
    exact = make(MIXED)(features_SC, embedded_TH, row, blocks).detach()

    rounded = make(MIXED, dtype=torch.bfloat16)(features_SC, embedded_TH, row, blocks).detach()

    assert rounded.dtype == torch.bfloat16
    assert relative_error(rounded, exact) < 0.05


@needs_cuda
@pytest.mark.parametrize("backend", ["flex", "sdpa"])
def test_float32_on_cuda_equals_float64_on_the_cpu_with_gradients(backend: str) -> None:
    spec = replace(MIXED, head_dim=16)
    row, blocks, features_SC, embedded_TH = batch()
    gradients = []
    for device, dtype, name in (("cpu", torch.float64, "eager"), ("cuda", torch.float32, backend)):
        model = make(spec, backend=name, dtype=dtype).to(device)
        hidden_TH = model(features_SC.to(device, dtype), embedded_TH.to(device), row.to(device), blocks.to(device))
        hidden_TH.square().sum().backward()
        gradients.append([parameter.grad.cpu() for parameter in model.parameters()])

    assert max(relative_error(ours, exact) for exact, ours in zip(*gradients, strict=True)) < 1e-3


# ---- leak probes: what a block must not see changes nothing, bit for bit; what it may see changes something

PROBES: dict[str, DrafterSpec] = {
    "full": PLAIN,
    "sliding": SLIDING,
    "speculators": replace(SLIDING, window_rule="speculators"),
    "mixed": MIXED,
}


class Probe:
    """One model and batch; `changed` says which of (block, slot) an edit of the inputs reaches."""

    def __init__(self, spec: DrafterSpec, backend: str) -> None:
        self.row, self.blocks, self.features_SC, _ = batch(dtype=torch.float32)
        self.model = make(spec, backend=backend, dtype=torch.float32)
        self.before = self._hidden(self.row, self.features_SC)

    def feature(self, position: int) -> Tensor:
        features_SC = self.features_SC.clone()
        features_SC[position] += 100.0
        return self._changed(self.row, features_SC)

    def token(self, position: int) -> Tensor:
        ids_S = self.row.input_ids_S.clone()
        ids_S[position] = 4 + (ids_S[position] - 3) % 92
        return self._changed(replace(self.row, input_ids_S=ids_S), self.features_SC)

    def _changed(self, row: Row, features_SC: Tensor) -> Tensor:
        return (self.before != self._hidden(row, features_SC)).any(-1).view(-1, 4)

    def _hidden(self, row: Row, features_SC: Tensor) -> Tensor:
        blocks = build_blocks(row, self.blocks.anchors_N, self.blocks.keep_N, block_size=4, mask_token_id=MASK_ID)
        with torch.no_grad():
            return self.model(features_SC, table(torch.float32)[blocks.ids_T], row, blocks)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("probe", PROBES)
def test_hidden_state_of_each_position_reaches_exactly_the_slots_that_may_see_it(probe: str, backend: str) -> None:
    probed = Probe(PROBES[probe], backend)
    row, blocks = probed.row, probed.blocks
    window = {"sliding": 5, "speculators": 6}.get(probe)

    for position in range(len(row.input_ids_S)):
        changed = probed.feature(position)

        for b, (anchor, keep) in enumerate(zip(blocks.anchors_N.tolist(), blocks.keep_N.tolist(), strict=True)):
            may_see = keep and position < anchor and row.document_S[position] == row.document_S[anchor]
            assert not changed[b].any() or may_see
            if window is None:
                assert bool(changed[b].any()) == bool(may_see)
            elif may_see and position >= anchor - window:
                assert changed[b, 0]


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_one_sliding_layer_forgets_what_left_its_window_slot_by_slot(backend: str) -> None:
    probed = Probe(replace(SLIDING, num_layers=1, layer_types=["sliding"]), backend)
    blocks = probed.blocks

    for position in range(17):
        changed = probed.feature(position)

        for b in (blocks.document_N == 0).nonzero().flatten().tolist():
            anchor = int(blocks.anchors_N[b])
            assert changed[b].tolist() == [anchor + k - 5 <= position < anchor for k in range(4)]


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_tokens_reach_only_the_block_anchored_on_them(backend: str) -> None:
    probed = Probe(PLAIN, backend)
    blocks = probed.blocks

    for position in range(len(probed.row.input_ids_S)):
        changed = probed.token(position)

        anchored = ((blocks.anchors_N == position) & blocks.keep_N)[:, None].expand(-1, 4)
        assert torch.equal(changed, anchored)


@pytest.mark.parametrize("probe", ["full", "sliding"])
def test_in_the_block_later_slots_are_hidden_exactly_where_the_layer_is_causal(probe: str) -> None:
    """One slot's embedding is changed: causal layers carry it to later slots only, full layers to all."""
    row, blocks, features_SC, embedded_TH = batch(dtype=torch.float32)
    model = make(PROBES[probe], dtype=torch.float32)
    before = model(features_SC, embedded_TH, row, blocks).detach().view(-1, 4, TARGET.hidden_size)

    for k in range(4):
        edited = embedded_TH.clone().view(-1, 4, TARGET.hidden_size)
        edited[:, k] += 1.0
        after = model(features_SC, edited.flatten(0, 1), row, blocks).detach().view(before.shape)

        changed = (before != after).any(-1)
        assert changed.all(0).tolist() == [j >= k or probe == "full" for j in range(4)]
        assert changed.any(0).tolist() == changed.all(0).tolist()
