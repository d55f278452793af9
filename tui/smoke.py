"""The smoke matrix: branches by rungs with peak memory and time; below it the row under the cursor in full.

Up and down choose a branch, left and right a rung. It reads nothing and judges nothing: what counts
is the gate's to say, which looks at the host first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from orchestrator.actions.rungs import ladder
from tui.home import HomeScreen
from tui.ordering import Wish, smoke, told_again
from tui.pieces import Piece
from tui.sheet import Sheet
from tui.smoke_rows import Row, columns, nothing_lines, row_cells, rows_of, rung_lines, rung_names
from tui.snapshot import Ask, Snapshot
from tui.table import Cells, Column, Table

WIDE = 130  # cells from which on a rung's time stands beside its peak


class SmokeScreen(HomeScreen):
    NAME = "smoke"
    DEFAULT_CSS = """
    SmokeScreen #matrix { height: 4; }
    SmokeScreen #rungs { padding: 1 1 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("m", "climb('missing')", "run missing", id="smoke.missing"),
        Binding("R", "climb('one')", "run one", id="smoke.one"),
        Binding("a", "climb('all')", "run all again", id="smoke.again"),
        Binding("right", "choose(1)", "rung", key_display="←→", tooltip="Rung after", id="smoke.right"),
        Binding("left", "choose(-1)", "Rung before", show=False, id="smoke.left"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._rows: list[Row] = []
        self._names: tuple[str, ...] = ladder()
        self._rung = 0  # which of the names is chosen
        self._has_times = False
        self._shown: tuple[Column, ...] = ()
        self._table = Table(
            columns(self._names, (), with_times=False),
            empty="No rung has been climbed yet.",
            id="matrix",
        )
        self._sheet = Sheet(id="rungs", classes="scrolls", can_focus=True)

    def body(self) -> ComposeResult:
        yield self._table
        yield self._sheet

    def on_mount(self) -> None:
        self._table.focus()

    def ask(self) -> Ask:
        return Ask(wants_list=False, wants_evidence=True)

    def present(self, snapshot: Snapshot) -> None:
        self._rows = rows_of(snapshot.evidence, snapshot.live, snapshot.wanted)
        self._names, self._has_times = rung_names(self._rows) or ladder(), self.size.width >= WIDE
        self._rung = min(self._rung, len(self._names) - 1)
        self._table.styles.height = min(max(1, len(self._rows)) + 2, max(4, self.size.height // 2))
        self._draw()

    def on_resize(self, event: events.Resize) -> None:
        if self.snapshot is not None:
            self.present(self.snapshot)

    def told(self) -> Sequence[Piece]:
        climbing = [run for run in self.snapshot.live if run.kind == "smoke"] if self.snapshot else []
        peaks: list[Piece] = [] if self._has_times else [(" peaks in GiB", "muted")]
        return [*peaks, *([(f"  climbing now: {len(climbing)}", "live")] if climbing else [])]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Where nobody has climbed there is nothing to choose or to climb again."""
        return super().check_action(action, parameters) and not (action in ("choose", "climb") and not self._rows)

    def action_choose(self, by: int) -> None:
        self._rung = max(0, min(len(self._names) - 1, self._rung + by))
        self._draw()

    def action_climb(self, what: str) -> None:
        """The missing rungs, all again, or the chosen one whether it has passed or not."""
        row = self._chosen()
        if row is None or not self.app.may_act():
            return
        rungs = (self._names[self._rung],) if what == "one" else ()
        self.app.notify(f"smoke {row.key}: looking at the host", timeout=4)
        self.app.do_beside(lambda: self._climb(row, rungs, again=what == "all"), group="smoke")

    def _climb(self, row: Row, rungs: tuple[str, ...], *, again: bool) -> None:
        """By what the newest smoke run there was told; of one that is gone, by the names that are left."""
        assert self.app.places is not None
        wish = told_again(self.app.places, row.newest_run) or Wish(row.recipe, row.branch, row.host)
        run_id = smoke(self.app.places, wish, self.app.tell_from_thread, rungs=rungs, again=again)
        self.app.tell_from_thread(f"smoke run {run_id} started" if run_id else "nothing is missing; a runs all again")

    @on(Table.Moved)
    def moved(self) -> None:
        self._draw()

    @on(Table.Opened)
    def opened(self) -> None:
        """The smoke run that climbs there now, else the one that told of the chosen rung."""
        row = self._chosen()
        item = row.rungs.get(self._names[self._rung]) if row else None
        run_id = row.climbing.id if row and row.climbing else item.run_id if item else None
        if run_id is not None:
            self.app.open_run(run_id)

    def _chosen(self) -> Row | None:
        return self._rows[self._table.cursor] if self._rows else None

    def _draw(self) -> None:
        """The matrix with the chosen rung marked, and the row under the cursor."""
        snapshot = self.snapshot
        if snapshot is None:
            return
        rows, names, rung = self._rows, self._names, self._names[self._rung]

        def draw(index: int) -> Cells:
            chosen = rung if index == self._table.cursor else ""
            return row_cells(rows[index], names, chosen, with_times=self._has_times)

        self._table.set_rows([row.key for row in rows], draw)
        row = self._chosen()
        shown = columns(names, row.names(names) if row else (), with_times=self._has_times)
        if shown != self._shown:
            self._shown = shown
            self._table.set_columns(shown)
        plan = snapshot.plans.get(row.key, {}) if row else {}
        self._sheet.show(
            lambda width, _height: (
                nothing_lines(width) if row is None else rung_lines(row, names, rung, plan, snapshot.at_s, width)
            )
        )
