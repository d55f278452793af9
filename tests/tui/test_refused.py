"""A launch that was refused has not died: it is told whole, and nothing that died stands behind it."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.errors import StoreError
from orchestrator.store.reads import Reader
from orchestrator.store.rows import FailureRow, RunRow, State
from tests.tui.golden import opened, press, shown
from tests.tui.world import NOW_S, Writer, Yard, steps
from tests.tui.yard import DAY_S
from tui import died
from tui.app import Draftyard
from tui.died import AGAIN_S, MOST_REFUSED, died_last
from tui.plain import screen_text
from tui.runs import RunsScreen
from tui.runs_rows import never_started, reach_text, state_text, trouble, trouble_cells
from tui.snapshot import Ask, Room, RunNumbers

pytestmark = pytest.mark.slow  # a whole app a test

REFUSED, DEAD, LIVE = "r5xn8ruq", "d6mf6hky", "h2kq2mxd"
WHY = "never started: host gpubox: somebody holds memory of the GPUs for this job: GPU 2: pid 1, user eva, 69.6 GiB"
CAUSE = "ValueError: rows of 8,000 tokens do not fit 4,096 positions"


@pytest.fixture
def refused(tmp_path: Path) -> Path:
    yard = Yard(tmp_path / "runs.db")
    with yard.store:
        yard.run(LIVE, "mine/fast", ago_s=500, num_steps=1000)
        Writer(yard.store, LIVE).tell(steps(0, 9, 1, begin_s=NOW_S - 20, step_s=1.0, seed=1))
        yard.state(LIVE, State.RUNNING)
        yard.run(DEAD, "mine/fast", ago_s=400)
        Writer(yard.store, DEAD).tell(steps(0, 9, 1, begin_s=NOW_S - 300, step_s=1.0, seed=1))
        failure = FailureRow(
            run_id=DEAD, attempt=1, kind="exception", message=CAUSE, hint="", source="stderr", stage=None, step=9,
            traceback="", facts={}, at_s=NOW_S - 290, is_first_cause=True,
        )  # fmt: skip
        yard.state(DEAD, State.FAILED, reason="exit:1", ago_s=290)
        yard.store.replace_failures(DEAD, 1, [failure])
        yard.run(REFUSED, "mine/fast", ago_s=100)
        yard.state(REFUSED, State.FAILED, evidence=WHY, ago_s=99)
    return yard.path


def test_a_run_that_failed_without_a_cause_is_asked_for_it_once(refused: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    failures = Reader.failures

    def counted(reader: Reader, run_id: str) -> list[FailureRow]:
        asked.append(run_id)
        return failures(reader, run_id)

    monkeypatch.setattr(Reader, "failures", counted)
    room = Room(refused)
    for at_s in (NOW_S, NOW_S + 1):
        room._seen = ()  # as if somebody had written
        snapshot = room.read(Ask(), at_s)
    room.close()

    assert snapshot is not None
    assert (snapshot.numbers[REFUSED].cause, snapshot.numbers[DEAD].cause) == ("", CAUSE)
    assert sorted(asked) == sorted([REFUSED, DEAD])


async def test_why_the_last_one_died_is_asked_of_one_that_ran(
    refused: Path, open_app: Callable[..., Draftyard]
) -> None:
    app = open_app(refused)
    async with opened(app, "exclamation_mark") as pilot:
        await shown(app, pilot, DEAD, "do not fit 4,096")


@pytest.fixture
def dying(tmp_path: Path) -> Iterator[Yard]:
    """Two that died in another order than they were born."""
    yard = Yard(tmp_path / "runs.db")
    with yard.store:
        for run_id, born_s, died_s in (("long2345", 14 * DAY_S, 60.0), ("shrt2345", 3 * DAY_S, 2.9 * DAY_S)):
            yard.run(run_id, f"a/{run_id}", ago_s=born_s)
            Writer(yard.store, run_id).tell(steps(0, 40, 10, begin_s=NOW_S - born_s + 5, step_s=0.1, seed=1))
            yard.state(run_id, State.FAILED, reason="exit:1", evidence=f"the end of {run_id}", ago_s=died_s)
        yield yard


async def test_the_last_one_that_died_is_the_one_that_ended_last(
    dying: Yard, open_app: Callable[..., Draftyard]
) -> None:
    """Not the one that was launched last, which has been dead for days."""
    app = open_app(dying.path)
    async with opened(app, "exclamation_mark") as pilot:
        await shown(app, pilot, "F a/long2345")


async def test_a_lost_run_has_died(dying: Yard, open_app: Callable[..., Draftyard]) -> None:
    Writer(dying.store, dying.run("lost2345", "a/lost", ago_s=40 * DAY_S)).tell(
        steps(0, 40, 10, begin_s=NOW_S - 40 * DAY_S + 5, step_s=0.1, seed=1)
    )
    dying.state("lost2345", State.LOST, reason="reboot", evidence="another boot id", ago_s=30)
    app = open_app(dying.path)
    async with opened(app, "exclamation_mark") as pilot:
        text = await shown(app, pilot, "L a/lost", "It was lost", "another boot id")

    assert "Nothing failed" not in text


async def test_the_last_one_that_died_may_stand_beyond_the_list_or_outside_its_filter(
    dying: Yard, open_app: Callable[..., Draftyard]
) -> None:
    for number in range(12):
        run_id = f"fill{number:04d}"
        dying.run(run_id, "b/fine", ago_s=DAY_S - number)
        dying.state(run_id, State.SUCCEEDED, ago_s=DAY_S / 2)
    app = open_app(dying.path)
    async with opened(app) as pilot:
        screen = app.screen
        assert isinstance(screen, RunsScreen)
        screen._limit = 5
        await press(app, pilot, "slash", *"recipe:b", "enter")
        assert {run.recipe for run in screen._rows} == {"b"}
        await press(app, pilot, "exclamation_mark")
        await shown(app, pilot, "F a/long2345")


async def test_who_died_last_is_asked_when_a_run_has_ended_or_the_answer_is_old(
    dying: Yard, open_app: Callable[..., Draftyard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with every step that is reported: over ten thousand runs it takes as long as the list."""
    asked, found, now_s = [], died_last, [NOW_S]

    def counted(reader: Reader, kind: str | None) -> RunRow | None:
        asked.append(kind)
        return found(reader, kind)

    monkeypatch.setattr(died, "died_last", counted)
    live = Writer(dying.store, dying.run("live2345", "a/live", ago_s=50.0))
    numbers = []
    app = open_app(dying.path)
    app.clock = lambda: now_s[0]
    async with opened(app) as pilot:
        for what in ("opened", "steps", "ended", "later", "asked"):
            if what == "steps":
                live.tell(steps(0, 40, 10, begin_s=NOW_S - 1, step_s=0.1, seed=1))
            elif what == "ended":
                dying.state("live2345", State.FAILED, reason="exit:1")
            elif what == "later":
                now_s[0] += AGAIN_S
                dying.store.host_unreachable("box", error="no route")  # something was written
            elif what == "asked":
                await press(app, pilot, "r")
            app.tick()
            await app.settle(pilot)
            numbers.append(len(asked))

    assert numbers == [1, 1, 2, 3, 4]


