"""From a settled order to a started job: row, look at the host, gate, ship, start, follower.

Every ending leaves a trace: a row that says failed and why, or, when the gate refuses, an event. Once the
supervisor may have been started, nothing here ends the run: its folder on the host tells the follower.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator import gate
from orchestrator.actions import life
from orchestrator.actions.endings import first_line, new_attempt, outcome, told_if_left
from orchestrator.actions.host_facts import Card, card_of, require, versions
from orchestrator.actions.lots import (
    Lot,
    choice,
    inspect,
    opened,
    refuse_leftovers,
    refuse_lost_checkpoints,
    refuse_namesakes,
    say_company,
)
from orchestrator.actions.meeting import Meeting, meet
from orchestrator.actions.order import Settled, new_id, num_steps_of, repair_of_node
from orchestrator.actions.parts import HostPart, start_parts
from orchestrator.actions.places import Places
from orchestrator.actions.plans import plan_body
from orchestrator.actions.rungs import planned_rung
from orchestrator.actions.site import Site, ship_told
from orchestrator.actions.spread import Node
from orchestrator.actions.telling import Tell, beginning, silent
from orchestrator.errors import DraftyardError, GateRefused, StoreError, UsageError
from orchestrator.launch import Job, Part
from orchestrator.launcher import settle_if_killed, this_process
from orchestrator.store.rows import Document, Kind, NewRun, Reason, RunRow, State
from orchestrator.store.writes import Store
from orchestrator.workplace import Workplace
from remote.plan import plan
from remote.spec import DFlashSpec, Spec, dump

Command = Callable[[Workplace, str], tuple[str, ...]]  # (workplace, run folder) -> argv of the job
Commands = Callable[[Node, Meeting | None], Command]  # each host's, where they meet if there are several


@dataclass(frozen=True)
class Requirement:
    """What the gate wants before a launch, and what a person said to go past it."""

    rungs: tuple[str, ...]
    force_reason: str | None = None


@dataclass(frozen=True)
class Task:
    """What a job does, apart from where."""

    kind: Kind
    commands: Commands
    requirement: Requirement | None = None
    before: Callable[[Site, str], None] | None = None  # (site, run folder), just before the start
    parent: RunRow | None = None
    cap_bytes: int | None = None  # the GPU memory that a smoke run pretends to have
    rungs: tuple[str, ...] = ()  # that a smoke run climbs
    step: int | None = None  # of the parent's checkpoint that it reads


@dataclass(frozen=True)
class Launched:
    """A job that was started; what becomes of it is in the store."""

    run_id: str
    attempt: int
    host: str
    run_dir: str
    sent_bytes: int = 0
    unmet: tuple[gate.RungStanding, ...] = ()  # what --force went past
    more_hosts: tuple[str, ...] = ()
    found: State | None = None  # of a run that an earlier try had started: the state it was in


def send(places: Places, settled: Settled, task: Task, *, tell: Tell = silent) -> Launched:
    """The whole way once. Raises HostError, MissingDependency, GateRefused or another DraftyardError."""
    with told_if_left(tell) as begun, Store(places.db) as store, _followed(places, store, tell):
        refuse_namesakes(store.reader, settled, here=places.hosts_file)
        new = _row(settled, task, places.hosts_file)
        run, is_ours = _begin_told(store, new, tell)
        if not is_ours:
            return _adopted(store, run, new, tell)
        with outcome(store, run.id, attempt=0, tell=tell), opened(settled, tell) as lots:
            begun.launched = _on_sites(store, run, task, lots, tell=tell)
            return begun.launched


def _begin_told(store: Store, new: NewRun, tell: Tell) -> tuple[RunRow, bool]:
    """As `_begin`; an interrupt on the way, when the row may be there already, is that row's end."""
    try:
        return _begin(store, new)
    except KeyboardInterrupt:
        with suppress(DraftyardError):
            run = store.reader.run(new.id)
            if run.id == new.id and _is_launched_by_us(store, run, new):
                with outcome(store, run.id, attempt=0, tell=tell):
                    raise
        raise


