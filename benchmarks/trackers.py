"""The same values written and read back as one curve: ours beside trackio and MLflow.

    python -m benchmarks.trackers                          ours alone
    pip install trackio mlflow-skinny sqlalchemy alembic   then again: with them beside ours

Each writes `--values` numbers of one metric in the way its documents give for bulk, then reads them
back as one curve of 500 points (ours from rollups; where there is no such thing, all values are read
and averaged). Wall time; all are local, no server and no network.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.store.ingest import StreamBatch
from orchestrator.store.rows import Document, NewRun
from orchestrator.store.writes import Store
from remote.wire import Event

POINTS = 500


@dataclass(frozen=True)
class Result:
    name: str
    write_s: float
    read_s: float
    bytes_per_value: float


Contest = Callable[[Path, int], Iterator[None]]  # writes, yields, reads, yields


def ours(folder: Path, values: int) -> Iterator[None]:
    with Store(folder / "runs.db") as store:
        store.create_run(NewRun("run", "train", "r", "b", "local", {Document.SPEC: "{}"}))
        store.new_attempt("run")
        for first in range(0, values, 50_000):
            steps = range(first, min(first + 50_000, values))
            events = [
                Event(step + 1, "metrics", 0.0, 0.0, {"step": step, "values": {"loss": step * 0.5}}) for step in steps
            ]
            store.ingest(StreamBatch("run", 1, "rank0", events, first, "1"))
        yield
        assert 200 < len(store.reader.curve("run", "loss", buckets=POINTS)) <= POINTS
        yield


def trackio(folder: Path, values: int) -> Iterator[None]:
    os.environ["TRACKIO_DIR"] = str(folder)
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    for first in range(0, values, 50_000):
        steps = list(range(first, min(first + 50_000, values)))
        storage.bulk_log("project", "run", [{"loss": step * 0.5} for step in steps], steps=steps)
    yield
    _average([row["loss"] for row in storage.get_logs("project", "run")], values)
    yield


def _mlflow(uri: Callable[[Path], str]) -> Contest:
    def contest(folder: Path, values: int) -> Iterator[None]:
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # its file store is in maintenance and asks for this
        client_module: Any = importlib.import_module("mlflow.tracking")
        metric: Any = importlib.import_module("mlflow.entities").Metric
        client = client_module.MlflowClient(tracking_uri=uri(folder))
        run = client.create_run(client.create_experiment("x")).info.run_id
        for first in range(0, values, 1000):  # its limit for one call
            steps = range(first, min(first + 1000, values))
            client.log_batch(run, metrics=[metric("loss", step * 0.5, step, step) for step in steps])
        yield
        _average([row.value for row in client.get_metric_history(run, "loss")], values)
        yield

    return contest


def _average(values: list[float], expected: int) -> list[float]:
    assert len(values) == expected, f"{len(values)} of {expected} came back"
    width = max(1, expected // POINTS)
    return [sum(values[start : start + width]) / width for start in range(0, expected, width)]


CONTESTS: dict[str, Contest] = {
    "draftyard": ours,
    "trackio": trackio,
    "mlflow sqlite": _mlflow(lambda folder: f"sqlite:///{folder}/mlflow.db"),
    "mlflow files": _mlflow(lambda folder: f"file://{folder}/mlruns"),
}


def measure(name: str, values: int) -> Result | str:
    """The result, or why there is none."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        contest = CONTESTS[name](folder, values)
        try:
            began = time.perf_counter()
            next(contest)
            written = time.perf_counter()
            next(contest)
            read = time.perf_counter()
        except ImportError as error:
            return f"not installed ({error.name})"
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return Result(name, written - began, read - written, size / values)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trackers", description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=1_000_000)
    parser.add_argument("names", nargs="*", default=list(CONTESTS), help=", ".join(CONTESTS))
    options = parser.parse_args()
    print(f"{'':16} {'write s':>10} {'read curve s':>14} {'bytes/value':>12}")
    for name in options.names:
        result = measure(name, options.values)
        if isinstance(result, str):
            print(f"{name:16} {result}")
        else:
            print(
                f"{name:16} {result.write_s:>10.2f} {result.read_s:>14.4f} {result.bytes_per_value:>12.1f}", flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
