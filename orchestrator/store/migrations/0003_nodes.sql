-- The hosts of a run over several, the first one included; a run on one host has no row here.
CREATE TABLE nodes (
    run_key INTEGER NOT NULL REFERENCES runs (key) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    host TEXT NOT NULL,
    workdir TEXT,
    unreachable_since_s REAL,
    ended_attempt INTEGER,
    end_json TEXT,
    PRIMARY KEY (run_key, number)
) WITHOUT ROWID;
CREATE INDEX nodes_by_host ON nodes (host);
