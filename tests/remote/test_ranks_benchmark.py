"""The two-card benchmark runs with tiny shapes where there are no cards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.remote.jobs import TREE


@pytest.mark.slow  # two processes import torch and transformers
def test_every_part_of_the_two_card_benchmark_gives_its_row(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(TREE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.ranks", "--small", "--out", str(tmp_path / "out")]

    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )

    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out" / "ranks.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["part"] for row in rows] == ["machine", "transfer", "alone", "queued", "shared"]
    by_part = {row["part"]: row for row in rows}
    assert by_part["transfer"]["batch_bytes"] == 96 * 6 * 48 * 4  # S · (K + 1) · H float32 numbers
    assert by_part["queued"]["transfer_ms"] > 0
    assert by_part["shared"]["times_one"] > 0
