"""The lines of one piece of a log: scrolling, wrapping, highlighting; what lies beyond is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from rich.cells import cell_len, chop_cells
from textual import events

from orchestrator.actions.log_text import LogLine, group_ranks
from tui.log_page import LogPage
from tui.pieces import Line, Piece, fitted
from tui.searcher import Span
from tui.sheet import Sheet


class LogSheet(Sheet):
    """`wanted` is the piece to read next: (start, None), (None, end), or (None, None) for the newest."""

    def __init__(self, *, id: str, classes: str) -> None:
        super().__init__(id=id, classes=classes, can_focus=True)
        self._set_out()

    def begin(self) -> None:
        self._set_out()
        super().begin()

    def _set_out(self) -> None:
        """At the newest lines of no log yet."""
        self.is_following = True
        self.wanted: tuple[int | None, int | None] = (None, None)
        self._page: LogPage | None = None
        self._has_ended = False
        self._rows: list[tuple[LogLine, int, int]] = []  # a screen row: its line, and from where to where of its text
        self._is_wrapped = False
        self._has_ranks_grouped = True
        self._shift = 0  # columns to the left of the sheet when lines are not wrapped
        self._marked: Callable[[str], Sequence[Span]] = _nothing
        self._anchor: tuple[int, int] | None = None  # (offset of a line, row of the sheet it shall stand on)
        self._target: int | None = None  # the line a search found

    def present(self, page: LogPage, *, has_ended: bool = False) -> None:
        """`has_ended`: nothing more will be printed there."""
        self._has_ended = has_ended
        if self._page is not None and (page.stream, page.attempt) != (self._page.stream, self._page.attempt):
            self._anchor = self._target = None
        self._page = page
        self.show(self._draw_rows)
        if self.is_following:
            self.scroll_end(animate=False, force=True, immediate=True)
        elif self._anchor is not None:
            offset, row = self._anchor
            self._anchor = None
            self.scroll_to(y=self._row_of(offset) - row, animate=False, force=True, immediate=True)

    def follow(self, is_on: bool) -> None:
        self.is_following = is_on
        self._target = None
        if is_on:
            self.wanted = (None, None)
            self.scroll_end(animate=False, force=True, immediate=True)
        else:
            self._hold()

    def go_to(self, offset: int) -> None:
        """Shows the line at this byte, two rows below the top, from the page or from the file."""
        self.is_following = False
        self._target = offset
        page = self._page
        if page is not None and page.start <= offset < page.end:
            self.scroll_to(y=self._row_of(offset) - 2, animate=False, force=True, immediate=True)
            self._hold()
        else:
            self.wanted = (offset, None)
            self._anchor = (offset, 0)
        self.lines = ()
        self.redraw()

    def toggle_wrap(self) -> None:
        self._is_wrapped, self._shift = not self._is_wrapped, 0
        self._again()

    def toggle_ranks(self) -> None:
        self._has_ranks_grouped = not self._has_ranks_grouped
        self._again()

    def highlight(self, marked: Callable[[str], Sequence[Span]] | None) -> None:
        """`marked` tells what of a line's text is to be seen."""
        self._marked = marked or _nothing
        self.redraw()

    def texts(self) -> set[str]:
        """What the piece says, line by line."""
        return {line.text for line, _, _ in self._rows}

    def top_offset(self) -> int:
        """The byte of the first line in sight."""
        if self._target is not None:
            return self._target
        row = int(self.scroll_offset.y)
        if row < len(self._rows):
            return self._rows[row][0].start
        return self._page.end if self._page else 0

    def offset_after(self, offset: int) -> int:
        """The byte after the line that begins at `offset`."""
        later = (line.start for line, _, _ in self._rows if line.start > offset)
        return next(later, self._page.end if self._page else offset)

    def visible_text(self) -> str:
        top = int(self.scroll_offset.y)
        return "\n".join(line.text[first:last] for line, first, last in self._rows[top : top + self.size.height])

    # ----------------------------------------------------------- scrolling

    def action_scroll_up(self) -> None:
        self._by(-1)

    def action_scroll_down(self) -> None:
        self._by(1)

    def action_page_up(self) -> None:
        self._by(1 - self.size.height)

    def action_page_down(self) -> None:
        self._by(self.size.height - 1)

    def action_scroll_home(self) -> None:
        self.is_following, self._target = False, None
        self.wanted, self._anchor = (0, None), (0, 0)
        self._ask()

    def action_scroll_end(self) -> None:
        self.follow(True)
        self._ask()

    def action_scroll_left(self) -> None:
        self._shift = max(0, self._shift - 20)
        self.redraw()

    def action_scroll_right(self) -> None:
        if not self._is_wrapped:
            self._shift += 20
            self.redraw()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self._by(-3)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self._by(3)

    def _by(self, rows: int) -> None:
        """Moves within the page; at its ends asks for the piece that goes on, with this line in its place."""
        page, top, bottom = self._page, int(self.scroll_offset.y), self.max_scroll_y
        self._target = None
        if page is None:
            return
        if rows < 0 and top + rows < 0 and page.start > 0:
            self.is_following = False
            line = self._rows[min(top + self.size.height, len(self._rows) - 1)][0]
            self.wanted = (None, self.offset_after(line.start))
            self._anchor = (self._rows[top][0].start, -rows)
            self._ask()
            return
        if rows > 0 and top + rows > bottom and not page.is_at_end:
            self.wanted = (self._rows[top][0].start, None)
            self._anchor = (self._rows[top][0].start, -rows)
            self._ask()
            return
        if rows < 0 and top > 0:
            self.is_following = False
            self._hold()
        self.scroll_to(y=top + rows, animate=False, force=True, immediate=True)
        if rows > 0 and page.is_at_end and top + rows >= bottom:
            self.is_following = True
            self.wanted = (None, None)
        self._ask()

    def _hold(self) -> None:
        """The piece on the screen stays the piece that is read, however the file grows."""
        if self._page is not None:
            self.wanted = (self._page.start, None)

    def _ask(self) -> None:
        self.app.ask_now()  # type: ignore[attr-defined]

    # ------------------------------------------------------------- drawing

    def _again(self) -> None:
        top = self.top_offset()
        self.lines = ()
        self.redraw()
        self.refresh()
        if self.is_following:
            self.scroll_end(animate=False, force=True, immediate=True)
        else:
            self.scroll_to(y=self._row_of(top), animate=False, force=True, immediate=True)

    def _row_of(self, offset: int) -> int:
        return next((row for row, (line, _, _) in enumerate(self._rows) if line.start >= offset), len(self._rows) - 1)

    def _draw_rows(self, width: int, _height: int) -> Sequence[Line]:
        page = self._page
        if page is None or not page.lines:
            self._rows = []
            return [[("It printed nothing." if self._has_ended else "Nothing has been printed yet.", "muted")]]
        lines = group_ranks(page.lines) if self._has_ranks_grouped else page.lines
        self._rows = []
        for line in lines:
            if self._is_wrapped and cell_len(_times(line) + line.text) > width:
                self._rows += _folded(line, width)
            else:
                self._rows.append((line, self._shift, self._shift + width))
        return [self._row(line, first, last, width) for line, first, last in self._rows]

    def _row(self, line: LogLine, first: int, last: int, width: int) -> Line:
        if self._is_wrapped or last >= len(line.text):
            return self._row_pieces(line, first, last)
        return fitted(self._row_pieces(line, first, last + 1), width)  # its end says that there is more

    def _row_pieces(self, line: LogLine, first: int, last: int) -> Line:
        meaning = "bad" if line.is_error else "text"
        pieces: list[Piece] = [(_times(line), "muted")] if first == 0 else []
        position, last = first, min(last, len(line.text))
        for start, end in self._marked(line.text):
            start, end = max(start, position), min(end, last)
            if start < end:
                pieces += [(line.text[position:start], meaning), (line.text[start:end], "match")]
                position = end
        return [*pieces, (line.text[position:last], meaning)]


def _nothing(_text: str) -> Sequence[Span]:
    return ()


def _times(line: LogLine) -> str:
    """How many ranks say the same."""
    return f"×{line.num_times} " if line.num_times > 1 else ""


def _folded(line: LogLine, width: int) -> list[tuple[LogLine, int, int]]:
    """Rows of at most so many cells, what stands before the first one included."""
    ends = list(accumulate(len(part) for part in chop_cells(_times(line) + line.text, width)))
    places = [0, *(end - len(_times(line)) for end in ends)]
    return [(line, first, last) for first, last in pairwise(places)]
