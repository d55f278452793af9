"""Shipping, commands, reconnects, ingest and the first step beside rsync and ssh: the quick form, with loose bounds.

Ratios within one run, because machines differ and a busy one slows both sides.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.hosts import HEAD

LACKING = [program for program in ("rsync", "ssh", "git") if not shutil.which(program)]
# Ours against the tool over a new connection; measured between 0.03 and 2.2.
BOUNDS = {
    "ship 300 files over 40 ms, cold": 1.0,
    "ship 300 files over 40 ms, nothing changed": 0.6,
    "ship 300 files over 40 ms, one changed": 1.0,
    "ship 16 MB, cold": 3.0,
    "ship 2,000 files, cold": 4.0,
    "a command, loopback": 0.5,
    "a command, 40 ms": 0.5,
    "reconnect and a command, loopback": 3.0,
    "reconnect and a command, 40 ms": 2.0,
    "ingest 20,000 records": 20.0,
    "launch to first step, loopback": 8.0,
    "launch to first step, 40 ms": 4.0,
}


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(bool(LACKING), reason=f"no {', '.join(LACKING)} to compare with")
def test_the_quick_form_stays_near_rsync_and_ssh_and_leaves_nothing_behind() -> None:
    with tempfile.TemporaryDirectory(prefix="dy-") as folder:  # short: ssh puts a socket into it
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.hosts", "--quick"],
            env={**os.environ, "TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert list(Path(folder).iterdir()) == []

    lines = done.stdout.splitlines()
    assert lines[:2] == HEAD.splitlines()
    found = {cells[0].partition(" (")[0]: float(cells[4]) for cells in map(_cells, lines[2:])}
    assert found.keys() == BOUNDS.keys()
    assert {what: ratio for what, ratio in found.items() if ratio > BOUNDS[what]} == {}


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]
