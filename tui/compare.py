"""Marked runs over each other: curves by metric, newest and best values, what they were told differently."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from orchestrator.actions.comparable import unlike
from orchestrator.actions.history import in_reading_order, spec_differences
from orchestrator.store.rows import NUM_REPORTS, RunRow, SeriesRow
from orchestrator.units import counted, unit_of
from tui.chart import Look, Series, chart_lines
from tui.detail import FIRST_METRICS, MOST_OVERLAID, RunDetail, overlaid, told_in, told_now
from tui.facts import fact_text
from tui.frame import YardScreen
from tui.overview import CHART_SMOOTHING
from tui.pieces import BLANK, Line, Piece, beside, broken, heading, wrapped
from tui.sheet import Sheet
from tui.snapshot import Ask, CurvesAsk, Snapshot
from tui.theme import MARKS, SERIES
from tui.wording import count, fit, state_letter, state_word, value
from tui.worth import UNIT, worth_rows

MOST_RUNS = len(SERIES)
FEW_LINES = 12  # differences up to this many lines come before the charts
LOWER_IS_BETTER = ("loss", "step_s", "wait_s", "peak")
HIGHER_IS_BETTER = ("accuracy", "streak", "acceptance", "tree_tau", "block_tokens_per_s", "context_tokens_per_s")


class CompareScreen(YardScreen):
    DEFAULT_CSS = "CompareScreen #compared { padding: 1 1 0 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("L", "log", "log scale", id="compare.log"),
        Binding("m", "smooth", "smooth", id="compare.smooth"),
    ]

    NAME = "compare"

    def __init__(self) -> None:
        super().__init__()
        self._run_ids: tuple[str, ...] = ()
        self._is_log, self._is_smooth = False, True
        self._sheet = Sheet(id="compared", classes="scrolls", can_focus=True)

    def turn_to(self, run_ids: Sequence[str]) -> None:
        """Other runs, nothing of those before left. The screen is made once: Python frees one that was closed, its charts and all,
        only when it collects, and by those of some twenty seconds the program grew by 30 MB."""
        self._run_ids, self.snapshot = tuple(run_ids)[:MOST_RUNS], None
        self._is_log, self._is_smooth = False, True
        self._sheet.begin()
        if self.is_mounted:
            self.show_top()

    def take(self, snapshot: Snapshot) -> None:
        """What was asked for before other runs were turned to comes too late."""
        if snapshot.ask.compared == self._run_ids:
            super().take(snapshot)

    def body(self) -> ComposeResult:
        yield self._sheet

    def on_mount(self) -> None:
        self._sheet.focus()

    def ask(self) -> Ask:
        return Ask(wants_list=False, compared=self._run_ids, curves=CurvesAsk(buckets=240))

    def present(self, snapshot: Snapshot) -> None:
        self._sheet.show(lambda width, _height: compare_lines(snapshot.compared, width, self._look()))

    def crumbs(self) -> Sequence[Piece]:
        return [(f"compare {counted(len(self._run_ids), 'run')}", "strong")]

    def action_log(self) -> None:
        self._is_log = not self._is_log
        self._sheet.redraw()

    def action_smooth(self) -> None:
        self._is_smooth = not self._is_smooth
        self._sheet.redraw()

    def _look(self) -> Look:
        smoothing = CHART_SMOOTHING if self._is_smooth else 0.0
        return Look(is_log=self._is_log, smoothing=smoothing, ascii_only=self.app.ascii_only)


def compare_lines(details: Sequence[RunDetail], width: int, look: Look) -> list[Line]:
    lines = [line for index, detail in enumerate(details) for line in broken(_legend(detail, SERIES[index]), width)]
    unlike_by = _made_differently(details)
    lines += _said(unlike_by, width)
    differences = _differences(details, width)
    names = overlaid([detail.series for detail in details])
    firsts = [name for name in names if name in FIRST_METRICS]
    charts = [BLANK, *_charts(details, firsts, unlike_by, width, look)]
    lines += [*differences, *charts] if len(differences) <= FEW_LINES else [*charts, *differences]
    lines += _worth(details, width)
    lines += [
        BLANK,
        heading("Measured", width, f"mean of the last {NUM_REPORTS}, best in brackets"),
        _names(details, width),
        *_measured(details, unlike_by, width),
    ]
    others = [name for name in names[:MOST_OVERLAID] if name not in FIRST_METRICS]
    if others:
        lines += [BLANK, heading("Other curves", width, "what two runs or more report")]
        lines += _charts(details, others, unlike_by, width, look)
    if left_out := names[MOST_OVERLAID:]:
        told = f"{counted(len(left_out), 'metric')} more that two runs report: no curve here, in the table above"
        lines += [BLANK, *wrapped(told, width, "muted")]
    return lines


def _differences(details: Sequence[RunDetail], width: int) -> list[Line]:
    found = spec_differences([detail.spec or {} for detail in details])
    if not found:
        return [BLANK, heading("Told differently", width), [("Nothing: their specs are equal.", "muted")]]
    rows = [_row(item.key, [fact_text(item.key, told) for told in item.values], width) for item in found]
    return [BLANK, heading("Told differently", width), _names(details, width), *rows]


def _worth(details: Sequence[RunDetail], width: int) -> list[Line]:
    """What the drafters are worth, by way; empty where none has decoded."""
    rows, note = worth_rows([detail.decoded for detail in details])
    if not rows:
        return []
    told = wrapped(note, width, "warn") if note else []
    names, cells = _names(details, width), [_row(way, told_by, width) for way, told_by in rows]
    return [BLANK, heading("Acceptance", width, f"{UNIT} [95 %]"), names, *cells, *told]


def _legend(detail: RunDetail, meaning: str) -> Line:
    run = detail.run
    letter, state_meaning = state_letter(run.state, run.reason, unreachable=run.unreachable_since_s is not None)
    return [
        (f"{MARKS[meaning]} ", meaning),
        (f"{run.recipe}/{run.branch}", "strong"),
        (f"  {run.id}  {run.host}  ", "muted"),
        (f"{letter} {state_word(run.state)}", state_meaning),
        (f"  {_at_step(run)}", "text"),
    ]


def _at_step(run: RunRow) -> str:
    """How far it is: a loss at step 27 beside one at step 478 is no verdict."""
    total = "" if run.num_steps is None else f" of {count(run.num_steps)}"
    return "no step yet" if run.step is None else f"step {count(run.step)}{total}"


def _made_differently(details: Sequence[RunDetail]) -> dict[str, list[str]]:
    """Metrics that are numbers of different things in those that tell them, whichever is smaller: by which keys."""
    told = [{row.name for row in detail.series} for detail in details]
    found = {}
    for name in in_reading_order({name for names in told for name in names}):
        specs = [detail.spec or {} for detail, names in zip(details, told, strict=True) if name in names]
        if keys := unlike(name, specs):
            found[name] = keys
    return found


def _said(unlike_by: Mapping[str, Sequence[str]], width: int) -> list[Line]:
    keys = dict.fromkeys(key for keys in unlike_by.values() for key in keys)
    told = f"* made differently ({', '.join(keys)}): not to be held against one another"
    return wrapped(told, width, "warn") if keys else []


def _marked(name: str, unlike_by: Mapping[str, Sequence[str]]) -> str:
    return f"{name}*" if name in unlike_by else name


def _charts(
    details: Sequence[RunDetail], names: Sequence[str], unlike_by: Mapping[str, Sequence[str]], width: int, look: Look
) -> list[Line]:
    names = [name for name in names if any(_has_curve(detail, name) for detail in details)]
    columns = min(len(names), 2 if width >= 72 else 1) or 1
    room = (width - 3 * (columns - 1)) // columns
    lines: list[Line] = []
    for start in range(0, len(names), columns):
        blocks = []
        for name in names[start : start + columns]:
            series = [
                Series("", SERIES[index], curve.samples, curve.newest)
                for index, detail in enumerate(details)
                if (curve := detail.curve(name)) is not None and curve.samples
            ]
            told = told_in(name, _unit(details, name))
            blocks.append((chart_lines(_marked(name, unlike_by), told, series, (room, 9), look), room))
        lines += [*([BLANK] if lines else []), *beside(*blocks, gap=3)]
    return lines


def _has_curve(detail: RunDetail, name: str) -> bool:
    curve = detail.curve(name)
    return curve is not None and bool(curve.samples)


def _measured(details: Sequence[RunDetail], unlike_by: Mapping[str, Sequence[str]], width: int) -> list[Line]:
    names = in_reading_order({row.name for detail in details for row in detail.series})
    lines = []
    for name in names:
        rows = [next((row for row in detail.series if row.name == name), None) for detail in details]
        unit = _unit(details, name)
        cells = ["–" if row is None else _now_and_best(row, unit) for row in rows]
        lines.append(_row(_marked(name, unlike_by), cells, width))
    return lines


def _unit(details: Sequence[RunDetail], name: str) -> str:
    """What all that are compared have the metric in: a stranger's loss beside ours has none."""
    return unit_of(name, is_ours=all(detail.is_ours for detail in details))


