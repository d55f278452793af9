"""Settings every test shares: no hub is reached, one thread, hypothesis without a deadline on a busy machine.

`make thorough` looks at 1,000 examples of each property whose test names no number of its own.
"""

import atexit
import gc
import os
import signal
import time
from collections.abc import Generator
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

FREEZE_S = 0.03  # tens of thousands of objects; torch's compiler alone is a hundred thousand
LONG_WAITS = (
    "test_two_hosts",
    "test_hosts_apart",
    "test_shell",
    "test_live",
    "test_package",
)  # half a minute to two minutes a test

settings.register_profile("house", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("house"), max_examples=1000)
settings.load_profile("house")

# Under nohup, or behind a shell's `&`, they come ignored, and whatever a test starts and then signals would inherit that: it
# would wait for minutes. A handler that does nothing keeps the tests themselves going and leaves their programs the default.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)


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


# When the last one began, and the longest whole one since the last freeze, in seconds of processor time.
_collections_s = [0.0, 0.0]


def _time_collections(phase: str, told: dict[str, int]) -> None:
    if phase == "start":
        _collections_s[0] = time.process_time()
    elif told["generation"] == 2:
        _collections_s[1] = max(_collections_s[1], time.process_time() - _collections_s[0])


gc.callbacks.append(_time_collections)


def pytest_runtest_logfinish() -> None:
    """What tests import later stays as well: once looking through it takes long, it is not looked through any more.

    Between two tests, after a collection, so that nothing of a test's own is kept.
    """
    if _collections_s[1] > FREEZE_S:
        gc.collect()
        gc.freeze()
        _collections_s[1] = 0.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Rooms take turns, file by file: tests of hosts mostly wait, those of the trainer compute, so both go on side by side.

    Files without slow tests come last: what a minute's wait would leave idle at the end has small things to do. Files that wait
    for minutes take their turn in the first half, each by itself: all at once would leave both cores idle.
    """
    rooms: dict[Path, list[list[pytest.Item]]] = {}
    for path, tests in groupby(items, key=lambda item: item.path):
        rooms.setdefault(path.parent, []).append(list(tests))
    turns = [
        (not any(item.get_closest_marker("slow") for item in file), _place(file, at / len(files)), room, file)
        for room, files in rooms.items()
        for at, file in enumerate(files)
    ]
    items[:] = [item for *_, file in sorted(turns, key=lambda turn: turn[:3]) for item in file]


def _place(file: list[pytest.Item], share: float) -> float:
    return share / 2 if file[0].path.stem in LONG_WAITS else share
