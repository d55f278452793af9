"""The drafter ranks of one training, which make each step together: what they add up and what they agree on.

Every call here is made by all of them, in the same order, whatever their rows hold: a rank whose micro-batch has no
anchor takes part with zeros. Alone, a drafter has no peers, and every call gives back what it was given.

Gradients are added, not averaged: the loss of a step is one sum over one denominator, which all ranks know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


@dataclass(frozen=True)
class Peers:
    """This drafter's place among them, and the group they talk in."""

    index: int = 0
    num: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """The one that saves, and that speaks for all."""
        return self.index == 0

    def sum(self, values: Tensor) -> Tensor:
        """Added up over the peers, a new tensor; the host does not wait for the device."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, values: Tensor) -> Tensor:
        """The largest among the peers, a new tensor."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def agree(self, wish: bool) -> bool:
        """Whether any peer wishes it. Hosts wait for one another here, devices do not."""
        return bool(self.largest(torch.tensor([int(wish)])).item()) if self.num > 1 else wish

    def shared(self, drafter: nn.Module) -> nn.Module:
        """The drafter, or one whose backward adds up the gradients of all peers while it still runs."""
        if self.num == 1:
            return drafter
        wrapped = DistributedDataParallel(drafter, process_group=self.group, gradient_as_bucket_view=True)
        # A lambda: DDP compares a named function's annotations, which are words here, with its own types.
        wrapped.register_comm_hook(self.group, lambda group, bucket: _add(group, bucket))
        return wrapped

    @contextmanager
    def adding_up(self, shared: nn.Module, *, is_last: bool) -> Iterator[None]:
        """Around forward and backward of a micro-batch: gradients travel with the last one of a step."""
        if isinstance(shared, DistributedDataParallel) and not is_last:
            with shared.no_sync():
                yield
        else:
            yield

    def take_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrites these tensors with the first peer's, one after the other."""
        if self.num > 1:
            for tensor in tensors:
                dist.broadcast(tensor, group=self.group, group_src=0)

    def _reduced(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.num == 1:
            return values
        found = values.clone()
        dist.all_reduce(found, operation, group=self.group)
        return found


def _add(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's own hook divides by the number of ranks; this one does not."""
    adding = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert adding is not None
    return adding.get_future().then(lambda done: done.value()[0])
