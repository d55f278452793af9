"""One line to whoever waits for an action: what it does now, or what it had to leave out."""

from __future__ import annotations

from collections.abc import Callable

Tell = Callable[[str], None]


def silent(_: str) -> None:
    """Nobody wants to hear."""
