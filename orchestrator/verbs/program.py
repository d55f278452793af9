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

NAME = "draftyard"


def as_typed() -> str:
    """Its path from here, where it is not on PATH."""
    here = Path(sys.argv[0])
    if here.name != NAME or shutil.which(NAME) is not None:
        return NAME
    inside = here.absolute().is_relative_to(Path.cwd())
    return shlex.quote(str(here.absolute().relative_to(Path.cwd()) if inside else here.absolute()))


def speller(verbs: Iterable[str]) -> Callable[[str], str]:
    """Writes the commands in a text as they are typed here; anything else named draftyard stays."""
    program = as_typed()
    if program == NAME:
        return str
    command = re.compile(rf"(?<![\w./~-]){NAME}(?= (?:--\w|(?:{'|'.join(map(re.escape, verbs))})\b))")
    return lambda text: command.sub(lambda _: program, text)
