"""What stands beside each other in a comparison is said to be of another step, or of another weighing, where it is."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from orchestrator.store.reads import Reader
from tests.tui.yard import LIVE, OOM
from tui.chart import Look
from tui.compare import compare_lines
from tui.detail import RunDetail, read_detail
from tui.pieces import text_of, width_of
from tui.snapshot import CurvesAsk

MADE = "Losses are made differently"


@pytest.fixture
def runs(filled_yard: Path) -> list[RunDetail]:
    with Reader(filled_yard) as reader:
        return [
            read_detail(reader, reader.run(run_id), CurvesAsk(names=("loss",), buckets=60)) for run_id in (LIVE, OOM)
        ]


def with_loss(detail: RunDetail, **values: Any) -> RunDetail:
    spec = dict(detail.spec or {})
    return dataclasses.replace(detail, spec={**spec, "loss": {**spec.get("loss", {}), **values}})


def head(details: list[RunDetail], width: int = 100) -> str:
    lines = compare_lines(details, width, Look())
    assert all(width_of(line) <= width for line in lines)
    return " ".join(text_of(lines).split("Told differently")[0].split())


def test_each_run_says_at_which_step_it_is(runs: list[RunDetail]) -> None:
    """A loss of 5.2 at step 478 beside 19.35 at step 27 read as a verdict."""
    new = dataclasses.replace(runs[0], run=dataclasses.replace(runs[0].run, step=None))

    assert "step 130,000 of 240,000" in head(runs)
    assert "step 130,000 of 240,000" in head(runs, 60)
    assert "no step yet" in head([new, runs[1]])


@pytest.mark.parametrize(
    ("other", "is_told"),
    [
        ({}, False),
        ({"decay": "dpace"}, True),
        ({"gamma": 4.0}, True),
        ({"terms": {"ce": 1.0, "kl": 0.15}}, True),
        ({"dpace_alpha": 0.9}, False),  # of a decay that neither has
        ({"label": "teacher_argmax"}, True),
        ({"chunk_tokens": 512, "hidden_gradient": "fp8"}, False),
    ],
)
def test_losses_of_other_weighings_are_said_not_to_compare(
    other: dict[str, Any], is_told: bool, runs: list[RunDetail]
) -> None:
    one = with_loss(runs[0], decay="exponential", gamma=7.0, terms={"ce": 1.0}, dpace_alpha=0.5, chunk_tokens=2048)
    two = dataclasses.replace(with_loss(one, **other), run=runs[1].run)

    text = head([one, two])

    assert (MADE in text) == is_told
    assert all(f"loss.{key}" in text for key in other) or not is_told
