"""A relay on loopback that delays every byte: a long line, where `tc netem` is not to be had."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Trips:
    """How often the line was waited for, by causes and not by the clock: an end that was given something on the n-th way
    sends on the one after. What is sent without waiting for it costs no further trip."""

    ways: dict[str, int] = field(default_factory=lambda: {"near": 0, "far": 0})

    def start(self) -> None:
        """Counts anew; what is on its way counts no more."""
        self.ways = {"near": 0, "far": 0}

    @property
    def number(self) -> int:
        """Round trips until now, as the near end sees it."""
        return self.ways["near"] // 2


@dataclass
class _Pipe:
    """One direction: bytes leave `delay_s` after they came, in order, as fast as they are taken or `rate` (bytes a second;
    0: any) lets them."""

    source: socket.socket
    sink: socket.socket
    delay_s: float
    trips: Trips
    sender: str
    taker: str
    rate: float = 0.0
    queue: list[tuple[float, int, bytes, dict[str, int], int]] = field(default_factory=list)
    wake: threading.Condition = field(default_factory=threading.Condition)

    def start(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._write, daemon=True).start()

    def _read(self) -> None:
        for number in itertools.count():
            try:
                piece = self.source.recv(256 * 1024)
            except OSError:
                piece = b""
            ways = self.trips.ways
            with self.wake:
                heapq.heappush(
                    self.queue, (time.monotonic() + self.delay_s, number, piece, ways, ways[self.sender] + 1)
                )
                self.wake.notify()
            if not piece:
                return

    def _write(self) -> None:
        while True:
            with self.wake:
                while not self.queue:
                    self.wake.wait()
                due, _, piece, ways, way = heapq.heappop(self.queue)
            time.sleep(max(0.0, due - time.monotonic()))
            ways[self.taker] = max(way, ways[self.taker])
            try:
                if not piece:
                    self.sink.shutdown(socket.SHUT_WR)
                    return
                if self.rate:
                    time.sleep(len(piece) / self.rate)
                self.sink.sendall(piece)
            except OSError:
                return


@contextlib.contextmanager
def line(
    port: int, *, one_way_s: float, trips: Trips | None = None, rates: tuple[float, float] = (0.0, 0.0)
) -> Iterator[int]:
    """The port to dial instead of `port`: every byte takes `one_way_s` longer, each way. `trips` counts along.

    `rates`: bytes a second there and back; 0: any.
    """
    is_over, counted = threading.Event(), trips or Trips()
    held: list[socket.socket] = []

    def accept(listener: socket.socket) -> None:
        while not is_over.is_set():
            try:
                near, _ = listener.accept()
            except TimeoutError:
                continue
            far = socket.create_connection(("127.0.0.1", port))
            for end in (near, far):
                end.settimeout(None)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                held.append(end)
            _Pipe(near, far, one_way_s, counted, "near", "far", rates[0]).start()
            _Pipe(far, near, one_way_s, counted, "far", "near", rates[1]).start()

    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        listener.settimeout(0.2)
        thread = threading.Thread(target=accept, args=(listener,))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            is_over.set()
            thread.join()
            for end in held:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
