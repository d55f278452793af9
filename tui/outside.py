"""What a person is told to type outside the screens, spelled as the shell that opened them finds this program.

Set once, by who opens the screens, as every line that is drawn may need it, in whichever thread that is. It changes our own words
alone: what people and their jobs have written never comes here, nor what a document holds for programs.
"""

from __future__ import annotations

from collections.abc import Callable

_spelled: list[Callable[[str], str]] = [str]


def spell_with(spell: Callable[[str], str]) -> None:
    """From now on commands in a text are spelled by this."""
    _spelled[:] = [spell]


def to_type(text: str) -> str:
    """The text with its commands as they are typed out there; before it is wrapped, as a command may be broken over lines."""
    return _spelled[0](text)
