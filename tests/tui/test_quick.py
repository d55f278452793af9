"""What makes keys quick must change nothing else: Escape, keys of several bytes, the list that is cut, rows kept between paints."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.store.rows import State
from tests.tui.golden import opened, press, shown
from tests.tui.terminal import watching
from tests.tui.world import NOW_S, Yard
from tests.tui.yard import LIVE, UNREACHABLE
from tui.app import Draftyard
from tui.plain import screen_text
from tui.snapshot import Ask, Room
from tui.terminal import ESCAPE_S


@pytest.mark.slow
def test_escape_alone_goes_back_and_a_key_that_begins_with_it_is_that_key(yard_copy: Path) -> None:
    with watching(yard_copy, "--readonly") as terminal:
        assert terminal.read_until("▌R")
        terminal.press("\x1b[B\r")  # down, enter
        came_down = terminal.read_until("R qwen27b/ddtree  h7kq2mxd")
        seen = len(terminal.written)
        terminal.press("\x1b")
        back = terminal.read_until("2:hosts", since=seen)
        terminal.press("q")
        terminal.end()

    assert came_down  # it was no escape and two letters
    assert back


@pytest.mark.slow
def test_bytes_that_are_no_text_make_no_screen_deaf(yard_copy: Path) -> None:
    """Of a terminal in another encoding, or a file pasted: the thread that reads keys ended, and no key came any more."""
    with watching(yard_copy, "--readonly") as terminal:
        assert terminal.read_until("▌R")
        os.write(terminal.leader, b"\xff\xfe\xc3(\xe9\x1b[200~\x80\xff\x1b[201~")
        terminal.drain(0.5)
        terminal.press("4")
        hears = terminal.read_until("overrides", timeout_s=20.0)
        terminal.press("q")
        code = terminal.end() if hears else None

    assert hears
    assert code == 0


@pytest.mark.slow
def test_who_sets_escdelay_waits_that_long(yard_copy: Path) -> None:
    """As for programs of curses: a slow line may need it, and then an arrow that comes in two parts is still an arrow."""
    long_ms = 60_000
    with watching(yard_copy, "--readonly", env={"ESCDELAY": str(long_ms)}) as terminal:
        assert terminal.read_until("▌R")
        terminal.press("\x1b")
        terminal.drain(40 * ESCAPE_S)
        terminal.press("[B")
        terminal.press("\r")
        came_down = terminal.read_until("R qwen27b/ddtree  h7kq2mxd")
        terminal.press("q")
        left_s = time.monotonic()
        terminal.end()
        took_s = time.monotonic() - left_s

    assert came_down
    assert took_s < long_ms / 1000 / 2  # leaving waits for no key
    assert "ESCDELAY" not in os.environ


def test_live_runs_stand_first_however_many_newer_ones_there_are(filled_yard: Path) -> None:
    room = Room(filled_yard)
    with contextlib.closing(room):
        snapshot = room.read(Ask(limit=3), NOW_S)
        filtered = room.read(Ask(limit=3, where="host:pve-a"), NOW_S)

    assert snapshot is not None
    assert [run.id for run in snapshot.runs[:2]] == [UNREACHABLE, LIVE]
    assert snapshot.num_runs > 3
    assert filtered is not None
    assert next(run.id for run in filtered.runs) == LIVE
    assert UNREACHABLE not in {run.id for run in filtered.runs}  # it is elsewhere


def test_a_live_run_older_than_the_limit_is_listed_once(tmp_path: Path) -> None:
    yard = Yard(tmp_path / "runs.db")
    with yard.store:
        for number in range(6):
            yard.run(f"n{number}wq7kdx", f"a/b{number}", ago_s=1000.0 - number)
        for number in range(1, 6):
            yard.store.set_state(f"n{number}wq7kdx", State.SUCCEEDED, evidence="")
    room = Room(yard.path)
    with contextlib.closing(room):
        snapshot = room.read(Ask(limit=2), NOW_S)

    assert snapshot is not None
    assert [run.branch for run in snapshot.runs] == ["b0", "b5", "b4"]


@pytest.mark.slow
async def test_a_cursor_that_passes_reads_once_at_rest(open_app: Callable[..., Draftyard]) -> None:
    """The preview follows the cursor; the runs in between are not read."""
    app = open_app()
    async with opened(app, size=(170, 40)) as pilot:
        asked: list[str | None] = []
        original = app._read_for

        async def counted(screen: object) -> None:
            asked.append(screen.ask().run)  # type: ignore[attr-defined]
            await original(screen)  # type: ignore[arg-type]

        app._read_for = counted  # type: ignore[assignment, method-assign]
        for _ in range(5):
            app.screen.query_one("#list").action_move(1)  # type: ignore[attr-defined]
        await app.settle(pilot)
        text = screen_text(app)

    assert len(asked) < 5
    assert asked[-1] is not None
    assert f"{asked[-1]}" in text.splitlines()[1].split("│", 1)[1]


@pytest.mark.slow
async def test_a_row_drawn_from_memory_is_the_row_drawn_anew(
    yard_copy: Path, open_app: Callable[..., Draftyard]
) -> None:
    """Through moves, marks, another order and its way back."""
    app = open_app(yard_copy)
    async with opened(app, "j", "space", "s", "j", "o", "j", "k", size=(120, 30)) as pilot:
        kept = screen_text(app)
        await press(app, pilot, "T", "T", "T")  # round all themes: everything is painted again
        anew = await shown(app, pilot, "1 marked")

    assert kept == anew
