"""What is known, as frozen rows: SQL over the standard library's sqlite3.

Any number of readers may look while one follower writes. A reader never writes, never waits for the
network, and loads nothing heavy, so that `ls`, `show` and a screen's timer stay fast. The one connection is
`connection`'s, which run a word means is in `selection`, curves are in `curves`, the filter language in
`filter`, log bytes in `logs`. JSON columns are as Python writes them: NaN and Infinity are read back as such.
"""

from __future__ import annotations

import json
import math
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.store import curves, migrations, queries
from orchestrator.store.connection import ReadConnection
from orchestrator.store.logs import LogFolder
from orchestrator.store.position import StreamPosition, read_position
from orchestrator.store.rows import (
    AttemptRow,
    CheckpointRow,
    CurvePoint,
    Document,
    EvaluationRow,
    EventRow,
    EvidenceRow,
    FailureRow,
    GpuSampleRow,
    HostRow,
    IntentRow,
    MemoryPeakRow,
    MetricValue,
    NodeRow,
    ProgressRow,
    RunRow,
    SeriesRow,
    State,
    StreamRow,
)
from orchestrator.store.selection import condition, run_key, run_row
from orchestrator.units import is_told_newest

Row = TypeVar("Row")
SecretsOf = Callable[["Reader", str], Collection[str]]  # run id -> values


