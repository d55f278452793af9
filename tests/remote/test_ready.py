"""What a host has of its own: its target, converted or not, and files that are not shipped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from remote import ready
from remote.drafter import target_files as trainer
from remote.ready import MARKER, found, main
from remote.report import UserFault


def test_the_mark_of_a_converted_target_is_the_trainers() -> None:
    assert MARKER == trainer.MARKER


SHA256 = "ab" * 32
MARKED = {"source": "x.gguf", "source_sha256": SHA256, "files": {"weights": {"size": 5, "sha256": SHA256}}}
MARKS: dict[str, object] = {
    "whole": MARKED,
    "a file short": MARKED | {"files": {**MARKED["files"], "config.json": {"size": 2}}},  # type: ignore[dict-item]
    "no files": MARKED | {"files": {}},
    "files in a list": MARKED | {"files": [1]},
    "a file without facts": MARKED | {"files": {"weights": 5}},
    "no size": MARKED | {"files": {"weights": {}}},
    "a size of null": MARKED | {"files": {"weights": {"size": None}}},
    "a folder for a file": MARKED | {"files": {"deep": {"size": 4096}}},
    "no digest": {name: value for name, value in MARKED.items() if name != "source_sha256"},
    "a digest that is none": MARKED | {"source_sha256": 7},
    "a list": [],
    "no object": 5,
}


@pytest.mark.parametrize("kind", MARKS)
@pytest.mark.parametrize("weights", [b"12345", b"123", None])
def test_a_folder_is_converted_here_where_the_trainer_takes_it(
    tmp_path: Path, kind: str, weights: bytes | None
) -> None:
    (tmp_path / "deep").mkdir()
    if weights is not None:
        (tmp_path / "weights").write_bytes(weights)
    (tmp_path / MARKER).write_text(json.dumps(MARKS[kind]))

    is_whole = kind == "whole" and weights == b"12345"
    assert (ready._is_whole(tmp_path, "x.gguf"), trainer._written(tmp_path) is not None) == (is_whole, is_whole)
    assert not ready._is_whole(tmp_path, "other.gguf"), "the trainer names the folder by the file; here its marker does"


@pytest.mark.parametrize("text", [None, "", "{", "[" * 100_000])
def test_a_folder_without_a_marker_that_can_be_read_is_not_converted(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / MARKER).write_text(text)

    assert not ready._is_whole(tmp_path, "x.gguf")
    assert trainer._written(tmp_path) is None


@pytest.mark.parametrize("source", ["~nosuchuser/x", "~nosuchuser/x.gguf"])
def test_a_user_that_the_host_does_not_know_is_told_in_a_line(tmp_path: Path, source: str) -> None:
    told = found(tmp_path, source, [])["target"]

    assert told == f"{source}: this host has no user of that name; write the whole path"
    with pytest.raises(UserFault, match="this host has no user of that name; write the whole path"):
        trainer.target_folder(source, cache=tmp_path)


@pytest.mark.parametrize("source", [f"/{'x' * 300}", f"/{'x' * 300}.gguf"])
def test_a_path_that_cannot_be_looked_at_is_told_in_a_line(tmp_path: Path, source: str) -> None:
    answer = found(tmp_path, source, [source])

    assert " cannot be read there (File name too long)" in answer["target"]
    assert answer["missing"] == [source]
    with pytest.raises(UserFault, match="File name too long"):
        trainer.target_folder(source, cache=tmp_path)


@pytest.mark.slow
def test_a_packages_file_is_found_where_the_trainer_finds_it() -> None:
    path, fault = ready._packaged("package:torch/METADATA")

    assert (path, fault) == (trainer._package_file("package:torch/METADATA"), None)
    for source in ("package:no-such-package/x.gguf", "package:torch/x.gguf"):
        _, fault = ready._packaged(source)
        with pytest.raises(UserFault) as raised:
            trainer._package_file(source)
        assert str(fault).removesuffix(" there") in str(raised.value)


def test_a_folder_is_a_target_where_it_has_a_config_and_weights_that_the_trainer_reads(tmp_path: Path) -> None:
    assert found(tmp_path, str(tmp_path), [])["target"] == (
        f"{tmp_path} is no Hugging Face folder there (it would hold a config.json)"
    )
    (tmp_path / "config.json").touch()
    (tmp_path / "pytorch_model.bin").touch()
    told = found(tmp_path, str(tmp_path), [])["target"]
    assert told.startswith(f"{tmp_path} holds no .safetensors file there, and weights are read from nothing else")
    with pytest.raises(UserFault, match="no safetensors there, and weights are read from nothing else"):
        trainer.target_folder(str(tmp_path), cache=tmp_path)

    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert found(tmp_path, str(tmp_path), []) == {"target": None, "is_converted": True, "missing": []}
    assert trainer.target_folder(str(tmp_path), cache=tmp_path) == tmp_path


@pytest.mark.parametrize("text", [None, "", "[1]", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_a_part_of_the_weights_that_has_not_come_along_is_named(tmp_path: Path, text: str | None) -> None:
    """A copy that was cut short, or still goes on; what an index cannot say is seen when the weights are loaded."""
    (tmp_path / "config.json").touch()
    (tmp_path / "model-00001-of-00003.safetensors").touch()
    index = tmp_path / "model.safetensors.index.json"
    if text is not None:
        index.write_text(text)
        assert found(tmp_path, str(tmp_path), [])["target"] is None
        return
    parts = {str(number): f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)}
    index.write_text(json.dumps({"weight_map": parts}))

    told = found(tmp_path, str(tmp_path), [])["target"]

    assert told == f"{tmp_path} lacks 2 files of its weights there, model-00002-of-00003.safetensors first"


def test_an_index_left_beside_whole_weights_says_nothing_of_them(tmp_path: Path) -> None:
    """transformers and the trainer take model.safetensors before any index."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})
    )

    assert found(tmp_path, str(tmp_path), [])["target"] is None


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()

    answer = found(tmp_path, str(tmp_path), [str(tmp_path / "config.json"), "/nowhere/answers.jsonl"])

    assert answer["missing"] == ["/nowhere/answers.jsonl"]


def test_a_gguf_file_is_converted_where_the_folder_made_from_it_is_whole(tmp_path: Path) -> None:
    source = tmp_path / "x.gguf"
    assert found(tmp_path, str(source), [])["target"] == f"{source} is no file there"
    source.touch()
    assert found(tmp_path, str(source), []) == {"target": None, "is_converted": False, "missing": []}

    folder = tmp_path / "cache" / "targets" / "x-0123456789ab"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"12345")
    (folder / MARKER).write_text(json.dumps(MARKED))
    assert found(tmp_path, str(source), [])["is_converted"] is True

    (folder / "weights").write_bytes(b"123")
    assert found(tmp_path, str(source), [])["is_converted"] is False


def test_a_package_that_is_not_installed_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "package:no-such-package/x.gguf"]) == 0

    assert json.loads(capsys.readouterr().out)["target"] == "the package no-such-package is not installed there"
