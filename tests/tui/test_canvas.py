"""Characters: dots, bars and sparklines."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tui.canvas import Canvas, bar, spark
from tui.curve import Axis, Column, Trace


def drawn(columns: list[Column | None], width: int, height: int, *, ascii_only: bool = False) -> list[str]:
    canvas = Canvas(width, height, ascii=ascii_only)
    canvas.plot(Trace(tuple(columns), frozenset(), 0, 0), Axis(0.0, 1.0), 0)
    return ["".join(cell.char for cell in row) for row in canvas.rows()]


def test_dots_stand_where_the_values_are() -> None:
    assert drawn([Column(0.0, 0.0), Column(1.0, 1.0)], 1, 1) == ["⡸"]


def test_a_span_fills_its_column() -> None:
    assert drawn([Column(0.0, 1.0), None], 1, 2) == ["⡇", "⡇"]


def test_ascii_uses_ascii_alone() -> None:
    lines = drawn([Column(index / 39, index / 39) for index in range(40)], 20, 5, ascii_only=True)

    assert "".join(lines).isascii()
    assert any(char != " " for char in "".join(lines))


@given(st.one_of(st.none(), st.floats()), st.integers(1, 40), st.booleans())
def test_a_bar_is_exactly_as_wide_as_asked(fraction: float | None, width: int, ascii_only: bool) -> None:
    filled, empty = bar(fraction, width, ascii=ascii_only)

    assert len(filled) + len(empty) == width
    assert not set(filled) & set(empty), "read without colour as well"


def test_a_bar_shows_a_sliver_of_anything_above_nothing() -> None:
    assert bar(0.0, 10)[0] == ""
    assert bar(0.0001, 10)[0] == "╸"
    assert bar(1.0, 10)[0] == "━" * 10


@pytest.mark.parametrize("numbers", [[], [None] * 6, [1.0] * 6, [math.nan, 1.0, math.inf, 2.0]])
def test_a_sparkline_of_anything_is_one_character_for_two_values(numbers: list[float | None]) -> None:
    assert len(spark(tuple(numbers))) == (len(numbers) + 1) // 2
    assert spark(tuple(numbers), ascii=True).isascii()


def test_later_layers_take_the_colour_of_a_shared_cell() -> None:
    canvas = Canvas(1, 1)
    flat = Trace((Column(0.0, 0.0), Column(0.0, 0.0)), frozenset(), 0, 0)

    canvas.plot(flat, Axis(0.0, 1.0), 0)
    canvas.plot(flat, Axis(0.0, 1.0), 1)

    assert canvas.rows()[0][0].layer == 1
