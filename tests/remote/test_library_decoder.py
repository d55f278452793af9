"""Targets of other families: run by the library on whole texts, with the same results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from remote.drafter.answers import answer_batch, protocol_of
from remote.drafter.decode import Setting, decode_chain, decode_plain, decode_tree
from remote.drafter.decoder import View
from remote.drafter.evaluate import _Bench, _summary
from remote.drafter.library_decoder import LibraryDecoder, TextCache
from remote.drafter.target import load_target
from remote.drafter.target_files import silent
from tests.remote.conftest import tiny_tokenizer
from tests.remote.specs import tiny_spec
from tests.remote.test_decode import ScriptedDrafter

LAYERS = [1, 2, 4]
QUESTIONS = ["Why?", "When did they all come?", "No."]


@pytest.fixture(scope="module")
def slow_target(tiny_target, tiny_folder):
    """The tiny target again, run the general way."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    return replace(tiny_target, decoder=LibraryDecoder(model.model))


@pytest.fixture(scope="module")
def hybrid_target(tiny_target_spec, tmp_path_factory):
    """Qwen3.5 style: three layers of linear attention to one of full attention."""
    configs = pytest.importorskip("transformers.models.qwen3_5.configuration_qwen3_5")
    config = configs.Qwen3_5TextConfig(
        vocab_size=260,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        tie_word_embeddings=False,
        eos_token_id=2,
        initializer_range=0.2,
    )
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config)
    folder = tmp_path_factory.mktemp("hybrid")
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    spec = replace(
        tiny_target_spec,
        source=str(folder),
        num_layers=8,
        tied_embeddings=False,
        num_parameters=model.num_parameters(),
    )
    return load_target(spec, cache=folder, device="cpu", dtype=torch.float32)


def prompts(target):
    return [target.prompt_ids([{"role": "user", "content": text}]) for text in QUESTIONS]


def test_a_packed_row_is_captured_as_by_our_own_forward(slow_target, tiny_target):
    ids = torch.randint(4, 260, (40,), generator=torch.Generator().manual_seed(3))
    document = torch.tensor([0] * 15 + [1] * 20 + [-1] * 5)
    position = torch.cat([torch.arange(15), torch.arange(20), torch.zeros(5, dtype=torch.long)])

    slow = slow_target.capture(ids, document, position, layers=LAYERS)

    for found, expected in zip(slow, tiny_target.capture(ids, document, position, layers=LAYERS), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_batched_answers_are_those_of_our_own_forward(slow_target, tiny_target):
    protocol = protocol_of(tiny_target, temperature=0.0, max_tokens=8, seed=0)

    assert answer_batch(slow_target, prompts(slow_target), protocol) == answer_batch(
        tiny_target, prompts(tiny_target), protocol
    )


def test_a_tree_is_read_path_by_path(slow_target, tiny_target):
    allow = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [1, 1, 0, 0, 1]]).bool()
    nodes, depth = torch.tensor([[7, 8, 9, 10, 11]]), torch.tensor([[0, 1, 1, 2, 2]])
    found = []
    for target in (slow_target, tiny_target):
        cache = target.new_cache()
        target.step(torch.tensor([[5, 6, 7, 8]]), torch.arange(4)[None], cache=cache)
        found.append(target.step(nodes, depth + 4, cache=cache, layers=LAYERS, view=View(allow_QQ=allow)))

    torch.testing.assert_close(found[0].last_hidden_BQH, found[1].last_hidden_BQH, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[0].features_BQC, found[1].features_BQC, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@torch.no_grad()
def test_a_hybrid_targets_documents_do_not_meet(hybrid_target):
    ids = torch.randint(4, 260, (30,), generator=torch.Generator().manual_seed(3))
    document, position = torch.tensor([0] * 14 + [1] * 16), torch.cat([torch.arange(14), torch.arange(16)])

    features, last_hidden = hybrid_target.capture(ids, document, position, layers=[1, 3])

    assert isinstance(hybrid_target.decoder, LibraryDecoder)
    model = AutoModelForCausalLM.from_pretrained(hybrid_target.spec.source, dtype=torch.float32).eval()
    for start, end in ((0, 14), (14, 30)):
        states = model.model(ids[None, start:end], output_hidden_states=True, use_cache=False)
        expected = torch.cat([states.hidden_states[2][0], states.hidden_states[4][0]], -1)
        torch.testing.assert_close(features[start:end], expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(last_hidden[start:end], states.last_hidden_state[0], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_hybrid_target_is_drafted_for_without_loss(hybrid_target, tiny_drafter_spec):
    prompt = prompts(hybrid_target)[0]
    plain = decode_plain(hybrid_target, prompt, Setting(14))

    def drafter():
        return ScriptedDrafter(hybrid_target, tiny_drafter_spec, [*prompt, *plain.ids], skill=0.7)

    assert decode_chain(hybrid_target, drafter(), prompt, Setting(14)).ids == plain.ids
    assert decode_tree(hybrid_target, drafter(), prompt, Setting(14), budget=8).ids == plain.ids


def test_a_text_cache_crops_compacts_and_refuses_to_grow_by_cropping():
    cache = TextCache(1)
    cache.extend(torch.tensor([[4, 5, 6, 7, 8]]), None)

    cache.compact(2, [0, 2])

    assert cache.rows == [[4, 5, 6, 8]]
    cache.crop(3)
    assert cache.real(0) == [4, 5, 6]
    with pytest.raises(ValueError, match="cannot crop a cache of 3 slots to 4"):
        cache.crop(4)


def test_an_evaluation_says_that_speeds_of_a_target_run_by_the_library_are_no_servers(slow_target, tiny_target):
    told = [_summary(_Bench(target, tiny_spec(), silent), [], []) for target in (slow_target, tiny_target)]

    assert "every pass of this target reads its whole text again: no speed here is a server's" in told[0]
    assert "a server's" not in told[1]
