"""A card that is not there: counts tensors on the CPU against a limit, and runs out as PyTorch's allocator does.

The error has the allocator's own words and the snapshot its own shape, so that everything behind them (report, snapshot,
classifier, table) is the same code as on a card. What it does not stand in for: pieces and segments, other processes,
workspaces of libraries, the driver.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from benchmarks.books import Books

GIB, MIB = 1024**3, 1024**2
_OWN_FILES = ("benchmarks/oom_card.py", "benchmarks/books.py", "torch/utils/_python_dispatch.py")
_BACKWARD = ("torch/autograd/graph.py", "torch/_tensor.py")


class SmallCard(Books):
    """Refuses a storage beyond its limit, and remembers of each whose it is."""

    def __init__(self, limit_bytes: int, *, is_process_limit: bool = False) -> None:
        super().__init__()
        self._limit_bytes, self._is_process_limit = limit_bytes, is_process_limit
        self._at_error: dict[str, Any] | None = None

    def snapshot(self) -> dict[str, Any]:
        """As `torch.cuda.memory._snapshot` has it; after an error, what was alive when it was raised."""
        return self._at_error or self._snapshot()

    def _snapshot(self) -> dict[str, Any]:
        segment = {"device": 0, "address": 0, "total_size": self._limit_bytes, "blocks": list(self.alive.values())}
        return {"segments": [segment], "device_traces": [], "allocator_settings": {"expandable_segments": True}}

    def entry(self, key: int, size_bytes: int) -> dict[str, Any]:
        if self.live_bytes + size_bytes > self._limit_bytes:
            self._at_error = self._snapshot()
            raise torch.OutOfMemoryError(self._text(size_bytes))
        return {"address": key, "size": size_bytes, "state": "active_allocated", "frames": _stack()}

    def _text(self, asked_bytes: int) -> str:
        total = 16 * self._limit_bytes if self._is_process_limit else self._limit_bytes
        allowed = f"{_size(self._limit_bytes)} allowed; " if self._is_process_limit else ""
        return (
            f"CUDA out of memory. Tried to allocate {_size(asked_bytes)}. GPU 0 has a total capacity of {_size(total)} of"
            f" which {_size(total - self.live_bytes)} is free. Including non-PyTorch memory, this process has"
            f" {_size(self.live_bytes)} memory in use. {allowed}Of the allocated memory {_size(self.live_bytes)} is"
            " allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
        )


@contextmanager
def counting(card: SmallCard) -> Iterator[None]:
    """The block on the stand-in; its error is raised where the operation stands, as one from C++ is."""
    try:
        with card:
            yield
    except torch.OutOfMemoryError as error:
        # Another error of the same words: contextlib gives one that only passes its old traceback back.
        raise torch.OutOfMemoryError(str(error)).with_traceback(_without_own(error.__traceback__)) from None


def _without_own(trace: TracebackType | None) -> TracebackType | None:
    if trace is None:
        return None
    rest = _without_own(trace.tb_next)
    if trace.tb_frame.f_code.co_filename.endswith(_OWN_FILES):
        return rest
    return TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def _stack() -> list[dict[str, Any]]:
    """Python's frames, innermost first. A backward has none of those around it: autograd runs it in a thread of its own."""
    found: list[dict[str, Any]] = []
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith(_BACKWARD) and frame.f_code.co_name in ("backward", "_engine_run_backward"):
            break
        if not file.endswith(_OWN_FILES):
            found.append({"filename": file, "line": frame.f_lineno, "name": frame.f_code.co_name})
        frame = frame.f_back  # type: ignore[assignment]  # the outermost has none
    return found


def _size(size_bytes: int) -> str:
    if size_bytes >= GIB:
        return f"{size_bytes / GIB:.2f} GiB"
    return f"{size_bytes / MIB:.2f} MiB" if size_bytes >= MIB else f"{size_bytes / 1024:.2f} KiB"
