"""Jobs: deploy, smoke, launch, prepare, evaluate, export, resume. Each ends in a row that says how it went.

The order of things is the same for all: settle the order (exit 2, nothing written), write the row,
look at the host (exit 4, or 1 with what is missing), ask the gate (exit 3, the row taken back), ship,
start, and see that somebody follows. What the run then does is the follower's to record.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator import gate
from orchestrator.actions.again import command_line, words_of_run
from orchestrator.actions.caps import refuse_cap_above, refuse_cap_of_scripts
from orchestrator.actions.commands import alike, train_commands, trainer_command
from orchestrator.actions.history import open_reader
from orchestrator.actions.host_facts import NOTHING
from orchestrator.actions.lots import Lot, inspect, opened, refuse_namesakes, say_company
from orchestrator.actions.meeting import meet
from orchestrator.actions.order import (
    Order,
    Settled,
    entries_at_fault,
    refuse_imported,
    repair_of_node,
    settle,
    settle_stored,
    where_launched,
)
from orchestrator.actions.places import Places
from orchestrator.actions.readiness import say_unprepared
from orchestrator.actions.sending import Launched, Requirement, Task, resend, send
from orchestrator.actions.site import Site, open_site, ship_told
from orchestrator.actions.spread import refuse_other_number
from orchestrator.actions.telling import Tell, silent
from orchestrator.errors import DraftyardError, UsageError
from orchestrator.launcher import taken_retry
from orchestrator.nearest import unknown
from orchestrator.store.rows import Document, Kind, RunRow, State
from orchestrator.units import with_article
from orchestrator.workplace import Workplace
from remote.spec import RANKS_RUNG, REAL_RUNG, DFlashSpec, ScriptSpec, SmokeSpec, Spec

LADDER = tuple(SmokeSpec().rungs)


@dataclass(frozen=True)
class Deployed:
    host: str
    tree_hash: str
    path: str
    num_files: int
    sent_files: int
    sent_bytes: int
    was_there: bool


@dataclass(frozen=True)
class Rehearsal:
    """What a launch would do, without doing it."""

    host: str
    fingerprint: str
    verdict: gate.Verdict
    gpus: tuple[str, ...]
    tree_hash: str
    num_files: int
    repair: str  # the one command that makes what evidence lacks


@dataclass(frozen=True)
class Climbed:
    """A smoke run that was started, or None when every rung has passed for this fingerprint already."""

    launched: Launched | None
    rungs: tuple[str, ...]
    fingerprint: str


def deploy(places: Places, order: Order, *, tell: Tell = silent) -> Deployed:
    """Ships the order's tree and verifies it there; writes nothing here."""
    settled = _settled(places, order, tell)
    with open_site(settled.host) as site:
        done = ship_told(site, settled.tree, tell)
    num_files = len(settled.tree.entries)
    return Deployed(order.host, done.hash, done.path, num_files, done.sent_files, done.sent_bytes, done.was_there)


def rehearse_all(places: Places, order: Order, *, tell: Tell = silent) -> list[Rehearsal]:
    """The same on each of several hosts, and whether their processes would meet."""
    settled = _settled(places, order, tell, trains=True)
    with opened(settled, tell) as lots:
        required = _that_fit(settled, gate.required_rungs(settled.spec))
        found: list[Rehearsal] = []
        for lot in lots:
            own = {gpu: "that is rehearsed" for each in found for gpu in each.gpus if not gpu.isdigit()}
            found.append(_rehearsal(places, lot.settled, lot.site, required, own=own))
        meeting = meet([lot.site for lot in lots], order.recipe)
    _say_untried(settled, required, tell)
    tell(f"the hosts would meet at {meeting.address}, port {meeting.port}")
    return found


