"""Files that a person names: regular ones of sensible size; everything else is one line, at once."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from orchestrator import cli
from orchestrator.errors import UsageError
from orchestrator.given import LARGEST_BYTES, read_given
from orchestrator.host import Hosts, read_env_file

SEEN = {
    "folder": "it is a folder",
    "pipe": "it is a pipe",
    "device": "it is a device",
    "huge": "it is larger than the 4 MiB",
}


def _make(path: Path, kind: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as stream:
            stream.truncate(10 * 1024**3)  # a hole: takes no room


@pytest.mark.parametrize("kind", SEEN)
def test_what_is_no_file_of_sensible_size_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    _make(tmp_path / "x", kind)

    with pytest.raises(OSError, match=SEEN[kind]):
        read_given(tmp_path / "x")


def test_a_socket_is_no_file_either(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "x"))
        with pytest.raises(OSError, match="No such device"):
            read_given(tmp_path / "x")


def test_a_file_comes_whole_up_to_the_limit_and_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x" * LARGEST_BYTES)
    (tmp_path / "link").symlink_to(tmp_path / "x")

    assert read_given(tmp_path / "link") == b"x" * LARGEST_BYTES


# Every file that a person names, and words that have it read.
NAMED = {
    "hosts.yaml": ["hosts"],
    "draftyard.yaml": ["ls"],
    "config/draftyard/config.yaml": ["ls"],
    "recipes/x.yaml": ["recipe", "show", "x"],
    "other/x.yaml": ["plan", "other/x.yaml"],
    "script.py": ["smoke", "smollm2", "--script", "script.py"],
}


@pytest.mark.parametrize("kind", SEEN)
@pytest.mark.parametrize("name", NAMED)
def test_every_file_that_a_person_names_is_read_that_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path)
    for variable in ("DRAFTYARD_DB", "DRAFTYARD_HOSTS", "DRAFTYARD_HOST"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    _make(tmp_path / name, kind)

    with pytest.raises(SystemExit) as ended:
        cli.main(NAMED[name])

    (told,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert ended.value.code == 2
    assert name in told
    assert SEEN[kind] in told


@pytest.mark.parametrize("kind", SEEN)
def test_the_env_file_of_a_host_too(tmp_path: Path, kind: str) -> None:
    _make(tmp_path / "env", kind)

    with pytest.raises(UsageError, match=f"env file .*: {SEEN[kind]}"):
        read_env_file(tmp_path / "env")


@pytest.mark.parametrize("kind", SEEN)
def test_an_ssh_config_that_is_no_file_names_no_host(tmp_path: Path, kind: str) -> None:
    _make(tmp_path / "config", kind)

    assert Hosts.load(None, tmp_path / "config").names() == ["local"]


def test_nothing_else_in_the_local_side_reads_a_file_whole() -> None:
    """What is left are files of ours and the kernel's, and those of a tree that is shipped, which are measured before."""
    root = Path(cli.__file__).parent
    ours = {"workplace.py", "ship.py", "tree.py", "recipe/fields.py", "store/migrations/__init__.py"}
    ours |= {"actions/installing.py", "follow/lease.py"}  # constraints.txt; /proc/locks
    reading = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if re.search(r"\.read_(bytes|text)\(", path.read_text(encoding="utf-8"))
    }

    assert reading <= ours
