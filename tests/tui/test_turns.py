"""Keys that come in one read: each reaches the screen that the one before it opened. And keys go before everything else."""

import asyncio
import contextlib
import gc
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from textual import events
from textual._callback import count_parameters
from textual.message_pump import MessagePump

from orchestrator.actions.places import Places
from tests.tui.golden import opened, press
from tests.tui.world import NOW_S
from tests.tui.yard import LIVE, UNREACHABLE
from tui import turns as turns_module
from tui.app import Draftyard
from tui.chart import _drawn
from tui.home import SCREENS
from tui.launch import LaunchScreen
from tui.plain import screen_text
from tui.run import RunScreen
from tui.runs import RunsScreen
from tui.snapshot import READER_WAIT_S, Ask, Room
from tui.terminal import FEW_OBJECTS, MANY_OBJECTS, get_ready, settled, tidy
from tui.turns import NEWS_WAIT_S, Turns, _Mark


def burst(app: Draftyard, *keys: str) -> None:
    """As a line that lags delivers them: all before any of them has done anything."""
    for key in keys:
        app.post_message(events.Key(key, key if len(key) == 1 else None))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "is_there"),
    [
        (("enter", "2"), lambda app: isinstance(app.screen, RunScreen) and app.screen.tab == "curves"),
        (("j", "enter", "3", "tab"), lambda app: app.screen.tab == "log"),
        (("enter", "2", "escape", "2"), lambda app: app.screen.NAME == "hosts"),
        (("l", "escape", "4", "2", "1"), lambda app: app.screen.NAME == "runs"),
        (("slash", "a", "2"), lambda app: app.screen.query_one("#filter").value == "a2"),
        (("slash", "a", "escape", "3"), lambda app: app.screen.NAME == "smoke"),
        (("colon", *"host", "enter", "1"), lambda app: app.screen.NAME == "runs" and len(app.screen_stack) == 2),
        (("space", "space", "c", "L"), lambda app: app.screen._is_log),
    ],
)
async def test_keys_of_one_read_reach_the_screen_that_was_asked_for(
    keys: tuple[str, ...], is_there: Callable[[Draftyard], bool], open_app: Callable[..., Draftyard]
) -> None:
    app = open_app()
    async with opened(app) as pilot:
        burst(app, *keys)
        await app.settle(pilot)

        assert is_there(app), screen_text(app)


@pytest.mark.slow
async def test_what_is_pasted_behind_a_key_goes_where_the_key_led(open_app: Callable[..., Draftyard]) -> None:
    app = open_app()
    async with opened(app) as pilot:
        burst(app, "slash")
        app.post_message(events.Paste("loss<2"))
        await app.settle(pilot)

        assert app.screen.query_one("#filter").value == "loss<2"  # type: ignore[attr-defined]


@pytest.mark.slow
async def test_the_screen_of_a_run_stands_on_the_stack_once(open_app: Callable[..., Draftyard]) -> None:
    app = open_app()
    async with opened(app) as pilot:
        app.open_run(LIVE)
        await app.settle(pilot)
        app.open_run(UNREACHABLE, "curves")
        await app.settle(pilot)
        stack = list(app.screen_stack)
        await pilot.press("escape")
        await app.settle(pilot)

        assert sum(isinstance(screen, RunScreen) for screen in stack) == 1
        assert isinstance(app.screen, RunsScreen)


@pytest.mark.slow
async def test_a_launch_that_ends_while_another_run_is_read_leaves_that_one_open(
    yard_places: Places, open_app: Callable[..., Draftyard]
) -> None:
    app = open_app(places=yard_places)
    async with opened(app, "4", size=(120, 30)) as pilot:
        launch = app.screen
        assert isinstance(launch, LaunchScreen)
        app.open_run(LIVE)
        await app.settle(pilot)
        launch._show_started(UNREACHABLE)
        await app.settle(pilot)

        assert isinstance(app.screen, RunScreen)
        assert app.screen.selector == LIVE
        assert f"{UNREACHABLE} has started." in [toast.message for toast in app._notifications]


