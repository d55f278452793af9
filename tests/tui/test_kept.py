"""What screens leave behind them: nothing that only a collection would free, as the program grows by what lies there until one comes.

After 26 s of looks at runs, curves, logs and comparisons it was 35 MB, nearly all of it comparisons that had been closed and lines
that had been painted over; how much lay there at the most was chance, so the program never stopped growing.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from textual.strip import Strip
from textual.widget import Widget

from benchmarks.tui_program import ONCE, ROUND
from orchestrator.store.rows import RunRow, State
from tests.tui.golden import opened, press
from tests.tui.world import NOW_S, Writer, Yard
from tui.app import Draftyard
from tui.compare import CompareScreen
from tui.curve import Sample
from tui.detail import RunDetail
from tui.home import SCREENS
from tui.run import RunScreen
from tui.snapshot import Ask, Room

KINDS = (Widget, Strip, Sample, RunDetail)


@pytest.fixture
def _uncollected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gc.collect()
    gc.disable()
    monkeypatch.setattr(gc, "collect", lambda _generation=2: 0)  # which the program asks for by itself
    yield
    monkeypatch.undo()
    gc.enable()
    gc.collect()


@pytest.mark.slow
@pytest.mark.usefixtures("_uncollected")
async def test_looking_round_again_and_again_keeps_no_more_than_the_first_time(
    open_app: Callable[..., Draftyard],
) -> None:
    app = open_app()
    keys = [*" ".join(ROUND).split(), *["2", "3", "4", "escape"]]
    counts = []
    async with opened(app, *keys, size=(120, 40)) as pilot:
        for _ in range(4):
            await press(app, pilot, *keys)
            counts.append(kept())

    assert counts[0]["Sample"] > 100
    more = {kind: counts[-1][kind] / number for kind, number in counts[0].items()}
    assert max(more.values()) < 1.1, more  # a comparison, or lines, of each round would be half as many again


@pytest.mark.slow
async def test_what_the_memory_is_measured_of_has_every_screen_at_the_start(open_app: Callable[..., Draftyard]) -> None:
    """Those that no key of the rounds leads to are made at the first pause of the keys: on a busy machine in any minute, as a step."""
    app = open_app()
    async with opened(app, size=(120, 40)) as pilot:
        await press(app, pilot, *" ".join(ROUND).split())
        before = made(app)
        await press(app, pilot, *" ".join(ONCE).split())

        assert before == {RunScreen.NAME, SCREENS[0], CompareScreen.NAME}
        assert made(app) == {RunScreen.NAME, *SCREENS, CompareScreen.NAME}


def made(app: Draftyard) -> set[str]:
    return {name for name in (RunScreen.NAME, *SCREENS, CompareScreen.NAME) if app.get_screen(name).is_running}


def test_the_words_of_live_runs_are_not_kept_when_they_are_old(tmp_path: Path) -> None:
    """Rows that have ended are kept between readings; of a live one each step made another, thousands of them."""
    yard = Yard(tmp_path / "runs.db")
    with yard.store:
        live, done = yard.run("k3pt7q2m", "a/live"), yard.run("d7kq2mxd", "a/done")
        yard.state(live, State.RUNNING)
        yard.state(done, State.SUCCEEDED)
        room, writer, rows = Room(yard.path), Writer(yard.store, live), []
        for step in range(1, 60):
            writer.tell([("metrics", NOW_S, {"step": step, "values": {"loss": 1.0 / step}})])
            snapshot = room.read(Ask(), NOW_S)
            assert snapshot is not None
            assert [run.step for run in snapshot.runs if run.id == live] == [step]
            rows.append(sum(type(one) is RunRow and one.id == live for one in gc.get_objects()))
        room.close()

    assert max(rows) <= 3, (
        rows
    )  # what was just read, and the one that it is compared with; of each step one, with the fault


def kept() -> Counter[str]:
    """How many there are of each of KINDS, collected or not. No thread may be at work: Python breaks a tuple that is being made."""
    return Counter(kind.__name__ for one in gc.get_objects() for kind in KINDS if isinstance(one, kind))
