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


@pytest.mark.parametrize("kind", ["whole", "cut", "a file short", "unmarked"])
def test_a_folder_is_whole_here_where_it_is_for_the_trainer(tmp_path: Path, kind: str) -> None:
    (tmp_path / "weights").write_bytes(b"123" if kind == "cut" else b"12345")
    files = {"weights": {"size": 5}} | ({"config.json": {"size": 2}} if kind == "a file short" else {})
    if kind != "unmarked":
        (tmp_path / MARKER).write_text(json.dumps({"source": "x.gguf", "source_sha256": "ab" * 32, "files": files}))

    assert ready._is_whole(tmp_path, "x.gguf") is trainer._is_whole(tmp_path) is (kind == "whole")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / MARKER).write_text("[" * 100_000)
    assert not ready._is_whole(tmp_path / "deep", "x.gguf")
    assert not ready._is_whole(tmp_path, "other.gguf"), "the trainer names the folder by the file; here its marker does"


@pytest.mark.slow
def test_a_packages_file_is_found_where_the_trainer_finds_it() -> None:
    path, fault = ready._packaged("package:torch/METADATA")

    assert (path, fault) == (trainer._package_file("package:torch/METADATA"), None)
    for source in ("package:no-such-package/x.gguf", "package:torch/x.gguf"):
        _, fault = ready._packaged(source)
        with pytest.raises(UserFault) as raised:
            trainer._package_file(source)
        assert str(fault).removesuffix(" there") in str(raised.value)


def test_a_folder_is_a_target_where_it_has_a_config(tmp_path: Path) -> None:
    assert found(tmp_path, str(tmp_path), [])["target"] == (
        f"{tmp_path} is no Hugging Face folder there (it would hold a config.json)"
    )
    (tmp_path / "config.json").touch()
    assert found(tmp_path, str(tmp_path), []) == {"target": None, "is_converted": True, "missing": []}


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()

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
    (folder / MARKER).write_text(json.dumps({"source": "x.gguf", "files": {"weights": {"size": 5}}}))
    assert found(tmp_path, str(source), [])["is_converted"] is True

    (folder / "weights").write_bytes(b"123")
    assert found(tmp_path, str(source), [])["is_converted"] is False


@pytest.mark.parametrize("marker", ["", "[]", '{"source": "x.gguf"}', '{"source": "x.gguf", "files": [1]}', "{"])
def test_a_marker_of_another_shape_is_none(tmp_path: Path, marker: str) -> None:
    (tmp_path / MARKER).write_text(marker)

    assert ready._is_whole(tmp_path, "x.gguf") is False


def test_a_package_that_is_not_installed_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "package:no-such-package/x.gguf"]) == 0

    assert json.loads(capsys.readouterr().out)["target"] == "the package no-such-package is not installed there"
