"""Our forward pass and cache against the library's own forward, for each family we run."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from remote.drafter import product
from remote.drafter.decoder import Decoder, View, can_run

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama with scaled rotary": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "llama with biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral with a window": MistralConfig(**SIZES, sliding_window=6),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen3 with sliding layers": Qwen3Config(
        **SIZES, head_dim=16, use_sliding_window=True, sliding_window=5, max_window_layers=2
    ),
}


@pytest.fixture(params=CONFIGS, ids=str)
def model(request):
    torch.manual_seed(1)
    made = AutoModelForCausalLM.from_config(CONFIGS[request.param]).eval()
    for parameter in made.parameters():  # biases and norms start as constants, which would hide a mistake
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def random_ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(2))


def positions(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(ids.shape[1]).expand_as(ids)


@pytest.mark.slow
@torch.no_grad()
def test_every_captured_layer_is_the_next_hidden_state_of_the_library(model):
    ids = random_ids(2, 17)
    theirs = model(ids, output_hidden_states=True, use_cache=False).hidden_states

    ours = Decoder(model.model, model.config).run(ids, positions(ids), layers=[0, 1, 2])

    for layer, features in zip((0, 1, 2), ours.features_BQC.chunk(3, dim=-1), strict=True):
        torch.testing.assert_close(features, theirs[layer + 1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.last_hidden_BQH, theirs[-1], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_decoding_in_pieces_is_the_whole_sequence_at_once(model):
    ids = random_ids(1, 21)
    decoder = Decoder(model.model, model.config)
    cache = decoder.new_cache(batch=1, capacity=4)  # too small on purpose: it has to grow
    pieces = [(0, 8), (8, 9), (9, 14), (14, 21)]

    states = [decoder.run(ids[:, a:b], positions(ids)[:, a:b], cache=cache, layers=[1]) for a, b in pieces]

    whole = decoder.run(ids, positions(ids), layers=[1])
    torch.testing.assert_close(
        torch.cat([s.last_hidden_BQH for s in states], 1), whole.last_hidden_BQH, rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(torch.cat([s.features_BQC for s in states], 1), whole.features_BQC, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_padded_row_decodes_as_it_would_alone(model):
    decoder = Decoder(model.model, model.config)
    ids, lengths = random_ids(2, 9), [9, 6]
    real = torch.tensor([[i < n for i in range(9)] for n in lengths])
    cache = decoder.new_cache(batch=2, capacity=16)
    decoder.run(ids, positions(ids), cache=cache, view=View(real_BQ=real))

    following = torch.tensor([[5], [7]])
    batched = decoder.run(following, torch.tensor([[9], [6]]), cache=cache).last_hidden_BQH

    for row, length in enumerate(lengths):
        alone = torch.cat([ids[row : row + 1, :length], following[row : row + 1]], dim=1)
        expected = decoder.run(alone, positions(alone)).last_hidden_BQH[0, -1]
        torch.testing.assert_close(batched[row, 0], expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_tree_mask_gives_each_node_the_states_of_its_own_path(model):
    decoder = Decoder(model.model, model.config)
    prompt, nodes = random_ids(1, 7), torch.tensor([[3, 11, 12, 13, 14]])
    parents = [None, 0, 0, 1, 2]  # two branches under the root
    allow = torch.zeros(5, 5, dtype=torch.bool)
    paths = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent is not None else []), node])
        allow[node, paths[node]] = True
    depth = torch.tensor([[len(path) - 1 for path in paths]])
    cache = decoder.new_cache(batch=1, capacity=32)
    decoder.run(prompt, positions(prompt), cache=cache)

    states = decoder.run(nodes, 7 + depth, cache=cache, view=View(allow_QQ=allow)).last_hidden_BQH

    for node, path in enumerate(paths):
        alone = torch.cat([prompt, nodes[:, path]], dim=1)
        expected = decoder.run(alone, positions(alone)).last_hidden_BQH[0, -1]
        torch.testing.assert_close(states[0, node], expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_compacted_cache_goes_on_as_if_only_the_kept_path_had_been_decoded(model):
    decoder = Decoder(model.model, model.config)
    prompt, nodes = random_ids(1, 7), torch.tensor([[3, 11, 12, 13]])
    allow = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    cache = decoder.new_cache(batch=1, capacity=32)
    decoder.run(prompt, positions(prompt), cache=cache)
    decoder.run(nodes, torch.tensor([[7, 8, 8, 9]]), cache=cache, view=View(allow_QQ=allow))

    cache.compact(7, [0, 2, 3])
    after = decoder.run(torch.tensor([[20]]), torch.tensor([[10]]), cache=cache).last_hidden_BQH[0, 0]

    alone = torch.cat([prompt, torch.tensor([[3, 12, 13, 20]])], dim=1)
    torch.testing.assert_close(after, decoder.run(alone, positions(alone)).last_hidden_BQH[0, -1], rtol=1e-4, atol=1e-5)


def test_a_cropped_cache_forgets_and_refuses_to_grow_by_cropping():
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3"]).eval()
    decoder = Decoder(model.model, model.config)
    cache = decoder.new_cache(batch=1, capacity=8)
    ids = random_ids(1, 6)
    decoder.run(ids, positions(ids), cache=cache)

    cache.crop(4)

    assert cache.length == 4
    with pytest.raises(ValueError, match="cannot crop a cache of 4 slots to 5"):
        cache.crop(5)


def test_only_models_whose_forward_this_is_are_run_here():
    other, dynamic = LlamaConfig(**SIZES), LlamaConfig(**SIZES)
    other.model_type = "mamba"
    dynamic.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}

    assert can_run(CONFIGS["qwen3"])
    assert not can_run(other)
    assert not can_run(dynamic)


@pytest.mark.parametrize("has_onednn", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (2,), (7,), (2, 4), (1, 17), (56,)])
def test_a_product_is_the_sum_by_either_library_whatever_the_number_of_rows(shape, dtype, has_onednn, monkeypatch):
    """Also of a matrix that is turned round, as the gradient through the head wants it, and with a gradient of its own."""
    assert product.has_onednn(), "the pinned torch has lost the operator: look for its heir"
    monkeypatch.setattr(product, "has_onednn", lambda: has_onednn)
    generator = torch.Generator().manual_seed(3)
    x, weight, bias = (torch.randn(*size, generator=generator).to(dtype) for size in ((*shape, 24), (50, 24), (50,)))
    tolerance = 1e-5 if dtype != torch.bfloat16 else 3e-2

    for matrix, added in ((weight, bias), (weight.T.contiguous().T, bias.repeat_interleave(2)[::2])):
        with torch.no_grad():
            found = product.linear(x, matrix, added)
        assert found.dtype == dtype
        assert found.is_contiguous()
        expected = x.double() @ weight.double().T + bias.double()
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=10 * tolerance)

    product.linear(x.requires_grad_(), weight).sum().backward()
    torch.testing.assert_close(
        x.grad.double(), weight.double().sum(0).expand(x.shape), rtol=tolerance, atol=tolerance * 30
    )


class Products(TorchDispatchMode):
    """Counts by which operator float32 is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen[str(function).removesuffix(".default")] += 1
        return function(*args, **(kwargs or {}))


