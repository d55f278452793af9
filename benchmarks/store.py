"""The store's claims, measured: what a record costs its trainer, ingest, bytes a value, lists, curves, whole commands.

    python -m benchmarks.store                       10,000 runs, 10 million values
    python -m benchmarks.store --values 100000000    one more order of magnitude
    python -m benchmarks.store --runs 500 --values 500000    the form CI runs

Rates and times are of this process's CPU where nothing waits for a disk, and wall time otherwise;
both are printed beside a yardstick taken in the same run (plain sqlite3, a bare Python start), because
only the ratio says something on a busy machine.
"""

from __future__ import annotations

import argparse
import math
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from orchestrator.store.ingest import StreamBatch
from orchestrator.store.migrations import migrate
from orchestrator.store.reads import Reader
from orchestrator.store.rows import Document, NewRun, State
from orchestrator.store.writes import Store
from remote.report import Reporter
from remote.wire import Event, decode

NAMES = tuple(f"metric_{number}" for number in range(20))
BATCH_STEPS = 5000
LONG = "0000-long"  # the run with most of the values


@dataclass(frozen=True)
class Report:
    runs: int
    values: int
    report_us: float  # a record of 20 metrics, told by a job: all that it costs the trainer, the write included
    decode_us: float  # the same record, from its line to an event
    ingest_values_per_s: float  # CPU time, rollups included
    plain_values_per_s: float  # the yardstick: sqlite3 executemany into a bare table with rowid
    bytes_per_value: float  # the file, rollups and series included
    live_step_ms: float  # one step of 20 metrics, one transaction, CPU time
    list_ms: float  # newest 50 runs with two metrics each
    filter_ms: float  # a filter over every run
    curve_ms: float  # 500 points over the longest series
    curve_raw_ms: float  # the yardstick: the same from raw values
    ls_ms: float | None  # whole process, wall time; None when not asked for
    show_ms: float | None
    bare_ms: float | None  # python -c pass


def measure(folder: Path, *, runs: int, values: int, commands: bool = False) -> Report:
    """Fills a database and asks it."""
    wire_us = _wire_us(folder / "attempt")
    db = folder / "runs.db"
    with Store(db) as store:
        _make_runs(store, runs)
        rate = _fill(store, values)
        live_ms = _live_step_ms(store)
    plain = _plain_rate(folder / "plain.db", min(values, 1_000_000))
    _settle(db)
    with Reader(db) as reader:
        found = reader.runs(limit=50)
        list_ms = best_ms(lambda: reader.latest([run.id for run in reader.runs(limit=50)], NAMES[:2]))
        filter_ms = best_ms(lambda: reader.runs("status:failed branch:b1* metric_0>1 NOT tag:x"))
        curve_ms = best_ms(lambda: reader.curve(LONG, NAMES[0], buckets=500))
        raw_ms = best_ms(lambda: _raw_curve(reader), rounds=2)
        assert len(found) == min(50, runs)
    asked = _commands(db) if commands else (None, None, None)
    size = db.stat().st_size - _size_without_values(folder, runs)
    told = (rate, plain, size / values, live_ms, list_ms, filter_ms, curve_ms, raw_ms)
    return Report(runs, values, *wire_us, *told, *asked)


def _wire_us(attempt: Path) -> tuple[float, float]:
    """A thousand records at a time, so that milliseconds are microseconds a record."""
    reporter, values = Reporter(attempt), {name: math.sin(1.0) * 2.5 for name in NAMES}
    report_us = best_ms(lambda: [reporter.metrics(step, values) for step in range(1000)])
    line = (attempt / "events.rank0.jsonl").read_bytes().partition(b"\n")[0]
    return report_us, best_ms(lambda: [decode(line) for _ in range(1000)])


