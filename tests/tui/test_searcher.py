"""A pattern that never ends holds nothing: it is tried in a process of its own, with so much time and no more."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.actions.log_text import ERRORS
from orchestrator.store.reads import Reader
from tests.tui.golden import opened, press, shown
from tests.tui.world import Yard
from tui.app import Draftyard
from tui.log import LogPane
from tui.log_page import LogAsk, read_log, search_log
from tui.plain import screen_strips, screen_text
from tui.searcher import LIMIT_S, Searcher, TooSlow, finder, first_of, is_plain, last_of, spans_of

pytestmark = pytest.mark.slow  # starts processes

RUN = "logs2345"
ENDLESS = "(a+)+$"
LINE = "a" * 60 + "!\n"
Open = Callable[..., Draftyard]


@pytest.fixture
def searcher() -> Iterator[Searcher]:
    made = Searcher()
    yield made
    made.close()


@pytest.fixture
def yard(tmp_path: Path) -> Yard:
    made = Yard(tmp_path / "runs.db")
    made.run(RUN, "long/log", ago_s=100.0)
    made.log(RUN, "".join(f"step {number} loss 1.5\n" for number in range(400)) + LINE + "step 400 the end\n")
    return made


def test_it_finds_what_the_pattern_finds_here(searcher: Searcher) -> None:
    block = "step 1\nStep 22 Größe\nnothing\nstep 333\n".encode()
    for pattern in (r"step \d\d", "größe", r"\bnothing$", "no such", "^step 3+"):
        find = finder(pattern)
        assert searcher.place(pattern, block, is_last=False) == first_of(find, block)
        assert searcher.place(pattern, block, is_last=True) == last_of(find, block)
    texts = ["step 22 and step 3", "none"]

    assert searcher.spans(r"step \d", texts) == spans_of(r"step \d", texts) == {texts[0]: [(0, 6), (12, 18)]}


def test_a_pattern_without_an_end_is_given_up_and_the_next_is_answered(searcher: Searcher) -> None:
    began = time.monotonic()
    with pytest.raises(TooSlow, match="takes too long") as told:
        searcher.place(ENDLESS, LINE.encode(), is_last=False)
    with pytest.raises(TooSlow):
        searcher.spans(ENDLESS, [LINE])

    assert "\n" not in str(told.value)
    assert time.monotonic() - began < 20 * LIMIT_S
    assert searcher.place("a!", LINE.encode(), is_last=False) == LINE.index("a!")


def test_who_is_asked_ends_when_nobody_asks_any_more(searcher: Searcher) -> None:
    searcher.place("a.c", b"abc", is_last=False)
    child = searcher._child
    assert child is not None
    assert child.stdin is not None
    child.stdin.close()

    assert child.wait(60) == 0


@pytest.mark.parametrize("words", ["needle", "out of memory", "step 400", "Größe #3 <x> a-b, c: 'd'/\"e\""])
def test_plain_words_are_tried_at_once(words: str) -> None:
    assert is_plain(words)
    assert not is_plain(words + "+")


def test_the_pattern_of_errors_ends_by_itself() -> None:
    """It is ours, so it is tried at once: in the worst of lines it takes no longer than there are letters."""
    pattern = re.compile(ERRORS, re.IGNORECASE | re.MULTILINE)
    took = []
    for size in (20_000, 200_000):
        line = "a." * size
        began = time.process_time()
        assert pattern.search(line) is None
        took.append(time.process_time() - began)

    assert took[1] < 100 * max(took[0], 0.001)


def test_a_search_through_the_file_goes_there_both_ways(yard: Yard, searcher: Searcher) -> None:
    with Reader(yard.path) as reader:
        page = read_log(reader, reader.run(RUN), LogAsk())
        here = search_log(reader, page, r"step 3\d\d", after=0)
        there = search_log(reader, page, r"step 3\d\d", after=0, searcher=searcher)
        back_here = search_log(reader, page, r"step 3\d\d", after=page.size, backwards=True)
        back = search_log(reader, page, r"step 3\d\d", after=page.size, backwards=True, searcher=searcher)
        with pytest.raises(TooSlow):
            search_log(reader, page, ENDLESS, after=0, searcher=searcher)

    assert there == here
    assert back == back_here
    assert here.at is not None
    assert back.at is not None


async def test_keys_are_answered_while_such_a_pattern_is_tried(yard: Yard, open_app: Open) -> None:
    """It held every thread of the program, the one that paints included, for as long as it took."""
    app = open_app(yard.path, run=RUN)
    async with opened(app, "4", "home", size=(100, 30)) as pilot:
        await press(
            app, pilot, "slash", *("left_parenthesis", "a", "plus", "right_parenthesis", "plus", "dollar_sign"), "enter"
        )
        waits = []
        for key in ("w", "j", "w", "k"):
            began = time.monotonic()
            await press(app, pilot, key)
            waits.append(time.monotonic() - began)
        told = await shown(app, pilot, "the pattern takes too long")
        await press(app, pilot, "n")
        await press(app, pilot, "slash", *"400", "enter")
        found = await shown(app, pilot, "step 400 the end")

        assert app.screen.query_one(LogPane)._pattern == "400"

    assert max(waits) < LIMIT_S
    assert "/ (a+)+$" not in told  # it is not tried again with what is printed next
    assert "takes too long" not in found


async def test_what_a_pattern_matches_is_marked_in_all_lines_in_sight(yard: Yard, open_app: Open) -> None:
    app = open_app(yard.path, run=RUN)
    async with opened(app, "4", "home", size=(100, 30)) as pilot:
        await press(app, pilot, "slash", "s", "t", "e", "p", "space", "full_stop", "full_stop", "space", "l", "enter")
        for _ in range(600):
            marked = [
                segment.text
                for strip in screen_strips(app)
                for segment in strip
                if segment.style is not None
                and segment.style.bgcolor is not None
                and segment.style.bgcolor.name == "#e8b33a"
            ]
            if marked:
                break
            await pilot.pause(0.05)
        text = screen_text(app)

    assert "step 10 loss" in text
    assert len(marked) > 5
    assert all(re.fullmatch(r"step \d\d l", word) for word in marked)
