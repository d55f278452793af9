"""The memory plan against peaks that a card has measured: `benchmarks/measured/plan.json`, made by `benchmarks.plan`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.plan import CASES, Line, ranges, spec_of
from remote.plan import plan
from remote.plan.checked import CHECKED

MEASURED = json.loads((Path(__file__).parents[2] / "benchmarks" / "measured" / "plan.json").read_text(encoding="utf-8"))
NAMED = {case.name: case for case in CASES}


def lines() -> list[Line]:
    """Measured bytes, beside what today's plan says."""
    found = []
    for row in MEASURED["lines"]:
        case = NAMED[row["case"]]
        stage = plan(spec_of(case), device="cuda", rung=case.rung).stage(row["stage"])
        found.append(Line(case.name, stage.name, stage.allocated_bytes, row["measured_bytes"], 0))
    return found


@pytest.mark.parametrize("line", lines(), ids=lambda line: f"{line.case}, {line.stage}")
def test_the_plan_is_within_its_tolerance_of_what_a_card_measured(line: Line) -> None:
    assert line.is_within, (
        f"predicted {line.predicted_bytes:,}, measured {line.measured_bytes:,}: {line.difference:+.1%}"
    )


def test_the_range_that_is_called_checked_is_the_one_that_was_measured() -> None:
    assert {name: tuple(span) for name, span in ranges(lines(), torch.device("cuda")).items()} == CHECKED["cuda"]
