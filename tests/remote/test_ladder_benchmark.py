"""The benchmark of the smoke ladder: a whole tiny run, and where little is installed it needs no more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import ladder
from remote.spec import dump
from tests import warm
from tests.remote.specs import tiny_spec

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow  # three processes
def test_the_ladders_benchmark_tells_times_peaks_and_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What it starts as `sys.executable` has loaded its libraries here: the seconds are not looked at."""
    monkeypatch.setattr(sys, "executable", warm.executable("remote.drafter", tmp_path))
    monkeypatch.setenv("WARM_PYTHON", sys.executable)
    spec = tmp_path / "spec.json"
    spec.write_text(dump(tiny_spec()), encoding="utf-8")

    status = ladder.main([str(spec), "fwd_bwd", "--out", str(tmp_path / "out")])

    printed, errors = capfd.readouterr()
    told = json.loads((tmp_path / "out" / "ladder.json").read_text(encoding="utf-8"))
    assert status == 0, errors
    assert told["rungs"]["fwd_bwd"]["passed"] is True
    assert told["rungs"]["fwd_bwd"]["step_s"] > 0
    assert told["first_step_s"] > 0
    assert told["choices"]["attention"].startswith("sdpa: auto")
    assert "all rungs: " in printed
    assert "a new process to the end of its first step: " in printed


def test_it_loads_nothing_of_the_local_side() -> None:
    probe = "import sys, benchmarks.ladder; print(sorted(n for n in sys.modules if n.split('.')[0] in ('orchestrator', 'pydantic', 'yaml', 'torch')))"

    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
