"""`logs`: a run's output as plain text, as raw bytes, or live. Reads what the follower brought."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from orchestrator.actions import logs as reading
from orchestrator.actions.log_text import inert
from orchestrator.lazy import lazy
from orchestrator.store.rows import RunRow
from orchestrator.verbs.frame import Terminal, verb
from orchestrator.verbs.life import ENDS
from orchestrator.verbs.words import clock, state_cell
from orchestrator.verbs.words_typed import HOST, RUN, Since, count

if TYPE_CHECKING:
    from orchestrator.actions import life
else:
    life = lazy("orchestrator.actions.life")

SILENT_S = 1.0  # a run that prints sooner needs no word before


@verb(
    "logs",
    exits=("0", "2", "5", *ENDS[4:]),
    examples=["draftyard logs @last", "draftyard logs k7f3 -f", "draftyard logs @failed --stream stderr -n 100"],
)
@click.argument("selector", metavar="RUN", type=RUN)
@click.option("-f", "--follow", is_flag=True, help="Stay until the run ends; its outcome is the exit code.")
@click.option("-n", "--tail", "last", type=count(0), help="Only the newest so many lines of each output.")
@click.option(
    "--since", "since_s", type=Since(), help="Only what arrived since: 10m, 2h, 2026-01-31, 2026-01-31T09:30."
)
@click.option(
    "--stream", type=click.Choice(["both", "stdout", "stderr"]), default="both", show_default=True, help="Which output."
)
@click.option("--host", metavar="HOST", type=HOST, help="Only the output on this host, of a run over several.")
@click.option("--attempt", type=count(1), help="Which attempt (default: the newest).")
@click.option("--rank", type=count(0), help="Only lines that a rank has marked as its own.")
@click.option("--raw", is_flag=True, help="The bytes as the job wrote them, escapes and all; stars over known secrets.")
def logs(
    terminal: Terminal,
    selector: str,
    *,
    follow: bool,
    last: int | None,
    since_s: float | None,
    stream: str,
    host: str | None,
    attempt: int | None,
    rank: int | None,
    raw: bool,
) -> None:
    """Print a run's output: carriage returns settled, escapes removed, bytes that are not text replaced.

    Stdout comes first, then stderr; where there are both, each begins under a heading, `==> stderr <==`, as `tail`
    has it. Of a run over several hosts each host's come in turn, `==> stderr on gpu2 <==`. -n counts for each of them, --stream picks one. With --json each line is one JSON object that names its
    stream. Ctrl-C ends the reading, not the run.
    """
    run = reading.find(terminal.places, selector)
    streams = reading.outputs(run, reading.STREAMS if stream == "both" else (stream,), host)
    wish = reading.Wish(streams=streams, attempt=attempt, last=last, since_s=since_s, rank=rank)
    if raw:
        for chunk in reading.raw(terminal.places, selector, wish):
            sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
        return
    if not follow:
        _Printer(terminal, run, wish).print(reading.passages(terminal.places, selector, wish))
        _say_if_silent(terminal, run, reading.silent_attempt(terminal.places, selector, wish), wish)
        return
    run = _followed(terminal, selector, wish)
    if not terminal.wants_json:
        terminal.say(f"run {run.id} {state_cell(run).text}: {inert(run.evidence)}")
    raise click.exceptions.Exit(life.outcome_code(run))


def _followed(terminal: Terminal, selector: str, wish: reading.Wish) -> RunRow:
    run, silent_since_s = reading.find(terminal.places, selector), None
    began_s, told = time.monotonic(), set[int]()
    life.ensure_follower(terminal.places)
    try:
        printer = _Printer(terminal, run, wish)
        with reading.Tail(terminal.places, run.id, wish) as tail:
            while True:
                run = tail.run()  # before the lines: what arrived until an end is then all printed
                _say_if_unreachable(terminal, run, before_s=silent_since_s)
                silent_since_s = run.unreachable_since_s
                printer.print(tail.passages(is_last=run.state.is_final))
                if run.state.is_final:
                    return run
                silent = tail.silent_attempt(run)
                if silent is not None and silent not in told and time.monotonic() - began_s >= SILENT_S:
                    _say_if_silent(terminal, run, silent, wish, then="waiting for its first line")
                    told.add(silent)
                time.sleep(life.POLL_S)
    except KeyboardInterrupt:
        terminal.say(f"the run goes on; come back with: draftyard logs {run.id} -f")
        raise


def _say_if_silent(
    terminal: Terminal, run: RunRow, attempt: int | None, wish: reading.Wish, *, then: str | None = None
) -> None:
    """`then`: what happens now; by default where there is something to read."""
    if attempt is None:
        return
    which = f"attempt {attempt} of run {run.id}" if attempt > 1 else f"run {run.id}"
    kinds = {name.partition(".")[0] for name in wish.streams}
    to = f" to {kinds.pop()}" if len(kinds) == 1 else ""
    is_over = run.state.is_final or attempt != run.attempt
    now = [] if is_over else [f"it is {run.state}".replace("_", " ")]
    before = f"--attempt {attempt - 1} shows the one before" if attempt > 1 and not to else None
    more = "; ".join([*now, *filter(None, [then or before])])
    terminal.say(f"{which} has printed nothing{to}{'' if is_over else ' yet'}{'; ' * bool(more)}{more}")


def _say_if_unreachable(terminal: Terminal, run: RunRow, *, before_s: float | None) -> None:
    """Once for each time that it begins, and when it is over: no line comes meanwhile. `before_s`: since when it was."""
    since_s = run.unreachable_since_s
    if run.state.is_final or since_s == before_s:
        return
    if since_s is None:
        terminal.say(f"host {inert(' and '.join(run.hosts))} answers again")
    else:
        which = " or ".join(run.hosts)
        terminal.say(f"host {inert(which)} is unreachable since {clock(since_s)}; the run itself may well go on")


class _Printer:
    """Prints passages, and says which output they are of whenever that changes; stdout alone needs no word."""

    def __init__(self, terminal: Terminal, run: RunRow, wish: reading.Wish) -> None:
        self._terminal, self._run = terminal, run
        self._under = None if reading.are_told_apart(terminal.places, run, wish) else wish.streams[0]

    def print(self, passages: Iterator[reading.Passage]) -> None:
        for passage in passages:
            if self._terminal.wants_json:
                self._print_json(passage)
                continue
            if passage.stream != self._under:
                click.echo(f"==> {reading.titled(self._run, passage.stream)} <==")
                self._under = passage.stream
            click.echo("\n".join(passage.texts))
        sys.stdout.flush()

    def _print_json(self, passage: reading.Passage) -> None:
        stream, _, number = passage.stream.partition(".")
        more = {"host": self._run.hosts[int(number or 0)]} if self._run.more_hosts else {}
        for text in passage.texts:
            self._terminal.record(stream=stream, **more, attempt=passage.attempt, text=text)


VERBS = {"logs": logs}
