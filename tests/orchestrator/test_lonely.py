"""A part of a run over two hosts whose other part has fallen: it is ended, once, and nobody takes that for a wish."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from orchestrator.errors import HostError
from orchestrator.follow.desk import Desk
from orchestrator.follow.ending import end_part
from orchestrator.follow.nodes import LONELY_GRACE_S, LONELY_S, fallen, views_on
from orchestrator.follow.one_run import LATE_S, look
from orchestrator.follow.status import STARTING_S, Verdict
from orchestrator.launcher import this_process
from orchestrator.observe import Evidence
from orchestrator.shell import Completed
from orchestrator.shell.local import LocalShell
from orchestrator.shell.stream import Ended, Sink, Source
from orchestrator.store.rows import Document, Reason, RunRow, State
from orchestrator.store.writes import Store
from tests.orchestrator.runs import RUN, new_run

FAILED = Verdict(State.FAILED, "exit:1", "exit status 1 in the exit file", 50.0, True)


class Second(LocalShell):
    """The second host: its supervisor, its job, either or none of them lives; no exit file comes."""

    def __init__(self, *alive: str) -> None:
        super().__init__()
        self.alive = alive
        self.reaped: list[str] = []
        self.is_cut = False

    def run(self, argv: list[str], *, stdin: bytes = b"", timeout_s: float = 60.0) -> Completed:
        if "rec files" not in argv[2]:
            return super().run(argv, stdin=stdin, timeout_s=timeout_s)
        stat = b"7 (python) S " + b"0 " * 18 + b"99 0"
        records = [b"host\nb\n9.0 1.0\n1.0\n", b"attempt\n1\n", b"claim\nsupervisor 7 99 b\njob 8 99 b\n"]
        records += [b"stat %s\n%s" % (name.encode(), stat) for name in self.alive]
        return Completed(0, b"\x1e" + b"\x1e".join(records) + b"\x1e", b"")

    def stream(self, argv: list[str], *, source: Source, sink: Sink, timeout_s: float, idle: bool = False) -> Ended:
        if argv[-1] != f"{RUN}/1":
            return super().stream(argv, source=source, sink=sink, timeout_s=timeout_s, idle=idle)
        if self.is_cut:
            raise HostError("the line was cut")
        self.reaped.append(argv[-1])
        self.alive = ()
        sink(b'{"stubborn": []}')
        return Ended(0, b"")


class Clock:
    """Seconds that a test sets."""

    s = 0.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """The first host's part has failed."""
    with Store(tmp_path / "runs.db") as made:
        made.create_run(new_run(RUN, host="a", workdir=str(tmp_path / "a"), more_hosts=("b",)))
        made.place_nodes(RUN, [str(tmp_path / "a"), str(tmp_path / "b")])
        made.new_attempt(RUN)
        made.set_state(RUN, State.RUNNING, evidence="x")
        first = views_on(made.reader, "a", made.reader.live_runs())[0]
        end_part(Desk(made, made.reader, lambda: 1.0), first, Evidence.nothing(), FAILED)
        yield made


def second(store: Store) -> RunRow:
    return views_on(store.reader, "b", store.reader.live_runs())[0]


class Follower:
    """One that may be killed: what it knows in memory alone goes with it."""

    def __init__(self, store: Store) -> None:
        self._now_s = 0.0
        self._desk = Desk(store, store.reader, lambda: 1.0, monotonic=lambda: self._now_s)

    def waits_with(self, shell: Second) -> None:
        for self._now_s in (1.0, 2.0 + LONELY_S):
            look(self._desk, shell, second(self._desk.store))


def notes(store: Store) -> list[str]:
    return [event.text for event in store.reader.events(RUN, kinds=["note"])]


def wish(tmp_path: Path) -> dict[str, object]:
    found = json.loads((tmp_path / "b" / "runs" / RUN / "attempts" / "1" / "stop.json").read_text())
    assert isinstance(found, dict)
    return found


def test_an_orphan_that_one_follower_ended_is_no_lost_part_to_the_next(store: Store) -> None:
    shell = Second("job")
    Follower(store).waits_with(shell)
    assert shell.reaped == [f"{RUN}/1"]

    look(Desk(store, store.reader, lambda: 1.0), shell, second(store))

    run, part = store.reader.run(RUN), store.reader.nodes(RUN)[1].end["verdict"]
    assert (run.state, run.reason) == (State.FAILED, "exit:1")
    assert run.evidence.startswith("host a: ")
    assert (part["state"], part["reason"]) == (State.STOPPED, None)
    assert "asked" not in part["evidence"]


def test_an_orphan_that_nobody_ended_is_a_lost_part(store: Store) -> None:
    look(Desk(store, store.reader, lambda: 1.0), Second(), second(store))

    assert store.reader.run(RUN).state is State.LOST


