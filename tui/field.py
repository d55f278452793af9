"""A line to type into: Textual's, which would let escape sequences of a pasted text reach the terminal. Several words in one line
are written as a shell takes them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

from textual import events
from textual.widgets import Input

from orchestrator.actions.log_text import inert
from orchestrator.errors import UsageError
from tui.wording import MOST_SHOWN, short

MOST_LETTERS = 4000  # of a line; each key behind 100,000 letters took seconds


class Field(Input):
    DEFAULT_CSS = """
    Field, Field:focus { background-tint: transparent; }
    Field > .input--placeholder, Field:ansi > .input--placeholder { color: $yard-muted; text-style: none; }
    Field:ansi > .input--cursor { background: ansi_default; color: ansi_default; text-style: reverse; }
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(max_length=MOST_LETTERS, **settings)

    async def _on_key(self, event: events.Key) -> None:
        """Editing keys act at once. Left to travel up to the app, they would act after letters typed behind them."""
        for binding in self._bindings.key_to_bindings.get(event.key, ()):
            event.stop()
            event.prevent_default()
            await self.run_action(binding.action)
            return

    def _on_paste(self, event: events.Paste) -> None:
        """Comes before Textual's own handler, which inserts the text. Half of a paste is nothing that anybody has meant."""
        event.text = inert(event.text.encode("utf-8", "replace").decode())
        if len(self.value) + len(event.text) > MOST_LETTERS:
            event.stop()
            event.prevent_default()
            told = f"One line takes {MOST_LETTERS:,} letters at most; nothing was pasted."
            self.app.notify(told, severity="warning", timeout=6)


def typed(words: Iterable[str]) -> str:
    """The words in one line: those with blanks or quotes of their own in quotes."""
    return shlex.join(words)


def words_of(line: str) -> tuple[str, ...]:
    """What `typed` wrote, or a person. Raises UsageError for a quote that is open."""
    try:
        return tuple(shlex.split(line))
    except ValueError:
        raise UsageError(
            f"a quote is open in {short(line, MOST_SHOWN)}; close it, or write a backslash before the sign itself"
        ) from None
