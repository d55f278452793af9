"""The benchmark of the smoke ladder: a whole tiny run, and where little is installed it needs no more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from remote.spec import dump
from tests.remote.specs import tiny_spec

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow  # three processes
def test_the_ladders_benchmark_tells_times_peaks_and_choices(tmp_path: Path) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text(dump(tiny_spec()), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.ladder", str(spec), "fwd_bwd", "--out", str(tmp_path / "out")]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    told = json.loads((tmp_path / "out" / "ladder.json").read_text(encoding="utf-8"))
    assert done.returncode == 0, done.stderr
    assert told["rungs"]["fwd_bwd"]["passed"] is True
    assert told["rungs"]["fwd_bwd"]["step_s"] > 0
    assert told["first_step_s"] > 0
    assert told["choices"]["attention"].startswith("sdpa: auto")
    assert "all rungs: " in done.stdout
    assert "a new process to the end of its first step: " in done.stdout


def test_it_loads_nothing_of_the_local_side() -> None:
    probe = "import sys, benchmarks.ladder; print(sorted(n for n in sys.modules if n.split('.')[0] in ('orchestrator', 'pydantic', 'yaml', 'torch')))"

    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
