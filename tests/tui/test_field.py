"""A line to type into: what is typed at once arrives whole and in order."""

from collections.abc import Callable

import pytest
from textual import events

from tests.tui.golden import opened, shown
from tui.app import Draftyard
from tui.field import Field

pytestmark = pytest.mark.slow  # a whole app a test


@pytest.mark.parametrize("attempt", range(3))
async def test_a_burst_behind_an_editing_key_loses_no_letter(open_app: Callable[..., Draftyard], attempt: int) -> None:
    text = "train.num_steps=600 loss.gamma=7"
    app = open_app()
    async with opened(app, "4") as pilot:
        field = app.screen.query_one("#overrides", Field)
        field.value = "what"
        field.focus()
        await pilot.pause()
        for event in (events.Key("ctrl+u", "\x15"), *(events.Key(letter, letter) for letter in text)):
            app.post_message(event)
        while len(field.value) < len(text):
            await pilot.pause(0.02)

        assert field.value == text


async def test_enter_at_the_end_of_a_burst_sends_what_was_typed(open_app: Callable[..., Draftyard]) -> None:
    app = open_app()
    async with opened(app, "slash", size=(120, 24)) as pilot:
        for event in (*(events.Key(letter, letter) for letter in "host:local"), events.Key("enter", "\r")):
            app.post_message(event)
        await shown(app, pilot, "/ host:local")

        assert app.screen.ask().where == "host:local"  # type: ignore[attr-defined]
