"""What the documents say of the code is there: named tests, named files, what a copied reporter needs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from orchestrator.cli import GROUPS
from tests.test_demo import README_COMMANDS, SHOWS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("orchestrator/", "remote/", "recipes/", "tui/", "tests/", "benchmarks/", "docs/")


@cache
def known_tests() -> set[str]:
    """The names of all files and functions that are tests."""
    paths = list((ROOT / "tests").rglob("test_*.py"))
    told = (re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE) for path in paths)
    return {path.stem for path in paths}.union(*told)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_file_that_is_named_exists(page: Path) -> None:
    named = set(re.findall(r"`(test_[a-z_0-9]+)`", page.read_text(encoding="utf-8")))

    assert named - known_tests() == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_is_named_exists(page: Path) -> None:
    named = set(re.findall(r"`([\w./-]+\.(?:py|md|yaml))`", page.read_text(encoding="utf-8")))
    missing = [word for word in named if word.startswith(FOLDERS) and not (ROOT / word).exists()]

    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]

    assert missing == []


def test_each_command_of_the_readme_is_one_that_its_test_runs() -> None:
    """However a line is set: indented, in a fence, after a prompt or a dash."""
    verbs = "|".join(verb for group in GROUPS.values() for verb in group)
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()

    told = [line for line in lines if re.match(rf"\W*draftyard ({verbs})\b", line)]

    assert len(told) == len(README_COMMANDS) >= 14


def test_each_command_of_the_readme_has_words_that_it_must_print() -> None:
    """And none is left over of a command that went: exit code 0 alone says nothing of what it shows."""
    told = {
        command: [words for words in SHOWS if command.startswith(f"draftyard {words}")] for command in README_COMMANDS
    }

    assert [command for command, words in told.items() if len(words) != 1] == []
    assert {word for words in told.values() for word in words} == set(SHOWS)


def test_a_copied_reporter_needs_four_files(tmp_path: Path) -> None:
    """As the README says: report.py, and wire.py, rundir.py and hiding.py beside it; no installed package."""
    (tmp_path / "remote").mkdir()
    for name in ("report.py", "wire.py", "rundir.py", "hiding.py"):
        shutil.copy(ROOT / "remote" / name, tmp_path / "remote" / name)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom remote.report import Reporter\nReporter"

    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
