"""Events of one stream into rows: written in the caller's one transaction.

The promise: rows, offset and the stream's last seq are committed together, and an event whose seq is
not above the stream's high-water mark is skipped; reading bytes twice changes nothing. Bad lines are
counted and kept as events, so are records that never arrived; an unknown kind is counted and its
first example kept. It decides no state: what a first event proves, `run_states` says in the same transaction.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.redact import redact
from orchestrator.store.event_rows import BadLine, TypedRows, json_text, typed_rows
from orchestrator.store.metrics import store_points
from orchestrator.store.position import StreamPosition, read_position
from orchestrator.store.rows import MOST_GPUS
from remote.wire import Event

MARK_EVERY_S = 5.0  # `logs --since` is as fine as this
SUPERVISOR = "supervisor"  # the one writer that is not the job itself; of a run over several hosts supervisor1, ... too


@dataclass(frozen=True)
class StreamBatch:
    """What one read of one events file gave."""

    run_id: str
    attempt: int
    writer: str
    events: Sequence[Event]
    offset_bytes: int  # where the next read starts
    identity: str  # of the file on the host
    bad_lines: Sequence[BadLine] = ()
    stopped_because: str | None = None
    clock_offset_s: float = 0.0  # the writer's clock minus this machine's; every time kept is this machine's


@dataclass(frozen=True)
class Ingested:
    num_events: int
    kinds: frozenset[str]  # of the new events


def apply_batch(connection: sqlite3.Connection, run_key: int, batch: StreamBatch) -> Ingested:
    """Writes everything new in `batch`; the caller's transaction makes it one step."""
    position = read_position(connection, run_key, batch.attempt, batch.writer)
    fresh, last_seq, gaps = _unseen(batch.events, position.last_seq)
    if batch.clock_offset_s:
        fresh = [replace(event, wall_s=event.wall_s - batch.clock_offset_s) for event in fresh]
    rows = typed_rows(fresh, rank_of(batch.writer), batch.run_id)
    rows.gpu = [(gpu + MOST_GPUS * node_of(batch.writer), *rest) for gpu, *rest in rows.gpu]
    rows.bad += batch.bad_lines
    place = (run_key, batch.attempt)
    _write(connection, place, batch.writer, rows, gaps)
    _advance_attempt(connection, place, batch.writer, fresh, rows)
    _advance_stream(connection, place, batch, last_seq, (len(rows.bad), len(rows.unknown)))
    return Ingested(len(fresh), frozenset(event.kind for event in fresh))


def rank_of(writer: str) -> int:
    """rank3 -> 3; any other writer speaks for rank 0."""
    digits = writer.removeprefix("rank")
    return int(digits) if writer.startswith("rank") and re.fullmatch(r"[0-9]{1,6}", digits) else 0


def is_supervisor(writer: str) -> bool:
    return re.fullmatch(rf"{SUPERVISOR}[0-9]*", writer) is not None


def node_of(writer: str) -> int:
    """The host that a supervisor speaks of: 0 for the first, and for every writer of a job."""
    return int(writer.removeprefix(SUPERVISOR) or 0) if is_supervisor(writer) else 0


def _unseen(events: Sequence[Event], last_seq: int) -> tuple[list[Event], int, list[tuple[int, int]]]:
    """Events above the mark in their order, the new mark, and the seqs that never came."""
    fresh, gaps = [], []
    for event in events:
        if event.seq <= last_seq:
            continue
        if event.seq > last_seq + 1:
            gaps.append((last_seq + 1, event.seq - 1))
        fresh.append(event)
        last_seq = event.seq
    return fresh, last_seq, gaps


# ------------------------------------------------------------------------- rows into tables

_LARGER = "max(coalesce({0}, excluded.{0}), coalesce(excluded.{0}, {0}))"

