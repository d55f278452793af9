"""Where a drafter's batches come from: its own data, or the queue that target ranks fill.

Both give the same batches in the same order; the training loop does not know which it has. What the queue costs
(depth, rate, who waited for whom) is told in the metrics of the window it happened in.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from remote.balance import Pace, Sides, sentence
from remote.drafter.data import Batch, Dataset
from remote.drafter.metrics import Metrics
from remote.drafter.queue import Arrived, BorderError, Inbox, Shape
from remote.roles import Roles
from remote.spec import TrainSpec


class Feed(Protocol):
    """The micro-batches of one rank, in order."""

    @property
    def is_stop_wished(self) -> bool:
        """Whether a rank that fills it was told to stop."""

    def take(self) -> Batch:
        """The next one, waited for."""

    def told(self) -> Metrics:
        """What there is to tell of the batches taken since the last call."""

    def finish(self) -> str | None:
        """No more is wanted. A line for a person where something was dropped, or is worth knowing."""

    def close(self) -> None:
        """Ends what reads ahead, however the training ended."""


class OwnFeed:
    """Batches that this process makes or reads itself."""

    is_stop_wished = False

    def __init__(self, batches: Generator[Batch, None, None]) -> None:
        self._batches = batches

    def take(self) -> Batch:
        return next(self._batches)

    def told(self) -> Metrics:
        return {}

    def finish(self) -> str | None:
        return None

    def close(self) -> None:
        self._batches.close()


class QueuedFeed:
    """Batches whose rows are this process's own and whose hidden states come from target ranks."""

    def __init__(self, dataset: Dataset, inbox: Inbox, roles: Roles, shape: Shape, spec: TrainSpec) -> None:
        self._dataset, self._inbox, self._roles, self._shape = dataset, inbox, roles, shape
        self._num_rows, self._num_a_step = spec.rows_per_step, spec.accumulation // roles.num_drafters
        self._window, self._whole = _Tally(), _Tally()  # since the last log line, of the training
        self._since_s, self._depth = time.perf_counter(), 0

    @property
    def is_stop_wished(self) -> bool:
        return self._inbox.is_stop_wished

    def take(self) -> Batch:
        asked_s = time.perf_counter()
        if self._whole.num % self._num_a_step == 0:  # as a step finds it; its later batches find what it left
            self._depth = self._inbox.depth
        arrived = self._inbox.take()
        came_s = time.perf_counter()
        for tally in (self._window, self._whole):
            tally.add(self._depth, arrived, Pace(asked_s - self._since_s, came_s - asked_s))
        self._since_s = came_s
        batch = self._dataset.batch_with(arrived.micro_batch, arrived.states, num_rows=self._num_rows)
        self._check(arrived, batch)
        return batch

    def told(self) -> Metrics:
        """Depth as the steps found it, and the rate of their transfers alone."""
        window, self._window = self._window, _Tally()
        if not window.num:
            return {}
        return {
            "queue_depth": window.depth / window.num,
            "queue_capacity": float(self._roles.queue_capacity),
            "transfer_bytes_per_s": self._rate(window),
        }

    def finish(self) -> str | None:
        dropped = self._inbox.finish()
        whole = self._whole
        if not whole.num:
            return None
        sides = Sides(self._roles.num_targets, self._roles.num_drafters, whole.target, whole.drafter)
        depth, capacity = whole.depth / whole.num, self._roles.queue_capacity
        told = sentence(sides, depth=depth, capacity=capacity, bytes_per_s=self._rate(whole))
        return f"{told}; {dropped} batches that came ahead were dropped" if dropped else told

    def close(self) -> None:
        """Nothing to end: the thread that receives ends with the stream, or with the process."""

    def _rate(self, tally: _Tally) -> float:
        return tally.num * self._shape.size_bytes / max(tally.transfer_s, 1e-9)

    def _check(self, arrived: Arrived, batch: Batch) -> None:
        if not torch.equal(arrived.ids_S, batch.row.input_ids_S):
            differ = int((arrived.ids_S != batch.row.input_ids_S).sum())
            raise BorderError(
                f"micro-batch {arrived.micro_batch} from {self._roles.name(self._roles.target_of(arrived.micro_batch))}: "
                f"{differ} of its {len(arrived.ids_S)} tokens are not those of rows {list(batch.keys)} here; "
                "the ranks read other data, or in another order"
            )


@dataclass
class _Tally:
    """Sums over batches that were taken. The first one is left out of the paces: it also waited for the start."""

    num: int = 0
    depth: int = 0
    transfer_s: float = 0.0
    paces: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0, 0.0])  # target busy, wait; drafter busy, wait

    def add(self, depth: int, arrived: Arrived, own: Pace) -> None:
        self.num, self.depth = self.num + 1, self.depth + depth
        self.transfer_s += arrived.transfer_s
        seen = (arrived.pace.busy_s, arrived.pace.wait_s, own.busy_s, own.wait_s)
        if self.num > 1:
            self.paces = [old + new for old, new in zip(self.paces, seen, strict=True)]

    @property
    def target(self) -> Pace:
        return Pace(*(total / max(1, self.num - 1) for total in self.paces[:2]))

    @property
    def drafter(self) -> Pace:
        return Pace(*(total / max(1, self.num - 1) for total in self.paces[2:]))
