"""Who does what among the ranks of a training, and whose each micro-batch is. Arithmetic only.

Drafters come first, rank 0 among them: it saves, and it speaks for the run. After them come the ranks that run the
target and send its hidden states. Without target ranks every drafter has what it needs itself. Over several hosts that
is so on each of them, where both roles can be shared out evenly: micro-batch m then belongs to a drafter and to a
target of host m mod N, so hidden states never leave a machine and only gradients do. The ranks themselves and whoever
shows a run ask here, so that both say the same.

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
    num_nodes: int = 1  # hosts; each has as many ranks as any other, numbered one host after the other

    @classmethod
    def of(cls, spec: DFlashSpec, *, num_nodes: int = 1) -> Roles:
        return cls(spec.roles.drafter, spec.roles.target, spec.roles.queue, num_nodes)

    @property
    def num_ranks(self) -> int:
        return self.num_drafters + self.num_targets

    @property
    def num_groups(self) -> int:
        """Hosts among which both roles are shared out evenly; 1 where they cannot be, and roles lie one after the other."""
        is_even = self.num_drafters % self.num_nodes == 0 and self.num_targets % self.num_nodes == 0
        return self.num_nodes if is_even else 1

    def name(self, rank: int) -> str:
        """`rank 3 (target 0)`: for a person; of several hosts with the node that it is on."""
        node = f", node {rank * self.num_nodes // self.num_ranks}" if self.num_nodes > 1 else ""
        return f"rank {rank} ({self.title(rank)}{node})"

    def title(self, rank: int) -> str:
        """`target 0`"""
        return f"{'drafter' if self.is_drafter(rank) else 'target'} {self._index(rank)}"

    def is_drafter(self, rank: int) -> bool:
        return rank % self._each < self.num_drafters // self.num_groups

    def drafter_of(self, micro_batch: int) -> int:
        """The rank that trains it."""
        return self._rank(micro_batch % self.num_drafters, 0)

    def target_of(self, micro_batch: int) -> int:
        """The rank that computes its hidden states."""
        return self._rank(micro_batch % self.num_targets, self.num_drafters // self.num_groups)

    @property
    def drafters(self) -> list[int]:
        """Ranks, rising; the first is 0."""
        return [rank for rank in range(self.num_ranks) if self.is_drafter(rank)]

    @property
    def targets(self) -> list[int]:
        return [rank for rank in range(self.num_ranks) if not self.is_drafter(rank)]

    def share(self, rank: int, first: int, last: int) -> range:
        """The micro-batches of `first` to `last - 1` that are this rank's."""
        num = self.num_drafters if self.is_drafter(rank) else self.num_targets
        return range(first + (self._index(rank) - first) % num, last, num)

    @property
    def _each(self) -> int:
        """Ranks of a group."""
        return self.num_ranks // self.num_groups

    def _rank(self, index: int, before: int) -> int:
        """Of the drafter or target with that index: they go round the groups; `before` it in each are the other role's."""
        return index % self.num_groups * self._each + before + index // self.num_groups

    def _index(self, rank: int) -> int:
        """Which drafter, or which target, a rank is."""
        group, place = divmod(rank, self._each)
        before = 0 if self.is_drafter(rank) else self.num_drafters // self.num_groups
        return (place - before) * self.num_groups + group
