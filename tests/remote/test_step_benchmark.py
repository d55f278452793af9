"""The benchmark of a step: its count of the least work, and a whole tiny run where little is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import step
from benchmarks.least_work import least_work

ROOT = Path(__file__).resolve().parents[2]
LOCAL_SIDE = (
    "transformers",
    "safetensors",
    "sqlmodel",
    "textual",
    "fabric",
    "paramiko",
    "pydantic",
    "click",
    "yaml",
    "matplotlib",
)
PARTS = {"body": 104.1 + 206.1 + 6.7, "attention": 38.5, "head": 2 * 80.4 + 20.1}  # TFLOP, counted by hand


def test_least_work_of_ddtree_is_what_was_counted() -> None:
    """Anchors are random: a few labels lie beyond the row."""
    case = step.CASES[0]
    row = step.packed_row(case.lengths, 1000)
    shape = step.Bench.__new__(step.Bench)
    shape.row, shape.case, shape.variant, shape.drafter = row, case, step.FUSED, step.LARGE.drafter
    made, plan = shape.blocks(1)

    work = least_work(step.LARGE.target, step.LARGE.drafter, made, plan, num_context=8000)

    assert {part: getattr(work, part) / 1e12 for part in PARTS} == pytest.approx(PARTS, rel=0.01)


@pytest.mark.slow  # one case by every variant that runs on a CPU, in a process of its own
def test_a_tiny_run_writes_its_pages_without_the_local_side(tmp_path: Path) -> None:
    code = "import os, runpy, sys\nos.environ['TRITON_INTERPRET'] = '0'\n"
    code += f"sys.modules.update(dict.fromkeys({LOCAL_SIDE!r}))\n"  # importing one of them fails now
    code += f"sys.argv[1:] = ['--small', '--only', 'ddtree', '--out', {str(tmp_path)!r}]\n"
    code += "runpy.run_module('benchmarks.step', run_name='__main__')"

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=250, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "step.json").read_text())["rows"]
    assert len(rows) == 6
    assert "first user" in rows[1]["variant"]
    assert all(row["step_ms"] > 0 for row in rows)
    page = (tmp_path / "step.md").read_text()
    assert all(f"| {row['case']} | {row['variant']} |" in page for row in rows)
    assert "to be won" in page
    assert (tmp_path / "step.svg").read_text().count("<rect") == 2 * len(rows)
