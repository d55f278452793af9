"""Keys that come in one read: each reaches the screen that the one before it opened."""

from collections.abc import Callable

import pytest
from textual import events

from orchestrator.actions.places import Places
from tests.tui.golden import opened
from tests.tui.yard import LIVE, UNREACHABLE
from tui.app import Draftyard
from tui.launch import LaunchScreen
from tui.plain import screen_text
from tui.run import RunScreen
from tui.runs import RunsScreen


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