class Reader:
    """Reads of one database. Threads may share it until it gives way: then it is its own thread's alone."""

    def __init__(
        self, path: Path, *, busy_timeout_s: float = migrations.BUSY_TIMEOUT_S, secrets_of: SecretsOf | None = None
    ) -> None:
        """`secrets_of`: what is starred out in the logs of a run."""
        self.path = path
        self.logs = LogFolder(path.parent / "logs", *([partial(secrets_of, self)] if secrets_of else []))
        # A screen would rather miss a tick than wait for a database that is locked.
        self._database = ReadConnection(path, busy_timeout_s=busy_timeout_s)
        self._its_thread: int | None = None

    @property
    def database(self) -> ReadConnection:
        assert self._its_thread in (None, threading.get_ident()), "one that gives way is its own thread's alone"
        return self._database

    def give_way(self, stand: Callable[..., None], *, steps: int) -> None:
        """`stand` is called before each question, and every so many steps of one.

        SQLite calls it while it holds the connection: a second thread would wait for that with Python's lock in its hands, and both
        for ever. So this thread is the only one that may ask from now on.
        """
        self.database.stand_meanwhile(stand, steps=steps)
        self._its_thread = threading.get_ident()

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def data_version(self) -> int:
        """A number that changes when anybody else has committed; asking costs microseconds."""
        return self.database.data_version()

    # ---------------------------------------------------------------- runs

    def runs(
        self,
        where: str = "",
        *,
        kind: str | None = "train",
        sort: str = "created",
        limit: int | None = None,
        offset: int = 0,
        removed: bool = False,
    ) -> list[RunRow]:
        """Runs that pass the filter, newest (or largest) first; `-name` sorts the other way.

        `kind` None means every kind; a `kind:` in the filter does that by itself. `removed`: the bin. Raises FilterError.
        """
        chosen, values = condition(where, kind, removed=removed)
        order, order_values = queries.order_by(sort)
        sql = f"SELECT r.key FROM runs r WHERE {chosen} ORDER BY {order} LIMIT ? OFFSET ?"
        page = self.database.all(sql, (*values, *order_values, -1 if limit is None else limit, offset))
        keys = json.dumps([key for (key,) in page])
        return [run_of_row(row) for row in self.database.all(queries.RUNS_OF_PAGE, (keys,))]

    def count_runs(self, where: str = "", *, kind: str | None = "train", removed: bool = False) -> int:
        """How many runs `runs` would return without a limit."""
        chosen, values = condition(where, kind, removed=removed)
        return int(self.database.all(f"SELECT count(*) FROM runs r WHERE {chosen}", values)[0][0])

    def live_runs(self) -> list[RunRow]:
        """Every run of any kind that has not ended."""
        sql = f"SELECT {queries.RUN_COLUMNS} FROM runs r WHERE {queries.IS_LIVE} ORDER BY r.created_s"
        return [run_of_row(row) for row in self.database.all(sql)]

    def run(self, selector: str) -> RunRow:
        """By full id, unique prefix of four characters or more, @last or @failed. Raises RunNotFound."""
        return run_of_row(run_row(self.database, selector))

    def promised_gpus(self, host: str, *, but: str | None = None) -> dict[str, str]:
        """GPU (UUID or index) -> the live run that was promised it; `but`: a run whose own there do not count."""
        return queries.promised(self.database.all(queries.PROMISES), host, but)

    def gpus_by_host(self, run_id: str) -> dict[str, tuple[str, ...]]:
        """The GPUs that a run was given, by host."""
        launch = json.loads(self.document(run_id, Document.LAUNCH) or "{}")
        return queries.gpus_by_host(self.run(run_id).host, launch)

    def nodes(self, run_id: str) -> list[NodeRow]:
        """The hosts of a run over several, the first one included; none for a run on one host."""
        rows = self.database.all(queries.NODES, (self._key(run_id),))
        return [_build(NodeRow, row, run_id=run_id, end=json.loads(row["end"])) for row in rows]

    def document(self, run_id: str, name: Document) -> str | None:
        """A long text of the run, such as its spec."""
        rows = self.database.all("SELECT text FROM documents WHERE run_key = ? AND name = ?", (self._key(run_id), name))
        return str(rows[0][0]) if rows else None

    def hosts_file(self, run_id: str) -> Path | None:
        """The hosts.yaml that the run's hosts were found in, where that was kept."""
        kept = self.document(run_id, Document.HOSTS_FILE)
        return Path(kept) if kept else None

    def hosts_file_at(self, host: str) -> Path | None:
        """The same of what lives on that host, which is one machine while it does; with nothing alive, of the newest run."""
        for which in (queries.IS_LIVE, "true"):
            rows = self.database.all(queries.HOSTS_FILE_AT.format(condition=which), (host,))
            if rows:
                return Path(rows[0][0]) if rows[0][0] else None
        return None

    def attempts(self, run_id: str, number: int | None = None) -> list[AttemptRow]:
        """Oldest first; or the one of that number."""
        rows = self.database.all(queries.ATTEMPTS, (self._key(run_id), number))
        return [_build(AttemptRow, row, run_id=run_id, state=State(row["state"])) for row in rows]

    # ------------------------------------------------------------- metrics

    def metric_names(self, run_id: str) -> list[str]:
        rows = self.database.all(
            "SELECT DISTINCT name FROM series WHERE run_key = ? ORDER BY name", (self._key(run_id),)
        )
        return [row[0] for row in rows]

    def series(self, run_id: str, name: str | None = None) -> list[SeriesRow]:
        """One row per metric, attempt and rank, with its newest value and extremes; by name, newest attempt first."""
        sql = f"SELECT {queries.SERIES_COLUMNS} FROM series s JOIN runs r ON r.key = s.run_key WHERE s.run_key = ?"
        values: tuple[Any, ...] = (self._key(run_id),)
        if name is not None:
            sql, values = sql + " AND s.name = ?", (*values, name)
        return [_series(row) for row in self.database.all(sql + " ORDER BY s.name, s.attempt DESC, s.rank", values)]

    def series_before(self, row: SeriesRow, step: int) -> SeriesRow | None:
        """The series as if it had ended before that step, by its rollups; None where it begins there or later."""
        if row.last_step < step:
            return row
        if row.first_step >= step:
            return None
        values = {"series": self._series_id(row.run_id, row), "step": step, "level": curves.ROLLUP_LEVELS[0]}
        (summed,), (last,) = (self.database.all(sql, values) for sql in (queries.BEFORE_STEP, queries.LAST_BEFORE_STEP))
        return replace(row, **dict(summed), last_step=last["last_step"], last_value=_number(last["last_value"]))

    def latest(self, run_ids: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, SeriesRow]]:
        """run id -> metric name -> its series in the newest attempt and lowest rank; for the columns of a list."""
        found: dict[str, dict[str, SeriesRow]] = {run_id: {} for run_id in run_ids}
        for row in self.database.all(queries.LATEST, (json.dumps(list(run_ids)), json.dumps(list(names)))):
            found[row["run_id"]][row["name"]] = _series(row)
        return found

    def latest_gpu(self, run_ids: Sequence[str]) -> dict[str, list[GpuSampleRow]]:
        """run id -> newest sample of each of its GPUs."""
        found: dict[str, list[GpuSampleRow]] = {run_id: [] for run_id in run_ids}
        for row in self.database.all(queries.LATEST_GPU, (json.dumps(list(run_ids)),)):
            found[row["run_id"]].append(_build(GpuSampleRow, row))
        return found

    def metric_values(
        self, run_id: str, name: str, *, attempt: int | None = None, rank: int | None = None, last: int | None = None
    ) -> list[MetricValue]:
        """Raw values by attempt, step and rank; None means every attempt, every rank, all values.

        `last` leaves the newest that many, of the newest attempts.
        """
        limit = -1 if last is None else last
        values = [
            MetricValue(row.attempt, row.rank, step, _number(value))
            for row in self._chosen(run_id, name, attempt, rank)
            for step, value in self.database.all(queries.VALUES_BACKWARDS, (self._series_id(run_id, row), limit))
        ]
        values.sort(key=lambda value: (value.attempt, value.step, value.rank))
        return values if last is None else values[max(0, len(values) - last) :]

    def curve(
        self,
        run_id: str,
        name: str,
        *,
        buckets: int = 500,
        attempt: int | None = None,
        rank: int | None = None,
        first_step: int | None = None,
        last_step: int | None = None,
    ) -> list[CurvePoint]:
        """At most `buckets` points by step, from rollups where they are fine enough.

        None means the newest attempt that has the metric, its lowest rank, the whole range.
        """
        chosen = self._chosen(run_id, name, attempt, rank)
        if not chosen:
            return []
        series_id = self._series_id(run_id, chosen[0])
        low = chosen[0].first_step if first_step is None else max(first_step, chosen[0].first_step)
        high = chosen[0].last_step if last_step is None else min(last_step, chosen[0].last_step)
        with self.database.sqlite() as connection:
            return curves.curve(connection, series_id, low, high, buckets=buckets)

    # ------------------------------------------------- what else was told

    def memory_peaks(self, run_id: str) -> list[MemoryPeakRow]:
        return [
            _build(MemoryPeakRow, row, run_id=run_id)
            for row in self.database.all(queries.MEMORY_PEAKS, (self._key(run_id),))
        ]

    def gpu_samples(self, run_id: str, *, since_s: float = 0.0) -> list[GpuSampleRow]:
        rows = self.database.all(queries.GPU_SAMPLES, (self._key(run_id), since_s))
        return [_build(GpuSampleRow, row, run_id=run_id) for row in rows]

    def failures(self, run_id: str) -> list[FailureRow]:
        """Newest attempt first, in it the first cause first."""
        return [
            _build(
                FailureRow,
                row,
                run_id=run_id,
                facts=json.loads(row["facts"]),
                is_first_cause=bool(row["is_first_cause"]),
            )
            for row in self.database.all(queries.FAILURES, (self._key(run_id),))
        ]

    def checkpoints(self, run_id: str) -> list[CheckpointRow]:
        rows = self.database.all(queries.CHECKPOINTS, (self._key(run_id),))
        return [_build(CheckpointRow, row, run_id=run_id, is_best=bool(row["is_best"])) for row in rows]

    def evidence(
        self, *, fingerprint: str | None = None, recipe: str | None = None, run_id: str | None = None
    ) -> list[EvidenceRow]:
        """Rungs as they were reported, newest first, of runs that have this fingerprint, recipe or id."""
        return [_evidence(row) for row in self.database.all(queries.EVIDENCE, (fingerprint, recipe, run_id))]

    def evaluations(self, run_id: str) -> list[EvaluationRow]:
        return [
            _build(
                EvaluationRow,
                row,
                run_id=run_id,
                protocol=json.loads(row["protocol"]),
                values=_named(row["values"]),
            )
            for row in self.database.all(queries.EVALUATIONS, (self._key(run_id),))
        ]

    def progress(self, run_id: str) -> list[ProgressRow]:
        """Newest word first."""
        return [
            _build(ProgressRow, row, run_id=run_id) for row in self.database.all(queries.PROGRESS, (self._key(run_id),))
        ]

    def events(
        self,
        run_id: str | None = None,
        *,
        kinds: Iterable[str] = (),
        after_id: int = 0,
        limit: int | None = None,
    ) -> list[EventRow]:
        """Oldest first; with a limit, the newest that many. No run id: events of every run and of none."""
        wanted = list(kinds)
        sql = queries.EVENTS
        values: tuple[Any, ...] = (after_id, not wanted, json.dumps(wanted))
        if run_id is not None:
            sql, values = sql + " AND e.run_key = ?", (*values, self._key(run_id))
        rows = self.database.all(sql + " ORDER BY e.id DESC LIMIT ?", (*values, -1 if limit is None else limit))
        return [_build(EventRow, row, fields=json.loads(row["fields"])) for row in reversed(rows)]

    def hosts(self) -> list[HostRow]:
        return [_build(HostRow, row, facts=json.loads(row["facts"])) for row in self.database.all(queries.HOSTS)]

    def streams(self, run_id: str) -> list[StreamRow]:
        rows = self.database.all(queries.STREAMS, (self._key(run_id),))
        return [_build(StreamRow, row, run_id=run_id) for row in rows]

    def position(self, run_id: str, attempt: int, writer: str) -> StreamPosition:
        """How far a file of the attempt has been read; all zero for one never read."""
        with self.database.sqlite() as connection:
            return read_position(connection, self._key(run_id), attempt, writer)

    def cursor(self, name: str) -> int | None:
        rows = self.database.all("SELECT event_id FROM cursors WHERE name = ?", (name,))
        return int(rows[0][0]) if rows else None

    def intents(self, run_id: str | None = None, *, only_open: bool = True) -> list[IntentRow]:
        open_ones = {"which": "INDEXED BY intents_open", "condition": "i.done_s IS NULL"}
        sql = queries.INTENTS.format(**(open_ones if only_open else {"which": "", "condition": "1"}))
        return [_build(IntentRow, row) for row in self.database.all(sql, (run_id,))]

    def log_offset(self, run_id: str, attempt: int, stream: str, *, since_s: float) -> int:
        """The byte of stdout or stderr from which everything arrived at or after `since_s`."""
        return int(self.database.all(queries.LOG_OFFSET, (self._key(run_id), attempt, stream, since_s))[0][0] or 0)

    # --------------------------------------------------------------- inner

    def _key(self, run_id: str) -> int:
        return run_key(self.database, run_id)

    def _chosen(self, run_id: str, name: str, attempt: int | None, rank: int | None) -> list[SeriesRow]:
        return [
            row
            for row in self.series(run_id, name)
            if (attempt is None or row.attempt == attempt) and (rank is None or row.rank == rank)
        ]

    def _series_id(self, run_id: str, row: SeriesRow) -> int:
        sql = "SELECT id FROM series WHERE run_key = ? AND name = ? AND attempt = ? AND rank = ?"
        return int(self.database.all(sql, (self._key(run_id), row.name, row.attempt, row.rank))[0][0])


