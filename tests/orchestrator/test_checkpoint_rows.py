"""Which checkpoints a run still has: what retention took away is listed no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.store.rows import State
from orchestrator.store.writes import Store
from remote.wire import Event
from tests.orchestrator.runs import RUN, batch, event, started


def _saved(seq: int, step: int) -> Event:
    return event(seq, "checkpoint", step=step, path=f"checkpoints/step-{step:08}", size_bytes=7, is_best=False)


def _gone(seq: int, step: int) -> Event:
    return event(seq, "checkpoint_removed", step=step, path=f"checkpoints/step-{step:08}")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "runs.db")
    started(store)
    return store


def _steps(store: Store) -> list[tuple[int, int]]:
    return [(row.attempt, row.step) for row in store.reader.checkpoints(RUN)]


def test_a_removed_checkpoint_is_listed_no_more(store: Store) -> None:
    store.ingest(batch([_saved(1, 8), _saved(2, 16)]))
    store.ingest(batch([_saved(3, 24), _gone(4, 8)]))

    assert _steps(store) == [(1, 16), (1, 24)]


def test_what_came_and_went_in_one_batch_is_not_there(store: Store) -> None:
    store.ingest(batch([_saved(1, 8), _saved(2, 16), _gone(3, 8), _gone(4, 999)]))

    assert _steps(store) == [(1, 16)]


@pytest.mark.parametrize(
    "path", ["/etc/shadow", "checkpoints/../../other/x", "", ".", "checkpoints/a\n  state  succeeded", "a\x1b[2J"]
)
def test_a_path_that_no_reporter_tells_is_no_checkpoint(store: Store, path: str) -> None:
    store.ingest(batch([_saved(1, 8), event(2, "checkpoint", step=16, path=path, size_bytes=7)]))

    assert _steps(store) == [(1, 8)]
    assert "no path below the run's folder" in store.reader.events(RUN, kinds=["bad_line"])[0].text


def test_a_path_written_again_is_there_again(store: Store) -> None:
    store.ingest(batch([_saved(1, 8), _gone(2, 8), _saved(3, 8)]))

    assert _steps(store) == [(1, 8)]


def test_a_removal_counts_for_every_attempt(store: Store) -> None:
    store.ingest(batch([_saved(1, 8), _saved(2, 16)]))
    store.set_state(RUN, State.FAILED, evidence="exit status 1")
    store.new_attempt(RUN)

    store.ingest(batch([_saved(1, 24), _gone(2, 8)], attempt=2))

    assert _steps(store) == [(1, 16), (2, 24)]


def test_a_removal_without_a_path_is_a_bad_line(store: Store) -> None:
    store.ingest(batch([_saved(1, 8), event(2, "checkpoint_removed", step=8)]))

    assert _steps(store) == [(1, 8)]
    assert [row.kind for row in store.reader.events(RUN, kinds=["bad_line"])] == ["bad_line"]


def test_a_path_from_the_root_that_an_older_reporter_told_is_relative_where_it_is_below_the_run(store: Store) -> None:
    """Else resume, pull and show would look for it below the run's folder a second time."""
    store.describe_run(RUN, workdir="/srv/yard", tree_hash="0" * 64, fingerprint="f")
    paths = [
        f"/srv/yard/runs/{RUN}/checkpoints/step-20.bin",
        f"/brought/from/runs/{RUN}/checkpoints/step-30.bin",
    ]
    saved = [
        event(seq, "checkpoint", step=seq, path=path, size_bytes=7, is_best=False) for seq, path in enumerate(paths, 1)
    ]
    store.ingest(batch(saved))

    assert [row.path for row in store.reader.checkpoints(RUN)] == ["checkpoints/step-20.bin", *paths[1:]]
