"""What lies over a screen (a question, help, the palette): the screen below it shows through, dimmed.

Textual dims every piece of text of the screen below anew at each of its paints: 30 ms of 60 that opening the palette took.
Here a style is dimmed once.
"""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.renderables.background_screen import BackgroundScreen
from textual.screen import ModalScreen, ScreenResultType
from textual.strip import Strip

from tui.painted import Whole


class Dialogue(ModalScreen[ScreenResultType]):
    DEFAULT_CSS = "Dialogue { background: $background 60%; }"

    def __init__(self) -> None:
        super().__init__()
        self._dimmed: dict[
            str, dict[Style | None, Style]
        ] = {}  # theme -> a style of the screen below -> as it shows through

    def render_lines(self, crop: Region) -> list[Strip]:
        stack = self.app.screen_stack
        below = stack[stack.index(self) - 1] if self in stack else self.app.screen
        dimmed = self._dimmed.setdefault(self.app.theme, {})
        lines = below._compositor.render_strips(self.size)[crop.y : crop.bottom]
        shown = [self._dim(line, dimmed).crop(*crop.column_span) for line in lines]
        # While the terminal changes its size the screen below may have fewer cells: a hole would end the program.
        shown = [line if line.cell_length == crop.width else line.adjust_cell_length(crop.width) for line in shown]
        return shown + [Strip.blank(crop.width)] * (crop.height - len(shown))

    def _dim(self, line: Strip, dimmed: dict[Style | None, Style]) -> Strip:
        for _, style, _ in line:
            if style not in dimmed:
                (piece,) = BackgroundScreen.process_segments([Segment(" ", style)], self.styles.background)
                dimmed[style] = piece.style or Style.null()
        return Whole([Segment(text, dimmed[style]) for text, style, _ in line], line.cell_length)
