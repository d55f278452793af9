"""What goes wrong or takes long beside the screen: it ends no screen, holds no key up, and quitting waits for none of it."""

import asyncio
import contextlib
import gc
import sqlite3
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from orchestrator.actions.places import find_places
from orchestrator.errors import StoreError
from tests.tui.golden import SHOWN_S, opened, press, shown
from tests.tui.world import Yard
from tui import acting, launch
from tui.app import Draftyard
from tui.ordering import Standing

pytestmark = pytest.mark.slow  # a whole app a test

Open = Callable[..., Draftyard]


@pytest.mark.parametrize("how", ["locked", "garbage"])
async def test_a_stop_is_asked_though_its_spec_cannot_be_read(how: str, yard_copy: Path, open_app: Open) -> None:
    with contextlib.closing(sqlite3.connect(yard_copy)) as alone:
        alone.execute("PRAGMA journal_mode = DELETE")  # without the write-ahead log a writer keeps readers out
    app = open_app(yard_copy, places=find_places(yard_copy.parent, {"HOME": str(yard_copy.parent)}, db=yard_copy))
    async with opened(app) as pilot:
        await app.reading.do(lambda room: room.reader.database.wait_at_most(0.01))
        with contextlib.closing(sqlite3.connect(yard_copy)) as other:
            if how == "locked":
                other.execute("BEGIN EXCLUSIVE")
            else:
                yard_copy.write_bytes(b"\xa5garbage" * 3000)
            await press(app, pilot, "j", "x")
            await app.workers.wait_for_complete([one for one in app.workers if one.group == "question"])
            asked = await shown(app, pilot, "stop qwen27b/ddtree", "after its grace is killed")
            app.tick()
            await app.settle(pilot)
            other.rollback()

    assert "GPU 5 6 7" in asked
    assert app.trouble
    assert app.crash is None


async def test_a_search_by_a_number_of_a_letter_finds_it_in_any_case(tmp_path: Path, open_app: Open) -> None:
    yard = Yard(tmp_path / "runs.db")
    with yard.store:
        yard.run("logs2345", "long/log", ago_s=100.0)
        yard.log("logs2345", "plain\n" * 500 + "CAFÉ two\n" + "plain\n" * 500)
    app = open_app(yard.path, run="logs2345", screen="log")
    async with opened(app, "home") as pilot:
        for typed in (r"caf\u00e9", "é", r"\N{LATIN SMALL LETTER E WITH ACUTE} TWO"):
            await pilot.press("slash")
            app.screen.query_one("#search").value = typed  # type: ignore[attr-defined]
            await pilot.press("enter")
            await app.workers.wait_for_complete([one for one in app.workers if one.group == "search"])
            await app.settle(pilot)
            found = await shown(app, pilot, "CAFÉ two")
            await press(app, pilot, "home", "escape")
            assert "/ " in found


@pytest.mark.parametrize("typed", ["(", "(?L)a", "a{99999999999}"])
async def test_what_is_no_expression_is_said(typed: str, tmp_path: Path, open_app: Open) -> None:
    yard = Yard(tmp_path / "runs.db")
    with yard.store:
        yard.run("logs2345", "long/log", ago_s=100.0)
        yard.log("logs2345", "plain\n")
    app = open_app(yard.path, run="logs2345", screen="log")
    async with opened(app, "slash") as pilot:
        app.screen.query_one("#search").value = typed  # type: ignore[attr-defined]
        await pilot.press("enter")

        await shown(app, pilot, "not a regular expression")


