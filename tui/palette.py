"""The command palette: every action that works now, found by typing a part of its words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input

from tui.field import Field
from tui.table import Column, Table


@dataclass(frozen=True)
class Command:
    words: str
    key: str  # how else it is reached; empty where only from here
    do: Callable[[], object]  # may be a coroutine's


class Palette(ModalScreen[None]):
    DEFAULT_CSS = """
    Palette { align: center top; background: $background 60%; }
    Palette > Vertical { width: 74; max-width: 96%; height: 16; max-height: 90%; margin-top: 2; padding: 0 1;
        background: $yard-raised; border: round $yard-accent; }
    Palette Input { height: 1; border: none; background: $yard-raised; padding: 0 1; }
    Palette Table { background: $yard-raised; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "Close", show=False, id="palette.close"),
        Binding("down", "move(1)", "Down", show=False, priority=True, id="palette.down"),
        Binding("up", "move(-1)", "Up", show=False, priority=True, id="palette.up"),
    ]

    def __init__(self, commands: Sequence[Command]) -> None:
        super().__init__()
        self._all = commands
        self._shown = list(commands)
        self._box = Field(compact=True, placeholder="what to do")
        self._table = Table((Column("", 0), Column("key", 10, right=True)), empty="Nothing of that name works here.")

    def compose(self) -> ComposeResult:
        with Vertical():
            yield self._box
            yield self._table

    def on_mount(self) -> None:
        self._show("")
        self._box.focus()

    def action_move(self, by: int) -> None:
        self._table.action_move(by)

    @on(Input.Changed)
    def narrow(self, event: Input.Changed) -> None:
        self._show(event.value)

    @on(Input.Submitted)
    @on(Table.Opened)
    def choose(self) -> None:
        if self._shown:
            command = self._shown[self._table.cursor]
            self.dismiss()
            self.app.call_later(command.do)

    def _show(self, text: str) -> None:
        parts = text.lower().split()
        self._shown = [command for command in self._all if all(part in command.words.lower() for part in parts)]
        self._table.set_rows(
            [command.words for command in self._shown],
            lambda row: ([(self._shown[row].words, "text")], [(self._shown[row].key, "muted")]),
        )
        self._table.action_ends(-1)
