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
from typing import Any

from orchestrator import gate
from orchestrator.actions import life
from orchestrator.actions.endings import first_line, outcome
from orchestrator.actions.host_facts import capacity_of, choose_gpus, gate_facts, require, versions
from orchestrator.actions.order import Settled, new_id
from orchestrator.actions.places import Places
from orchestrator.actions.plans import plan_body
from orchestrator.actions.site import Site, open_site, ship_told
from orchestrator.actions.telling import Tell, silent
from orchestrator.errors import DraftyardError, GateRefused, RunNotFound, StoreError, UsageError
from orchestrator.launch import Job, find_processes, start
from orchestrator.launcher import this_process
from orchestrator.store.rows import Document, Kind, NewRun, RunRow, State
from orchestrator.store.run_states import Choose
from orchestrator.store.writes import Store
from orchestrator.workplace import Workplace
from remote.plan import plan
from remote.spec import DFlashSpec, Spec, dump

Command = Callable[[Workplace, str], tuple[str, ...]]  # (workplace, run folder) -> argv of the job
Take = Callable[[Choose], tuple[str, ...]]  # tells the choice which GPUs are promised, and keeps what it takes


@dataclass(frozen=True)
class Requirement:
    """What the gate wants before a launch, and what a person said to go past it."""

    rungs: tuple[str, ...]
    repair: str  # the one command that makes missing evidence
    force_reason: str | None = None


@dataclass(frozen=True)
class Task:
    """What a job does, apart from where."""

    kind: Kind
    command: Command
    requirement: Requirement | None = None
    before: Callable[[Site, str], None] | None = None  # (site, run folder), just before the start
    parent: RunRow | None = None
    cap_bytes: int | None = None  # the GPU memory that a smoke run pretends to have


@dataclass(frozen=True)
class Launched:
    """A job that was started; what becomes of it is in the store."""

    run_id: str
    attempt: int
    host: str
    run_dir: str
    sent_bytes: int = 0
    unmet: tuple[gate.RungStanding, ...] = ()  # what --force went past


def send(places: Places, settled: Settled, task: Task, *, tell: Tell = silent) -> Launched:
    """The whole way once. Raises HostError, MissingDependency, GateRefused or another DraftyardError."""
    with Store(places.db) as store, _followed(places, store, tell):
        new = _row(settled, task)
        run, is_ours = _begin(store, new)
        if not is_ours:
            return _adopted(store, run, new, tell)
        with outcome(store, run.id, attempt=0, tell=tell):
            tell(f"looking at {settled.host.name}")
            with open_site(settled.host) as site:
                return _on_site(store, run, settled, task, site, tell=tell)


def _begin(store: Store, new: NewRun) -> tuple[RunRow, bool]:
    """The run's row, and whether it is this launch's to start: not where an earlier try of the same launch was first."""
    was_there = _is_there(store, new.id)
    run = store.create_run(new)
    if not was_there:
        return run, _is_launched_by_us(store, run, new)
    if run.attempt > 0 or not run.state.is_final or not _is_told_the_same(store, run, new):
        return run, False
    try:
        store.remove(run.id)  # nothing of it ever came to a host: this one begins anew
        store.purge(run.id)
    except StoreError:
        raise
    except DraftyardError:
        pass  # another try at the same time was quicker
    run = store.create_run(new)
    return run, _is_launched_by_us(store, run, new)


def _is_launched_by_us(store: Store, run: RunRow, new: NewRun) -> bool:
    return store.reader.document(run.id, Document.LAUNCHER) == new.documents[Document.LAUNCHER]


def _is_there(store: Store, run_id: str) -> bool:
    with suppress(RunNotFound):
        return store.reader.run(run_id).id == run_id  # not a longer id that begins so
    return False


def _is_told_the_same(store: Store, run: RunRow, new: NewRun) -> bool:
    return store.reader.document(run.id, Document.SPEC) == new.documents[Document.SPEC]


def _adopted(store: Store, run: RunRow, new: NewRun, tell: Tell) -> Launched:
    """The run of an earlier try of the same launch, whose reply was lost. Raises UsageError when it is another one."""
    if run.host != new.host or not _is_told_the_same(store, run, new):
        told = f"run {run.id} is there already: {run.recipe}, branch {run.branch}, on {run.host}, or with other values"
        raise UsageError(f"{told}; give this one another --id (draftyard show {run.id} tells more)")
    if run.state.is_final and run.state is not State.SUCCEEDED:
        told = f"run {run.id} was launched before and is {run.state}: {run.evidence}"
        raise DraftyardError(f"{told}\n  go on with it: draftyard resume {run.id}; or give another --id")
    tell(f"run {run.id} was launched before and is {run.state}; nothing more was started")
    return Launched(run.id, run.attempt, run.host, f"{run.workdir}/runs/{run.id}" if run.workdir else "")


