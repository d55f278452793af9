"""A host of a job with its door open: what the job would be there, which GPUs it gets, and what speaks against a start."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from orchestrator import gate
from orchestrator.actions.again import command_line, words_of_run
from orchestrator.actions.host_facts import (
    NoGpu,
    choose_gpus,
    gate_facts,
    gpu_fault,
    require,
    versions,
)
from orchestrator.actions.installing import install_command
from orchestrator.actions.order import Settled
from orchestrator.actions.plans import usual_device
from orchestrator.actions.readiness import refuse_shared_folders, refuse_unready
from orchestrator.actions.residuals import residuals
from orchestrator.actions.site import Site, open_site
from orchestrator.actions.spread import arithmetic, num_ranks
from orchestrator.actions.telling import Tell
from orchestrator.errors import DraftyardError, UsageError
from orchestrator.host import Host, hosts_of
from orchestrator.launch import find_processes
from orchestrator.shell.connect import endpoints
from orchestrator.shell.routes import Endpoint
from orchestrator.store.reads import Reader
from orchestrator.store.rows import Document, Kind, RunRow
from orchestrator.store.run_states import Choose
from orchestrator.store.writes import Store
from orchestrator.units import counted
from remote.spec import DFlashSpec

Take = Callable[[Choose], tuple[str, ...]]  # tells the choice which GPUs are promised, and keeps what it takes


@dataclass(frozen=True)
class Lot:
    """One host of a job with its door open, and what the job is there."""

    settled: Settled
    site: Site

    @property
    def name(self) -> str:
        return self.settled.host.name


@contextmanager
def opened(settled: Settled, tell: Tell) -> Iterator[list[Lot]]:
    """Every host of the job. Raises HostError for one that does not answer, DraftyardError where they are unlike, where two
    have one work folder, or where one lacks what it must have itself."""
    with ExitStack() as stack:
        lots = []
        for each in settled.each:
            tell(f"looking at {each.host.name}")
            lots.append(Lot(each, stack.enter_context(open_site(each.host))))
        refuse_unlike(lots)
        if len(lots) > 1:
            refuse_shared_folders(lots)
            refuse_unready(lots)
        yield lots


def inspect(
    lot: Lot, take: Take, reader: Reader, *, kind: str = Kind.TRAIN, cap_bytes: int | None = None
) -> tuple[tuple[str, ...], gate.Fingerprint]:
    """The GPUs the job gets and the fingerprint of what would run. Raises MissingDependency, NoGpu or GpuBusy."""
    settled, facts = lot.settled, lot.site.facts
    require(facts, settled.spec, host=lot.name, python=lot.site.place.python)
    if kind in (Kind.TRAIN, Kind.SMOKE):
        refuse_cardless(lot)
    gpus = take(choice(lot, kind, reader))
    seen = gate_facts(facts, gpus)
    mark = gate.fingerprint(settled.spec, tree_hash=settled.tree.hash, host=seen, env=settled.env, cap_bytes=cap_bytes)
    return gpus, mark


def choice(lot: Lot, kind: str, reader: Reader) -> Choose:
    """`reader` tells what runs on that host took beyond their plans, as `plan --host` counts it."""
    spec, is_planned = lot.settled.spec, kind in (Kind.TRAIN, Kind.SMOKE) and lot.site.facts.get("gpus")
    seen: Mapping[str, Sequence[int]] = {}
    if isinstance(spec, DFlashSpec) and is_planned:
        seen = residuals(reader, spec, device="cuda", host=lot.name).by_stage

    def choose(promised: Mapping[str, str]) -> tuple[str, ...]:
        facts, settled = lot.site.facts, lot.settled
        return choose_gpus(
            facts,
            settled.gpus,
            settled.spec,
            host=lot.name,
            promised=promised,
            kind=Kind(kind),
            num_gpus=settled.num_gpus,
            seen=seen,
        )

    return choose


def refuse_cardless(lot: Lot) -> None:
    """NoGpu where a recipe for cards would train on processors, which nobody who wrote it can have meant."""
    spec, facts, host = lot.settled.spec, lot.site.facts, lot.name
    if facts.get("gpus") or not isinstance(spec, DFlashSpec) or usual_device(spec) == "cpu":
        return
    wanted = arithmetic(spec) if num_ranks(spec) > 1 else f"{counted(spec.life.num_gpus, 'GPU')} (life.num_gpus)"
    if lot.settled.node.num_nodes > 1:
        wanted += f"; {lot.settled.num_gpus} on each of {lot.settled.node.num_nodes} hosts"
    fault = gpu_fault(facts)
    if fault is not None:
        raise NoGpu(
            f"host {host} tells of no GPU, as its driver fails: {fault}; the recipe wants {wanted}\n  what is wrong there: "
            f"draftyard doctor {host}"
        )
    raise NoGpu(
        f"host {host} has no GPU; the recipe wants {wanted}\n  name a host that has them; to train on processors "
        "all the same, say so: --set train.dtype=float32"
    )


def company(lot: Lot, reader: Reader, *, run_id: str = "") -> str:
    """Which live runs a job on processors shares them with; empty where there is none, and where the host has cards, which
    are promised to one run each. `run_id`: the job's own.
    """
    if lot.site.facts.get("gpus"):
        return ""
    found = [_planned(run, reader) for run in reader.live_runs() if lot.name in run.hosts and run.id != run_id]
    if not found:
        return ""
    runs = f"run {found[0]} is" if len(found) == 1 else f"runs {', '.join(found)} are"
    return (
        f"host {lot.name} has no GPU, and {runs} live there: they share its processors and memory, so each is slower, and "
        f"what is measured of time meanwhile is of {'both' if len(found) == 1 else 'all'}"
    )


def say_company(reader: Reader, lots: Sequence[Lot], tell: Tell, *, run_id: str = "") -> None:
    for told in filter(None, (company(lot, reader, run_id=run_id) for lot in lots)):
        tell(f"warning: {told}")


def _planned(run: RunRow, reader: Reader) -> str:
    size = json.loads(reader.document(run.id, Document.PLAN) or "{}").get("driver_bytes")
    planned = f"; planned {size / 2**30:.2f} GiB" if isinstance(size, int) else ""
    return f"{run.id} ({run.recipe}, branch {run.branch}{planned})"


def refuse_unlike(lots: Sequence[Lot]) -> None:
    """Raises DraftyardError for hosts of which two have not both cards or none, are one machine, or differ in torch.

    Processes of cards and of processors speak to one another by different means; those of two versions of torch need
    not understand each other at all.
    """
    for first, second in combinations(lots, 2):
        _refuse_pair(first, second)


def _refuse_pair(first: Lot, second: Lot) -> None:
    with_cards, without = sorted((first, second), key=lambda each: not each.site.facts.get("gpus"))
    if with_cards.site.facts.get("gpus") and not without.site.facts.get("gpus"):
        raise DraftyardError(
            f"host {with_cards.name} has GPUs and host {without.name} has none; a job wants hosts of one kind"
        )
    if _share_cards(first.site.facts, second.site.facts):
        raise DraftyardError(
            f"hosts {first.name} and {second.name} are one machine (one boot id, the same GPUs), and a job has one part "
            "on each\n  name one of them: the job can have all its GPUs there"
        )
    ours, theirs = (versions(lot.site.facts).get("torch") for lot in (first, second))
    if ours and theirs and _release(ours) != _release(theirs):
        raise DraftyardError(
            f"host {first.name} has torch {ours} and host {second.name} torch {theirs}; the processes of one job want "
            f"the same\n  repair, on host {second.name}: "
            + install_command(second.site.place.python, f"torch=={_release(ours)}")
        )


def refuse_namesakes(reader: Reader, settled: Settled, *, here: Path) -> None:
    """Raises UsageError where a live run's host of another hosts.yaml is another machine of the same name.

    Cards that are promised, silence and what was seen are kept by a host's name; of two machines each would be taken for
    the other's.
    """
    ours = {each.host.name: each.host for each in settled.each}
    lives: dict[
        tuple[Path, str], str
    ] = {}  # one look for each, however many runs it has: a look reads files, and asks ssh
    for run in reader.live_runs():
        names = ours.keys() & set(run.hosts)
        kept = reader.hosts_file(run.id) if names else None
        if kept is not None and kept != here:
            lives |= {(kept, name): run.id for name in names}
    for (kept, name), run_id in sorted(lives.items()):
        theirs = _found(name, kept, here)
        if theirs is not None:
            _refuse_namesake(ours[name], here, theirs, f"{kept}, where live run {run_id} has it from")


def _found(name: str, kept: Path, here: Path) -> Host | None:
    try:
        return hosts_of([name], kept=kept, here=here).find(name)
    except UsageError:  # a fault in theirs: nobody can tell, and their run waits until it is mended
        return None


def _refuse_namesake(ours: Host, here: Path, theirs: Host, where: str) -> None:
    if _entry(ours) == _entry(theirs):
        return
    places = [way(ours), way(theirs)]
    if places[0] != places[1]:
        raise UsageError(
            f"host {ours.name} is {places[0]} by {here}, and {places[1]} by {where}\n"
            "  one name is one machine in one database: give it another name in hosts.yaml, or the runs another --db"
        )


def _entry(host: Host) -> tuple[Any, ...]:
    return (host.is_local, host.address, host.port, host.user, host.jump, host.hops)


def way(host: Host) -> str:
    """From the inside outwards, as ssh reads it: one may spell a port or a user that the other has from ~/.ssh/config.

    With every door on it, as a private address is another machine behind another one. Raises HostError.
    """
    doors = [] if host.is_local else [_door(each) for each in reversed(endpoints(host))]
    return " in ".join([*map(str, reversed(host.hops)), " by way of ".join(doors) or "local"])


def _door(endpoint: Endpoint) -> str:
    by_command = f" by way of `{endpoint.proxy_command}`" if endpoint.proxy_command else ""
    return f"{endpoint.user}@{endpoint.place}{by_command}"


def _share_cards(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether both see one machine's cards. Two containers of a machine, each with cards of its own, share none."""
    ours, theirs = ([str(gpu.get("uuid") or "") for gpu in facts.get("gpus") or []] for facts in (first, second))
    is_one_machine = bool(first.get("boot_id")) and first.get("boot_id") == second.get("boot_id")
    is_told_apart = all(ours) and all(theirs) and not set(ours) & set(theirs)
    return is_one_machine and bool(ours and theirs) and not is_told_apart


