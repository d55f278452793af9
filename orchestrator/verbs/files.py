"""`pull`, `import` and `reset-term`: files brought here, and a terminal put right."""

from __future__ import annotations

import sys
import termios
import tty
from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.actions.log_text import inert
from orchestrator.lazy import lazy
from orchestrator.units import counted
from orchestrator.verbs.frame import Terminal, verb
from orchestrator.verbs.words import gib, state_cell
from orchestrator.verbs.words_typed import RUN, TypedPath

if TYPE_CHECKING:
    from orchestrator.actions import bringing, history, pulling
    from orchestrator.actions.pulling import Pulled
    from orchestrator.store.rows import RunRow
    from orchestrator.verbs import leads, progress
else:
    bringing = lazy("orchestrator.actions.bringing")
    history = lazy("orchestrator.actions.history")
    pulling = lazy("orchestrator.actions.pulling")
    leads = lazy("orchestrator.verbs.leads")
    progress = lazy("orchestrator.verbs.progress")

LONG_BYTES = 2**28  # what takes more than some seconds to read
# Reports of mouse, focus and size off, pasted text unmarked, lines wrap; kitty's keyboard protocol off, which each screen has
# for itself, so before the main screen; cursor visible, colours off.
RESET = (
    "".join(f"\x1b[?{mode}l" for mode in (1000, 1002, 1003, 1006, 1015, 1016, 1004, 2048, 2004))
    + "\x1b[?7h\x1b[<u\x1b[?1049l\x1b[?25h\x1b[0m"
)


@verb(
    "pull",
    exits=("0", "1", "2", "4", "5"),
    examples=[
        "draftyard pull @last",
        "draftyard pull k7f3 --checkpoints best --to /data/drafters",
        "draftyard pull k7f3 --artifacts",
    ],
)
@click.argument("selector", metavar="RUN", type=RUN)
@click.option(
    "--checkpoints",
    "which",
    type=click.Choice(["last", "best", "all"]),
    default="last",
    show_default=True,
    help="Which ones; best is the one whose steps accepted most. An export has one drafter.",
)
@click.option(
    "--artifacts", is_flag=True, help="Instead, what each attempt left: memory snapshots, answers, an export."
)
@click.option(
    "--to",
    type=TypedPath(file_okay=False),
    default=Path("pulled"),
    show_default=True,
    help="The folder they go below.",
)
def pull(terminal: Terminal, selector: str, *, which: str, artifacts: bool, to: Path) -> None:
    """Bring a run's checkpoints here, the drafter that an export wrote, or whatever its attempts left.

    What an earlier pull brought is not sent again, and every file is verified.
    """
    if artifacts:
        found = pulling.pull_artifacts(terminal.places, selector, to=to, tell=terminal.say)
    else:
        found = pulling.pull(terminal.places, selector, which=which, to=to, tell=terminal.say)
    if terminal.wants_json:
        terminal.document(**{"artifacts" if artifacts else "checkpoints": found})
    else:
        terminal.lines(_pulled(item) for item in found)


def _pulled(item: Pulled) -> str:
    what = "exported drafter" if item.step is None else f"step {item.step}"
    what = what if item.attempt is None else f"artifacts of attempt {item.attempt}"
    there = f"{item.num_there} of {counted(item.num_files, 'file')} were there already"
    told = f"; nothing had to be fetched: {there}" if item.num_there == item.num_files else f"; {there}"
    return f"{item.folder}  {what}, {counted(item.num_files, 'file')}, {gib(item.size_bytes)}{told if item.num_there else ''}"


@verb("import", examples=["draftyard import /media/disk/runs/k7f3abcd", "draftyard import ./k7f3abcd --json"])
@click.argument("folder", type=TypedPath(exists=True, file_okay=False))
def import_run(terminal: Terminal, folder: Path) -> None:
    """Read in a run folder brought from elsewhere; again, or a newer copy, adds only what is new.

    What only its launch knew is in no such folder: git state, fingerprint, recipe file, versions, the plan.
    """
    before = bringing.read_so_far(terminal.places, folder)
    run = _brought_in(terminal, folder)
    has_news = bringing.read_so_far(terminal.places, folder) != before
    for line in bringing.passed_over(terminal.places, run.id):
        terminal.say(inert(line))
    if terminal.wants_json:
        terminal.document(run=run, has_news=has_news)
    else:
        news = "" if before is None else "; with what is new" if has_news else "; nothing in it is new"
        terminal.lines([f"{run.id}  {state_cell(run).text}: {inert(run.evidence)}{news}"])
        terminal.lines(leads.next_steps(history.show(terminal.places, run.id)))


def _brought_in(terminal: Terminal, folder: Path) -> RunRow:
    """With progress from attempt to attempt; one that is long in itself has a line."""
    shown = progress.Progress(terminal)

    def tell(text: str, size_bytes: int) -> None:
        if size_bytes < LONG_BYTES:
            shown.show(text)
            return
        shown.end()
        terminal.say(f"{text}, {gib(size_bytes)} of events and logs")

    try:
        return bringing.bring_in(terminal.places, folder, tell=tell)
    finally:
        shown.end()


@verb("reset-term", exits=("0",), examples=["draftyard reset-term", "draftyard reset-term && draftyard watch"])
def reset_term(terminal: Terminal) -> None:
    """Put the terminal right after a screen was killed: echo, Ctrl-C, mouse reports, pasted text, keyboard, cursor, colours."""
    if is_terminal := sys.stdout.isatty():
        click.echo(RESET, nl=False, color=True)
        sys.stdout.flush()
        _read_lines_again(sys.stdout.fileno())
    if terminal.wants_json:
        terminal.document(reset=is_terminal)


def _read_lines_again(descriptor: int) -> None:
    """What `stty sane` does of that which a screen changes: lines are edited and shown, keys send signals."""
    attributes = termios.tcgetattr(descriptor)
    attributes[tty.IFLAG] = attributes[tty.IFLAG] & ~(termios.INLCR | termios.IGNCR) | termios.ICRNL | termios.IXON
    attributes[tty.OFLAG] |= termios.OPOST | termios.ONLCR
    attributes[tty.LFLAG] |= termios.ISIG | termios.ICANON | termios.IEXTEN | termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSANOW, attributes)


VERBS = {"pull": pull, "import": import_run, "reset-term": reset_term}
