"""Memory of a run: what must fit, what was measured by stage beside its plan, the plan line by line, and each GPU over time.

Peaks of three kinds (allocated, reserved, driver) are never mixed: each has its column. Pure drawing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len

from orchestrator.actions.planned_stages import beware_of_stages, planned_stages
from orchestrator.store.rows import GpuSampleRow, MemoryPeakRow, RunRow
from tui.chart import Look, Series, chart_lines
from tui.curve import Sample
from tui.detail import RunDetail
from tui.fits import VERDICTS
from tui.moment import is_of_now, is_present, last_seen
from tui.overview import memory_lines
from tui.pieces import BLANK, Line, Piece, beside, fitted, heading, meter, wrapped
from tui.ranks import Rank, fullest, newest_peaks, rank_peak_lines
from tui.theme import SERIES
from tui.wording import GIB, fit, gib, gpu_name, short_host, value

CHART_HEIGHT = 9
NAME_WIDTH = 24
STAGE_WIDTH = 16
WIDE = 100  # cells from which on the plan stands beside what was measured
WORTH_A_LOOK = 0.05  # of the plan, as in the rungs
# Of what was measured: title, cells, and the cells of a pane from which on there is room for it.
_COLUMNS = (("planned", 8, 0), ("allocated", 10, 0), ("difference", 14, 48), ("reserved", 10, 66), ("driver", 8, 56))
_SHARE = ("", 6)  # the difference where there is no room for all of it


def memory_tab_lines(detail: RunDetail, now_s: float, width: int, height: int, *, ascii_only: bool) -> list[Line]:
    """Plan and measured on top: a low screen shows what must fit and every stage before it is scrolled."""
    plan = detail.plan or {}
    if width >= WIDE:
        column = (width - 3) // 2
        left, right = plan_lines(plan, column, ascii_only=ascii_only), peak_lines(detail, column)
        lines = beside((left, column), (right, column), gap=3)
    else:
        parts = component_lines(plan, width, ascii_only=ascii_only)
        lines = [*total_lines(plan, width, ascii_only=ascii_only), BLANK, *peak_lines(detail, width)]
        lines += [BLANK, heading("What must fit", width, _of_stage(plan)), *parts] if parts else []
    if detail.gpu_samples:
        lines += [BLANK, *memory_lines(detail, now_s, width, ascii_only=ascii_only)]
        lines += [BLANK, *water_lines(detail, now_s, width, ascii_only=ascii_only)]
    return lines


def plan_lines(plan: Mapping[str, Any], width: int, *, ascii_only: bool) -> list[Line]:
    """What must fit and how that stands to the capacity, then the predicted bytes of the peak stage by component."""
    return [*total_lines(plan, width, ascii_only=ascii_only), *component_lines(plan, width, ascii_only=ascii_only)]


def total_lines(plan: Mapping[str, Any], width: int, *, ascii_only: bool) -> list[Line]:
    """The answer of the plan; its bar is the share of the card. What stands beside its steps has a line where it lacks room."""
    if peak_stage(plan) is None:
        return [heading("Plan", width), [("No plan was kept with this run.", "muted")]]
    capacity, must_fit = plan.get("capacity_bytes"), float(plan["driver_bytes"])
    verdict = str(plan.get("verdict") or "")
    meaning = VERDICTS.get(verdict, "text")
    label, room = _columns(plan, width)
    bar = meter(must_fit / float(capacity or must_fit), room, meaning, ascii_only=ascii_only)
    lines: list[Line] = [heading("Plan", width, f"predicted, {_of_stage(plan)}")]
    lines.append([(fit("must fit", label), "strong"), (f" {gib(must_fit):>10}", "strong"), ("  ", "text"), *bar])
    if capacity:
        lines += _judged(("capacity", "muted"), capacity, verdict, (label, width))
    beside = (
        ("target's pass", "target_pass_bytes", "pass_verdict"),
        ("evaluation", "evaluation_bytes", "evaluation_verdict"),
    )
    for name, size, judged in beside:
        if plan.get(judged) not in (None, "fits"):
            lines += _judged((name, "text"), float(plan.get(size) or 0), str(plan[judged]), (label, width))
    return lines


def _judged(name: Piece, size: float, verdict: str, widths: tuple[int, int]) -> list[Line]:
    """A size with its verdict, below it where the pane is too narrow."""
    label, width = widths
    line: Line = [(fit(name[0], label), name[1]), (f" {gib(size):>10}", "text")]
    judged: Piece = (verdict, VERDICTS.get(verdict, "text"))
    has_room = label + 11 + 2 + cell_len(verdict) <= width
    return [[*line, ("  ", "text"), judged]] if has_room else [line, [judged]]


def component_lines(plan: Mapping[str, Any], width: int, *, ascii_only: bool) -> list[Line]:
    """A component's bar is its share of what must fit: on a large card all would be as short."""
    stage = peak_stage(plan)
    if stage is None:
        return []
    label, room = _columns(plan, width)
    lines: list[Line] = []
    for name, size in _components(plan, stage):
        bar = meter(size / float(plan["driver_bytes"]), room, "series_1", ascii_only=ascii_only)
        lines.append(
            [(fit(name.replace("_", " "), label), "text"), (f" {gib(size):>10}", "text"), ("  ", "text"), *bar]
        )
    return lines


