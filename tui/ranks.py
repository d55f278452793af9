"""A training over several GPUs, rank by rank: who waits for whom, how full each queue is, what each held at most.

A rank is one process with one GPU. Which role it has, `actions.throughput` says as the job counts it: over several hosts
each may have drafters and targets of its own. Where every rank does both there is no role to tell. Pure drawing and arranging.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len

from orchestrator.actions.throughput import role_name, roles_of
from orchestrator.store.rows import MemoryPeakRow, RunRow, SeriesRow
from tui.pieces import BLANK, Line, Piece, heading, meter, wrapped
from tui.wording import fit, gib, percent, seconds, short_host, state_word

LEAST_WORD = 4  # cells of a name that is cut
WAITS_MUCH = 0.25  # of its time, from which on a rank's waiting stands out
WIDE = 78  # cells from which on a queue has a bar before its numbers
_QUEUE, _BARE_QUEUE = 14, 8  # cells of it with the bar, and without
_BEFORE_QUEUE, _PEAK = 31, 12  # of all before it, and of the peak with the gap behind it


@dataclass(frozen=True)
class Rank:
    number: int
    role: str  # "drafter", "target"; empty where every rank is both
    step_s: float | None  # of a drafter a step, of a target a micro-batch
    wait_s: float | None  # of it
    queue_depth: float | None  # hidden states that are there, in batches; drafters have queues
    queue_capacity: float | None
    peak: MemoryPeakRow | None  # its largest
    host: str = ""  # where it is, of a run over several hosts

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
    num_ranks = roles.num_ranks if roles else numbers[-1] + 1
    return tuple(
        _rank(
            number,
            role_name(roles, number),
            told.get(number, {}),
            largest.get(number),
            host_of(run.hosts, number, num_ranks),
        )
        for number in numbers
    )


def host_of(hosts: Sequence[str], rank: int, num_ranks: int) -> str:
    """Where a rank is: every host has as many as any other, numbered one host after the other. Empty of a run on one."""
    is_shared = len(hosts) > 1 and num_ranks % len(hosts) == 0 and rank < num_ranks
    return hosts[rank * len(hosts) // num_ranks] if is_shared else ""


def size_of(peak: MemoryPeakRow | None) -> int:
    """What the card had to have: the driver's number where it was told, else the allocator's."""
    return 0 if peak is None else peak.driver_bytes or peak.reserved_bytes or peak.allocated_bytes or 0


def newest_peaks(peaks: Sequence[MemoryPeakRow]) -> list[MemoryPeakRow]:
    """Of the newest attempt, stage by stage; of several ranks those of the one that needed most."""
    newest = max((peak.attempt for peak in peaks), default=0)
    own = [peak for peak in peaks if peak.attempt == newest]
    most = max(own, key=size_of, default=None)
    return [peak for peak in own if most is not None and peak.rank == most.rank]


def rank_lines(ranks: Sequence[Rank], told: str, width: int, *, ascii_only: bool) -> list[Line]:
    """The sentence on which side holds the other up, then a line a rank; empty of one process."""
    if not ranks:
        return []
    sentence = wrapped(told, width) if told else []
    last = "in stage" if _room_of_stage(width) >= len("in stage") else "card"
    titles = f"{'rank':<12}{'a batch':>9}{'waits':>8}  {'queue':<{_queue_width(width)}}{'peak':>10}  {last}"
    rows = [_row(rank, width, ascii_only=ascii_only) for rank in ranks]
    return [BLANK, heading("Ranks", width), *sentence, [(titles, "faint")], *rows]


def rank_peak_lines(ranks: Sequence[Rank], width: int) -> list[Line]:
    """Each rank's largest peak, by kind; the three kinds are never mixed."""
    titles = "".join(f"{title:>10}" for title in ("allocated", "reserved", "driver"))
    lines: list[Line] = [heading("Every rank at its most", width, "GiB"), [(f"{'':<12}{titles}  in stage", "faint")]]
    for rank in ranks:
        peak = rank.peak
        sizes = (None,) * 3 if peak is None else (peak.allocated_bytes, peak.reserved_bytes, peak.driver_bytes)
        told = "".join(f"{gib(size, unit=False):>10}" for size in sizes)
        stage = _stage(rank, width - 12 - len(told) - 2)
        lines.append([(f"{_name(rank):<12}", "text"), (told, "text"), (f"  {stage}", "muted")])
    return [*lines, BLANK]


def fullest(ranks: Sequence[Rank]) -> Rank | None:
    """The one that needed most."""
    return max(ranks, key=lambda rank: size_of(rank.peak), default=None)


def _rank(number: int, role: str, told: Mapping[str, float], peak: MemoryPeakRow | None, host: str) -> Rank:
    depth, capacity = told.get("queue_depth"), told.get("queue_capacity")
    return Rank(number, role, told.get("step_s"), told.get("wait_s"), depth, capacity, peak, host)


def _row(rank: Rank, width: int, *, ascii_only: bool) -> Line:
    share = rank.wait_share
    meaning = "warn" if share is not None and share >= WAITS_MUCH else "text"
    took = "–" if rank.step_s is None else seconds(rank.step_s)
    peak = gib(size_of(rank.peak)) if rank.peak else "–"
    return [
        (f"{_name(rank):<12}", "text"),
        (f"{took:>9}", "text"),
        (f"{percent(share):>8}  ", meaning),
        *_queue(rank, width, ascii_only=ascii_only),
        (f"{peak:>10}", "text"),
        (f"  {_stage(rank, _room_of_stage(width))}", "muted"),
    ]


def _queue_width(width: int) -> int:
    return _QUEUE if width >= WIDE else _BARE_QUEUE


def _room_of_stage(width: int) -> int:
    return width - _BEFORE_QUEUE - _queue_width(width) - _PEAK


def _queue(rank: Rank, width: int, *, ascii_only: bool) -> list[Piece]:
    """Where there is room a bar, and the two numbers."""
    if rank.queue_depth is None or not rank.queue_capacity:
        return [(" " * _queue_width(width), "text")]
    told = f"{rank.queue_depth:.0f}/{rank.queue_capacity:.0f}"
    if width < WIDE:
        return [(f"{told:<{_BARE_QUEUE}}", "muted")]
    bar = meter(rank.queue_depth / rank.queue_capacity, 6, ascii_only=ascii_only)
    return [*bar, (f" {told}".ljust(_QUEUE - 6), "muted")]


def _name(rank: Rank) -> str:
    return f"{rank.number} {rank.role}".rstrip()


def _stage(rank: Rank, room: int) -> str:
    """Of its peak, and the card: `backward, GPU 1`, `backward, pve-b GPU 1`. In less room the host is cut, then the stage."""
    peak = rank.peak
    if peak is None:
        return ""
    stage, card = state_word(peak.stage), "" if peak.gpu is None else f"GPU {peak.gpu}"
    host = _cut(short_host(rank.host), room - cell_len(stage) - len(card) - 3)  # a comma and two blanks
    place = " ".join(word for word in (host, card) if word)
    stage = _cut(stage, room - cell_len(place) - 2 if place else room)
    return ", ".join(word for word in (stage, place) if word)


def _cut(word: str, room: int) -> str:
    """Nothing where so little is left of it that it says nothing."""
    return word if cell_len(word) <= room else fit(word, room) if room >= LEAST_WORD else ""
