"""The command line that orders the same again, with everything about it that a person had typed.

One place for every line that says what to type next, so that none of them leads to another job. It loads nothing heavy:
pages of runs use it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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


def try_line(words: Words, setting: Mapping[str, str], changes: Sequence[Sequence[str]], *, newer: str) -> str:
    """What climbs the rungs with the first suggestion: the setting, else the first of the changes, each the overrides of one.

    Where --try would take the `newer` run's, that one is spelled out on top of the run's own `words`.
    """
    what = "it" if setting else "the first of these"
    env = [name for name in words.env if name not in setting]  # what is typed would win over the suggestion
    if not newer:  # --try takes the run's own overrides as well
        rest = "; N for the Nth" if changes else ""
        return f"{command_line('smoke', replace(words, overrides=(), env=env), '--try', '1')}    # the rungs with {what}{rest}"
    if setting:
        line = command_line("smoke", replace(words, env=[*env, *assigned(setting)]))
    else:
        line = command_line("smoke", replace(words, overrides=(*words.overrides, *changes[0])))
    return f"{line}    # the rungs with {what}; --try takes those of run {newer}, a newer one"


def assigned(setting: Mapping[str, str]) -> list[str]:
    """As `--env` takes them."""
    return [f"{name}={value}" for name, value in setting.items()]


def no_such_gpu(word: str) -> str:
    """How a refusal begins to say it of a host; the page of the refused launch knows it by that."""
    return f"has no GPU {word};"


def words_of_run(run: RunRow, launch: Mapping[str, Any]) -> Words:
    """Those of a run, from the document of its launch, which is kept with the row; one brought from elsewhere tells less."""

    def listed(name: str) -> tuple[str, ...]:
        return tuple(str(item) for item in launch.get(name) or ())

    return Words(run.recipe, run.branch, run.hosts, listed("overrides"), listed("named_gpus"), listed("named_env"))
