"""The content that a host lacks, as one stream: which contents follow, the small ones packed, the large ones as they are.

It is made while it travels, so a tree of any size costs the memory of one piece, and sending begins with the first file.

It does not know where it goes, and it does not decide what is lacking.
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.shell.stream import PIECE_BYTES
from orchestrator.tree import Entry, ShipError, Tree, named
from remote.manifest import open_file

PACK_UP_TO_BYTES = 1024**2


@dataclass(frozen=True)
class Progress:
    """Content, before compression."""

    sent_bytes: int
    total_bytes: int
    bytes_per_s: float
    waits_for: str = ""  # who is sending the same content just now: a process on the host


Tell = Callable[[Progress], None]


class Parcel:
    """Reads like a file. `missing` are contents of the tree, each with how many of its bytes are there already."""

    def __init__(self, tree: Tree, missing: Sequence[tuple[str, int]], on_progress: Tell | None) -> None:
        by_sha = {entry.sha256: entry for entry in tree.entries if entry.link is None}
        wanted = [(by_sha[sha], have) for sha, have in missing]
        self._small = [entry for entry, _ in wanted if entry.size_bytes <= PACK_UP_TO_BYTES]
        self._large = [(entry, have) for entry, have in wanted if entry.size_bytes > PACK_UP_TO_BYTES]
        self.num_contents = len(wanted)
        self.content_bytes = sum(e.size_bytes for e in self._small) + sum(
            e.size_bytes - have for e, have in self._large
        )
        self._pieces = self._stream()
        self._on_progress, self._sent, self._began = on_progress, 0, time.monotonic()

    def read(self, _size: int) -> bytes:
        """The next piece, of its own size; empty at the end. ShipError when a file is not there any more."""
        piece = next(self._pieces, b"")
        if self._on_progress is not None:
            rate = self._sent / max(1e-9, time.monotonic() - self._began)
            self._on_progress(Progress(self._sent, self.content_bytes, rate))
        return piece

    def _stream(self) -> Iterator[bytes]:
        yield from _gathered(self._pack())
        for entry, have in self._large:
            left = entry.size_bytes - have
            with source_of(entry):
                stream = open_file(entry.source)
            with stream:
                stream.seek(have)
                while left:
                    # A file that shrank is filled up: its hash will not match, and the other end says so.
                    with source_of(entry):
                        piece = stream.read(min(PIECE_BYTES, left)) or bytes(min(PIECE_BYTES, left))
                    left -= len(piece)
                    self._sent += len(piece)
                    yield piece

    def _pack(self) -> Iterator[bytes]:
        """What follows, and one zlib stream with every small content, each exactly as long as the manifest says."""
        pack = [[entry.sha256, entry.size_bytes] for entry in self._small]
        large = [[entry.sha256, entry.size_bytes, have] for entry, have in self._large]
        yield header(pack=pack, large=large)
        packing = zlib.compressobj(1)
        for entry in self._small:
            with source_of(entry), open_file(entry.source) as stream:  # no more than was measured: it may have grown
                content = stream.read(entry.size_bytes).ljust(entry.size_bytes, b"\0")
            self._sent += entry.size_bytes
            yield packing.compress(content)
        yield packing.flush()


def header(**body: Any) -> bytes:
    """JSON, packed, behind its length: what the other end reads first."""
    packed = zlib.compress(json.dumps(body).encode(), 1)
    return len(packed).to_bytes(4, "big") + packed


def changed(entry: Entry, why: str = "") -> ShipError:
    return ShipError(
        f"{named(entry.source)} changed while it was shipped{why}; nothing of it is in use there, start again"
    )


@contextlib.contextmanager
def source_of(entry: Entry) -> Iterator[None]:
    """Reading it may fail: it may have been deleted since it was listed."""
    try:
        yield
    except OSError as error:
        raise changed(entry, f" ({error.strerror})") from error


def _gathered(bits: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces worth sending; none is empty, which would mean the end."""
    held: list[bytes] = []
    size = 0
    for bit in bits:
        held.append(bit)
        size += len(bit)
        if size >= PIECE_BYTES:
            yield b"".join(held)
            held, size = [], 0
    if size:
        yield b"".join(held)
