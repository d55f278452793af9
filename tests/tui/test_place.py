"""A database that goes away, changes, or closes while a screen looks at it: said, and read again once it is back."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.errors import StoreError
from tests.tui.golden import opened, press, shown
from tests.tui.world import NOW_S, Writer, Yard, steps
from tests.tui.yard import LIVE
from tui.app import Draftyard
from tui.plain import screen_text
from tui.snapshot import Ask, Room

NOBODY = 65534
Take = Callable[[Path], None]


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Root may read everything; anybody else already is nobody in particular."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def move_away(path: Path) -> None:
    path.rename(path.with_name("elsewhere.db"))


def move_with_its_log(path: Path) -> None:
    for part in path.parent.glob(f"{path.name}*"):
        part.rename(path.parent / f"elsewhere{part.name}")


@pytest.mark.slow
@pytest.mark.parametrize("take", [move_away, move_with_its_log, Path.unlink])
async def test_a_database_that_is_gone_is_said_and_what_was_read_stays(
    take: Take, yard_copy: Path, open_app: Callable[..., Draftyard]
) -> None:
    app = open_app(yard_copy)
    async with opened(app) as pilot:
        take(yard_copy)
        app.tick()
        text = await shown(app, pilot, "runs.db has been moved or deleted")
        await pilot.press("j")
        after = await shown(app, pilot, "▌R  qwen27b/ddtree")

    assert "qwen27b/ddtree" in text
    assert "shown is what was read before" in after


@pytest.mark.slow
async def test_a_database_that_comes_back_is_read_again(yard_copy: Path, open_app: Callable[..., Draftyard]) -> None:
    app = open_app(yard_copy)
    async with opened(app) as pilot:
        move_away(yard_copy)
        app.tick()
        await shown(app, pilot, "moved or deleted")
        yard_copy.with_name("elsewhere.db").rename(yard_copy)
        yard = Yard(yard_copy)
        with yard.store:
            Writer(yard.store, yard.run("n2wq7kdx", "fresh/branch", ago_s=1.0)).tell(
                steps(0, 40, 10, begin_s=NOW_S - 1, step_s=0.1, seed=1)
            )
        app.tick()
        text = await shown(app, pilot, "fresh/branch")

    assert "moved or deleted" not in text
    assert "another database" not in text  # it is the same


@pytest.mark.slow
async def test_another_database_in_its_place_is_said_and_shown(
    yard_copy: Path, open_app: Callable[..., Draftyard]
) -> None:
    app = open_app(yard_copy)
    async with opened(app, size=(120, 30)) as pilot:
        other = Yard(yard_copy.with_name("other.db"))
        with other.store:
            other.run(LIVE, "other/one", ago_s=1.0)  # of the same id, so that nothing kept of the first may be shown
        move_away(yard_copy)
        other.path.rename(yard_copy)
        app.tick()
        text = await shown(app, pilot, "other/one", "runs.db is another database now")

    assert "qwen27b" not in text


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"no database" * 100, None], ids=["garbage", "a folder"])
async def test_what_is_no_database_is_said_until_one_is_there_again(
    content: bytes | None, yard_copy: Path, open_app: Callable[..., Draftyard]
) -> None:
    app = open_app(yard_copy)
    async with opened(app, size=(140, 30)) as pilot:
        move_away(yard_copy)
        if content is None:
            yard_copy.mkdir()
        else:
            yard_copy.write_bytes(content)
        app.tick()
        await shown(app, pilot, "not a database" if content else "is a folder", "qwen27b/ddtree")
        yard_copy.rmdir() if content is None else yard_copy.unlink()
        shutil.move(yard_copy.with_name("elsewhere.db"), yard_copy)
        app.tick()
        await app.settle(pilot)

        assert app.trouble == ""
        assert "qwen27b/ddtree" in screen_text(app)


@pytest.mark.parametrize("closed", ["runs.db", "."])
def test_a_database_closed_to_this_user_is_a_fault_until_it_is_opened_to_them(closed: str, filled_yard: Path) -> None:
    """By its own mode or by its folder's."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(shutil.copytree(filled_yard.parent, f"{folder}/yard")) / "runs.db"
        Path(folder).chmod(0o755)
        room = Room(path)
        with contextlib.closing(room):
            assert room.read(Ask(), NOW_S) is not None
            (path.parent / closed).chmod(0)
            with as_nobody(), pytest.raises(StoreError, match=r"runs\.db (may not be read|cannot be looked at)"):
                room.read(Ask(), NOW_S)
            (path.parent / closed).chmod(0o755)

            again = room.read(Ask(), NOW_S)

    assert again is not None
    assert not again.is_another


def overwrite(path: Path, *, first: int, garbage: bytes, size: int | None = None) -> None:
    """The same file, other bytes: who has it open is told nothing."""
    with path.open("r+b") as file:
        whole = file.seek(0, os.SEEK_END)
        file.truncate(size)
        file.seek(first)
        file.write((garbage * (1 + whole // len(garbage)))[: (size or whole) - first])


OVERWRITTEN = {
    "whole": {"first": 0, "garbage": b"\xa5garbage"},
    "all but its head": {"first": 4096, "garbage": b"\xa5garbage"},
    "zeros": {"first": 0, "garbage": b"\0"},
    "shorter": {"first": 0, "garbage": b"hello\n", "size": 1800},
}


@pytest.mark.parametrize("how", OVERWRITTEN)
def test_a_database_that_is_overwritten_in_place_is_a_fault_until_it_is_whole_again(
    how: str, filled_yard: Path
) -> None:
    """SQLite would go on from the pages that it has kept."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(shutil.copytree(filled_yard.parent, f"{folder}/yard")) / "runs.db"
        content = path.read_bytes()
        room = Room(path)
        with contextlib.closing(room):
            assert room.read(Ask(), NOW_S) is not None
            overwrite(path, **OVERWRITTEN[how])  # type: ignore[arg-type]
            for _ in range(2):
                with pytest.raises(StoreError, match=r"not a database|malformed"):
                    room.read(Ask(), NOW_S)
            path.write_bytes(content)

            again = room.read(Ask(), NOW_S)

    assert again is not None
    assert {run.id for run in again.runs} >= {LIVE}


@pytest.mark.slow
async def test_garbage_over_the_database_is_said_on_the_screen_and_nothing_breaks(
    yard_copy: Path, open_app: Callable[..., Draftyard]
) -> None:
    app = open_app(yard_copy)
    async with opened(app, size=(140, 30)) as pilot:
        overwrite(yard_copy, first=0, garbage=b"\xa5garbage")
        app.tick()
        text = await shown(app, pilot, "not a database", "qwen27b/ddtree")
        for key in ("enter", "2", "4", "escape", "2", "3", "4", "1"):
            await press(app, pilot, key)
            assert "not a database" in app.trouble, key
            assert "not a database" in screen_text(app), key

    assert "move it away to begin anew" in " ".join(text.split())
    assert app.crash is None


def test_a_yard_without_a_database_is_an_empty_one_until_its_first_run(tmp_path: Path) -> None:
    room = Room(tmp_path / "runs.db")
    with contextlib.closing(room):
        empty = room.read(Ask(), NOW_S)
        yard = Yard(tmp_path / "runs.db")
        with yard.store:
            yard.run("n2wq7kdx", "first/one", ago_s=1.0)
        full = room.read(Ask(), NOW_S)

    assert empty is not None
    assert empty.runs == ()
    assert full is not None
    assert [run.recipe for run in full.runs] == ["first"]
    assert not full.is_another
