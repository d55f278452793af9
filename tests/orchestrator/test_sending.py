"""What a launch keeps of its hosts, all of them, on the way to its start."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.actions.again import command_line, words_of_run
from orchestrator.actions.commands import train_commands
from orchestrator.actions.lots import Lot
from orchestrator.actions.order import Order, Settled
from orchestrator.actions.sending import Task, _adopted, _begin, _begin_told, _on_sites, _row
from orchestrator.actions.site import Site
from orchestrator.actions.spread import Node
from orchestrator.actions.telling import silent
from orchestrator.errors import HostError, UsageError
from orchestrator.host import LOCAL
from orchestrator.launcher import this_process
from orchestrator.shell.local import LocalShell
from orchestrator.store.rows import Document, Kind, NewRun, Reason, RunRow, State
from orchestrator.store.writes import Store
from orchestrator.tree import bundled_tree
from orchestrator.verbs.started import whereabouts
from orchestrator.workplace import Workplace
from remote.spec import RolesSpec
from tests.orchestrator.runs import RUN, batch, event, new_run
from tests.remote.specs import tiny_spec

GIB = 2**30


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "runs.db") as made:
        made.create_run(new_run(RUN, host="a", more_hosts=("b",), documents={Document.SPEC: "{}"}))
        yield made


class Cut(LocalShell):
    """A host that is away once something is to be shipped there."""

    def stream(self, *_: Any, **__: Any) -> Any:
        raise HostError("the line was cut")


def lot(number: int, name: str, card_bytes: int) -> Lot:
    packages = dict.fromkeys(("transformers", "safetensors", "numpy"), "9.9") | {"torch": "2.13.0"}
    card = {"index": 0, "uuid": f"GPU-{name}", "name": "a card", "total_bytes": card_bytes}
    facts = {"boot_id": name, "gpus": [card], "python": {"version": "3.11.2", "packages": packages}}
    host, spec = replace(LOCAL, name=name), replace(tiny_spec(life={"num_gpus": 2}), roles=RolesSpec(1, 1))
    settled = Settled(Order("tiny"), spec, host, bundled_tree(), cast("Any", None), {}, node=Node(number, 2))
    return Lot(settled, Site(host, Cut(), Workplace("/srv/draftyard", "python3", "/root"), facts))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(80, 24), (24, 80)])
def test_the_plan_is_for_the_smallest_card_of_all_hosts_and_each_has_been_seen(
    store: Store, sizes: tuple[int, int]
) -> None:
    lots = [lot(number, name, size * GIB) for number, name, size in zip((0, 1), "ab", sizes, strict=True)]
    task = Task(Kind.TRAIN, train_commands(lots[0].settled.spec))

    with pytest.raises(HostError, match="the line was cut"):
        _on_sites(store, store.reader.run(RUN), task, lots, tell=silent)

    kept = json.loads(store.reader.document(RUN, Document.PLAN) or "{}")
    assert kept["capacity_bytes"] == 24 * GIB
    assert {row.name: row.facts["boot_id"] for row in store.reader.hosts()} == {"a": "a", "b": "b"}
    assert store.reader.gpus_by_host(RUN) == {"a": ("GPU-a",), "b": ("GPU-b",)}


def test_a_launch_said_again_tells_all_hosts_of_the_run_that_is_there(store: Store) -> None:
    new = new_run(RUN, host="a", more_hosts=("b",), documents={Document.SPEC: "{}"})

    found = _adopted(store, store.reader.run(RUN), new, silent)

    assert (found.host, found.more_hosts) == ("a", ("b",))
    with pytest.raises(UsageError, match="on a and b, or with other values"):
        _adopted(store, store.reader.run(RUN), replace(new, more_hosts=()), silent)


def said_again() -> NewRun:
    return new_run(RUN, documents={Document.SPEC: "{}", Document.LAUNCHER: json.dumps({"launch": "the second"})})


class Overtaken(Store):
    """Another try of the same launch takes the failed row away, to begin anew, just before or just after this one looks,
    or between this one's transaction and whatever is read behind it."""

    def __init__(self, path: Path, *, when: str) -> None:
        super().__init__(path)
        self.when, self.creating = when, ""

    def create_run(self, new: NewRun) -> RunRow:
        when, self.when = self.when, ""
        if when == "before":
            self._take_away(new.id)
        self.creating = new.id if when == "within" else ""
        found = super().create_run(new)
        if when == "after":
            self._take_away(new.id)
        return found

    @contextmanager
    def _session(self) -> Iterator[Any]:
        run_id, self.creating = self.creating, ""
        with super()._session() as session:
            yield session
        if run_id:
            self._take_away(run_id)

    def _take_away(self, run_id: str) -> None:
        self.remove(run_id)
        self.purge(run_id)


@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_a_launch_that_made_the_row_again_starts_it_though_another_took_the_failed_one_away(
    tmp_path: Path, when: str
) -> None:
    """Of three tries at once none held the row for its own: each said the run's id, exit 0, and nothing was started."""
    with Store(tmp_path / "runs.db") as store:
        store.create_run(new_run(RUN, documents={Document.SPEC: "{}", Document.LAUNCHER: "the first"}))
        store.set_state(RUN, State.FAILED, evidence="its host was away")

    with Overtaken(tmp_path / "runs.db", when=when) as store:
        run, is_ours = _begin(store, said_again())
        _, is_the_next_ones = _begin(
            store, replace(said_again(), documents={Document.LAUNCHER: json.dumps({"launch": "the third"})})
        )

    assert (is_ours, run.state, run.attempt) == (True, State.PENDING, 0)
    assert not is_the_next_ones


