"""The range in which the plan was held against measured peaks; outside it a plan is an extrapolation.

On a CPU the oracle is torch's own books in `tests/remote/test_plan.py`. On a CUDA card it is `benchmarks/plan.py`, which
prints the ranges it covered; a card that nobody measured has none.
"""

from __future__ import annotations

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
        "block tokens": (2048, 32_768),
        "context tokens": (2048, 16_384),
    },
}


def extrapolated(at: Sizes) -> tuple[str, ...]:
    """Where the plan leaves the range it was checked in, one line each; empty inside it."""
    ranges = CHECKED["cuda" if at.is_cuda else "cpu"]
    if not ranges:
        return ("no CUDA card has been measured yet: every number is arithmetic",)
    return tuple(
        f"{name} {value:,} was not checked; {low:,} to {high:,} was"
        for name, value in measures(at).items()
        for low, high in (ranges[name],)
        if not low <= value <= high
    )


def measures(at: Sizes) -> dict[str, int]:
    """The sizes that decide a plan, by the names of `CHECKED`."""
    return {
        "hidden size": at.hidden,
        "inner size": at.inner,
        "vocabulary": at.vocab,
        "block tokens": at.block_tokens,
        "context tokens": at.context_tokens,
    }
