"""Home: every run in a list, live ones first, and the one under the cursor beside it, or below it, where there is room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input

from orchestrator.errors import DraftyardError
from orchestrator.store.filter import compile_filter
from orchestrator.store.rows import RunRow
from orchestrator.units import counted
from tui.compare import MOST_RUNS
from tui.died import LastDeath
from tui.field import Field
from tui.home import HomeScreen
from tui.keys import key_of
from tui.outside import to_type
from tui.painted import Columns
from tui.pieces import Line, Piece, wrapped
from tui.preview import at_most, below_lines, beside_lines
from tui.runs_rows import COLUMNS, NEEDED, run_cells, trouble, trouble_cells, trouble_columns
from tui.sheet import Sheet
from tui.snapshot import LIST_LIMIT, Ask, CurvesAsk, Room, RunNumbers, Snapshot
from tui.table import Cells, Table, whole_width

# What `s` goes through: the words on the screen, and the reader's sort ("" is worst off first, ours).
SORTS = (
    ("newest first", "created"),
    ("worst off first", ""),
    ("low loss first", "-loss"),
    ("fastest first", "block_tokens_per_s"),
    ("by recipe", "-recipe"),
    ("by host", "-host"),
)
OF_A_RUN = ("mark", "sort", "open", "compare")  # actions that an empty list has no use for
NARROW = 90  # below it the order is told instead of the number of runs
LEAST_BESIDE = 48  # cells that a list with all its columns must leave for the run to be shown beside it
MOST_BESIDE = 0.36  # of the width
LEAST_BELOW = 14  # lines that a list must leave for the run to be shown below it


class RunsScreen(HomeScreen):
    NAME = "runs"
    DEFAULT_CSS = """
    RunsScreen #preview { display: none; padding: 0 2 0 0; }
    RunsScreen.wide #preview { display: block; }
    RunsScreen.below Columns { layout: vertical; }
    RunsScreen.below #preview { display: block; height: 1fr; padding: 0 1; }
    RunsScreen #filter { display: none; height: 1; border: none; padding: 0 1; background: $yard-raised; }
    RunsScreen #filter.open { display: block; }
    RunsScreen #fault { display: none; padding: 0 1; background: $yard-raised; }
    RunsScreen #cause { display: none; height: 2; padding: 0 1; background: $yard-raised; }
    RunsScreen #fault.open, RunsScreen #cause.open { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "filter", key_display="/", id="runs.filter"),
        Binding("space", "mark", "mark", id="runs.mark"),
        Binding("s", "sort(1)", "sort", id="runs.sort"),
        Binding("o", "sort(-1)", "Sort back", show=False, id="runs.sort_back"),
        Binding("l", "open('log')", "log", id="runs.log"),
        Binding(
            "exclamation_mark", "last_failure", "Why the last one died", show=False, key_display="!", id="runs.failed"
        ),
        Binding("c", "compare", "compare", id="runs.compare"),
        Binding("B", "baseline", "Baseline for curves and speed", show=False, id="runs.baseline"),
        Binding("a", "kinds", "All kinds of jobs, or training alone", show=False, id="runs.kinds"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._where = ""
        self._kind: str | None = "train"
        self._sort = 0
        self._begins_anew = False  # the cursor goes to the first run of an order or a filter that has not been read yet
        self._limit: int | None = LIST_LIMIT
        self._rows: Sequence[RunRow] = ()
        self._last_death = LastDeath()
        self._filter_fault = ""
        self._table = Table(COLUMNS, empty="", id="list")
        self._preview = Sheet(id="preview")
        self._fault = Sheet(id="fault")  # of the filter, whole
        self._cause = Sheet(id="cause")  # of the run under the cursor, where the list cuts it and nothing else says it
        self._box = Field(
            id="filter", compact=True, select_on_focus=False, placeholder="status:failed loss<2 since:7d host:pve*"
        )

    def body(self) -> ComposeResult:
        with Columns():
            yield self._table
            yield self._preview
        yield self._cause
        yield self._fault
        yield self._box

    def on_mount(self) -> None:
        self._table.focus()

    def ask(self) -> Ask:
        top, height = int(self._table.scroll_offset.y), max(self._table.size.height, 20)
        return Ask(
            where=self._where,
            kind=self._kind,
            sort=SORTS[self._sort][1] or "created",
            limit=self._limit,
            in_sight=(max(0, top - height), height * 3),
            run=self._table.cursor_key if self._has_preview and self._rows else None,
            curves=CurvesAsk(names=("loss", "accuracy"), buckets=200),
        )

    def present(self, snapshot: Snapshot) -> None:
        self._present_list(snapshot)
        self._present_preview(snapshot)

    def _present_list(self, snapshot: Snapshot) -> None:
        self._rows = self._sorted(snapshot)
        keys = [run.id for run in self._rows]

        def draw(index: int) -> Cells:
            run = self._rows[index]
            numbers = snapshot.numbers.get(run.id, RunNumbers())
            if self._is_by_trouble:
                return trouble_cells(run, numbers, snapshot.at_s)
            return run_cells(run, numbers, snapshot.at_s, ascii_only=self.app.ascii_only)

        if self._is_by_trouble:
            self._table.set_columns(trouble_columns(self._rows))
        had_cursor = self._table.cursor_key is not None
        if self._begins_anew:
            self._table.to_top()
            self._begins_anew = self._is_of_before(snapshot)
        self._table.set_rows(keys, draw, empty=self._empty_words())
        if (self._place_preview() or not had_cursor) and keys and self._has_preview:
            self.app.ask_now()  # now that there is a run under the cursor
        self._tell_cause()

    def reads_beside(self, snapshot: Snapshot) -> Callable[[Room], object] | None:
        return self._last_death.reads(snapshot, self._kind)

    def reread(self) -> None:
        self._last_death.forget()

    def ahead(self) -> Callable[[Snapshot], object]:
        draw, (width, height) = self._preview_of(), self._preview.scrollable_content_region.size
        return lambda snapshot: draw(snapshot, width, height)

    def _present_preview(self, snapshot: Snapshot) -> None:
        draw = self._preview_of()
        self._preview.show(lambda width, height: draw(snapshot, width, height))

    def _preview_of(self) -> Callable[[Snapshot, int, int], Sequence[Line]]:
        lines_of, ascii_only = below_lines if self.has_class("below") else beside_lines, self.app.ascii_only

        def draw(snapshot: Snapshot, width: int, height: int) -> Sequence[Line]:
            detail = snapshot.detail
            return () if detail is None else lines_of(detail, snapshot.at_s, width, height, ascii_only=ascii_only)

        return draw

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Where no run is there is none to mark, to sort or to look into."""
        is_empty = self.snapshot is not None and not self._rows and not self._where
        return super().check_action(action, parameters) and not (is_empty and action in OF_A_RUN)

    def told(self) -> Sequence[Piece]:
        num_runs = self.snapshot.num_runs if self.snapshot else 0
        what = counted(num_runs, "run") + ("" if self._kind else " of every kind")
        pieces: list[Piece] = []
        if self.snapshot and not (self._sort and self.size.width < NARROW):
            pieces.append((f" {what} ", "muted"))
        if self._sort:
            pieces.append((f" {SORTS[self._sort][0]}", "muted"))
        if self._where:
            pieces.append((f"  / {self._where}", "accent"))
        if self._table.marks:
            pieces.append((f"  ● {len(self._table.marks)} marked", "accent"))
        return pieces

    def on_resize(self, event: events.Resize) -> None:
        rooms = [event.size.width - whole_width(columns) for columns in (COLUMNS, NEEDED)]
        room = next((room for room in rooms if room >= LEAST_BESIDE), rooms[-1])
        beside = min(room, round(event.size.width * MOST_BESIDE))
        self.set_class(beside >= LEAST_BESIDE, "wide")
        self._preview.styles.width = beside if self.has_class("wide") else "100%"
        self._place_preview()
        self.app.ask_now()

    # ------------------------------------------------------------- actions

    def action_filter(self) -> None:
        self._box.add_class("open")
        self._box.value = self._where
        self._box.focus()

    def action_mark(self) -> None:
        self._table.toggle_mark()
        self.show_top()

    def action_sort(self, direction: int) -> None:
        self._sort = (self._sort + direction) % len(SORTS)
        self._table.set_columns(trouble_columns(self._rows) if self._is_by_trouble else COLUMNS)
        self._begin_anew()
        self._tell_cause()
        if self.snapshot is not None:
            self._present_list(self.snapshot)  # the rows there are, until the new order has been read
        self.show_top()
        self.app.ask_after_paint()

    def action_compare(self) -> None:
        marked = [run.id for run in self._rows if run.id in self._table.marks]
        if len(marked) < 2:
            told = f"Mark two runs or more with {key_of('runs.mark')}, then press {key_of('runs.compare')}."
            self.app.notify(told, timeout=4)
            return
        if len(marked) > MOST_RUNS:
            told = f"{len(marked)} are marked: the first {MOST_RUNS} of the list are compared; draftyard compare takes more."
            self.app.notify(told, severity="warning", timeout=8)
        self.app.compare(marked)

    def action_baseline(self) -> None:
        """The run under the cursor is what the speed of others is held against, and laid under their curves; once more: no more."""
        key = self._table.cursor_key
        if key is None:
            return
        is_taken_back = key == self.app.baseline
        self.app.baseline = None if is_taken_back else key
        self._table.sign(self.app.baseline, "B")
        told = f"{key} is the baseline: other runs say their speed against it, d lays it under a curve."
        if is_taken_back:
            told = f"{key} is the baseline no more."
        self.app.notify(told, timeout=5)

    def chosen(self) -> tuple[RunRow, tuple[int, ...]] | None:
        run = next((run for run in self._rows if run.id == self._table.cursor_key), None)
        if run is None or self.snapshot is None:
            return None
        numbers = self.snapshot.numbers.get(run.id, RunNumbers())
        return run, tuple(sample.gpu for sample in numbers.gpus)

    def action_kinds(self) -> None:
        self._kind = None if self._kind else "train"
        self.app.ask_now()

    def action_open(self, tab: str) -> None:
        if self._table.cursor_key is not None:
            self.app.open_run(self._table.cursor_key, tab)

    def can_go_back(self) -> bool:
        return bool(self._where or self._table.marks) or self._box.has_class("open")

    def action_last_failure(self) -> None:
        """Opens the failure of the run that died last, whether it is in the list or not."""
        if self._last_death.run is not None:
            self.app.open_run(self._last_death.run.id, "failure")
        elif self._last_death.is_known:
            self.app.notify(f"No {'training' if self._kind else 'run'} has failed or was lost.", timeout=4)

    def action_back(self) -> None:
        """Escape closes the filter, then clears it, then the marks."""
        if self._box.has_class("open"):
            self._box.remove_class("open")
            self._judge("")
            self._table.focus()
        elif self._where or self._table.marks:
            self._where = ""
            self._table.marks.clear()
            self.show_top()
            self._table.refresh()
            self.app.ask_now()

    @on(Input.Changed, "#filter")
    def check_filter(self, event: Input.Changed) -> None:
        self._judge(event.value)

    @on(Input.Submitted, "#filter")
    def apply_filter(self, event: Input.Submitted) -> None:
        self._judge(event.value)  # keys typed in one burst may come before word of the change
        if self._filter_fault:
            return
        self._where = event.value.strip()
        self._box.remove_class("open")
        self._table.focus()
        self._begin_anew()
        self.show_top()
        self.app.ask_now()

    @on(Table.Opened)
    def open_run(self, event: Table.Opened) -> None:
        self.app.open_run(event.key)

    @on(Table.Moved)
    def moved(self, event: Table.Moved) -> None:
        self._begins_anew = False
        self._tell_cause()
        near_end = self._table.cursor > len(self._rows) - 100
        if near_end and self._limit is not None and len(self._rows) >= self._limit:
            self._limit *= 4
            self.app.ask_now()
        elif not self._knows_all_in_sight():
            self.app.ask_now()
        elif self._has_preview:
            self.app.ask_soon()

    # --------------------------------------------------------------- inner

    def _begin_anew(self) -> None:
        """The cursor on the first run: of what is known at once, of what is asked for once it has been read."""
        self._begins_anew = True
        self._table.to_top()

    def _is_of_before(self, snapshot: Snapshot) -> bool:
        """Whether it was asked for before the order or the filter there is now."""
        asked, ask = snapshot.ask, self.ask()
        return (asked.where, asked.kind, asked.sort) != (ask.where, ask.kind, ask.sort)

    @property
    def _has_preview(self) -> bool:
        return self.has_class("wide") or self.has_class("below")

    def _knows_all_in_sight(self) -> bool:
        """Whether the rows that a move has brought into sight have been read."""
        top = int(self._table.scroll_offset.y)
        numbers = self.snapshot.numbers if self.snapshot else {}
        return all(run.id in numbers for run in self._rows[top : top + self._table.size.height])

    def _place_preview(self) -> bool:
        """Below a list that leaves room for it; True where that is new."""
        room = self.size.height - len(self._rows) - 4
        is_below = bool(self._rows) and not self.has_class("wide") and room >= LEAST_BELOW
        is_new = is_below and not self.has_class("below")
        self.set_class(is_below, "below")
        self._table.styles.height = len(self._rows) + 2 if is_below else "1fr"
        return is_new

    def _tell_cause(self) -> None:
        """What is wrong with the run under the cursor, on two lines; on more its own page says it."""
        is_needed = self._is_by_trouble and not self._has_preview
        self._cause.set_class(is_needed, "open")
        if is_needed:
            chosen = self.chosen()
            self._cause.show(lambda width, _height: () if chosen is None else self._cause_lines(chosen[0], width))

    def _cause_lines(self, run: RunRow, width: int) -> list[Line]:
        assert self.snapshot is not None
        numbers = self.snapshot.numbers.get(run.id, RunNumbers())
        return at_most(2, wrapped(trouble(run, numbers, self.snapshot.at_s)[1], width))

    def _judge(self, text: str) -> None:
        """What is wrong with the filter stands above it, whole."""
        self._filter_fault = filter_fault(text, self.app.clock())
        lines = wrapped(self._filter_fault, max(20, self.size.width - 3), "bad")
        self._fault.set_class(bool(lines), "open")
        self._fault.styles.height = len(lines)
        self._fault.show(lambda _width, _height: lines)

    @property
    def _is_by_trouble(self) -> bool:
        return not SORTS[self._sort][1]

    def _sorted(self, snapshot: Snapshot) -> Sequence[RunRow]:
        if not self._is_by_trouble:
            return snapshot.runs
        none = RunNumbers()

        def badness(run: RunRow) -> tuple[int, bool]:
            """One that never started is no worse off than others that have ended, but somebody may want to know why."""
            rank, why = trouble(run, snapshot.numbers.get(run.id, none), snapshot.at_s)
            return -rank, run.state.is_final and not why

        return sorted(snapshot.runs, key=badness)

    def _empty_words(self) -> str:
        if self._where:
            return "No run passes the filter. Escape clears it."
        if self.snapshot is not None and self.snapshot.was_replaced:
            return "No runs: the database was replaced or emptied while this screen was open."
        if self.snapshot is not None and self.snapshot.num_others:
            number, key = self.snapshot.num_others, key_of("runs.kinds")
            others = "is 1 run of another kind" if number == 1 else f"are {number:,} runs of other kinds"
            return to_type(f"No training yet; there {others}: {key} lists every kind, as does draftyard ls --kind all.")
        if self.app.readonly:
            return to_type("No runs yet; draftyard smoke RECIPE is a beginning.")
        return to_type(f"No runs yet. {key_of('home.smoke')} climbs the first rungs, as does draftyard smoke RECIPE.")


def filter_fault(text: str, now_s: float) -> str:
    """Why the filter cannot be read, in one line; empty when it can."""
    try:
        compile_filter(text, now_s=now_s)
    except DraftyardError as error:
        return str(error).splitlines()[0]
    return ""
