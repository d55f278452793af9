"""Notices a machine that is reachable but frozen: TCP acknowledges every byte, sshd answers none.

As OpenSSH does it: after `interval_s` without a byte a probe is sent that any server answers, another after
each further interval, and when `count_max` of them in a row stay unanswered the machine is given up. The
numbers are ServerAliveInterval and ServerAliveCountMax of ~/.ssh/config, else ours.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import paramiko

from orchestrator.errors import HostError

PATIENCE_S = 40.0  # the longest that all probes together may take: a frozen machine is an error in under 45 s
SHORTEST_S = 2.0  # between two probes; a command looks once a second


@dataclass(frozen=True)
class KeepAlive:
    interval_s: float = 8.0
    count_max: int = 3

    @classmethod
    def of(cls, interval_s: float, count_max: int) -> KeepAlive:
        """What the ssh_config asks for (0: nothing, ours then), in smaller steps where it would wait beyond PATIENCE_S."""
        count = max(1, min(count_max, int(PATIENCE_S / SHORTEST_S) - 1))
        wished_s = max(SHORTEST_S, interval_s or cls.interval_s)
        return cls(min(wished_s, PATIENCE_S / (count + 1)), count)


class Pulse:
    """Of one connection; costs nothing while bytes come. `clock` gives seconds that only grow."""

    def __init__(
        self,
        transport: paramiko.Transport,
        label: str,
        keepalive: KeepAlive,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport, self._label, self._keepalive, self._clock = transport, label, keepalive, clock
        self._lock = threading.Lock()
        self.heard()

    def heard(self) -> None:
        """The machine showed that it lives."""
        with self._lock:
            self._heard = self._clock()
            self._due = self._heard + self._keepalive.interval_s
            self.num_unanswered = 0

    def check(self) -> None:
        """Sends the probe that is due; HostError when the machine is gone or has left `count_max` of them unanswered."""
        if not self._transport.is_active():
            raise HostError(f"{self._label}: the connection was lost")
        now, interval_s = self._clock(), self._keepalive.interval_s
        with self._lock:
            if now < self._due:
                return
            # From the time that was due, so that late looks do not add up, but never two at once after our own sleep.
            self._due = max(self._due, now - interval_s / 2) + interval_s
            is_over = self.num_unanswered >= self._keepalive.count_max
            self.num_unanswered += not is_over
        if is_over:
            self._transport.close()
            raise HostError(
                f"{self._label}: the machine takes our bytes and has answered none of {self.num_unanswered} probes in "
                f"{now - self._heard:.0f} s; its sshd hangs or the machine is frozen\n"
                f"  one every {interval_s:g} s; ServerAliveInterval and ServerAliveCountMax in ~/.ssh/config change that"
            )
        # In a thread of its own: paramiko waits for such an answer without a deadline.
        threading.Thread(target=self._ask, name="draftyard-pulse", daemon=True).start()

    def _ask(self) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._transport.global_request("keepalive@openssh.com", wait=True)
            if self._transport.is_active():
                self.heard()
