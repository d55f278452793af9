"""One command with bytes flowing in and out: what the shells share and the hops build upon."""

from __future__ import annotations

import io
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from orchestrator.errors import HostError
from orchestrator.shell import Shell

IDLE_S = 120.0  # a transfer in which no byte moves for so long is over
PACKET_BYTES = 32 * 1024 - 64  # what paramiko puts into one packet of the size that sshd takes
PIECE_BYTES = (
    8 * PACKET_BYTES
)  # paramiko's sendall copies the rest at every step: whole files in one call are quadratic


@dataclass(frozen=True)
class Source:
    """Bytes for a command's stdin: `head`, then the stream.

    The count is needed: on a terminal nothing else ends the input. Where it is None the command knows by itself how much
    it reads. Nothing of the stream is read before `after`, which the sink sets: so a command can be answered.
    """

    stream: BinaryIO
    size_bytes: int | None  # of both
    head: bytes = b""
    after: threading.Event | None = None

    @classmethod
    def of(cls, content: bytes) -> Source:
        return cls(io.BytesIO(content), len(content))


Sink = Callable[[bytes], object]  # takes stdout as it comes; True means that no more is wanted
LINGER_S = 0.25  # so long a command may take to end by itself when no more is wanted of it


@dataclass(frozen=True)
class Ended:
    exit_code: int | None  # None: it was let go because no more was wanted
    stderr: bytes


class Deadline:
    """A wait that ends. `renew` starts it anew: for transfers, where every byte that moves counts as life."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._ends = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return self._ends - time.monotonic()

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0

    def renew(self) -> None:
        self._ends = time.monotonic() + self.seconds


class StreamShell(Shell, Protocol):
    """A Shell whose commands can also be fed from and drained into a stream at constant memory."""

    label: str  # how messages name the machine

    def stream(self, argv: list[str], *, source: Source, sink: Sink, timeout_s: float, idle: bool = False) -> Ended:
        """With `idle`, the time is counted from the last byte that moved, not from the start. TimedOut when it is over."""
        ...


class TimedOut(HostError):
    """The host did not answer in time; the command was told to end, which may have worked or not."""


def timed_out(label: str, argv: list[str], seconds: float) -> TimedOut:
    return TimedOut(
        f"{label}: no answer within {seconds:g} s from: {shown(argv)}\n"
        "  the command may still be running there; the machine may be overloaded or its disk may hang",
    )


# Terminal sequences (CSI, OSC, two-letter ones), then every other control character and what turns text around.
_SEQUENCES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\\\)?|\x1b.?")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def told(printed: bytes, limit: int = 1500) -> str:
    """What a program over there said, fit for a message: its last characters, and nothing that steers a terminal."""
    text = printed.decode("utf-8", "replace").replace("\r\n", "\n")
    return _CONTROLS.sub("", _SEQUENCES.sub("", text)).strip()[-limit:]


def quoted(said: bytes, limit: int = 80) -> str:
    """The first words of a stranger for a message: one line, its printable letters only."""
    text = _SEQUENCES.sub("", said.decode("utf-8", "replace"))
    line = "".join(letter if letter.isprintable() and letter != "\ufffd" else " " for letter in text)
    return " ".join(line.split())[:limit]


def shown(argv: list[str], limit: int = 120) -> str:
    """The command for a message: one line, cut, no control characters."""
    text = " ".join(repr(word) if not word.isprintable() or " " in word or not word else word for word in argv)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
