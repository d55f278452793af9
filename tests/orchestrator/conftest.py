"""Fixtures of the local side: a project of its own for each test of the command line."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import warm
from tests.orchestrator.yard import QUICK, RECIPE, TRAIN, Yard, end


@pytest.fixture
def yard(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Yard]:
    """A git work tree with recipes/tiny.yaml; the host `local` works below the same folder."""
    root = tmp_path / "a project"
    (root / "recipes" / "job").mkdir(parents=True)
    for name, text in (("tiny.yaml", RECIPE), ("job/train.py", TRAIN), ("job/quick.py", QUICK)):
        (root / "recipes" / name).write_text(text, encoding="utf-8")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    monkeypatch.chdir(root)
    for name in [name for name in os.environ if name.startswith("DRAFTYARD_")] + ["NO_COLOR", "FORCE_COLOR"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(root / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(root / "config"))
    if request.node.get_closest_marker("slow"):  # the others start nothing of ours
        for name, value in warm.environment("orchestrator").items():
            monkeypatch.setenv(name, value)
    here = Yard(root, capsys)
    yield here
    end(here)
