"""The bytes a client sends: read with an end to the wait, and taken apart into contents.

A client whose cable was cut leaves a receiver behind that waits until TCP gives up, hours later, and holds a lock
meanwhile. So nothing for QUIET_S means that nobody is there.

Standard library only; sent to the host together with receive.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import zlib
from typing import Any

PIECE_BYTES = PIPE_BYTES = 1024**2
READ_BYTES = 64 * 1024  # at a time: the memory for more is asked of the system, and given back, at every read
QUIET_S = 120.0  # as long as the other side waits for a byte that moves


class Silence(Exception):
    """Nothing came for too long; its one argument says how long, in seconds."""


class Arriving:
    """A pipe or socket as a stream. Silence when `quiet_s` pass without a byte."""

    def __init__(self, descriptor: int, *, quiet_s: float = QUIET_S) -> None:
        self._descriptor, self._quiet_s = descriptor, quiet_s
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        # A pipe of 64 KiB stops sshd after two packets, and each time it tells the client that there is room again. Not
        # every system has this, and a user may have many pipes already.
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def read1(self, size: int) -> bytes:
        """What is there, at most `size`; empty at the end."""
        if not self._poll.poll(self._quiet_s * 1000):
            raise Silence(self._quiet_s)
        return os.read(self._descriptor, min(size, READ_BYTES))

    def read(self, size: int) -> bytes:
        """All of `size`, less only at the end."""
        pieces: list[bytes] = []
        while size and (piece := self.read1(size)):
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)


class Content:
    """A zlib stream read by exact sizes, at bounded memory, and the plain bytes that follow it."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._unpack = stream, zlib.decompressobj()
        self._ready, self._at = b"", 0

    def unpacked(self, size: int) -> bytes:
        while len(self._ready) - self._at < size:
            self._ready, self._at = self._ready[self._at :] + self._more(), 0
        content = self._ready[self._at : self._at + size]
        self._at += size
        return content

    def end_pack(self) -> None:
        while not self._unpack.eof:
            self._more()
        self._ready, self._at = self._unpack.unused_data, 0

    def plain(self, size: int) -> bytes:
        if self._at < len(self._ready):
            content = self._ready[self._at : self._at + size]
            self._at += len(content)
            return content
        return bytes(self._stream.read1(size))

    def _more(self) -> bytes:
        piece = self._unpack.unconsumed_tail or self._stream.read1(PIECE_BYTES)
        if not piece:
            raise EOFError
        return self._unpack.decompress(piece, PIECE_BYTES)