def _of_stage(plan: Mapping[str, Any]) -> str:
    return f"stage {plan.get('peak_stage')}"


def _columns(plan: Mapping[str, Any], width: int) -> tuple[int, int]:
    """Cells of the names and of the bars; the bars keep some room, and a line is never wider than its pane."""
    stage = peak_stage(plan)
    names = [] if stage is None else [name for name, _ in _components(plan, stage)]
    longest = max(map(cell_len, names), default=0)
    label = min(max(NAME_WIDTH, min(longest, width - 36)), width - 17)
    return label, width - label - 13


def peak_stage(plan: Mapping[str, Any]) -> Mapping[str, Any] | None:
    stages = [stage for stage in plan.get("stages") or () if stage["name"] == plan.get("peak_stage")]
    return stages[0] if stages else None


def _components(plan: Mapping[str, Any], stage: Mapping[str, Any]) -> list[tuple[str, float]]:
    """What adds up to what must fit: lines of the stage in the plan's own order, small ones together; what smoke runs and
    trainings took beyond them, the allocator and the driver."""
    named = [(str(item["name"]), float(item["size_bytes"])) for item in stage["components"]]
    least = sum(size for _, size in named) / 200
    shown = [item for item in named if item[1] >= least]
    rest = sum(size for _, size in named if size < least)
    others = (
        ("small ones", rest),
        ("unexplained", plan.get("unexplained_bytes")),
        ("allocator slack", plan.get("slack_bytes")),
        ("driver context", plan.get("context_bytes")),
    )
    return shown + [(name, float(size)) for name, size in others if size]


def peak_lines(detail: RunDetail, width: int) -> list[Line]:
    """Measured peaks by stage, newest attempt, beside what the plan said of the stage."""
    lines: list[Line] = rank_peak_lines(detail.ranks, width) if detail.ranks else []
    rank = fullest(detail.ranks)
    lines.append(heading("Measured", width, f"{_of_rank(rank)}GiB" if rank else "peaks of each stage, GiB"))
    peaks = newest_peaks(detail.peaks)
    if not peaks:
        return [*lines, [("No stage has reported its memory yet.", "muted")]]
    planned = planned_stages(detail.plan or {}, detail.run.kind)
    columns = _columns_of(width)
    lines.append([(fit("", STAGE_WIDTH) + "".join(f"{title:>{cells}}" for title, cells in columns), "faint")])
    lines += [_peak_line(peak, planned.get(peak.stage), columns) for peak in peaks]
    unplanned = [peak.stage for peak in peaks if planned and peak.stage not in planned]
    if unplanned:
        told = f"{', '.join(dict.fromkeys(unplanned))}: not planned, and no part of what must fit"
        lines += wrapped(told.replace("_", " "), width, "muted")
    for told in beware_of_stages(detail.plan or {}, detail.run.kind, peaks):
        lines += wrapped(told, width, "muted")
    retries = detail.means.get("allocation_retries")
    if retries is not None:
        lines.append([(f"allocator retries {value(retries)}", "warn" if retries > 0 else "muted")])
    return lines


def _of_rank(rank: Rank) -> str:
    """Whose peaks these are: of several ranks each one's largest is told beside them."""
    return f"rank {rank.number}{f' on {short_host(rank.host)}' if rank.host else ''}, by stage, "


