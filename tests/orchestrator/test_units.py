"""Durations and sizes as people write them."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.units import counted, format_duration, format_size, parse_bytes, parse_duration, with_article


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("2h30m", 9000),
        ("1d", 86400),
        ("500ms", 0.5),
        ("1.5h", 5400),
        ("1h 5m", 3900),
        (" 10s ", 10),
    ],
)
def test_a_duration_is_read_in_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "2x", "30m2h", "1h1h", "-5s", "2h30", "s5", "1e3s"])
def test_a_malformed_duration_says_what_to_write(text: str) -> None:
    with pytest.raises(ValueError, match="write a duration such as"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("95GiB", 95 * 1024**3),
        ("2GB", 2 * 10**9),
        ("970 MiB", 970 * 1024**2),
        ("12", 12),
        ("12B", 12),
        ("1.5gib", 3 * 2**29),
    ],
)
def test_a_size_is_read_in_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_a_bare_letter_is_refused_with_both_readings() -> None:
    with pytest.raises(ValueError, match=r"write 2GiB \(times 1073741824\) or 2GB \(times 1000000000\)"):
        parse_bytes("2G")


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2XiB", "1GiB2"])
def test_a_malformed_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write a size|is unknown"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [
        (95 * 1024**3, "95.00 GiB"),
        (970 * 1024**2, "0.95 GiB"),
        (61_440, "60.0 KiB"),
        (90, "90 B"),
        (0, "0 B"),
        (-3 * 2**20, "-3.0 MiB"),
    ],
)
def test_sizes_are_shown_in_binary_units(size_bytes: int, shown: str) -> None:
    assert format_size(size_bytes) == shown


def test_one_is_told_from_many() -> None:
    assert [counted(number, "host") for number in (0, 1, 2_000)] == ["0 hosts", "1 host", "2,000 hosts"]
    assert counted(2, "process", "processes") == "2 processes"


@given(st.integers(0, 10**7))
def test_a_shown_duration_reads_back_within_its_smallest_part(seconds: int) -> None:
    assert abs(parse_duration(format_duration(seconds)) - seconds) <= max(
        60.0 if seconds >= 3600 else 1.0, seconds * 0.05
    )


@pytest.mark.parametrize("parse", [parse_bytes, parse_duration])
@pytest.mark.parametrize("digits", ["9" * 400, "9" * 25])
def test_what_is_larger_than_anything_here_is_refused(parse: Callable[[str], float], digits: str) -> None:
    for text in (digits, f"{digits}{'GiB' if parse is parse_bytes else 'd'}"):
        with pytest.raises(ValueError, match="is larger than") as refused:
            parse(text)
        assert len(str(refused.value)) < 120


def test_a_word_has_the_article_that_it_is_read_with() -> None:
    assert [with_article(word) for word in ("train", "evaluate", "export")] == ["a train", "an evaluate", "an export"]