def resend(
    places: Places, settled: Settled, run: RunRow, command: Command, *, retry: int | None = None, tell: Tell = silent
) -> Launched:
    """One more attempt of a run, with the tree it was launched with. Until the attempt is made, nothing is written.

    `retry`: the wish that it carries out.
    """
    with Store(places.db) as store, _followed(places, store, tell):
        tell(f"looking at {settled.host.name}")
        with open_site(settled.host) as site:
            require(site.facts, settled.spec, host=run.host, python=site.place.python)
            assert run.tree_hash is not None
            tree = site.place.tree_dir(run.tree_hash)
            if site.shell.stat(tree) is None:
                raise DraftyardError(
                    f"host {run.host} no longer has the tree {run.tree_hash[:16]} of run {run.id}; launch anew"
                )
            _refuse_leftovers(store, site, run)
            _refuse_lost_checkpoints(site, run, [row.path for row in store.reader.checkpoints(run.id)])
            choose = _choice(site, settled, run.kind)
            attempt = store.new_attempt(run.id, after=run.attempt, retry=retry, launcher=this_process(), choose=choose)
            return _start(store, site, settled, run, attempt, (command, tree), tell=tell)


def inspect(
    site: Site, settled: Settled, take: Take, *, kind: str = Kind.TRAIN, cap_bytes: int | None = None
) -> tuple[tuple[str, ...], gate.Fingerprint]:
    """The GPUs the job gets and the fingerprint of what would run. Raises MissingDependency or GpuBusy."""
    require(site.facts, settled.spec, host=settled.host.name, python=site.place.python)
    gpus = take(_choice(site, settled, kind))
    facts = gate_facts(site.facts, gpus)
    mark = gate.fingerprint(settled.spec, tree_hash=settled.tree.hash, host=facts, env=settled.env, cap_bytes=cap_bytes)
    return gpus, mark


def _choice(site: Site, settled: Settled, kind: str) -> Choose:
    def choose(promised: Mapping[str, str]) -> tuple[str, ...]:
        name = settled.host.name
        return choose_gpus(site.facts, settled.gpus, settled.spec, host=name, promised=promised, kind=Kind(kind))

    return choose


def _refuse_leftovers(store: Store, site: Site, run: RunRow) -> None:
    """What outlived an earlier attempt would write into the same checkpoints.

    What another start has begun meanwhile is no leftover, and nobody is told to end it: `new_attempt` refuses this one.
    """
    found = find_processes(site.shell, site.place, run_ids=[run.id])
    now = store.reader.run(run.id)  # after the look: an attempt is written before it has processes
    if found and now.state.is_final and now.attempt == run.attempt:
        pids = ", ".join(str(item.pid) for item in found)
        raise DraftyardError(
            f"run {run.id} still has processes of an earlier attempt on host {run.host}: pid {pids}\n"
            f"  end them first: draftyard reap {run.host}"
        )


def _refuse_lost_checkpoints(site: Site, run: RunRow, paths: Sequence[str]) -> None:
    """A resume that finds none of them would begin at step 0 without a word."""
    folder = site.place.run_dir(run.id)
    if paths and not any(site.shell.stat(f"{folder}/{path}") for path in reversed(paths)):
        raise DraftyardError(
            f"host {run.host} has none of the {len(paths)} checkpoints of run {run.id} any more; a resume would begin "
            f"anew\n  launch it anew: draftyard launch {run.recipe} -b {run.branch} --host {run.host}"
        )


def _on_site(store: Store, run: RunRow, settled: Settled, task: Task, site: Site, *, tell: Tell) -> Launched:
    gpus, mark = inspect(
        site, settled, lambda choose: store.promise_gpus(run.id, choose), kind=task.kind, cap_bytes=task.cap_bytes
    )
    unmet = _ask_the_gate(store, settled, task, mark)
    _describe(store, run, settled, site, mark, gpus)
    shipped = ship_told(site, settled.tree, tell)
    if task.before is not None:
        task.before(site, site.place.run_dir(run.id))
    tell(f"starting run {run.id}: {run.recipe}, branch {run.branch}")
    launched = _start(store, site, settled, run, store.new_attempt(run.id), (task.command, shipped.path), tell=tell)
    return dataclasses.replace(launched, sent_bytes=shipped.sent_bytes, unmet=unmet)


def _ask_the_gate(store: Store, settled: Settled, task: Task, mark: gate.Fingerprint) -> tuple[gate.RungStanding, ...]:
    wanted = task.requirement
    if wanted is None:
        return ()
    spec = settled.spec
    rows = [row for row in store.reader.evidence(recipe=spec.recipe) if row.branch == spec.branch]
    found = gate.verdict(wanted.rungs, rows, mark)
    if found.is_allowed or wanted.force_reason is not None:
        return found.unmet
    told = "\n".join(f"  {line}" for line in gate.explain(found.unmet))
    raise GateRefused(
        f"{spec.recipe}, branch {spec.branch}, may not be launched on {settled.host.name}:\n{told}", wanted.repair
    )