def test_the_row_of_a_launch_knows_from_its_creation_on_what_was_typed(tmp_path: Path) -> None:
    """One that ended while it was pending led to another job: its overrides came with the answer of its host."""
    typed = Order("tiny", overrides=("train.num_steps=7",), gpus=("1",), env={"A_TOKEN": "canary"})
    git = cast("Any", SimpleNamespace(commit=None, is_dirty=False, patch=None))
    settled = Settled(typed, tiny_spec(), LOCAL, bundled_tree(), git, {"A_TOKEN": "canary", "B": "2"})
    with Store(tmp_path / "runs.db") as store:
        run, _ = _begin(store, _row(settled, Task(Kind.TRAIN, train_commands(settled.spec)), tmp_path / "hosts.yaml"))
        kept = store.reader.document(run.id, Document.LAUNCH) or "{}"

    line = command_line("launch", words_of_run(run, json.loads(kept)))
    assert line.endswith("--host local --set train.num_steps=7 --gpus 1 --env A_TOKEN")
    assert json.loads(kept)["env"] == ["A_TOKEN", "B"]  # what `logs` hides
    assert "canary" not in kept


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (State.PENDING, "it is pending on local; draftyard watch"),
        (State.RUNNING, "it runs on local; draftyard watch"),
        (State.SUCCEEDED, "it has succeeded on local; draftyard show"),
    ],
)
def test_a_launch_said_again_says_the_state_its_run_is_in(tmp_path: Path, state: State, said: str) -> None:
    with Store(tmp_path / "runs.db") as store:
        run = store.create_run(new_run(RUN, host="local", documents={Document.SPEC: "{}"}))
        found = _adopted(store, replace(run, state=state), new_run(RUN, documents={Document.SPEC: "{}"}), silent)

    assert whereabouts(found).startswith(f"{said} {RUN}")


def test_an_interrupt_while_the_row_is_made_says_what_became_of_the_run(tmp_path: Path) -> None:
    """It fell between the row and whatever tells of its end, so the follower said that the launch was killed."""

    class Interrupted(Store):
        def create_run(self, new: NewRun) -> RunRow:
            super().create_run(new)
            raise KeyboardInterrupt

    told: list[str] = []
    with Interrupted(tmp_path / "runs.db") as store:
        with pytest.raises(KeyboardInterrupt):
            _begin_told(store, said_again(), told.append)
        run = store.reader.run(RUN)

    assert (run.state, run.evidence) == (State.STOPPED, "interrupted before it started")
    assert told == [f"it never began; why is kept as run {RUN} (`draftyard show {RUN}`), which @last passes over"]


def test_two_launches_of_one_process_are_told_apart() -> None:
    """A screen starts many; on a machine without /proc nothing else tells one from another."""
    assert this_process() != this_process()


@pytest.mark.parametrize("reason", [None, Reason.START_TIMEOUT])
def test_a_launch_that_was_killed_before_its_start_may_be_said_again(tmp_path: Path, reason: str | None) -> None:
    """No supervisor ever was: a script that tries again would fail here for ever."""
    with Store(tmp_path / "runs.db") as store:
        store.create_run(new_run(RUN, documents={Document.SPEC: "{}", Document.LAUNCHER: "the first"}))
        store.new_attempt(RUN)
        store.set_state(RUN, State.FAILED, reason=reason, evidence="never started: its launch was killed")

        run, is_ours = _begin(store, said_again())

    assert (is_ours, run.state, run.attempt) == (True, State.PENDING, 0)


@pytest.mark.parametrize(("is_dead", "num_attempts"), [(True, 0), (True, 1), (False, 0), (False, 1)])
def test_a_launch_said_again_before_anybody_has_seen_the_first_one_die_begins_anew(
    tmp_path: Path, is_dead: bool, num_attempts: int
) -> None:
    """It was told that the run is there and pending, exit 0, a moment before that run was said to have failed."""
    first = json.loads(this_process())
    first["start_ticks"] -= int(is_dead)  # an earlier process of this pid
    with Store(tmp_path / "runs.db") as store:
        store.create_run(new_run(RUN, documents={Document.SPEC: "{}", Document.LAUNCHER: json.dumps(first)}))
        for _ in range(num_attempts):
            store.new_attempt(RUN)

        run, is_ours = _begin(store, said_again())

    assert (is_ours, run.state, run.attempt) == (is_dead, State.PENDING, 0 if is_dead else num_attempts)


@pytest.mark.slow
@pytest.mark.parametrize(("state", "reason"), [(State.LOST, None), (State.FAILED, "exit"), (State.FAILED, None)])
def test_a_launch_of_which_something_may_have_begun_is_not_begun_anew(
    tmp_path: Path, state: State, reason: str | None
) -> None:
    with Store(tmp_path / "runs.db") as store:
        store.create_run(new_run(RUN, documents={Document.SPEC: "{}", Document.LAUNCHER: "the first"}))
        store.new_attempt(RUN)
        if reason is None and state is State.FAILED:
            store.ingest(batch([event(1, "metrics", step=1, values={"loss": 1.0})]))
        store.set_state(RUN, state, reason=reason, evidence="x")

        _, is_ours = _begin(store, said_again())

    assert not is_ours
