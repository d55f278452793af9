"""Torch's own books: bytes of every tensor that is alive, counted on a CPU as a caching allocator counts them on a card."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Books(TorchDispatchMode):
    """A storage is entered when an operation returns it and leaves when it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.alive: dict[int, Any] = {}  # by storage: what `entry` says of it

    def __torch_dispatch__(self, operation: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._enter(leaf.untyped_storage())
        return result

    def entry(self, key: int, size_bytes: int) -> Any:
        """What is kept of a storage that is about to be entered. Whoever raises here refuses it."""
        return size_bytes

    def _enter(self, storage: torch.UntypedStorage) -> None:
        key, size_bytes = storage._cdata, storage.nbytes()
        if key in self.alive or not size_bytes:
            return
        self.alive[key] = self.entry(key, size_bytes)
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._leave, key, size_bytes)

    def _leave(self, key: int, size_bytes: int) -> None:
        if self.alive.pop(key, None) is not None:
            self.live_bytes -= size_bytes
