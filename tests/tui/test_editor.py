"""Which editor `e` opens, and what is said where there is none to open."""

from pathlib import Path

import pytest

from orchestrator.errors import DraftyardError
from tui.editor import edit, editor


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, ["vi"]),
        ({"EDITOR": "nano"}, ["nano"]),
        ({"VISUAL": "'my editor' --wait", "EDITOR": "nano"}, ["my editor", "--wait"]),
        ({"VISUAL": " ", "EDITOR": "\t"}, ["vi"]),
        ({"VISUAL": "", "EDITOR": "nano -w"}, ["nano", "-w"]),
    ],
)
def test_the_editor_is_visual_then_editor_then_vi(environ: dict[str, str], words: list[str]) -> None:
    assert editor(environ) == words


@pytest.mark.parametrize("value", ["'open", "nano\\", '""', "'' x"])
def test_words_that_name_no_editor_are_said_with_the_variable(value: str) -> None:
    with pytest.raises(DraftyardError) as told:
        editor({"EDITOR": value})

    assert str(told.value).startswith(f"EDITOR is {value!r}")


@pytest.mark.parametrize("word", ["/nowhere/editor", "a\0b"])
def test_an_editor_that_cannot_be_started_is_said(tmp_path: Path, word: str) -> None:
    with pytest.raises(DraftyardError, match="cannot be started"):
        edit(tmp_path / "x", [word])
