"""Files that a person names: they take the place of an old file, and of nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.actions.files import write_here, write_metrics
from orchestrator.actions.places import find_places
from orchestrator.errors import DraftyardError
from orchestrator.store.writes import Store
from tests.orchestrator.runs import RUN, new_run


def _export(to: Path) -> None:
    write_metrics(find_places(to.parent, {}, db=to.parent / "runs.db"), RUN, "csv", to=to)


def _plot(to: Path) -> None:
    write_here(to, b"<svg/>")


@pytest.fixture(autouse=True)
def run(tmp_path: Path) -> None:
    with Store(tmp_path / "runs.db") as store:
        store.create_run(new_run())


@pytest.mark.parametrize("write", [_export, _plot])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/null")])
def test_what_is_no_regular_file_is_never_replaced(tmp_path: Path, make: object, write: object) -> None:
    """With the rights for it, a file renamed onto a device would take its place for every program of the machine."""
    target = tmp_path / "target"
    make(target)  # type: ignore[operator]
    before = target.lstat()

    with pytest.raises(DraftyardError, match="target cannot be written: it is there and no regular file"):
        write(target)  # type: ignore[operator]

    assert target.lstat() == before
    assert Path("/dev/null").is_char_device()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] == ".") == []


@pytest.mark.parametrize("write", [_export, _plot])
def test_a_link_to_a_file_stays_a_link(tmp_path: Path, write: object) -> None:
    (tmp_path / "elsewhere").write_text("old")
    (tmp_path / "target").symlink_to("elsewhere")

    write(tmp_path / "target")  # type: ignore[operator]

    assert (tmp_path / "target").is_symlink()
    assert (tmp_path / "elsewhere").read_text() != "old"
