"""When a run that lives is said to hang, by given clocks: this machine's two, and its host's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.follow import one_run
from orchestrator.follow.desk import Desk
from orchestrator.observe import EventFile, Evidence
from orchestrator.shell.local import LocalShell
from orchestrator.store.writes import Store
from remote.wire import Event
from tests.orchestrator.runs import RUN, new_run, write_events

STEP_S = 60.0  # twenty of them are a hang


class Site:
    """A run that lives, a host that shows its events file, and clocks that move as the test says."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store, self.path = store, folder / "runs" / RUN / "attempts" / "1" / "events.rank0.jsonl"
        self.wall_s, self.monotonic_s, self.host_s = 50_000.0, 100.0, 50_000.0
        self.seq = 0
        self.desk = self.follower()

    def follower(self) -> Desk:
        return Desk(self.store, self.store.reader, lambda: self.wall_s, monotonic=lambda: self.monotonic_s)

    def wait(self, seconds: float) -> None:
        self.wall_s, self.monotonic_s, self.host_s = (
            now_s + seconds for now_s in (self.wall_s, self.monotonic_s, self.host_s)
        )

    def says(self, kind: str, **fields: object) -> None:
        self.seq += 1
        write_events(self.path, [Event(self.seq, kind, self.host_s, self.host_s - 40_000.0, fields)])

    def steps(self, first: int, last: int, **values: float) -> None:
        for step in range(first, last + 1):
            self.wait(STEP_S)
            self.says("metrics", step=step, values={"loss": 1.0, **values})

    def observe(self, *_: object, **__: object) -> Evidence:
        found = self.path.stat()
        file = EventFile(self.path.name, found.st_size, found.st_ino)
        return Evidence(
            1, "boot", self.host_s, self.host_s, 2**40, supervisor_alive=True, job_alive=True, files=(file,)
        )

    def reason(self) -> str | None:
        """Of the run, after one look."""
        one_run.look(self.desk, LocalShell(), self.store.reader.run(RUN))
        return self.store.reader.run(RUN).reason


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with Store(tmp_path / "runs.db") as store:
        store.create_run(new_run(workdir=str(tmp_path)))
        store.new_attempt(RUN)
        site = Site(store, tmp_path)
        monkeypatch.setattr(one_run, "observe", site.observe)
        site.says("start", pid=1)
        yield site


def test_a_job_that_tells_no_time_of_its_steps_stalls_and_is_taken_back(site: Site) -> None:
    site.steps(1, 5)
    assert site.reason() is None
    site.wait(19 * STEP_S)
    assert site.reason() is None
    site.wait(2 * STEP_S)
    assert site.reason() == "stalled"
    assert "the median step takes 60 s" in site.store.reader.run(RUN).evidence

    site.steps(6, 6)

    assert site.reason() is None


def test_a_follower_that_comes_later_finds_the_steps_of_such_a_job_too(site: Site) -> None:
    site.steps(1, 5)
    assert site.reason() is None
    site.wait(21 * STEP_S)
    site.desk = site.follower()

    assert site.reason() == "stalled"


def test_a_job_that_has_told_no_two_steps_never_stalls(site: Site) -> None:
    site.steps(1, 1)
    assert site.reason() is None
    site.wait(1e5)

    assert site.reason() is None


@pytest.mark.parametrize("moved_s", [7200.0, -7200.0])
def test_a_clock_here_that_is_moved_makes_no_hang_and_hides_none(site: Site, moved_s: float) -> None:
    site.steps(1, 5, step_s=STEP_S)
    assert site.reason() is None

    site.wall_s += moved_s
    site.wait(STEP_S)
    assert site.reason() is None

    site.steps(6, 40, step_s=STEP_S)
    assert site.reason() is None
    site.wait(19 * STEP_S)
    assert site.reason() is None
    site.wait(2 * STEP_S)
    assert site.reason() == "stalled"
