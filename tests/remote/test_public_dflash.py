"""The public package `dflash` reads our exports, computes what we compute and accepts what we accept.

It lives in an environment of its own under the test cache, with the transformers it was made for; torch is
borrowed from ours. The same environment shows that our target runs on that older transformers too.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

from remote.drafter.attention import choose_backend
from remote.drafter.blocks import Row, build_blocks
from remote.drafter.decode import Setting, decode_chain, decode_plain
from remote.drafter.export import export_drafter, load_exported
from remote.drafter.model import DFlashDrafter, DraftCache
from tests.remote.specs import tiny_spec

OLDER_TRANSFORMERS = "5.17.0"
OF_ITS_TIME = ("huggingface_hub>=1.5,<2", "httpx<1", "httpcore<2")  # what it wants and ours has not, or newer
NEW_TOKENS = 48
HERE = Path(__file__).resolve().parent

# What they share costs a minute: one process makes it.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("public_dflash"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def older_python(test_cache) -> Path:
    """The interpreter of an environment with dflash 0.1.0 and transformers 5.17, made once."""
    root = test_cache / f"dflash-0.1.0-transformers-{OLDER_TRANSFORMERS}-py{sys.version_info[0]}{sys.version_info[1]}"
    python, ready = root / "bin" / "python", root / "ready"
    root.parent.mkdir(parents=True, exist_ok=True)
    with root.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run of the tests may be making it
        if not ready.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", root], check=True)
            _install(python, "dflash==0.1.0", f"transformers=={OLDER_TRANSFORMERS}", *OF_ITS_TIME)
            ready.touch()
        # What is not in it (torch, tokenizers, pytest) comes from ours; its own packages come first.
        (site,) = root.glob("lib/python*/site-packages")
        (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def _install(python: Path, *packages: str) -> None:
    """Not compiled: of some thousand files a few dozen are loaded. Nor with what they ask for, twenty packages that are
    ours as well."""
    pip = [sys.executable, "-m", "pip", "--python", python, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "install", "--no-compile", "--no-deps", *packages],
        capture_output=True,
        text=True,
        timeout=240,
    )
    if done.returncode:
        pytest.skip(f"the package index gave no {packages[0]}: {done.stderr.strip().splitlines()[-1]}")


def run(python: Path, *words: str | Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run([python, *words], capture_output=True, text=True, timeout=timeout, env=environment)


@pytest.fixture(scope="module")
def spec(tiny_target_spec, tiny_drafter_spec):
    return replace(tiny_spec(), target=tiny_target_spec, drafter=tiny_drafter_spec)


@pytest.fixture(scope="module")
def prompts(tiny_target):
    return [tiny_target.prompt_ids([{"role": "user", "content": text}]) for text in ("One?", "And two!", "Three...")]


@pytest.fixture(scope="module")
def exported(spec, tiny_target, prompts, tmp_path_factory):
    """A drafter that has learnt the target's text to the first prompts nearly by heart, so that blocks are accepted."""
    backend = choose_backend(spec.drafter, device=torch.device("cpu"), dtype=torch.float32)
    drafter = DFlashDrafter(spec.target, spec.drafter, backend=backend)
    drafter.init_weights(torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=6e-3)
    examples = [_example(spec, tiny_target, prompt) for prompt in prompts]
    for step in range(120):
        features, row, blocks = examples[step % len(examples)]
        hidden = drafter(features, tiny_target.embed(blocks.ids_T), row, blocks)
        loss = cross_entropy(tiny_target.logits(hidden), blocks.label_T)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return export_drafter(drafter, spec, tmp_path_factory.mktemp("public") / "drafter", step=120)


def _example(spec, target, prompt):
    ids = torch.tensor([*prompt, *decode_plain(target, prompt, Setting(NEW_TOKENS)).ids])
    document, position = torch.zeros_like(ids), torch.arange(len(ids))
    features, _ = target.capture(ids, document, position, layers=spec.drafter.captured_layers)
    row = Row(ids, document, position, position >= len(prompt))
    anchors = torch.arange(len(prompt), len(ids) - 1)
    keep = torch.ones_like(anchors, dtype=torch.bool)
    return features, row, build_blocks(row, anchors, keep, block_size=4, mask_token_id=3)


@pytest.fixture(scope="module")
def ours(spec, exported):
    backend = choose_backend(spec.drafter, device=torch.device("cpu"), dtype=torch.float32)
    drafter = DFlashDrafter(spec.target, spec.drafter, backend=backend)
    load_exported(exported, drafter, spec.target)
    return drafter


@pytest.fixture(scope="module")
def given(spec):
    generator = torch.Generator().manual_seed(4)
    features = torch.randn(21, 3 * spec.target.hidden_size, generator=generator)
    return {"features": features, "block": torch.randn(4, spec.target.hidden_size, generator=generator)}


@pytest.fixture(scope="module")
def theirs(older_python, exported, given, prompts, tiny_folder):
    place = exported.parent
    save_file(given, place / "given.safetensors")
    ask = {
        "exported": str(exported),
        "target": str(tiny_folder),
        "given": str(place / "given.safetensors"),
        "prompts": prompts,
        "max_new_tokens": NEW_TOKENS,
    }
    (place / "ask.json").write_text(json.dumps(ask))
    done = run(older_python, HERE / "public_dflash.py", place / "ask.json", place / "answer.json")
    assert done.returncode == 0, done.stderr
    return json.loads((place / "answer.json").read_text())


def test_it_runs_on_the_transformers_it_was_made_for(theirs):
    assert theirs["versions"]["transformers"] == OLDER_TRANSFORMERS


def test_its_hidden_output_is_ours(theirs, ours, given):
    expected = ours.draft(given["features"], DraftCache(2), given["block"])

    torch.testing.assert_close(torch.tensor(theirs["hidden"]), expected, rtol=1e-4, atol=1e-5)


def test_it_decodes_the_same_text_and_accepts_the_same_tokens(theirs, ours, tiny_target, prompts):
    accepted = []
    for prompt, text, lengths in zip(prompts, theirs["texts"], theirs["accepted"], strict=True):
        found = decode_chain(tiny_target, ours, prompt, Setting(NEW_TOKENS))
        assert list(found.ids) == text[:NEW_TOKENS]
        assert list(found.accepted[:-1]) == lengths[:-1]  # it cuts its last block at the length limit
        accepted += lengths
    assert sum(accepted) / len(accepted) > 2  # blocks really are accepted, or this test shows nothing


def test_our_target_runs_on_the_older_transformers_too(older_python):
    tests = [HERE / "test_decoder.py", HERE / "test_target.py", HERE / "test_chat.py", HERE / "test_decode.py"]

    done = run(older_python, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests)

    assert done.returncode == 0, done.stdout[-3000:]
