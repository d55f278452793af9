"""The threads beside the screen: the one that reads, and one for each thing that is asked of a host.

The reading thread owns the Room, so that a busy database never holds up a key press; one job at a time. All are daemons:
quitting never waits for them.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from tui.snapshot import Ask, Room, Snapshot

Result = TypeVar("Result")


async def beside(job: Callable[[], Result]) -> Result:
    """Runs the job in a thread of its own; what it raises is raised here. An executor's threads would hold up the end."""
    future: Future[Result] = Future()
    settle = partial(
        contextvars.copy_context().run, _settle, future, job
    )  # of an app that has ended a widget asks there
    threading.Thread(target=settle, name="draftyard-beside", daemon=True).start()
    return await asyncio.wrap_future(future)


def in_screen(loop: asyncio.AbstractEventLoop, deed: Callable[[], Result]) -> Result:
    """From a thread beside the screen: does the deed in the screen's own. RuntimeError where the screen has ended.

    Textual's own way makes a coroutine first, which nobody awaits where the loop was closed just then.
    """
    future: Future[Result] = Future()
    loop.call_soon_threadsafe(_settle, future, deed)
    return future.result()


def _settle(future: Future[Result], job: Callable[[], Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(job())
    except BaseException as error:  # noqa: BLE001 - carried over to the caller, who answers it
        future.set_exception(error)


class ReadingThread:
    def __init__(self, room: Room) -> None:
        self._room = room
        self.open_reader = room.open_reader  # of a thread beside it, which closes it
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="draftyard-reading", daemon=True)
        self._thread.start()

    async def do(self, job: Callable[[Room], Result]) -> Result:
        """Runs the job in the thread; what it raises is raised here."""
        future: Future[Result] = Future()
        self._jobs.put(lambda: _settle(future, lambda: job(self._room)))
        return await asyncio.wrap_future(future)

    async def read(self, ask: Ask, at_s: float, ahead: Callable[[Snapshot], object], *, anew: bool) -> Snapshot | None:
        """What `Room.read` does, and `ahead` with what it found; `anew` also where nothing has changed."""

        def job(room: Room) -> Snapshot | None:
            if anew:
                room.forget()
            snapshot = room.read(ask, at_s)
            if snapshot is not None:
                ahead(snapshot)
            return snapshot

        return await self.do(job)

    def stop(self, *, wait_s: float = 0.2) -> None:
        """Lets the thread end after its present job; waits a moment only."""
        self._jobs.put(None)
        self._thread.join(wait_s)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        self._room.close()
