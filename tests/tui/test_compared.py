"""What stands beside each other in a comparison is said to be of another step, or of another weighing, where it is."""

import dataclasses
import re
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

NOTE = "not to be held against one another"


@pytest.fixture
def runs(filled_yard: Path) -> list[RunDetail]:
    with Reader(filled_yard) as reader:
        return [
            read_detail(reader, reader.run(run_id), CurvesAsk(names=("loss",), buckets=60)) for run_id in (LIVE, OOM)
        ]


def with_told(detail: RunDetail, **rooms: dict[str, Any]) -> RunDetail:
    spec = dict(detail.spec or {})
    return dataclasses.replace(
        detail, spec=spec | {room: {**spec.get(room, {}), **values} for room, values in rooms.items()}
    )


def with_metrics(detail: RunDetail, *names: str) -> RunDetail:
    loss = next(row for row in detail.series if row.name == "loss")
    return dataclasses.replace(detail, series=tuple(dataclasses.replace(loss, name=name) for name in names))


def whole(details: list[RunDetail], width: int = 100) -> str:
    lines = compare_lines(details, width, Look())
    assert all(width_of(line) <= width for line in lines)
    return text_of(lines)


def head(details: list[RunDetail], width: int = 100) -> str:
    return " ".join(whole(details, width).split("Told differently")[0].split())


def test_each_run_says_at_which_step_it_is(runs: list[RunDetail]) -> None:
    """A loss of 5.2 at step 478 beside 19.35 at step 27 read as a verdict."""
    new = dataclasses.replace(runs[0], run=dataclasses.replace(runs[0].run, step=None))

    assert "step 130,000 of 240,000" in head(runs)
    assert "step 130,000 of 240,000" in head(runs, 60)
    assert "no step yet" in head([new, runs[1]])


@pytest.mark.parametrize(
    ("other", "marked"),
    [
        ({}, set()),
        ({"loss": {"decay": "dpace"}}, {"loss"}),
        ({"loss": {"gamma": 4.0}}, {"loss"}),
        ({"loss": {"terms": {"ce": 1.0, "kl": 0.15}}}, {"loss"}),
        ({"loss": {"dpace_alpha": 0.9}}, set()),  # of a decay that neither has
        ({"loss": {"label": "teacher_argmax"}}, {"loss", "accuracy", "acceptance_length"}),
        ({"loss": {"chunk_tokens": 512, "hidden_gradient": "fp8"}}, set()),
        ({"drafter": {"block_size": 8}}, {"loss", "accuracy", "acceptance_length"}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_metrics_that_are_made_differently_are_marked_as_compare_marks_them(
    other: dict[str, dict[str, Any]], marked: set[str], runs: list[RunDetail]
) -> None:
    """Accuracies in blocks of another size bore no mark, and of the training's own acceptance it was said that it compares."""
    told = with_metrics(runs[0], "loss", "accuracy", "acceptance_length", "lr")
    one = with_told(told, loss={"decay": "exponential", "gamma": 7.0, "terms": {"ce": 1.0}}, drafter={"block_size": 16})
    two = dataclasses.replace(with_told(one, **other), run=runs[1].run)

    text = whole([one, two])

    rows = text.split("Measured")[1].splitlines()
    assert {row.split()[0].rstrip("*") for row in rows if row.split()[:1] and row.split()[0].endswith("*")} == marked
    assert (NOTE in head([one, two])) == bool(marked)
    assert not marked or all(f"{room}.{key}" in head([one, two]) for room, keys in other.items() for key in keys)
    assert (re.search(r"^loss\* .* mean", text, re.MULTILINE) is not None) == bool(marked)  # its curve's title