async def test_a_log_that_cannot_be_read_ends_no_search(tmp_path: Path, open_app: Open) -> None:
    yard = Yard(tmp_path / "runs.db")
    with yard.store:
        yard.run("logs2345", "long/log", ago_s=100.0)
        yard.log("logs2345", "plain\n" * 100)
        path = yard.store.logs.path("logs2345", 1, "stdout")
    app = open_app(yard.path, run="logs2345", screen="log")
    async with opened(app) as pilot:
        path.unlink()
        path.mkdir()
        await press(app, pilot, "slash", *"zzz", "enter")
        await app.workers.wait_for_complete([one for one in app.workers if one.group == "search"])
        said = await shown(app, pilot, "stdout")

    assert app.crash is None
    assert "searching" not in said


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Held shut by the test; opened at its end whatever happened."""
    held = threading.Event()
    yield held
    held.set()


async def test_keys_go_on_while_a_reading_hangs(gate: threading.Event, yard_copy: Path, open_app: Open) -> None:
    """The question of a stop, a wish to read anew and one for the editor wait beside the screen, not before it."""
    app = open_app(yard_copy, places=find_places(yard_copy.parent, {"HOME": str(yard_copy.parent)}, db=yard_copy))
    async with opened(app, size=(100, 30)) as pilot:
        app.run_worker(app.reading.do(lambda _room: gate.wait(100.0)))
        for key, words in (
            ("j", "▌R  qwen27b/ddtree"),
            ("x", "stop qwen27b/ddtree"),
            ("n", "⏎ open"),
            ("r", "⏎ open"),
            ("e", "⏎ open"),
            ("k", "▌R? qwen27b/v6"),
            ("question_mark", "Filter, as ls"),
        ):
            await pilot.press(key)
            await shown(app, pilot, words)
        is_hanging = not gate.is_set()
        gate.set()
        await app.workers.wait_for_complete()

    assert is_hanging


def test_quitting_waits_for_no_thread_that_asks_a_host(
    gate: threading.Event, yard_copy: Path, monkeypatch: pytest.MonkeyPatch, open_app: Open
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def asked(*_: Any) -> Standing:
        begun.set()
        gate.wait(100.0)
        ended.set()
        return Standing(False, fault="late")

    monkeypatch.setattr(launch, "standing", asked)
    app = open_app(yard_copy, places=find_places(yard_copy.parent, {"HOME": str(yard_copy.parent)}, db=yard_copy))

    async def look(pilot: Pilot[Any]) -> None:
        await app.settle(pilot)
        await pilot.press("2", "4")
        await shown(app, pilot, "looks at the host; nothing is started")
        await pilot.press("enter")
        assert await asyncio.to_thread(begun.wait, SHOWN_S)
        await pilot.press("q")

    app.run(headless=True, size=(100, 30), auto_pilot=look)

    assert begun.is_set()
    assert not ended.is_set()


async def test_what_leaving_would_cut_off_is_said_once(
    gate: threading.Event, yard_copy: Path, monkeypatch: pytest.MonkeyPatch, open_app: Open
) -> None:
    monkeypatch.setattr(acting, "_do", lambda *_: gate.wait(100.0))
    app = open_app(yard_copy, places=find_places(yard_copy.parent, {"HOME": str(yard_copy.parent)}, db=yard_copy))
    async with opened(app, "j", "x", "y", size=(120, 30)) as pilot:
        await pilot.press("q")
        await shown(app, pilot, "Something is being started or ended")
        assert app.is_running
        await pilot.press("q")

    assert not gate.is_set()


async def test_trouble_of_work_beside_the_screen_is_a_toast(yard_copy: Path, open_app: Open) -> None:
    def fail() -> None:
        raise StoreError("the disk is full\nmore of it")

    app = open_app(yard_copy)
    async with opened(app) as pilot:
        app.do_beside(fail, group="deeds")
        said = await shown(app, pilot, "the disk is full")

    assert app.crash is None
    assert "more of it" not in said


async def test_what_comes_back_after_its_screen_has_gone_still_finds_the_app(yard_copy: Path, open_app: Open) -> None:
    app, found = open_app(yard_copy), []
    async with opened(app):
        left = launch.LaunchScreen()  # in no app's hands, as every screen while one ends
        app.do_beside(lambda: found.append(left.app), group="plan")
        await app.workers.wait_for_complete()

    assert found == [app]


def test_a_word_for_a_screen_that_has_ended_leaves_nothing_that_nobody_awaits(
    yard_copy: Path, open_app: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, loop = open_app(yard_copy), asyncio.new_event_loop()
    loop.close()
    monkeypatch.setattr(app, "_loop", loop)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match="closed"):
            app.call_from_thread(print)
        gc.collect()

    assert [str(each.message) for each in warned] == []