def _make_runs(store: Store, runs: int) -> None:
    """Rows as launches leave them; in one transaction, because their speed is not what is measured."""
    store.create_run(NewRun(LONG, "train", "long", "b0", "local", {Document.SPEC: "{}"}))
    store.new_attempt(LONG)
    connection = sqlite3.connect(store.path)
    rows = [
        (
            f"{number:04d}-run",
            f"recipe{number % 7}",
            f"b{number % 13}",
            f"host{number % 5}",
            _state(number),
            1e9 + number,
        )
        for number in range(1, runs)
    ]
    with connection:
        connection.executemany(
            "INSERT INTO runs (id, kind, recipe, branch, host, state, evidence, created_s, attempt, git_dirty, note, why)"
            " VALUES (?, 'train', ?, ?, ?, ?, 'exit status 0 and the final event', ?, 1, 0, '', '')",
            rows,
        )
        keys = connection.execute("SELECT key FROM runs WHERE id <> ?", (LONG,)).fetchall()
        connection.executemany(
            "INSERT INTO documents (run_key, name, text) VALUES (?, 'spec', ?)", [(key, SPEC) for (key,) in keys]
        )
        connection.executemany(
            "INSERT INTO attempts (run_key, number, state, evidence, created_s) VALUES (?, 1, 'failed', '', 0)", keys
        )
        connection.executemany(
            "INSERT INTO series (run_key, name, attempt, rank, num_values, num_nan, first_step, last_step, last_value, min_value, max_value)"
            " VALUES (?, ?, 1, 0, 1, 0, 1, 1, ?, 1, 2)",
            [(key, name, key % 17 / 7) for (key,) in keys for name in NAMES[:2]],
        )
    connection.close()


SPEC = '{"train": {"num_steps": 1000}, "text": "' + "x" * 3000 + '"}'


def _state(number: int) -> str:
    return (State.SUCCEEDED, State.FAILED, State.STOPPED)[number % 3]


def _fill(store: Store, values: int) -> float:
    """Values a second of CPU time, from decoded events to committed rows."""
    steps = values // len(NAMES)
    spent = 0.0
    for first in range(1, steps + 1, BATCH_STEPS):
        batch = _batch(first, min(first + BATCH_STEPS, steps + 1))
        with stopwatch() as took:
            store.ingest(batch)
        spent += took[0]
    return steps * len(NAMES) / spent


def _batch(first: int, end: int) -> StreamBatch:
    events = [
        Event(
            step,
            "metrics",
            1e9 + step,
            float(step),
            {"step": step, "values": {name: math.sin(step) * 2.5 for name in NAMES}},
        )
        for step in range(first, end)
    ]
    return StreamBatch(LONG, 1, "rank0", events, first, "1")


def _live_step_ms(store: Store) -> float:
    last = store.position(LONG, 1, "rank0").last_seq
    with stopwatch() as took:
        for step in range(last + 1, last + 101):
            store.ingest(_batch(step, step + 1))
    return took[0] * 10


def _plain_rate(path: Path, values: int) -> float:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE plain (name TEXT, step INTEGER, value REAL)")
    rows = [(NAMES[number % len(NAMES)], number // len(NAMES), number * 0.37) for number in range(values)]
    with stopwatch() as took, connection:
        connection.executemany("INSERT INTO plain VALUES (?, ?, ?)", rows)
    connection.close()
    return values / took[0]


def _settle(db: Path) -> None:
    connection = sqlite3.connect(db)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def _size_without_values(folder: Path, runs: int) -> int:
    """What the same runs weigh without metrics, so that only values are counted per value."""
    db = folder / "empty.db"
    migrate(db)
    with Store(db) as store:
        _make_runs(store, runs)
    _settle(db)
    return db.stat().st_size


def _raw_curve(reader: Reader) -> list[float]:
    values = reader.metric_values(LONG, NAMES[0])
    width = max(1, len(values) // 500)
    return [
        sum(value.value for value in values[start : start + width]) / width for start in range(0, len(values), width)
    ]


def _commands(db: Path) -> tuple[float, float, float]:
    environment = {**os.environ, "DRAFTYARD_DB": str(db)}

    def run(*argv: str) -> None:
        subprocess.run([sys.executable, *argv], env=environment, check=True, stdout=subprocess.DEVNULL)

    verb = ("-m", "orchestrator.cli")
    return (
        best_ms(lambda: run(*verb, "ls"), wall=True),
        best_ms(lambda: run(*verb, "show", LONG), wall=True),
        best_ms(lambda: run("-c", "pass"), wall=True),
    )


@contextmanager
def stopwatch() -> Iterator[list[float]]:
    """Seconds of this process's CPU time."""
    took = [0.0]
    began = time.process_time()
    yield took
    took[0] = time.process_time() - began


def best_ms(call: Callable[[], object], *, rounds: int = 5, wall: bool = False) -> float:
    """The fastest of several calls: what the machine does when nobody disturbs it."""
    clock = time.perf_counter if wall else time.process_time
    best = math.inf
    for _ in range(rounds):
        began = clock()
        call()
        best = min(best, clock() - began)
    return best * 1000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--values", type=int, default=10_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = measure(Path(folder), runs=options.runs, values=options.values, commands=True)
    for name, value in asdict(report).items():
        print(f"{name:24} {value:>16,.1f}" if isinstance(value, float) else f"{name:24} {value:>16,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
