"""What git says of a folder, on real work trees."""

import subprocess
from pathlib import Path

import pytest

from orchestrator.actions import git_facts as room
from orchestrator.actions.git_facts import GitFacts, git_facts


def _repository(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "code.py").write_text(text)
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
        subprocess.run(["git", "-C", str(folder), *identity, *words], check=True)
    return folder


def test_a_clean_tree_has_a_commit_and_no_patch(tmp_path: Path) -> None:
    facts = git_facts(_repository(tmp_path / "a", "x = 1\n"))

    assert facts.commit is not None
    assert len(facts.commit) == 40
    assert (facts.is_dirty, facts.patch) == (False, "")


def test_the_patch_kept_makes_the_edited_tree_again(tmp_path: Path) -> None:
    folder = _repository(tmp_path / "a", "x = 1\n")
    (folder / "code.py").write_text("x = 2  # é\n")
    facts = git_facts(folder)
    (folder / "code.py").write_text("x = 1\n")

    subprocess.run(["git", "-C", str(folder), "apply"], input=facts.patch.encode(), check=True)

    assert facts.is_dirty
    assert (folder / "code.py").read_text() == "x = 2  # é\n"


def test_a_patch_over_the_limit_says_how_much_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_PATCH_BYTES", 500)
    folder = _repository(tmp_path / "a", "x = 1\n")
    (folder / "code.py").write_text("y = 'é'\n" * 1000)

    lines = git_facts(folder).patch.splitlines()

    assert lines[-1].startswith("# cut here: ")
    assert lines[-2] == "+y = 'é'"


def test_a_folder_outside_git_has_no_provenance(tmp_path: Path) -> None:
    assert git_facts(tmp_path) == GitFacts()


@pytest.mark.slow
def test_a_git_that_hangs_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(room, "DEADLINE_S", 0.2)

    assert git_facts(tmp_path) == GitFacts()
