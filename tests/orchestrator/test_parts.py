"""A start over two hosts of which one does not come up: what has started is stopped, and the run says why."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import launch
from orchestrator.actions.endings import outcome
from orchestrator.actions.parts import HostPart, start_parts
from orchestrator.errors import DraftyardError, HostError
from orchestrator.follow.follower import Follower, follow
from orchestrator.follow.nodes import fallen, views_on
from orchestrator.launch import Job, Part
from orchestrator.shell import Completed
from orchestrator.shell.local import LocalShell
from orchestrator.store.rows import RunRow, State
from orchestrator.store.writes import Store
from orchestrator.workplace import Workplace
from tests.orchestrator.runs import RUN, life, new_run

TREE = Path(__file__).resolve().parents[2]
PATIENCE_S = 90.0
HOSTS = ("one", "two", "three")


class Refusing(LocalShell):
    """A host on which everything is written, and nothing can be started."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def spawn(self, argv: list[str], *, cwd: str) -> None:
        raise self.error


class Unwritten(LocalShell):
    """A host to which the line is cut before a stop can be left there."""

    def run(self, argv: list[str], *, stdin: bytes = b"", timeout_s: float = 60.0) -> Completed:
        if "stop.json" in argv[2]:
            raise HostError("the line was cut")
        return super().run(argv, stdin=stdin, timeout_s=timeout_s)


class Begun:
    """A run over three hosts, the second of which refuses to start its part."""

    def __init__(self, root: Path, error: BaseException) -> None:
        self.error, self.said = error, list[str]()
        self.store = Store(root / "runs.db")
        documents = life(grace_s=2.0)
        self.store.create_run(
            new_run(
                RUN, host="one", more_hosts=HOSTS[1:], kind="script", workdir=str(root / "one"), documents=documents
            )
        )
        self.store.place_nodes(RUN, [str(root / name) for name in HOSTS])
        attempt = self.store.new_attempt(RUN)
        argv = (sys.executable, "-c", "import time; time.sleep(600)")
        self.each = []
        for number, name in enumerate(HOSTS):
            job = Job(RUN, "script", attempt, argv, str(TREE), "{}", {"TOKEN": "secret"}, grace_s=2.0, node=number)
            shell = Refusing(error) if name == "two" else LocalShell()
            place = Workplace(str(root / name), sys.executable, str(root))
            self.each.append(HostPart(name, Part(shell, place, job)))

    def start(self) -> BaseException:
        with pytest.raises(type(self.error)) as told:
            self._start()
        return told.value

    def _start(self) -> None:
        with outcome(self.store, RUN, attempt=1, tell=self.said.append) as doubt:

            def before_spawn() -> None:
                self.store.set_up(RUN, 1)
                doubt.may_live = True

            start_parts(self.store, self.each, doubt, before_spawn=before_spawn)

    def folder(self, name: str) -> Path:
        return Path(self.each[HOSTS.index(name)].part.run_dir)

    @property
    def run(self) -> RunRow:
        return self.store.reader.run(RUN)


@pytest.fixture
def begun(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Begun]:
    made = Begun(tmp_path, request.param)
    yield made
    for item in made.each:
        launch.reap(LocalShell(), item.part.place, names=[RUN])
    made.store.close()


def exit_of(folder: Path) -> dict[str, object]:
    deadline = time.monotonic() + PATIENCE_S
    while not (path := folder / "attempts" / "1" / "exit.json").exists():
        assert time.monotonic() < deadline, list(folder.rglob("*"))
        time.sleep(0.05)
    found: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return found


@pytest.mark.slow  # a real supervisor
@pytest.mark.parametrize(
    ("begun", "state", "reason", "why"),
    [
        (
            DraftyardError("the supervisor did not come up\nit said nothing"),
            State.FAILED,
            None,
            "did not come up\nit said",
        ),
        (HostError("no route to it"), State.FAILED, "unreachable", "no route to it"),
        (KeyboardInterrupt(), State.STOPPED, "user", "interrupted"),
        (SystemExit(143), State.FAILED, None, "the launch broke off"),
    ],
    indirect=["begun"],
    ids=["error", "unreachable", "interrupt", "terminated"],
)
def test_what_keeps_one_host_from_starting_ends_the_run_on_all_for_that_reason(
    begun: Begun, state: State, reason: str | None, why: str
) -> None:
    told = str(begun.start()) + "".join(begun.said)

    assert f"host two did not start; what has started of run {RUN} is being stopped: draftyard wait {RUN}" in told
    assert begun.store.reader.intents(RUN, only_open=False) == []  # nobody has asked for a stop
    assert not (begun.folder("three") / "env").exists()
    assert exit_of(begun.folder("one"))["reason"] == "lonely"  # before any follower has looked

    assert follow(
        Follower(begun.store.path, ending=threading.Event(), connect_to=lambda name, kept: LocalShell(), idle_s=0.2)
    )
    assert (begun.run.state, begun.run.reason) == (state, reason)
    assert begun.run.evidence.startswith("host two: did not start: ")
    assert why in begun.run.evidence


@pytest.mark.slow  # a real supervisor
@pytest.mark.parametrize("begun", [HostError("cut")], indirect=True)
def test_a_supervisor_that_comes_up_late_is_stopped_as_well(begun: Begun) -> None:
    begun.start()

    late = begun.each[1].part
    launch.start(LocalShell(), late.place, late.job)

    assert exit_of(begun.folder("two"))["reason"] == "lonely"


@pytest.mark.slow  # a real supervisor
@pytest.mark.parametrize("begun", [HostError("cut")], indirect=True)
def test_a_part_that_is_not_reached_from_here_is_left_to_the_follower(begun: Begun) -> None:
    begun.each[0] = replace(begun.each[0], part=replace(begun.each[0].part, shell=Unwritten()))

    begun.start()

    assert not (begun.folder("one") / "attempts" / "1" / "stop.json").exists()
    (view,) = views_on(begun.store.reader, "one", begun.store.reader.live_runs())
    other = fallen(begun.store.reader, view)
    assert other is not None
    assert (other.host, other.verdict.evidence) == ("two", "did not start: cut")
