"""Keys in turn: each is handed on once what the one before it did is done, so that it reaches the screen that one opened.

A key goes up from the widget that has the focus, and what it does sends messages of its own (a row was opened, a text was
entered). Two keys that come in one read would both be meant for the screen that the first of them leaves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

from textual import events
from textual.app import App, ScreenStackError
from textual.message_pump import MessagePump

TYPED = (events.Key, events.Paste)
ROUNDS = 4  # from the focus up: the key itself, what it told, and the same once more for a command of the palette
LONGEST_S = 2.0  # a widget that hangs must not keep the keys
LOOK_S = 0.02  # between two looks whether a widget was closed with what had been sent to it


class Turns:
    """What is typed, one after the other; `hand_on` is what the app does with each."""

    def __init__(self, app: App[None], hand_on: Callable[[events.Event], Awaitable[None]]) -> None:
        self._app, self._hand_on = app, hand_on
        self._waiting: deque[events.Event] = deque()  # the first of them is under way
        self._rest: asyncio.Task[None] | None = None

    @property
    def are_over(self) -> bool:
        return not self._waiting

    async def take(self, event: events.Event) -> None:
        self._waiting.append(event)
        if len(self._waiting) == 1:
            await self._begin()

    def stop(self) -> None:
        if self._rest is not None:
            self._rest.cancel()

    async def _begin(self) -> None:
        await self._hand_on(self._waiting[0])
        self._rest = asyncio.create_task(self._until_done())

    async def _until_done(self) -> None:
        with suppress(TimeoutError, ScreenStackError):
            async with asyncio.timeout(LONGEST_S):
                for _ in range(ROUNDS):
                    for node in (self._app.focused or self._app.screen).ancestors_with_self:
                        await _caught_up(node)
        self._waiting.popleft()
        if self._waiting:
            self._app.call_later(self._begin)


async def _caught_up(pump: MessagePump) -> None:
    """Until it has done what had been sent to it by now, or is closed."""
    reached = asyncio.Event()
    is_sent = pump.call_later(reached.set)
    while is_sent and not reached.is_set() and not pump._closed:
        with suppress(TimeoutError):
            await asyncio.wait_for(reached.wait(), LOOK_S)
