"""Where things lie, and who decides it: flags, environment, project file, user file, built-in."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from orchestrator.actions.places import Places, find_places
from orchestrator.errors import UsageError


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / ".git").mkdir(parents=True)
    (root / "recipes" / "below").mkdir(parents=True)
    return root


def _found(cwd: Path, *, db: Path | None = None, **environ: str) -> Places:
    home = {"HOME": str(cwd.anchor + "nowhere"), "XDG_CONFIG_HOME": str(cwd / "config"), "XDG_DATA_HOME": "/data"}
    return find_places(cwd, {**home, **environ}, db=db)


def test_the_database_lies_beside_recipes_from_any_folder_below(project: Path) -> None:
    places = _found(project / "recipes" / "below")

    assert places.db == project / "runs.db"
    assert places.hosts_file == project / "hosts.yaml"
    assert places.recipes == project / "recipes"


def test_nothing_above_the_git_root_counts(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    inner = tmp_path / "inner"
    (inner / ".git").mkdir(parents=True)

    assert _found(inner).db == Path("/data/draftyard/runs.db")


def test_outside_git_only_the_folder_itself_counts(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "below").mkdir()

    assert _found(tmp_path).db == tmp_path / "runs.db"
    assert _found(tmp_path / "below").db == Path("/data/draftyard/runs.db")


def test_flag_beats_environment_beats_project_file_beats_user_file(project: Path) -> None:
    user = project / "config" / "draftyard" / "config.yaml"
    user.parent.mkdir(parents=True)
    user.write_text("db: user.db\nhost: theirs\n", encoding="utf-8")
    assert _found(project).db == user.parent / "user.db"

    (project / "draftyard.yaml").write_text("db: project.db\n", encoding="utf-8")
    assert _found(project).db == project / "project.db"
    assert _found(project).host == "theirs"
    assert _found(project).origins["db"] == f"{project}/draftyard.yaml:1:5"

    assert _found(project, DRAFTYARD_DB="/env.db").db == Path("/env.db")
    assert _found(project, DRAFTYARD_DB="/env.db", db=Path("/flag.db")).db == Path("/flag.db")
    assert _found(project, DRAFTYARD_HOST="mine").host == "mine"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("hsot: gpu\n", "no key 'hsot'; known: "),
        ("host: [a]\n", "it must be text"),
        ("- host\n", "known keys are db"),
        ("keys: z\n", "names and keys are due"),
        ("keys: {runs.sort: 1}\n", "names and keys are due"),
        ("host: a\nhost: b\n", "duplicate"),
    ],
)
def test_a_fault_in_a_settings_file_is_told_with_its_place(project: Path, text: str, told: str) -> None:
    (project / "draftyard.yaml").write_text(text, encoding="utf-8")

    with pytest.raises(UsageError, match=told) as error:
        _found(project)

    assert "draftyard.yaml:" in str(error.value)


def test_keys_of_the_screens_are_read_with_their_places(project: Path) -> None:
    (project / "draftyard.yaml").write_text("keys:\n  runs.sort: z\n", encoding="utf-8")

    places = _found(project)

    assert places.keys == {"runs.sort": ("z", f"{project}/draftyard.yaml:2:14")}
    assert [item.value for item in places.settings() if item.name == "keys.runs.sort"] == ["z"]


def test_a_circle_of_links_is_a_place_like_any_other_until_it_is_opened(project: Path) -> None:
    (project / "runs.db").symlink_to(project / "runs.db")

    assert _found(project).db == project / "runs.db"


@pytest.mark.parametrize("seen", ["a pipe", "a socket", "a device", "a folder"])
@pytest.mark.parametrize("is_link", [False, True])
def test_what_is_no_file_is_no_database_and_is_not_opened(
    project: Path, seen: str, is_link: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite opens a pipe and waits for whoever writes into it."""
    at = project / "odd"
    if seen == "a pipe":
        os.mkfifo(at)
    elif seen == "a device":
        at = Path("/dev/zero")
    elif seen == "a folder":
        at.mkdir()
    else:
        monkeypatch.chdir(project)  # an address has 107 bytes at most
        with socket.socket(socket.AF_UNIX) as there:
            there.bind(at.name)
    named = project / "link"
    if is_link:
        named.symlink_to(at)
    else:
        named = at

    for found in ({"db": named}, {"DRAFTYARD_DB": str(named)}):
        with pytest.raises(UsageError) as refused:
            _found(project, **found)  # type: ignore[arg-type]
        assert (
            str(refused.value) == f"{named} is {seen}; a database file was expected: --db or DRAFTYARD_DB names another"
        )


def test_logs_that_were_left_beside_a_link_to_the_database_are_to_be_moved(project: Path) -> None:
    """They are looked for beside the database itself: what lies beside the link would seem to be lost."""
    real = project / "big disk"
    real.mkdir()
    (project / "runs.db").symlink_to(real / "runs.db")
    (project / "logs" / "of a web server").mkdir(parents=True)
    assert _found(project).db == real / "runs.db"
    (project / "logs" / "night" / "1").mkdir(parents=True)
    (project / "logs" / "night" / "1" / "stdout.log").touch()

    with pytest.raises(UsageError, match=re.escape(f"mv {project}/logs '{real}/logs'")):
        _found(project)

    (project / "logs").rename(real / "logs")
    assert _found(project).db == real / "runs.db"
