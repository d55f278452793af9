"""The table of the twelve out-of-memory programs is that of the measured file: no number of it stands in the page alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.oom import PROGRAMS
from benchmarks.oom_page import MEASURED, measured_rows, page, score

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def test_the_table_of_programs_in_the_docs_is_that_of_the_measured_file() -> None:
    """`python -m benchmarks.oom_page` prints it."""
    told = DOCS.read_text(encoding="utf-8")

    assert page(measured_rows()) in told
    assert score(measured_rows()) in " ".join(told.split())
    header = json.loads(MEASURED.read_text(encoding="utf-8"))["header"]
    assert all(part in " ".join(told.split()) for part in header.split(", capped")[0].split(", "))


def test_every_program_was_measured_for_the_cause_that_is_known_of_it() -> None:
    rows = measured_rows()

    assert [(row.name, row.cause) for row in rows] == [(program.name, program.cause) for program in PROGRAMS]
    assert all(program.what for program in PROGRAMS)
    assert sum(row.is_right for row in rows) >= 11
    assert all(row.ran for row in rows)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"named": "full"}, "11 of 12; with the first suggestion 12"),
        ({"ran": False}, "12 of 12; with the first suggestion 11"),
    ],
)
def test_a_row_that_went_wrong_is_counted_and_marked(tmp_path: Path, change: dict[str, object], told: str) -> None:
    body = json.loads(MEASURED.read_text(encoding="utf-8"))
    body["rows"][0] |= change
    (tmp_path / "oom.json").write_text(json.dumps(body), encoding="utf-8")

    rows = measured_rows(tmp_path / "oom.json")

    assert f"Named right: {told} of 12 then ran." == score(rows)
    assert ("| NO |" in page(rows)) is ("ran" in change)
