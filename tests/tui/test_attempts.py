"""Every attempt's log: which one is shown, how one gets to the others, what a later attempt leaves of an earlier one's words."""

from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.store.rows import FailureRow, State
from tests.tui.golden import opened, press, shown
from tests.tui.world import NOW_S, Yard
from tui.app import Draftyard
from tui.commands import commands
from tui.plain import screen_text

pytestmark = pytest.mark.slow  # a whole app a test

Open = Callable[..., Draftyard]
LAST_WORDS = "RuntimeError: the disk of the hidden states is full"
RUN = "retr2345"


@pytest.fixture
def yard(tmp_path: Path) -> Yard:
    """A run that died of its own fault and was started again at once; the new attempt has said little so far."""
    made = Yard(tmp_path / "runs.db")
    made.run(RUN, "long/retried", ago_s=9000.0)
    made.log(RUN, "loading\nstep 1 loss 4.0\n")
    made.log(RUN, f"Traceback (most recent call last):\n{LAST_WORDS}\n", stream="stderr")
    failure = FailureRow(
        run_id=RUN, attempt=1, kind="exception", message=LAST_WORDS, hint="", source="rank0", stage="training",
        step=1, traceback="", facts={}, at_s=NOW_S - 300, is_first_cause=True,
    )  # fmt: skip
    made.store.replace_failures(RUN, 1, [failure])
    made.state(RUN, State.FAILED, ago_s=300.0, reason="exception", evidence="exit file: code 1")
    with made.at(NOW_S - 200):
        made.store.new_attempt(RUN)
    made.log(RUN, "loading again\n", attempt=2)
    made.state(RUN, State.RUNNING, evidence="beat 1 s ago")
    return made


def begin_another(yard: Yard) -> None:
    yard.state(RUN, State.LOST, reason="reboot", evidence="another boot id; no exit file")
    yard.store.new_attempt(RUN)


async def test_what_a_dead_attempt_printed_last_is_there_while_the_next_one_runs(yard: Yard, open_app: Open) -> None:
    """In three keys from home, its error stream first, as it died of it."""
    app = open_app(yard.path)
    async with opened(app, "l", size=(80, 24)) as pilot:
        newest = await shown(app, pilot, "attempt 2 of 2", "loading again", "following")
        assert LAST_WORDS not in newest
        await press(app, pilot, "left_square_bracket")
        died = await shown(app, pilot, "attempt 1 of 2", "stderr", LAST_WORDS, "at the end")
        await press(app, pilot, "o")
        await shown(app, pilot, "attempt 1 of 2", "stdout", "step 1 loss 4.0")
        await press(app, pilot, "right_square_bracket")
        await shown(app, pilot, "attempt 2 of 2", "loading again", "following")

    assert "loading again" not in died
    assert "[ ] attempt" in died  # the line of keys


async def test_an_older_attempts_log_stays_in_sight_when_yet_another_begins(yard: Yard, open_app: Open) -> None:
    app = open_app(yard.path)
    async with opened(app, "l", "left_square_bracket") as pilot:
        await shown(app, pilot, "attempt 1 of 2", LAST_WORDS)
        begin_another(yard)
        yard.log(RUN, "the third\n", attempt=3)
        app.tick()
        await shown(app, pilot, "attempt 1 of 3", LAST_WORDS)
        await press(app, pilot, "right_square_bracket", "right_square_bracket")
        await shown(app, pilot, "attempt 3 of 3", "the third")
        begin_another(yard)
        app.tick()
        await shown(app, pilot, "attempt 4 of 4", "Nothing has been printed yet.")  # the newest is followed


async def test_a_retry_under_an_open_log_is_shown_by_the_stream_that_says_more(yard: Yard, open_app: Open) -> None:
    """The program had turned to the error stream of the one that failed; nobody had chosen it for the next."""
    yard.state(RUN, State.FAILED, reason="exception", evidence="exit file: code 1")
    yard.log(RUN, "died again\n", attempt=2, stream="stderr")
    app = open_app(yard.path)
    async with opened(app, "l") as pilot:
        await shown(app, pilot, "attempt 2 of 2", "stderr", "died again")
        begin_another(yard)
        yard.log(RUN, "the third\n", attempt=3)
        app.tick()
        await shown(app, pilot, "attempt 3 of 3", "stdout", "the third")


async def test_a_search_is_of_the_attempt_in_sight(yard: Yard, open_app: Open) -> None:
    app = open_app(yard.path)
    async with opened(app, "l", "exclamation_mark") as pilot:
        await shown(app, pilot, "nothing in stdout looks like an error")
        await press(app, pilot, "left_square_bracket", "exclamation_mark")
        found = await shown(app, pilot, LAST_WORDS)

    assert "looks like an error" not in found


async def test_the_log_opened_from_a_failure_is_of_the_attempt_that_failed(yard: Yard, open_app: Open) -> None:
    app = open_app(yard.path)
    async with opened(app, "enter", "5") as pilot:
        await shown(app, pilot, "attempt 1, told by rank0")
        await press(app, pilot, "4")
        await shown(app, pilot, "attempt 1 of 2", LAST_WORDS)
        await press(app, pilot, "1", "4")  # what was chosen stays
        await shown(app, pilot, "attempt 1 of 2", LAST_WORDS)


async def test_an_attempt_that_is_over_and_printed_nothing_is_not_waited_for(yard: Yard, open_app: Open) -> None:
    begin_another(yard)
    begin_another(yard)
    app = open_app(yard.path)
    async with opened(app, "l", "left_square_bracket") as pilot:
        text = await shown(app, pilot, "attempt 3 of 4", "It printed nothing.")

    assert "yet" not in text


async def test_a_run_of_one_attempt_offers_no_other(tmp_path: Path, open_app: Open) -> None:
    made = Yard(tmp_path / "runs.db")
    made.run("once2345", "long/once", ago_s=100.0)
    made.log("once2345", "loading\n")
    app = open_app(made.path)
    async with opened(app, "l") as pilot:
        await shown(app, pilot, "attempt 1  stdout", "loading")
        await press(app, pilot, "left_square_bracket")
        text = screen_text(app)
        listed = {command.name: command.why_not for command in commands(app)}

    assert "attempt 1  stdout" in text
    assert "[ ]" not in text
    assert listed["log.older"] == "it works in the log of a run with several attempts"
