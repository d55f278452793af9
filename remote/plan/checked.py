"""The range in which the plan was held against measured peaks; outside it a plan is an extrapolation.

On a CPU the oracle is torch's own books in `tests/remote/test_plan.py`. On a CUDA card it is `benchmarks/plan.py`, which
prints the ranges it covered.
"""

from __future__ import annotations

from dataclasses import dataclass

from remote.plan.sizes import Sizes

Range = tuple[int, int]

CHECKED: dict[str, dict[str, Range]] = {
    "cpu": {
        "hidden size": (64, 192),
        "inner size": (64, 512),
        "vocabulary": (100, 2000),
        "block tokens": (32, 2048),
        "context tokens": (64, 512),
    },
    "cuda": {  # one H200, torch 2.11; docs/benchmarks.md
        "hidden size": (256, 5120),
        "inner size": (768, 17_408),
        "vocabulary": (8192, 248_320),
        "block tokens": (256, 32_768),
        "context tokens": (512, 16_384),
    },
}


@dataclass(frozen=True)
class Checked:
    """A size that decides a plan, and from where to where the plan was held against measured peaks."""

    name: str
    value: int
    low: int
    high: int

    @property
    def is_inside(self) -> bool:
        return self.low <= self.value <= self.high

    @property
    def told(self) -> str:
        return f"{self.name} {self.value:,} was not checked; {self.low:,} to {self.high:,} was"


def checked(at: Sizes) -> tuple[Checked, ...]:
    ranges = CHECKED["cuda" if at.is_cuda else "cpu"]
    return tuple(Checked(name, value, *ranges[name]) for name, value in measures(at).items())


def measures(at: Sizes) -> dict[str, int]:
    """The sizes that decide a plan, by the names of `CHECKED`."""
    return {
        "hidden size": at.hidden,
        "inner size": at.inner,
        "vocabulary": at.vocab,
        "block tokens": at.block_tokens,
        "context tokens": at.context_tokens,
    }
