"""A run over several attempts: what it took is told of all of them, and what a resume did anew in one line."""

import contextlib
from pathlib import Path

import pytest

from orchestrator.store.reads import Reader
from orchestrator.store.rows import State
from tests.tui.world import NOW_S, Writer, Yard, steps
from tests.tui.yard import HOUR_S
from tui.attempts import attempt_lines, lost_work, took
from tui.detail import RunDetail, read_detail
from tui.pieces import text_of, width_of
from tui.snapshot import CurvesAsk

RUN = "r3sumed2"


def run_of(path: Path, *spans: tuple[int, int, float], step_s: float = 36.0) -> RunDetail:
    """An attempt for each (first step, last step, hours ago that it began); all but the last were lost with their host."""
    yard = Yard(path)
    with yard.store:
        yard.run(RUN, "mine/fast", ago_s=spans[0][2] * HOUR_S + 60, num_steps=1000)
        for number, (first, last, ago_h) in enumerate(spans, 1):
            begin_s = NOW_S - ago_h * HOUR_S
            with yard.at(begin_s):
                _ = yard.store.new_attempt(RUN) if number > 1 else 1
            Writer(yard.store, RUN, attempt=number).tell(
                steps(first, last, 1, begin_s=begin_s, step_s=step_s, seed=number)
            )
            ended_ago_s = NOW_S - begin_s - (last - first) * step_s
            is_last = number == len(spans)
            state, reason = (State.SUCCEEDED, None) if is_last else (State.LOST, "reboot")
            yard.state(RUN, state, ago_s=ended_ago_s, reason=reason, evidence="another boot id")
    with contextlib.closing(Reader(path)) as reader:
        return read_detail(reader, reader.run(RUN), CurvesAsk())


def test_a_run_took_as_long_as_all_its_attempts(tmp_path: Path) -> None:
    """It began 20 hours ago, lay still for 10 hours after its first attempt, and ended 6 hours ago."""
    detail = run_of(tmp_path / "runs.db", (0, 500, 20.0), (400, 800, 10.0))

    line = took(detail, NOW_S)

    assert line is not None
    assert text_of([line]) == "took 14h00m in 2 attempts, 9h00m of it running, ended 6h ago"


def test_a_run_of_one_attempt_says_no_more_than_what_it_took(tmp_path: Path) -> None:
    line = took(run_of(tmp_path / "runs.db", (0, 500, 20.0)), NOW_S)

    assert line is not None
    assert text_of([line]) == "took 5h00m, ended 15h ago"


def test_lost_work_is_said_in_steps_and_time(tmp_path: Path) -> None:
    detail = run_of(tmp_path / "runs.db", (0, 500, 20.0), (401, 800, 10.0))

    lines = attempt_lines(detail, 60)

    assert "lost work    100 steps, 59m" in text_of(lines)
    assert ("100 steps, 59m", "warn") in [piece for line in lines for piece in line]


def test_a_resume_that_lost_nothing_says_nothing_of_it(tmp_path: Path) -> None:
    assert "lost" not in text_of(attempt_lines(run_of(tmp_path / "runs.db", (0, 500, 20.0), (501, 800, 10.0)), 60))


@pytest.mark.parametrize(
    ("spans", "lost"),
    [
        (((0, 500, 30.0), (451, 480, 20.0), (451, 800, 10.0)), 50 + 30),  # the second died before it had saved anything
        (((0, 500, 30.0), (451, 480, 20.0), (401, 800, 10.0)), 100 + 30),  # and its checkpoint was a broken one
        (((0, 500, 30.0), (0, 800, 20.0)), 501),  # from the beginning
    ],
)
def test_every_step_that_was_taken_again_is_lost_once(
    spans: tuple[tuple[int, int, float], ...], lost: int, tmp_path: Path
) -> None:
    assert lost_work(run_of(tmp_path / "runs.db", *spans).attempts)[0] == lost


def test_attempts_are_whole_in_half_a_screen(tmp_path: Path) -> None:
    detail = run_of(tmp_path / "runs.db", (0, 500, 20.0), (400, 800, 10.0))

    lines = attempt_lines(detail, 37)

    assert max(map(width_of, lines)) <= 37
    assert "succeeded" in text_of(lines)
