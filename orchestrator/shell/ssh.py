"""A host reached over SSH, through any number of jump hosts.

At most four commands at once share one connection (a server's default limit is ten sessions). A
connection that is gone is opened again for the next command; a command whose connection is lost
while it runs raises HostError and is never started a second time by itself.
"""

from __future__ import annotations

import contextlib
import threading

from orchestrator.errors import HostError
from orchestrator.shell.channel import Conversation, LostBefore
from orchestrator.shell.framing import Frame, end_command, frame, no_exit_code
from orchestrator.shell.link import Link
from orchestrator.shell.posix import PosixFiles
from orchestrator.shell.routes import Endpoint
from orchestrator.shell.stream import Deadline, Ended, Sink, Source, timed_out, told

MAX_CHANNELS = 4
GREETING_S = 30.0
AGAIN_S = 5.0  # so soon a cut shows itself


class SshShell(PosixFiles):
    """`endpoints` lead from the first machine to dial to the host itself."""

    def __init__(self, endpoints: tuple[Endpoint, ...]) -> None:
        self.label = endpoints[-1].label
        self._endpoints = endpoints
        self._lock = threading.Lock()
        self._greeting = threading.Lock()
        self._slots = threading.BoundedSemaphore(MAX_CHANNELS)
        self._link: Link | None = None
        self._wants_tty = False  # some proxies give no output without one
        self._is_on_tty: bool | None = None  # None: not greeted yet

    def open(self) -> None:
        """Connects and runs a first command, if that is not so yet; otherwise the first command does."""
        with self._greeting:
            if self._is_on_tty is None:
                self._greet()

    def stream(self, argv: list[str], *, source: Source, sink: Sink, timeout_s: float, idle: bool = False) -> Ended:
        made = frame(argv, stdin_bytes=source.size_bytes)
        self.open()
        if not self._slots.acquire(timeout=timeout_s):
            raise timed_out(self.label, argv, timeout_s)
        try:
            talk = self._converse(made, source, sink, Deadline(timeout_s), idle=idle)
        finally:
            self._slots.release()
        if talk is None:
            raise timed_out(self.label, argv, timeout_s)
        if talk.out.start_words is None:
            raise _not_started(self.label, talk)
        if talk.out.end_words is None:
            if talk.out.has_enough:
                return Ended(None, talk.stderr)
            raise HostError(f"{self.label}: the connection was lost while a command ran; it may still be running there")
        if talk.out.exit_code is None:
            raise no_exit_code(self.label, talk.out.end_words)
        return Ended(talk.out.exit_code, talk.stderr)

    def close(self) -> None:
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.close()

    def _connected(self) -> Link:
        with self._lock:
            if self._link is not None and not self._link.is_alive:
                self._link.close()
                self._link = None
            if self._link is None:
                self._link = Link(self._endpoints)
            return self._link

    def _greet(self) -> None:
        """Learns whether commands run on a terminal there: input must then wait until it is set to raw."""
        first: Conversation | None = None
        for wants_tty in (False, True):
            self._wants_tty = wants_tty
            try:
                talk = self._converse(
                    frame(["true"], stdin_bytes=0), Source.of(b""), lambda _: None, Deadline(GREETING_S)
                )
            except HostError:
                if first is None:
                    raise
                break  # it gives no terminal either: what the first try said is what counts
            if talk is None:
                raise timed_out(self.label, ["true"], GREETING_S)
            if talk.out.start_words is not None:
                self._is_on_tty = talk.is_on_tty
                return
            first = first or talk
        self._wants_tty = False
        assert first is not None
        raise _not_started(self.label, first)

    def _converse(
        self, made: Frame, source: Source, sink: Sink, deadline: Deadline, *, idle: bool = False
    ) -> Conversation | None:
        """None: the time was over, and the command was told to end."""
        link, talk = self._begun(made, sink, deadline)
        with talk:
            if self._is_on_tty:
                talk.until_ready(deadline)
            talk.feed(made.prefix, source)
            if talk.until_end(deadline, idle=idle):
                return talk
            _end(link, talk.pid)
            return None

    def _begun(self, made: Frame, sink: Sink, deadline: Deadline) -> tuple[Link, Conversation]:
        """Over a connection that was cut just now nothing has started: another one is dialled, once.

        Not after a long wait: that is a machine that froze, and a frozen one is an error in under 45 s.
        """
        soon = Deadline(AGAIN_S)
        link = self._connected()
        try:
            return link, Conversation(link, made, wants_tty=self._wants_tty, sink=sink, deadline=deadline)
        except LostBefore:
            if soon.is_over:
                raise
        link = self._connected()
        return link, Conversation(link, made, wants_tty=self._wants_tty, sink=sink, deadline=deadline)


def _not_started(label: str, talk: Conversation) -> HostError:
    printed = told(talk.out.noise + b"\n" + talk.err.noise, 500)
    if talk.is_lost and not printed:
        return HostError(f"{label}: the connection was lost while a command was started; it may be running there")
    return HostError(
        f"{label}: the command was not started: the login shell or a forced command ended first"
        + (f"; it said:\n  {printed}" if printed else " and said nothing")
    )


def _end(link: Link, pid: int | None) -> None:
    """Closing a channel leaves the command running (and holding a GPU): its process group is told to end."""
    if pid is None or not link.is_alive:
        return
    made = frame(end_command(pid), stdin_bytes=0)
    soon = Deadline(5)
    with (
        contextlib.suppress(HostError),
        Conversation(link, made, wants_tty=False, sink=lambda _: None, deadline=soon) as talk,
    ):
        talk.feed(b"", Source.of(b""))
        talk.until_end(soon, idle=False)
