"""SIGTERM and SIGHUP, heard as Ctrl-C is: whoever is at work says how it stands and leaves the same behind.

A shell's `kill`, `timeout`, systemd and a terminal that closes say so to a launch or to somebody who waits. Python dies of
them in silence. What has a way of its own to end (the screens, the follower) sets its own handlers over these.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

NUMBERS = (signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal that is no key; whoever answers to Ctrl-C answers to it."""

    def __init__(self, number: int) -> None:
        self.number = signal.Signals(number)
        super().__init__(self.number.name)


@contextmanager
def heard_as_interrupts() -> Iterator[list[int]]:
    """Gives the signal that has come, if any. It is raised once: `timeout` and shells send theirs twice, and what cleans up
    must not be cut short by the second one. A signal that is ignored (nohup) stays so; a handler that is set stays as well.
    """
    came: list[int] = []

    def hear(number: int, _: FrameType | None) -> None:
        came.append(number)
        if len(came) == 1:
            raise Interrupted(number)

    is_main = threading.current_thread() is threading.main_thread()
    ours = [number for number in NUMBERS if is_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, hear)
    try:
        yield came
    finally:
        for number in ours:
            if signal.getsignal(number) is hear:
                signal.signal(number, signal.SIG_DFL)


def die_of(number: int) -> None:
    """As the shell expects of whoever was ended by a signal."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
