"""Help: every key that works on the screen below, what the letters of the states mean, the filter language."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical

from tui.dialogue import Dialogue
from tui.pieces import BLANK, Line, Piece, beside, heading, wrapped
from tui.sheet import Sheet
from tui.wording import STATES, fit, state_word

FILTER_EXAMPLES = (
    ("status:failed", "also lost, running and so on"),
    ("recipe:qwen* branch:ddtree", "both hold"),
    ("host:pve-a OR host:pve-b", "either"),
    ("NOT tag:old", "without"),
    ("loss<2.1", "newest value of a metric"),
    ("train.num_steps>=1000", "a value of the spec"),
    ("since:7d", "created in the last week"),
)


class KeysHelp(Dialogue[None]):
    DEFAULT_CSS = """
    KeysHelp { align: center middle; }
    KeysHelp > Vertical { width: 96; max-width: 98%; height: 34; max-height: 96%; padding: 0 1; background: $yard-raised; border: round $yard-line; }
    KeysHelp Sheet { background: $yard-raised; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,f1", "dismiss", "Close", show=False, id="help.close")
    ]

    def __init__(self, keys: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._keys = keys

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Sheet(classes="scrolls", can_focus=True)

    def on_mount(self) -> None:
        sheet = self.query_one(Sheet)
        sheet.show(lambda width, _height: help_lines(self._keys, width))
        sheet.focus()


def help_lines(keys: Sequence[tuple[str, str]], width: int) -> list[Line]:
    is_wide = width >= 84  # else one below the other, so that no word is cut
    column = (width - 3) // 2 if is_wide else width
    rows = [line for key, words in keys for line in _told((key, "key"), 16, words, column)]
    states: list[Line] = [heading("States", column)]
    states += [[(fit(letter, 4), meaning), (state_word(state), "text")] for state, (letter, meaning) in STATES.items()]
    states += [
        [(fit("O", 4), "bad"), ("failed, out of memory", "text")],
        [(fit("R?", 4), "warn"), ("running, host unreachable now", "text")],
        BLANK,
        heading("Filter, as ls takes it", column),
        *(line for example, words in FILTER_EXAMPLES for line in _told((example, "accent"), 27, words, column)),
        BLANK,
        [("Leaving the screen never stops a run.", "muted")],
    ]
    keys_there: list[Line] = [heading("Keys", column), *rows]
    return beside((keys_there, column), (states, column), gap=3) if is_wide else [*keys_there, BLANK, *states]


def _told(head: Piece, head_width: int, words: str, width: int) -> list[Line]:
    """The head in a column of its own, and what it means on as many lines as that takes."""
    told = wrapped(words, max(8, width - head_width - 1))
    heads: list[Piece] = [(fit(head[0], head_width), head[1]), *[(" " * head_width, "text")] * (len(told) - 1)]
    return [[first, *line] for first, line in zip(heads, told, strict=True)]
