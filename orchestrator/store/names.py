"""Names of metrics over all runs and on the wire. Asked when a person's word is in doubt, never on the way of a list."""

from __future__ import annotations

from orchestrator.store.reads import Reader
from remote.wire import METRIC_UNITS


def is_metric(reader: Reader, name: str) -> bool:
    """Whether the bundled trainer tells a metric of this name, or any run has told one."""
    return name in METRIC_UNITS or bool(
        reader.database.all("SELECT EXISTS (SELECT 1 FROM series WHERE name = ?)", (name,))[0][0]
    )


def metrics(reader: Reader) -> list[str]:
    """Every such name."""
    rows = reader.database.all("SELECT DISTINCT name FROM series ORDER BY name")
    return list(dict.fromkeys([*METRIC_UNITS, *(row[0] for row in rows)]))
