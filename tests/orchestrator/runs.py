"""Runs, events and run folders for tests, made by the same code that makes real ones."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.store.ingest import StreamBatch
from orchestrator.store.rows import Document, NewRun, State
from orchestrator.store.writes import Store
from remote.wire import Event, encode

RUN = "20260101-120000-aaaa"


def new_run(run_id: str = RUN, **changes: Any) -> NewRun:
    spec = {"optim": {"lr": 1e-3}, "train": {"num_steps": 1000}, "life": {}}
    values = {"kind": "train", "recipe": "smollm2", "branch": "v6", "host": "local"}
    return NewRun(**{"id": run_id, **values, "documents": {Document.SPEC: json.dumps(spec)}, **changes})


def started(store: Store, run_id: str = RUN, **changes: Any) -> str:
    """A run with its first attempt."""
    store.create_run(new_run(run_id, **changes))
    store.new_attempt(run_id)
    return run_id


def again(store: Store, run_id: str = RUN, state: State = State.FAILED) -> int:
    """One more attempt, after the newest has ended so."""
    store.set_state(run_id, state, evidence="x")
    return store.new_attempt(run_id)


def event(seq: int, kind: str, **fields: Any) -> Event:
    return Event(seq=seq, kind=kind, wall_s=1000.0 + seq, monotonic_s=10.0 + seq, fields=fields)


def steps(first: int, last: int, **values: Any) -> list[Event]:
    """One metrics event per step, seq = step."""
    told = values or {"loss": 1.0}
    return [event(step, "metrics", step=step, values=dict(told)) for step in range(first, last + 1)]


def batch(
    events: Iterable[Event], *, run_id: str = RUN, attempt: int = 1, writer: str = "rank0", **more: Any
) -> StreamBatch:
    return StreamBatch(run_id, attempt, writer, list(events), **{"offset_bytes": 0, "identity": "1", **more})


def write_events(path: Path, events: Iterable[Event]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as stream:
        for item in events:
            stream.write(encode(item))


def life(**values: Any) -> Mapping[Document, str]:
    return {Document.SPEC: json.dumps({"life": values})}