def rehearse(places: Places, order: Order, *, rungs: Sequence[str] | None = None, tell: Tell = silent) -> Rehearsal:
    """Looks at the host and asks the gate, as a launch would; `rungs` None means those that a launch requires."""
    settled = _settled(places, order, tell, trains=rungs is None)
    with open_site(settled.host) as site:
        with open_reader(places) as reader:
            say_company(reader, [Lot(settled, site)], tell)
        return _rehearsal(places, settled, site, gate.required_rungs(settled.spec) if rungs is None else rungs)


def launch(places: Places, order: Order, *, tell: Tell = silent) -> Launched:
    """Gate, ship, start. Raises GateRefused (exit 3) with the one command that makes the evidence."""
    settled = _settled(places, order, tell, trains=True)
    spec = settled.spec
    required = Requirement(_that_fit(settled, gate.required_rungs(spec)), order.force_reason)
    if not required.rungs:
        tell(f"warning: {gate.UNTESTED_RECIPE}")
    _say_untried(settled, required.rungs, tell)
    return send(places, settled, Task(Kind.TRAIN, train_commands(spec), required), tell=tell)


def smoke(
    places: Places,
    order: Order,
    *,
    rungs: Sequence[str] = (),
    cap_bytes: int | None = None,
    again: bool = False,
    tell: Tell = silent,
) -> Climbed:
    """Starts the rungs as a job; those that have passed for the same fingerprint are left out unless named."""
    settled = _settled(places, order, tell)
    wanted = wanted_rungs(settled.spec, rungs)
    wanted = wanted if rungs else _that_fit(settled, wanted)
    refuse_cap_of_scripts(cap_bytes, wanted, settled.spec.smoke.scripts, tell)
    with open_site(settled.host) as site:
        found = _rehearsal(places, settled, site, wanted, cap_bytes=cap_bytes)
        refuse_cap_above(cap_bytes, site.facts, found.gpus, settled.host.name)
    if not rungs and not again:
        wanted = tuple(item.rung for item in found.verdict.unmet)
    if not wanted:
        return Climbed(None, (), found.fingerprint)
    command = alike(_ladder_command(settled.spec, wanted, cap_bytes))
    task = Task(Kind.SMOKE, command, cap_bytes=cap_bytes, rungs=tuple(wanted))
    return Climbed(send(places, settled, task, tell=tell), wanted, found.fingerprint)


def smoke_script(places: Places, order: Order, content: bytes, *, name: str, tell: Tell = silent) -> Launched:
    """Runs one script of the user's own beside the shipped tree; its time, peak and whole traceback are kept.

    Raises UsageError for an empty one: it would pass.
    """
    if not content.strip():
        raise UsageError(f"{name} is empty; a script was expected: did what should have written it fail?")
    settled = _settled(places, order, tell)

    def before(site: Site, folder: str) -> None:
        script = f"{folder}/{name}"
        write = 'mkdir -p "$(dirname "$1")" && cat >"$1"'
        done = site.shell.run(["sh", "-c", write, "sh", script], stdin=content)
        if done.exit_code:
            told = done.stderr.decode(errors="replace").strip()
            raise DraftyardError(f"host {settled.host.name}: cannot write {script}: {told}")

    def command(place: Workplace, folder: str) -> tuple[str, ...]:
        return (place.python, "-m", "remote.rungs", folder, f"{Path(name).stem}={folder}/{name}")

    return send(places, settled, Task(Kind.SCRIPT, alike(command), before=before), tell=tell)


def prepare(places: Places, order: Order, *, tell: Tell = silent) -> Launched:
    """Starts the job that makes answers and hidden states in the host's cache."""
    settled = _settled(places, order, tell)
    _only_bundled(settled.spec, Kind.PREPARE)
    if unread := [line for line in settled.lacking if line.startswith("data.prompts")]:
        raise UsageError("\n".join(unread))
    return send(places, settled, Task(Kind.PREPARE, alike(trainer_command("prepare"))), tell=tell)


def evaluate(places: Places, selector: str, *, tell: Tell = silent) -> Launched:
    """Measures the acceptance length of a run's newest checkpoint on the host where it lies."""
    return _beside(places, selector, Kind.EVALUATE, tell=tell)


