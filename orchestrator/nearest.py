"""The known words nearest to a mistyped one. Its library loads only when a word was wrong: `ls` must not pay for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from orchestrator.lazy import lazy

if TYPE_CHECKING:
    import difflib
else:
    difflib = lazy("difflib")


MAX_LISTED = 8


def nearest(word: str, known: Iterable[str]) -> str | None:
    """None where nothing is near."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return close[0] if close else None


def unknown(what: str, word: str, known: Iterable[str], *, hint: str | None = None) -> str:
    """What is said of a wrong word, in one line: `no recipe 'smollm'; known: own, smollm2; did you mean 'smollm2'?`.

    `hint`: what to do about it, where that is more than the nearest word.
    """
    names = list(known)
    near = None if hint else nearest(word, names)
    told = f"no {what} {word!r}; known: {listed(word, names) or 'none'}"
    return f"{told}; {hint or did_you_mean(near)}" if hint or near else told


def did_you_mean(near: str | None) -> str:
    return f"did you mean {near!r}?" if near else ""


def listed(word: str, known: Iterable[str]) -> str:
    """All that is known where it is little, else the few nearest and how many more: an error stays a line."""
    names = list(known)
    if len(names) <= MAX_LISTED + 1:  # "and 1 more" takes the room of the word it hides
        return ", ".join(names)
    close = difflib.get_close_matches(word, names, n=MAX_LISTED, cutoff=0.0)
    return f"{', '.join(close)} and {len(names) - len(close):,} more"
