"""Metric values in bulk: raw rows, their rollups and their series, in the caller's transaction.

A few new values behind the last one are added to their rollups; anything else (many values, or one
that is told again and replaces the old) has its buckets computed anew from the raw rows.
Standard library's sqlite3 alone; this is the hot path.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Mapping
from itertools import groupby

from orchestrator.store.curves import ROLLUP_LEVELS

LARGEST_STEP = 2**53  # what JSON numbers carry exactly
FEW = 32  # values of a series in one batch that are cheaper to add up here than to compute again in SQL

Points = Mapping[str, dict[int, float]]  # metric name -> step -> value


def store_points(connection: sqlite3.Connection, place: tuple[int, int, int], points: Points) -> None:
    """Writes points of one (run key, attempt, rank); the newest of equal (name, step) wins."""
    added: dict[int, dict[int, float]] = {}
    touched: dict[int, dict[int, float]] = {}
    for name, values in sorted(points.items()):
        if values:
            series, last_step = _series(connection, place, name)
            is_short_tail = len(values) <= FEW and (last_step is None or min(values) > last_step)
            (added if is_short_tail else touched)[series] = values
    # In the order of the key, a page after the other. SQLite itself makes NULL of NaN.
    rows = [
        (series, step, value)
        for series, values in sorted((added | touched).items())
        for step, value in sorted(values.items())
    ]
    connection.executemany("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?)", rows)
    _add_up(connection, added)
    _roll_up(connection, touched)


def flatten(name: str, value: object) -> Iterable[tuple[str, float]]:
    """A number under its name, a list as name_1 .. name_n. Raises ValueError or TypeError for anything else."""
    if isinstance(value, list):
        for index, item in enumerate(value, start=1):
            yield f"{name}_{index}", _number(name, item)
    else:
        yield name, _number(name, value)


def _number(name: str, value: object) -> float:
    if value is None:
        return math.nan
    if isinstance(value, (int, float)):
        return float(value)
    raise ValueError(f"metric {name!r} is {value!r}; it must be a number or a list of numbers")


def _series(connection: sqlite3.Connection, place: tuple[int, int, int], name: str) -> tuple[int, int | None]:
    """Its id and its last step."""
    sql = "SELECT id, last_step FROM series WHERE run_key = ? AND attempt = ? AND rank = ? AND name = ?"
    found: tuple[int, int | None] | None = connection.execute(sql, (*place, name)).fetchone()
    if found is None:
        sql = "INSERT INTO series (run_key, attempt, rank, name, num_values, num_nan) VALUES (?, ?, ?, ?, 0, 0)"
        return int(connection.execute(sql, (*place, name)).lastrowid or 0), None
    return found


_FINE, _COARSE = ROLLUP_LEVELS

_FROM_RAW = f"""
    INSERT OR REPLACE INTO rollups
    SELECT series, {_FINE}, step / {_FINE}, min(value), sum(value), max(value), count(value), count(*) - count(value)
    FROM metrics WHERE series = ? AND step BETWEEN ? AND ? GROUP BY step / {_FINE}"""

_FROM_FINE = f"""
    INSERT OR REPLACE INTO rollups
    SELECT series, {_COARSE}, bucket / {_COARSE // _FINE}, min(minimum), sum(total), max(maximum),
        sum(num_values), sum(num_nan)
    FROM rollups WHERE series = ? AND level = {_FINE} AND bucket BETWEEN ? AND ?
    GROUP BY bucket / {_COARSE // _FINE}"""

_SUMMARY = f"""
    UPDATE series SET
        (num_values, num_nan, min_value, max_value) =
            (SELECT sum(num_values) + sum(num_nan), sum(num_nan), min(minimum), max(maximum)
                FROM rollups WHERE series = id AND level = {_COARSE}),
        (first_step) = (SELECT min(step) FROM metrics WHERE series = id),
        (last_step, last_value) =
            (SELECT step, value FROM metrics WHERE series = id ORDER BY step DESC LIMIT 1)
    WHERE id = ?"""


_MERGED = """
    minimum = min(coalesce(minimum, excluded.minimum), coalesce(excluded.minimum, minimum)),
    maximum = max(coalesce(maximum, excluded.maximum), coalesce(excluded.maximum, maximum)),
    total = coalesce(total + excluded.total, total, excluded.total),
    num_values = num_values + excluded.num_values, num_nan = num_nan + excluded.num_nan"""

_ADD = f"""
    INSERT INTO rollups VALUES (?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (series, level, bucket) DO UPDATE SET {_MERGED}"""

_EXTEND = """
    UPDATE series SET num_values = num_values + ?1, num_nan = num_nan + ?2, first_step = coalesce(first_step, ?3),
        last_step = ?4, last_value = ?5, min_value = min(coalesce(min_value, ?6), coalesce(?6, min_value)),
        max_value = max(coalesce(max_value, ?7), coalesce(?7, max_value))
    WHERE id = ?8"""


def _add_up(connection: sqlite3.Connection, added: Mapping[int, Mapping[int, float]]) -> None:
    """A few values behind the last one: added to what is there. The live case, a step or two per series."""
    rollups, extensions = [], []
    for series, values in added.items():
        for level in ROLLUP_LEVELS:
            for bucket, members in groupby(sorted(values), key=lambda step, level=level: step // level):  # type: ignore[misc]
                rollups.append((series, level, bucket, *_summed([values[step] for step in members])))
        minimum, _, maximum, num_values, num_nan = _summed(list(values.values()))
        first, last = min(values), max(values)
        newest = None if values[last] != values[last] else values[last]
        extensions.append((num_values + num_nan, num_nan, first, last, newest, minimum, maximum, series))
    connection.executemany(_ADD, rollups)
    connection.executemany(_EXTEND, extensions)


def _summed(values: list[float]) -> tuple[float | None, float | None, float | None, int, int]:
    """min, sum, max, numbers, NaNs."""
    numbers = [value for value in values if value == value]
    if not numbers:
        return None, None, None, 0, len(values)
    total = sum(numbers)
    return min(numbers), None if total != total else total, max(numbers), len(numbers), len(values) - len(numbers)


def _roll_up(connection: sqlite3.Connection, touched: Mapping[int, Iterable[int]]) -> None:
    """Many values, or some that replace others: every bucket they touch is computed again from the raw rows."""
    fine, coarse = [], []
    ratio = _COARSE // _FINE
    for series, steps in touched.items():
        buckets = {step // _FINE for step in steps}
        fine += [(series, first * _FINE, last * _FINE + _FINE - 1) for first, last in _stretches(buckets)]
        wide = {bucket // ratio for bucket in buckets}
        coarse += [(series, first * ratio, last * ratio + ratio - 1) for first, last in _stretches(wide)]
    connection.executemany(_FROM_RAW, fine)
    connection.executemany(_FROM_FINE, coarse)
    connection.executemany(_SUMMARY, ((series,) for series in touched))


def _stretches(numbers: Iterable[int]) -> Iterable[tuple[int, int]]:
    """Consecutive numbers as (first, last)."""
    ordered = sorted(numbers)
    start = previous = ordered[0]
    for number in ordered[1:]:
        if number != previous + 1:
            yield start, previous
            start = number
        previous = number
    yield start, previous
