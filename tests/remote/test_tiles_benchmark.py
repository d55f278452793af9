"""The search for tiles: what it passes over, what it calls best, and that every kernel's grid can be launched."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import tiles
from benchmarks.tiles_trials import Trial, trials
from tests.remote.cuda import CPU, in_interpreter

NUM_KERNELS = 13


def run(size: int) -> Sequence[Tensor]:
    """Slower the smaller it is; 3 does not compile, 5 computes something else and 6 only rounds otherwise."""
    if size == 3:
        raise ValueError("out of resource: shared memory")
    if size < 5:
        time.sleep(0.02 / size)
    off = {5: 1.0, 6: 1e-7}.get(size, 0.0)
    return torch.ones(4) + off, torch.arange(4) + int(off)


@pytest.mark.slow
def test_what_fails_or_computes_something_else_is_never_the_best() -> None:
    trial = Trial("fake", tuple({"size": size} for size in (1, 3, 5, 6, 2)), run)

    outcomes = tiles.search(trial, CPU)
    ranked = tiles.finals(trial, outcomes, CPU)

    notes = {each.setting["size"]: each.note for each in outcomes}
    assert "shared memory" in notes[3]
    assert notes[5].endswith("WRONG")
    assert notes[6].startswith("off by 1")
    assert (notes[1], notes[2]) == ("equal", "equal")
    assert [each.setting["size"] for each in ranked] == [6, 2, 1]
    assert [each.is_standing for each in ranked] == [False, False, True]


def test_no_setting_begins_after_the_budget() -> None:
    trial = Trial("fake", ({"size": 6}, {"size": 7}), run)

    outcomes = tiles.search(trial, CPU, stop_s=time.monotonic() - 1)

    assert [each.note for each in outcomes] == ["passed over: the budget is spent"] * 2
    assert tiles.finals(trial, outcomes, CPU) == []


@pytest.mark.slow  # the interpreter
@in_interpreter
def test_every_kernel_is_searched_and_gives_the_same_numbers(tmp_path: Path) -> None:
    assert tiles.main(["--small", "--budget", "3600", "--out", str(tmp_path)]) == 0

    found = json.loads((tmp_path / "tiles.json").read_text())
    assert len(found["best"]) == NUM_KERNELS == len(trials(CPU))
    assert all(each["ms"] > 0 for each in found["tried"])
    page = (tmp_path / "tiles.md").read_text()
    assert all(each["kernel"] in page for each in found["tried"])