async def test_what_was_read_before_a_fault_is_shown_after_it(
    dying: Yard, open_app: Callable[..., Draftyard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list was read, who died last was not: the next look shows both, though nothing was written meanwhile."""
    found = died_last

    def refuse(*_: object) -> None:
        raise StoreError("runs.db is busy")

    app = open_app(dying.path)
    async with opened(app) as pilot:
        monkeypatch.setattr(died, "died_last", refuse)
        dying.run("news2345", "a/news", ago_s=1.0)
        app.tick()
        await shown(app, pilot, "runs.db is busy")
        monkeypatch.setattr(died, "died_last", found)
        app.tick()
        await app.settle(pilot)
        after = screen_text(app)

    assert "a/news" in after


def test_a_run_is_found_behind_any_number_of_refused_launches(dying: Yard) -> None:
    for number in range(MOST_REFUSED + 2):
        dying.run(f"refu{number:04d}", "b/refused", ago_s=50.0)
        dying.state(f"refu{number:04d}", State.FAILED, evidence=WHY, ago_s=40.0 - number)
    with Reader(dying.path) as reader:
        found = died_last(reader, "train")

    assert found is not None
    assert found.id == "long2345"


async def test_where_nothing_has_died_that_is_said(tmp_path: Path, open_app: Callable[..., Draftyard]) -> None:
    yard = Yard(tmp_path / "runs.db")
    with yard.store:
        yard.run(LIVE, "mine/fast")
    app = open_app(yard.path)
    async with opened(app, "exclamation_mark") as pilot:
        await shown(app, pilot, "No training has failed or was lost.")  # what the list holds


async def test_a_refusal_is_told_whole(refused: Path, open_app: Callable[..., Draftyard]) -> None:
    app = open_app(refused, run=REFUSED)
    async with opened(app) as pilot:
        await press(app, pilot, "5")
        text = await shown(app, pilot, "never started")

    assert "pid 1, user eva, 69.6 GiB" in " ".join(text.split())
    assert "Nothing failed" not in text


async def test_what_never_started_is_not_worse_off_than_what_lives(
    refused: Path, open_app: Callable[..., Draftyard]
) -> None:
    app = open_app(refused)
    async with opened(app, "s", size=(160, 30)) as pilot:
        text = await shown(app, pilot, "what is wrong", "do not fit 4,096")

    assert [line.index("mine/fast") > 0 for line in text.splitlines() if "mine/fast" in line]
    assert text.index(DEAD) < text.index(LIVE) < text.index(REFUSED)


def test_worst_off_says_the_known_cause(refused: Path) -> None:
    room = Room(refused)
    snapshot = room.read(Ask(), NOW_S)
    room.close()
    assert snapshot is not None
    runs = {run.id: run for run in snapshot.runs}

    assert trouble(runs[DEAD], snapshot.numbers[DEAD], NOW_S) == (1, CAUSE)
    assert trouble(runs[REFUSED], snapshot.numbers[REFUSED], NOW_S) == (0, WHY)
    assert trouble_cells(runs[REFUSED], RunNumbers(), NOW_S)[4][0][0] == WHY


def test_unreachable_is_one_word(refused: Path) -> None:
    with Reader(refused) as reader:
        live, dead = reader.run(LIVE), reader.run(DEAD)

    cut_off = dataclasses.replace(live, unreachable_since_s=NOW_S)
    assert (state_text(cut_off), reach_text(cut_off)) == ("running", "unreachable")
    assert reach_text(live) == reach_text(dataclasses.replace(dead, unreachable_since_s=NOW_S)) == ""
    assert state_text(dataclasses.replace(dead, reason="unreachable")) == "unreachable"


@pytest.mark.parametrize(("attempt", "is_none"), [(0, True), (1, True), (2, False)])
def test_a_resume_that_failed_before_its_start_is_no_run_that_never_started(
    refused: Path, attempt: int, is_none: bool
) -> None:
    with Reader(refused) as reader:
        run = dataclasses.replace(reader.run(REFUSED), attempt=attempt)

    assert never_started(run) is is_none
