"""One run: a line of tabs, and under it the tab that is open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widget import Widget

from orchestrator.actions.history import MEMORY_REASONS
from orchestrator.store.rows import RunRow, State
from tui.checkpoints import checkpoint_lines
from tui.curves import CurvesPane
from tui.deeds import gpus_of
from tui.detail import RunDetail
from tui.editor import Finding, log_file
from tui.failure import failure_lines
from tui.frame import YardScreen
from tui.log import LogPane
from tui.memory import memory_tab_lines
from tui.overview import CHART_METRICS, overview_lines
from tui.painted import Pages
from tui.pieces import Line, Piece, tabs
from tui.sheet import Sheet
from tui.snapshot import Ask, CurvesAsk, Snapshot
from tui.spec import spec_lines
from tui.wording import state_letter

Draw = Callable[[RunDetail, float, int, int], Sequence[Line]]  # of a run at that time, in so many cells and lines
TABS = ("overview", "curves", "memory", "log", "failure", "spec", "files")


class RunScreen(YardScreen):
    DEFAULT_CSS = """
    RunScreen #tabs { height: 1; padding: 0 1; }
    RunScreen .pane { padding: 1 1 0 1; }
    RunScreen Pages { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "next(1)", "next tab", key_display="tab", priority=True, id="run.next_tab"),
        Binding("shift+tab", "next(-1)", "Previous tab", show=False, priority=True, id="run.previous_tab"),
        *(
            Binding(str(number), f"tab('{name}')", name, show=False, id=f"run.tab_{name}")
            for number, name in enumerate(TABS, 1)
        ),
        Binding("l", "tab('log')", "log", show=False, id="run.log"),
    ]

    NAME = "run"

    def __init__(self) -> None:
        super().__init__()
        self.selector = ""
        self.tab = TABS[0]
        self._tabs = Sheet(id="tabs")
        self._curves = CurvesPane(id="curves", classes="pane")
        self._log = LogPane(id="log")
        self._page = Sheet(id="page", classes="pane scrolls", can_focus=True)  # of every other tab
        self._scrolled: dict[str, float] = {}  # how far each of those was
        self._switcher = Pages(initial=self._pane().id)

    def turn_to(self, selector: str, tab: str) -> None:
        """Another run, nothing of the one before left. The screen is made once: making it was most of what opening took."""
        self.selector, self.tab, self.snapshot, self._scrolled = selector, tab, None, {}
        self._curves.begin()
        self._log.begin()
        self._page.begin()
        if self.is_mounted:
            self._show_tab()
            self.show_top()

    def body(self) -> ComposeResult:
        yield self._tabs
        with self._switcher:
            yield self._curves
            yield self._log
            yield self._page

    def on_mount(self) -> None:
        self._tabs.show(lambda _width, _height: [self._tabs_line()])
        self._show_tab()

    def _show_tab(self) -> None:
        self._switcher.current = self._pane().id
        self._tabs.redraw()
        self._focus_pane()

    def take(self, snapshot: Snapshot) -> None:
        """What was asked for before another run was turned to comes too late."""
        if snapshot.ask.run == self.selector:
            super().take(snapshot)

    def ask(self) -> Ask:
        curves = CurvesAsk(names=CHART_METRICS, buckets=240)
        log = None
        match self.tab:
            case "curves":
                curves = self._curves.ask()
            case "log":
                log = self._log.ask()
        wants_answers = self.tab in ("failure", "spec")
        return Ask(
            wants_list=False,
            run=self.selector,
            curves=curves,
            log=log,
            wants_answers=wants_answers,
            wants_against=self.tab == "overview",
            baseline=self.app.baseline,
        )

    def ahead(self) -> Callable[[Snapshot], object]:
        draw, (width, height) = self._page_of(self.tab), self._page.scrollable_content_region.size
        curves = self._curves.ahead() if self.tab == "curves" else None

        def do(snapshot: Snapshot) -> None:
            if snapshot.detail is not None and curves is not None:
                curves(snapshot.detail)
            elif snapshot.detail is not None and draw is not None and width:
                draw(snapshot.detail, snapshot.at_s, width, height)

        return do

    def present(self, snapshot: Snapshot) -> None:
        detail, draw = snapshot.detail, self._page_of(self.tab)
        if detail is None:
            return
        self.selector = detail.run.id
        self._tabs.redraw()
        if draw is not None:
            self._page.show(lambda width, height: draw(detail, snapshot.at_s, width, height))
        elif self.tab == "curves":
            self._curves.present(detail)
        else:
            self._log.present(snapshot)

    def _page_of(self, tab: str) -> Draw | None:
        """What draws a tab of lines alone."""
        ascii_only = self.app.ascii_only
        pages: dict[str, Draw] = {
            "overview": partial(overview_lines, ascii_only=ascii_only),
            "memory": partial(memory_tab_lines, ascii_only=ascii_only),
            "failure": lambda detail, _, width, _height: failure_lines(detail, width),
            "spec": lambda detail, _, width, _height: spec_lines(detail, width),
            "files": lambda detail, at_s, width, _height: checkpoint_lines(detail, at_s, width),
        }
        return pages.get(tab)

    def crumbs(self) -> Sequence[Piece]:
        if self.snapshot is None or self.snapshot.detail is None:
            return [(self.selector, "text")]
        run = self.snapshot.detail.run
        letter = state_letter(run.state, run.reason, unreachable=run.unreachable_since_s is not None)
        return [
            letter,
            (" ", "text"),
            (run.recipe, "strong"),
            ("/", "faint"),
            (run.branch, "strong"),
            (f"  {run.id[:8]}", "muted"),
            (f"  {' and '.join(run.hosts)}", "muted"),
        ]

    def chosen(self) -> tuple[RunRow, tuple[int, ...]] | None:
        detail = self.snapshot.detail if self.snapshot else None
        return None if detail is None else (detail.run, gpus_of(detail))

    def file_to_edit(self) -> Finding | None:
        page = self.snapshot.log if self.snapshot and self.tab == "log" else None
        return super().file_to_edit() if page is None else log_file(page)

    def action_next(self, by: int) -> None:
        self.action_tab(TABS[(TABS.index(self.tab) + by) % len(TABS)])

    def action_tab(self, name: str) -> None:
        self._scrolled[self.tab] = self._page.scroll_offset.y
        if (self.tab, name) == ("failure", "log") and self.snapshot is not None:
            self._log.turn_to_failed(self.snapshot)
        self.tab = name
        self._show_tab()
        if self.snapshot is not None:
            self.present(self.snapshot)
        if self._pane() is self._page:
            self._page.scroll_to(y=self._scrolled.get(name, 0), animate=False, force=True, immediate=True)
        self.app.ask_after_paint()

    def _pane(self) -> Widget:
        """What shows the open tab. Those that are lines alone share one sheet: a widget less is 1 ms less to open a run."""
        return {"curves": self._curves, "log": self._log}.get(self.tab, self._page)

    def _focus_pane(self) -> None:
        self.focus_on(self._log.body if self.tab == "log" else self._pane())

    def _tabs_line(self) -> Line:
        return tabs(TABS, self.tab, self._tab_meaning)

    def _tab_meaning(self, name: str) -> str:
        """The tab of the failure shows from afar that there is one."""
        detail = self.snapshot.detail if self.snapshot else None
        if detail is None or detail.run.state not in (State.FAILED, State.LOST):
            return "muted"
        is_told = name == "failure" or (name == "memory" and detail.run.reason in MEMORY_REASONS)
        return "bad" if is_told else "muted"