def _now_and_best(row: SeriesRow, unit: str) -> str:
    """The metric's one number, as in a list; a learning rate or a norm has no best."""
    name = row.name
    now = value(told_now(row), unit=unit)
    is_known = name.startswith((*LOWER_IS_BETTER, *HIGHER_IS_BETTER))
    best = row.min_value if name.startswith(LOWER_IS_BETTER) else row.max_value
    return f"{now} ({value(best, unit=unit)})" if is_known and best is not None and math.isfinite(best) else now


def _names(details: Sequence[RunDetail], width: int) -> Line:
    """The heads of the columns: each run's mark and branch, its id where branches repeat."""
    label, room = _widths(len(details), width)
    branches = [detail.run.branch for detail in details]
    pieces: list[Piece] = [(fit("", label), "text")]
    for index, detail in enumerate(details):
        run = detail.run
        name = run.branch if branches.count(run.branch) == 1 else f"{run.id} {run.branch}"
        pieces += [(f" {MARKS[SERIES[index]]} ", SERIES[index]), (fit(name, room - 2), "muted")]
    return pieces


def _row(name: str, cells: Sequence[str], width: int) -> Line:
    label, room = _widths(len(cells), width)
    pieces: list[Piece] = [(fit(name, label), "muted")]
    for cell in cells:
        pieces += [(" ", "text"), (fit(cell, room), "text")]
    return pieces


def _widths(num_runs: int, width: int) -> tuple[int, int]:
    """Cells of the names and of each run's column."""
    label = min(30, width // 3)
    return label, max(8, min(36, (width - label) // max(1, num_runs) - 1))
