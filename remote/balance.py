"""Which role of a training with target and drafter ranks holds the other up, and how many of each would not.

Arithmetic on measured seconds; standard library only, so that a plan and a screen can use it as well.
"""

from __future__ import annotations

from dataclasses import dataclass

EVEN_SHARE = 0.05  # of its time that a side may wait and still count as busy


@dataclass(frozen=True)
class Pace:
    """What a rank needed for a micro-batch, in seconds: its own work, and waiting for the other side."""

    busy_s: float
    wait_s: float

    @property
    def wait_share(self) -> float:
        whole_s = self.busy_s + self.wait_s
        return self.wait_s / whole_s if whole_s > 0 else 0.0


@dataclass(frozen=True)
class Sides:
    """Both roles of one training: how many ranks each has, and the mean pace of one."""

    num_targets: int
    num_drafters: int
    target: Pace
    drafter: Pace

    @property
    def bound(self) -> str:
        """The side that is waited for; `balanced` where neither waits to speak of."""
        if max(self.target.wait_share, self.drafter.wait_share) < EVEN_SHARE:
            return "balanced"
        return "target-bound" if self.drafter.wait_share > self.target.wait_share else "drafter-bound"

    @property
    def balanced(self) -> tuple[int, int]:
        """(target, drafter) of as many ranks that come nearest to waiting for nobody: T : D as their seconds a batch."""
        num_ranks = self.num_targets + self.num_drafters
        both_s = self.target.busy_s + self.drafter.busy_s
        share = self.target.busy_s / both_s if both_s > 0 else 0.5
        targets = min(num_ranks - 1, max(1, round(num_ranks * share)))
        return targets, num_ranks - targets


def predicted(num_targets: int, num_drafters: int, target_s: float, drafter_s: float) -> Sides:
    """Who will wait for whom, where a batch takes a rank of each role so long and nothing else delays it."""
    batch_s = max(target_s / num_targets, drafter_s / num_drafters)  # between two batches of all ranks
    target, drafter = (
        Pace(busy_s, max(0.0, num_ranks * batch_s - busy_s))
        for num_ranks, busy_s in ((num_targets, target_s), (num_drafters, drafter_s))
    )
    return Sides(num_targets, num_drafters, target, drafter)


def sentence(sides: Sides, *, depth: float, capacity: int, bytes_per_s: float | None = None) -> str:
    """For a person: which side holds the other up, by what it shows, and what would balance them.

    `bytes_per_s`: of hidden states while they travel, where that was measured.
    """
    seconds = f"a batch takes a target rank {_s(sides.target.busy_s)} and a drafter rank {_s(sides.drafter.busy_s)}"
    waits = f"targets wait {sides.target.wait_share:.0%} of their time, drafters {sides.drafter.wait_share:.0%}"
    travel = "" if bytes_per_s is None else f", hidden states travel at {_bytes(bytes_per_s)}/s"
    told = f"{sides.bound}: queue {depth:.0f}/{capacity}{travel}; {waits}; {seconds}"
    targets, drafters = sides.balanced
    if sides.bound == "balanced" or (targets, drafters) == (sides.num_targets, sides.num_drafters):
        ratio = sides.target.busy_s / sides.drafter.busy_s if sides.drafter.busy_s > 0 else 0.0
        return f"{told}; the balance is {ratio:.2g} target ranks for each drafter, these are {_ranks(sides)}"
    return f"{told}; {targets} target and {drafters} drafter ranks would balance it, these are {_ranks(sides)}"


def _ranks(sides: Sides) -> str:
    return f"{sides.num_targets} and {sides.num_drafters}"


def _bytes(size_bytes: float) -> str:
    """Decimal, as links are named."""
    return f"{size_bytes / 1e9:.3g} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.3g} MB"


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.9995 else f"{seconds * 1000:.3g} ms"
