-- The schema's truth. Children name a run by its integer key; times are seconds since the epoch, UTC.

CREATE TABLE runs (
    key INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    recipe TEXT NOT NULL,
    branch TEXT NOT NULL,
    host TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN
        ('pending', 'setting_up', 'running', 'stopping', 'succeeded', 'failed', 'stopped', 'lost')),
    reason TEXT,
    evidence TEXT NOT NULL,
    created_s REAL NOT NULL,
    started_s REAL,
    ended_s REAL,
    attempt INTEGER NOT NULL,
    step INTEGER,
    num_steps INTEGER,
    stage TEXT,
    unreachable_since_s REAL,
    last_event_s REAL,
    workdir TEXT,
    tree_hash TEXT,
    git_commit TEXT,
    git_dirty INTEGER NOT NULL,
    fingerprint TEXT,
    parent_run TEXT,
    forced_reason TEXT,
    note TEXT NOT NULL,
    why TEXT NOT NULL,
    removed_s REAL
);
CREATE INDEX runs_by_created ON runs (created_s);
CREATE INDEX runs_live ON runs (state) WHERE state IN ('pending', 'setting_up', 'running', 'stopping');
CREATE INDEX runs_by_fingerprint ON runs (fingerprint) WHERE fingerprint IS NOT NULL;

-- Long texts of a run, apart from the row that every list reads: spec, plan, fingerprint, git_patch, launch.
CREATE TABLE documents (
    id INTEGER PRIMARY KEY,
    run_key INTEGER NOT NULL REFERENCES runs (key) ON DELETE CASCADE,
    name TEXT NOT NULL,
    text TEXT NOT NULL,
    UNIQUE (run_key, name)
);

CREATE TABLE tags (
    run_key INTEGER NOT NULL REFERENCES runs (key) ON DELETE CASCADE,
    tag TEXT NOT NULL,
    PRIMARY KEY (run_key, tag)
) WITHOUT ROWID;

CREATE TABLE attempts (
    run_key INTEGER NOT NULL REFERENCES runs (key) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    state TEXT NOT NULL,
    reason TEXT,
    evidence TEXT NOT NULL,
    created_s REAL NOT NULL,
    started_s REAL,
    ended_s REAL,
    first_mono_s REAL,
    last_mono_s REAL,
    first_step INTEGER,
    last_step INTEGER,
    exit_code INTEGER,
    signal INTEGER,
    pid INTEGER,
    boot_id TEXT,
    start_ticks INTEGER,
    last_event_s REAL,
    last_job_event_s REAL,
    last_step_s REAL,
    final_outcome TEXT,
    PRIMARY KEY (run_key, number)
) WITHOUT ROWID;

-- How far a file on the host has been read. `writer` is a name of events.<writer>.jsonl, or stdout, stderr.
-- `kept_bytes` is how much of a log lies in logs/<run>/<attempt>/ for that offset.
CREATE TABLE streams (
    run_key INTEGER NOT NULL REFERENCES runs (key) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    writer TEXT NOT NULL,
    identity TEXT NOT NULL,
    offset_bytes INTEGER NOT NULL,
    last_seq INTEGER NOT NULL,
    kept_bytes INTEGER NOT NULL,
    num_bad_lines INTEGER NOT NULL,
    num_unknown_events INTEGER NOT NULL,
    stopped_because TEXT,
    PRIMARY KEY (run_key, attempt, writer)
) WITHOUT ROWID;

-- Which byte of a log was there when: `logs --since`.
CREATE TABLE log_marks (
    run_key INTEGER NOT NULL REFERENCES runs (key) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    stream TEXT NOT NULL,
    at_s REAL NOT NULL,
    kept_bytes INTEGER NOT NULL,
    PRIMARY KEY (run_key, attempt, stream, at_s)
) WITHOUT ROWID;

-- One series per (run, attempt, name, rank): the key of metrics in four bytes instead of twenty.
CREATE TABLE series (
    id INTEGER PRIMARY KEY,
    run_key INTEGER NOT NULL REFERENCES runs (key) ON DELETE CASCADE,
    name TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    num_values INTEGER NOT NULL,
    num_nan INTEGER NOT NULL,
    first_step INTEGER,
    last_step INTEGER,
    last_value REAL,
    min_value REAL,
    max_value REAL,
    UNIQUE (run_key, name, attempt, rank)
);

-- NaN is NULL in a present row; infinities are native. No foreign key: `purge` deletes by series, and a check
-- per value would cost a lookup.
CREATE TABLE metrics (
    series INTEGER NOT NULL,
    step INTEGER NOT NULL,
    value REAL,
    PRIMARY KEY (series, step)
) WITHOUT ROWID;

