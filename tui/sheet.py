"""A pane of lines: drawn by a function of its size, scrolled when longer, redrawn where it changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.segment import Segment
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.strip import Strip

from tui.painted import Inked, Painted, segments
from tui.pieces import BLANK, Line

Draw = Callable[[int, int], Sequence[Line]]  # width, height -> lines


def _nothing(_width: int, _height: int) -> Sequence[Line]:
    return ()


class Sheet(Painted):
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

    def begin(self) -> None:
        """Empty, as when it was made."""
        self._draw, self.lines, self._drawn_for = _nothing, (), None
        self.scroll_to(y=0, animate=False, force=True, immediate=True)
        self.refresh()

    def show(self, draw: Draw) -> None:
        """Draws with this function from now on, at once and at every new size."""
        self._draw = draw
        self.redraw()

    def redraw(self) -> None:
        width, height = room = self.scrollable_content_region.size
        if not width:
            self._drawn_for = None
            return
        self.lines, self._drawn_for = self._draw(width, height), room
        size = Size(width, len(self.lines))
        if size != self.virtual_size:
            self.virtual_size = size
        self.repaint_changed()

    def on_resize(self, _: events.Resize) -> None:
        self.redraw()
        self.refresh()

    def render_lines(self, crop: Region) -> list[Strip]:
        room = self.scrollable_content_region.size
        if room.width and self._drawn_for is None:  # a screen is painted first, and told its size then
            self.lines, self._drawn_for = self._draw(room.width, room.height), room
        return super().render_lines(crop)

    def said(self, y: int) -> object:
        row = y + self._above
        return self.lines[row] if row < len(self.lines) else BLANK

    def painted(self, y: int, width: int, inks: Inked) -> list[Segment]:
        row = y + self._above
        return segments(self.lines[row] if row < len(self.lines) else BLANK, width, inks)
