"""A chart as lines: what a person can read off it under every look."""

import math

import pytest

from tests.tui.samples import raw_samples
from tui.chart import Look, Series, chart_lines
from tui.curve import Axis, Sample, Window
from tui.pieces import Line, text_of, width_of
from tui.theme import MARKS, SERIES

SIZE = (60, 14)
FLAT = raw_samples((step, 1.0 + step % 2 / 100) for step in range(1000))


def meanings(lines: list[Line]) -> set[str]:
    """Of everything drawn in the plot that is not blank."""
    return {
        meaning
        for line in lines[1:-1]
        for text, meaning in line
        if text.strip() and "┤" not in text and "│" not in text
    }


def with_spike(step: int, number: float) -> list[Sample]:
    samples = list(FLAT)
    samples[step] = Sample(step, number, number, number)
    return samples


def top(lines: list[Line]) -> float:
    return float(text_of([lines[1]]).split()[0])


@pytest.mark.parametrize("smoothing", [0.0, 0.6, 0.98])
@pytest.mark.parametrize("others", [[], [Series("baseline", "series_2", FLAT, is_reference=True)]])
def test_a_spike_of_one_step_is_marked_and_told_however_smooth_the_line(smoothing: float, others: list[Series]) -> None:
    series = [Series("", "live", with_spike(777, 50.0)), *others]

    lines = chart_lines("loss", "nats", series, SIZE, Look(smoothing=smoothing))

    assert "↑ 50" in text_of([lines[0]])
    assert text_of([lines[1]])[8 + round(777 / 999 * 51)] == "↑"
    assert top(lines) < 10.0  # the others are not pressed flat by it


SPREAD = [Sample(float(step), 0.99, 1.02, 1.01) for step in range(240)]


@pytest.mark.parametrize("smoothing", [0.0, 0.8])
@pytest.mark.parametrize(("number", "arrow", "row"), [(50.0, "↑", 1), (-50.0, "↓", -2)])
@pytest.mark.parametrize("which", ["older attempt", "baseline", "one of several"])
def test_a_spike_within_a_bucket_is_marked_whosever_curve_it_is(
    which: str, number: float, arrow: str, row: int, smoothing: float
) -> None:
    """Where no span is drawn, a curve is its buckets' means: one value of a thousand would be lost in them."""
    spiked = list(SPREAD)
    spiked[100] = Sample(100.0, min(0.99, number), max(1.02, number), 1.01)
    series = {
        "older attempt": [Series("", "faint", spiked, is_dimmed=True), Series("", "live", SPREAD, 1.0)],
        "baseline": [Series("", "live", SPREAD, 1.0), Series("", "series_2", spiked, is_reference=True)],
        "one of several": [Series("", "series_1", SPREAD), Series("", "series_2", spiked)],
    }[which]

    lines = chart_lines("loss", "", series, SIZE, Look(smoothing=smoothing))

    assert f"{arrow} {number:g}" in text_of([lines[0]])
    assert arrow in text_of([lines[row]])[8 + 21 : 8 + 23]
    assert 0.9 < top(lines) < 1.2  # the means are not pressed flat by it


def test_curves_that_press_nothing_flat_bear_no_arrow_for_their_spread() -> None:
    rising = [Sample(float(step), step / 9 - 3, step / 9 + 3, step / 9) for step in range(240)]

    lines = chart_lines("x", "", [Series("", "series_1", rising), Series("", "series_2", rising)], SIZE, Look())

    assert not set("↑↓") & set(text_of(lines))


def test_a_loss_that_begins_far_above_is_seen_to_fall_where_it_lives() -> None:
    samples = raw_samples((step, 4.0 + 2.0 * math.exp(-step / 200) + 65.0 * math.exp(-step / 4)) for step in range(700))

    lines = chart_lines("loss", "nats", [Series("", "live", samples)], SIZE, Look())
    rows = [row for row, line in enumerate(lines[1:-1]) if any(meaning == "live" for _, meaning in line)]
    log = chart_lines("loss", "nats", [Series("", "live", samples)], SIZE, Look(is_log=True))

    assert top(lines) < 10.0
    assert rows == list(range(SIZE[1] - 2))
    assert "↑ 71" in text_of([lines[0]])
    assert "↑" not in text_of(log)  # the logarithmic axis holds all
    assert top(log) > 70.0


def test_smoothing_changes_the_line_and_nothing_that_was_given() -> None:
    given = with_spike(777, 50.0)
    before = list(given)

    plain, smooth = (
        chart_lines("loss", "", [Series("", "live", given)], SIZE, Look(smoothing=weight)) for weight in (0.0, 0.9)
    )

    assert given == before
    assert text_of(plain[1:-1]) != text_of(smooth[1:-1]) or meanings(plain) != meanings(smooth)


