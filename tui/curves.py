"""The curves of a run: a grid of charts, one of them chosen; zoom, pan, log scale, smoothing, crosshair.

The chosen chart is drawn with a marker; `z` shows it alone. The steps in view are one window for all
charts, so that they stay comparable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType

from tui.chart import Look, Series, chart_lines
from tui.curve import Window
from tui.detail import MetricCurve, RunDetail
from tui.keys import key_of
from tui.overview import CHART_SMOOTHING
from tui.palette import Command, Palette
from tui.pieces import Line, beside
from tui.sheet import Sheet
from tui.snapshot import CurvesAsk

SMOOTHINGS = (0.0, CHART_SMOOTHING, 0.95, 0.99)
LEAST_CHART = (38, 9)  # cells a chart of the grid has at least


class CurvesPane(Sheet):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("z,enter", "alone", "one/all", key_display="z", id="curves.alone"),
        Binding("plus,equals_sign", "zoom(0.5)", "zoom", key_display="+ -", tooltip="Zoom in", id="curves.zoom_in"),
        Binding("minus", "zoom(2.0)", "Zoom out", show=False, id="curves.zoom_out"),
        Binding("0", "whole", "All steps", show=False, id="curves.whole"),
        Binding("left", "cross(-1)", "crosshair", key_display="←→", tooltip="Crosshair left", id="curves.cross_left"),
        Binding("right", "cross(1)", "Crosshair right", show=False, id="curves.cross_right"),
        Binding("shift+left,less_than_sign", "pan(-0.25)", "Pan left", show=False, id="curves.pan_left"),
        Binding("shift+right,greater_than_sign", "pan(0.25)", "Pan right", show=False, id="curves.pan_right"),
        Binding("down,j", "choose(1)", "Next chart", show=False, id="curves.next"),
        Binding("up,k", "choose(-1)", "Previous chart", show=False, id="curves.previous"),
        Binding("L", "log", "log scale", id="curves.log"),
        Binding("m", "smooth", "smooth", id="curves.smooth"),
        Binding("d", "baseline", "Baseline", show=False, id="curves.baseline"),
        Binding("escape", "step_back", "back", id="curves.back"),
        Binding("slash", "find", "find", key_display="/", id="curves.find"),
    ]

    def __init__(self, *, id: str, classes: str) -> None:
        super().__init__(id=id, classes=classes, can_focus=True)
        self._set_out()

    def begin(self) -> None:
        self._set_out()
        super().begin()

    def _set_out(self) -> None:
        """Nothing chosen, nothing zoomed."""
        self._chosen = 0
        self._is_alone = False
        self._window: Window | None = None
        self._is_log = False
        self._smoothing = SMOOTHINGS.index(CHART_SMOOTHING)
        self._crosshair: float | None = None
        self._has_baseline = False
        self._detail: RunDetail | None = None

    def ask(self) -> CurvesAsk:
        columns, rows = self._grid()
        first = self._chosen if self._is_alone else self._chosen - self._chosen % (columns * rows)
        baseline = self.app_baseline() if self._has_baseline else None
        window = None if self._window is None else (int(self._window.first), int(self._window.last) + 1)
        return CurvesAsk(
            first=first,
            count=1 if self._is_alone else columns * rows,
            buckets=max(60, 2 * self.size.width // (1 if self._is_alone else columns)),
            window=window,
            baseline=baseline,
        )

    def app_baseline(self) -> str | None:
        """The run chosen as baseline in the list, unless it is this one."""
        chosen: str | None = getattr(self.app, "baseline", None)
        return chosen if self._detail is None or chosen != self._detail.run.id else None

    def present(self, detail: RunDetail) -> None:
        self._detail = detail
        self.show(self._lines)

    def ahead(self) -> Callable[[RunDetail], object]:
        """Draws the charts of what was read as they will be wanted."""
        width, height = self.scrollable_content_region.size
        return lambda detail: self._lines_of(detail, width, height) if width else ()

    def on_resize(self, event: events.Resize) -> None:
        self._read()  # another number of charts may fit; the sheet below draws by itself

    # ------------------------------------------------------------- actions

    def action_alone(self) -> None:
        self._is_alone = not self._is_alone
        self._ask()

    def action_step_back(self) -> None:
        """One thing back at a time: crosshair, zoom, the single chart, then the screen."""
        if self._crosshair is not None:
            self._crosshair = None
            self.redraw()
        elif self._window is not None:
            self.action_whole()
        elif self._is_alone:
            self.action_alone()
        else:
            self.app.pop_screen()

    def action_choose(self, by: int) -> None:
        total = len(self._detail.series) if self._detail else 0
        self._chosen = max(0, min(total - 1, self._chosen + by))
        self.redraw()
        self._ask()

    def action_find(self) -> None:
        """A metric by a part of its name, of however many there are."""
        names = [row.name for row in self._detail.series] if self._detail else []
        found = [Command(name, name, "", partial(self._go_to, name)) for name in names]
        self.app.push_screen(Palette(found, hint="a metric"))

    def _go_to(self, name: str) -> None:
        """By its name: a live run may have told of another metric since it was offered."""
        names = [row.name for row in self._detail.series] if self._detail else []
        if name in names:
            self._chosen = names.index(name)
            self._ask()

    def action_log(self) -> None:
        self._is_log = not self._is_log
        self.redraw()

    def action_smooth(self) -> None:
        self._smoothing = (self._smoothing + 1) % len(SMOOTHINGS)
        self.redraw()

    def action_baseline(self) -> None:
        if self.app_baseline() is None:
            marks, overlays = key_of("runs.baseline"), key_of("curves.baseline")
            self.app.notify(
                f"Mark a run in the list and press {marks} there; then {overlays} overlays it here.", timeout=5
            )
            return
        self._has_baseline = not self._has_baseline
        self._ask()

    def action_zoom(self, factor: float) -> None:
        whole, now = _whole_window(self._detail), self._window or _whole_window(self._detail)
        around = self._crosshair if self._crosshair is not None else now.last
        zoomed = now.zoomed(factor, around=around)
        first, last = max(whole.first, zoomed.first), min(whole.last, zoomed.last)
        is_whole = first <= whole.first and last >= whole.last
        if last - first >= 4:
            self._window = None if is_whole else Window(first, last)
        self._ask()

    def action_pan(self, fraction: float) -> None:
        if self._window is None:
            return
        whole, moved = _whole_window(self._detail), self._window.moved(fraction)
        if whole.first <= moved.first and moved.last <= whole.last:
            self._window = moved
        self._ask()

    def action_whole(self) -> None:
        self._window = None
        self._ask()

    def action_cross(self, direction: int) -> None:
        """Moves the crosshair by two dots; the first press puts it at the newest step."""
        window = self._window or _whole_window(self._detail)
        step = (window.last - window.first) / max(20, self._chart_width() - 8)
        at = window.last if self._crosshair is None else self._crosshair + direction * step
        self._crosshair = max(window.first, min(window.last, at))
        self.redraw()

    # --------------------------------------------------------------- inner

    def _ask(self) -> None:
        self.redraw()
        self._read()

    def _read(self) -> None:
        ask_now = getattr(self.app, "ask_now", None)
        if ask_now is not None:
            ask_now()

    def _grid(self) -> tuple[int, int]:
        """Charts across and down at this size."""
        width, height = self.size.width or 78, self.size.height or 20
        columns = max(1, min(4, (width + 3) // (LEAST_CHART[0] + 3)))
        return columns, max(1, min(5, height // LEAST_CHART[1]))

    def _chart_width(self) -> int:
        columns = 1 if self._is_alone else self._grid()[0]
        return (self.size.width - 3 * (columns - 1)) // columns

    def _lines(self, width: int, height: int) -> Sequence[Line]:
        return self._lines_of(self._detail, width, height)

    def _lines_of(self, detail: RunDetail | None, width: int, height: int) -> Sequence[Line]:
        if detail is None or not detail.series:
            return [[("No metric has been reported yet.", "muted")]]
        columns, rows = (1, 1) if self._is_alone else self._grid()
        rows = min(rows, max(1, math.ceil(len(detail.curves) / columns)))  # few charts are tall ones
        chart_height, chart_width = (height - (rows - 1)) // rows, self._chart_width()
        lines: list[Line] = []
        for start in range(0, min(len(detail.curves), columns * rows), columns):
            row = detail.curves[start : start + columns]
            blocks = [(self._chart(detail, curve, (chart_width, chart_height)), chart_width) for curve in row]
            lines += [[]] if lines else []
            lines += beside(*blocks, gap=3)
        return lines

    def _chart(self, detail: RunDetail, curve: MetricCurve, size: tuple[int, int]) -> list[Line]:
        series = [Series(f"attempt {one.attempt}", "faint", one.samples, is_dimmed=True) for one in curve.attempts[:-1]]
        series.append(Series(curve.name, "live", curve.samples, curve.newest))
        if curve.baseline:
            series.append(Series("baseline", "series_2", curve.baseline, is_reference=True))
        look = Look(
            is_log=self._is_log,
            smoothing=SMOOTHINGS[self._smoothing],
            window=self._window or _whole_window(detail),
            crosshair=self._crosshair,
            ascii_only=bool(getattr(self.app, "ascii_only", False)),
        )
        chosen = detail.series[min(self._chosen, len(detail.series) - 1)].name
        is_chosen = curve.name == chosen and not self._is_alone
        title = f"▸ {curve.name}" if is_chosen else curve.name
        return chart_lines(title, curve.unit, series, size, look)


def _whole_window(detail: RunDetail | None) -> Window:
    rows = detail.series if detail else ()
    first = min((row.first_step for row in rows), default=0)
    last = max((row.last_step for row in rows), default=1)
    return Window(float(first), float(max(last, first + 1)))