def _build(kind: type[Row], row: sqlite3.Row, **changes: Any) -> Row:
    """The columns of a query are named after the fields of its row."""
    return kind(**{**dict(row), **changes})


def run_of_row(row: sqlite3.Row) -> RunRow:
    return ended_run(row) if State(row["state"]).is_final else _run(row)


def _run(row: sqlite3.Row) -> RunRow:
    tags = tuple(sorted(row["tags"].split("\x1f"))) if row["tags"] else ()
    more = tuple(row["more_hosts"].split("\x1f")) if row["more_hosts"] else ()
    git_dirty = bool(row["git_dirty"])
    return _build(RunRow, row, state=State(row["state"]), git_dirty=git_dirty, tags=tags, more_hosts=more)


ended_run = lru_cache(4096)(_run)  # read again at any news. Live ones are others at each word: 10 MB of two minutes


def _series(row: sqlite3.Row) -> SeriesRow:
    last, mean = _number(row["last_value"]), _number(row["recent_mean"])
    return _build(SeriesRow, row, last_value=last, recent_mean=last if is_told_newest(row["name"]) else mean)


def _evidence(row: sqlite3.Row) -> EvidenceRow:
    return _build(
        EvidenceRow,
        row,
        passed=bool(row["passed"]),
        values=_named(row["values"]),
        fingerprint_parts=json.loads(row["fingerprint_parts"]),
    )


def _named(text: str) -> dict[str, Any]:
    """An object; what an older version took for one is an empty one."""
    found = json.loads(text)
    return found if isinstance(found, dict) else {}


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
