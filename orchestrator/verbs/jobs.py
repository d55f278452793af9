"""`deploy`, `smoke`, `launch`, `prepare`, `evaluate`, `export`, `resume`: jobs, as words."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator import gate
from orchestrator.actions import files
from orchestrator.actions.again import command_line
from orchestrator.errors import GateRefused, UsageError
from orchestrator.given import read_bounded, read_given
from orchestrator.lazy import lazy
from orchestrator.units import counted
from orchestrator.verbs.exits import SCHEMA_VERSION
from orchestrator.verbs.frame import Terminal, verb
from orchestrator.verbs.life import ENDS
from orchestrator.verbs.started import ended_or_detached
from orchestrator.verbs.table import pairs
from orchestrator.verbs.words import gib
from orchestrator.verbs.words_typed import (
    BRANCH_NAME,
    HOST_OPTION,
    HOSTS_OPTION,
    RECIPE,
    RUN,
    SIZE,
    Decorator,
    gpu_names,
)

if TYPE_CHECKING:
    from orchestrator.actions import caps, jobs, order, trying
    from orchestrator.actions.jobs import Rehearsal
    from orchestrator.actions.order import Order
else:
    caps = lazy("orchestrator.actions.caps")
    jobs = lazy("orchestrator.actions.jobs")
    order = lazy("orchestrator.actions.order")
    trying = lazy("orchestrator.actions.trying")

STARTS = ("0", "1", "2", "4")


def order_options(function: Callable[..., None], *, host: Decorator = HOST_OPTION) -> Callable[..., None]:
    """RECIPE and the options that make an Order; the verb receives `order`."""
    decorators: list[Decorator] = [
        click.argument("recipe", metavar="RECIPE", type=RECIPE),
        click.option(
            "-b",
            "--branch",
            metavar="BRANCH",
            type=BRANCH_NAME,
            help="A branch of the recipe (default: its default branch).",
        ),
        host,
        click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one value; repeatable."),
        click.option(
            "--gpus", metavar="LIST", help="GPUs by index or UUID, comma between (default: the host's entry)."
        ),
        click.option(
            "--env",
            "env_words",
            multiple=True,
            metavar="KEY[=VALUE]",
            help="A variable for the job; KEY alone takes yours.",
        ),
    ]
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def make_order(terminal: Terminal, words: dict[str, Any], **more: Any) -> Order:
    """`more`: what only a launch may be told, by the names of Order."""
    if any("=" in word for word in words["env_words"]):
        told = "a value on the command line is seen by everybody on this machine; --env KEY takes it from yours"
        terminal.say(f"warning: {told}")
    named = words["host"] if isinstance(words["host"], tuple) else (words["host"],)
    host, *more_hosts = named or (None,)
    return order.Order(
        recipe=words["recipe"],
        branch=words["branch"],
        host=host or terminal.places.host,
        more_hosts=tuple(more_hosts),
        overrides=words["overrides"],
        gpus=gpu_names(words["gpus"]),
        env={**words.get("suggested_env", {}), **order.read_env_words(words["env_words"], os.environ)},
        **more,
    )


@verb(
    "deploy",
    exits=STARTS,
    examples=["draftyard deploy smollm2", "draftyard deploy qwen3.6-27b -b ddtree --host gpu --json"],
)
@order_options
def deploy(terminal: Terminal, **words: Any) -> None:
    """Ship a recipe's tree to a host and verify it there; what is there already is not sent again."""
    done = jobs.deploy(terminal.places, make_order(terminal, words), tell=terminal.say)
    if terminal.wants_json:
        terminal.document(deployed=done)
        return
    sent = (
        "every file was there already"
        if done.was_there
        else f"sent {done.sent_files} of {counted(done.num_files, 'file')}, {gib(done.sent_bytes)}"
    )
    terminal.lines([f"{done.host}:{done.path}", f"tree {done.tree_hash[:16]}, verified; {sent}"])