_UPSERTS = {
    "memory": "INSERT INTO memory_peaks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
    " ON CONFLICT (run_key, attempt, rank, stage, gpu) DO UPDATE SET at_s = excluded.at_s, "
    + ", ".join(f"{name} = {_LARGER.format(name)}" for name in ("allocated_bytes", "reserved_bytes", "driver_bytes")),
    "gpu": "INSERT OR REPLACE INTO gpu_samples (run_key, attempt, gpu, at_s, uuid, used_bytes, total_bytes, utilisation)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
    "rungs": "INSERT OR REPLACE INTO rungs VALUES (?, ?, ?, ?, ?, ?, ?)",
    "checkpoints": "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?)",
    "evaluations": "INSERT INTO evaluations (run_key, attempt, step, protocol_json, values_json, at_s)"
    " VALUES (?, ?, ?, ?, ?, ?)",
    "progress": "INSERT OR REPLACE INTO progress VALUES (?, ?, ?, ?, ?, ?, ?)",
}

_EVENT = """
    INSERT INTO events (run_key, attempt, writer, kind, text, fields_json, at_s) VALUES (?, ?, ?, ?, ?, ?, ?)"""


def _write(
    connection: sqlite3.Connection,
    place: tuple[int, int],
    writer: str,
    rows: TypedRows,
    gaps: Sequence[tuple[int, int]],
) -> None:
    if rows.points:
        store_points(connection, (*place, rank_of(writer)), rows.points)
    gone = [(place[0], path) for path in rows.removed_checkpoints]
    connection.executemany("DELETE FROM checkpoints WHERE run_key = ? AND path = ?", gone)
    for table, sql in _UPSERTS.items():
        gathered: list[tuple[Any, ...]] = getattr(rows, table)
        connection.executemany(sql, [(*place, *row) for row in gathered])
    best = [row[0] for row in rows.checkpoints if row[3]]
    if best:  # one is the best of the whole run, the one named last
        values = (place[1], best[-1], place[0])
        connection.execute("UPDATE checkpoints SET is_best = (attempt = ? AND step = ?) WHERE run_key = ?", values)
    connection.executemany(_EVENT, [(*place, writer, *row) for row in rows.events])
    _write_oddities(connection, place, writer, rows, gaps)


def _write_oddities(
    connection: sqlite3.Connection,
    place: tuple[int, int],
    writer: str,
    rows: TypedRows,
    gaps: Sequence[tuple[int, int]],
) -> None:
    at_s = _clock(connection)
    for line in rows.bad:
        text = f"bad line at byte {line.offset_bytes}: {line.reason}" if line.offset_bytes else line.reason
        fields = {"offset_bytes": line.offset_bytes, "excerpt": redact(line.excerpt)}
        connection.execute(_EVENT, (*place, writer, "bad_line", text, json_text(fields), at_s))
    for first, last in gaps:
        text = f"records {first} to {last} of {writer} never arrived"
        connection.execute(_EVENT, (*place, writer, "gap", text, json_text({"first": first, "last": last}), at_s))
    for _, text, fields_json, wall_s in rows.unknown:
        sql = "SELECT 1 FROM events WHERE run_key = ? AND attempt = ? AND kind = 'unknown' AND writer = ? AND text = ?"
        if connection.execute(sql, (*place, writer, text)).fetchone() is None:
            connection.execute(_EVENT, (*place, writer, "unknown", text, fields_json, wall_s))


def _clock(connection: sqlite3.Connection) -> float:
    return float(connection.execute("SELECT (julianday('now') - 2440587.5) * 86400.0").fetchone()[0])


def _advance_attempt(
    connection: sqlite3.Connection, place: tuple[int, int], writer: str, events: Sequence[Event], rows: TypedRows
) -> None:
    if not events:
        return
    first_s, last_s = events[0].wall_s, events[-1].wall_s
    mono = (events[0].monotonic_s, events[-1].monotonic_s)
    # Rank 0 says how far the run is: one that runs the target is ahead of the steps, by what its queue holds. Where an
    # attempt begins, and so what it does anew, any of them says.
    told = rows.steps if rank_of(writer) == 0 else []
    steps = [step for step, _ in told]
    values = {
        "key": place[0],
        "attempt": place[1],
        "first_s": first_s,
        "begun_s": first_s if writer == SUPERVISOR and events[0].seq <= 1 else None,
        "last_s": last_s,
        "last_job_s": None if is_supervisor(writer) else last_s,
        "first_mono_s": mono[0],
        "last_mono_s": mono[1],
        "first_step": min((step for step, _ in rows.steps), default=None),
        "last_step": max(steps, default=None),
        "last_step_s": max(told)[1] if told else None,
        "stage": rows.stage if rank_of(writer) == 0 else None,
        "outcome": rows.outcome,
        "num_steps": rows.num_steps,
    }
    connection.execute(_ATTEMPT, values)
    connection.execute(_RUN, values)


