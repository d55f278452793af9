"""Torch's own books: bytes of every tensor alive during a step, and their peak by stage. The oracle of the memory plan."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from remote.drafter import synthetic, workbench
from remote.drafter.measure import Meter
from remote.drafter.step import anchor_slots, assemble, forward
from remote.spec import DFlashSpec


class Books(TorchDispatchMode):
    """Counts a storage when an operation returns it and until it is freed, as a caching allocator does."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, operation: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._enter(leaf.untyped_storage())
        return result

    def _enter(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._leave, key, storage.nbytes())

    def _leave(self, key: int, size_bytes: int) -> None:
        self._seen.discard(key)
        self.live_bytes -= size_bytes


def peaks(
    spec: DFlashSpec, *, steps: int = 1, gradients: bool = True, choices: workbench.Choices | None = None
) -> dict[str, int]:
    """Peak bytes of each stage of the last of `steps` steps at the worst batch, on a CPU, embedding and head stood in."""
    books, found = Books(), {}

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        gc.collect()
        books.peak_bytes = books.live_bytes
        yield
        found[name] = books.peak_bytes

    device = torch.device("cpu")
    choices = choices or workbench.choose(spec, device)
    with books:
        with stage("load"):
            target = synthetic.stand_in(spec, device=device, dtype=choices.dtype)
            bench = workbench.build(spec, choices, meter=Meter(device), embed=target.embed, head_VH=target.head_VH)
        layout = synthetic.worst_layout(spec)
        batch = synthetic.batch(spec, layout, like=target.head_VH)
        micro_batch = assemble(batch, bench, num_slots=anchor_slots(spec.data, most_documents=len(layout)))
        del batch  # the micro-batch holds what it needs of it
        for step in range(1, steps + 1):
            with stage("forward"), torch.set_grad_enabled(gradients):
                sums = forward(micro_batch, bench)
                objective = sums.objective(None, None)
            if not gradients:
                continue
            with stage("backward"):
                objective.backward()
            with stage("step"):
                bench.optimizer.update(step)
    return found