def test_a_pass_of_the_target_multiplies_by_onednn_alone(model):
    decoder, ids = Decoder(model.model, model.config), random_ids(1, 5)

    with Products() as counted:
        decoder.run(ids, positions(ids))

    assert counted.seen["mkldnn._linear_pointwise"] == 7 * SIZES["num_hidden_layers"]
    assert not {"aten.mm", "aten.addmm", "aten.linear"} & set(counted.seen)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the flags of this torch warn of other cards
        with torch.backends.mkldnn.flags(enabled=False), Products() as counted:
            decoder.run(ids, positions(ids))
    assert "mkldnn._linear_pointwise" not in counted.seen, "who turns oneDNN off has a reason"


class HalvedLinear(torch.nn.Linear):
    """As those of eight or four bits: its weight alone says nothing of what it computes."""

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight / 2, self.bias)


@torch.no_grad()
def test_a_linear_layer_of_another_kind_computes_in_its_own_way():
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3"]).eval()
    for layer in model.model.layers:
        for part in (layer.mlp.gate_proj, layer.mlp.down_proj, layer.self_attn.q_proj, layer.self_attn.o_proj):
            part.__class__ = HalvedLinear
    ids = random_ids(2, 9)

    ours = Decoder(model.model, model.config).run(ids, positions(ids))

    torch.testing.assert_close(ours.last_hidden_BQH, model.model(ids).last_hidden_state, rtol=1e-4, atol=1e-5)
