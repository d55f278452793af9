"""The two-card benchmark runs with tiny shapes where there are no cards."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import ranks
from tests import warm
from tests.remote.jobs import TREE


@pytest.mark.slow  # a launcher and two processes
def test_every_part_of_the_two_card_benchmark_gives_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts the launcher as `sys.executable`, and torch's launcher the ranks: here both have loaded their libraries."""
    python = warm.executable("remote.drafter", tmp_path)
    monkeypatch.setattr(sys, "executable", python)
    for name, value in (("PYTHON_EXEC", python), ("PYTHONPATH", str(TREE)), ("OMP_NUM_THREADS", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RANK", raising=False)

    assert ranks.main(["--small", "--out", str(tmp_path / "out")]) == 0

    rows = [json.loads(line) for line in (tmp_path / "out" / "ranks.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["part"] for row in rows] == ["machine", "transfer", "alone", "queued", "shared"]
    by_part = {row["part"]: row for row in rows}
    assert by_part["transfer"]["batch_bytes"] == 96 * 6 * 48 * 4  # S · (K + 1) · H float32 numbers
    assert by_part["queued"]["transfer_ms"] > 0
    assert by_part["shared"]["times_one"] > 0
