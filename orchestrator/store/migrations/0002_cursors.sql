-- How far somebody has read the events, such as the sender of alerts.
CREATE TABLE cursors (
    name TEXT PRIMARY KEY,
    event_id INTEGER NOT NULL
) WITHOUT ROWID;

-- Alerts and screens look for a few kinds among everything that happened.
CREATE INDEX events_by_kind ON events (kind, id);
