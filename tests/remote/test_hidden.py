"""The cache keeps the target's expectation beside its hidden states, for whom it is asked for, and makes nothing twice.

What the hidden states' own files promise is tested in test_prepare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from remote.drafter import hidden
from remote.drafter.data import Chat, Document, tokenise
from remote.drafter.hidden import cached_hidden, expected_path, forecast_bytes, shard_path
from remote.drafter.prepare import load_rows
from remote.drafter.target import Target
from remote.drafter.teacher import Expectation, expect
from remote.plan.sizes import sizes
from remote.plan.target import kept_bytes
from remote.report import UserFault
from remote.spec import DFlashSpec
from tests.remote.jobs import tiny_job_spec, write_data

pytestmark = pytest.mark.usefixtures("without_triton")  # its interpreter takes minutes over so many logits

LAYERS = [1, 2, 4]
HEADERS_BYTES = 1024  # of the two files of a shard
KL: dict[str, Any] = {"loss": {"terms": {"ce": 1.0, "kl": 0.15}}}


@pytest.fixture(scope="module")
def many(tiny_target: Target) -> list[Document]:
    """Documents of three shards."""
    turn = {"role": "assistant", "content": "x" * 500}
    chats = [Chat(({"role": "user", "content": str(i)}, turn), where="x") for i in range(12)]
    return tokenise(chats, tiny_target, row_tokens=1024)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every pass through the target's layers."""
    seen, capture = list[int](), Target.capture

    def counted(self: Target, ids_S: torch.Tensor, *rest: torch.Tensor, layers: Sequence[int]) -> Any:
        seen.append(len(ids_S))
        return capture(self, ids_S, *rest, layers=layers)

    monkeypatch.setattr(Target, "capture", counted)
    return seen


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Of every file: when it was written, and what it holds."""
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir() if path.is_file()}


def test_a_branch_whose_loss_reads_no_target_keeps_no_expectation_and_one_that_does_adds_it_without_the_layers(
    tmp_path: Path, tiny_target: Target, tiny_target_spec, tiny_drafter_spec, captures: list[int]
) -> None:
    plain = tiny_job_spec(tiny_target_spec, tiny_drafter_spec)
    soft = tiny_job_spec(tiny_target_spec, tiny_drafter_spec, **KL)
    labels = tiny_job_spec(tiny_target_spec, tiny_drafter_spec, loss={"label": "teacher_argmax"})
    data_dir = write_data(tmp_path / "data")

    def files(spec: DFlashSpec) -> dict[str, tuple[int, bytes]]:
        load_rows(spec, tiny_target, data_dir=data_dir, cache=tmp_path / "cache")
        (folder,) = (tmp_path / "cache" / "hidden").iterdir()
        return contents(folder)

    before, passes = files(plain), len(captures)
    after = files(soft)

    assert passes == 1
    assert {name.split("-")[0] for name in before} == {"shard", "lock"}
    assert {name: after[name] for name in before if name != "lock"} == {
        name: kept for name, kept in before.items() if name != "lock"
    }
    assert sorted(set(after) - set(before)) == ["expected-v1-00000.json", "expected-v1-00000.safetensors"]
    assert files(labels).keys() == files(plain).keys() == after.keys()
    assert len(captures) == passes


def test_a_document_read_back_is_what_its_last_hidden_states_are_expected_to_be(
    tmp_path: Path, tiny_target: Target, many: list[Document]
) -> None:
    plain = cached_hidden(many, tiny_target, LAYERS, cache=tmp_path)
    taught = cached_hidden(many, tiny_target, LAYERS, cache=tmp_path, is_taught_ahead=True)

    for index in (0, 5, len(many) - 1):
        last_hidden_SH, found = plain.document(index).teacher, taught.document(index).teacher
        assert isinstance(last_hidden_SH, torch.Tensor)
        assert isinstance(found, Expectation)
        for ours, theirs in zip(found.tensors, expect(last_hidden_SH, tiny_target.head_VH).tensors, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert torch.equal(taught.document(index).features_SC, plain.document(index).features_SC)


def removed(path: Path) -> None:
    path.unlink()


def damaged(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def unproved(path: Path) -> None:
    path.with_suffix(".json").unlink()


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [removed, damaged, unproved])
def test_an_expectation_that_is_missing_or_damaged_is_one_clear_line_and_remade_alone(
    tmp_path: Path, tiny_target: Target, many: list[Document], captures: list[int], spoil: Callable[[Path], None]
) -> None:
    cached = cached_hidden(many, tiny_target, LAYERS, cache=tmp_path, is_taught_ahead=True)
    before, passes = contents(cached.folder), len(captures)
    spoil(expected_path(cached.folder, 1))
    (of_it,) = {index for index, (shard, start) in enumerate(cached.spans) if (shard, start) == (1, 0)}

    with pytest.raises(UserFault, match=r"expected-v1-00001\.safetensors: .*run prepare again") as caught:
        replace(cached, _open={}).document(of_it)
    cached_hidden(many, tiny_target, LAYERS, cache=tmp_path, is_taught_ahead=True)

    assert "\n" not in str(caught.value)
    after = contents(cached.folder)
    assert {name: text for name, (_, text) in after.items()} == {name: text for name, (_, text) in before.items()}
    assert {name for name in after if after[name] != before[name]} <= {
        "expected-v1-00001.json",
        "expected-v1-00001.safetensors",
    }
    assert len(captures) == passes == 3


@pytest.mark.slow
def test_what_another_version_made_is_made_anew(
    tmp_path: Path, tiny_target: Target, many: list[Document], captures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder's name knows the target alone, and an expectation is our arithmetic."""
    before = cached_hidden(many, tiny_target, LAYERS, cache=tmp_path, is_taught_ahead=True)
    passes = len(captures)
    monkeypatch.setattr(hidden, "EXPECTATION_VERSION", hidden.EXPECTATION_VERSION + 1)

    after = cached_hidden(many, tiny_target, LAYERS, cache=tmp_path, is_taught_ahead=True)

    assert after.folder == before.folder
    assert len(list(after.folder.glob("expected-v*-00000.safetensors"))) == 2
    assert len(captures) == passes


