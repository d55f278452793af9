"""Keys in turn: each is handed on once what the one before it did is done, so that it reaches the screen that one opened.

A key goes up from the widget that has the focus, and what it does sends messages of its own (a row was opened, a text was
entered). Two keys that come in one read would both be meant for the screen that the first of them leaves.

While a key is under way, and until its answer has been painted, everything else waits: what was read is not drawn, and the
thread that reads stands still, as Python has one lock for both. Neither waits for long, however many keys there are.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

from textual import events
from textual.app import App, ScreenStackError
from textual.message_pump import MessagePump

AT_ONCE = (
    "ctrl+c"  # goes before all that waits, which is dropped: a paste or a cat on the keyboard may be a thousand keys
)
TYPED = (events.Key, events.Paste)
ROUNDS = 4  # from the focus up: the key itself, what it told, and the same once more for a command of the palette
LONGEST_S = 2.0  # a widget that hangs must not keep the keys
LOOK_S = 0.02  # between two looks whether a widget was closed with what had been sent to it
SPINS = 6  # turns of the loop in which a message is mostly done: waiting for it by a clock takes longer
PAINTED_S = 0.012  # by then what a key has changed is painted, where nothing else is done meanwhile
RESTED_S = 0.5  # without a key: nobody is typing
NEWS_WAIT_S = 0.15  # what was read is drawn by then, however many keys come


class Turns:
    """What is typed, one after the other; `hand_on` is what the app does with each."""

    def __init__(self, app: App[None], hand_on: Callable[[events.Event], Awaitable[None]]) -> None:
        self._app, self._hand_on = app, hand_on
        self._waiting: deque[events.Event] = deque()  # the first of them is under way
        self._rest: asyncio.Task[None] | None = None
        self._calm, self._calm_beside = asyncio.Event(), threading.Event()
        self._last_s = -math.inf  # when the newest key came
        self._let_go()

    @property
    def are_over(self) -> bool:
        return not self._waiting

    @property
    def are_calm(self) -> bool:
        """No key is under way, and the last one's answer has been painted."""
        return self._calm.is_set()

    @property
    def are_rested(self) -> bool:
        """Nobody has typed for a while."""
        return self.are_calm and time.monotonic() - self._last_s > RESTED_S

    async def calm(self) -> None:
        """Until they are, or have not been for too long."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._calm.wait(), NEWS_WAIT_S)

    def give_way(self, left_s: float) -> float:
        """In another thread: stands still while a key is under way; what of `left_s` is left."""
        if self._calm_beside.is_set() or left_s <= 0:
            return left_s
        began_s = time.monotonic()
        self._calm_beside.wait(left_s)
        return left_s - (time.monotonic() - began_s)

    async def take(self, event: events.Event) -> None:
        self._calm.clear()
        self._calm_beside.clear()
        self._last_s = time.monotonic()
        if isinstance(event, events.Key) and event.key == AT_ONCE:
            while len(self._waiting) > 1:
                self._waiting.pop()
        self._waiting.append(event)
        if len(self._waiting) == 1:
            await self._begin()

    def stop(self) -> None:
        """For good: whoever gave way goes on."""
        if self._rest is not None:
            self._rest.cancel()
        self._waiting.clear()
        self._let_go()

    async def _begin(self) -> None:
        await self._hand_on(self._waiting[0])
        self._rest = asyncio.create_task(self._until_done())
        self._rest.add_done_callback(self._next)

    async def _until_done(self) -> None:
        with suppress(TimeoutError, ScreenStackError):
            async with asyncio.timeout(LONGEST_S):
                for _ in range(ROUNDS):
                    for node in (self._app.focused or self._app.screen).ancestors_with_self:
                        await _caught_up(node)

    def _next(self, done: asyncio.Task[None]) -> None:
        """However the last one ended: what went wrong with it is the app's to say, and the keys go on."""
        if self._waiting:
            self._waiting.popleft()
        if not done.cancelled() and isinstance(error := done.exception(), Exception):
            self._app._handle_exception(error)
        if self._waiting:
            self._app.call_later(self._begin)
        else:
            asyncio.get_running_loop().call_later(PAINTED_S, self._let_go)

    def _let_go(self) -> None:
        if not self._waiting:
            self._calm.set()
            self._calm_beside.set()


class _Mark(asyncio.Event):
    """Sent to a pump, reached once all before it is done. It says itself that it takes nothing: Textual would find that out
    anew for each, which took a tenth of what a key does."""

    _param_count = 0

    def __call__(self) -> None:
        self.set()


async def _caught_up(pump: MessagePump) -> None:
    """Until it has done what had been sent to it by now, or is closed."""
    reached = _Mark()
    is_sent = pump.post_message(events.Callback(callback=reached))
    for _ in range(SPINS):
        if reached.is_set() or not is_sent:
            return
        await asyncio.sleep(0)
    while is_sent and not reached.is_set() and not pump._closed:
        with suppress(TimeoutError):
            await asyncio.wait_for(reached.wait(), LOOK_S)
