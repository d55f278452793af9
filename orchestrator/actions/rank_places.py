"""Which role and which host a rank of a run has: a card's number says nothing where several hosts have one of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.actions.throughput import roles_of
from orchestrator.store.rows import Kind, RunRow


@dataclass(frozen=True)
class RankPlace:
    """`name` is for a person: `rank 5 (target 2)`."""

    rank: int
    role: str  # drafter, target; empty where every rank does both
    host: str
    name: str


def rank_places(run: RunRow, spec: Mapping[str, Any], told: Collection[int]) -> list[RankPlace]:
    """Of each rank that the run has, by the recipe's roles, and of each that has told something; none of one process."""
    if run.kind != Kind.TRAIN:  # one process, whatever the recipe's roles
        return []
    roles = roles_of(run, spec)
    num_ranks = max([roles.num_ranks if roles else 0, *(rank + 1 for rank in told)], default=0)
    if num_ranks < 2:
        return []
    each = num_ranks / len(run.hosts)  # as many on each host, numbered one host after the other
    return [
        RankPlace(
            rank,
            "" if roles is None else "drafter" if roles.is_drafter(rank) else "target",
            run.hosts[min(int(rank / each), len(run.hosts) - 1)],
            f"rank {rank}" if roles is None else f"rank {rank} ({roles.title(rank)})",
        )
        for rank in range(num_ranks)
    ]