def _begin(store: Store, new: NewRun) -> tuple[RunRow, bool]:
    """The run's row, and whether it is this launch's to start: not where an earlier try of the same launch was first.

    Of tries at the same time exactly one starts it: whose the row is says the row alone, never what was there before.
    """
    run = store.create_run(new)
    try:
        if _is_launched_by_us(store, run, new):
            return run, True
        settle_if_killed(store, run)  # though no follower has said so yet
        run = store.reader.run(run.id)
        if run.id == new.id:  # else it is gone, and the id of another run begins so
            if not _can_begin_anew(store, run, new):
                return run, False
            store.remove(new.id)
            store.purge(new.id)
    except StoreError:
        raise
    except DraftyardError:
        pass  # another try at the same time was quicker: that row is gone, and the next one may be its own
    run = store.create_run(new)
    return run, _is_launched_by_us(store, run, new)


def _can_begin_anew(store: Store, run: RunRow, new: NewRun) -> bool:
    """Whether that is this launch, ended before anything of it began on a host."""
    return run.state.is_final and not _may_have_begun(store, run) and _is_told_the_same(store, run, new)


def _may_have_begun(store: Store, run: RunRow) -> bool:
    """Whether a supervisor has been seen, or nobody could tell. A claim of one on the host would end the start anew."""
    return any(
        each.state in (State.LOST, State.SUCCEEDED)
        or each.pid is not None
        or each.last_event_s is not None
        or each.exit_code is not None
        or str(each.reason or "").startswith(Reason.EXIT)
        for each in store.reader.attempts(run.id)
    )


def _is_launched_by_us(store: Store, run: RunRow, new: NewRun) -> bool:
    return store.reader.document(run.id, Document.LAUNCHER) == new.documents[Document.LAUNCHER]


def _is_told_the_same(store: Store, run: RunRow, new: NewRun) -> bool:
    return store.reader.document(run.id, Document.SPEC) == new.documents[Document.SPEC]


def _adopted(store: Store, run: RunRow, new: NewRun, tell: Tell) -> Launched:
    """The run of an earlier try of the same launch, whose reply was lost. Raises UsageError when it is another one."""
    if (run.host, run.more_hosts) != (new.host, new.more_hosts) or not _is_told_the_same(store, run, new):
        on = " and ".join(run.hosts)
        told = f"run {run.id} is there already: {run.recipe}, branch {run.branch}, on {on}, or with other values"
        raise UsageError(f"{told}; give this one another --id (draftyard show {run.id} tells more)")
    if run.state.is_final and run.state is not State.SUCCEEDED:
        told = f"run {run.id} was launched before and is {run.state}: {run.evidence}"
        raise DraftyardError(f"{told}\n  go on with it: draftyard resume {run.id}; or give another --id")
    tell(f"run {run.id} was launched before and is {run.state}; nothing more was started")
    run_dir = f"{run.workdir}/runs/{run.id}" if run.workdir else ""
    return Launched(run.id, run.attempt, run.host, run_dir, more_hosts=run.more_hosts, found=run.state)


def resend(
    places: Places,
    settled: Settled,
    run: RunRow,
    commands: Commands,
    *,
    begin: str,
    retry: int | None = None,
    tell: Tell = silent,
) -> Launched:
    """One more attempt of a run, with the tree it was launched with, on the hosts it had. Until the attempt is made,
    nothing is written.

    `begin`: where it goes on, for a person; `retry`: the wish that it carries out.
    """
    with (
        told_if_left(tell) as begun,
        Store(places.db) as store,
        _followed(places, store, tell),
        opened(settled, tell) as lots,
    ):
        assert run.tree_hash is not None
        refuse_namesakes(store.reader, settled, here=places.hosts_file)
        trees = []
        for lot in lots:
            require(lot.site.facts, settled.spec, host=lot.name, python=lot.site.place.python)
            trees.append(lot.site.place.tree_dir(run.tree_hash))
            if lot.site.shell.stat(trees[-1]) is None:
                raise DraftyardError(
                    f"host {lot.name} no longer has the tree {run.tree_hash[:16]} of run {run.id}; launch anew"
                )
            refuse_leftovers(store, lot.site, run)
        refuse_lost_checkpoints(store, lots[0].site, run)
        say_company(store.reader, lots, tell, run_id=run.id)
        how = {"after": run.attempt, "retry": retry, "choose": choice(lots[0], run.kind, store.reader)}
        attempt = new_attempt(store, run, tell=tell, launcher=this_process(), **how)
        with outcome(store, run.id, attempt=attempt, tell=tell):
            tell(f"starting attempt {attempt} of run {run.id}: {begin}")
            store.keep_document(run.id, Document.HOSTS_FILE, str(places.hosts_file))
            for lot in lots[1:]:
                store.promise_gpus(run.id, choice(lot, run.kind, store.reader), host=lot.name)
        begun.launched = _start(store, lots, run, attempt, (commands, trees), tell=tell)
        return begun.launched


