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
