"""A launch that was refused has not died: it is told whole, and nothing that died stands behind it."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.store.reads import Reader
from orchestrator.store.rows import FailureRow, State
from tests.tui.golden import opened, press, shown
from tests.tui.world import NOW_S, Writer, Yard, steps
from tui.app import Draftyard
from tui.runs_rows import never_started, state_text, trouble, trouble_cells
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

    assert state_text(dataclasses.replace(live, unreachable_since_s=NOW_S)) == "unreachable"
    assert state_text(dataclasses.replace(dead, reason="unreachable")) == "unreachable"


@pytest.mark.parametrize(("attempt", "is_none"), [(0, True), (1, True), (2, False)])
def test_a_resume_that_failed_before_its_start_is_no_run_that_never_started(
    refused: Path, attempt: int, is_none: bool
) -> None:
    with Reader(refused) as reader:
        run = dataclasses.replace(reader.run(REFUSED), attempt=attempt)

    assert never_started(run) is is_none
