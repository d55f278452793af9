"""One command over one channel: both streams drained at once, every wait for the other side with an end.

paramiko's own ways block without a deadline when the peer's window is full, when a stream is left
unread or when the exit status never comes; here one loop looks at everything. What is waited for
without an end is this side alone: a read of the input's file that has begun, as its owner closes it then.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Callable

import paramiko

from orchestrator.errors import DraftyardError, HostError
from orchestrator.shell.framing import Frame, Unframe, command_line, drowned
from orchestrator.shell.link import CONNECT_S, TROUBLE, Link
from orchestrator.shell.stream import LINGER_S, PIECE_BYTES, Deadline, Sink, Source
from orchestrator.shell.transport import send_all

LOOK_S = 1.0
FULL_S = 15.0  # that long a server whose sessions are all taken, and none by us, is asked again
FREED_S = 5.0  # so long after a command of ours at the latest, the server has seen its end


class LostBefore(HostError):
    """The connection was lost before anything of a command was sent whole: it did not start, and may be tried anew."""


class Conversation:
    """A running command: `until_end` returns when both end marks came or the channel closed."""

    def __init__(self, link: Link, frame: Frame, *, wants_tty: bool, sink: Sink, deadline: Deadline) -> None:
        self._link = link
        self._stderr: list[bytes] = []
        self.out = Unframe(frame.nonce, sink)
        self.err = Unframe(frame.nonce, self._stderr.append)
        self._ends_input = True
        self.source_error: OSError | DraftyardError | None = None
        self._enough: Deadline | None = None
        self._reading, self._is_left = threading.Lock(), False  # of the source, which its owner closes when we return
        self.last_move = time.monotonic()
        self._channel = _opened(link, deadline)
        # paramiko waits for the server's "yes" to each request. We need not: a "no" closes the channel, which is seen
        # as a command that never started, and over a long line every wait is a round trip.
        self._channel._wait_for_event = lambda: None  # type: ignore[attr-defined]
        try:
            if wants_tty:
                self._channel.get_pty()
            self._channel.exec_command(command_line(frame.argv))
        except TROUBLE as error:
            _let_go(self._channel)
            if not link.is_alive:
                raise LostBefore(
                    f"{link.label}: the connection was lost before the command started: {error}"
                ) from error
            # The server ended the session at once; that no start mark came will be said.

    @property
    def stderr(self) -> bytes:
        return b"".join(self._stderr)

    @property
    def is_lost(self) -> bool:
        return not self._link.is_alive

    @property
    def is_on_tty(self) -> bool:
        return (self.out.start_words or [])[-1:] == ["tty"]

    @property
    def pid(self) -> int | None:
        words = self.out.start_words
        return int(words[0]) if words and words[0].isdecimal() else None

    def __enter__(self) -> Conversation:
        self._link.count_talk(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._link.count_talk(-1)
        _let_go(self._channel)
        with self._reading:
            self._is_left = True

    def feed(self, prefix: bytes, source: Source) -> None:
        """Sends stdin and its end, from a thread: output is read meanwhile, and sshd takes not one byte before it has started
        the command, which a frozen one never does. An end alone waits for nothing."""
        if not prefix and source.size_bytes == 0:
            self._write(b"", source)
        else:
            words = (prefix + source.head, source)
            threading.Thread(target=self._write, args=words, name="draftyard-stdin", daemon=True).start()

    def until_ready(self, deadline: Deadline) -> None:
        """A terminal over there is set to raw: from now on input passes unchanged.

        The command counts its input; an end of it would cut what is still on its way through the terminal.
        """
        self._ends_input = False
        self._loop(deadline, idle=False, is_done=lambda: self.out.start_words is not None or self.out.is_ready)

    def until_end(self, deadline: Deadline, *, idle: bool) -> bool:
        """False when the time was over first."""
        is_done = self._loop(deadline, idle=idle, is_done=self._has_ended)
        self.out.flush()
        self.err.flush()
        return is_done

    def _has_ended(self) -> bool:
        if self.out.has_enough:
            self._enough = self._enough or Deadline(LINGER_S)
            if self._enough.is_over:
                return True
        return self.out.end_words is not None and (self.err.end_words is not None or self.is_on_tty)

    def _loop(self, deadline: Deadline, *, idle: bool, is_done: Callable[[], bool]) -> bool:
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        seen = self.last_move
        while not is_done():
            if self._read_all() and (idle or not deadline.is_over):  # what never stops printing is over some time too
                self._link.pulse.heard()
                self.last_move = time.monotonic()
                continue
            if self.source_error is not None:
                raise self.source_error
            if self._channel.closed or self._channel.eof_received:
                if self._read_all():  # it came between the look above and the end
                    continue
                return True
            if idle and self.last_move > seen:
                seen = self.last_move
                deadline.renew()
            if deadline.is_over:
                return False
            self._link.pulse.check()
            poll.poll(max(1.0, 1000 * min(LOOK_S, (self._enough or deadline).left_s)))
        return True

    def _read_all(self) -> bool:
        moved = False
        if self._channel.recv_ready():
            self.out.feed(self._received(self._channel.recv))
            moved = True
        if self._channel.recv_stderr_ready():
            self.err.feed(self._received(self._channel.recv_stderr))
            moved = True
        for stream in (self.out, self.err):
            if stream.is_drowned:
                raise drowned(self._link.label, stream)
        return moved

    def _received(self, receive: Callable[[int], bytes]) -> bytes:
        """Taking a piece also tells the server that there is room again, which fails on a connection that was just lost."""
        try:
            return receive(PIECE_BYTES * 4)
        except TROUBLE as error:
            raise HostError(
                f"{self._link.label}: the connection was lost while a command ran; it may still be running there"
            ) from error

    def _write(self, head: bytes, source: Source) -> None:
        """A command that does not read its input, or has ended, is no error: its exit code tells.

        A source that cannot be read is one, of this side: the command is let go of before its input has ended.
        """
        with contextlib.suppress(*TROUBLE):
            if head:
                self._channel.sendall(head)
            while source.after is not None and not source.after.wait(LOOK_S):
                if self._channel.closed:  # it has ended and wanted none
                    return
            while piece := self._piece(source):
                send_all(self._channel, piece)
                self.last_move = time.monotonic()
                self._link.pulse.heard()
            if self._ends_input:
                self._channel.shutdown_write()

    def _piece(self, source: Source) -> bytes:
        try:
            with self._reading:
                if self._is_left:
                    raise EOFError
                return source.stream.read(PIECE_BYTES)
        except (OSError, DraftyardError) as error:
            self.source_error = error
            _let_go(self._channel)
            raise EOFError from error


def _opened(link: Link, deadline: Deadline) -> paramiko.Channel:
    """A session channel, while the next one is opened behind our back."""
    channel = _open(link, deadline)
    threading.Thread(target=_open_spare, args=(link,), name="draftyard-spare", daemon=True).start()
    return channel


def _open_spare(link: Link) -> None:
    with contextlib.suppress(*TROUBLE):
        link.keep_spare(link.transport.open_session(timeout=CONNECT_S))


def _open(link: Link, deadline: Deadline) -> paramiko.Channel:
    """A server at its session limit (MaxSessions) is asked again for a while, and while commands of ours fill it.

    The one opened ahead is taken first, if it is still good; it may come at any time, and be the only one.
    """
    ends, pause_s = time.monotonic() + FULL_S, 0.05
    while True:
        try:
            spare = link.take_spare()
            return spare if spare is not None and not spare.closed else link.transport.open_session(timeout=CONNECT_S)
        except TROUBLE as error:
            if not link.is_alive:
                raise LostBefore(
                    f"{link.label}: the connection was lost before the command started: {error}"
                ) from error
            # The refusal itself may reach another thread that opens at the same time; any error but silence is one.
            if link.num_talks > 0 and not deadline.is_over:
                ends = max(ends, time.monotonic() + FREED_S)
            if not str(error).startswith("Timeout") and time.monotonic() + pause_s < ends:
                time.sleep(pause_s)
                pause_s = min(1.0, pause_s * 2)
                continue
            if isinstance(error, paramiko.ChannelException):
                raise HostError(
                    f"{link.label}: opens no further session: {error.text} (MaxSessions of its sshd)"
                ) from error
            link.transport.close()  # the next command dials anew
            why = f"opened no session within {CONNECT_S:g} s; its sshd hangs or the machine is frozen"
            raise HostError(f"{link.label}: {why} ({error})") from error


def _let_go(channel: paramiko.Channel) -> None:
    with contextlib.suppress(*TROUBLE):
        channel.close()