@pytest.mark.slow
async def test_while_a_key_is_under_way_news_and_the_reading_thread_wait_a_while(
    open_app: Callable[..., Draftyard],
) -> None:
    """Not for ever: a key that hangs holds up neither for long."""
    is_done = asyncio.Event()
    waited: list[float] = []

    async def hand_on(_: events.Event) -> None:
        await is_done.wait()

    app = open_app()
    async with opened(app):
        turns = Turns(app, hand_on)
        assert turns.are_calm
        assert turns.give_way(READER_WAIT_S) == READER_WAIT_S
        key = asyncio.create_task(turns.take(events.Key("j", "j")))
        await asyncio.sleep(0)
        began_s = time.monotonic()
        await turns.calm()
        waited.append(time.monotonic() - began_s)
        left_s = await asyncio.to_thread(turns.give_way, READER_WAIT_S)
        calm_under_way = turns.are_calm
        is_done.set()
        await key
        reading = asyncio.create_task(asyncio.to_thread(turns.give_way, 60.0))
        await asyncio.wait_for(turns._calm.wait(), 60)

        assert (await reading) > 0  # it went on when the key's answer was painted
        assert not calm_under_way
        assert turns.are_calm
        assert not turns.are_rested
        assert waited[0] >= 0.9 * NEWS_WAIT_S
        assert left_s <= 0


def test_a_reading_gives_way_between_its_questions_and_stands_still_no_longer_than_it_may(filled_yard: Path) -> None:
    left: list[float] = []

    def give_way(left_s: float) -> float:
        left.append(left_s)
        return left_s - 0.01

    with contextlib.closing(Room(filled_yard, give_way=give_way)) as room:
        snapshot = room.read(Ask(run=LIVE), NOW_S)
        room.forget()
        asked = len(left)
        room.read(Ask(run=LIVE), NOW_S)

    assert snapshot is not None
    assert snapshot.detail is not None
    assert asked > 20
    assert left[0] == left[asked] == READER_WAIT_S
    assert left[1] < left[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys", [(), ("enter",), ("enter", "2"), ("enter", "3")], ids=["list", "overview", "curves", "memory"]
)
async def test_charts_of_news_are_drawn_before_they_reach_the_screen(
    keys: tuple[str, ...], open_app: Callable[..., Draftyard]
) -> None:
    """By the thread that reads; a key that comes meanwhile waits for none of them."""
    app = open_app()
    async with opened(app, *keys, size=(170, 45)) as pilot:
        await press(app, pilot, *(["j"] if not keys else []))
        screen = app.screen
        assert isinstance(screen, RunsScreen | RunScreen)
        assert screen.snapshot is not None
        _drawn.cache_clear()
        await asyncio.to_thread(screen.ahead(), screen.snapshot)
        ahead = _drawn.cache_info().misses
        screen.present(screen.snapshot)

        assert ahead > 0
        assert _drawn.cache_info().misses == ahead


@pytest.fixture
def own_garbage() -> Iterator[None]:
    """What is set about collecting is put back."""
    before, was_enabled = gc.get_threshold(), gc.isenabled()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.slow
@pytest.mark.usefixtures("own_garbage")
async def test_the_screens_are_made_before_a_key_leads_to_them(open_app: Callable[..., Draftyard]) -> None:
    app = open_app()
    async with opened(app, "j", "k") as pilot:
        before = {name for name in (RunScreen.NAME, *SCREENS) if app.get_screen(name).is_running}
        await get_ready(app, (RunScreen.NAME, *SCREENS), app._turns)
        after = {name for name in (RunScreen.NAME, *SCREENS) if app.get_screen(name).is_running}
        await press(app, pilot, "enter", "3", "escape", "3")

        assert before == {"runs"}
        assert after == {RunScreen.NAME, *SCREENS}
        assert "3:smoke" in screen_text(app)
        assert len(app.screen_stack) == 2


