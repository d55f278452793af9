"""SIGTERM and SIGHUP, heard as Ctrl-C is: whoever is at work says how it stands and leaves the same behind.

A shell's `kill`, `timeout`, systemd and a terminal that closes say so to a launch or to somebody who waits. Python dies of
them in silence. What has a way of its own to end (the screens, the follower) sets its own handlers over these.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

NUMBERS = (signal.SIGTERM, signal.SIGHUP)
GRACE_S = 2.0


class Interrupted(KeyboardInterrupt):
    """A signal that is no key; whoever answers to Ctrl-C answers to it."""

    def __init__(self, number: int) -> None:
        self.number = signal.Signals(number)
        super().__init__(self.number.name)


@contextmanager
def heard_as_interrupts(grace_s: float = GRACE_S) -> Iterator[list[int]]:
    """Gives the signals that have come. The first is raised: `timeout` and shells send theirs twice, and what cleans up must
    not be cut short by the second one. One that comes later than `grace_s` ends the process: a clean-up may hang, and the
    exception may be lost (Python lets none out of a destructor). A signal that is ignored (nohup) stays so; a handler that
    is set stays as well.
    """
    came: list[int] = []
    first_s, is_over = 0.0, False

    def hear(number: int, _: FrameType | None) -> None:
        nonlocal first_s
        came.append(number)
        if len(came) == 1:
            first_s = time.monotonic()
            if not is_over:
                raise Interrupted(number)
        elif time.monotonic() - first_s >= grace_s:
            die_of(number)

    is_main = threading.current_thread() is threading.main_thread()
    ours = [number for number in NUMBERS if is_main and signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in ours:
            signal.signal(number, hear)
        yield came
    finally:
        is_over = True
        for number in ours:
            if signal.getsignal(number) is hear:
                signal.signal(number, signal.SIG_DFL)


def die_of(number: int) -> None:
    """As the shell expects of whoever was ended by a signal."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
