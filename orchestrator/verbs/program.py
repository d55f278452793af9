"""How this program is called in the shell it came from: a command that is printed works there as it stands.

`make demo` in a fresh clone has `.venv/bin/draftyard` and no activated environment. Only what is typed is changed: commands
in prose and pages, never JSON.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.actions.log_text import inert

if TYPE_CHECKING:
    from orchestrator.actions.history import RunPage

NAME = "draftyard"


def as_typed() -> str:
    """Its path from here, where it is not on PATH."""
    here = Path(sys.argv[0])
    if here.name != NAME or shutil.which(NAME) is not None:
        return NAME
    inside = here.absolute().is_relative_to(Path.cwd())
    return shlex.quote(str(here.absolute().relative_to(Path.cwd()) if inside else here.absolute()))


def sparing(spell: Callable[[str], str], theirs: Iterable[str]) -> Callable[[str], str]:
    """The same but for what people and their jobs have written: each line of theirs is kept, wherever it stands."""
    kept = {inert(line) for text in theirs for line in text.splitlines() if NAME in line}
    if not kept:
        return spell
    found = re.compile(f"({'|'.join(re.escape(line) for line in sorted(kept, key=len, reverse=True))})")

    def spelled(text: str) -> str:
        parts = found.split(text)
        parts[::2] = map(spell, parts[::2])
        return "".join(parts)

    return spelled


def words_of_others(page: RunPage) -> list[str]:
    """What people and their jobs have written on a run's page."""
    run = page.run
    jobs = [text for failure in page.failures for text in (failure.message, failure.traceback)]
    return [run.why, run.note, run.forced_reason or "", *run.tags, *jobs]


def speller(verbs: Iterable[str]) -> Callable[[str], str]:
    """Writes the commands in a text as they are typed here; anything else named draftyard stays."""
    program = as_typed()
    if program == NAME:
        return str
    command = re.compile(rf"(?<![\w./~-]){NAME}(?= (?:--\w|(?:{'|'.join(map(re.escape, verbs))})\b))")
    return lambda text: command.sub(lambda _: program, text)
