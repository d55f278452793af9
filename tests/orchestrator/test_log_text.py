"""Log bytes to lines a person can read: what training programs write, line by line."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.actions.log_text import LONGEST_LINE, clean_lines, cut_to_lines, group_ranks


def lines(raw: bytes) -> list[str]:
    return [line.text for line in clean_lines(raw)]


def test_a_bad_byte_is_replaced_and_the_rest_goes_on() -> None:
    assert lines(b"one\ntwo\n\xff\xfe three\nfour\n") == ["one", "two", "�� three", "four"]


def test_latin_1_is_shown() -> None:
    assert lines("café\n".encode("latin-1")) == ["caf�"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "state",
    [
        "{n:3d}%|{bar}| {n}/36000 [00:01<01:00, 10.00it/s]",
        "Epoch 1: loss={n}",
        "\\ working",
        "{n} files so far, 0 failed, no error",
    ],
)
def test_an_hour_of_a_bar_is_one_live_line(state: str) -> None:
    states = [state.format(n=n, bar="#" * (n % 10)) for n in range(36_000)]

    shown = lines(("\r" + "\r".join(states) + "\n").encode())

    assert len(shown) == 1
    assert shown[0].startswith(states[-1])


def test_an_error_between_two_states_of_a_bar_is_kept_whole_and_wears_nothing_of_it() -> None:
    raw = b"\r 50%|#####     | 1/2 [00:01<00:01, 1.00it/s]\rRuntimeError: boom\r100%|##########| 2/2 [00:02<00:00]\n"

    assert lines(raw) == ["RuntimeError: boom", "100%|##########| 2/2 [00:02<00:00]"]


@pytest.mark.parametrize("said", ["RuntimeError: boom", "ERROR: no", "UserWarning: soon", "[ERROR] disk", "Killed"])
def test_words_of_trouble_are_not_overwritten(said: str) -> None:
    assert lines(f"\r 50%|##\r{said}\r100%|####\n".encode()) == [said, "100%|####"]


def test_an_error_after_a_bar_wears_nothing_of_it() -> None:
    assert lines(b"\r 50%|#####     | 1/2 [00:01<00:01]\rError: no\nnext\n") == ["Error: no", "next"]


@pytest.mark.parametrize("erase", ["\x1b[2K", "\x1b[K", "\x1b[0K"])
def test_an_erased_line_leaves_no_letters(erase: str) -> None:
    assert lines(f"working 2/3\r{erase}ok\n".encode()) == ["ok"]


@pytest.mark.parametrize("erase", ["\x1b[K", "\x1b[0K"])
def test_erasing_behind_the_last_letter_erases_nothing(erase: str) -> None:
    assert lines(f"step 10 loss 2.3{erase}\n".encode()) == ["step 10 loss 2.3"]


@pytest.mark.parametrize("erase", ["\x1b[1K", "\x1b[2K"])
def test_erasing_up_to_the_last_letter_erases_all(erase: str) -> None:
    assert lines(f"step 10{erase}\rok\n".encode()) == ["ok"]


def test_two_bars_one_above_the_other_are_two_lines() -> None:
    raw = b"outer 1/2\ninner 1/9\n\x1b[2Aouter 2/2\ninner 9/9\n"

    assert lines(raw) == ["outer 2/2", "inner 9/9"]


def test_colours_of_every_depth_are_dropped() -> None:
    assert lines(b"\x1b[31mred\x1b[0m \x1b[38;2;1;2;3mtrue\x1b[m \x1b[38;5;9mwide\x1b[39m\n") == ["red true wide"]


def test_what_a_terminal_would_obey_is_inert() -> None:
    (shown,) = lines(b"\x1b]0;title\x07a\x1b]52;c;aGk=\x1b\\b\x9bc\x07d\x1bPq\x1b\\e\n")

    assert not re.search("[\x00-\x1f\x7f-\x9f]", shown)
    assert shown.startswith("ab")


def test_only_a_newline_byte_breaks_a_line() -> None:
    raw = "one\r\ntwo\r\nthree\u2028more\x0cand\x00more\rlone\n".encode()

    shown = lines(raw)

    assert len(shown) == raw.count(b"\n")
    assert shown[:2] == ["one", "two"]


@given(st.binary(max_size=400).filter(lambda raw: b"\x1b" not in raw and b"\r" not in raw))
def test_without_moves_there_are_as_many_lines_as_newlines(raw: bytes) -> None:
    expected = raw.count(b"\n") + (not raw.endswith(b"\n") and bool(raw))

    found = clean_lines(raw)

    assert len(found) == expected
    assert [line.start for line in found] == [0, *(i + 1 for i, byte in enumerate(raw) if byte == 10)][:expected]


@given(st.binary(max_size=400))
def test_no_bytes_break_it_and_nothing_shown_moves_a_terminal(raw: bytes) -> None:
    assert not any(re.search("[\x00-\x1f\x7f-\x9f]", line.text) for line in clean_lines(raw))


def test_a_line_of_a_megabyte_says_how_much_is_left_out() -> None:
    (shown,) = lines(b"x" * 1_000_000 + b"\n")

    assert shown == "x" * LONGEST_LINE + "…(+998,000)"


def test_ranks_that_say_the_same_are_one_line_with_their_number() -> None:
    raw = "".join(f"[rank{rank}]: watch out\n" for rank in range(8)) + "[rank0]: other\n"

    grouped = group_ranks(clean_lines(raw.encode()))

    assert [(line.text, line.num_times) for line in grouped] == [("[rank0]: watch out", 8), ("[rank0]: other", 1)]


def test_a_piece_from_the_middle_begins_at_a_line() -> None:
    assert cut_to_lines(b"rn line\nwhole\n", 100, at_file_start=False) == (b"whole\n", 108)
    assert cut_to_lines(b"whole\n", 0, at_file_start=True) == (b"whole\n", 0)
    assert cut_to_lines(b"no end of it", 5, at_file_start=False) == (b"no end of it", 5)
