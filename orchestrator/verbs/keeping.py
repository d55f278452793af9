"""`tag`, `note`, `rm`, `restore` and `purge`: keeping order among runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from orchestrator.actions import history
from orchestrator.actions.log_text import inert
from orchestrator.lazy import lazy
from orchestrator.store.rows import RunRow, State
from orchestrator.verbs.frame import Terminal, verb
from orchestrator.verbs.words_typed import RUN

if TYPE_CHECKING:
    from orchestrator.actions import keeping
else:
    keeping = lazy("orchestrator.actions.keeping")

SELECTOR = click.argument("selector", metavar="RUN", type=RUN)
SELECTORS = click.argument("selectors", nargs=-1, required=True, metavar="RUN…", type=RUN)


@verb("tag", exits=("0", "2", "5"), examples=["draftyard tag @last baseline", "draftyard tag k7f3 -r baseline --json"])
@SELECTOR
@click.argument("add", nargs=-1, metavar="[TAG]…")
@click.option("-r", "--remove", multiple=True, metavar="TAG", help="Take a tag away; repeatable.")
def tag(terminal: Terminal, selector: str, add: tuple[str, ...], remove: tuple[str, ...]) -> None:
    """Add tags to a run, or take them away; without any, list them."""
    run = keeping.tag(terminal.places, selector, add=add, remove=remove)
    if terminal.wants_json:
        terminal.document(run=run.id, tags=run.tags)
    else:
        terminal.lines(run.tags, is_ours=False)
        if not run.tags:
            terminal.say(f"run {run.id} has no tags")


@verb(
    "note",
    exits=("0", "2", "5"),
    examples=['draftyard note @last "gamma 10 at last"', 'draftyard note k7f3 ""', "draftyard note k7f3 --json"],
    may_be_empty=["text"],
)
@SELECTOR
@click.argument("text", required=False, metavar="[TEXT]")
def note(terminal: Terminal, selector: str, text: str | None) -> None:
    """Write a run's note, replacing the old one; an empty TEXT takes it away, without TEXT it is printed."""
    run = keeping.note(terminal.places, selector, text) if text is not None else history.find(terminal.places, selector)
    if terminal.wants_json:
        terminal.document(run=run.id, note=run.note)
    else:
        terminal.lines([run.note] if run.note else [], is_ours=False)


@verb(
    "mark",
    exits=("0", "2", "5"),
    examples=['draftyard mark k7f3 succeeded "its log ends well"', 'draftyard mark @last lost "the box was returned"'],
)
@SELECTOR
@click.argument("state", type=click.Choice([str(state) for state in State if state.is_final]))
@click.argument("why", metavar="WHY")
def mark(terminal: Terminal, selector: str, state: str, why: str) -> None:
    """Set a run's final state by hand, over the evidence; who reads it later sees that and WHY.

    It also ends a live run whose host will never answer again. No host is asked: should one come back, `reap HOST`
    lists what still lives there and ends it, and `resume` goes on from the newest checkpoint there.
    """
    was_live = not history.find(terminal.places, selector).state.is_final
    run = keeping.mark(terminal.places, selector, State(state), why=why)
    if terminal.wants_json:
        terminal.document(run=run)
    else:
        terminal.lines([f"{run.id}  {run.state}: {inert(run.evidence)}"])
    if was_live:
        ways = " and ".join(f"draftyard reap {inert(host)}" for host in run.hosts)
        terminal.say(f"nothing was stopped; what still lives there is listed and ended by {ways}")


@verb("rm", exits=("0", "1", "2", "5"), examples=["draftyard rm k7f3", "draftyard rm k7f3 9hq2 --json"])
@SELECTORS
def rm(terminal: Terminal, selectors: tuple[str, ...]) -> None:
    """Move runs that have ended to the bin. `restore` takes them out, `purge` forgets them."""
    _told(terminal, keeping.remove(terminal.places, selectors), "in the bin; out again: draftyard restore {}")


@verb(
    "restore",
    exits=("0", "1", "2", "5"),
    examples=["draftyard restore k7f3", "draftyard ls --removed && draftyard restore 9hq2"],
)
@SELECTORS
def restore(terminal: Terminal, selectors: tuple[str, ...]) -> None:
    """Take runs out of the bin."""
    _told(terminal, keeping.restore(terminal.places, selectors), "out of the bin")


@verb("purge", exits=("0", "1", "2", "5"), examples=["draftyard purge k7f3", "draftyard purge k7f3 9hq2 --yes"])
@SELECTORS
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def purge(terminal: Terminal, selectors: tuple[str, ...], yes: bool) -> None:
    """Forget binned runs for good: rows, metrics and logs here. Files on their hosts stay."""
    names = dict.fromkeys(history.find(terminal.places, selector).id for selector in selectors)
    terminal.confirm(f"Forget {', '.join(names)} for good?", yes=yes)
    _told(terminal, keeping.purge(terminal.places, selectors), "forgotten")


def _told(terminal: Terminal, runs: list[RunRow], what: str) -> None:
    """`what` happened to each; {} in it stands for the run's id."""
    if terminal.wants_json:
        terminal.document(runs=[run.id for run in runs])
    else:
        terminal.lines(f"{run.id}  {what.format(run.id)}" for run in runs)


VERBS = {"tag": tag, "note": note, "mark": mark, "rm": rm, "restore": restore, "purge": purge}
