"""The out-of-memory programs on a counted limit: what they show of shapes, stacks and live frames needs no card."""

from __future__ import annotations

import json
import sys
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import oom, oom_programs
from benchmarks.books import Books
from benchmarks.oom_card import SmallCard, counting
from remote.drafter.held import summarise
from remote.plan import plan
from remote.plan.advice import nearest_fits
from remote.rundir import RunDir
from tests import warm

pytestmark = pytest.mark.slow  # real programs, and one real supervisor

MIB = 1024**2
SCRIPTS = [each for each in oom.PROGRAMS if each.changes is None and each.stand_in_bytes is not None]


def run(program: oom.Program, root: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
    monkeypatch.setenv("DRAFTYARD_RUN_DIR", str(root))
    return oom_programs.main([program.name, "--limit", str(program.stand_in_bytes), "--stand-in", *more])


@pytest.mark.parametrize("program", SCRIPTS, ids=lambda program: program.name)
def test_a_program_dies_of_its_known_cause_and_runs_with_the_first_suggestion(
    program: oom.Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        run(program, tmp_path / "1", monkeypatch)

    failure = oom.explained(RunDir(tmp_path / "1").attempt(1), {"exit_code": 1})
    assert failure is not None
    assert (failure.kind, failure.facts["cause"]) == ("gpu_oom", program.cause)
    assert "benchmarks/oom_programs.py" in failure.facts["frame"]["file"]
    assert (RunDir(tmp_path / "1").attempt(1).artifacts / failure.facts["memory_snapshot"]).exists()

    assert run(program, tmp_path / "2", monkeypatch, "--remedy", failure.facts["remedies"][0]["word"]) == 0
    assert oom.explained(RunDir(tmp_path / "2").attempt(1), {"exit_code": 0}) is None


def test_one_program_under_a_supervisor_makes_a_row_evidence_and_the_row_again(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The supervisor and its programs are processes that had loaded their libraries."""
    monkeypatch.setattr(sys, "executable", warm.executable("remote.drafter", tmp_path_factory.mktemp("warm")))

    assert oom.main(["--out", str(tmp_path), "--only", "process_limit", "--stand-in"]) == 0

    row = "| process_limit | process_limit | process_limit | yes |"
    assert row in capsys.readouterr().out
    assert row in (tmp_path / "oom.md").read_text()
    (result,) = json.loads((tmp_path / "oom.json").read_text())["results"]
    assert result["ran"]
    with tarfile.open(tmp_path / "evidence.tar.gz") as archive:
        names = archive.getnames()
    assert {"runs/process_limit-1/attempts/1/exit.json", "runs/process_limit-2/attempts/1/exit.json"} <= set(names)
    assert not any(name.endswith(".pickle") for name in names)
    assert oom.main(["--read", str(tmp_path)]) == 0
    assert row in capsys.readouterr().out


def test_a_spent_budget_begins_no_program_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    oom.main(["--out", str(tmp_path), "--budget", "-1", "--only", "math", "--stand-in"])

    assert "passed over, the budget of -1 s is spent: math_fallback" in capsys.readouterr().out


def test_both_bundled_programs_do_not_fit_by_the_plan_and_their_first_suggestion_does(tmp_path: Path) -> None:
    bench = oom.Bench(tmp_path, oom.CAP_BYTES, is_stand_in=False)
    bundled = [each for each in oom.PROGRAMS if each.changes is not None]
    assert {program.name for program in bundled} == {"layers", "anchors"}
    for program in bundled:
        spec = oom.spec_of(program, bench)
        assert spec is not None
        today = plan(spec, capacity_bytes=oom.CAP_BYTES)
        assert today.verdict == "does not fit"
        (first, *_) = nearest_fits(spec, partial(plan, capacity_bytes=oom.CAP_BYTES))
        assert first.plan.driver_bytes <= oom.CAP_BYTES


def test_books_count_a_storage_once_while_it_is_alive() -> None:
    with Books() as books:
        kept = torch.zeros(3 * MIB, dtype=torch.uint8)
        view = kept[MIB:]
        gone = kept + 1
        del gone
        torch.zeros(MIB, dtype=torch.uint8)

    assert (books.live_bytes, books.peak_bytes) == (3 * MIB, 6 * MIB)
    del kept, view
    assert books.live_bytes == 0


def test_the_stand_ins_error_stands_where_the_operation_is_and_its_snapshot_is_of_that_moment() -> None:
    card = SmallCard(4 * MIB)

    def fill() -> list[Any]:
        return [torch.zeros(MIB, dtype=torch.uint8) for _ in range(5)]

    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 1\.00 MiB") as raised, counting(card):
        fill()

    own = [entry.path for entry in raised.traceback if "site-packages" not in str(entry.path)]
    assert own[-1] == Path(__file__)
    assert summarise(card.snapshot())["kept"]["buffers"]["bytes"] == 4 * MIB
    assert card.live_bytes < 4 * MIB
