"""A question before something that could lose work: it names what it is about; only `y` does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical

from tui.dialogue import Dialogue
from tui.pieces import BLANK, Line, wrapped
from tui.sheet import Sheet


class Confirm(Dialogue[bool]):
    DEFAULT_CSS = """
    Confirm { align: center middle; }
    Confirm > Vertical { width: 66; max-width: 96%; height: auto; padding: 1 2; background: $yard-raised; border: round $yard-warn; }
    Confirm Sheet { background: $yard-raised; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes", id="confirm.yes"),
        Binding("n,escape,q", "answer(False)", "no", id="confirm.no"),
    ]

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__()
        self._question = lines

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Sheet()

    def on_mount(self) -> None:
        self._show()

    def ask(self, lines: Sequence[str]) -> None:
        """The same question in other words, once more is known of what it is about."""
        self._question = lines
        if self.query(Sheet):  # neither before it stands there nor after its answer
            self._show()

    def _show(self) -> None:
        width = min(66, self.app.size.width * 96 // 100) - 6  # what the border and the padding leave
        sheet = self.query_one(Sheet)
        sheet.styles.height = len(self._lines(width))
        sheet.show(lambda width, _height: self._lines(width))

    def action_answer(self, is_yes: bool) -> None:
        self.dismiss(is_yes)

    def _lines(self, width: int) -> list[Line]:
        first, *rest = self._question
        told: list[Line] = [[(first, "strong")], *(part for line in rest for part in wrapped(line, width))]
        return [*told, BLANK, [("y", "key"), (" yes   ", "muted"), ("n", "key"), (" no", "muted")]]