def _release(version: str) -> str:
    """Without the build, such as +cu130: which one a host takes is its driver's affair."""
    return version.partition("+")[0]


def refuse_leftovers(store: Store, site: Site, run: RunRow) -> None:
    """What outlived an earlier attempt would write into the same checkpoints.

    What another start has begun meanwhile is no leftover, and nobody is told to end it: `new_attempt` refuses this one.
    """
    found = find_processes(site.shell, site.place, run_ids=[run.id])
    now = store.reader.run(run.id)  # after the look: an attempt is written before it has processes
    if found and now.state.is_final and now.attempt == run.attempt:
        pids = ", ".join(str(item.pid) for item in found)
        raise DraftyardError(
            f"run {run.id} still has processes of an earlier attempt on host {site.host.name}: pid {pids}\n"
            f"  end them first: draftyard reap {site.host.name}"
        )


def refuse_lost_checkpoints(store: Store, site: Site, run: RunRow) -> None:
    """A resume that finds none of them would begin at step 0 without a word."""
    folder, paths = site.place.run_dir(run.id), [row.path for row in store.reader.checkpoints(run.id)]
    if paths and not any(site.shell.stat(f"{folder}/{path}") for path in reversed(paths)):
        launch = json.loads(store.reader.document(run.id, Document.LAUNCH) or "{}")
        raise DraftyardError(
            f"host {run.host} has none of the {len(paths)} checkpoints of run {run.id} any more; a resume would begin "
            f"anew\n  launch it anew: {command_line('launch', words_of_run(run, launch))}"
        )
