"""Modules loaded when they are first used, so that help, `ls` and a screen cost nothing of what they do not do.

    if TYPE_CHECKING:
        from orchestrator.actions import jobs
    else:
        jobs = lazy("orchestrator.actions.jobs")

Measured: `launch --help` 1.4 s of imports without this (sqlmodel, fabric, pydantic), 0.15 s with it.

Any thread may be the first to look. Python promises less: its LazyLoader shows a second thread a module that is half
loaded, and its import locks end a tie between modules that import each other in the same way. So one thread at a time
loads here, and what it has not finished is nobody else's. For that to hold, nothing of ours imports inside a function.
"""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

from orchestrator.interrupts import NUMBERS

_WHOLE: dict[str, ModuleType] = {}
_TURN = threading.RLock()  # again by the same thread: a module may look into another one while it loads
_loading: list[str] = []


def lazy(name: str) -> ModuleType:
    """What stands for the module: its attributes are the module's, whose code runs at the first look."""
    return _StandIn(name)


def loaded(name: str) -> ModuleType:
    """The module itself, whole. Waits for a thread that is loading one."""
    return _WHOLE.get(name) or _load(name)


class _StandIn(ModuleType):
    def __getattr__(self, attribute: str) -> Any:
        return getattr(loaded(self.__name__), attribute)


def _load(name: str) -> ModuleType:
    """Whole or not at all: a Ctrl-C waits for its end, else what cleans up would meet half of it."""
    with _TURN, _held():
        _loading.append(name)
        try:
            module = importlib.import_module(name)
        finally:
            _loading.pop()
        if not _loading:  # else it may be one that has led here, and is still being filled
            _WHOLE[name] = module
        return module


@contextmanager
def _held() -> Iterator[None]:
    """An interrupt that comes meanwhile counts at the end. A mask would not do: it goes to any thread without one."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *NUMBERS)}
    ours = {number: handler for number, handler in before.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    for number in ours:
        signal.signal(number, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
        if caught:
            ours[signal.Signals(caught[0][0])](*caught[0])
