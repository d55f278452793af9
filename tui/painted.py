"""What sheets and tables share: every line is painted straight to what the terminal gets, and kept until it says something else.

Textual composes each line of a widget anew from styles, borders, links and filters whenever its neighbours change, which
was most of what a key cost. Here a line has a ground, inks and blanks around it, nothing more. So a widget that paints this
way has padding, and no border.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.containers import Horizontal, Vertical
from textual.geometry import Region
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import ContentSwitcher

from orchestrator.actions.log_text import inert
from tui.theme import INKS
from tui.wording import fit


class Inked(dict[str, Style]):
    """Styles by meaning on one ground; `meaning` is a key of the theme's inks."""

    def __init__(self, theme: str, ground: Style) -> None:
        self._theme, self.ground = theme, ground
        self._others: dict[str, Inked] = {}

    def __missing__(self, meaning: str) -> Style:
        self[meaning] = style = self.ground + INKS[self._theme][meaning]
        return style

    def on(self, meaning: str) -> Inked:
        """The same inks on the ground of that meaning."""
        if meaning not in self._others:
            self._others[meaning] = Inked(self._theme, self[meaning])
        return self._others[meaning]


class Whole(Strip):
    """A line that is mostly painted as it is. Cut where it ends, it is its own only part, and Textual would keep it as that in
    itself: a cycle for every line ever painted, which only a collection frees."""

    __slots__ = ()

    def divide(self, cuts: Iterable[int]) -> Sequence[Strip]:
        cuts = list(cuts)
        return [self] if cuts == [self.cell_length] else super().divide(cuts)

    def crop(self, start: int, end: int | None = None) -> Strip:
        part = super().crop(start, end)
        if not isinstance(part, Whole):
            part = self._crop_cache[start, self.cell_length if end is None else end] = Whole(part, part.cell_length)
        return part


class Painted(ScrollView):
    """Its lines are those of `painted`; each is asked for again only where `said` differs."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._kept: dict[
            int, tuple[tuple[object, ...], Strip]
        ] = {}  # line of the screen -> what it said, as it was painted
        self._inked: tuple[str, Inked] | None = None  # the theme's name and its inks on the ground of this widget
        self._above = (
            0  # lines that are scrolled away, as of the last look: asking for them is a tenth of what a line costs
        )

    def said(self, y: int) -> object:
        """All that line `y` of the screen depends on, to be compared; `_above` lines are scrolled away."""
        raise NotImplementedError

    def painted(self, y: int, width: int, inks: Inked) -> Iterable[Segment]:
        """The line in segments, together exactly `width` cells."""
        raise NotImplementedError

    def notify_style_update(self) -> None:
        self._inked = None
        super().notify_style_update()

    def repaint_changed(self) -> None:
        """Asks for those lines anew that say something else than what is on the screen."""
        room, top = self.scrollable_content_region.size, self.styles.gutter.top
        self._above = int(self.scroll_offset.y)
        changed = []
        for y in range(room.height):
            known = self._kept.get(y + top)
            if known is None or known[0][0] != self.said(y):
                changed.append(Region(0, y, room.width, 1))
        if changed:
            self.refresh(*changed)

    def render_lines(self, crop: Region) -> list[Strip]:
        inks, outer = self._inks(), self.outer_size
        room, gutter, theme = self.scrollable_content_region.size, self.styles.gutter, self.app.theme
        self._above = int(self.scroll_offset.y)
        strips = []
        for y in crop.line_range:
            row = y - gutter.top
            is_blank = not (0 <= row < room.height)
            says = (None if is_blank else self.said(row), outer.width, room.width, theme)
            known = self._kept.get(y)
            if known is None or known[0] != says:
                pieces = () if is_blank else self.painted(row, room.width, inks)
                known = self._kept[y] = (says, self._strip(pieces, gutter.left, room.width, outer.width, inks))
            strips.append(known[1])
        if crop.column_span != (0, outer.width):
            return [strip.crop(*crop.column_span) for strip in strips]
        return strips

    def _strip(self, pieces: Iterable[Segment], left: int, width: int, outer_width: int, inks: Inked) -> Strip:
        """The line between the blanks at its sides, through what every line passes on its way to the terminal."""
        line = [Segment(" " * left, inks.ground), *pieces] if left else list(pieces)
        after = outer_width - left - (width if line[left > 0 :] else 0)
        strip = Strip([*line, Segment(" " * after, inks.ground)] if after > 0 else line, outer_width)
        for line_filter in self.get_line_filters():
            strip = strip.apply_filter(line_filter, self.background_colors[1])
        return Whole(strip, outer_width)

    def _inks(self) -> Inked:
        theme = self.app.theme
        if self._inked is None or self._inked[0] != theme:
            self._inked = (theme, Inked(theme, self.rich_style))
        return self._inked[1]


class Bare(Widget):
    """What only holds others: its ground in one blank strip for all lines, most of which nobody sees. It has no border.

    Comes after the container whose layout a class takes: Textual inherits styles from the first base alone.
    """

    _blank: tuple[str, int, Strip] | None = None

    def notify_style_update(self) -> None:
        self._blank = None
        super().notify_style_update()

    def render_lines(self, crop: Region) -> list[Strip]:
        theme = self.app.theme
        if self._blank is None or self._blank[:2] != (theme, crop.width):
            strip = Strip([Segment(" " * crop.width, self.rich_style)], crop.width)
            for line_filter in self.get_line_filters():
                strip = strip.apply_filter(line_filter, self.background_colors[1])
            self._blank = (theme, crop.width, Whole(strip, crop.width))
        return [self._blank[2]] * crop.height


class Rows(Vertical, Bare):
    """Others one below the other."""


class Columns(Horizontal, Bare):
    """Others side by side."""


class Pages(ContentSwitcher, Bare):
    """Others of which one is seen."""


def segments(line: Iterable[tuple[str, str]], width: int, inks: Inked) -> list[Segment]:
    """Pieces of text with a meaning, cut or padded to `width` cells.

    Control characters end here: nothing a name or a log holds reaches the terminal.
    """
    safe, room = [], width
    for text, meaning in line:
        piece, size = cut(text, room)
        if size:
            safe.append((piece, inks[meaning]))
        room -= size
        if not room:
            break
    if room:
        safe.append((" " * room, inks.ground))
    return joined(safe)


def cut(text: str, room: int) -> tuple[str, int]:
    """The text without control characters, of at most `room` cells, and how many it has."""
    safe = inert(text)
    size = len(safe) if safe.isascii() else cell_len(safe)
    return (fit(safe, room), room) if size > room else (safe, size)


def joined(pieces: Iterable[tuple[str, Style]]) -> list[Segment]:
    """Neighbours of one style are one segment: what a line costs to paint is by segments, not by cells."""
    found: list[Segment] = []
    words, ink = "", None
    for text, style in pieces:
        if style is ink:
            words += text
            continue
        if words:
            found.append(Segment(words, ink))
        words, ink = text, style
    return [*found, Segment(words, ink)] if words else found
