"""The twenty-second form of benchmarks/tui.py, with bounds that a busy machine keeps as well."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Times what is claimed on two quiet cores: a machine five times slower needs four of them for the slowest key. Memory is
# held as claimed, idling within twice, what a longer chart costs by a shorter one within three times.
LOOSE = 8.0


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_screens_keep_their_pace_within_loose_bounds() -> None:
    """First paint, cold process, key to paint, idle, chart over many points; memory and its growth by their own bounds."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "benchmarks.tui", "--quick", "--loose", str(LOOSE)]

    for _ in range(2):  # a neighbour's moment is not our pace
        done = subprocess.run(command, capture_output=True, text=True, cwd=root, env={**os.environ}, timeout=280)
        if done.returncode == 0:
            break

    assert done.returncode == 0, done.stdout + done.stderr
    for what in (
        "first paint",
        "cold process",
        "99th percentile",
        "idle",
        "second by the first",
        "memory at the most",
        "growth",
    ):
        assert what in done.stdout
