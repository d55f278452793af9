"""An order: what somebody wants to run where, and everything about it that is known without a host.

`settle` answers with values or with an error of exit code 2; until it has, nothing is written and
nothing is contacted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.actions import doubts, recipes
from orchestrator.actions.again import Words, command_line, words_of_run
from orchestrator.actions.git_facts import GitFacts, git_facts
from orchestrator.actions.history import open_reader
from orchestrator.actions.host_facts import can_name_gpu, no_name_of_a_gpu
from orchestrator.actions.log_text import inert
from orchestrator.actions.places import Places
from orchestrator.actions.spread import ALONE, Node, gpus_each, refuse_uneven
from orchestrator.errors import DraftyardError, UsageError
from orchestrator.host import Host, Hosts, hosts_of, read_env_file
from orchestrator.store.filter import check_tags
from orchestrator.store.rows import IMPORTED, Document, RunRow
from orchestrator.store.run_id import check_run_id
from orchestrator.tree import Tree, bundled_tree, git_tree, left_out, with_remote
from remote.spec import DFlashSpec, ScriptSpec, Spec, parse

ID_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"  # no i, l, o, 0, 1: ids are read aloud and typed
ID_LENGTH = 8


@dataclass(frozen=True)
class Order:
    """What a person asks for on the command line or in the terminal screen."""

    recipe: str
    branch: str | None = None
    host: str = "local"
    more_hosts: tuple[str, ...] = ()  # those after the first, where the job runs on several
    overrides: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()  # index or UUID; empty: those of the host's entry, else all
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # values may be secrets
    force_reason: str | None = None
    tags: tuple[str, ...] = ()
    run_id: str | None = None  # of the run, so that a second try of the same launch finds the first

    @property
    def hosts(self) -> tuple[str, ...]:
        return (self.host, *self.more_hosts)


@dataclass(frozen=True)
class Settled:
    """An order with every question answered that needs no host."""

    order: Order
    spec: Spec
    host: Host
    tree: Tree
    git: GitFacts
    env: Mapping[str, str] = field(repr=False)  # the recipe's, the host's file, the order's: later ones win
    left_out: tuple[str, ...] = ()  # files here that the recipe names and git ignores: the job will not find them
    lacking: tuple[str, ...] = ()  # what the spec names as data and nobody has, a line each
    unshipped: tuple[str, ...] = ()  # programs of the spec's that the folder shipped does not hold, a line each
    recipe: Mapping[str, str] = field(default_factory=dict)  # its file here and the hash of its content
    others: tuple[Settled, ...] = ()  # the same for each host after the first
    node: Node = ALONE
    doubts: tuple[str, ...] = ()  # what the recipe says and hardly means, a line each

    @property
    def gpus(self) -> tuple[str, ...]:
        return self.order.gpus or self.host.gpus

    @property
    def num_gpus(self) -> int:
        """Those that the job wants of this host."""
        return gpus_each(self.spec, self.node.num_nodes)

    @property
    def each(self) -> tuple[Settled, ...]:
        """By host, the first one first."""
        return (self, *self.others)


def settle(places: Places, order: Order) -> Settled:
    """Raises UsageError or RecipeError, exit 2."""
    if order.force_reason is not None and not order.force_reason.strip():
        raise UsageError("--force needs a reason, one sentence; it is kept with the run for ever")
    if order.run_id is not None:
        try:
            check_run_id(order.run_id)
        except DraftyardError as error:
            raise UsageError(f"--id {error}") from error
    check_tags(order.tags)
    if wrong := [name for name in order.gpus if not can_name_gpu(name)]:
        raise UsageError(f"--gpus: {no_name_of_a_gpu(wrong[0])}")
    recipe, resolved = recipes.resolve(places, order.recipe, branch=order.branch, overrides=order.overrides)
    host = find_host(places, order.host)
    spec = resolved.spec
    source = recipe.folder / spec.folder if isinstance(spec, ScriptSpec) else places.tree
    tree = _trainer_tree(recipe.folder, spec) if isinstance(spec, DFlashSpec) else with_remote(git_tree(source))
    missed = left_out(tree, source, _words(spec)) if isinstance(spec, ScriptSpec) else []
    environment = _environment(spec, host, order)
    lacking = tuple(f"{path}: {told}" for path, told in recipes.lacking_data(spec, recipe.folder))
    unshipped = tuple(f"{path}: {told}" for path, told in recipes.lacking_files(spec, recipe.folder))
    identity = recipes.identity(recipe)
    refuse_uneven(spec, order.hosts)
    told = (*doubts.of_name(recipe), *(f"{path}: {what}" for path, what in doubts.of_schedule(spec)))
    settled = Settled(
        order,
        spec,
        host,
        tree,
        git_facts(source),
        environment,
        tuple(missed),
        lacking,
        unshipped,
        identity,
        doubts=told,
    )
    return _on_all(places, settled)


def _on_all(places: Places, settled: Settled) -> Settled:
    """With what each further host has of its own: its entry, its environment, its place among them."""
    order, num = settled.order, len(settled.order.hosts)
    others = []
    for number, name in enumerate(order.more_hosts, start=1):
        host = find_host(places, name)
        environment, node = _environment(settled.spec, host, order), Node(number, num)
        others.append(replace(settled, host=host, env=environment, node=node))
    return replace(settled, others=tuple(others), node=Node(0, num))


def settle_stored(
    places: Places, run: RunRow, *, verb: str, gpus: tuple[str, ...] = (), environ: Mapping[str, str] | None = None
) -> Settled:
    """The same for a run that was launched before: its own spec, with today's bundled tree where one is shipped, and the
    variables of its `--env` as `environ` (None: this process's) has them now. `verb`: what is typed for it.
    """
    with open_reader(places) as reader:
        text = reader.document(run.id, Document.SPEC)
        launch = json.loads(reader.document(run.id, Document.LAUNCH) or "{}")
    if not text:
        raise DraftyardError(f"run {run.id} has no spec in the database; it cannot be started again")
    try:
        spec = parse(text, f"run {run.id}")
    except (ValueError, TypeError, AttributeError) as error:  # of another version, or brought from elsewhere
        raise DraftyardError(f"the stored spec of run {run.id} cannot be read: {error}; launch it anew") from error
    env = _given_again(run, launch, os.environ if environ is None else environ, verb)
    order = Order(run.recipe, branch=run.branch, host=run.host, more_hosts=run.more_hosts, gpus=gpus, env=env)
    host = find_host(places, run.host)
    tree = bundled_tree()
    if isinstance(spec, DFlashSpec):
        with contextlib.suppress(UsageError):  # the recipe is gone, or another: its own data then has to be bundled
            tree = _trainer_tree(recipes.of_run(places, run, launch).folder, spec)
    return _on_all(places, Settled(order, spec, host, tree, git_facts(places.tree), _environment(spec, host, order)))


def _given_again(run: RunRow, launch: Mapping[str, Any], environ: Mapping[str, str], verb: str) -> dict[str, str]:
    """The variables that were named at the launch: their names are kept, their values nowhere. Raises UsageError, a line."""
    names = words_of_run(run, launch).env
    if missing := [name for name in names if name not in environ]:
        given, due = " and ".join(missing), " ".join(f"{name}=VALUE" for name in missing)
        raise UsageError(
            f"run {run.id} was launched with --env for {given}, not set here, and values are kept nowhere: "
            f"export first, or type {due} draftyard {verb} {run.id}"
        )
    return {name: environ[name] for name in names}


def _words(spec: ScriptSpec) -> list[str]:
    """Every word of a script's recipe that may name a file in its folder, `--config=FILE` among them."""
    words = [*spec.command, *spec.smoke.scripts.values(), *spec.settings.values()]
    return [*words, *(word.partition("=")[2] for word in words)]


def _trainer_tree(folder: Path, spec: DFlashSpec) -> Tree:
    """The bundled trainer with the data files that lie in `data/` beside the recipe."""
    return bundled_tree(folder / "data", (spec.data.prompts, spec.data.answers, spec.data.held_out))


def words_of(order: Order, branch: str | None = None) -> Words:
    """What a person types for the same order; `branch`: the one that it comes to."""
    return Words(order.recipe, branch or order.branch, order.hosts, order.overrides, order.gpus, tuple(order.env))


def repair_command(order: Order, spec: Spec) -> str:
    """The one command that makes the evidence a launch of this order wants."""
    return command_line("smoke", replace(words_of(order, spec.branch), hosts=(order.host,)))


def prepare_command(settled: Settled) -> str:
    """The command that makes, on this one host of the job, what a training there finds in its cache."""
    words = words_of(settled.order, settled.spec.branch)
    return command_line("prepare", replace(words, hosts=(settled.host.name,), gpus=()))


def repair_of_node(settled: Settled, gpus: tuple[str, ...]) -> str:
    """The same for one host of several: its rungs are climbed on the cards of its share."""
    order = settled.order
    if settled.node.num_nodes > 1:
        order = replace(order, host=settled.host.name, more_hosts=(), gpus=order.gpus or gpus)
    return repair_command(order, settled.spec)


def find_host(places: Places, name: str) -> Host:
    """Contacts nothing. Raises UsageError naming the known hosts and the nearest, and the folder whose runs have it."""
    hosts = Hosts.load(places.hosts_file)
    try:
        return hosts.find(name)
    except UsageError as error:
        origin = places.origins.get("host", "built-in")
        lines = [str(error)]
        if name == places.host and origin != "built-in":
            lines.append(f"without --host it is the one of {origin}")
        elsewhere = _hosts_file_elsewhere(places, name)
        if elsewhere is not None:
            lead = f"DRAFTYARD_HOSTS={shlex.quote(str(elsewhere))} draftyard …"
            lines.append(f"its runs here have it from another folder: {lead}")
        raise UsageError("\n  ".join(lines)) from error


def _hosts_file_elsewhere(places: Places, name: str) -> Path | None:
    """That of the runs in this database that have to do with the host, where it still knows it."""
    with contextlib.suppress(DraftyardError), open_reader(places) as reader:
        kept = reader.hosts_file_at(name)
        file = hosts_of([name], kept=kept, here=places.hosts_file).file
        return file if file != places.hosts_file else None
    return None


def where_launched(places: Places, run: RunRow) -> Places:
    """The places with the hosts.yaml that the run's hosts are found in, wherever one stands now.

    Raises UsageError for an imported run, which has none.
    """
    refuse_imported(run)
    with open_reader(places) as reader:
        kept = reader.hosts_file(run.id)
    found = hosts_of(run.hosts, kept=kept, here=places.hosts_file).file
    return places if found is None else replace(places, hosts_file=found)


def refuse_imported(run: RunRow) -> None:
    """Raises UsageError for a run that was read from a folder: whatever needs its host cannot be done from here."""
    if run.host == IMPORTED:
        again = shlex.join(["draftyard", "import", inert(run.folder or "FOLDER")])
        raise UsageError(
            f"run {run.id} was imported from {inert(run.folder or '-')}; no host of it is known here\n"
            f"  its files lie in {inert(run.folder or '-')}; a newer copy of them is read in by: {again}\n"
            f"  what is known of it: draftyard show {run.id}"
        )


def host_names(places: Places) -> list[str]:
    """Every host that can be named. UsageError where hosts.yaml cannot be read."""
    return Hosts.load(places.hosts_file).names()


def entries_at_fault(places: Places, but: Sequence[str] = ()) -> list[str]:
    """What is wrong in entries of hosts.yaml, a line each, other than those of the hosts named: they are refused when used."""
    faults = Hosts.load(places.hosts_file).faults
    return [line for name, lines in faults.items() if name not in but for line in lines]


def new_id() -> str:
    """Eight letters and digits, the first a letter; a beginning of four is nearly always enough."""
    first = secrets.choice(ID_LETTERS[:23])
    return first + "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH - 1))


def num_steps_of(spec: Spec) -> int | None:
    """As the recipe has it; a script says it with a setting of that name."""
    if isinstance(spec, DFlashSpec):
        return spec.train.num_steps
    told = spec.settings.get("num_steps", "")
    return int(told) if told.isdecimal() else None


def read_env_words(words: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, str]:
    """`KEY` takes the value from this environment, `KEY=VALUE` gives it."""
    found = {}
    for word in words:
        key, separator, value = word.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            raise UsageError(f"--env {key}: a name of letters, digits and _ is due")
        if not separator and key not in environ:
            raise UsageError(f"--env {key}: {key} is not set here; export it first, or write --env {key}=VALUE")
        found[key] = value if separator else environ[key]
    return found


def _environment(spec: Spec, host: Host, order: Order) -> dict[str, str]:
    """Later ones win: the recipe's, the host's file, the order's."""
    from_host = read_env_file(host.env_file, host.env_file_at) if host.env_file is not None else {}
    return {**spec.env, **from_host, **order.env}
