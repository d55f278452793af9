"""Curve arithmetic against slow, obvious loops."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.tui.samples import raw_samples
from tui.canvas import spark
from tui.curve import Axis, Window, axis_of, full_window, nearest, smooth, thin, trace

finite = st.floats(-1e6, 1e6)
values = st.lists(st.one_of(finite, st.just(math.nan), st.just(math.inf), st.none()), min_size=1, max_size=300)


@given(values, st.integers(2, 90))
def test_no_spike_is_lost_at_any_width(numbers: list[float | None], num_columns: int) -> None:
    samples = raw_samples(enumerate(numbers))
    window = full_window(samples)

    shown = trace(samples, window, num_columns)

    for step, number in enumerate(numbers):
        if number is not None and math.isfinite(number):
            place = round((step - window.first) * (num_columns - 1) / (window.last - window.first))
            column = shown.columns[place]
            assert column is not None
            assert column.low <= number <= column.high


@given(values, st.integers(2, 90))
def test_every_value_that_is_not_finite_is_counted_and_marked(numbers: list[float | None], num_columns: int) -> None:
    samples = raw_samples(enumerate(numbers))

    shown = trace(samples, full_window(samples), num_columns)

    num_bad = sum(number is None or not math.isfinite(number) for number in numbers)
    assert shown.num_bad == num_bad
    assert bool(shown.bad_columns) == bool(num_bad)


@example([5e-324])
@given(values)
def test_an_axis_is_sane_whatever_it_is_given(numbers: list[float | None]) -> None:
    samples = raw_samples(enumerate(numbers))

    for is_log in (False, True):
        axis = axis_of([trace(samples, full_window(samples), 40, is_log=is_log)], is_log=is_log)
        assert math.isfinite(axis.low)
        assert math.isfinite(axis.high)
        assert axis.low < axis.high
        assert axis.position(axis.low) == pytest.approx(0.0)
        assert axis.position(axis.high) == pytest.approx(1.0)


@given(st.lists(finite, min_size=1, max_size=60), st.floats(0, 0.99))
def test_smoothing_is_the_weighted_mean_of_all_before(numbers: list[float], weight: float) -> None:
    smoothed = smooth(raw_samples(enumerate(numbers)), weight)

    for index, sample in enumerate(smoothed):
        weights = [weight ** (index - before) for before in range(index + 1)]
        expected = sum(w * number for w, number in zip(weights, numbers, strict=False)) / sum(weights)
        assert sample.mean == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_a_gap_is_not_bridged() -> None:
    samples = raw_samples([(0, 1.0), (10, math.nan), (20, 1.0)])

    shown = trace(samples, Window(0, 20), 21)

    assert shown.columns[0] is not None
    assert shown.columns[20] is not None
    assert all(column is None for column in shown.columns[1:20])
    assert shown.bad_columns == {10}


def test_sparse_samples_are_joined_by_straight_lines() -> None:
    shown = trace(raw_samples([(0, 0.0), (10, 10.0)]), Window(0, 10), 11)

    assert [column.low for column in shown.columns if column] == pytest.approx(list(range(11)))


def test_a_line_runs_off_the_chart_when_zoomed_in() -> None:
    shown = trace(raw_samples([(0, 0.0), (100, 100.0)]), Window(40, 60), 21)

    assert [column.low for column in shown.columns if column] == pytest.approx([float(n) for n in range(40, 61)])


def test_a_logarithmic_axis_leaves_out_and_counts_what_it_cannot_show() -> None:
    samples = raw_samples([(0, 1.0), (1, 0.0), (2, -3.0), (3, 100.0)])

    shown = trace(samples, full_window(samples), 4, is_log=True)

    assert shown.num_hidden == 2
    assert shown.columns[1] is None
    assert axis_of([shown], is_log=True) == Axis(1.0, 100.0, True)


@pytest.mark.parametrize("numbers", [[], [2.0], [5.0, 5.0], [math.inf], [0.0]])
def test_degenerate_curves_have_room_on_both_sides(numbers: list[float]) -> None:
    samples = raw_samples(enumerate(numbers))

    axis = axis_of([trace(samples, full_window(samples), 10)])

    known = [number for number in numbers if math.isfinite(number)]
    assert axis.low < axis.high
    assert all(axis.low < number < axis.high for number in known)


def test_the_nearest_sample_is_found_on_either_side() -> None:
    samples = raw_samples([(0, 0.0), (10, 1.0), (20, 2.0)])

    found = [nearest(samples, step) for step in (-5, 4, 6, 99)]

    assert [sample.step for sample in found if sample] == [0, 0, 10, 20]
    assert nearest([], 3) is None


def test_a_sparkline_has_as_many_values_as_asked() -> None:
    assert thin(raw_samples(enumerate([1.0, 2.0, 3.0])), 3) == pytest.approx([1.0, 2.0, 3.0])
    assert thin([], 4) == [None] * 4


def test_zooming_keeps_the_step_under_the_crosshair_in_place() -> None:
    window = Window(0, 100).zoomed(0.5, around=80)

    assert window == Window(40, 90)
    assert window.moved(0.1) == Window(45, 95)


@pytest.mark.parametrize(
    "numbers", [[1.0, 1.7e308], [1.7e308], [1e308, -1e308], [1.0, 2.0, -1.7e308]], ids=["jump", "alone", "both", "down"]
)
def test_a_number_too_large_to_be_drawn_is_marked_and_bends_no_axis(numbers: list[float]) -> None:
    samples = raw_samples(enumerate(numbers))
    known = [number for number in numbers if abs(number) < 10]

    shown = trace(samples, full_window(samples), 20)
    axis = axis_of([shown])

    assert shown.num_bad == len(numbers) - len(known)
    assert all(math.isfinite(axis.position(number)) for number in known)
    assert math.isfinite(axis.high - axis.low)
    assert len(spark(tuple(numbers))) == (len(numbers) + 1) // 2