def _on_sites(store: Store, run: RunRow, task: Task, lots: Sequence[Lot], *, tell: Tell) -> Launched:
    unmet: tuple[gate.RungStanding, ...] = ()
    cards: list[Card] = []
    for lot in lots:
        host = None if lot is lots[0] else lot.name
        take = partial(store.promise_gpus, run.id, host=host)
        gpus, mark = inspect(lot, take, store.reader, kind=task.kind, cap_bytes=task.cap_bytes)
        unmet += tuple(item for item in _ask_the_gate(store, lot, task, mark, gpus) if item not in unmet)
        if host is None:
            _describe(store, run, lot, mark, gpus, task)
        store.host_seen(lot.name, address=lot.settled.host.address, facts=lot.site.facts)
        cards.append(card_of(lot.site.facts, gpus))
    say_company(store.reader, lots, tell, run_id=run.id)
    _keep_plan(store, run, lots[0].settled.spec, cards, task.rungs)
    store.place_nodes(run.id, [lot.site.place.work_dir for lot in lots])
    shipped = [ship_told(lot.site, lot.settled.tree, tell) for lot in lots]
    if task.before is not None:
        task.before(lots[0].site, lots[0].site.place.run_dir(run.id))
    tell(beginning(run.id, task.kind, run.recipe, run.branch, parent=run.parent_run, step=task.step))
    what = (task.commands, [done.path for done in shipped])
    launched = _start(store, lots, run, new_attempt(store, run, tell=tell), what, tell=tell)
    return dataclasses.replace(launched, sent_bytes=sum(done.sent_bytes for done in shipped), unmet=unmet)


def _ask_the_gate(
    store: Store, lot: Lot, task: Task, mark: gate.Fingerprint, gpus: tuple[str, ...]
) -> tuple[gate.RungStanding, ...]:
    wanted = task.requirement
    if wanted is None:
        return ()
    spec = lot.settled.spec
    rows = [row for row in store.reader.evidence(recipe=spec.recipe) if row.branch == spec.branch]
    found = gate.verdict(wanted.rungs, rows, mark)
    if found.is_allowed or wanted.force_reason is not None:
        return found.unmet
    told = "\n".join(f"  {line}" for line in gate.explain(found.unmet))
    repair = repair_of_node(lot.settled, gpus)
    raise GateRefused(f"{spec.recipe}, branch {spec.branch}, may not be launched on {lot.name}:\n{told}", repair)


def _describe(store: Store, run: RunRow, lot: Lot, mark: gate.Fingerprint, gpus: tuple[str, ...], task: Task) -> None:
    """Everything that provenance needs and that only the first host could tell."""
    settled, site = lot.settled, lot.site
    store.describe_run(run.id, workdir=site.place.work_dir, tree_hash=settled.tree.hash, fingerprint=mark.value)
    store.keep_document(run.id, Document.FINGERPRINT, json.dumps(dict(mark.parts)))
    told = {"python": site.place.python, "gpus": list(gpus), "versions": versions(site.facts)}
    store.keep_document(run.id, Document.LAUNCH, json.dumps({**told, **_typed(settled, task)}))


def _typed(settled: Settled, task: Task) -> dict[str, Any]:
    """What a launch knows before its host is asked: enough to type the same again, wherever it breaks off."""
    order = settled.order
    typed: dict[str, Any] = {"overrides": list(order.overrides), **settled.recipe}
    typed["env"] = sorted(settled.env)  # names only: values may be secrets
    if task.step is not None:
        typed["checkpoint_step"] = task.step
    if order.gpus:
        typed["named_gpus"] = list(order.gpus)  # a resume asks for them again
    if order.env:
        typed["named_env"] = sorted(order.env)  # so does whoever types the same again
    return typed


