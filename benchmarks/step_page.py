"""What `benchmarks.step` writes: a table of rows, a table of parts with what remains to be won, JSON, and bars as SVG."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.least_work import Work
from benchmarks.step_parts import Peak, Timed

BAR, LEFT, WIDTH = 18, 330, 900  # pixels


@dataclass(frozen=True)
class Row:
    """One case by one variant; without a time it failed."""

    case: str
    variant: str
    step_ms: float | None = None
    first_step_s: float | None = None
    block_ktok_s: float | None = None
    context_ktok_s: float | None = None
    peak_gib: float | None = None  # allocated
    work: Work | None = None
    rate: float = 0.0  # operations a second, the ceiling
    parts_ms: dict[str, float] | None = None
    attention_ms: float | None = None
    peaks: dict[str, Peak] | None = None  # by part
    kernels: tuple[Timed, ...] = ()
    products: tuple[Timed, ...] = ()
    failure: str = ""

    @property
    def share(self) -> float:
        """Of the ceiling, by the least exact work."""
        assert self.work is not None
        assert self.step_ms is not None
        return self.work.total / self.rate / (self.step_ms / 1e3)

    def line(self) -> str:
        if self.step_ms is None:
            return f"{self.case:9s} {self.variant:41s} {self.failure}"
        peak = "" if self.peak_gib is None else f"  {self.peak_gib:.1f} GiB"
        return f"{self.case:9s} {self.variant:41s} {self.step_ms:9.1f} ms  {self.block_ktok_s:6.1f} Ktok/s{peak}  {self.share:.1%}"

    def by_part(self) -> dict[str, tuple[float, float]]:
        """Milliseconds taken and least of attention, body, head and loss, optimizer; attention apart where it is known."""
        assert self.parts_ms is not None
        assert self.work is not None
        per_ms = self.rate / 1e3
        attention = self.attention_ms or 0.0
        body = self.parts_ms["forward"] + self.parts_ms["backward"] - attention
        least_body = self.work.body + (0.0 if self.attention_ms is not None else self.work.attention)
        parts = {
            "attention": (attention, self.work.attention / per_ms),
            "body" if self.attention_ms is not None else "body and attention": (body, least_body / per_ms),
            "head and loss": (self.parts_ms["head and loss"], self.work.head / per_ms),
            "optimizer": (self.parts_ms["optimizer"], 0.0),
        }
        return {name: times for name, times in parts.items() if name != "attention" or self.attention_ms is not None}


def write(folder: Path, header: str, rows: Sequence[Row], *, baseline: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    body = {"header": header, "rows": [asdict(row) for row in rows]}
    (folder / "step.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    cases = list(dict.fromkeys(row.case for row in rows))
    shown = sorted(rows, key=lambda row: (cases.index(row.case), row.step_ms or math.inf))
    (folder / "step.md").write_text(_page(header, shown, baseline), encoding="utf-8")
    (folder / "step.svg").write_text(_bars(header, shown), encoding="utf-8")


def _page(header: str, rows: Sequence[Row], baseline: str) -> str:
    lines = [
        header, "",
        "| case | variant | ms | first step s | block Ktok/s | context Ktok/s | peak GiB | share of the ceiling | against the first user |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_table_line(row, _baseline_ms(rows, row.case, baseline)) for row in rows), "",
        "What remains to be won: a part's time less its least exact work at the ceiling. The head's gradient is made in its",
        "forward pass, and counts there, except in the first user's way, where it is part of the body.", "",
        "| case | variant | part | ms | share of the step | least ms | to be won ms |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in (row for row in rows if row.step_ms is not None):
        parts = row.by_part()
        total = sum(taken for taken, _ in parts.values())
        lines += [
            f"| {row.case} | {row.variant} | {part} | {taken:.1f} | {taken / total:.0%} | {least:.1f} | {taken - least:.1f} |"
            for part, (taken, least) in parts.items()
        ]
    lines += _peak_table(rows)
    for row in (row for row in rows if row.kernels):
        lines += [
            "",
            f"{row.case}, {row.variant}: one step kernel by kernel, then its products by shape.",
            "",
            *detail_lines(row),
        ]
    return "\n".join(lines) + "\n"


def _peak_table(rows: Sequence[Row]) -> list[str]:
    """Where memory peaks: allocated within each part, and left when it ends."""
    lines = ["", "| case | variant | part | highest GiB | left GiB |", "|---|---|---|---|---|"]
    for row in (row for row in rows if row.peaks):
        assert row.peaks is not None
        lines += [
            f"| {row.case} | {row.variant} | {part} | {peak.highest:.2f} | {peak.left:.2f} |"
            for part, peak in row.peaks.items()
        ]
    return lines if len(lines) > 3 else []


def detail_lines(row: Row) -> list[str]:
    """The longest kernels of one step and its products, as two tables."""
    lines = ["| kernel | calls | ms |", "|---|---|---|"]
    lines += [f"| `{each.name}` | {each.calls} | {each.ms:.2f} |" for each in row.kernels]
    lines += ["", "| product | calls | ms | TFLOP/s |", "|---|---|---|---|"]
    return lines + [
        f"| {each.name} | {each.calls} | {each.ms:.2f} | {each.tflop_s or 0:.0f} |" for each in row.products
    ]


def _table_line(row: Row, baseline_ms: float | None) -> str:
    if row.step_ms is None:
        return f"| {row.case} | {row.variant} | {row.failure} | | | | | | |"
    peak = "" if row.peak_gib is None else f"{row.peak_gib:.1f}"
    times = "" if baseline_ms is None else f"{baseline_ms / row.step_ms:.1f} ×"
    return (
        f"| {row.case} | {row.variant} | {row.step_ms:.1f} | {row.first_step_s:.1f} | {row.block_ktok_s:.1f} "
        f"| {row.context_ktok_s:.1f} | {peak} | {row.share:.1%} | {times} |"
    )


def _baseline_ms(rows: Sequence[Row], case: str, baseline: str) -> float | None:
    return next((row.step_ms for row in rows if (row.case, row.variant) == (case, baseline)), None)


def _bars(header: str, rows: Sequence[Row]) -> str:
    """Milliseconds a row, in light bars; the dark part is the least exact work at the ceiling."""
    longest = max((row.step_ms for row in rows if row.step_ms is not None), default=1.0)
    height = BAR * (len(rows) + 2)
    parts = [f'<text x="4" y="{BAR - 5}">{escape(header)}; dark: the least exact work there</text>']
    for index, row in enumerate(rows, start=1):
        top = BAR * index + 4
        parts.append(f'<text x="4" y="{top + BAR - 6}">{escape(f"{row.case}: {row.variant}")}</text>')
        if row.step_ms is None:
            parts.append(f'<text x="{LEFT}" y="{top + BAR - 6}">{escape(row.failure)}</text>')
            continue
        width = (WIDTH - LEFT - 70) * row.step_ms / longest
        parts += [
            f'<rect x="{LEFT}" y="{top}" width="{width:.1f}" height="{BAR - 4}" fill="#9ecae1"/>',
            f'<rect x="{LEFT}" y="{top}" width="{width * min(1.0, row.share):.1f}" height="{BAR - 4}" fill="#08519c"/>',
            f'<text x="{LEFT + width + 4:.1f}" y="{top + BAR - 6}">{row.step_ms:.0f} ms</text>',
        ]
    style = 'font-family="sans-serif" font-size="11"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" {style}>\n'
        '<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )
