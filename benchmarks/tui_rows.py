"""One measurement of the screens beside what is claimed of it, and how many of them are told: as each is made, and all at the end."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One measurement beside what is claimed; `bound` None claims nothing."""

    what: str
    measured: float
    unit: str
    bound: float | None = None
    note: str = ""
    slack: float = math.inf  # how many times the claim a slow and crowded machine may need at the most
    alone: float | None = None  # less what other processes had of its core meanwhile: what a loose look judges

    def holds(self, loose: float) -> bool:
        measured = self.measured if self.alone is None else self.alone
        return self.bound is None or measured < self.bound * min(loose, self.slack)

    def __str__(self) -> str:
        claimed = "" if self.bound is None else f"claimed < {self.bound:g} {self.unit}"
        told = "; ".join(word for word in (claimed, self.note) if word)
        return f"{self.what:52} {self.measured:10.1f} {self.unit:12} {told}".rstrip()


def ms(seconds: Sequence[float]) -> float:
    """The median in milliseconds."""
    return statistics.median(seconds) * 1000


def p99_ms(seconds: Sequence[float]) -> float:
    """Of one value alone that value."""
    return (statistics.quantiles(seconds, n=100, method="inclusive")[98] if len(seconds) > 1 else seconds[0]) * 1000


def measured(parts: Sequence[tuple[str, Callable[[], Sequence[Row]]]]) -> tuple[list[Row], list[str]]:
    """The rows of every part, each told on stderr once it is made; and what failed, in words. A part that fails loses no other."""
    rows: list[Row] = []
    failed: list[str] = []
    for name, part in parts:
        try:
            made = part()
        except Exception as error:  # noqa: BLE001 - minutes of measuring went before it
            failed.append(f"{name}: {type(error).__name__}: {error}")
            sys.stderr.write(f"{failed[-1]}\n")
            continue
        rows += made
        sys.stderr.writelines(f"{row}\n" for row in made)
    return rows, failed