def test_a_follower_that_is_killed_at_the_deed_leaves_it_to_the_next_who_says_it_no_second_time(store: Store) -> None:
    shell = Second("job")
    shell.is_cut = True
    with pytest.raises(HostError):
        Follower(store).waits_with(shell)
    shell.is_cut = False

    Follower(store).waits_with(shell)

    assert shell.reaped == [f"{RUN}/1"]
    assert len(notes(store)) == 1


def test_a_supervisor_is_told_that_nobody_asked_for_it(store: Store, tmp_path: Path) -> None:
    Follower(store).waits_with(Second("supervisor", "job"))

    assert wish(tmp_path) == {"grace_s": 10.0, "why": "lonely"}
    assert notes(store) == ["host b is stopped: host a has ended (exit status 1 in the exit file)"]


@pytest.mark.slow
def test_a_part_whose_host_takes_no_wish_is_followed_on_and_ended_from_here(store: Store, tmp_path: Path) -> None:
    (tmp_path / "b").touch()  # no folder to write into
    shell, now = Second("supervisor", "job"), Clock()
    desk = Desk(store, store.reader, lambda: 1.0, monotonic=lambda: now.s)
    ended = []

    for now.s in (1.0, 2.0 + LONELY_S, 3.0 + LONELY_S, 20.0 + LONELY_S + LATE_S):
        look(desk, shell, second(store))
        ended.append(len(shell.reaped))

    assert ended == [0, 0, 0, 1]
    assert [text[:36] for text in notes(store)] == [
        "host b is stopped: host a has ended ",
        "host b does not take the wish to sto",
    ]


def test_a_stop_that_was_asked_for_stays_the_persons(store: Store, tmp_path: Path) -> None:
    store.ask(RUN, "stop", grace_s=20.0)

    Follower(store).waits_with(Second("supervisor", "job"))

    assert wish(tmp_path) == {"grace_s": 10.0}


def test_a_note_of_an_earlier_attempt_says_nothing_of_this_one(store: Store) -> None:
    shell = Second("job")
    Follower(store).waits_with(shell)
    look(Desk(store, store.reader, lambda: 1.0), shell, second(store))
    store.new_attempt(RUN)
    first = views_on(store.reader, "a", store.reader.live_runs())[0]
    end_part(Desk(store, store.reader, lambda: 2.0), first, Evidence.nothing(), FAILED)

    look(Desk(store, store.reader, lambda: 1.0), shell, second(store))

    assert store.reader.nodes(RUN)[1].end["verdict"]["state"] == State.LOST
    assert store.reader.run(RUN).reason != Reason.USER


def test_the_first_host_has_the_whole_grace_for_a_checkpoint_that_rank_0_is_writing(tmp_path: Path) -> None:
    graces = []
    for number in (0, 1):
        with Store(tmp_path / f"{number}.db") as store:
            store.create_run(new_run(RUN, host="a", workdir=str(tmp_path / "a"), more_hosts=("b",)))
            store.place_nodes(RUN, [str(tmp_path / "a"), str(tmp_path / "b")])
            store.new_attempt(RUN)
            store.set_state(RUN, State.RUNNING, evidence="x")
            views = [views_on(store.reader, host, store.reader.live_runs())[0] for host in "ab"]
            now = Clock()
            desk = Desk(store, store.reader, lambda: 1.0, monotonic=partial(getattr, now, "s"))
            end_part(desk, views.pop(1 - number), Evidence.nothing(), FAILED)
            shell = Second("supervisor", "job")
            for now.s in (1.0, 2.0 + LONELY_S):
                look(desk, shell, views[0])
        folder = tmp_path / "ab"[number] / "runs" / RUN / "attempts" / "1"
        graces.append(json.loads((folder / "stop.json").read_text())["grace_s"])

    assert graces == [60.0, LONELY_GRACE_S]


def test_a_part_that_a_killed_launch_had_not_started_is_told_a_minute_later_and_the_other_is_lonely(
    tmp_path: Path,
) -> None:
    dead = json.loads(this_process()) | {"start_ticks": 1}  # the pid is another's by now
    documents = {**new_run(RUN).documents, Document.LAUNCHER: json.dumps(dead)}
    with Store(tmp_path / "runs.db") as store:
        store.create_run(new_run(RUN, host="a", workdir=str(tmp_path / "a"), more_hosts=("b",), documents=documents))
        store.place_nodes(RUN, [str(tmp_path / "a"), str(tmp_path / "b")])
        store.new_attempt(RUN)
        store.set_state(RUN, State.SETTING_UP, evidence="x")
        now = Clock()
        desk = Desk(store, store.reader, lambda: 1.0, monotonic=lambda: now.s)
        ends = []
        for now.s in (1.0, STARTING_S, 2.0 + STARTING_S):
            look(desk, LocalShell(), second(store))
            ends.append(store.reader.nodes(RUN)[1].end)

        first = views_on(store.reader, "a", store.reader.live_runs())[0]
        assert fallen(store.reader, first) is not None
    assert ends[:2] == [{}, {}]
    assert ends[2]["verdict"]["evidence"] == "never started: its launch was killed before it came to that"