@verb(
    "smoke",
    exits=(*STARTS, "5", "10", "11", "12", "13"),
    examples=[
        "draftyard smoke smollm2",
        "draftyard smoke qwen3.6-27b -b ddtree --host gpu fwd_bwd",
        "draftyard smoke smollm2 --script check.py",
        "draftyard smoke qwen3.6-27b -b ddtree --host gpu --try 1",
    ],
)
@order_options
@click.argument("rungs", nargs=-1, metavar="[RUNG]…")
@click.option("--script", metavar="FILE", help="Run a test script of your own instead; - reads it from stdin.")
@click.option("--cap", "cap_bytes", type=SIZE, help="Cap the memory a GPU job may take, such as 95GiB.")
@click.option(
    "--try",
    "number",
    type=click.IntRange(min=1),
    metavar="N",
    help="With the Nth suggestion of the branch's newest run that ran out of memory, as `show RUN --oom` numbers them.",
)
@click.option("--again", is_flag=True, help="Also the rungs that have passed for the same fingerprint.")
@click.option("--detach", is_flag=True, help="Start them and return; `wait` and `show` tell the rest.")
def smoke(
    terminal: Terminal,
    rungs: tuple[str, ...],
    script: str | None,
    *,
    cap_bytes: int | None,
    number: int | None,
    again: bool,
    detach: bool,
    **words: Any,
) -> None:
    """Climb the smoke ladder: short, hard tests that make the evidence a launch wants.

    Each rung runs in its own process on the worst batch the recipe allows. Rungs that have passed for
    exactly the same fingerprint are left out, unless named or with --again.
    """
    if number is not None:
        words, cap_bytes = _with_suggestion(terminal, words, number, cap_bytes, is_script=script is not None)
    asked = make_order(terminal, words)
    if script is not None:
        content, name = _script(script)
        caps.refuse_cap_of_scripts(cap_bytes, (name,), (name,), terminal.say)
        started = jobs.smoke_script(terminal.places, asked, content, name=name, tell=terminal.say)
    else:
        climbed = jobs.smoke(terminal.places, asked, rungs=rungs, cap_bytes=cap_bytes, again=again, tell=terminal.say)
        if climbed.launched is None:
            _nothing_to_climb(terminal, asked, climbed.fingerprint)
            return
        started = climbed.launched
    ended_or_detached(terminal, started, detach=detach)


@verb(
    "launch",
    exits=("0", "1", "2", "3", "4", *ENDS[4:]),
    examples=[
        "draftyard launch smollm2 --follow",
        "draftyard launch qwen3.6-27b -b ddtree --host gpu --gpus 5,6,7 --set loss.gamma=8",
    ],
)
@partial(order_options, host=HOSTS_OPTION)
@click.option("--dry-run", is_flag=True, help="Look at the host, ask the gate, and start nothing.")
@click.option(
    "--force", "force_reason", metavar="REASON", help="Go past the gate; the reason is kept with the run for ever."
)
@click.option("-f", "--follow", is_flag=True, help="Stay and show progress; the outcome is the exit code.")
@click.option("--tag", "tags", multiple=True, metavar="TAG", help="A tag for the run; repeatable.")
@click.option("--id", "run_id", metavar="ID", help="The run's id: said again, a launch finds the run it has started.")
def launch(
    terminal: Terminal,
    *,
    dry_run: bool,
    force_reason: str | None,
    follow: bool,
    tags: tuple[str, ...],
    run_id: str | None,
    **words: Any,
) -> None:
    """Start a recipe's branch on a host, if the smoke ladder has passed for exactly what would run.

    The run goes on when this terminal closes. Without evidence: exit 3, and the one command that makes it. With several
    --host one run is started on all of them: the first has rank 0 and the checkpoints, and the others must reach it.
    """
    asked = make_order(terminal, words, force_reason=force_reason, tags=tags, run_id=run_id)
    if dry_run:
        _rehearsal(terminal, asked)
        return
    started = jobs.launch(terminal.places, asked, tell=terminal.say)
    ended_or_detached(terminal, started, detach=not follow)


@verb(
    "prepare",
    exits=(*STARTS, *ENDS[4:]),
    examples=["draftyard prepare smollm2", "draftyard prepare qwen3.6-27b -b ddtree --host gpu --detach"],
)
@order_options
@click.option("--detach", is_flag=True, help="Start it and return.")
def prepare(terminal: Terminal, *, detach: bool, **words: Any) -> None:
    """Make a recipe's answers and hidden states in the host's cache, so that training finds them there."""
    started = jobs.prepare(terminal.places, make_order(terminal, words), tell=terminal.say)
    ended_or_detached(terminal, started, detach=detach)


@verb(
    "evaluate",
    exits=(*STARTS, "5", *ENDS[4:]),
    examples=["draftyard evaluate @last", "draftyard evaluate k7f3 --detach --json"],
)
@click.argument("selector", metavar="RUN", type=RUN)
@click.option("--detach", is_flag=True, help="Start it and return.")
def evaluate(terminal: Terminal, selector: str, *, detach: bool) -> None:
    """Measure the acceptance length of a run's newest checkpoint by really decoding, on its host."""
    ended_or_detached(terminal, jobs.evaluate(terminal.places, selector, tell=terminal.say), detach=detach)


@verb(
    "export",
    exits=(*STARTS, "5", *ENDS[4:]),
    examples=["draftyard export @last", "draftyard export k7f3 --metrics csv --to metrics.csv"],
)
@click.argument("selector", metavar="RUN", type=RUN)
@click.option(
    "--metrics", "form", type=click.Choice(["csv", "jsonl"]), help="Its metrics instead, from the database here."
)
@click.option("--to", metavar="FILE", help="Where the metrics go (default: stdout).")
@click.option("--detach", is_flag=True, help="Start it and return.")
def export(terminal: Terminal, selector: str, *, form: str | None, to: str | None, detach: bool) -> None:
    """Write a run's newest checkpoint on its host as a folder that public tools load, or its metrics here."""
    if form is None:
        if to is not None:
            raise UsageError("--to goes with --metrics; a drafter is written on its host")
        ended_or_detached(terminal, jobs.export(terminal.places, selector, tell=terminal.say), detach=detach)
        return
    if to is None:
        if terminal.wants_json and form == "csv":
            raise UsageError("--metrics csv prints no JSON; --metrics jsonl does, or --to FILE writes the CSV")
        version = SCHEMA_VERSION if terminal.wants_json else None
        terminal.lines(files.metric_lines(terminal.places, selector, form, version=version), is_ours=False)
        return
    was_there = files.is_there(Path(to))
    num_values = files.write_metrics(terminal.places, selector, form, to=Path(to))
    if was_there:
        terminal.say(f"it took the place of the {to} that was there")
    if terminal.wants_json:
        terminal.document(file=to, num_values=num_values)
    else:
        terminal.lines([f"{to}: {counted(num_values, 'value')}"])


