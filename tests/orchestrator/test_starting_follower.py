"""What the follower and its own verbs are started from: this installation, and nothing that lies in the folder they start in."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.follow.follower import resume_by_verb
from orchestrator.follow.lease import ensure_follower, holder_pid, lock_file
from orchestrator.store.writes import Store

PATIENCE_S = 60.0

pytestmark = pytest.mark.slow  # a process of its own each


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With modules in it that are named like those that draftyard needs, and tell when they are run."""
    monkeypatch.delenv("WARM_SERVER", raising=False)  # a start as it is outside of tests
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    ran = tmp_path / "ran"
    for name in ("json", "argparse", "orchestrator"):
        (tmp_path / f"{name}.py").write_text(f"open({str(ran)!r}, 'w').close()\nraise SystemExit('not ours')\n")
    Store(tmp_path / "runs.db").close()
    return tmp_path


def test_a_follower_runs_nothing_of_the_folder_of_its_database(folder: Path) -> None:
    db = folder / "runs.db"
    assert ensure_follower(db)
    ends_s = time.monotonic() + PATIENCE_S
    while not (lock_file(db).exists() and lock_file(db).read_text().strip()):
        assert not (folder / "ran").exists()
        assert time.monotonic() < ends_s, db.with_name("runs.db.follow.log").read_text()
        time.sleep(0.05)
    pid = holder_pid(db)
    if pid is not None:
        os.kill(pid, signal.SIGTERM)

    assert not (folder / "ran").exists()


def test_a_retry_runs_nothing_of_the_folder_it_is_asked_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)

    told = resume_by_verb(folder / "runs.db", folder / "hosts.yaml")(SimpleNamespace(run_id="none2345", id=1))  # type: ignore[arg-type]

    assert not (folder / "ran").exists()
    assert "none2345" in told