@pytest.mark.slow
def test_hidden_states_that_are_damaged_are_remade_and_the_expectation_stays(
    tmp_path: Path, tiny_target: Target, many: list[Document], captures: list[int]
) -> None:
    cached = cached_hidden(many, tiny_target, LAYERS, cache=tmp_path, is_taught_ahead=True)
    before, passes = contents(cached.folder), len(captures)
    damaged(shard_path(cached.folder, 2))

    cached_hidden(many, tiny_target, LAYERS, cache=tmp_path, is_taught_ahead=True)

    after = contents(cached.folder)
    assert len(captures) == passes + 1
    assert {name for name in after if after[name] != before[name]} <= {"shard-00002.json", "shard-00002.safetensors"}


@pytest.mark.slow
@pytest.mark.parametrize("is_taught_ahead", [False, True])
def test_the_forecast_is_what_the_files_take(
    tmp_path: Path, tiny_target: Target, many: list[Document], is_taught_ahead: bool
) -> None:
    few = [
        document
        for document, (shard, _) in zip(many, hidden._spans(hidden._shards(many), many), strict=True)
        if shard == 0
    ]

    cached = cached_hidden(few, tiny_target, LAYERS, cache=tmp_path, is_taught_ahead=is_taught_ahead)

    size = sum(path.stat().st_size for path in cached.folder.glob("*.safetensors"))
    assert 0 <= size - forecast_bytes(few, tiny_target, LAYERS, is_taught_ahead=is_taught_ahead) < HEADERS_BYTES


@pytest.mark.parametrize("changed", [{}, KL])
def test_a_plan_says_of_a_token_what_the_forecast_takes_of_it(
    tiny_target: Target, tiny_target_spec, tiny_drafter_spec, many: list[Document], changed: dict[str, Any]
) -> None:
    spec = tiny_job_spec(tiny_target_spec, tiny_drafter_spec, **changed)
    layers, is_ahead = spec.drafter.captured_layers, bool(changed)
    num_tokens = sum(len(document.ids) for document in many)

    assert spec.target.hidden_size == tiny_target.spec.hidden_size
    planned = kept_bytes(spec, sizes(spec, device="cpu"))
    assert planned * num_tokens == forecast_bytes(many, tiny_target, layers, is_taught_ahead=is_ahead)
    online = replace(spec, data=replace(spec.data, hidden_states="online"))
    assert kept_bytes(online, sizes(online, device="cpu")) == 0


@pytest.mark.slow
def test_the_room_looked_for_is_that_of_the_files_that_are_missing(
    tmp_path: Path, tiny_target: Target, many: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()
    monkeypatch.setattr(hidden, "_check_room", lambda folder, needed_bytes: asked.append(needed_bytes))
    plain, whole = (forecast_bytes(many, tiny_target, LAYERS, is_taught_ahead=each) for each in (False, True))

    for is_taught_ahead in (False, True, True):
        cached_hidden(many, tiny_target, LAYERS, cache=tmp_path, is_taught_ahead=is_taught_ahead)
    cached_hidden(many, tiny_target, LAYERS, cache=tmp_path / "other", is_taught_ahead=True)

    assert asked == [plain, whole - plain, whole]