def _keep_plan(store: Store, run: RunRow, spec: Spec, cards: Sequence[Card], rungs: Sequence[str]) -> None:
    """The plan for the smallest card of all hosts: what does not fit there ends the job everywhere. None of a smoke run
    whose rungs have nothing of the recipe's own drafter."""
    rung = planned_rung(rungs) if run.kind == Kind.SMOKE else None
    if isinstance(spec, DFlashSpec) and (rung is not None or run.kind != Kind.SMOKE):
        capacity_bytes = min((card.capacity_bytes for card in cards if card.capacity_bytes is not None), default=None)
        are_hopper, told = all(card.is_hopper for card in cards), {card.multiplies_float8 for card in cards}
        float8 = None if None in told and False not in told else all(told)
        predicted = plan(spec, capacity_bytes=capacity_bytes, device=cards[0].device, rung=rung, is_hopper=are_hopper, multiplies_float8=float8)  # fmt: skip
        store.keep_document(run.id, Document.PLAN, json.dumps(plan_body(predicted)))


def _start(
    store: Store,
    lots: Sequence[Lot],
    run: RunRow,
    attempt: int,
    what: tuple[Commands, Sequence[str]],
    *,
    tell: Tell,
) -> Launched:
    """On every host; `what`: the commands, and the tree on each."""
    with outcome(store, run.id, attempt=attempt, tell=tell) as doubt:
        meeting = meet([lot.site for lot in lots], run.id) if len(lots) > 1 else None
        if meeting is not None:
            tell(f"the hosts meet at {meeting.address}, port {meeting.port}")
        gpus = store.reader.gpus_by_host(run.id)
        parts = [
            _part(lot, run, attempt, what[0], tree, meeting, gpus) for lot, tree in zip(lots, what[1], strict=True)
        ]

        def before_spawn() -> None:
            store.set_up(run.id, attempt)
            doubt.may_live = True  # last of all: whatever breaks off before this line has started nothing

        each = [HostPart(lot.name, part) for lot, part in zip(lots, parts, strict=True)]
        start_parts(store, each, doubt, before_spawn=before_spawn)
    return Launched(run.id, attempt, lots[0].name, parts[0].run_dir, more_hosts=tuple(lot.name for lot in lots[1:]))


def _part(
    lot: Lot,
    run: RunRow,
    attempt: int,
    commands: Commands,
    tree: str,
    meeting: Meeting | None,
    gpus: Mapping[str, tuple[str, ...]],
) -> Part:
    site, node, life_spec = lot.site, lot.settled.node, lot.settled.spec.life
    job = Job(
        run_id=run.id,
        kind=run.kind,
        attempt=attempt,
        argv=commands(node, meeting)(site.place, site.place.run_dir(run.id)),
        spec_json=dump(lot.settled.spec),
        cwd=tree,
        env=lot.settled.env,
        gpus=gpus.get(lot.name, ()),
        grace_s=life_spec.grace_s,
        max_duration_s=life_spec.max_duration_s,
        memory_limit_bytes=life_spec.memory_limit_bytes,
        facts={"recipe": run.recipe, "branch": run.branch},
        node=node.number,
        variables={} if meeting is None else meeting.variables(node.number),
    )
    return Part(site.shell, site.place, job)


@contextmanager
def _followed(places: Places, store: Store, tell: Tell) -> Iterator[None]:
    """Whatever is live afterwards has a follower: the job, or a start of which nobody knows how it went.

    A job that was started is started, whatever the follower's own start comes to: the next verb tries that again.
    """
    try:
        yield
        try:
            life.ensure_follower(places)
        except (OSError, DraftyardError) as error:
            tell(f"the job was started, its follower was not ({first_line(error)}); `draftyard wait` starts one")
    except BaseException:
        with suppress(StoreError):
            if store.reader.live_runs():
                life.ensure_follower(places)
        raise


def _row(settled: Settled, task: Task, hosts_file: Path) -> NewRun:
    spec, git = settled.spec, settled.git
    documents = {
        Document.SPEC: dump(spec),
        Document.LAUNCH: json.dumps(_typed(settled, task)),
        Document.LAUNCHER: this_process(),
        Document.HOSTS_FILE: str(hosts_file),
        **({Document.GIT_PATCH: git.patch} if git.patch else {}),
    }
    force = task.requirement.force_reason if task.requirement else None
    return NewRun(
        id=settled.order.run_id or new_id(),
        kind=task.kind,
        recipe=spec.recipe,
        branch=spec.branch,
        host=settled.host.name,
        more_hosts=tuple(each.host.name for each in settled.others),
        documents=documents,
        num_steps=num_steps_of(spec) if task.kind is Kind.TRAIN else None,
        git_commit=git.commit,
        git_dirty=git.is_dirty,
        parent_run=task.parent.id if task.parent else None,
        forced_reason=force,
        tags=(*spec.tags, *settled.order.tags),
        why=spec.why,
    )