def export(places: Places, selector: str, *, tell: Tell = silent) -> Launched:
    """Writes a run's newest checkpoint as a folder that public tools load."""
    return _beside(places, selector, Kind.EXPORT, tell=tell)


def resume(places: Places, selector: str, *, tell: Tell = silent) -> Launched:
    """A new attempt of a run that has ended, from its newest whole checkpoint, with the tree and the --gpus it had."""
    with open_reader(places) as reader:
        run = reader.run(selector)
        launched = json.loads(reader.document(run.id, Document.LAUNCH) or "{}")
        checkpoints = reader.checkpoints(run.id)
    if not run.state.is_final:
        raise DraftyardError(f"run {run.id} is {run.state}; only a run that has ended can be resumed")
    refuse_imported(run)
    anew = command_line("launch", words_of_run(run, launched))
    if run.kind != Kind.TRAIN:
        raise DraftyardError(
            f"run {run.id} is {with_article(run.kind)} job; only a training can be resumed\n  start it anew"
        )
    if run.tree_hash is None:
        raise DraftyardError(f"run {run.id} never got to its host; there is nothing to resume\n  start it anew: {anew}")
    if run.state is State.SUCCEEDED and (run.step is None or run.num_steps is None or run.step >= run.num_steps):
        raise DraftyardError(
            f"run {run.id} has succeeded; nothing of it is left to do\n  a new run of the same: {anew}\n"
            f"  once more all the same: draftyard mark {run.id} stopped WHY, then draftyard resume {run.id}"
        )
    places = where_launched(places, run)
    settled = settle_stored(places, run, verb="resume", gpus=tuple(launched.get("named_gpus", ())))
    begin = (
        f"its newest checkpoint is of step {checkpoints[-1].step}" if checkpoints else "no checkpoint of it is known"
    )
    return resend(places, settled, run, train_commands(settled.spec), begin=begin, retry=taken_retry(), tell=tell)


def _settled(places: Places, order: Order, tell: Tell, *, trains: bool = False) -> Settled:
    """A training that lacks data is refused here, not at its end when it looks for the held-out prompts."""
    settled = settle(places, order)
    if trains and settled.lacking:
        raise UsageError("\n".join(settled.lacking))
    for each in settled.each if trains else ():
        refuse_other_number(each.spec, each.host.name, each.gpus, each.node.num_nodes)
    for name in settled.left_out:
        add = shlex.join(["git", "add", "-f", name])
        tell(f"warning: the recipe names {name}, which git ignores: it is not shipped; {add} ships it")
    for line in (*settled.lacking, *settled.unshipped, *settled.doubts, *entries_at_fault(places, order.hosts)):
        tell(f"warning: {line}")
    if trains and settled.others:
        with open_reader(places) as reader:
            say_unprepared(reader, settled, tell)
    return settled


def _beside(places: Places, selector: str, kind: Kind, *, tell: Tell) -> Launched:
    """A job of its own that sees the checkpoints of another run on the same host."""
    with open_reader(places) as reader:
        run = reader.run(selector)
        checkpoints = reader.checkpoints(run.id)
    places = where_launched(places, run)
    settled = replace(settle_stored(places, run, verb=kind), others=())  # its checkpoints lie on the first host alone
    _only_bundled(settled.spec, kind)
    if not checkpoints:
        raise DraftyardError(f"run {run.id} has no checkpoint; there is nothing to {kind}")
    before, step = _checkpoints_of(run), checkpoints[-1].step
    task = Task(kind, alike(trainer_command(kind)), before=before, parent=run, step=step)
    return send(places, settled, task, tell=tell)


