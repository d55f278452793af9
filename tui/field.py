"""A line to type into: Textual's, which would let escape sequences of a pasted text reach the terminal. Several words in one line
are written as a shell takes them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from textual import events
from textual.widgets import Input

from orchestrator.actions.log_text import inert
from orchestrator.errors import UsageError


class Field(Input):
    DEFAULT_CSS = """
    Field, Field:focus { background-tint: transparent; }
    Field > .input--placeholder, Field:ansi > .input--placeholder { color: $yard-muted; text-style: none; }
    Field:ansi > .input--cursor { background: ansi_default; color: ansi_default; text-style: reverse; }
    """

    async def _on_key(self, event: events.Key) -> None:
        """Editing keys act at once. Left to travel up to the app, they would act after letters typed behind them."""
        for binding in self._bindings.key_to_bindings.get(event.key, ()):
            event.stop()
            event.prevent_default()
            await self.run_action(binding.action)
            return

    def _on_paste(self, event: events.Paste) -> None:
        """Comes before Textual's own handler, which inserts the text."""
        event.text = inert(event.text)


def typed(words: Iterable[str]) -> str:
    """The words in one line: those with blanks or quotes of their own in quotes."""
    return shlex.join(words)


def words_of(line: str) -> tuple[str, ...]:
    """What `typed` wrote, or a person. Raises UsageError for a quote that is open."""
    try:
        return tuple(shlex.split(line))
    except ValueError:
        raise UsageError(f"a quote is open in {line}; close it, or write a backslash before the sign itself") from None
