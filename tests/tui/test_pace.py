"""When a run ends, why that moved, and which side waits."""

import pytest

from tui.pace import StepTimes, bottleneck, mean_of, pace_at, pace_of

OVERALL = {"step_s": 1.0, "wait_s": 0.1, "forward_s": 0.3, "backward_s": 0.5, "optimizer_s": 0.1}
RECENT = {"step_s": 1.5, "wait_s": 0.6, "forward_s": 0.3, "backward_s": 0.5, "optimizer_s": 0.1}


def test_the_end_is_the_steps_left_times_a_recent_step() -> None:
    pace = pace_of(StepTimes(RECENT, OVERALL), step=100, num_steps=300)

    assert pace.steps_left == 200
    assert pace.eta_s == pytest.approx(300.0)
    assert pace.moved_s == pytest.approx(100.0)


def test_after_the_last_step_no_end_is_told_from_steps() -> None:
    assert pace_of(StepTimes(RECENT, OVERALL), step=300, num_steps=300).eta_s is None
    assert pace_at(1.0, step=100, num_steps=100).eta_s is None


def test_the_part_that_grew_explains_why_the_end_moved() -> None:
    pace = pace_of(StepTimes(RECENT, OVERALL), step=100, num_steps=300)

    assert pace.why_moved == "wait +500 ms a step"


def test_a_steady_run_has_nothing_to_explain() -> None:
    assert pace_of(StepTimes(OVERALL, OVERALL), step=1, num_steps=9).why_moved == ""


def test_what_the_parts_do_not_add_up_to_is_other() -> None:
    parts = dict(pace_of(StepTimes({**RECENT, "step_s": 2.0}, OVERALL), step=1, num_steps=9).parts)

    assert parts["other"] == pytest.approx(0.5)


def test_without_step_times_the_clock_tells_the_pace() -> None:
    assert pace_at(2.0, step=50, num_steps=100).eta_s == pytest.approx(100.0)
    assert pace_at(None, step=None, num_steps=100).eta_s is None


@pytest.mark.parametrize(("depth", "side"), [(20.0, "the trainer"), (1.0, "the target"), (10.0, "neither")])
def test_the_queue_tells_which_side_waits(depth: float, side: str) -> None:
    pace = pace_of(StepTimes(RECENT, OVERALL), step=1, num_steps=9)

    assert bottleneck({"queue_depth": depth, "queue_capacity": 20.0}, pace).startswith(side)


def test_without_a_queue_the_share_of_waiting_tells() -> None:
    pace = pace_of(StepTimes(RECENT, OVERALL), step=1, num_steps=9)

    assert bottleneck({}, pace) == "the data side: 40% of a step is waiting for data"


def test_a_mean_leaves_out_what_would_make_it_infinite() -> None:
    assert mean_of([1e308, 1e308, 2.0]) == 2.0
    assert mean_of([1e308]) is None
