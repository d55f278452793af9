"""`wait` and `stop`: a run's life. Both show progress while they wait for the follower's word."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from orchestrator.actions.log_text import inert
from orchestrator.lazy import lazy
from orchestrator.store.rows import RunRow
from orchestrator.verbs.frame import Terminal, verb
from orchestrator.verbs.progress import Progress
from orchestrator.verbs.words import state_cell
from orchestrator.verbs.words_typed import DURATION, RUN

if TYPE_CHECKING:
    from orchestrator.actions import life
else:
    life = lazy("orchestrator.actions.life")

ENDS = ("0", "2", "5", "6", "10", "11", "12", "13")
GOES_ON = "the run goes on; come back with one of:"
STOPS = "the run is being stopped all the same, and is killed when its grace is over; see it with one of:"
SELECTOR = click.argument("selector", metavar="RUN", type=RUN)


@verb("wait", exits=ENDS, examples=["draftyard wait @last", "draftyard wait k7f3 --timeout 30m --json"])
@SELECTOR
@click.option(
    "--timeout", "timeout_s", type=DURATION, help="Give up waiting after this long (exit 6); the run goes on."
)
def wait(terminal: Terminal, selector: str, timeout_s: float | None) -> None:
    """Wait until a run ends. Its outcome is the exit code. Ctrl-C ends the waiting, not the run."""
    run = wait_shown(terminal, selector, timeout_s=timeout_s)
    if terminal.wants_json:
        terminal.document(run=run)
    else:
        terminal.lines([f"{run.id}  {state_cell(run).text}: {inert(run.evidence)}"])
    raise click.exceptions.Exit(life.outcome_code(run))


@verb("stop", exits=("0", "1", "2", "5", "6"), examples=["draftyard stop @last", "draftyard stop k7f3 --now"])
@SELECTOR
@click.option(
    "--grace", "grace_s", type=DURATION, help="Time between the polite signal and the kill (default: the recipe's)."
)
@click.option("--now", is_flag=True, help="No grace: kill at once.")
@click.option("--timeout", "timeout_s", type=DURATION, help="Give up waiting after this long (exit 6); the wish stays.")
@click.option("--no-wait", is_flag=True, help="Leave the wish and return; do not wait for the end.")
def stop(
    terminal: Terminal, selector: str, *, grace_s: float | None, now: bool, timeout_s: float | None, no_wait: bool
) -> None:
    """Stop a run and wait until its processes are gone; it says whether the memory of its GPUs is back.

    Of a run that has ended, the retry that was to come is called off.
    """
    began_s = time.monotonic()
    done = life.stop(terminal.places, selector, grace_s=0.0 if now else grace_s, timeout_s=timeout_s)
    run = done.run
    if not no_wait:
        run = wait_shown(terminal, run.id, timeout_s=timeout_s, since_s=began_s, goes_on=STOPS)
    if terminal.wants_json:
        terminal.document(run=run, has_called_off_retry=done.has_called_off_retry)
    elif done.has_called_off_retry:
        terminal.lines([f"{run.id}  its retry is called off; it stays {state_cell(run).text}: {inert(run.evidence)}"])
    elif no_wait:
        terminal.lines([f"{run.id}  will be stopped; `draftyard wait {run.id}` says when"])
    else:
        terminal.lines([f"{run.id}  {state_cell(run).text}: {inert(run.evidence)}"])


def wait_shown(
    terminal: Terminal,
    run_id: str,
    *,
    timeout_s: float | None = None,
    since_s: float | None = None,
    goes_on: str = GOES_ON,
) -> RunRow:
    """Waits with progress on stderr; Ctrl-C says that it `goes_on` and how to come back. `since_s`: monotonic; None: now.

    Of another selector than an id it says first which run that is: by the time somebody comes back, @last may be another.
    """
    progress, known = Progress(terminal), run_id

    def see(moment: life.Moment) -> None:
        nonlocal known
        if moment.run.id != known:
            known = moment.run.id
            terminal.say(f"waiting for run {known}")
        if moment.unwritten is not None:
            progress.end()
            terminal.say(inert(moment.unwritten))
        progress.moment(moment)

    try:
        return life.wait(terminal.places, run_id, timeout_s=timeout_s, since_s=since_s, on_moment=see)
    except KeyboardInterrupt:
        progress.end()
        run = life.is_over(terminal.places, known)  # it may have ended before the first look
        if run is not None:
            terminal.say(f"run {run.id} has ended, {run.state}: draftyard show {run.id}")
        else:
            terminal.say("\n  ".join([goes_on, *ways_back(known)]))
        raise
    finally:
        progress.end()


def ways_back(run_id: str) -> tuple[str, ...]:
    """What whoever has left a live run types to see it again."""
    return f"draftyard watch {run_id}", f"draftyard logs {run_id} -f", f"draftyard wait {run_id}"


VERBS = {"wait": wait, "stop": stop}
