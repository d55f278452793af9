"""What people and jobs have written, beside commands of our own that are spelled as this shell finds them."""

from __future__ import annotations

import pytest

from orchestrator.store.rows import FailureRow, State
from orchestrator.store.writes import Store
from tests.orchestrator.runs import RUN, started
from tests.orchestrator.yard import Yard


def test_what_people_and_jobs_have_written_is_printed_as_it_is(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A note that is read and set again is the same note; only the commands beside it are ours."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr("sys.argv", [str(yard.root / ".venv/bin/draftyard")])
    said = "their box said: draftyard launch tiny --host b"
    failure = FailureRow(
        run_id=RUN, attempt=1, kind="exception", message=f"told: {said}", hint="", source="rank0", stage=None, step=None,
        traceback=f"Traceback:\n  {said}\n", facts={}, at_s=1.0, is_first_cause=True,
    )  # fmt: skip
    with Store(yard.root / "runs.db") as store:
        started(store)
        store.replace_failures(RUN, 1, [failure])
        store.set_state(RUN, State.FAILED, evidence="x")
        store.note(RUN, said)

    assert yard.run("note", RUN) == 0
    assert yard.out == f"{said}\n"
    assert yard.run("show", RUN) == 0, yard.err
    assert yard.out.count(said) == 3
    assert f"\n  {said}\n" in yard.out
    assert ".venv/bin/draftyard launch tiny --host b" not in yard.out
    assert ".venv/bin/draftyard " in yard.out
