"""One text by which a training job ended, and what it means."""

from dataclasses import dataclass, field
from typing import Any

GIB, MIB, KIB = 1024**3, 1024**2, 1024


def gib(number: float) -> int:
    return round(number * GIB)


def mib(number: float) -> int:
    return round(number * MIB)


@dataclass(frozen=True)
class Case:
    name: str
    kind: str | None
    text: str
    raised: str = ""  # class of the exception; empty: `text` is a log
    facts: dict[str, Any] = field(default_factory=dict)
    is_certain: bool = True
    is_echo: bool = False