def _checkpoints_of(run: RunRow) -> Callable[[Site, str], None]:
    def before(site: Site, folder: str) -> None:
        theirs = f"{site.place.run_dir(run.id)}/checkpoints"
        if site.shell.stat(theirs) is None:
            raise DraftyardError(f"host {run.host} has no {theirs} any more; the checkpoints are gone")
        link = 'mkdir -p "$1" && ln -sfn "$2" "$1/checkpoints"'
        done = site.shell.run(["sh", "-c", link, "sh", folder, theirs])
        if done.exit_code:
            raise DraftyardError(f"host {run.host}: {done.stderr.decode(errors='replace').strip()}")

    return before


def _rehearsal(
    places: Places,
    settled: Settled,
    site: Site,
    rungs: Sequence[str],
    *,
    cap_bytes: int | None = None,
    own: Mapping[str, str] = NOTHING,
) -> Rehearsal:
    """`own`: GPUs that the job has on its other hosts already."""
    spec, tree, host = settled.spec, settled.tree, settled.host.name
    with open_reader(places) as reader:
        refuse_namesakes(reader, settled, here=places.hosts_file)
        lot = Lot(settled, site)
        promised = {**reader.promised_gpus(host), **own}
        gpus, mark = inspect(lot, lambda choose: choose(promised), reader, cap_bytes=cap_bytes)
        rows = [row for row in reader.evidence(recipe=spec.recipe) if row.branch == spec.branch]
    found = gate.verdict(rungs, rows, mark)
    repair = repair_of_node(settled, gpus)
    return Rehearsal(host, mark.value, found, gpus, tree.hash, len(tree.entries), repair)


def _that_fit(settled: Settled, rungs: Sequence[str]) -> tuple[str, ...]:
    """Without the rung of two processes where the host has one GPU for this job."""
    num_gpus = len(settled.gpus) or settled.num_gpus
    return tuple(rung for rung in rungs if rung != RANKS_RUNG or num_gpus > 1)


def _say_untried(settled: Settled, rungs: Sequence[str], tell: Tell) -> None:
    """What no rung of a job over several hosts has tried: each is climbed on one of them."""
    if settled.others:
        within = f"rung {RANKS_RUNG} tries two processes within each host, none between hosts"
        left_out = f"rung {RANKS_RUNG} is left out, as each host has one process"
        told = within if RANKS_RUNG in rungs else left_out
        tell(f"note: {told}: that hosts reach one another is looked at before a start, how their processes do is not")


def wanted_rungs(spec: Spec, named: Sequence[str]) -> tuple[str, ...]:
    """The rungs named, or every one of the recipe. Raises UsageError for one that nobody knows, or for none."""
    own = tuple(dict.fromkeys([*gate.required_rungs(spec), *spec.smoke.scripts]))
    bundled = () if isinstance(spec, ScriptSpec) else (*LADDER, REAL_RUNG)
    known = tuple(dict.fromkeys([*bundled, *own]))
    for rung in named or own:
        if rung not in known:
            hint = None if known else "smoke.scripts of the recipe names them"
            raise UsageError(unknown("rung", rung, known, hint=hint))
    if not (named or own):
        raise UsageError(f"recipe {spec.recipe} names no rungs; name some under smoke.scripts, or use --script FILE")
    return tuple(named) or own


def _ladder_command(
    spec: Spec, rungs: tuple[str, ...], cap_bytes: int | None
) -> Callable[[Workplace, str], tuple[str, ...]]:
    def command(place: Workplace, folder: str) -> tuple[str, ...]:
        if isinstance(spec, ScriptSpec):
            return (
                place.python,
                "-m",
                "remote.rungs",
                folder,
                *(f"{rung}={spec.smoke.scripts[rung]}" for rung in rungs),
            )
        cap = ("--cap", str(cap_bytes)) if cap_bytes is not None else ()
        return (place.python, "-m", "remote.drafter", "smoke", folder, *rungs, *cap)

    return command


def _only_bundled(spec: Spec, kind: Kind) -> None:
    if not isinstance(spec, DFlashSpec):
        raise UsageError(f"recipe {spec.recipe} runs a script of its own; {kind} is for the bundled trainer")
