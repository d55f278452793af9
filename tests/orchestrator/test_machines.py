"""Another machine under the name of a run's host is told from what can happen to the run's own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.errors import HostError
from orchestrator.follow.desk import Desk
from orchestrator.follow.one_run import look
from orchestrator.follow.status import GONE_S
from orchestrator.follow.threads import HostThread
from orchestrator.observe import observe
from orchestrator.shell import Completed
from orchestrator.shell.local import LocalShell
from orchestrator.store.rows import Document, RunRow, State
from orchestrator.store.writes import Store
from tests.orchestrator.runs import RUN, batch, event, life, new_run

NOW_S = 1_000_000.0
OTHER = "20260101-120000-bbbb"


class Machine(LocalShell):
    """What one look at it says; by itself the run's own, where it lives. Whatever else is asked of it is kept."""

    def __init__(self, *, id: str = "own", boot: str = "b1", up_s: float = 9000.0, first_ticks: int = 1) -> None:
        super().__init__()
        self.id, self.boot, self.up_s, self.first_ticks = id, boot, up_s, first_ticks
        self.runs = {RUN}
        self.asked: list[str] = []

    def run(self, argv: list[str], *, stdin: bytes = b"", timeout_s: float = 60.0) -> Completed:
        if "rec files" not in argv[2]:
            self.asked.append(argv[2])
            return Completed(0, b"", b"")
        stat = "stat supervisor\n7 (python) S " + "0 " * 18 + "99 0"
        records = [
            f"host\n{self.boot}\n{self.up_s} 1.0\n{NOW_S}\n",
            f"machine\n{self.id}\n",
            "init\n1 (init) S " + "0 " * 18 + f"{self.first_ticks} 0",
        ]
        if any(argv[4].endswith(run) for run in self.runs):
            records += ["attempt\n1\n", "claim\nsupervisor 7 99 b1\n", *([stat] if self.boot == "b1" else [])]
        return Completed(0, ("\x1e" + "\x1e".join(records) + "\x1e").encode(), b"")


class Yard:
    """A run that has been seen alive on its machine, and a clock that a test sets."""

    def __init__(self, folder: Path) -> None:
        self.hosts_file = folder / "hosts.yaml"
        self.hosts_file.write_text("hosts:\n  gpu:\n    address: 10.0.0.2\n")
        self.store = Store(folder / "runs.db", clock=lambda: NOW_S)
        self.begin(RUN)
        self.now_s = 0.0
        self.desk = Desk(self.store, self.store.reader, lambda: NOW_S, monotonic=lambda: self.now_s)
        look(self.desk, Machine(), self.run())

    def begin(self, run_id: str) -> None:
        documents = {**life(), Document.HOSTS_FILE: str(self.hosts_file)}
        self.store.create_run(new_run(run_id, host="gpu", workdir="/data", documents=documents))
        self.store.new_attempt(run_id)
        self.store.ingest(batch([event(1, "start")], run_id=run_id))

    def run(self, run_id: str = RUN) -> RunRow:
        return self.store.reader.run(run_id)

    def looks_for_a_while(self, machine: Machine) -> RunRow:
        for passed_s in (1.0, 2.0 + GONE_S):
            self.now_s += passed_s
            look(self.desk, machine, self.run())
        return self.run()


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    made = Yard(tmp_path)
    yield made
    made.store.close()


@pytest.mark.parametrize("stranger", [Machine(id="another", boot="b9", up_s=5.0), Machine(boot="b9", up_s=9000.0)])
def test_a_stranger_under_the_hosts_name_loses_no_run_and_is_sent_no_wish(yard: Yard, stranger: Machine) -> None:
    """Told by the machine's id; of one that was copied with it, by a boot before the run that is not the run's."""
    stranger.runs = set()
    yard.store.ask(RUN, "stop", grace_s=5)

    for _ in range(2):
        with pytest.raises(HostError, match=r"another machine answers as host gpu.*hosts\.yaml:2"):
            yard.looks_for_a_while(stranger)

    assert not yard.run().state.is_final
    assert stranger.asked == []
    yard.looks_for_a_while(Machine())
    assert yard.run().state is State.STOPPING


def test_one_that_has_the_runs_disk_but_not_its_processes_is_a_stranger_too(yard: Yard) -> None:
    with pytest.raises(HostError, match="another machine"):
        yard.looks_for_a_while(Machine(id="another", boot="b9", up_s=5.0))


@pytest.mark.parametrize(
    ("machine", "has_folder", "reason"),
    [
        (Machine(boot="b2", up_s=5.0), True, "reboot"),
        (Machine(boot="b2", up_s=5.0), False, None),  # and its disk did not come back
        (Machine(), False, None),  # the disk is away, or somebody deleted the folder
        (Machine(first_ticks=500), True, "reboot"),  # a container that was started anew
        (Machine(id="another", first_ticks=500), True, "reboot"),  # one that was made anew, on the same machine
    ],
)
def test_what_happens_to_the_runs_own_machine_is_its_end(
    yard: Yard, machine: Machine, has_folder: bool, reason: str | None
) -> None:
    machine.runs = {RUN} if has_folder else set()

    run = yard.looks_for_a_while(machine) if not has_folder else (look(yard.desk, machine, yard.run()), yard.run())[1]

    assert (run.state, run.reason) == (State.LOST, reason)


def test_a_machine_that_is_renamed_while_its_run_lives_stays_the_runs_own(yard: Yard) -> None:
    look(yard.desk, Machine(id="renamed"), yard.run())

    run = yard.looks_for_a_while(Machine(id="renamed"))

    assert run.state is State.RUNNING


def test_the_run_of_another_machine_is_unreachable_and_one_launched_on_this_is_followed(yard: Yard) -> None:
    stranger = Machine(id="another", boot="b1")
    stranger.runs = {OTHER}
    yard.begin(OTHER)
    thread = HostThread(yard.store.path, "gpu", lambda name, kept: stranger, threading.Event())

    thread._pass_over(yard.desk, yard.store.reader.live_runs())

    host = next(row for row in yard.store.reader.hosts() if row.name == "gpu")
    assert yard.run().unreachable_since_s == NOW_S
    assert not yard.run().state.is_final
    assert "another machine answers as host gpu" in str(host.error)
    assert yard.run(OTHER).state is State.RUNNING


def test_a_machine_says_the_same_of_itself_at_each_look_and_not_its_id(tmp_path: Path) -> None:
    first, second = (observe(LocalShell(), str(tmp_path / name)) for name in ("one", "two"))

    assert first.machine == second.machine
    assert len(first.machine) == 16