@pytest.mark.usefixtures("own_garbage")
def test_what_is_made_meanwhile_is_looked_through_at_rest_alone() -> None:
    class Ring:
        def __init__(self) -> None:
            self.me = self

    gc.set_threshold(MANY_OBJECTS, 10, 10)
    settled()
    rings = [weakref.ref(Ring()) for _ in range(3 * FEW_OBJECTS)]
    before = sum(ring() is not None for ring in rings)
    tidy(is_rested=False)
    after = sum(ring() is not None for ring in rings)

    assert before == 3 * FEW_OBJECTS  # a key would have waited for it
    assert after == 0


COLLECT = """
import gc, weakref
from tui.terminal import MANY_OBJECTS, no_pauses
class Ring:
    def __init__(self):
        self.me = self
no_pauses()
rings = [weakref.ref(Ring()) for _ in range(2 * MANY_OBJECTS)]
print(sum(ring() is not None for ring in rings) < len(rings))
"""


@pytest.mark.slow
def test_before_the_first_answer_what_is_made_does_not_grow_without_bound() -> None:
    """It may never come: of a database on a share that hangs. In a process of its own, as it sets about all of Python."""
    done = subprocess.run([sys.executable, "-c", COLLECT], capture_output=True, text=True, timeout=120, check=True)

    assert done.stdout == "True\n"


@pytest.mark.slow
async def test_a_fault_beside_a_key_ends_the_app_by_its_own_way_and_no_key_is_lost(
    open_app: Callable[..., Draftyard], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults, caught_up, handed = [RuntimeError("once")], turns_module._caught_up, []

    async def faulty(pump: MessagePump) -> None:
        if faults:
            raise faults.pop()
        await caught_up(pump)

    async def hand_on(event: events.Event) -> None:
        handed.append(event)

    app, told = open_app(), list[Exception]()
    async with opened(app):
        monkeypatch.setattr(turns_module, "_caught_up", faulty)
        monkeypatch.setattr(app, "_handle_exception", told.append)
        turns = Turns(app, hand_on)
        for key in "jkj":
            await turns.take(events.Key(key, key))
        await asyncio.wait_for(turns._calm.wait(), 60)

    assert [str(error) for error in told] == ["once"]
    assert len(handed) == 3


@pytest.mark.slow
async def test_who_gave_way_goes_on_when_the_turns_are_stopped(open_app: Callable[..., Draftyard]) -> None:
    async def hand_on(_: events.Event) -> None:
        await asyncio.sleep(0)

    app = open_app()
    async with opened(app):
        turns = Turns(app, hand_on)
        await turns.take(events.Key("j", "j"))
        calm_before = turns.are_calm
        turns.stop()
        left_s = turns.give_way(60.0)

    assert not calm_before
    assert left_s == 60.0
    assert turns.are_over


@pytest.mark.slow
async def test_ctrl_c_goes_before_the_keys_that_wait(open_app: Callable[..., Draftyard]) -> None:
    handed, is_first_done = [], asyncio.Event()

    async def hand_on(event: events.Event) -> None:
        assert isinstance(event, events.Key)
        handed.append(event.key)
        await is_first_done.wait()

    app = open_app()
    async with opened(app):
        turns = Turns(app, hand_on)
        first = asyncio.create_task(turns.take(events.Key("j", "j")))
        await asyncio.sleep(0)
        for key in (*"abc" * 300, "ctrl+c"):
            await turns.take(events.Key(key, key))
        is_first_done.set()
        await first
        await asyncio.wait_for(turns._calm.wait(), 60)

    assert handed == ["j", "ctrl+c"]


def test_what_a_pump_reaches_says_itself_that_it_takes_nothing() -> None:
    mark = _Mark()

    assert count_parameters(mark) == 0
    mark()
    assert mark.is_set()
