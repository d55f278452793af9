"""A run's metrics over all its attempts: at every step the newest attempt's, as the weights came about.

An attempt counts up to the step with which a newer one went on: what it did from there on was done anew.
Raw values and curves keep every attempt apart; this is for summaries, where one number stands for the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from orchestrator.store.reads import Reader
from orchestrator.store.rows import SeriesRow


def whole_series(reader: Reader, run_id: str, rows: Sequence[SeriesRow] | None = None) -> dict[str, SeriesRow]:
    """Metric -> its summary over the run, of the lowest rank of each attempt; `attempt` and `last_value` are the newest's.

    `rows`: what `reader.series` says, where it is known already.
    """
    rows = reader.series(run_id) if rows is None else rows
    began = _began(rows)
    parts = {name: _parts(reader, of_name, began) for name, of_name in _by_name(rows).items()}
    return {name: _joined(of_name) for name, of_name in parts.items() if of_name}


def whole_sketch(reader: Reader, run_id: str, name: str, *, buckets: int) -> list[float | None]:
    """The metric's means over about so many equal pieces of the run's steps, at least one for every attempt."""
    began, rows = _began(reader.series(run_id)), _by_name(reader.series(run_id, name)).values()
    parts = [part for of_name in rows for part in _parts(reader, of_name, began)]
    num_steps = sum(part.last_step - part.first_step + 1 for part in parts)
    return [
        point.mean
        for part in reversed(parts)
        for point in reader.curve(
            run_id, name, attempt=part.attempt, rank=part.rank, last_step=part.last_step,
            buckets=max(1, round(buckets * (part.last_step - part.first_step + 1) / num_steps)),
        )
    ]  # fmt: skip


def _by_name(rows: Iterable[SeriesRow]) -> dict[str, list[SeriesRow]]:
    """Newest attempt first, of each its lowest rank; the reader sorts so."""
    found: dict[str, dict[int, SeriesRow]] = {}
    for row in rows:
        found.setdefault(row.name, {}).setdefault(row.attempt, row)
    return {name: list(attempts.values()) for name, attempts in found.items()}


def _began(rows: Iterable[SeriesRow]) -> dict[int, int]:
    """Attempt -> the first step that it told of by any metric: there it went on."""
    found: dict[int, int] = {}
    for row in rows:
        found[row.attempt] = min(row.first_step, found.get(row.attempt, row.first_step))
    return found


def _parts(reader: Reader, newest_first: Sequence[SeriesRow], began: Mapping[int, int]) -> list[SeriesRow]:
    """Of each attempt what no newer one did anew, newest first; without any, none."""
    parts = []
    for row in newest_first:
        anew = [step for attempt, step in began.items() if attempt > row.attempt]
        part = reader.series_before(row, min(anew)) if anew else row
        if part is not None:
            parts.append(part)
    return parts


def _joined(parts: Sequence[SeriesRow]) -> SeriesRow:
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[0],
        num_values=sum(part.num_values for part in parts),
        num_nan=sum(part.num_nan for part in parts),
        first_step=parts[-1].first_step,
        min_value=min((part.min_value for part in parts if part.min_value is not None), default=None),
        max_value=max((part.max_value for part in parts if part.max_value is not None), default=None),
    )
