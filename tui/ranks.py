"""A training over several GPUs, rank by rank: who waits for whom, how full each queue is, what each held at most.

A rank is one process with one GPU. Which role it has, `actions.throughput` says as the job counts it: over several hosts
each may have drafters and targets of its own. Where every rank does both there is no role to tell. Pure drawing and arranging.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.actions.throughput import role_name, roles_of
from orchestrator.store.rows import MemoryPeakRow, RunRow, SeriesRow
from tui.pieces import BLANK, Line, Piece, heading, meter, wrapped
from tui.wording import gib, percent, seconds, stage_word

WAITS_MUCH = 0.25  # of its time, from which on a rank's waiting stands out
_TITLES = f"{'rank':<12}{'a batch':>9}{'waits':>8}  {'queue':<14}{'peak':>10}  in stage"


@dataclass(frozen=True)
class Rank:
    number: int
    role: str  # "drafter", "target"; empty where every rank is both
    step_s: float | None  # of a drafter a step, of a target a micro-batch
    wait_s: float | None  # of it
    queue_depth: float | None  # hidden states that are there, in batches; drafters have queues
    queue_capacity: float | None
    peak: MemoryPeakRow | None  # its largest

    @property
    def wait_share(self) -> float | None:
        return self.wait_s / self.step_s if self.wait_s is not None and self.step_s else None


def ranks_of(
    run: RunRow, series: Iterable[SeriesRow], peaks: Iterable[MemoryPeakRow], spec: Mapping[str, Any]
) -> tuple[Rank, ...]:
    """The ranks that have told something in the run's newest attempt; none of a run that is one process."""
    told: dict[int, dict[str, float]] = {}
    for row in series:
        if row.attempt == run.attempt:
            told.setdefault(row.rank, {})[row.name] = row.last_value
    largest: dict[int, MemoryPeakRow] = {}
    for peak in peaks:
        if peak.attempt == run.attempt and size_of(peak) >= size_of(largest.get(peak.rank)):
            largest[peak.rank] = peak
    numbers = sorted(told.keys() | largest.keys())
    if len(numbers) < 2:
        return ()
    roles = roles_of(run, spec)
    return tuple(
        _rank(number, role_name(roles, number), told.get(number, {}), largest.get(number)) for number in numbers
    )


def size_of(peak: MemoryPeakRow | None) -> int:
    """What the card had to have: the driver's number where it was told, else the allocator's."""
    return 0 if peak is None else peak.driver_bytes or peak.reserved_bytes or peak.allocated_bytes or 0


def rank_lines(ranks: Sequence[Rank], told: str, width: int, *, ascii_only: bool) -> list[Line]:
    """The sentence on which side holds the other up, then a line a rank; empty of one process."""
    if not ranks:
        return []
    sentence = wrapped(told, width) if told else []
    rows = [_row(rank, ascii_only=ascii_only) for rank in ranks]
    return [BLANK, heading("Ranks", width), *sentence, [(_TITLES, "faint")], *rows]


def rank_peak_lines(ranks: Sequence[Rank], width: int) -> list[Line]:
    """Each rank's largest peak, by kind; the three kinds are never mixed."""
    titles = "".join(f"{title:>10}" for title in ("allocated", "reserved", "driver"))
    lines: list[Line] = [heading("Every rank at its most", width, "GiB"), [(f"{'':<12}{titles}  in stage", "faint")]]
    for rank in ranks:
        peak = rank.peak
        sizes = (None,) * 3 if peak is None else (peak.allocated_bytes, peak.reserved_bytes, peak.driver_bytes)
        told = "".join(f"{gib(size, unit=False):>10}" for size in sizes)
        lines.append([(f"{_name(rank):<12}", "text"), (told, "text"), (f"  {_stage(peak)}", "muted")])
    return [*lines, BLANK]


def _rank(number: int, role: str, told: Mapping[str, float], peak: MemoryPeakRow | None) -> Rank:
    depth, capacity = told.get("queue_depth"), told.get("queue_capacity")
    return Rank(number, role, told.get("step_s"), told.get("wait_s"), depth, capacity, peak)


def _row(rank: Rank, *, ascii_only: bool) -> Line:
    share = rank.wait_share
    meaning = "warn" if share is not None and share >= WAITS_MUCH else "text"
    took = "–" if rank.step_s is None else seconds(rank.step_s)
    peak = gib(size_of(rank.peak)) if rank.peak else "–"
    return [
        (f"{_name(rank):<12}", "text"),
        (f"{took:>9}", "text"),
        (f"{percent(share):>8}  ", meaning),
        *_queue(rank, ascii_only=ascii_only),
        (f"{peak:>10}", "text"),
        (f"  {_stage(rank.peak)}", "muted"),
    ]


def _queue(rank: Rank, *, ascii_only: bool) -> list[Piece]:
    """Fourteen cells: a bar of six and the two numbers."""
    if rank.queue_depth is None or not rank.queue_capacity:
        return [(" " * 14, "text")]
    told = f" {rank.queue_depth:.0f}/{rank.queue_capacity:.0f}"
    return [*meter(rank.queue_depth / rank.queue_capacity, 6, ascii_only=ascii_only), (f"{told:<8}", "muted")]


def _name(rank: Rank) -> str:
    return f"{rank.number} {rank.role}".rstrip()


def _stage(peak: MemoryPeakRow | None) -> str:
    if peak is None:
        return ""
    return stage_word(peak.stage) + ("" if peak.gpu is None else f", GPU {peak.gpu}")
