"""The model on paper in docs/many-gpus.md is what the benchmark computes today, and its arithmetic is right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import boxes
from benchmarks.boxes import DRAFTER_S, NVLINK, TARGET_S, Boxes
from remote.balance import Pace, Sides

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "many-gpus.md").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("rows", [boxes.one_box(), boxes.links(), boxes.eight_hosts()], ids=["box", "links", "hosts"])
def test_the_page_has_the_tables_that_are_computed(rows: list[list[str]]) -> None:
    lines = boxes.table(rows)

    assert any(PAGE[at : at + len(lines)] == lines for at in range(len(PAGE))), "run: python -m benchmarks.boxes"


def test_the_slower_role_bounds_the_rows_and_is_what_saturates() -> None:
    for branch in DRAFTER_S:
        for targets in range(1, 8):
            box = Boxes(branch, targets, 8 - targets)
            slower = "targets" if targets / TARGET_S < (8 - targets) / DRAFTER_S[branch] else "drafters"

            assert box.first == slower
            assert box.loads[slower] == pytest.approx(1.0)
            assert box.rows_per_s == pytest.approx(min(targets / TARGET_S, (8 - targets) / DRAFTER_S[branch]))


@pytest.mark.parametrize(("branch", "best"), [("ddtree", 4), ("v6", 6)])
def test_the_best_division_is_the_one_that_a_run_would_be_told(branch: str, best: int) -> None:
    told = Sides(5, 3, Pace(TARGET_S, 0.0), Pace(DRAFTER_S[branch], 0.0)).balanced

    assert max(range(1, 8), key=lambda targets: Boxes(branch, targets, 8 - targets).rows_per_s) == told[0] == best


def test_a_link_costs_time_only_where_gradients_outlast_a_backward_pass() -> None:
    quick, slow = (Boxes("v6", 40, 24, num_hosts=8, between=link) for link in (NVLINK, 1e9))

    assert quick.step_s == DRAFTER_S["v6"]
    assert slow.step_s == pytest.approx(DRAFTER_S["v6"] / 2 + 2 * 7 / 8 * 3.460426240)
    assert slow.first == "links between"


@pytest.mark.parametrize(("branch", "targets"), [("ddtree", 32), ("ddtree", 24), ("v6", 40)])
@pytest.mark.parametrize("rows_each", [1, 2])
def test_what_saturates_first_is_what_more_of_would_help(branch: str, targets: int, rows_each: int) -> None:
    box = Boxes(branch, targets, 64 - targets, num_hosts=8, rows_each=rows_each)
    wider = replace(box, between=16 * box.between)

    assert (box.first == "links between") == (wider.rows_per_s > 1.01 * box.rows_per_s)
    assert box.first == "targets" or replace(box, num_targets=2 * targets).rows_per_s == box.rows_per_s
