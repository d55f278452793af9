"""The memory plan against peaks that a card has measured: `benchmarks/measured/plan.json`, made by `benchmarks.plan`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.plan import Line, measured_lines, page, ranges
from remote.plan.checked import CHECKED

LINES = measured_lines()
DOCS = Path(__file__).parents[2] / "docs" / "benchmarks.md"


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.case}, {line.stage}")
def test_the_plan_is_within_its_tolerance_of_what_a_card_measured(line: Line) -> None:
    assert line.is_within, (
        f"predicted {line.predicted_bytes:,}, measured {line.measured_bytes:,}: {line.difference:+.1%}"
    )


def test_the_range_that_is_called_checked_is_the_one_that_was_measured() -> None:
    found = ranges(LINES, torch.device("cuda"))

    assert {name: tuple(span) for name, span in found.items()} == CHECKED["cuda"]


def test_the_table_in_the_docs_is_that_of_the_measured_file() -> None:
    """`python -m benchmarks.plan --page` prints it."""
    assert page(LINES) in DOCS.read_text(encoding="utf-8")