_EARLIER = "min(coalesce({0}, :{1}), coalesce(:{1}, {0}))"
_LATER = "max(coalesce({0}, :{1}), coalesce(:{1}, {0}))"

_ATTEMPT = f"""
    UPDATE attempts SET
        started_s = coalesce(:begun_s, started_s, :first_s),
        last_event_s = {_LATER.format("last_event_s", "last_s")},
        last_job_event_s = {_LATER.format("last_job_event_s", "last_job_s")},
        first_mono_s = {_EARLIER.format("first_mono_s", "first_mono_s")},
        last_mono_s = {_LATER.format("last_mono_s", "last_mono_s")},
        last_step_s = CASE WHEN :last_step IS NOT NULL AND :last_step >= coalesce(last_step, -1)
            THEN :last_step_s ELSE last_step_s END,
        first_step = {_EARLIER.format("first_step", "first_step")},
        last_step = {_LATER.format("last_step", "last_step")},
        final_outcome = coalesce(:outcome, final_outcome)
    WHERE run_key = :key AND number = :attempt"""

_RUN = f"""
    UPDATE runs SET
        started_s = coalesce(:begun_s, started_s, :first_s),
        last_event_s = {_LATER.format("last_event_s", "last_s")},
        step = coalesce((SELECT last_step FROM attempts WHERE run_key = :key AND number = :attempt), step),
        stage = coalesce(:stage, stage),
        num_steps = CASE WHEN kind = 'train' THEN coalesce(:num_steps, num_steps) ELSE num_steps END
    WHERE key = :key AND attempt = :attempt"""


def _advance_stream(
    connection: sqlite3.Connection, place: tuple[int, int], batch: StreamBatch, last_seq: int, oddities: tuple[int, int]
) -> None:
    sql = """
        INSERT INTO streams VALUES (?, ?, ?, ?, ?, ?, 0, ?, ?, ?)
        ON CONFLICT (run_key, attempt, writer) DO UPDATE SET identity = excluded.identity,
            offset_bytes = excluded.offset_bytes, last_seq = excluded.last_seq,
            num_bad_lines = num_bad_lines + excluded.num_bad_lines,
            num_unknown_events = num_unknown_events + excluded.num_unknown_events,
            stopped_because = excluded.stopped_because"""
    values = (batch.writer, batch.identity, batch.offset_bytes, last_seq, *oddities, batch.stopped_because)
    connection.execute(sql, (*place, *values))


def advance_log(
    connection: sqlite3.Connection, place: tuple[int, int, str], position: StreamPosition, *, at_s: float
) -> None:
    """How far stdout or stderr has been kept, and when the newest byte was there."""
    sql = """
        INSERT INTO streams VALUES (?, ?, ?, ?, ?, 0, ?, 0, 0, NULL)
        ON CONFLICT (run_key, attempt, writer) DO UPDATE SET identity = excluded.identity,
            offset_bytes = excluded.offset_bytes, kept_bytes = excluded.kept_bytes"""
    connection.execute(sql, (*place, position.identity, position.offset_bytes, position.kept_bytes))
    mark = """
        INSERT OR REPLACE INTO log_marks SELECT ?1, ?2, ?3, ?4, ?5 WHERE NOT EXISTS
            (SELECT 1 FROM log_marks WHERE run_key = ?1 AND attempt = ?2 AND stream = ?3 AND at_s > ?4 - ?6)"""
    connection.execute(mark, (*place, at_s, position.kept_bytes, MARK_EVERY_S))
