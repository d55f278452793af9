"""What the verb of a job says once it is started: its id and where to look, or, for whoever stays, how it ended.

However that saying ends (an interrupt, a stream that takes no more), the run goes on, and that is said where it can be.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from orchestrator import gate
from orchestrator.actions import history
from orchestrator.actions.again import command_line, words_of_run
from orchestrator.actions.log_text import inert
from orchestrator.lazy import lazy
from orchestrator.store.rows import RunRow, State
from orchestrator.verbs.frame import Terminal
from orchestrator.verbs.leads import in_short, next_steps
from orchestrator.verbs.life import GOES_ON, wait_shown, ways_back
from orchestrator.verbs.measured import ladder
from orchestrator.verbs.page import run_page
from orchestrator.verbs.program import words_of_others
from orchestrator.verbs.words import state_cell

if TYPE_CHECKING:
    from orchestrator.actions import life
    from orchestrator.actions.sending import Launched
else:
    life = lazy("orchestrator.actions.life")


def ended_or_detached(terminal: Terminal, started: Launched, *, detach: bool) -> None:
    """Raises click's Exit with the outcome's code for whoever stayed until the end."""
    with _told_anyway(terminal, started):
        if started.unmet:
            terminal.say("\n  ".join(["forced past the gate:", *gate.explain(started.unmet)]))
        if detach:
            _tell_start(terminal, started)
            return
        terminal.say(f"run {started.run_id} on {_and(started)}; Ctrl-C leaves it going")
    run = wait_shown(terminal, started.run_id)
    try:
        _tell_end(terminal, run)
    except OSError as error:
        error.add_note(_ending(run))
        raise
    raise click.exceptions.Exit(life.outcome_code(run))


@contextmanager
def _told_anyway(terminal: Terminal, started: Launched) -> Iterator[None]:
    """Somebody whose word was cut short is told that the run goes on; the error of a lost stream takes it along."""
    try:
        yield
    except KeyboardInterrupt:
        terminal.say("\n  ".join([GOES_ON, *ways_back(started.run_id)]))
        raise
    except OSError as error:
        error.add_note(f"run {started.run_id}: {whereabouts(started)}")
        raise


def _tell_start(terminal: Terminal, started: Launched) -> None:
    if terminal.wants_json:
        told = {"run": started.run_id, "attempt": started.attempt, "host": started.host, "run_dir": started.run_dir}
        terminal.document(**told, **({"more_hosts": started.more_hosts} if started.more_hosts else {}))
        return
    terminal.lines([started.run_id])
    terminal.say(whereabouts(started))


def _tell_end(terminal: Terminal, run: RunRow) -> None:
    page = history.show(terminal.places, run.id)
    if terminal.wants_json:
        terminal.document(**vars(page))
    elif run.kind in ("smoke", "script"):
        rungs = ladder(page, terminal.width or 100)
        more = [] if run.state is State.SUCCEEDED else ["", *next_steps(page)]
        terminal.lines([*rungs, "", _ending(run), *more])
        if run.kind == "smoke" and run.state is State.SUCCEEDED:
            terminal.say(f"next: {command_line('launch', words_of_run(run, page.launch))}")
    else:
        lines = run_page(page, width=terminal.width or 100, now_s=run.ended_s or run.created_s)
        lines += ["", *short] if (short := in_short(page)) else []  # last, where it is read without scrolling
        terminal.lines(lines, theirs=words_of_others(page))


def _ending(run: RunRow) -> str:
    return f"{run.id}  {state_cell(run).text}: {inert(run.evidence)}"


def whereabouts(started: Launched) -> str:
    """Where the job is and what to type next; of one that an earlier launch had started, the state it was found in."""
    run_id, state = started.run_id, started.found or State.RUNNING
    if state.is_final:
        return f"it has {state} on {_and(started)}; draftyard show {run_id}"
    word = "runs" if state is State.RUNNING else f"is {state}".replace("_", " ")
    what = "it" if started.attempt < 2 or started.found else f"attempt {started.attempt}"
    return f"{what} {word} on {_and(started)}; draftyard watch {run_id}, or draftyard logs {run_id} -f"


def _and(started: Launched) -> str:
    return " and ".join((started.host, *started.more_hosts))
