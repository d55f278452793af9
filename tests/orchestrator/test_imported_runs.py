"""What an imported run's page and the refused verbs say: where its folder lies, and nothing that cannot work."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from orchestrator import cli
from orchestrator.actions import bringing, history, jobs, pulling
from orchestrator.actions.places import Places, find_places
from orchestrator.errors import UsageError
from orchestrator.store import reads
from orchestrator.store.rows import AttemptRow, RunRow, State
from orchestrator.store.writes import Store
from orchestrator.verbs import files, progress
from orchestrator.verbs.leads import next_steps
from orchestrator.verbs.page import run_page
from remote.rundir import RunDir, write_json
from tests.orchestrator.runs import batch, event, steps, write_events
from tests.orchestrator.yard import Yard

CHECKPOINT = "checkpoints/step-00000350"
REFUSED: dict[str, Callable[[Places, str], object]] = {
    "resume": jobs.resume,
    "evaluate": jobs.evaluate,
    "export": jobs.export,
    "pull": lambda places, run: pulling.pull(places, run, which="last", to=Path("pulled"), tell=lambda _: None),
}


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return find_places(tmp_path, {"HOME": str(tmp_path)}, db=tmp_path / "runs.db")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy in a folder that is not called `runs`, under a name that is not its id."""
    copy = RunDir(tmp_path / "usb" / "stick")
    copy.attempt(1).root.mkdir(parents=True)
    write_json(copy.job_json, {"run_id": "vdsbffu7", "kind": "train", "attempt": 1, "facts": {"tree": "ab" * 32}})
    write_json(copy.spec_json, {"entry": "dflash", "recipe": "smollm2", "branch": "ce", "train": {"num_steps": 700}})
    return copy.root


def _brought(places: Places, folder: Path) -> RunRow:
    run = bringing.bring_in(places, folder)
    with Store(places.db) as store:
        store.ingest(batch([event(1, "checkpoint", step=350, path=CHECKPOINT, bytes=1)], run_id=run.id))
    return run


def _text(places: Places, run: str) -> str:
    return click.unstyle("\n".join(run_page(history.show(places, run), width=80, now_s=2000.0)))


def test_the_page_of_an_imported_run_says_where_its_folder_lies_here(places: Places, folder: Path) -> None:
    run = _brought(places, folder)

    text = _text(places, run.id)

    assert f"newest: {folder}/{CHECKPOINT}" in text
    assert f"imported from  {folder}" in text
    assert "/runs/" not in text
    assert "imported:" not in text


def test_a_newer_copy_elsewhere_is_where_the_folder_lies_from_then_on(
    places: Places, folder: Path, tmp_path: Path
) -> None:
    _brought(places, folder)
    newer = Path(shutil.copytree(folder, tmp_path / "newer"))

    run = bringing.bring_in(places, newer)

    assert run.folder == str(newer)


@pytest.mark.parametrize("state", [State.LOST, State.SUCCEEDED])
@pytest.mark.parametrize("kind", ["train", "export", "smoke"])
def test_an_imported_run_is_offered_nothing_that_needs_its_host(
    places: Places, folder: Path, state: State, kind: str
) -> None:
    page = history.show(places, _brought(places, folder).id)
    page = dataclasses.replace(page, run=dataclasses.replace(page.run, state=state, kind=kind))

    offered = "\n".join(next_steps(page))

    assert not [word for word in (*REFUSED, "launch", "smoke ", "--host", "doctor") if f"draftyard {word}" in offered]
    assert "--host" not in offered
    assert f"draftyard logs {page.run.id}" in offered
    assert (f"draftyard import {folder}" in offered) == (state is State.LOST)


@pytest.mark.parametrize("verb", REFUSED)
def test_a_verb_that_needs_the_host_says_that_the_run_was_imported_and_what_can_be_done(
    places: Places, folder: Path, verb: str
) -> None:
    run = _brought(places, folder)

    with pytest.raises(UsageError) as caught:
        REFUSED[verb](places, run.id)

    told = str(caught.value)
    assert f"run {run.id} was imported from {folder}; no host of it is known here" in told
    assert f"its files lie in {folder}" in told
    assert f"draftyard import {folder}" in told


def test_an_import_says_what_came_of_it_and_what_can_be_typed_next(
    places: Places, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def imported() -> list[str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["import", str(folder), "--db", str(tmp_path / "runs.db")])
        assert ended.value.code == 0
        return capsys.readouterr().out.splitlines()

    first, again = imported(), imported()
    write_events(RunDir(folder).attempt(1).events("rank0"), steps(1, 3))
    newer = imported()

    run_id = first[0].split()[0]
    assert first[0].endswith("says how it ended")
    assert again[0].endswith("; nothing in it is new")
    assert newer[0].endswith("; with what is new")
    assert first[1] == "Next"
    assert any(line.strip().endswith(f"draftyard watch {run_id}") for line in first)


def test_the_checkpoint_of_an_imported_training_says_where_it_can_be_used(places: Places, folder: Path) -> None:
    page = history.show(places, _brought(places, folder).id)
    page = dataclasses.replace(page, spec={**page.spec, "entry": "dflash"})

    offered = "\n".join(next_steps(page))

    assert (
        f"# its checkpoint is {folder}/{CHECKPOINT}; to use it, type evaluate or export where it was launched"
        in offered
    )


def test_a_secret_whose_file_came_along_is_not_in_the_cause_of_an_attempt_without_an_exit_file(
    places: Places, folder: Path
) -> None:
    copy = RunDir(folder)
    copy.attempt(2).root.mkdir()
    write_json(copy.env_file, {"PW": "a canary"})
    crash = 'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\nRuntimeError: 401 for a canary\n'
    copy.attempt(1).stderr_log.write_text(crash)

    run = bringing.bring_in(places, folder)

    with Store(places.db) as store:
        told = [failure.message for failure in store.reader.failures(run.id)]
    assert told == ["RuntimeError: 401 for [hidden]"]
    assert copy.env_file.exists()  # it is the person's


def test_an_import_of_many_attempts_tells_how_far_it_is_and_reads_no_row_of_another(
    yard: Yard, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2, 9):
        RunDir(folder).attempt(number).root.mkdir()
    monkeypatch.setattr(progress, "SILENT_S", 0.0)
    monkeypatch.setattr(progress, "PLAIN_LINE_EVERY_S", 0.0)
    monkeypatch.setattr(files, "LONG_BYTES", 3)
    (RunDir(folder).attempt(5).root / "stdout.log").write_text("long")
    built: list[type] = []
    whole = reads._build
    monkeypatch.setattr(reads, "_build", lambda row, *rest, **more: built.append(row) or whole(row, *rest, **more))

    assert yard.run("import", str(folder)) == 0, yard.err

    assert "looking at attempt 8 of 8\n" in yard.err
    assert "reading attempt 2 of 8\nreading attempt 3 of 8\n" in yard.err
    assert "reading attempt 5 of 8, 4 B of events and logs\n" in yard.err
    assert built.count(AttemptRow) < 5 * 8, "each attempt's row is read for itself"
