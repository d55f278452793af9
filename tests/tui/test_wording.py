"""How numbers and states read."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from orchestrator.store.rows import State
from orchestrator.units import unit_of
from remote.wire import METRIC_UNITS
from tui.wording import (
    STATES,
    age,
    count,
    duration,
    fit,
    gib,
    plain,
    rate,
    short_count,
    state_letter,
    value,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0, "0s"), (59.4, "59s"), (60, "1m00s"), (599, "9m59s"), (720, "12m"), (12_000, "3h20m"), (475_200, "5d12h"), (math.nan, "–")],
)  # fmt: skip
def test_durations_read_as_people_say_them(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@given(st.floats(0, 1e9))
def test_durations_and_ages_fit_their_columns(seconds: float) -> None:
    assert len(duration(seconds)) <= 6
    assert len(age(min(seconds, 86_400.0 * 999))) <= 4


@given(st.floats(0, 9.9e8))
def test_short_counts_and_rates_fit_their_columns(number: float) -> None:
    assert len(short_count(number)) <= 5
    assert len(rate(number)) <= 6


def test_sizes_are_in_gib() -> None:
    assert gib(12_205_424_640) == "11.4 GiB"
    assert gib(970 * 1024**2) == "0.95 GiB"
    assert gib(None) == "–"


def test_values_keep_what_is_not_a_number_by_name() -> None:
    assert [value(number) for number in (math.nan, math.inf, -math.inf, 0.0, 1.23456, 0.0000123, None)] == [
        "NaN", "Inf", "-Inf", "0", "1.235", "1.23e-05", "–",
    ]  # fmt: skip
    assert value(1024**3, unit="bytes") == "1.00 GiB"
    assert count(240_000) == "240,000"


@given(st.text(max_size=40), st.integers(0, 30))
def test_fitted_text_has_exactly_its_width_in_cells(text: str, width: int) -> None:
    assert cell_len(fit(text, width)) == width


@given(st.text(max_size=40))
def test_plain_text_is_ascii(text: str) -> None:
    assert plain(text).isascii()


def test_our_own_signs_keep_their_width_in_ascii() -> None:
    signs = "…·×→▸▌●✓✗—–−│─━╸┤┊╎"
    assert len(plain(signs)) == len(signs)


def test_every_state_has_a_letter_of_its_own() -> None:
    assert set(STATES) == {state.value for state in State}
    assert len({letter for letter, _ in STATES.values()}) == len(STATES)
    assert state_letter("failed", "gpu_oom")[0] == "O"
    assert state_letter("running", unreachable=True) == ("R?", "warn")
    assert state_letter("succeeded", unreachable=True) == ("D", "good")


def test_units_told_by_names_are_those_of_the_wire() -> None:
    told = {name: unit_of(name, is_ours=True) for name in METRIC_UNITS}

    assert told == dict(METRIC_UNITS)


def test_a_strangers_metric_has_the_unit_that_its_name_spells_and_no_other() -> None:
    told = {
        name: unit_of(name, is_ours=False)
        for name in ("loss", "streak", "entropy", "loss_s", "frames_per_s", "peak_bytes", "tokens_per_s")
    }

    assert told == {
        "loss": "", "streak": "", "entropy": "", "loss_s": "s", "frames_per_s": "a second", "peak_bytes": "bytes", "tokens_per_s": "tokens/s",
    }  # fmt: skip
