"""Modules loaded when they are first used, so that help, `ls` and a screen cost nothing of what they do not do.

    if TYPE_CHECKING:
        from orchestrator.actions import jobs
    else:
        jobs = lazy("orchestrator.actions.jobs")

Measured: `launch --help` 1.4 s of imports without this (sqlmodel, fabric, pydantic), 0.15 s with it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType


def lazy(name: str) -> ModuleType:
    """The module, whose code runs at the first look into it."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"no module named {name!r}", name=name)
    spec.loader = importlib.util.LazyLoader(_Whole(spec.loader))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class _Whole(importlib.abc.Loader):
    """Loads a module whole or not at all: a Ctrl-C waits for its end, else what cleans up would meet half of it."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def exec_module(self, module: ModuleType) -> None:
        with _held():
            self._loader.exec_module(module)


@contextmanager
def _held() -> Iterator[None]:
    """An interrupt that comes meanwhile counts at the end. A mask would not do: it goes to any thread without one."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught:
            before(*caught[0])
