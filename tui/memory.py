"""Memory of a run: the plan line by line, what was measured by stage, and each GPU over time.

Peaks of three kinds (allocated, reserved, driver) are never mixed: each has its column. Pure drawing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.store.rows import GpuSampleRow, MemoryPeakRow
from tui.chart import Look, Series, chart_lines
from tui.curve import Sample
from tui.detail import RunDetail
from tui.overview import memory_lines
from tui.pieces import BLANK, Line, beside, heading, meter, wrapped
from tui.ranks import Rank, fullest, newest_peaks, rank_peak_lines
from tui.theme import SERIES
from tui.wording import GIB, fit, gib, gpu_name, short_host, value

CHART_HEIGHT = 9
NAME_WIDTH = 24
STAGE_WIDTH = 17
_VERDICTS = {"fits": "good", "tight": "warn", "does not fit": "bad"}


def memory_tab_lines(detail: RunDetail, width: int, height: int, *, ascii_only: bool) -> list[Line]:
    lines = memory_lines(detail, width, ascii_only=ascii_only) if detail.gpu_samples else []
    lines += [BLANK, *water_lines(detail, width, ascii_only=ascii_only)] if detail.gpu_samples else []
    column = (width - 3) // 2 if width >= 100 else width
    plan, peaks = plan_lines(detail.plan or {}, column, ascii_only=ascii_only), peak_lines(detail, column)
    below = beside((plan, column), (peaks, column), gap=3) if width >= 100 else [*plan, BLANK, *peaks]
    return [*lines, BLANK, *below] if lines else below


def plan_lines(plan: Mapping[str, Any], width: int, *, ascii_only: bool) -> list[Line]:
    """Predicted bytes of the peak stage by component, what must fit, and how that stands to the capacity.

    A component's bar is its share of what must fit, the bar of that its share of the card: on a large card all would be as short.
    """
    stage = peak_stage(plan)
    if stage is None:
        return [heading("Plan", width), [("No plan was kept with this run.", "muted")]]
    lines: list[Line] = [heading("Plan", width, f"predicted, stage {stage['name']}")]
    capacity, must_fit = plan.get("capacity_bytes"), float(plan["driver_bytes"])
    components = _components(plan, stage)
    label = max(NAME_WIDTH, min(max(len(name) for name, _ in components), width - 36))  # the bar keeps some room
    room = max(4, width - label - 13)

    def row(name: str, size: float, whole: float, bar_meaning: str, meaning: str = "text") -> Line:
        bar = meter(size / whole, room, bar_meaning, ascii_only=ascii_only)
        return [(fit(name.replace("_", " "), label), meaning), (f" {gib(size):>10}", meaning), ("  ", "text"), *bar]

    lines += [row(name, size, must_fit, "series_1") for name, size in components]
    verdict = str(plan.get("verdict") or "")
    meaning = _VERDICTS.get(verdict, "text")
    lines.append(row("must fit", must_fit, float(capacity or must_fit), meaning, "strong"))
    if capacity:
        lines.append([(fit("capacity", label), "muted"), (f" {gib(capacity):>10}", "text"), (f"  {verdict}", meaning)])
    return lines


def peak_stage(plan: Mapping[str, Any]) -> Mapping[str, Any] | None:
    stages = [stage for stage in plan.get("stages") or () if stage["name"] == plan.get("peak_stage")]
    return stages[0] if stages else None


def _components(plan: Mapping[str, Any], stage: Mapping[str, Any]) -> list[tuple[str, float]]:
    """What adds up to what must fit: lines of the stage in the plan's own order, small ones together; what smoke runs took
    beyond them, the allocator and the driver."""
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
    planned = {stage["name"]: stage["allocated_bytes"] for stage in (detail.plan or {}).get("stages") or ()}
    titles = "".join(f"{title:>10}" for title in ("planned", "allocated", "reserved", "driver"))
    lines.append([(fit("", STAGE_WIDTH) + titles, "faint")])
    lines += [_peak_line(peak, planned.get(peak.stage)) for peak in peaks]
    unplanned = [peak.stage for peak in peaks if planned and peak.stage not in planned]
    if unplanned:
        told = f"{', '.join(dict.fromkeys(unplanned))}: not planned, and no part of what must fit"
        lines += wrapped(told.replace("_", " "), width, "muted")
    retries = detail.latest.get("allocation_retries")
    if retries is not None:
        lines.append([(f"allocator retries {value(retries)}", "warn" if retries > 0 else "muted")])
    return lines


def _of_rank(rank: Rank) -> str:
    """Whose peaks these are: of several ranks each one's largest is told beside them."""
    return f"rank {rank.number}{f' on {short_host(rank.host)}' if rank.host else ''}, by stage, "


def water_lines(detail: RunDetail, width: int, *, ascii_only: bool) -> list[Line]:
    """Used memory of each GPU over the last hour; the axis is minutes before the newest sample."""
    by_gpu: dict[int, list[GpuSampleRow]] = {}
    for sample in detail.gpu_samples:
        by_gpu.setdefault(sample.gpu, []).append(sample)
    newest_s = max(sample.at_s for sample in detail.gpu_samples)
    series = [
        Series(gpu_name(detail.run, gpu), SERIES[index % len(SERIES)], _over_time(samples, newest_s))
        for index, (gpu, samples) in enumerate(sorted(by_gpu.items()))
    ]
    chart = chart_lines("used, GiB", "", series, (width, CHART_HEIGHT), Look(ascii_only=ascii_only))
    since_min = (newest_s - min(sample.at_s for sample in detail.gpu_samples)) / 60
    chart[-1] = [
        (f"{'':8}{since_min:.0f} min ago", "faint"),
        (f"{'now':>{max(1, width - 8 - 8 - len(f'{since_min:.0f}'))}}", "faint"),
    ]
    return chart


def _over_time(samples: Sequence[GpuSampleRow], newest_s: float) -> list[Sample]:
    return [
        Sample(sample.at_s - newest_s, used, used, used)
        for sample in samples
        if sample.used_bytes is not None and (used := sample.used_bytes / GIB) >= 0
    ]


def _peak_line(peak: MemoryPeakRow, planned: int | None) -> Line:
    where = peak.stage if peak.gpu is None else f"{peak.stage}, GPU {peak.gpu}"
    sizes = (planned, peak.allocated_bytes, peak.reserved_bytes, peak.driver_bytes)
    told = [(f"{gib(size, unit=False):>10}", "faint" if size is None else "text") for size in sizes]
    return [(fit(where.replace("_", " "), STAGE_WIDTH), "text"), (told[0][0], "muted"), *told[1:]]
