"""A table that draws only the rows in sight, so that ten thousand rows cost what thirty do.

Columns have fixed widths (one may take the rest); when the screen is narrow the least important
leave. New rows are compared with what is on the screen, and only lines that changed are drawn again.
What a row says is worked out once for every set of rows: to compare it, and to paint it as often as the cursor passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.actions import SkipAction
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message

from orchestrator.actions.log_text import inert
from tui.painted import Inked, Painted, cut, joined, segments
from tui.pieces import wrapped
from tui.wording import fit

_UNDER_CURSOR = {"B": "Ⓑ"}  # a letter before a row, and the sign that says it and the cursor in one cell
Piece = tuple[str, str]  # text and meaning
Cells = Sequence[Sequence[Piece]]  # one sequence of pieces a column


@dataclass(frozen=True)
class Column:
    title: str
    width: int  # 0: takes what the others leave
    right: bool = False
    rank: int = 0  # the highest rank leaves first where there is no room
    least: int = 16  # of the column that takes the rest
    beyond: int = 0  # what that one has to have beyond its least before this one stands


def whole_width(columns: Sequence[Column]) -> int:
    """Cells of a table that shows all of them: a sign before them, a blank behind each, the scroll bar."""
    return 2 + _needed(columns)


def _needed(columns: Sequence[Column]) -> int:
    """Cells of the columns, a blank behind each."""
    return sum((column.width or column.least) + 1 + column.beyond for column in columns)


class Table(Painted, can_focus=True):
    """Rows by key, a cursor that stays on its key, marks beside it."""

    DEFAULT_CSS = """
    Table { height: 1fr; scrollbar-size-vertical: 1; scrollbar-size-horizontal: 0; overflow-x: hidden; scrollbar-gutter: stable; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", "Down", show=False, id="table.down"),
        Binding("up,k", "move(-1)", "Up", show=False, id="table.up"),
        Binding("pagedown,ctrl+d", "page(1)", "Page down", show=False, id="table.page_down"),
        Binding("pageup,ctrl+u", "page(-1)", "Page up", show=False, id="table.page_up"),
        Binding("home,g", "ends(-1)", "First", show=False, id="table.first"),
        Binding("end,G", "ends(1)", "Last", show=False, id="table.last"),
        Binding("enter", "open", "open", id="table.open"),
    ]

    class Moved(Message):
        def __init__(self, table: Table, key: str | None) -> None:
            self.table, self.key = table, key
            super().__init__()

    class Opened(Message):
        def __init__(self, table: Table, key: str) -> None:
            self.table, self.key = table, key
            super().__init__()

    def __init__(self, columns: Sequence[Column], *, empty: str, opens: str = "open", id: str | None = None) -> None:
        super().__init__(id=id)
        self._bindings.key_to_bindings["enter"] = [Binding("enter", "open", opens, id="table.open")]
        self._all_columns, self._empty = tuple(columns), empty
        self._keys: Sequence[str] = ()
        self._draw: Callable[[int], Cells] = lambda _: ()
        self._cells: dict[tuple[int, bool], Cells] = {}  # of the rows there are now, and under the cursor
        self._placed: tuple[tuple[int, Sequence[Column]], tuple[list[Column], list[int]]] | None = None
        self.cursor_key: str | None = None
        self.cursor = 0
        self._is_nowhere = False  # no row is chosen, whatever rows there are
        self.marks: set[str] = set()
        self._signed: tuple[str | None, str] = (None, "")  # a key and the letter before it

    @property
    def _width(self) -> int:
        """Cells of a row, the scroll bar's place left out."""
        return self.scrollable_content_region.width

    def set_rows(self, keys: Sequence[str], draw: Callable[[int], Cells], *, empty: str | None = None) -> None:
        """New rows; the cursor stays on its key, or near its place when the key has gone."""
        self._keys, self._draw, stood = keys, draw, self.cursor
        self._cells.clear()
        self._empty = self._empty if empty is None else empty
        if self.cursor_key is not None and not (self.cursor < len(keys) and keys[self.cursor] == self.cursor_key):
            self.cursor = keys.index(self.cursor_key) if self.cursor_key in keys else self.cursor
        size = Size(self._width, len(keys) + 1)
        if self.virtual_size != size:
            self.virtual_size = size
        if not self._is_nowhere:
            self._place(self.cursor)
        if self.cursor != stood:
            self._scroll_to_cursor()
        self.repaint_changed()

    def set_columns(self, columns: Sequence[Column]) -> None:
        if self._all_columns != tuple(columns):
            self._all_columns = tuple(columns)
            self._cells.clear()
            self.refresh()

    def go_to(self, key: str) -> None:
        """The cursor goes to the row with this key, one of those there are."""
        self._go(self._keys.index(key))

    def go_nowhere(self) -> None:
        """No row is chosen until somebody chooses one: the first key that moves shows the cursor on the first row."""
        before = self.cursor_key
        self.to_top()
        self._is_nowhere = True
        self.repaint_changed()
        if before is not None:
            self.post_message(self.Moved(self, None))

    def to_top(self) -> None:
        """The cursor goes to whatever row comes first from now on."""
        self.cursor, self.cursor_key, self._is_nowhere = 0, None, False
        self.scroll_to(y=0, animate=False, force=True, immediate=True)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return bool(self._keys) if action == "open" else super().check_action(action, parameters)

    def on_resize(self, _: events.Resize) -> None:
        self.virtual_size = Size(self._width, len(self._keys) + 1)
        self._scroll_to_cursor()

    def action_move(self, by: int) -> None:
        self._go(self.cursor + (0 if self._is_nowhere else by))

    def action_page(self, direction: int) -> None:
        self.action_move(direction * max(1, self.size.height - 2))

    def action_ends(self, direction: int) -> None:
        self._go(0 if direction < 0 else len(self._keys) - 1)

    def action_open(self) -> None:
        if self.cursor_key is None:
            raise SkipAction  # the screen may have a use for the key
        self.post_message(self.Opened(self, self.cursor_key))

    def sign(self, key: str | None, letter: str) -> None:
        """The one row of this key bears the letter, one of _UNDER_CURSOR."""
        self._signed = (key, letter)
        self.refresh()

    def toggle_mark(self) -> None:
        """Marks the row under the cursor, or takes its mark away, and goes one down."""
        if self.cursor_key is None:
            return
        self.marks ^= {self.cursor_key}
        self.refresh()
        self.action_move(1)

    def on_click(self, event: events.Click) -> None:
        row = event.y - 1 + self.scroll_offset.y
        if event.y >= 1 and row < len(self._keys):
            self._go(row)
            if event.chain == 2:
                self.action_open()

    def _go(self, index: int) -> None:
        before = self.cursor_key
        self._place(index)
        self._scroll_to_cursor()
        self.repaint_changed()
        if self.cursor_key != before:
            self.post_message(self.Moved(self, self.cursor_key))

    def _place(self, index: int) -> None:
        self._is_nowhere = False
        self.cursor = max(0, min(index, len(self._keys) - 1))
        self.cursor_key = self._keys[self.cursor] if self._keys else None

    def _is_at(self, row: int) -> bool:
        return row == self.cursor and not self._is_nowhere

    def _scroll_to_cursor(self) -> None:
        room = self.size.height - 1
        if room < 1:
            return
        top = self.scroll_offset.y
        target = min(max(top, self.cursor - room + 1), self.cursor)
        if target != top:
            self.scroll_to(y=target, animate=False, force=True, immediate=True)

    def said(self, y: int) -> object:
        if y == 0:
            return self._all_columns
        row = y - 1 + self._above
        if row >= len(self._keys):
            return (len(self._keys), self._empty)
        return (self._before(row), self._is_at(row), self._cells_of(row), self._all_columns)

    def _cells_of(self, row: int) -> Cells:
        place = (row, self._is_at(row))
        if place not in self._cells:
            self._cells[place] = tuple(tuple(cell) for cell in self._draw(row))
        return self._cells[place]

    def on_focus(self) -> None:
        self.repaint_changed()

    def on_blur(self) -> None:
        self.repaint_changed()

    def painted(self, y: int, width: int, inks: Inked) -> list[Segment]:
        columns, kept = self._columns(width)
        if y == 0:
            head = [(_aligned(column.title, column), "faint") for column in columns]
            return segments([(" ", "faint"), *head], width, inks)
        row = y - 1 + self._above
        if row >= len(self._keys):
            told = wrapped(self._empty, width - 4, "muted") if not self._keys and y >= 2 else []
            return segments([("   ", "muted"), *told[y - 2]] if 0 <= y - 2 < len(told) else (), width, inks)
        inks = inks.on("cursor_ground") if self._is_at(row) else inks
        cells, pieces = self._cells_of(row), [(self._before(row), inks["accent"])]
        room = width - 1
        for column, number in zip(columns, kept, strict=True):
            pieces += _cell(cells[number], column, inks)
            room -= column.width + 1
        if room < 0:  # of a screen that has no room for the least of them
            return segments([(self._before(row), "accent")], width, inks)
        return joined([*pieces, (" " * room, inks.ground)])

    def _before(self, row: int) -> str:
        """The sign before a row: its mark, its letter, the cursor; a mark or a letter under the cursor is another than beside it."""
        key = self._keys[row]
        is_here = self._is_at(row) and self.has_focus
        if key in self.marks:
            return "◉" if is_here else "●"
        if key == self._signed[0]:
            return _UNDER_CURSOR[self._signed[1]] if is_here else self._signed[1]
        return "▌" if is_here else " "

    def _columns(self, width: int) -> tuple[list[Column], list[int]]:
        """The columns there is room for, the one that takes the rest with its width, and which of all they are."""
        asked = (width, self._all_columns)
        if self._placed is None or self._placed[0] != asked:
            titles = [column.title for column in self._all_columns]
            placed = self._placed_in(width - 1)
            self._placed = (asked, (placed, [titles.index(column.title) for column in placed]))
        return self._placed[1]

    def _placed_in(self, room: int) -> list[Column]:
        kept = list(self._all_columns)
        while len(kept) > 1 and _needed(kept) > room:
            kept.remove(max(kept, key=lambda column: column.rank))
        rest = room - sum(column.width + 1 for column in kept)
        return [
            column if column.width else Column(column.title, max(rest, 1), column.right, column.rank) for column in kept
        ]


def _aligned(text: str, column: Column) -> str:
    return fit(inert(text), column.width, right=column.right) + " "


def _cell(pieces: Sequence[Piece], column: Column, inks: Inked) -> list[tuple[str, Style]]:
    """The pieces cut or padded to the column's width, and a blank behind it."""
    found, room = [], column.width
    for text, meaning in pieces:
        safe, size = cut(text, room)
        room -= size
        found.append((safe, inks[meaning]))
    padding = " " * room
    return (
        [(padding, inks["text"]), *found, (" ", inks["text"])]
        if column.right
        else [*found, (padding + " ", inks["text"])]
    )