def water_lines(detail: RunDetail, now_s: float, width: int, *, ascii_only: bool) -> list[Line]:
    """Used memory of each GPU over the last hour that was seen, below the size of the card."""
    samples = detail.gpu_samples
    by_gpu: dict[int, list[GpuSampleRow]] = {}
    for sample in samples:
        by_gpu.setdefault(sample.gpu, []).append(sample)
    first_s, newest_s = min(sample.at_s for sample in samples), max(sample.at_s for sample in samples)
    series = [
        Series(gpu_name(detail.run, gpu), SERIES[index % len(SERIES)], _over_time(own, newest_s))
        for index, (gpu, own) in enumerate(sorted(by_gpu.items()))
    ]
    cards = sorted({sample.total_bytes for sample in samples if sample.total_bytes})
    most = max((sample.used_bytes or 0 for sample in samples), default=0)
    # Where most of a card is free, its size would press the curves flat; the title has it all the same.
    near = [card / GIB for card in cards if most >= card / 2]
    ends = (first_s - newest_s, 0.0)
    limits = [Series("", "faint", [Sample(at, size, size, size) for at in ends], is_dimmed=True) for size in near]
    size = f" of {gib(cards[0])}" if len(cards) == 1 else ", GiB"
    look = Look(ascii_only=ascii_only)
    chart = chart_lines(f"used{size}", "", [*limits, *series], (width, CHART_HEIGHT), look)
    left, right = _ends_of_axis(detail.run, first_s, newest_s, now_s)
    gap = max(1, width - 8 - cell_len(left) - cell_len(right))
    return [*chart[:-1], fitted([(f"{'':8}{left}{'':{gap}}{right}", "faint")], width)]


def _ends_of_axis(run: RunRow, first_s: float, newest_s: float, now_s: float) -> tuple[str, str]:
    """Minutes are counted back from its newest sample: from now, from the end of the run, or from when it was seen last."""
    ago = f"{(newest_s - first_s) / 60:.0f} min"
    if is_present(run, newest_s, now_s):
        return f"{ago} ago", "now"
    if run.ended_s is not None and is_of_now(newest_s, run.ended_s):
        return f"{ago} before it ended", "it ended"
    return f"{ago} before", last_seen(newest_s, now_s)


def _over_time(samples: Sequence[GpuSampleRow], newest_s: float) -> list[Sample]:
    return [
        Sample(sample.at_s - newest_s, used, used, used)
        for sample in samples
        if sample.used_bytes is not None and (used := sample.used_bytes / GIB) >= 0
    ]


def difference(planned: float | None, measured: float | None) -> Piece:
    """What was measured beyond the plan, in GiB and of the plan; from five percent on it is worth a look."""
    if not planned or measured is None:
        return "–", "faint"
    share = (measured - planned) / planned
    percents = f"{share:+4.0%}" if abs(share) >= 0.005 else f"{0:4.0%}"  # no sign of what is rounded away
    return f"{(measured - planned) / GIB:+.2f} {percents}", "warn" if abs(share) > WORTH_A_LOOK else "good"


def _columns_of(width: int) -> list[tuple[str, int]]:
    """Titles and cells of what there is room for."""
    shown = [(title, cells) for title, cells, least in _COLUMNS if width >= least]
    return shown if ("difference", 14) in shown else [*shown, _SHARE]


def _peak_line(peak: MemoryPeakRow, planned: int | None, columns: Sequence[tuple[str, int]]) -> Line:
    """What was allocated stands beside its plan; what the allocator kept and the driver counted are never mixed with it."""
    where = peak.stage if peak.gpu is None else f"{peak.stage}, GPU {peak.gpu}"
    sizes = {
        "planned": planned,
        "allocated": peak.allocated_bytes,
        "reserved": peak.reserved_bytes,
        "driver": peak.driver_bytes,
    }
    told: dict[str, Piece] = {
        name: (gib(size, unit=False), "faint" if size is None else "muted" if name == "planned" else "text")
        for name, size in sizes.items()
    }
    beyond, meaning = difference(planned, peak.allocated_bytes)
    told |= {"difference": (beyond, meaning), "": (beyond.rpartition(" ")[2], meaning)}
    cells = [(f"{told[title][0]:>{size}}", told[title][1]) for title, size in columns]
    return [(fit(where.replace("_", " "), STAGE_WIDTH), "text"), *cells]
