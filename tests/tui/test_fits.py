"""What the screens say of a plan that does not fit: which part of it, and what helps."""

import dataclasses
import re
from pathlib import Path

import pytest

from orchestrator.actions.places import Places, find_places
from orchestrator.actions.plans import Planned as PlanMade
from orchestrator.actions.plans import plan_memory
from orchestrator.actions.step_time import StepTime, change_cost
from orchestrator.verbs.plan_page import advice
from tui.fits import fit_lines
from tui.ordering import Planned, advised
from tui.pieces import text_of, width_of

GIB = 2**30


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return find_places(tmp_path, {"HOME": str(tmp_path)}, db=tmp_path / "runs.db")


def told(**body: object) -> str:
    return " ".join(text_of(fit_lines(Planned({"capacity_bytes": 48 * GIB, **body}), 60)).split())


def test_a_target_whose_pass_does_not_fit_is_named_and_the_step_is_not_blamed() -> None:
    """The verdict counts both; of the step, which fits, the page lists what would make room."""
    pass_alone = told(
        verdict="does not fit", step_verdict="fits", pass_verdict="does not fit", target_pass_bytes=int(54.79 * GIB)
    )

    assert "What would make room" in pass_alone
    assert "The target's pass before training needs 54.8 GiB: no change of the recipe makes it fit" in pass_alone
    assert "No single change fits" not in pass_alone


def test_a_step_that_does_not_fit_says_nothing_of_a_pass_that_does() -> None:
    step_alone = told(verdict="does not fit", step_verdict="does not fit", pass_verdict="fits", target_pass_bytes=1)

    assert "What would fit" in step_alone
    assert "target's pass" not in step_alone


@pytest.mark.parametrize(
    ("time", "cost"),
    [
        (StepTime(2.0, 100, True, "run orig2345"), "est. 3 s a step"),
        (StepTime(2.0, 100, False, "at a ceiling"), "least 3 s a step"),
        (None, "×1.50 work"),
    ],
)
def test_a_change_says_its_seconds_as_the_commands_page_does(time: StepTime | None, cost: str, places: Places) -> None:
    """As that one's heading has it: estimated where today's were measured, else the least; the factor where none is known."""
    made = with_time(places, time)

    (change,) = advised(made).changes
    page = "\n".join(advice(made, width=None))

    assert change.cost == cost
    size, known = change_cost(time, 1.5)
    assert known in page.splitlines()[1]
    assert f" {size:.3g}" in page if time else "x1.50" in page


def test_what_a_pane_has_no_room_for_stands_below_the_change(places: Places) -> None:
    plan = advised(with_time(places, StepTime(2.0, 100, False, "at a ceiling")))

    for width in range(44, 100):
        assert max(map(width_of, fit_lines(plan, width))) <= width
    assert re.search(r"GiB  least 3 s a step  result differs\n", text_of(fit_lines(plan, 78)))
    assert re.search(r"GiB\n  least 3 s a step  result differs\n  train", text_of(fit_lines(plan, 54)))


def test_what_would_measure_a_step_is_what_the_page_names(places: Places) -> None:
    """A smoke run measures it only where that would run on such a device."""
    made = with_time(places, None)

    assert "a training does" in advised(dataclasses.replace(made, to_measure="a training does")).time


def with_time(places: Places, time: StepTime | None) -> PlanMade:
    """A plan that does not fit, and one change that costs half as much again."""
    made = plan_memory(places, "qwen3.6-27b", branch="ddtree", capacity_bytes=40 * GIB)
    change = dataclasses.replace(made.switches[0], work_factor=1.5, keeps_result=False)
    return dataclasses.replace(made, switches=[change], time=time)
