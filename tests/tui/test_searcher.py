"""A pattern that never ends holds nothing: it is tried in a process of its own, with so much time and no more."""

import asyncio
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.actions.log_text import ERRORS
from orchestrator.store.reads import Reader
from tests.tui.golden import opened, press, shown
from tests.tui.world import Yard
from tui.app import Draftyard
from tui.log import LogPane
from tui.log_page import LogAsk, read_log, search_log
from tui.plain import screen_strips, screen_text
from tui.searcher import LIMIT_S, NoAnswer, Searcher, TooSlow, finder, first_of, is_plain, last_of, spans_of

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


def test_the_last_of_many_matches_is_found_in_one_pass() -> None:
    """Of letters that are several bytes: each match counted all bytes before it, which took 86 s."""
    block = ("größe " * 200_000).encode()
    began_s = time.process_time()

    assert last_of(finder("größe"), block) == len(block) - len("größe ".encode())
    assert time.process_time() - began_s < 3.0  # 0.05 s


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


@pytest.mark.parametrize("is_there", [True, False], ids=["asked before", "never asked"])
def test_a_process_that_was_ended_is_started_anew(is_there: bool, searcher: Searcher) -> None:
    """By a full memory, or a person: the next pattern is not to blame."""
    if is_there:
        searcher.place("a.c", b"abc", is_last=False)
        assert searcher._child is not None
        searcher._child.kill()
        searcher._child.wait()

    assert searcher.place("b.d", b"abcd", is_last=False) == 1
    assert searcher.spans("a.c", ["abc"]) == {"abc": [(0, 3)]}


def test_what_ends_the_process_is_named(searcher: Searcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'line one' >&2\necho 'no memory is left' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))

    with pytest.raises(NoAnswer, match=r"ended with exit status 3 \(no memory is left\); search again"):
        searcher.place("a.c", b"abc", is_last=False)


def test_nothing_that_lies_in_the_folder_is_run(
    searcher: Searcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "re", "signal"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not ours')\n")
    (tmp_path / "tui").mkdir()
    (tmp_path / "tui" / "searcher.py").write_text("raise SystemExit('not ours')\n")
    monkeypatch.chdir(tmp_path)

    assert searcher.place("a.c", b"xabc", is_last=False) == 1


def test_a_closed_one_starts_nothing(searcher: Searcher) -> None:
    searcher.close()

    with pytest.raises(NoAnswer):
        searcher.place("a.c", b"abc", is_last=False)
    assert searcher._child is None


def test_a_question_that_nobody_wants_any_more_is_not_asked(searcher: Searcher) -> None:
    assert searcher.place("a.c", b"abc", is_last=False, is_wanted=lambda: False) is None
    assert searcher._child is None


async def test_a_process_that_cannot_be_started_ends_no_screen(
    yard: Yard, open_app: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = open_app(yard.path, run=RUN)
    async with opened(app, "4", "home", size=(160, 30)) as pilot:
        monkeypatch.setattr(sys, "executable", "/nonexistent/python")
        await press(app, pilot, "slash", "s", "full_stop", "e", "enter")
        await shown(app, pilot, "cannot be started")

        assert app.screen.query_one(LogPane)._pattern == "s.e"  # `n` tries it again
    assert app.crash is None


@pytest.mark.parametrize("how", ["escape", "another run"])
async def test_a_search_that_was_given_up_jumps_nowhere(
    how: str, yard: Yard, open_app: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard.run("logs6789", "long/other", ago_s=50.0)
    yard.log("logs6789", "other\n" * 30_000)
    began, go_on, answered = threading.Event(), threading.Event(), threading.Event()
    place = Searcher.place

    def held(self: Searcher, *args: Any, **named: Any) -> int | None:
        began.set()
        go_on.wait(60)
        try:
            return place(self, *args, **{name: named[name] for name in named if name != "is_wanted"})
        finally:
            answered.set()

    monkeypatch.setattr(Searcher, "place", held)
    app = open_app(yard.path, run=RUN)
    async with opened(app, "4", size=(100, 30)) as pilot:
        pane = app.screen.query_one(LogPane)
        await press(app, pilot, "home", "slash", *"400", "full_stop", "enter")
        await asyncio.to_thread(began.wait, 60)
        await press(app, pilot, *(["escape"] if how == "escape" else []))
        if how == "another run":
            app.open_run("logs6789", "log")
            await app.settle(pilot)
        stood = (pane.body.is_following, pane.body.wanted, pane.body._target)
        go_on.set()
        await asyncio.to_thread(answered.wait, 60)
        await app.workers.wait_for_complete([one for one in app.workers if one.group == "search"])
        await app.settle(pilot)

        assert (pane.body.is_following, pane.body.wanted, pane.body._target) == stood


async def test_a_log_that_grows_while_it_is_marked_has_one_marking_under_way_and_keeps_its_marks(
    yard: Yard, open_app: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans, lock, at_once, most, asked = Searcher.spans, threading.Lock(), 0, 0, list[Sequence[str]]()

    def slow(self: Searcher, pattern: str, texts: Sequence[str]) -> Any:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
            asked.append(texts)
        time.sleep(0.3)
        found = spans(self, pattern, texts)
        with lock:
            at_once -= 1
        return found

    monkeypatch.setattr(Searcher, "spans", slow)
    app = open_app(yard.path, run=RUN)
    async with opened(app, "4", size=(100, 30)) as pilot:
        pane = app.screen.query_one(LogPane)
        await press(app, pilot, "slash", *"st", "full_stop", "p", "enter")
        marked = []
        for number in range(12):
            with yard.store.logs.path(RUN, 1, "stdout").open("a") as log:
                log.write(f"step {500 + number} more\n")
            app.ask_now()
            await pilot.pause(0.1)
            marked.append(bool(pane.body._marked("step 399 loss 1.5")))
        await app.workers.wait_for_complete([one for one in app.workers if one.group == "marking"])

        assert pane.body._marked("step 511 more")
    assert most == 1
    assert True in marked
    assert all(marked[marked.index(True) :])
    assert len(asked[-1]) < len(asked[0])  # what is known is not asked again
