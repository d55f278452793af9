"""A pane of lines: drawn by a function of its size, scrolled when longer, redrawn where it changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from tui.pieces import BLANK, Line, to_strip
from tui.theme import INKS

Draw = Callable[[int, int], Sequence[Line]]  # width, height -> lines


def _nothing(_width: int, _height: int) -> Sequence[Line]:
    return ()


class Sheet(ScrollView):
    """Shows what `draw` returns; only lines that differ from the screen are painted again."""

    DEFAULT_CSS = """
    Sheet { height: 1fr; scrollbar-size-vertical: 1; scrollbar-size-horizontal: 0; overflow-x: hidden; overflow-y: auto; }
    Sheet.scrolls { scrollbar-gutter: stable; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "scroll_down", "Down", show=False, id="sheet.down"),
        Binding("up,k", "scroll_up", "Up", show=False, id="sheet.up"),
        Binding("pagedown,ctrl+d,space", "page_down", "Page down", show=False, id="sheet.page_down"),
        Binding("pageup,ctrl+u", "page_up", "Page up", show=False, id="sheet.page_up"),
        Binding("home,g", "scroll_home", "Top", show=False, id="sheet.top"),
        Binding("end,G", "scroll_end", "End", show=False, id="sheet.end"),
    ]

    def __init__(self, *, id: str | None = None, classes: str | None = None, can_focus: bool = False) -> None:
        super().__init__(id=id, classes=classes)
        self.can_focus = can_focus
        self._draw: Draw = _nothing
        self.lines: Sequence[Line] = ()
        self._drawn_for: Size | None = None  # the size that the lines were drawn for
        self._ground: Style | None = None  # of the lines painted now

    def show(self, draw: Draw) -> None:
        """Draws with this function from now on, at once and at every new size."""
        self._draw = draw
        self.redraw()

    def redraw(self) -> None:
        before = self.lines
        width, height = room = self.scrollable_content_region.size
        if not width:
            self._drawn_for = None
            return
        self.lines, self._drawn_for = self._draw(width, height), room
        size = Size(width, len(self.lines))
        if size != self.virtual_size:
            self.virtual_size = size
        top = self.scroll_offset.y
        for y in range(height):
            row = y + top
            old = before[row] if row < len(before) else BLANK
            new = self.lines[row] if row < len(self.lines) else BLANK
            if old != new:
                self.refresh(Region(0, y, width, 1))

    def on_resize(self, _: events.Resize) -> None:
        self.redraw()
        self.refresh()

    def render_lines(self, crop: Region) -> list[Strip]:
        """Textual works out the ground anew whenever it is asked: once for all lines is a third less for each."""
        self._ground = None
        room = self.scrollable_content_region.size
        if room.width and self._drawn_for is None:  # a screen is painted first, and told its size then
            self.lines, self._drawn_for = self._draw(room.width, room.height), room
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        row = y + self.scroll_offset.y
        line = self.lines[row] if row < len(self.lines) else BLANK
        width = self.scrollable_content_region.width
        self._ground = self._ground or self.rich_style
        return to_strip(line, width, INKS[self.app.theme], base=self._ground)
