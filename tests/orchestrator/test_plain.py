"""Hostile words of a host, a job and a user, on every page that shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator import cli
from orchestrator.store.rows import FailureRow, State
from orchestrator.store.writes import Store
from orchestrator.verbs.plain import shown
from tests.orchestrator.runs import batch, event, new_run

ID = "kxxxaaaa"
EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\x1b[32mgood\r\x7f\u202edne\udcff"
UNWANTED = ("\x1b]", "\x1b[2J", "\x1b[32mgood", "\x9b", "\x07", "\x7f", "\r", "\u202e")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of which every word that another machine or a person chose is hostile."""
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    evil = EVIL[:-1]  # sqlite keeps no half of a character
    with Store(tmp_path / "runs.db") as store:
        row = new_run(ID, recipe=f"r{evil}", branch=evil, host=f"h{evil}", tags=(evil,), why=evil)
        store.create_run(row)
        store.new_attempt(ID)
        values = {evil: 1.0, "loss": 2.0}
        told = [event(1, "stage", name=evil), event(2, "metrics", step=1, values=values), event(3, "note", text=evil)]
        store.ingest(batch(told, run_id=ID))
        store.note(ID, evil)
        store.replace_failures(ID, 1, [_failure(evil)])
        store.set_state(ID, State.FAILED, reason=evil, evidence=evil)
    return tmp_path


def _failure(evil: str) -> FailureRow:
    return FailureRow(
        run_id=ID, attempt=1, kind=evil, message=evil, hint=evil, source=evil, stage=evil, step=1,
        traceback=f"{evil}\n{evil}", facts={evil: evil}, at_s=1.0, is_first_cause=True,
    )  # fmt: skip


def _told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit):
        cli.main(list(words))
    said = capsys.readouterr()
    return said.out + said.err


WORDS = [["show", ID], ["wait", ID], ["metrics", ID], ["ls"], ["show", f"no{EVIL[:-1]}"], ["show", ID, "--oom"]]


@pytest.mark.slow
@pytest.mark.parametrize("words", WORDS, ids=lambda words: " ".join(words)[:9])
@pytest.mark.parametrize("colour", ["always", "never"])
def test_nothing_that_a_terminal_obeys_gets_through(
    project: Path, capsys: pytest.CaptureFixture[str], words: list[str], colour: str
) -> None:
    told = _told(capsys, *words, "--color", colour)

    assert "good" in told
    assert [found for found in UNWANTED if found in told] == []
    assert colour == "always" or "\x1b" not in told


@pytest.mark.parametrize("words", WORDS[:4], ids=lambda words: " ".join(words)[:9])
def test_json_stays_whole_and_loses_nothing(
    project: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    told = _told(capsys, *words, "--json")

    assert [found for found in UNWANTED if found in told] == []
    assert EVIL[:-1] in _words(json.loads(told))


def _words(body: Any) -> str:
    """Every key and string of a document."""
    if isinstance(body, dict):
        return "".join(_words(item) for pair in body.items() for item in pair)
    return "".join(map(_words, body)) if isinstance(body, list) else str(body)


def test_our_own_colours_and_line_breaks_stay() -> None:
    assert shown("\x1b[1m\x1b[31mred\x1b[0m\n\ttab\udc80") == "\x1b[1m\x1b[31mred\x1b[0m\n tab\N{REPLACEMENT CHARACTER}"