@verb(
    "resume", exits=(*STARTS, "5", *ENDS[4:]), examples=["draftyard resume @failed", "draftyard resume k7f3 --follow"]
)
@click.argument("selector", metavar="RUN", type=RUN)
@click.option("-f", "--follow", is_flag=True, help="Stay and show progress; the outcome is the exit code.")
def resume(terminal: Terminal, selector: str, *, follow: bool) -> None:
    """Start a new attempt of a run that has ended, from its newest whole checkpoint.

    The variables that were named with --env at the launch are taken from yours, as for `evaluate` and `export`: their
    values are kept nowhere. One that is not set is refused by name.
    """
    ended_or_detached(terminal, jobs.resume(terminal.places, selector, tell=terminal.say), detach=not follow)


def _with_suggestion(
    terminal: Terminal, words: dict[str, Any], number: int, cap_bytes: int | None, *, is_script: bool
) -> tuple[dict[str, Any], int | None]:
    """The words with a suggestion's overrides and variables before the person's own, and the cap that the run had."""
    if is_script:
        raise UsageError("--try climbs rungs with a suggestion; a script of --script has no plan to take one from")
    found = trying.trial(terminal.places, words["recipe"], branch=words["branch"], number=number)
    terminal.say(f"suggestion {number} of run {found.run_id}: {found.name}; the same by hand: {found.typed}")
    words = {**words, "overrides": (*found.overrides, *words["overrides"]), "suggested_env": found.env}
    return words, found.cap_bytes if cap_bytes is None else cap_bytes


def _nothing_to_climb(terminal: Terminal, asked: Order, fingerprint: str) -> None:
    if terminal.wants_json:
        terminal.document(run=None, fingerprint=fingerprint, skipped=True)
        return
    terminal.lines([f"every rung has passed for this fingerprint already ({fingerprint})"])
    terminal.say(f"next: {command_line('launch', order.words_of(asked))}    (--again climbs them once more)")


def _rehearsal(terminal: Terminal, asked: Order) -> None:
    """Ends as the launch would: with exit 3 and the repair where the gate is shut."""
    if asked.more_hosts:
        each = jobs.rehearse_all(terminal.places, asked, tell=terminal.say)
    else:
        each = [jobs.rehearse(terminal.places, asked, tell=terminal.say)]
    is_allowed, is_forced = all(found.verdict.is_allowed for found in each), asked.force_reason is not None
    if terminal.wants_json:
        more = {"more_rehearsals": each[1:]} if asked.more_hosts else {}
        terminal.document(rehearsal=each[0], allowed=is_allowed, **more)
    else:
        for found in each:
            _say_rehearsal(terminal, found, is_forced=is_forced)
    raise click.exceptions.Exit(0 if is_allowed or is_forced else GateRefused.exit_code)


def _say_rehearsal(terminal: Terminal, found: Rehearsal, *, is_forced: bool) -> None:
    rungs = [("rungs", line) for line in gate.explain(found.verdict.rungs)]
    items = [("host", found.host), ("GPUs", ", ".join(found.gpus) or "none"), ("fingerprint", found.fingerprint)]
    items.append(("tree", f"{found.tree_hash[:16]}, {counted(found.num_files, 'file')}"))
    items.append(("gate", _gate_word(found.verdict, is_forced=is_forced)))
    terminal.lines(pairs([*items, *rungs]))
    if not (found.verdict.is_allowed or is_forced):
        terminal.say(f"  repair: {found.repair}")


def _gate_word(verdict: gate.Verdict, *, is_forced: bool) -> str:
    if verdict.is_allowed:
        return "open" if verdict.rungs else f"open: {gate.UNTESTED_RECIPE}"
    return "shut, and forced" if is_forced else "shut: a launch would be refused"


def _script(word: str) -> tuple[bytes, str]:
    """Content and file name; raises UsageError when there is no such file."""
    path = Path(word)
    try:
        if word == "-":
            return read_bounded(sys.stdin.buffer, "stdin"), "script.py"
        return read_given(path), path.name
    except OSError as error:
        raise UsageError(f"--script {word} cannot be read: {error.strerror}") from error


VERBS = {
    "deploy": deploy,
    "smoke": smoke,
    "launch": launch,
    "prepare": prepare,
    "evaluate": evaluate,
    "export": export,
    "resume": resume,
}
