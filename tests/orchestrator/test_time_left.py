"""The time left of what a run does beside its steps: loading, preparing, decoding held-out prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.actions.life import Moment
from orchestrator.actions.places import find_places
from orchestrator.store.rows import ProgressRow
from orchestrator.verbs.frame import Terminal
from orchestrator.verbs.progress import Progress
from tests.orchestrator.test_verbs import _run


class Watched:
    """Prints moments of a run's work outside its steps; `seen(at_s, what, done, total)` is what stderr got."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.now_s = 0.0
        places = find_places(folder, {"HOME": str(folder)})
        terminal = Terminal(
            places, wants_json=False, has_colour=False, may_ask=False, is_quiet=False, verbosity=0, width=None
        )
        self.progress = Progress(terminal, clock=lambda: self.now_s)
        self.run, self.capsys = _run(folder, step=None), capsys

    def __call__(
        self, at_s: float, what: str, done: float, total: float | None = 32, *, told_at_s: float | None = None
    ) -> str:
        """The host, whose clock is 5,000 s from ours, reported at `told_at_s`: just now, where that is left out."""
        self.now_s = at_s
        host_s = 5000 + (at_s if told_at_s is None else told_at_s)
        self.progress.moment(Moment(self.run, {}, ProgressRow("kxxxaaaa", 1, what, done, total, "texts", host_s)))
        return self.capsys.readouterr().err.rstrip()


@pytest.fixture
def seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Watched:
    return Watched(tmp_path, capsys)


def test_work_outside_the_steps_tells_its_time_left_once_its_pace_is_seen(seen: Watched) -> None:
    """Of the part that is being done, from what was seen of it; the part after it has a pace of its own."""
    assert "left" not in seen(20, "decoding", 2), "begun before it was looked at: one report has no pace"
    assert seen(40, "decoding", 7).endswith("7/32 texts  left 1 min 40 s")
    assert seen(60, "decoding", 12).endswith("12/32 texts  left 1 min 20 s")
    assert "left" not in seen(80, "estimating", 0)
    assert seen(100, "estimating", 31).endswith("31/32 texts  left 0.6 s")
    assert "left" not in seen(120, "estimating", 3), "begun anew"
    assert "left" not in seen(140, "counting", 0, None)
    assert "left" not in seen(160, "counting", 9, None)


def test_the_pace_of_a_unit_is_the_hosts_even_when_it_is_first_looked_at_near_its_end(seen: Watched) -> None:
    assert "left" not in seen(239, "computing", 3, 13, told_at_s=180)

    assert seen(250, "computing", 4, 13, told_at_s=240).endswith("4/13 texts  left 9 min 00 s")


def test_the_time_left_counts_down_while_a_unit_lasts_and_is_not_told_of_one_that_takes_twice_its_pace(
    seen: Watched,
) -> None:
    seen.progress._is_live = True
    seen(100, "computing", 3, 13)

    assert seen(160, "computing", 4, 13).endswith("left 9 min 00 s")
    assert seen(210, "computing", 4, 13, told_at_s=160).endswith("left 8 min 10 s")
    assert seen(279, "computing", 4, 13, told_at_s=160).endswith("left 7 min 01 s")
    assert "left" not in seen(281, "computing", 4, 13, told_at_s=160)
    assert seen(310, "computing", 5, 13).endswith("left 14 min 00 s"), "105 s a unit by now"


def test_the_last_unit_that_takes_longer_than_its_pace_has_no_time_left_to_tell(seen: Watched) -> None:
    seen.progress._is_live = True
    seen(100, "computing", 11, 13)

    assert seen(160, "computing", 12, 13).endswith("left 1 min 00 s")
    assert "left" not in seen(221, "computing", 12, 13, told_at_s=160)


def test_units_that_come_many_at_once_have_as_long_as_that_many_take(seen: Watched) -> None:
    """Reports of a remote host come in bundles, some seconds apart."""
    seen.progress._is_live = True
    seen(100, "computing", 0, 1000)

    assert seen(110, "computing", 100, 1000).endswith("left 1 min 30 s")
    assert seen(125, "computing", 100, 1000, told_at_s=110).endswith("left 1 min 15 s")
    assert "left" not in seen(131, "computing", 100, 1000, told_at_s=110)


def test_time_that_goes_by_between_two_reports_is_no_plain_line(seen: Watched) -> None:
    seen(100, "computing", 3, 13)

    assert seen(160, "computing", 4, 13)
    assert seen(210, "computing", 4, 13, told_at_s=160) == ""
    assert seen(220, "computing", 5, 13)


def test_of_fewer_than_five_units_no_time_left_is_told_as_they_are_unlike(seen: Watched) -> None:
    assert "left" not in seen(20, "loading the target", 0, 4)
    assert "left" not in seen(40, "loading the target", 1, 4)
    assert "left" not in seen(80, "loading the target", 3, 4)


def test_a_clock_of_the_host_that_was_set_back_gives_no_pace(seen: Watched) -> None:
    seen(20, "computing", 3, 13)

    assert "left" not in seen(40, "computing", 4, 13, told_at_s=10)
