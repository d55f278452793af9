"""Settings every test shares: no hub is reached, one thread, hypothesis without a deadline on a busy machine.

`make thorough` looks at 1,000 examples of each property whose test names no number of its own.
"""

import atexit
import gc
import os
from collections.abc import Generator
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("house", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("house"), max_examples=1000)
settings.load_profile("house")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected and imported stays: looking for garbage in it took half the collection, and then part of each test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # for libraries that count at the end what was never let go of
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Rooms take turns, file by file: tests of hosts mostly wait, those of the trainer compute, so both go on side by side.

    Files without slow tests come last: what a minute's wait would leave idle at the end has small things to do.
    """
    rooms: dict[Path, list[list[pytest.Item]]] = {}
    for path, tests in groupby(items, key=lambda item: item.path):
        rooms.setdefault(path.parent, []).append(list(tests))
    turns = [
        (all(item.get_closest_marker("slow") is None for item in file), at / len(files), room, file)
        for room, files in rooms.items()
        for at, file in enumerate(files)
    ]
    items[:] = [item for *_, file in sorted(turns, key=lambda turn: turn[:3]) for item in file]
