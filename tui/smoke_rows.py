"""The smoke matrix as rows, cells and lines: what each rung measured, how it stands, plan against measured. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.actions.rungs import ladder, peak_bytes, seconds_of
from orchestrator.store.rows import EvidenceRow, RunRow
from orchestrator.units import spoken
from tui.facts import fact_text
from tui.keys import key_of
from tui.memory import difference
from tui.outside import to_type
from tui.pieces import BLANK, Line, Piece, broken, heading, wrapped
from tui.table import Column
from tui.wording import age, duration, fit, gib

RUNG_WIDTH, TIMED_WIDTH = 9, 18  # "✓ 84.9", "✓ 84.9 GiB  1.27s"
NAME_WIDTH = 12  # of a rung at least: "checkpoint"
BEYOND_WIDTH = 14  # "+13.80 +20%"
PLANNED_RUNG = "fwd_bwd"  # takes the whole step at the worst batch, as the plan does
_STAGE_WORD = "rung "  # how a smoke run's stage names the rung that is being climbed


@dataclass(frozen=True)
class Row:
    """The newest word on each rung of one branch on one host, and the smoke run that climbs there now."""

    recipe: str
    branch: str
    host: str
    rungs: dict[str, EvidenceRow] = field(default_factory=dict)
    climbing: RunRow | None = None
    wanted: tuple[str, ...] = field(default_factory=ladder)  # rungs that a launch wants passed

    @property
    def key(self) -> str:
        return f"{self.recipe}/{self.branch}@{self.host}"

    def names(self, all_names: Sequence[str]) -> tuple[str, ...]:
        """The rungs that are wanted, and those that there is word of."""
        return tuple(name for name in all_names if name in self.wanted or name in self.rungs)

    @property
    def newest_run(self) -> str:
        """The smoke run that climbs there now, else the one that told of a rung last."""
        return self.climbing.id if self.climbing else max(self.rungs.values(), key=lambda row: row.at_s).run_id

    @property
    def fingerprint(self) -> str | None:
        """Of the newest rung; others of another one are stale."""
        newest = max(self.rungs.values(), key=lambda row: row.at_s, default=None)
        return newest.fingerprint if newest else None

    @property
    def is_reached(self) -> bool:
        """Whether the host of the smoke run that climbs answers; what an unreachable one does is of then."""
        return self.climbing is not None and self.climbing.unreachable_since_s is None

    @property
    def climbed_now(self) -> str:
        """The rung under way; empty when none is."""
        stage = (self.climbing.stage or "") if self.climbing else ""
        return stage.removeprefix(_STAGE_WORD) if stage.startswith(_STAGE_WORD) else ""


def rows_of(
    evidence: Sequence[EvidenceRow], live: Sequence[RunRow], wanted: Mapping[str, tuple[str, ...]]
) -> list[Row]:
    """Branches by host: those being climbed, then that with the newest evidence; of each rung the newest word."""
    found: dict[tuple[str, str, str], Row] = {}
    for run in live:
        if run.kind == "smoke":
            key = (run.recipe, run.branch, run.host)
            found.setdefault(key, Row(*key, climbing=run))
    for item in evidence:  # newest first
        key = (item.recipe, item.branch, item.host)
        found.setdefault(key, Row(*key)).rungs.setdefault(item.rung, item)
    return [dataclasses.replace(row, wanted=wanted.get(row.key, ladder())) for row in found.values()]


def rung_names(rows: Sequence[Row]) -> tuple[str, ...]:
    """Every rung that a row wants or tells of: those of the ladder first, in its order."""
    known = {name for row in rows for name in (*row.wanted, *row.rungs)}
    return (*(name for name in ladder() if name in known), *sorted(known - set(ladder())))


def columns(names: Sequence[str], kept: Sequence[str], *, with_times: bool) -> tuple[Column, ...]:
    """`kept`: the rungs whose columns stay longest where there is no room for all."""
    width = TIMED_WIDTH if with_times else RUNG_WIDTH
    ranks = {name: index for index, name in enumerate([*kept, *(name for name in names if name not in kept)])}
    rungs = (Column(name, max(width, len(name)), rank=2 + ranks[name]) for name in names)
    return (Column("branch", 0, least=16), Column("host", 7, rank=1), *rungs)


def row_cells(row: Row, names: Sequence[str], chosen: str, *, with_times: bool) -> list[list[Piece]]:
    """`chosen`: the rung that is marked, empty for none in this row."""
    cells: list[list[Piece]] = [[(row.recipe, "strong"), ("/", "faint"), (row.branch, "text")], [(row.host, "muted")]]
    for name in names:
        cell = _cell(row, name, with_times=with_times)
        cells.append([(cell[0][0], "key"), *cell[1:]] if name == chosen else cell)
    return cells


def _cell(row: Row, name: str, *, with_times: bool) -> list[Piece]:
    item = row.rungs.get(name)
    if name == row.climbed_now:
        meaning = "live" if row.is_reached else "faint"
        return [("▸ ", meaning), ("climbing" if with_times else "now", meaning)]
    if item is None:
        return [("· ", "faint"), ("missing", "faint")] if name in row.wanted else [("  –", "faint")]
    if item.fingerprint != row.fingerprint:
        return [("· ", "faint"), ("stale", "faint")]
    if not item.passed:
        return [("✗ ", "bad"), ("failed", "bad")]
    peak, seconds = peak_bytes(item.values), seconds_of(item.values)
    told = f"{gib(peak, unit=with_times) if peak is not None else 'passed':<{8 if with_times else 7}}"
    timed: list[Piece] = [(f" {_seconds(seconds):>6}", "muted")] if with_times and seconds is not None else []
    return [("✓ ", "good"), (told, "text"), *timed]


def nothing_lines(width: int) -> list[Line]:
    """Where nobody has climbed yet: what a rung is, and how the first is climbed."""
    what = f"A rung tries a part of the training on its host and measures memory and time: {', '.join(ladder())}."
    return [
        *wrapped(f"{what} A launch wants those passed that its recipe names.", width, "muted"),
        BLANK,
        [
            (key_of("home.launch"), "key"),
            ("  choose a branch and a host; ", "text"),
            (key_of("launch.smoke"), "key"),
            (" there climbs its rungs", "text"),
        ],
        *broken(
            [("or", "muted"), (" type ", "text"), (to_type("draftyard smoke RECIPE --host HOST"), "strong")], width
        ),
    ]


def rung_lines(
    row: Row, names: Sequence[str], chosen: str, plan: Mapping[str, Any], now_s: float, width: int
) -> list[Line]:
    """Every rung of the row with what it measured; plan against measured; all values of the chosen one."""
    note = f"fingerprint {row.fingerprint[:16]}" if row.fingerprint else "no fingerprint"
    names = row.names(names)
    label = max([NAME_WIDTH, *(len(name) + 1 for name in names)])
    lines: list[Line] = [heading(f"{row.recipe}/{row.branch} on {row.host}", width, note), [(_titles(label), "faint")]]
    for name in names:
        lines += _rung_line(row, name, chosen, now_s, (label, width))
    lines += _against_plan(row.rungs.get(PLANNED_RUNG), plan, width)
    item = row.rungs.get(chosen)
    if item is None:
        return lines
    values = {name: value for name, value in item.values.items() if not name.endswith("_bytes")}
    facts = ", ".join(f"{spoken(name)} {fact_text(name, value)}" for name, value in values.items())
    return [
        *lines,
        BLANK,
        heading(f"Rung {chosen}", width, f"run {item.run_id}"),
        *wrapped(facts or "no values", width),
    ]


def _titles(label: int) -> str:
    return f"  {'':<{label}}{'':<10}{'peak':>10}{'time':>9}{'loss':>8}  "


def _rung_line(row: Row, name: str, chosen: str, now_s: float, widths: tuple[int, int]) -> list[Line]:
    """`widths`: of the name, and of the whole."""
    label_width, width = widths
    item = row.rungs.get(name)
    mark: Piece = ("▸ " if name == chosen else "  ", "key")
    label: Piece = (fit(name, label_width), "strong" if name == chosen else "text")
    if name == row.climbed_now:
        return [[mark, label, ("climbing", "live" if row.is_reached else "faint")]]
    if item is None:
        return [[mark, label, ("missing", "faint")]]
    is_stale = item.fingerprint != row.fingerprint
    standing: Piece = ("stale", "faint") if is_stale else ("passed", "good") if item.passed else ("failed", "bad")
    loss = item.values.get("loss")
    numbers = f"{gib(peak_bytes(item.values)):>10}{_seconds(seconds_of(item.values)):>9}"
    numbers += f"{loss:8.3f}" if isinstance(loss, int | float) else f"{'–':>8}"
    told = f"  {age(now_s - item.at_s)} ago" + (", since changed" if is_stale else "")
    lines: list[Line] = [[mark, label, (fit(standing[0], 10), standing[1]), (numbers, "text"), (told, "faint")]]
    messages = wrapped(item.message, width - 4, "muted" if item.passed else "bad")
    return [*lines, *([("    ", "text"), *line] for line in messages)]


def _against_plan(item: EvidenceRow | None, plan: Mapping[str, Any], width: int) -> list[Line]:
    """By stage: what was planned, what the rung of the whole step allocated, and the difference."""
    stages = {str(stage.get("name")): stage.get("allocated_bytes") for stage in plan.get("stages") or ()}
    if item is None or not stages:
        return []
    lines: list[Line] = [
        BLANK,
        heading("Plan against measured", width, f"allocated in {PLANNED_RUNG}, GiB"),
        [(f"  {'':<12}{'planned':>10}{'measured':>10}{'difference':>{BEYOND_WIDTH}}", "faint")],
    ]
    for stage, planned in stages.items():
        measured = item.values.get(f"{stage}_allocated_bytes")
        if planned is None and measured is None:
            continue
        sizes = f"{gib(planned, unit=False):>10}{gib(measured, unit=False):>10}"
        beyond, meaning = difference(planned, measured)
        told: Line = [("  ", "text"), (fit(stage, 12), "text"), (sizes, "text"), (f"{beyond:>{BEYOND_WIDTH}}", meaning)]
        lines += broken(told, width)
    return lines if len(lines) > 3 else []


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds:.2f}s" if seconds < 60 else duration(seconds)
