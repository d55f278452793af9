"""Another order or filter: the cursor stands on its first run, and nothing but a person moves it from there."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from orchestrator.actions.places import Places
from tests.tui.golden import opened, press
from tui.app import Draftyard
from tui.plain import screen_text
from tui.runs import SORTS, RunsScreen
from tui.snapshot import Room
from tui.table import Table

pytestmark = pytest.mark.slow  # a whole app a test

Open = Callable[..., Draftyard]


@contextmanager
def reading_held(app: Draftyard) -> Iterator[None]:
    """What is asked for is read only afterwards, as of a busy database."""
    is_over = threading.Event()

    def wait(_: Room) -> None:
        is_over.wait(60)

    held = app.reading.do(wait)
    held.send(None)  # it is in the queue, and nobody waits for it
    try:
        yield
    finally:
        is_over.set()
        held.close()


@pytest.mark.parametrize("key", ["s", "o"])
async def test_every_order_begins_with_the_cursor_on_its_first_run(key: str, open_app: Open) -> None:
    """It stood on the first run of the order before, and went down with it once the new one was read."""
    app = open_app()
    async with opened(app, "j", "j", size=(120, 30)) as pilot:
        table = app.screen.query_one(Table)
        firsts = []
        for _ in SORTS:
            await press(app, pilot, key)
            firsts.append((table.cursor, table.cursor_key, table.scroll_offset.y))
            assert firsts[-1] == (0, table._keys[0], 0)

    assert len({first for _, first, _ in firsts}) > 2


async def test_a_filter_begins_with_the_cursor_on_its_first_run(open_app: Open) -> None:
    app = open_app()
    async with opened(app, "j", "j", "j", size=(120, 30)) as pilot:
        await press(app, pilot, "slash", *"host:pve-a", "enter")
        table = app.screen.query_one(Table)

        assert table.cursor_key == table._keys[0]


async def test_a_move_before_the_new_order_is_read_holds(open_app: Open) -> None:
    """The run that a person went to stays under the cursor, wherever the new order has it."""
    app = open_app()
    async with opened(app, size=(120, 30)) as pilot:
        table = app.screen.query_one(Table)
        with reading_held(app):
            await pilot.press("s", "s", "j")
            await pilot.pause()
            chosen = table.cursor_key
            assert table.cursor == 1
        await app.settle(pilot)
        screen = app.screen
        assert isinstance(screen, RunsScreen)

        assert screen.snapshot is not None
        assert screen.snapshot.ask.sort == SORTS[2][1]
        assert table.cursor_key == chosen
        assert table._keys[table.cursor] == chosen


async def test_rows_that_change_places_leave_the_cursor_on_its_run_and_in_sight(open_app: Open) -> None:
    """News do not move it: fifty new runs above it push its row down, and the list follows."""
    app = open_app()
    async with opened(app, "j", "j", size=(120, 24)):
        table = app.screen.query_one(Table)
        chosen, keys, draw = table.cursor_key, table._keys, table._draw
        table.set_rows([*(f"new{number:05d}" for number in range(50)), *keys], lambda row: draw(max(0, row - 50)))

        assert table.cursor_key == chosen
        assert table.cursor == 52
        assert table.scroll_offset.y <= table.cursor < table.scroll_offset.y + table.size.height - 1


@pytest.mark.parametrize("width", [80, 120])
async def test_the_order_is_told_whole_by_what_it_puts_first(width: int, yard_places: Places, open_app: Open) -> None:
    """`loss first` said neither which loss, nor that live runs no longer stand on top."""
    app = open_app(places=yard_places)
    async with opened(app, size=(width, 30)) as pilot:
        told = []
        for _ in SORTS:
            await press(app, pilot, "s")
            told.append(screen_text(app).splitlines()[0])

    words = ("worst off first", "low loss first", "fastest first", "by recipe", "by host")
    assert all(word in line for word, line in zip(words, told, strict=False))
    assert not any(word in told[-1] for word in ("first", "by "))