def _describe(
    store: Store, run: RunRow, settled: Settled, site: Site, mark: gate.Fingerprint, gpus: tuple[str, ...]
) -> None:
    """Everything that provenance needs and that only the host could tell."""
    store.host_seen(settled.host.name, address=settled.host.address, facts=site.facts)
    store.describe_run(run.id, workdir=site.place.work_dir, tree_hash=settled.tree.hash, fingerprint=mark.value)
    store.keep_document(run.id, Document.FINGERPRINT, json.dumps(dict(mark.parts)))
    launch: dict[str, Any] = {
        "python": site.place.python,
        "gpus": list(gpus),
        "overrides": list(settled.order.overrides),
    }
    launch |= settled.recipe
    launch |= {"env": sorted(settled.env), "versions": versions(site.facts)}  # names only: values may be secrets
    if settled.order.gpus:
        launch["named_gpus"] = list(settled.order.gpus)  # a resume asks for them again
    store.keep_document(run.id, Document.LAUNCH, json.dumps(launch))
    if isinstance(settled.spec, DFlashSpec):
        capacity_bytes, device = capacity_of(site.facts, gpus)
        rung = "fwd_bwd" if run.kind == Kind.SMOKE else None
        predicted = plan(settled.spec, capacity_bytes=capacity_bytes, device=device, rung=rung)
        store.keep_document(run.id, Document.PLAN, json.dumps(plan_body(predicted)))


def _start(
    store: Store,
    site: Site,
    settled: Settled,
    run: RunRow,
    attempt: int,
    what: tuple[Command, str],
    *,
    tell: Tell,
) -> Launched:
    command, tree = what
    folder, life_spec = site.place.run_dir(run.id), settled.spec.life
    with outcome(store, run.id, attempt=attempt, tell=tell) as doubt:
        job = Job(
            run_id=run.id,
            kind=run.kind,
            attempt=attempt,
            argv=command(site.place, folder),
            spec_json=dump(settled.spec),
            cwd=tree,
            env=settled.env,
            gpus=tuple(json.loads(store.reader.document(run.id, Document.LAUNCH) or "{}").get("gpus", ())),
            grace_s=life_spec.grace_s,
            max_duration_s=life_spec.max_duration_s,
            memory_limit_bytes=life_spec.memory_limit_bytes,
            facts={"recipe": run.recipe, "branch": run.branch},
        )

        def before_spawn() -> None:
            store.set_up(run.id, attempt)
            doubt.may_live = True  # last of all: whatever breaks off before this line has started nothing

        start(site.shell, site.place, job, before_spawn=before_spawn)
    return Launched(run.id, attempt, site.host.name, folder)


@contextmanager
def _followed(places: Places, store: Store, tell: Tell) -> Iterator[None]:
    """Whatever is live afterwards has a follower: the job, or a start of which nobody knows how it went.

    A job that was started is started, whatever the follower's own start comes to: the next verb tries that again.
    """
    try:
        yield
    except BaseException:
        with suppress(StoreError):
            if store.reader.live_runs():
                life.ensure_follower(places)
        raise
    try:
        life.ensure_follower(places)
    except (OSError, DraftyardError) as error:
        tell(f"the job was started, its follower was not ({first_line(error)}); `draftyard wait` starts one")


def _row(settled: Settled, task: Task) -> NewRun:
    spec, git = settled.spec, settled.git
    documents = {
        Document.SPEC: dump(spec),
        Document.LAUNCHER: this_process(),
        **({Document.GIT_PATCH: git.patch} if git.patch else {}),
    }
    force = task.requirement.force_reason if task.requirement else None
    return NewRun(
        id=settled.order.run_id or new_id(),
        kind=task.kind,
        recipe=spec.recipe,
        branch=spec.branch,
        host=settled.host.name,
        documents=documents,
        num_steps=_num_steps(spec) if task.kind is Kind.TRAIN else None,
        git_commit=git.commit,
        git_dirty=git.is_dirty,
        parent_run=task.parent.id if task.parent else None,
        forced_reason=force,
        tags=(*spec.tags, *settled.order.tags),
        why=spec.why,
    )


def _num_steps(spec: Spec) -> int | None:
    """As the recipe has it; a script says it with a setting of that name."""
    if isinstance(spec, DFlashSpec):
        return spec.train.num_steps
    told = spec.settings.get("num_steps", "")
    return int(told) if told.isdecimal() else None
