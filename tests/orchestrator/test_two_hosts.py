"""One training over two hosts, each in a network namespace with an sshd of its own; their processes meet over gloo.

The hosts reach one another only by a wire of their own: the address by which this machine reaches them leads nowhere
from the other one. Both see one kernel, so a dead process is seen at once; that a silent one is told, a frozen one shows.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from orchestrator.follow import lease
from orchestrator.store.reads import Reader
from orchestrator.store.rows import RunRow, State
from remote.drafter.job import Job
from remote.processes import marked
from remote.rundir import RunDir
from remote.spec import DFlashSpec, DrafterSpec, RolesSpec, TargetSpec
from tests.orchestrator.apart import Away, away, ip, joined, needed
from tests.orchestrator.yard import Yard
from tests.remote.conftest import make_tiny_folder
from tests.remote.jobs import events, make_job, tiny_job_spec, write_data
from tests.remote.test_train import StopAfter, losses, train

NUM_STEPS, COMPARED = 100_000, 20  # long enough never to end by itself; the steps that are held against one process
PATIENCE_S = 240.0
BRIEF_S = 2.0  # of a cut that ends no run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[TargetSpec, DrafterSpec]:
    source = str(make_tiny_folder(tmp_path_factory.mktemp("tiny-target")))
    target = TargetSpec(source, 48, 6, 260, True, 151_536, 2, 0)
    return target, DrafterSpec(2, 64, 4, 2, 16, [1, 2, 4], 4, 3, 1e4, 2048)


def spec_of(tiny: tuple[TargetSpec, DrafterSpec], roles: RolesSpec) -> DFlashSpec:
    return tiny_job_spec(
        *tiny,
        train={
            "num_steps": NUM_STEPS,
            "accumulation": 2,
            "checkpoint_every": 100_000,
            "keep_last": 2,
            "dtype": "float32",
        },
        data={"hidden_states": "online"},
        optim={"lr": 3e-3},
        roles=vars(roles),
        life={"num_gpus": roles.target + roles.drafter, "grace_s": 3.0},
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Away]]:
    needed()
    with contextlib.ExitStack() as stack:
        found = [away(number, tmp_path_factory.mktemp("two"), stack) for number in (5, 6)]
        joined(*found)
        yield found


@pytest.fixture
def project(yard: Yard, pair: list[Away], tiny: tuple[TargetSpec, DrafterSpec]) -> Yard:
    """A recipe whose two processes are on two hosts: two drafters, between which gradients travel; in its branch `queue`
    a target and a drafter, between which hidden states do."""
    entries = {}
    for name, host in zip(("one", "two"), pair, strict=True):
        server = host.server
        entries[name] = {
            "address": server.address,
            "port": server.port,
            "user": server.user,
            "identity": str(server.key),
            "host_keys": str(server.known_hosts),
            "python": sys.executable,
            "work_dir": str(server.home / f"work-{time.monotonic_ns()}"),
        }
    (yard.root / "hosts.yaml").write_text(json.dumps({"hosts": entries}), encoding="utf-8")
    tree = asdict(spec_of(tiny, RolesSpec(target=0, drafter=2)))
    kept = {key: value for key, value in tree.items() if key not in ("recipe", "branch", "why", "tags")}
    branches = {"gradients": {"why": "x"}, "queue": {"why": "x", "roles": {"target": 1, "drafter": 1}}}
    body = {"name": "both", "why": "x", "base": kept, "branches": branches}
    yard.edit("both.yaml", json.dumps(body))
    write_data(yard.root / "recipes" / "data")
    return yard


class Following:
    """A run of the project, read as anybody reads it."""

    def __init__(self, yard: Yard, run_id: str) -> None:
        self.yard, self.id = yard, run_id
        self.reader = Reader(yard.root / "runs.db")

    @property
    def run(self) -> RunRow:
        return self.reader.run(self.id)

    @property
    def step(self) -> int:
        return self.run.step or 0

    def until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < deadline, f"{self.run.state}, step {self.step}: {self.run.evidence}"
            assert not self.run.state.is_final or is_so(), f"{self.run.evidence}\n{self.failures()}\n{self.output()}"
            time.sleep(0.1)

    def until_over(self) -> RunRow:
        deadline = time.monotonic() + PATIENCE_S
        while not self.run.state.is_final:
            assert time.monotonic() < deadline, f"{self.run.state}, step {self.step}: {self.run.evidence}"
            time.sleep(0.1)
        return self.run

    def output(self) -> str:
        logs = (self.yard.root / "logs" / self.id).rglob("*.log")
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(logs))

    def steps(self, name: str, rank: int, attempt: int = 1) -> list[int]:
        return [value.step for value in self.reader.metric_values(self.id, name, attempt=attempt, rank=rank)]

    def pid_at_work(self, rank: int, attempt: int) -> int:
        """Of that rank, once both ranks have done steps of the attempt."""
        self.until(lambda: all(self.steps("step_s", each, attempt) for each in (0, 1)))
        told = self.reader.events(self.id, kinds=["start"])
        return next(int(row.fields["pid"]) for row in told if (row.writer, row.attempt) == (f"rank{rank}", attempt))

    def first_losses(self) -> list[float]:
        return [value.value for value in self.reader.metric_values(self.id, "loss", attempt=1, rank=0)][:COMPARED]

    def failures(self) -> str:
        return "\n".join(f"{row.source}: {row.message}" for row in self.reader.failures(self.id))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny: tuple[TargetSpec, DrafterSpec]) -> list[float]:
    """The first losses of one process, which has the same rows in each step."""
    job: Job = make_job(tmp_path_factory.mktemp("alone"), spec_of(tiny, RolesSpec()))
    train(job, StopAfter(COMPARED))
    found = losses(job.run)
    return [found[step] for step in range(1, COMPARED + 1)]


@pytest.fixture
def launched(project: Yard) -> Iterator[Callable[[str], Following]]:
    begun: list[Following] = []

    def launch(branch: str) -> Following:
        words = ("launch", "both", "-b", branch, "--host", "one", "--host", "two", "--force", "a test")
        assert project.run(*words) == 0, project.out + project.err
        begun.append(Following(project, project.out.strip()))
        return begun[-1]

    yield launch
    for following in begun:
        following.reader.close()
        for process in marked({following.id}):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def folders(project: Yard, run_id: str) -> list[RunDir]:
    """Of the run, on each host."""
    hosts = json.loads((project.root / "hosts.yaml").read_text())["hosts"]
    return [RunDir(Path(entry["work_dir"]) / "runs" / run_id) for entry in hosts.values()]


def exit_files(project: Yard, run_id: str, attempt: int = 1) -> list[dict[str, Any]]:
    return [json.loads(run.attempt(attempt).exit_json.read_text()) for run in folders(project, run_id)]


@pytest.mark.slow  # two launchers and two ranks, twice
def test_gradients_cross_and_a_run_is_followed_through_cuts_stopped_resumed_and_ended_by_an_interface_that_goes(
    launched: Callable[[str], Following], project: Yard, pair: list[Away], alone: list[float]
) -> None:
    begun = launched("gradients")

    _is_followed_through_a_cut(begun, project, pair[1])
    assert begun.first_losses() == pytest.approx(alone, rel=1e-5)
    _goes_on_after_a_brief_cut_between_the_hosts(begun, project, pair[1])
    assert project.run("stop", begun.id, "--grace", "2m") == 0, project.err
    _is_shown_as_one_stopped_run(begun, project)

    assert project.run("resume", begun.id) == 0, project.err
    begun.pid_at_work(0, attempt=2)
    with down(pair[1], "eth1"):
        ended = begun.until_over()
    assert begun.steps("loss", 0, 2)[0] == begun.steps("loss", 0, 1)[-1] + 1
    assert (ended.state, ended.evidence.partition(":")[0]) == (State.FAILED, "host two, cut off from one")
    assert "interface eth1, by which this host reaches the others, is down" in ended.evidence
    assert not marked({begun.id})


@pytest.mark.slow  # two launchers and two ranks, twice; the second time a silent one is given its time
def test_hidden_states_cross_and_a_rank_that_is_killed_or_frozen_ends_the_run_with_its_name_on_every_host(
    launched: Callable[[str], Following], project: Yard, alone: list[float]
) -> None:
    begun = launched("queue")
    begun.until(lambda: begun.step >= COMPARED)
    os.kill(begun.pid_at_work(1, attempt=1), signal.SIGKILL)
    killed, why = begun.until_over(), begun.failures()

    assert project.run("resume", begun.id) == 0, project.err
    os.kill(begun.pid_at_work(1, attempt=2), signal.SIGSTOP)
    frozen = begun.until_over()

    assert begun.first_losses() == pytest.approx(alone, rel=1e-5)
    assert (killed.state, killed.evidence.partition(":")[0]) == (State.FAILED, "host two")
    assert "rank0: remote.drafter.watch.RankLost: rank 1 (target 0, node 1) is gone without a word" in why
    assert (frozen.state, frozen.evidence.partition(":")[0]) == (State.FAILED, "host one")
    assert "rank 1 (target 0, node 1) was not heard for 15 s" in frozen.evidence
    assert len(exit_files(project, begun.id, attempt=2)) == 2
    assert not marked({begun.id})


@contextlib.contextmanager
def down(host: Away, interface: str) -> Iterator[None]:
    """An interface of a host without its link, and with it again for whoever comes next."""
    ip("-n", host.name, "link", "set", interface, "down")
    try:
        yield
    finally:
        ip("-n", host.name, "link", "set", interface, "up")


def _is_followed_through_a_cut(begun: Following, project: Yard, host: Away) -> None:
    begun.until(lambda: begun.step > COMPARED)
    host.server.cut()  # what is open ends, and nothing can be opened
    host.cut()
    begun.until(lambda: begun.run.unreachable_since_s is not None)
    seen = begun.step
    begun.until(lambda: begun.step > seen)  # of the other host: the training has its own wire
    follower = lease.holder_pid(begun.reader.database.path)
    assert follower is not None
    os.kill(follower, signal.SIGKILL)
    host.cut(off=False)
    assert project.run("wait", begun.id, "--timeout", "1s") == 6  # starts another one
    begun.until(lambda: begun.run.unreachable_since_s is None)
    seen = begun.step
    begun.until(lambda: max(begun.steps("step_s", 1), default=0) > seen)
    for name, rank in (("loss", 0), ("step_s", 1)):
        steps = begun.steps(name, rank)
        assert steps == list(range(1, steps[-1] + 1))


def _goes_on_after_a_brief_cut_between_the_hosts(begun: Following, project: Yard, host: Away) -> None:
    """No gradient comes through meanwhile, so what is newer than the newest step at its end was made after it."""
    with down(host, "eth1"):
        time.sleep(BRIEF_S)
        made = events(folders(project, begun.id)[0], kind="metrics")[-1].fields["step"]
    begun.until(lambda: begun.step > made)
    assert begun.run.state is State.RUNNING


def _is_shown_as_one_stopped_run(begun: Following, project: Yard) -> None:
    run = begun.run
    assert (run.state, run.hosts) == (State.STOPPED, ("one", "two"))
    assert run.step == begun.steps("loss", 0)[-1]
    assert [body["reason"] for body in exit_files(project, begun.id)] == ["user", "user"]
    assert not marked({begun.id})
    assert {row.rank for row in begun.reader.memory_peaks(begun.id)} == {0, 1}
    assert project.run("show", begun.id) == 0
    assert "node 1" in project.out
    assert "two: stopped, stopped as asked" in project.out
    assert re.search("rank 0, one|rank 1, two", project.out), "the fuller one of two equal drafters, and where it is"
    assert not re.search("rank 0, two|rank 1, one", project.out)
    assert [row["more_hosts"] for row in project.json("ls", "host:two")["runs"]] == [["two"]]
    assert project.run("logs", begun.id, "--host", "two") == 0
    assert "rank 1 (drafter 1, node 1)" in project.out
    assert "rank 0 (drafter 0, node 0)" not in project.out
    assert project.run("logs", begun.id, "--rank", "0") == 0
    assert f"rank 0 (drafter 0, node 0): step 1/{NUM_STEPS}" in project.out
    assert "rank 1 (drafter 1, node 1)" not in project.out
