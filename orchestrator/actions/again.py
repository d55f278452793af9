"""The command line that orders the same again, with everything about it that a person had typed.

One place for every line that says what to type next, so that none of them leads to another job. It loads nothing heavy:
pages of runs use it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.actions.log_text import inert
from orchestrator.store.rows import RunRow


@dataclass(frozen=True)
class Words:
    """What was typed; `env` are names alone, as values may be secret."""

    recipe: str
    branch: str | None  # None: the recipe's default
    hosts: Sequence[str]
    overrides: Sequence[str] = ()
    gpus: Sequence[str] = ()
    env: Sequence[str] = ()


def command_line(verb: str, words: Words, *more: str) -> str:
    """`draftyard VERB RECIPE …`, safe to print and to paste; `more` stands at its end."""
    line = ["draftyard", verb, words.recipe, *(["-b", words.branch] if words.branch else [])]
    line += [word for host in words.hosts for word in ("--host", host)]
    line += [word for override in words.overrides for word in ("--set", override)]
    line += ["--gpus", ",".join(words.gpus)] if words.gpus else []
    line += [word for key in sorted(words.env) for word in ("--env", key)]
    return shlex.join([inert(word) for word in [*line, *more]])


def no_such_gpu(word: str) -> str:
    """How a refusal begins to say it of a host; the page of the refused launch knows it by that."""
    return f"has no GPU {word};"


def words_of_run(run: RunRow, launch: Mapping[str, Any]) -> Words:
    """Those of a run, from the document of its launch, which is kept with the row; one brought from elsewhere tells less."""

    def listed(name: str) -> tuple[str, ...]:
        return tuple(str(item) for item in launch.get(name) or ())

    return Words(run.recipe, run.branch, run.hosts, listed("overrides"), listed("named_gpus"), listed("named_env"))
