"""Secrets by shape and by value; words of the trade are left alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.redact import is_secret, redact, redact_tree
from remote.hiding import HIDDEN


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("login with hf_AbCdEfGhIjKlMnOp failed", "hf_AbCdEfGhIjKlMnOp"),
        ("ghp_0123456789abcdefABCDEF", "ghp_0123456789abcdefABCDEF"),
        ("key sk-proj-abcdefghijklmnop123", "sk-proj-abcdefghijklmnop123"),
        ("AWS AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
        ("https://user:s3cr3t@example.org/x", "s3cr3t"),
        ("https://:tok3n@example.org/x", "tok3n"),
        ("Authorization: Bearer abcdef0123456789", "abcdef0123456789"),
        ("HF_TOKEN=myPrivateValue", "myPrivateValue"),
        ("{'api_key': 'myPrivateValue'}", "myPrivateValue"),
        ("DB_PASSWORD: correct-horse", "correct-horse"),
        ("jwt eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdefghij", "eyJzdWIiOiIxMjM0In0"),
    ],
)
def test_secrets_of_known_shapes_are_hidden(text: str, secret: str) -> None:
    assert secret not in redact(text)
    assert HIDDEN in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "mask_token: embedding_of_16",
        "pad_token='<|endoftext|>'",
        "block_tokens_per_s=26000",
        "token=151643",
        "step 12: loss 2.31, 8192 tokens",
        "https://example.org:8080/path",
        'File "/app/tokens.py", line 3, in secret_sauce',
        "CUDA out of memory. Tried to allocate 22.31 GiB (GPU 0; 94.97 GiB total capacity)",
        "the basic idea of token trees",
    ],
)
def test_words_of_the_trade_are_left_alone(text: str) -> None:
    assert redact(text) == text


def test_a_tree_is_redacted_down_to_its_leaves() -> None:
    tree = {"env": ["HF_TOKEN=myPrivateValue"], "deep": {"text": "x hf_AbCdEfGhIjKlMnOp y", "number": 3}}

    assert redact_tree(tree) == {
        "env": [f"HF_TOKEN={HIDDEN}"],
        "deep": {"text": f"x {HIDDEN} y", "number": 3},
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DB_PASSWORD", "hunter2"),
        ("api_key", "two words"),
        ("SSH_PRIVATE_KEY", "-----BEGIN"),
        ("HF_TOKEN", "letmein"),
        ("token", "a1b2c3d4e5f6a7b8"),
        ("auth_token", "letmein"),
        ("HUB", "hf_AbCdEfGhIjKlMnOp"),
        ("ADDRESS", "redis://me:pw@host/0"),
    ],
)
def test_a_setting_is_secret_by_its_name_or_by_its_value(name: str, value: str) -> None:
    assert is_secret(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("stop_token", "<|im_end|>"),
        ("sep_token", "[SEP]"),
        ("bos_token", "BOS"),
        ("stop_token", "END_OF_TURN"),
        ("image_token", "img"),
        ("max_token", "4096"),
        ("HF_TOKEN", ""),
    ],
)
def test_configuration_is_no_secret(name: str, value: str) -> None:
    assert not is_secret(name, value)


@given(st.text(max_size=200))
def test_redacting_twice_is_redacting_once(text: str) -> None:
    assert redact(redact(text)) == redact(text)
