"""What the screens say of a plan that does not fit: which part of it, and what helps."""

import dataclasses
import re
from pathlib import Path

import click
import pytest

from orchestrator.actions.places import Places, find_places
from orchestrator.actions.plan_verdict import step_name
from orchestrator.actions.plans import Planned as PlanMade
from orchestrator.actions.plans import plan_body, plan_memory
from orchestrator.actions.step_time import StepTime, change_cost
from orchestrator.verbs.plan_page import advice, plan_page
from tui.fits import fit_lines, use_lines
from tui.memory import plan_lines
from tui.ordering import advised
from tui.pieces import text_of, width_of

GIB = 2**30


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return find_places(tmp_path, {"HOME": str(tmp_path)}, db=tmp_path / "runs.db")


@pytest.mark.parametrize(
    ("branch", "gib"),
    [("ddtree", None), *(("ddtree", gib) for gib in (95, 60, 56, 52, 48, 10)), ("ddtree-8gpu", 48), ("v6", 34)],
)
def test_the_screens_head_changes_as_the_page_does_and_say_what_helps_alike(
    branch: str, gib: int | None, places: Places
) -> None:
    """One rule: with room, without it for a step, and where the target or the evaluation has none."""
    made = plan_memory(places, "qwen3.6-27b", branch=branch, capacity_bytes=gib and gib * GIB)
    page = [click.unstyle(line) for line in plan_page(made, width=None)]
    plan = advised(made)
    drawn = [*use_lines(plan, 78), *fit_lines(plan, 78)]
    text = " ".join(text_of(drawn).split())

    titles = [line for line in page if line.startswith("What would")]
    assert all(part in text for title in titles for part in title.split("; "))
    assert text.count("What would") == len(titles)
    helps = [line.partition("  ")[2].strip() for line in page if line.startswith("what helps")]
    typed = [line for line in page if line.startswith(("draftyard prepare", "rsync"))]
    nothing = [line for line in page if line.startswith("nothing that draftyard")]
    assert all(told in text for told in (*helps, *nothing, *(" ".join(line.split()) for line in typed)))
    assert (f" in {step_name(made)} alone" in text) is any(f"fit in {step_name(made)} alone" in line for line in page)


@pytest.mark.parametrize("width", [30, 44, 78])
def test_a_plan_names_the_part_beside_its_steps_that_has_no_room(width: int, places: Places) -> None:
    """The verdict counts them too: a step that fits stood above "does not fit" without a word of why."""
    body = {gib: _body(places, gib) for gib in (95, 56, 52)}

    drawn = {gib: plan_lines(one, width, ascii_only=True) for gib, one in body.items()}
    text = {gib: " ".join(text_of(lines).split()) for gib, lines in drawn.items()}
    assert max(width_of(line) for lines in drawn.values() for line in lines) <= width
    assert "target's pass" not in text[95]
    assert "evaluation" not in text[95]
    assert "target's pass 54.8 GiB tight" in text[56]
    assert "evaluation 59.8 GiB does not fit" in text[56]
    assert "target's pass 54.8 GiB does not fit evaluation 59.8 GiB does not fit" in text[52]


def _body(places: Places, gib: int) -> dict[str, object]:
    return plan_body(plan_memory(places, "qwen3.6-27b", branch="ddtree", capacity_bytes=gib * GIB).plan)


def test_what_would_use_the_room_is_each_change_with_what_to_set(places: Places) -> None:
    made = plan_memory(places, "qwen3.6-27b", branch="ddtree", capacity_bytes=95 * GIB)

    lines = text_of(use_lines(advised(made), 78))
    for use in made.uses:
        assert use.overrides[0] in lines
        assert f"{use.plan.driver_bytes / GIB:.1f} GiB" in lines


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
