"""docs/hosts.md and docs/many-gpus.md: every promise names a test, and every test that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("name", "least"), [("hosts", 50), ("many-gpus", 10)])
def test_every_promise_of_a_page_is_kept_by_a_test_that_exists(name: str, least: int) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").partition("## A model on paper")[0]
    heads = ("| fault |", "| promise |")
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith(heads)]
    tests = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }

    assert len(rows) >= least
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, row
        assert set(named) <= tests, set(named) - tests
