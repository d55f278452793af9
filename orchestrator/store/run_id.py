"""What a run may be called: the one check of every id before it becomes a row, a folder's name, a word in a shell.

Ids made here are eight letters and digits; a folder shipped by hand may carry a longer one of its own.
"""

from __future__ import annotations

import re

from orchestrator.errors import DraftyardError

LONGEST = 64
_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def check_run_id(text: str) -> str:
    """The id itself. Raises DraftyardError for anything that is more than a plain name."""
    if len(text) > LONGEST or _ID.fullmatch(text) is None:
        raise DraftyardError(
            f"{text[:LONGEST]!a} is no run id: lower-case letters, digits and single hyphens between them are due, "
            f"at most {LONGEST} characters"
        )
    return text
