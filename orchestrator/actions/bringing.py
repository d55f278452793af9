"""Runs brought from machines that cannot be reached: a run folder on a disk becomes a run like any other."""

from __future__ import annotations

import contextlib
from pathlib import Path

from orchestrator.actions.places import Places
from orchestrator.errors import RunNotFound
from orchestrator.follow.importing import PASSED_OVER, Tell, import_folder
from orchestrator.store.reads import Reader
from orchestrator.store.rows import RunRow
from orchestrator.store.writes import Store
from remote.rundir import RunDir, read_json


def bring_in(places: Places, folder: Path, *, tell: Tell = lambda text, size_bytes: None) -> RunRow:
    """Reads the folder into the database; a second time adds what is new and doubles nothing. `tell`: as of `import_folder`."""
    with Store(places.db) as store:
        return import_folder(store, folder, tell=tell)


def read_so_far(places: Places, folder: Path) -> object | None:
    """How far the run of this folder was read by earlier imports, to be held against a later answer; None: not at all."""
    job = read_json(RunDir(folder.resolve()).job_json) or {}
    if not isinstance(job.get("run_id"), str) or not places.db.exists():
        return None
    with Reader(places.db) as reader, contextlib.suppress(RunNotFound):
        run = reader.run(job["run_id"])
        told = [(row.attempt, row.writer, row.offset_bytes) for row in reader.streams(run.id)]
        return run.state, run.evidence, run.folder, told
    return None


def passed_over(places: Places, run_id: str) -> list[str]:
    """A line for each thing in the run's folder that bears the name of events, a log or an attempt and is none."""
    with Reader(places.db) as reader:
        return [row.text for row in reader.events(run_id, kinds=["bad_line"]) if PASSED_OVER in row.fields]
