"""The grid of curves by its keys: one window for all, zoom, pan, log, smoothing, baseline, the way back."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.store.rows import State
from tests.tui.golden import SCREENS, matches, opened, press
from tests.tui.world import GIB, NOW_S, Writer, Yard, steps
from tests.tui.yard import LIVE
from tui.app import Draftyard
from tui.curves import CurvesPane
from tui.once import rested
from tui.plain import screen_text
from tui.run import RunScreen

pytestmark = pytest.mark.slow  # a whole app a test

Open = Callable[..., Draftyard]


async def test_one_thing_back_at_a_time(open_app: Open) -> None:
    """Crosshair, zoom, the single chart, then the screen."""
    app = open_app()
    async with opened(app, "j", "enter", "2", size=(140, 40)) as pilot:
        grid = screen_text(app)
        await press(app, pilot, "z")
        alone = screen_text(app)
        await press(app, pilot, "plus")
        zoomed = screen_text(app)
        await press(app, pilot, "less_than_sign", "less_than_sign")
        panned = screen_text(app)
        await press(app, pilot, "left")
        crossed = screen_text(app)
        await press(app, pilot, "escape", "escape", "escape")
        back = screen_text(app)
        await press(app, pilot, "escape")
        home = screen_text(app)

    assert "accuracy" in grid
    assert "accuracy" not in alone
    assert "65,000" in zoomed.splitlines()[-2]
    assert panned.splitlines()[-2].split() == ["32,500", "97,500"]
    assert "┊" in crossed
    assert back == grid
    assert "worst" not in home


async def test_log_and_smoothing_are_looks_alone(open_app: Open) -> None:
    app = open_app()
    async with opened(app, "j", "enter", "2", "z", size=(100, 30)) as pilot:
        pane = app.screen.query_one(CurvesPane)
        ask = pane.ask()
        drawn = [screen_text(app)]
        for key in ("m", "m", "m", "m", "L", "L"):
            await press(app, pilot, key)
            drawn.append(screen_text(app))

        assert pane.ask() == ask
    assert len({*drawn[:4]}) == 4
    assert drawn[4] == drawn[0]
    assert " log" in drawn[5].splitlines()[3]
    assert drawn[6] == drawn[0]


async def test_the_baseline_is_another_run_laid_over(open_app: Open) -> None:
    app = open_app()
    async with opened(app, "B", "j", "enter", "2", "z", size=(140, 40)) as pilot:
        before = screen_text(app)
        await press(app, pilot, "d", "left")
        laid = screen_text(app)

    assert "▲ baseline" not in before
    assert "▲ baseline" in laid
    assert "● loss" in laid


async def test_older_attempts_are_read_with_the_newest(open_app: Open) -> None:
    app = open_app(run="d5xn8ruq")
    async with opened(app, "2", "z", size=(100, 30)):
        assert app.shown is not None
        assert app.shown.detail is not None
        curve = app.shown.detail.curve("loss")

    assert curve is not None
    assert [one.attempt for one in curve.attempts] == [1, 2]


async def test_a_metric_is_found_by_its_name_though_another_has_come_before_it(yard_copy: Path, open_app: Open) -> None:
    app = open_app(yard_copy, run=LIVE, screen="curves")
    async with opened(app, "slash", *"wait_s", size=(100, 30)) as pilot:
        yard = Yard(yard_copy)
        with yard.store:
            told = {"step": 130_100, "values": {"aaa_new": 1.0, "accuracy_new": 1.0, "acceptance": 2.0}}
            Writer(yard.store, LIVE, name="rank1").tell([("metrics", NOW_S, told)])
        app.tick()
        await app.settle(pilot)
        pane = app.get_screen(RunScreen.NAME, RunScreen).query_one(CurvesPane)
        before = [row.name for row in pane._detail.series] if pane._detail else []
        await press(app, pilot, "enter")
        await app.settle(pilot)
        chosen = pane._detail.series[pane._chosen].name if pane._detail else ""
        text = screen_text(app)

    assert "acceptance" in before
    assert chosen == "wait_s"
    assert "▸ wait_s" in text


LOST_ITS_LOSS = range(2000, 2400)  # steps


async def test_a_loss_that_was_no_number_is_a_marked_gap_on_the_screens(tmp_path: Path, open_app: Open) -> None:
    """Of a run in a yard of its own, whose allocator had to try again as well."""
    yard = Yard(tmp_path / "runs.db")
    with yard.store:
        run = yard.run("v2nf7gap", "qwen3-8b/ce", ago_s=9000.0, num_steps=4000)
        told = steps(0, 4000, 20, begin_s=NOW_S - 8900, step_s=2.0, seed=11)
        for _, _, fields in told:
            fields["values"]["allocation_retries"] = 3.0
            if fields["step"] in LOST_ITS_LOSS:
                fields["values"]["loss"] = math.nan
        peak = {"stage": "backward", "gpu": 5, "allocated_bytes": 80 * GIB, "reserved_bytes": 82 * GIB}
        Writer(yard.store, run).tell([*told, ("memory", NOW_S - 8800, peak)])
        yard.state(run, State.FAILED, reason="nonfinite", evidence="exit file: code 1")
    app = open_app(yard.path, run=run)
    async with opened(app, "2", "z", size=(80, 24)) as pilot:
        await rested(app, pilot)
        curve = screen_text(app)
        await press(app, pilot, "3")
        await rested(app, pilot)
        memory = screen_text(app)

    assert "× 20 not finite" in curve
    assert "×" in curve.splitlines()[-3]
    assert "allocator retries 3" in memory
    assert matches(SCREENS / "not-finite-curve-80x24.txt", curve)
    assert matches(SCREENS / "not-finite-memory-80x24.txt", memory)
