"""Any curve in milliseconds: min, mean and max per bucket, from rollups where they are fine enough.

Raw values are never thinned; a rollup is used when it is at most twice as wide as a point, so a curve
over a million steps reads 4,000 rows instead of a million, and no curve of 500 points reads more than
64,000. With rollups the two ends of a chosen range reach to the next multiple of their width (two
pixels at most).
"""

from __future__ import annotations

import sqlite3

from orchestrator.store.rows import CurvePoint

ROLLUP_LEVELS = (256, 16_384)  # steps


def curve(connection: sqlite3.Connection, series_id: int, low: int, high: int, *, buckets: int) -> list[CurvePoint]:
    """Points of steps low..high, both included; empty buckets are left out."""
    if high < low or buckets < 1:
        return []
    width = (high - low + 1) / buckets
    level = max((level for level in ROLLUP_LEVELS if level <= 2 * width), default=1)
    sql = _FROM_RAW if level == 1 else _FROM_ROLLUP
    first, last = low // level, high // level
    values = {"series": series_id, "level": level, "low": low, "high": high, "first": first, "last": last}
    return [CurvePoint(*row) for row in connection.execute(sql, {**values, "points": buckets})]


_FROM_RAW = """
    SELECT min(step), max(step), min(value), avg(value), max(value), count(value), count(*) - count(value)
    FROM metrics WHERE series = :series AND step BETWEEN :low AND :high
    GROUP BY (step - :low) * :points / (:high - :low + 1) ORDER BY 1"""

_FROM_ROLLUP = """
    SELECT max(min(bucket) * :level, :low), min(max(bucket) * :level + :level - 1, :high),
        min(minimum), sum(total) / sum(num_values), max(maximum), sum(num_values), sum(num_nan)
    FROM rollups WHERE series = :series AND level = :level AND bucket BETWEEN :first AND :last
    GROUP BY (bucket - :first) * :points / (:last - :first + 1) ORDER BY 1"""
