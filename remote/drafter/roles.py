"""Who does what among the ranks of a training, and whose each micro-batch is. Arithmetic only.

The first ranks are drafters, rank 0 among them: it saves, and it speaks for the run. The ranks after them run the
target and send its hidden states. Without target ranks every drafter has what it needs itself.

The stream of rows is cut into micro-batches as one process cuts it. Micro-batch m is trained by drafter m mod D and
its hidden states come from target m mod T, so nobody has to be asked, a resume goes on anywhere, and a step is the
same set of rows however many ranks share it.
"""

from __future__ import annotations

from dataclasses import dataclass

from remote.spec import DFlashSpec


@dataclass(frozen=True)
class Roles:
    """`num_drafters` ranks that train and `num_targets` that only run the target."""

    num_drafters: int = 1
    num_targets: int = 0
    queue_capacity: int = 2  # micro-batches a drafter may have waiting or on their way

    @classmethod
    def of(cls, spec: DFlashSpec) -> Roles:
        return cls(num_drafters=spec.roles.drafter, num_targets=spec.roles.target, queue_capacity=spec.roles.queue)

    @property
    def num_ranks(self) -> int:
        return self.num_drafters + self.num_targets

    def name(self, rank: int) -> str:
        """`rank 3 (target 0)`: for a person."""
        role = f"drafter {rank}" if rank < self.num_drafters else f"target {rank - self.num_drafters}"
        return f"rank {rank} ({role})"

    def is_drafter(self, rank: int) -> bool:
        return rank < self.num_drafters

    def drafter_of(self, micro_batch: int) -> int:
        """The rank that trains it."""
        return micro_batch % self.num_drafters

    def target_of(self, micro_batch: int) -> int:
        """The rank that computes its hidden states."""
        return self.num_drafters + micro_batch % self.num_targets

    @property
    def drafters(self) -> range:
        return range(self.num_drafters)

    @property
    def targets(self) -> range:
        return range(self.num_drafters, self.num_ranks)

    def share(self, rank: int, first: int, last: int) -> range:
        """The micro-batches of `first` to `last - 1` that are this rank's."""
        index, num = (
            (rank, self.num_drafters) if self.is_drafter(rank) else (rank - self.num_drafters, self.num_targets)
        )
        return range(first + (index - first) % num, last, num)
