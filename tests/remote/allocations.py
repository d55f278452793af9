"""What a step really holds at its peak, by stage, from torch's own books. The oracle of the memory plan."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.books import Books
from remote.drafter import synthetic, workbench
from remote.drafter.measure import Meter
from remote.drafter.step import anchor_slots, assemble, forward
from remote.spec import DFlashSpec


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
