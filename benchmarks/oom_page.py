"""What the twelve programs came to on a card, as docs/benchmarks.md has it.

    python -m benchmarks.oom_page

The source is benchmarks/measured/oom.json: of the run that its header names, what was known, what was named and with which
words, the first suggestion and whether the program then ran. `benchmarks.oom` makes such rows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.oom import PROGRAMS

MEASURED = Path(__file__).parent / "measured" / "oom.json"
_HEAD = "| program | known cause | named as | the first suggestion | ran | s |\n|---|---|---|---|---|---|"


@dataclass(frozen=True)
class Row:
    """One program, as a card had it."""

    name: str
    cause: str
    named: str
    told: str  # more of what was said of the cause; may be empty
    suggestion: str
    ran: bool  # with it
    seconds: float

    @property
    def is_right(self) -> bool:
        return self.named == self.cause


def measured_rows(path: Path = MEASURED) -> list[Row]:
    return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]


def page(rows: list[Row]) -> str:
    """A table, a row a program."""
    what = {program.name: program.what for program in PROGRAMS}
    return "\n".join([_HEAD, *(_line(row, what[row.name]) for row in rows)]) + "\n"


def score(rows: list[Row]) -> str:
    """The sentence above it."""
    right, ran, num = sum(row.is_right for row in rows), sum(row.ran for row in rows), len(rows)
    return f"Named right: {right} of {num}; with the first suggestion {ran} of {num} then ran."


def _line(row: Row, what: str) -> str:
    named = f"{row.named}: {row.told}" if row.told else row.named
    ran = "yes" if row.ran else "NO"
    return f"| {row.name}: {what} | {row.cause} | {named} | {row.suggestion} | {ran} | {row.seconds:.0f} |"


if __name__ == "__main__":
    print(page(measured_rows()) + "\n" + score(measured_rows()))