def test_a_rolled_up_bucket_shows_its_lowest_and_highest() -> None:
    samples = [Sample(step, 1.0, 9.0 if step == 50 else 1.2, 1.1) for step in range(100)]

    assert "↑ 9" in text_of(chart_lines("loss", "", [Series("", "live", samples)], SIZE, Look())[:1])


def test_values_that_press_nothing_flat_stay_inside_the_axis() -> None:
    samples = raw_samples((step, 1.6 + 3.2 * (1 + step / 90) ** -0.55) for step in range(1000))

    assert "↑" not in text_of(chart_lines("loss", "", [Series("", "live", samples)], SIZE, Look()))


def test_a_logarithmic_axis_spreads_the_small_values() -> None:
    samples = raw_samples((step, 10.0 ** (3 - step / 250)) for step in range(1000))

    lines = chart_lines("lr", "", [Series("", "live", samples)], SIZE, Look(is_log=True))
    rows = [row for row, line in enumerate(lines[1:-1]) if any(meaning == "live" for _, meaning in line)]

    assert "log" in text_of([lines[0]])
    assert rows == list(range(SIZE[1] - 2))  # a straight line from corner to corner
    assert 5 < float(text_of([lines[1 + (SIZE[1] - 2) // 2]]).split()[0]) < 15


def test_the_crosshair_says_the_step_and_every_value_there() -> None:
    rising = raw_samples((step, float(step)) for step in range(100))
    falling = raw_samples((step, float(200 - step)) for step in range(100))

    alone = text_of(chart_lines("x", "", [Series("", "live", rising)], SIZE, Look(crosshair=40.2)))
    both = text_of(
        chart_lines(
            "x",
            "",
            [Series("mine", "live", rising), Series("baseline", "series_2", falling)],
            SIZE,
            Look(crosshair=40.2),
        )
    )

    assert "40" in alone.splitlines()[0]
    assert "step 40" in alone.splitlines()[0]
    assert "┊" in alone
    assert "mine 40" in both.splitlines()[0]
    assert "baseline 160" in both.splitlines()[0]


def test_an_older_attempt_lies_dimmed_behind_the_newest() -> None:
    older = Series("attempt 1", "faint", raw_samples((step, 5.0) for step in range(60)), is_dimmed=True)
    newest = Series("loss", "live", raw_samples((step, 2.0) for step in range(50, 100)), newest=2.0)

    lines = chart_lines("loss", "", [older, newest], SIZE, Look())

    assert {"faint", "live"} <= meanings(lines)
    assert "5" not in text_of([lines[0]])


def test_values_that_are_not_finite_are_a_marked_gap_and_counted() -> None:
    samples = raw_samples((step, math.nan if 40 <= step < 60 else 1.0 + step / 100) for step in range(100))

    lines = chart_lines("loss", "", [Series("", "live", samples)], SIZE, Look(window=Window(0, 99)))
    middle = [text_of([line])[8 + 22 : 8 + 30] for line in lines[1:-2]]

    assert "× 20 not finite" in text_of([lines[0]])
    assert "×" in text_of([lines[-2]])
    assert not "".join(middle).strip()


@pytest.mark.parametrize("size", [(38, 9), (60, 4), (198, 50)])
@pytest.mark.parametrize("look", [Look(), Look(is_log=True), Look(ascii_only=True), Look(crosshair=3.0)])
def test_a_chart_is_exactly_as_large_as_asked(size: tuple[int, int], look: Look) -> None:
    lines = chart_lines("loss", "nats", [Series("", "live", FLAT)], size, look)

    assert len(lines) == size[1]
    assert all(width_of(line) <= size[0] for line in lines)
    assert not look.ascii_only or all(meaning != "live" or text.isascii() for line in lines for text, meaning in line)


@pytest.mark.parametrize("width", [30, 40, 60])
def test_a_title_loses_its_explanation_before_its_numbers(width: int) -> None:
    samples = [Sample(float(step), 1.0, 3.0, 2.0) for step in range(40)]

    head = text_of(
        chart_lines("tokens_per_s", "tokens/s", [Series("", "live", samples)], (width, 8), Look(smoothing=0.95))[:1]
    )

    assert "2 tokens/s" in head
    assert head.endswith("smoothed 0.95") or "smoothed" not in head


@pytest.mark.parametrize(
    ("width", "words"), [(48, ["smoothed", "0.95", "log", "scale"]), (40, ["log", "scale"]), (26, ["log"])]
)
def test_a_title_without_room_says_log_and_cuts_no_word(width: int, words: list[str]) -> None:
    series = [Series("", "live", SPREAD)]

    head = text_of(chart_lines("accuracy", "tokens", series, (width, 8), Look(smoothing=0.95, is_log=True))[:1])

    assert "1.01 tokens" in head
    assert "…" not in head
    assert head.split()[3:] == words


@pytest.mark.parametrize("smoothing", [0.0, 0.8, 0.95])
def test_a_title_says_how_smooth_the_line_is_or_nothing(smoothing: float) -> None:
    alone = [Series("", "live", SPREAD)]
    several = [Series("", "series_1", SPREAD), Series("", "series_2", SPREAD)]

    for series in (alone, several):
        head = text_of(chart_lines("loss", "", series, SIZE, Look(smoothing=smoothing))[:1])

        assert head.endswith(f"smoothed {smoothing:g}" if smoothing else "1.01"), head


def inks_at(lines: list[Line], row: int) -> list[str]:
    """The meaning of each cell of a row of the plot."""
    return [meaning for text, meaning in lines[row][1:] for _ in text]


@pytest.mark.parametrize("which", [(0, 1), (0, 2), (1, 3), (0, 1, 2), (0, 1, 2, 3, 4, 5)])
def test_curves_that_cover_each_other_are_all_seen_with_their_marks(which: tuple[int, ...]) -> None:
    """Whole, as two runs of one seed do; before, the last one drawn took every cell."""
    samples = raw_samples((step, 1.0 + step / 100) for step in range(200))
    names = [SERIES[index] for index in which]

    lines = chart_lines("loss", "", [Series(name, name, samples) for name in names], SIZE, Look())
    cells = [meaning for row in range(1, SIZE[1] - 1) for meaning in inks_at(lines, row)]
    plot = "".join(text for line in lines[1:-1] for text, _ in line[1:])
    share = {name: cells.count(name) for name in names}

    assert min(share.values()) * 2 * len(names) > sum(share.values()), share
    assert all(plot.count(MARKS[name]) >= 3 for name in names), plot


def test_a_spike_of_an_older_attempt_inside_the_axis_is_seen() -> None:
    """Of its buckets the means are flat; the newest attempt makes room for the spike on the axis."""
    older = [Sample(float(step), 0.99, 5.0 if step == 20 else 1.02, 1.01) for step in range(60)]
    newest = raw_samples((step, 8.0 - (step - 50) / 10) for step in range(50, 120))

    series = [Series("attempt 1", "faint", older, is_dimmed=True), Series("", "live", newest, 1.0)]
    lines = chart_lines("loss", "", series, SIZE, Look())
    column = round(20 / 119 * 103) // 2
    rows = [row for row in range(1, SIZE[1] - 1) if inks_at(lines, row)[column] == "line"]

    assert "↑" not in text_of(lines)
    assert len(rows) >= 5


@pytest.mark.parametrize(
    ("low", "high"),
    [(1.51, 4.65), (1e-7, 6e-4), (2e-5, 9.9e-4), (5845.0, 6776.0), (23_940.0, 23_990.0), (120.44, 123.457), (0.0, 250_000.0),
     (-12.3456, -12.1), (1.2e6, 1.9e6), (1e-6, 0.1), (0.02, 3e4), (1.5e12, 1.5e13), (999.4, 1000.6), (-6e-4, 6e-4), (0.5709, 0.5721)],
)  # fmt: skip
@pytest.mark.parametrize("is_log", [False, True])
def test_a_label_is_the_value_of_its_row(low: float, high: float, is_log: bool) -> None:
    if is_log and low <= 0:
        return
    samples = raw_samples((step, low + (high - low) * step / 999) for step in range(1000))
    axis = Axis(low, high, is_log)

    lines = chart_lines("x", "", [Series("", "live", samples)], SIZE, Look(is_log=is_log))
    labels = {
        row: text_of([line[:1]]).removesuffix(" ┤").strip() for row, line in enumerate(lines[1:-1]) if "┤" in line[0][0]
    }

    assert len(labels) == 3
    for row, text in labels.items():
        number = float(text.rstrip("kM").replace(",", "")) * {"k": 1e3, "M": 1e6}.get(text[-1], 1.0)
        value = axis.at(1 - row / (SIZE[1] - 3))
        assert len(text) <= 6
        near = 0.06 * abs(value) if is_log else max(0.012 * (high - low), 0.03 * abs(value))
        assert abs(number - value) <= near, (text, value)
    assert len(set(labels.values())) == 3


def test_several_curves_say_that_their_numbers_are_means() -> None:
    several = [Series("", "series_1", SPREAD, 2.0), Series("", "series_2", SPREAD, 3.0)]

    told = {unit: text_of(chart_lines("x", unit, several, SIZE, Look())[:1]) for unit in ("nats, mean", "mean", "nats")}

    assert told["nats, mean"].rstrip() == told["mean"].rstrip()
    assert told["mean"].split()[-1] == "mean"
    assert "mean" not in told["nats"]
