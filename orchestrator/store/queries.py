"""The texts of what `reads` asks. Columns are named after the fields of the rows they fill."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orchestrator.errors import UsageError
from orchestrator.store.rows import NUM_REPORTS
from orchestrator.units import is_told_newest

RUN_COLUMNS = (
    "r.id, r.kind, r.recipe, r.branch, r.host, r.state, r.reason, r.evidence, r.created_s, r.started_s, r.ended_s,"
    " r.attempt, r.step, r.num_steps, r.stage, r.unreachable_since_s, r.last_event_s, r.workdir, r.tree_hash,"
    " r.git_commit, r.git_dirty, r.fingerprint, r.parent_run, r.forced_reason,"
    " (SELECT group_concat(tag, char(31)) FROM tags WHERE run_key = r.key) AS tags, r.note, r.why, r.removed_s,"
    " (SELECT group_concat(host, char(31)) FROM (SELECT host FROM nodes WHERE run_key = r.key AND number > 0"
    " ORDER BY number)) AS more_hosts"
)

# By their keys, in that order: whoever sorts all runs would else read every column of each, tags and hosts too. Apart from
# the sorting, as SQLite's parser has room for few brackets, and a filter brings its own.
RUNS_OF_PAGE = f"SELECT {RUN_COLUMNS} FROM json_each(?) page CROSS JOIN runs r ON r.key = page.value ORDER BY page.key"

IS_LIVE = "r.state IN ('pending', 'setting_up', 'running', 'stopping')"

NEWEST = """
    SELECT key FROM runs WHERE removed_s IS NULL AND {condition}
    ORDER BY kind = 'train' DESC, (attempt > 0 OR {is_live}) DESC, created_s DESC, key DESC LIMIT 1"""

_STARTED = "coalesce(r.started_s, r.created_s)"  # as the column of that name tells it
SORTS = {
    "created": "r.created_s",
    "started": _STARTED,
    "ended": "r.ended_s",
    "recipe": "r.recipe",
    "branch": "r.branch",
    "host": "r.host",
    "status": "r.state",
    "step": "r.step",
    "newest": f"iif({IS_LIVE}, 1e12, 0) + {_STARTED}",  # live ones first: beyond the seconds of any clock
}  # any other word sorts by the recent mean of that metric


NO_STEP = 2**62  # behind every step


def _reports(key: str, name: str) -> str:
    """SQL for a metric's values over a run's history, newest first: of each attempt, its lowest rank, what no newer one did
    anew. In the order of two indices, so that a LIMIT reads no further, however long the run is.

    An attempt of before its first step was that of all ranks tells none where rank 0 reported nothing: so the metric's own
    first step is asked as well. Both in one bound: SQLite would ask a second one again for each value. No deeper than this: its parser has room for few
    brackets, and a filter brings its own.
    """
    return f"""SELECT m.value FROM series o CROSS JOIN metrics m ON m.series = o.id WHERE o.run_key = {key} AND o.name = {name}
        AND o.rank = (SELECT min(rank) FROM series WHERE run_key = o.run_key AND name = o.name AND attempt = o.attempt)
        AND m.step < min((SELECT ifnull(min(first_step), {NO_STEP}) FROM attempts WHERE run_key = o.run_key AND number > o.attempt),
            (SELECT ifnull(min(first_step), {NO_STEP}) FROM series
                WHERE run_key = o.run_key AND name = o.name AND attempt > o.attempt))
        ORDER BY o.attempt DESC, o.rank DESC, m.step DESC LIMIT"""


def recent_mean(key: str, name: str, num_reports: int = NUM_REPORTS) -> str:
    """SQL for the mean of a metric's newest reports; NULL where the newest is NaN, which is to be seen.

    Whether it is stands outside: as a condition of the mean it would be asked again for each of its values.
    """
    newest = _reports(key, name)
    return f"iif(({newest} 1) IS NULL, NULL, (SELECT avg(value) FROM ({newest} {num_reports})))"


SERIES_COLUMNS = (
    "r.id AS run_id, s.attempt, s.rank, s.name, s.num_values, s.num_nan, s.first_step, s.last_step, s.last_value,"
    f" s.min_value, s.max_value, {recent_mean('s.run_key', 's.name')} AS recent_mean"
)

_RUN_MEAN, _RUN_NEWEST = recent_mean("r.key", "?"), recent_mean("r.key", "?", num_reports=1)
HAS_REPORT = f"EXISTS ({_reports('r.key', '?')} 1)"  # bound once


def run_mean(name: str) -> str:
    """SQL for what lists tell of the metric of the run `r`; the name is bound twice."""
    return _RUN_NEWEST if is_told_newest(name) else _RUN_MEAN


ATTEMPTS = """
    SELECT number, state, reason, evidence, created_s, started_s, ended_s, last_mono_s - first_mono_s AS duration_s,
        first_step, last_step, exit_code, signal, pid, boot_id, start_ticks, last_event_s, last_job_event_s, last_step_s,
        final_outcome,
        (SELECT coalesce(sum(num_bad_lines), 0) FROM streams s
            WHERE s.run_key = a.run_key AND s.attempt = a.number) AS num_bad_lines,
        (SELECT coalesce(sum(num_unknown_events), 0) FROM streams s
            WHERE s.run_key = a.run_key AND s.attempt = a.number) AS num_unknown_events
    FROM attempts a WHERE run_key = ?1 AND (?2 IS NULL OR number = ?2) ORDER BY number"""

# What live runs were promised at their launch.
PROMISES = f"""
    SELECT r.id, r.host, d.text FROM runs r JOIN documents d ON d.run_key = r.key AND d.name = 'launch'
    WHERE {IS_LIVE}"""

NODES = """
    SELECT number, host, workdir, unreachable_since_s, ended_attempt, coalesce(end_json, '{}') AS end FROM nodes
    WHERE run_key = ? ORDER BY number"""

# Of the newest run that has to do with a host. Not by way of the documents, which are large; nor by sorting all runs.
HOSTS_FILE_AT = """
    SELECT (SELECT text FROM documents WHERE run_key = r.key AND name = 'hosts_file') FROM runs r
    WHERE {condition} AND (r.host = ?1 OR EXISTS (SELECT 1 FROM nodes n WHERE n.run_key = r.key AND n.host = ?1))
    ORDER BY r.created_s DESC LIMIT 1"""

MEMORY_PEAKS = """
    SELECT attempt, rank, stage, nullif(gpu, -1) AS gpu, allocated_bytes, reserved_bytes, driver_bytes, at_s
    FROM memory_peaks WHERE run_key = ? ORDER BY attempt, at_s, rank, gpu"""

GPU_SAMPLES = """
    SELECT attempt, gpu, uuid, at_s, used_bytes, total_bytes, utilisation FROM gpu_samples
    WHERE run_key = ? AND at_s >= ? ORDER BY at_s, gpu"""

FAILURES = """
    SELECT attempt, kind, message, hint, source, stage, step, traceback, facts_json AS facts, at_s, is_first_cause
    FROM failures WHERE run_key = ? ORDER BY attempt DESC, is_first_cause DESC, id"""

# Relative to the run's folder, also where an older reporter told a path from the root.
CHECKPOINTS = """
    SELECT attempt, c.step, iif(instr(path, root) = 1, substr(path, length(root) + 1), path) AS path, size_bytes, is_best, at_s
    FROM checkpoints c JOIN (SELECT key, coalesce(workdir, '') || '/runs/' || id || '/' AS root FROM runs) ON key = run_key
    WHERE run_key = ? ORDER BY attempt, c.step"""

EVIDENCE = """
    SELECT r.id AS run_id, e.attempt, e.rung, e.passed, e.message, e.values_json AS "values", e.at_s, r.fingerprint,
        coalesce((SELECT text FROM documents WHERE run_key = r.key AND name = 'fingerprint'), '{}')
            AS fingerprint_parts,
        r.recipe, r.branch, r.host
    FROM rungs e JOIN runs r ON r.key = e.run_key
    WHERE r.removed_s IS NULL AND (?1 IS NULL OR r.fingerprint = ?1) AND (?2 IS NULL OR r.recipe = ?2)
        AND (?3 IS NULL OR r.id = ?3)
    ORDER BY e.at_s DESC"""

EVALUATIONS = """
    SELECT attempt, step, protocol_json AS protocol, values_json AS "values", at_s FROM evaluations
    WHERE run_key = ? ORDER BY attempt, id"""

STREAMS = """
    SELECT attempt, writer, offset_bytes, last_seq, num_bad_lines, num_unknown_events, stopped_because
    FROM streams WHERE run_key = ? AND NOT (writer GLOB 'std???' OR writer GLOB 'std???.*') ORDER BY attempt, writer"""

INTENTS = """
    SELECT i.id, r.id AS run_id, i.kind, i.grace_s, i.asked_s, i.done_s, i.outcome
    FROM intents i {which} JOIN runs r ON r.key = i.run_key
    WHERE (?1 IS NULL OR r.id = ?1) AND {condition} ORDER BY i.id"""

LOG_OFFSET = """
    SELECT max(kept_bytes) FROM log_marks
    WHERE run_key = ? AND attempt = ? AND stream = ? AND at_s < ?"""

HOSTS = """
    SELECT name, address, facts_json AS facts, seen_s, unreachable_since_s, error, clock_offset_s
    FROM hosts ORDER BY name"""

PROGRESS = """
    SELECT attempt, what, done, total, unit, at_s FROM progress WHERE run_key = ? ORDER BY at_s DESC"""

EVENTS = """
    SELECT e.id, r.id AS run_id, e.attempt, e.writer, e.kind, e.text, e.fields_json AS fields, e.at_s
    FROM events e LEFT JOIN runs r ON r.key = e.run_key
    WHERE e.id > ? AND (? OR e.kind IN (SELECT value FROM json_each(?)))"""

# Newest sample of every GPU of the runs asked for, in their newest attempt.
LATEST_GPU = """
    SELECT r.id AS run_id, g.attempt, g.gpu, g.uuid, max(g.at_s) AS at_s, g.used_bytes, g.total_bytes, g.utilisation
    FROM runs r CROSS JOIN gpu_samples g ON g.run_key = r.key AND g.attempt = r.attempt
    WHERE r.id IN (SELECT value FROM json_each(?)) GROUP BY r.key, g.gpu ORDER BY r.key, g.gpu"""

LATEST = f"""
    SELECT {SERIES_COLUMNS} FROM runs r CROSS JOIN series s ON s.run_key = r.key
    WHERE r.id IN (SELECT value FROM json_each(?)) AND s.name IN (SELECT value FROM json_each(?))
        AND EXISTS ({_reports("s.run_key", "s.name")} 1)
    ORDER BY s.attempt, s.rank DESC"""

# Values of a series before a step: whole buckets of the finest rollup, and the few raw values behind them.
BEFORE_STEP = """
    SELECT sum(num_values) + sum(num_nan) AS num_values, sum(num_nan) AS num_nan,
        min(minimum) AS min_value, max(maximum) AS max_value
    FROM (SELECT minimum, maximum, num_values, num_nan FROM rollups
            WHERE series = :series AND level = :level AND bucket < :step / :level
        UNION ALL SELECT value, value, value IS NOT NULL, value IS NULL FROM metrics
            WHERE series = :series AND step >= :step / :level * :level AND step < :step)"""

LAST_BEFORE_STEP = """
    SELECT step AS last_step, value AS last_value FROM metrics
    WHERE series = :series AND step < :step ORDER BY step DESC LIMIT 1"""

VALUES_BACKWARDS = """
    SELECT step, value FROM metrics WHERE series = ? ORDER BY step DESC LIMIT ?"""


def promised(rows: Iterable[Sequence[str]], host: str, but: str | None) -> dict[str, str]:
    """Rows of PROMISES -> GPU: run id. An index means something on its own host alone, a UUID everywhere: so of the run
    `but` only what it has on that very host is left out, should two of its hosts be one machine.
    """
    return {
        gpu: run_id
        for run_id, first, text in rows
        for on, gpus in gpus_by_host(first, json.loads(text)).items()
        for gpu in gpus
        if (run_id != but if on == host else not gpu.isdigit())
    }


def gpus_by_host(first: str, launch: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """What a launch document says of GPUs: those of the first host, and of each further one under its name."""
    more = launch.get("more_gpus") or {}
    return {first: tuple(launch.get("gpus") or ())} | {on: tuple(gpus) for on, gpus in more.items()}


def order_by(sort: str) -> tuple[str, tuple[Any, ...]]:
    """ORDER BY and its parameters for a word of SORTS or a metric; a leading `-` turns it round. Raises UsageError."""
    name, direction = (sort[1:], "ASC") if sort.startswith("-") else (sort, "DESC")
    if not name:
        raise UsageError(f"sort {sort!r}: a name is due; known are {', '.join(SORTS)} and every metric")
    if name in SORTS:
        return f"{SORTS[name]} {direction} NULLS LAST, r.key {direction}", ()
    return f"{run_mean(name)} {direction} NULLS LAST, r.key DESC", (name, name)