-- level 256 and 16384: steps [bucket * level, (bucket + 1) * level), kept in the transaction of its values.
CREATE TABLE rollups (
    series INTEGER NOT NULL,
    level INTEGER NOT NULL,
    bucket INTEGER NOT NULL,
    minimum REAL,
    total REAL,
    maximum REAL,
    num_values INTEGER NOT NULL,
    num_nan INTEGER NOT NULL,
    PRIMARY KEY (series, level, bucket)
) WITHOUT ROWID;

CREATE TABLE memory_peaks (
    run_key INTEGER NOT NULL REFERENCES runs (key) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    stage TEXT NOT NULL,
    gpu INTEGER NOT NULL,
    allocated_bytes INTEGER,
    reserved_bytes INTEGER,
    driver_bytes INTEGER,
    at_s REAL NOT NULL,
    PRIMARY KEY (run_key, attempt, rank, stage, gpu)
) WITHOUT ROWID;

CREATE TABLE gpu_samples (
    run_key INTEGER NOT NULL REFERENCES runs (key) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    gpu INTEGER NOT NULL,
    at_s REAL NOT NULL,
    uuid TEXT,
    used_bytes INTEGER,
    total_bytes INTEGER,
    utilisation REAL,
    PRIMARY KEY (run_key, attempt, gpu, at_s)
) WITHOUT ROWID;

CREATE TABLE failures (
    id INTEGER PRIMARY KEY,
    run_key INTEGER NOT NULL REFERENCES runs (key) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    kind TEXT NOT NULL,
    message TEXT NOT NULL,
    hint TEXT NOT NULL,
    source TEXT NOT NULL,
    stage TEXT,
    step INTEGER,
    traceback TEXT NOT NULL,
    facts_json TEXT NOT NULL,
    at_s REAL,
    is_first_cause INTEGER NOT NULL,
    UNIQUE (run_key, attempt, source, kind, message)
);

CREATE TABLE checkpoints (
    run_key INTEGER NOT NULL REFERENCES runs (key) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    step INTEGER NOT NULL,
    path TEXT NOT NULL,
    size_bytes INTEGER,
    is_best INTEGER NOT NULL,
    at_s REAL NOT NULL,
    PRIMARY KEY (run_key, attempt, step)
) WITHOUT ROWID;

CREATE TABLE rungs (
    run_key INTEGER NOT NULL REFERENCES runs (key) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    rung TEXT NOT NULL,
    passed INTEGER NOT NULL,
    message TEXT NOT NULL,
    values_json TEXT NOT NULL,
    at_s REAL NOT NULL,
    PRIMARY KEY (run_key, attempt, rung)
) WITHOUT ROWID;

CREATE TABLE evaluations (
    id INTEGER PRIMARY KEY,
    run_key INTEGER NOT NULL REFERENCES runs (key) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    step INTEGER,
    protocol_json TEXT NOT NULL,
    values_json TEXT NOT NULL,
    at_s REAL NOT NULL
);
CREATE INDEX evaluations_by_run ON evaluations (run_key, attempt);

CREATE TABLE progress (
    run_key INTEGER NOT NULL REFERENCES runs (key) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    what TEXT NOT NULL,
    done REAL NOT NULL,
    total REAL,
    unit TEXT NOT NULL,
    at_s REAL NOT NULL,
    PRIMARY KEY (run_key, attempt, what)
) WITHOUT ROWID;

-- Starts, stages, notes, state changes, bad lines, unknown kinds; run_key is NULL for a launch the gate refused.
CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    run_key INTEGER REFERENCES runs (key) ON DELETE CASCADE,
    attempt INTEGER,
    writer TEXT NOT NULL,
    kind TEXT NOT NULL,
    text TEXT NOT NULL,
    fields_json TEXT NOT NULL,
    at_s REAL NOT NULL
);
CREATE INDEX events_by_run ON events (run_key, id);

CREATE TABLE hosts (
    name TEXT PRIMARY KEY,
    address TEXT NOT NULL,
    facts_json TEXT NOT NULL,
    seen_s REAL,
    unreachable_since_s REAL,
    error TEXT,
    clock_offset_s REAL
) WITHOUT ROWID;

CREATE TABLE intents (
    id INTEGER PRIMARY KEY,
    run_key INTEGER NOT NULL REFERENCES runs (key) ON DELETE CASCADE,
    kind TEXT NOT NULL CHECK (kind IN ('stop', 'retry')),
    grace_s REAL,
    asked_s REAL NOT NULL,
    done_s REAL,
    outcome TEXT
);
CREATE INDEX intents_open ON intents (run_key) WHERE done_s IS NULL;
