"""The command palette: every action, found by typing a part of its words; of what cannot be done now it says why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from rich.cells import cell_len
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import Input

from tui.dialogue import Dialogue
from tui.field import Field
from tui.pieces import Line, Piece, fitted
from tui.sheet import Sheet
from tui.table import Column, Table


@dataclass(frozen=True)
class Command:
    name: str  # of its key, or `deed.` and the verb
    words: str
    key: str  # that does the same; empty where there is none
    do: Callable[[], object] = lambda: None  # may be a coroutine's
    why_not: str = ""  # why it cannot be done now
    is_far: bool = False  # it belongs elsewhere: listed where its words are typed
    also: str = ""  # other words it is found by, as the command line's verbs
    note: str = ""  # said of it below the list while it is chosen

    @property
    def found_by(self) -> str:
        return f"{self.words} {self.also}".lower()


class Palette(Dialogue[None]):
    DEFAULT_CSS = """
    Palette { align: center top; }
    Palette > Vertical { width: 96%; max-width: 120; height: 16; max-height: 90%; margin-top: 2; padding: 0 1;
        background: $yard-raised; border: round $yard-accent; }
    Palette Input { height: 1; border: none; background: $yard-raised; padding: 0 1; }
    Palette Table, Palette Sheet { background: $yard-raised; }
    Palette Sheet { height: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "Close", show=False, id="palette.close"),
        Binding("down", "move(1)", "Down", show=False, priority=True, id="palette.down"),
        Binding("up", "move(-1)", "Up", show=False, priority=True, id="palette.up"),
    ]

    def __init__(self, commands: Sequence[Command], *, hint: str = "what to do") -> None:
        super().__init__()
        self._all = commands
        self._shown = list(commands)
        self._box = Field(compact=True, placeholder=hint)
        keys = max([3, *(cell_len(command.key) for command in commands)])
        self._table = Table((Column("", 0), Column("key", keys, right=True)), empty="Nothing has that name.")
        self._why = Sheet()

    def compose(self) -> ComposeResult:
        with Vertical():
            yield self._box
            yield self._table
            yield self._why

    def on_mount(self) -> None:
        self._show("")
        self._why.show(lambda width, _height: [fitted(self._why_line(), width)])
        self._box.focus()

    def action_move(self, by: int) -> None:
        self._table.action_move(by)

    @on(Input.Changed)
    def narrow(self, event: Input.Changed) -> None:
        self._show(event.value)

    @on(Table.Moved)
    def tell_why(self) -> None:
        self._why.redraw()

    @on(Input.Submitted)
    @on(Table.Opened)
    def choose(self) -> None:
        command = self._chosen
        if command is None:
            return
        self.dismiss()
        told = partial(self.app.notify, f"{command.words}: {command.why_not}.", severity="warning")
        self.app.call_later(told if command.why_not else command.do)

    @property
    def _chosen(self) -> Command | None:
        return self._shown[self._table.cursor] if self._shown else None

    def _why_line(self) -> Line:
        command = self._chosen
        if command is None:
            return []
        return [(f"  Not now: {command.why_not}", "warn")] if command.why_not else [(f"  {command.note}", "muted")]

    def _show(self, text: str) -> None:
        parts = text.lower().split()
        found = [command for command in self._all if all(part in command.found_by for part in parts)]
        self._shown = [command for command in found if parts or not command.is_far]
        self._table.set_rows([command.name for command in self._shown], self._row)
        self._table.action_ends(-1)
        self._why.redraw()

    def _row(self, index: int) -> list[list[Piece]]:
        command = self._shown[index]
        return [[(command.words, "muted" if command.why_not else "text")], [(command.key, "muted")]]
