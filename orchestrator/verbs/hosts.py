"""`doctor`, `hosts`, `config`: machines and settings."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.lazy import lazy
from orchestrator.units import counted, duration
from orchestrator.verbs.frame import Terminal, verb
from orchestrator.verbs.group import VerbGroup
from orchestrator.verbs.table import Cell, Column, heading, table
from orchestrator.verbs.words import ago, gib
from orchestrator.verbs.words_typed import DURATION, HOST

if TYPE_CHECKING:
    from orchestrator.actions import fixing, hosts, order, reaping, sweeping
    from orchestrator.actions.hosts import Finding, Known
    from orchestrator.actions.sweeping import Collected
    from orchestrator.launch import Orphan
else:
    fixing = lazy("orchestrator.actions.fixing")
    hosts = lazy("orchestrator.actions.hosts")
    order = lazy("orchestrator.actions.order")
    reaping = lazy("orchestrator.actions.reaping")
    sweeping = lazy("orchestrator.actions.sweeping")


@verb("doctor", exits=("0", "1", "2", "4"), examples=["draftyard doctor", "draftyard doctor gpu --fix"])
@click.argument("host", required=False, metavar="[HOST]", type=HOST)
@click.option(
    "--fix",
    is_flag=True,
    help="Install what the bundled trainer lacks there: with uv if the host has it, else with pip.",
)
def doctor(terminal: Terminal, host: str | None, *, fix: bool) -> None:
    """Check this machine, or a host; each failing line ends in the command that repairs it."""
    python = None
    if fix:
        terminal.say("installing; this may take minutes")
        done = fixing.fix(terminal.places, host or terminal.places.host)
        python = done.python
        if not terminal.wants_json:
            terminal.lines([*done.lines, ""])
    here = [] if host else hosts.examine_here(terminal.places)
    there = hosts.examine(terminal.places, host or terminal.places.host, python=python)
    if terminal.wants_json:
        terminal.document(
            host=host or terminal.places.host,
            is_healthy=all(item.is_good for item in [*here, *there]),
            here=here,
            findings=there,
        )
    else:
        terminal.lines([heading("This machine"), *_findings(here), ""] if here else [])
        terminal.lines([heading(f"Host {host or terminal.places.host}"), *_findings(there)])
    unreached = any(item.name == "reach" and not item.is_good for item in there)
    raise click.exceptions.Exit(4 if unreached else 0 if all(item.is_good for item in [*here, *there]) else 1)


@verb("hosts", examples=["draftyard hosts", "draftyard hosts --json"])
def list_hosts(terminal: Terminal) -> None:
    """List known hosts and what was last seen on them; contacts none."""
    found = hosts.known(terminal.places)
    for line in order.entries_at_fault(terminal.places):
        terminal.say(f"warning: {line}")
    if terminal.wants_json:
        terminal.document(hosts=[_host_body(item) for item in found])
        return
    columns = [
        Column("host"),
        Column("address", gives_way=True),
        Column("GPUs", gives_way=True, least=4),
        Column("seen"),
        Column("known from", gives_way=True),
    ]
    terminal.lines(table(columns, [_host_row(item) for item in found], width=terminal.width))


@verb("reap", exits=("0", "1", "2", "4"), examples=["draftyard reap gpu", "draftyard reap gpu --yes"])
@click.argument("host", required=False, metavar="[HOST]", type=HOST)
@click.option("-y", "--yes", is_flag=True, help="End them; without it they are only listed and asked for.")
def reap(terminal: Terminal, host: str | None, *, yes: bool) -> None:
    """Find processes of our own ended runs that still live on a host, and end them. No other process is touched."""
    name = host or terminal.places.host
    found = reaping.reap(terminal.places, name, end=False)
    if found.orphans and (yes or terminal.may_ask):
        terminal.lines(_orphans(found.orphans) if not yes and not terminal.wants_json else [])
        terminal.confirm(f"End {counted(len(found.orphans), 'process', 'processes')} on {name}?", yes=yes)
        found = reaping.reap(terminal.places, name, end=True)
    if terminal.wants_json:
        terminal.document(host=name, orphans=found.orphans, were_ended=found.were_ended)
    elif not found.orphans:
        terminal.say(f"no process of an ended run lives on {name}")
    else:
        terminal.lines(_orphans(found.orphans))
        terminal.say("ended" if found.were_ended else "left alone; --yes ends them")


@verb("gc", exits=("0", "1", "2", "4"), examples=["draftyard gc gpu", "draftyard gc gpu --runs --older-than 30d --yes"])
@click.argument("host", required=False, metavar="[HOST]", type=HOST)
@click.option(
    "--older-than", "older_than_s", type=DURATION, default="7d", show_default=True, help="Only what is older."
)
@click.option("--runs", "with_runs", is_flag=True, help="Also folders of ended runs, with their checkpoints.")
@click.option("-y", "--yes", is_flag=True, help="Remove them; without it they are only listed and asked for.")
def gc(terminal: Terminal, host: str | None, *, older_than_s: float, with_runs: bool, yes: bool) -> None:
    """Find old trees, temporary files (and run folders) of ours on a host that nothing needs, and remove them."""
    name = host or terminal.places.host
    found = sweeping.collect(terminal.places, name, older_than_s=older_than_s, with_runs=with_runs, end=False)
    num_items = len(found.trees) + len(found.runs) + (found.temporary is not None) + (found.leftover_bytes > 0)
    if not terminal.wants_json:
        terminal.lines(_collectable(found) if num_items else [])
    if num_items and (yes or terminal.may_ask):
        terminal.confirm(f"Remove {counted(num_items, 'item')} on {name}?", yes=yes)
        found = sweeping.collect(terminal.places, name, older_than_s=older_than_s, with_runs=with_runs, end=True)
    if terminal.wants_json:
        terminal.document(
            host=name,
            trees=found.trees,
            runs=found.runs,
            temporary=found.temporary,
            leftover_bytes=found.leftover_bytes,
            swept=found.swept,
        )
    elif not num_items:
        terminal.say(f"nothing older than {duration(older_than_s)} on {name} that nothing needs")
    elif found.swept is None:
        terminal.say("left alone; --yes removes them")
    else:
        terminal.say(f"removed {counted(len(found.swept.removed), 'item')}, {gib(found.swept.freed_bytes)} freed")
        terminal.lines([f"kept {item}: {why}" for item, why in found.swept.kept.items()])


def _collectable(found: Collected) -> list[str]:
    rows: list[list[str]] = [[tree.name[:22], gib(tree.size_bytes), ago(-tree.age_s, 0), ""] for tree in found.trees]
    for run in found.runs:
        of = _lost_with(found.whose[run.run_id], run.run_id, run.checkpoint_bytes)
        rows.append([run.name, gib(run.size_bytes), ago(-run.age_s, 0), of])
    if old := found.temporary:
        rows.append(
            [
                f"{old.name} ({counted(old.num_entries, 'old entry', 'old entries')})",
                gib(old.size_bytes),
                ago(-old.age_s, 0),
                "",
            ]
        )
    if found.leftover_bytes:
        rows.append(["leftovers of cut ships", gib(found.leftover_bytes), "", ""])
    columns = [Column("folder"), Column("size", is_number=True), Column("last used", is_number=True), Column("of")]
    return table(columns, rows, width=None)


def _lost_with(whose: str, run_id: str, checkpoint_bytes: int) -> str:
    """Whose run it is, and what of it would be gone for good, as far as is known here."""
    is_pulled = not checkpoint_bytes or (Path("pulled") / run_id).is_dir()
    return whose if is_pulled else f"{whose}, {gib(checkpoint_bytes)} of checkpoints not pulled"


@click.group("config", cls=VerbGroup, context_settings={"help_option_names": ["-h", "--help"]})
def config() -> None:
    """Settings and where they came from."""


@verb("show", examples=["draftyard config show", "draftyard config show --origin"])
@click.option("--origin", is_flag=True, help="Also say what decided each.")
def show_config(terminal: Terminal, *, origin: bool) -> None:
    """Print every setting that counts here."""
    settings = terminal.places.settings()
    if terminal.wants_json:
        terminal.document(settings=settings)
        return
    columns = [Column("setting"), Column("value"), *([Column("decided by")] if origin else [])]
    rows = [[item.name, item.value, *([item.origin] if origin else [])] for item in settings]
    terminal.lines(table(columns, rows, width=None))


config.add_command(show_config)


def _findings(found: list[Finding]) -> list[str]:
    widest = max((len(item.name) for item in found), default=0)
    lines = []
    for item in found:
        mark = click.style("ok  ", fg="green") if item.is_good else click.style("FAIL", fg="red")
        repair = "" if item.is_good or not item.repair else f"  ->  {item.repair}"
        lines.append(f"{mark} {item.name.ljust(widest)}  {item.told}{repair}")
    return lines


def _orphans(found: list[Orphan]) -> list[str]:
    columns = [
        Column("pid", is_number=True),
        Column("run"),
        Column("age", is_number=True),
        Column("memory", is_number=True),
        Column("command", gives_way=True),
    ]
    rows = [[str(item.pid), item.run_id, duration(item.age_s), gib(item.rss_bytes), item.command] for item in found]
    return table(columns, rows, width=None)


def _host_row(item: Known) -> list[str | Cell]:
    seen = item.seen
    gpus = (seen.facts.get("gpus") or []) if seen else []
    names = ", ".join(dict.fromkeys(str(gpu.get("name")) for gpu in gpus))
    told = "never" if seen is None else ago(seen.seen_s, time.time())
    if seen is not None and seen.unreachable_since_s is not None:
        told = f"unreachable, {told}"
    hops = "".join(f" > {hop}" for hop in item.host.hops)
    address = "this machine" if item.host.is_local else (item.host.address or "-")
    where = Cell("entry at fault", colour="red") if item.faults else address + hops
    return [item.host.name, where, f"{len(gpus)} x {names}" if gpus else "-", told, item.host.source]


def _host_body(item: Known) -> dict[str, object]:
    host = item.host
    body: dict[str, object] = {
        "name": host.name,
        "address": host.address,
        "is_local": host.is_local,
        "source": host.source,
    }
    body["faults"] = item.faults
    return {**body, "hops": [str(hop) for hop in host.hops], "gpus": host.gpus, "seen": item.seen}


VERBS = {"doctor": doctor, "hosts": list_hosts, "reap": reap, "gc": gc, "config": config}
