"""Files made here from what the store knows: a run's metrics as CSV or JSON Lines."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from orchestrator.actions.history import open_reader
from orchestrator.actions.places import Places
from orchestrator.errors import DraftyardError
from orchestrator.store.rows import MetricValue
from remote.rundir import write_whole

COLUMNS = ("run", "metric", "attempt", "rank", "step", "value")


def metric_lines(places: Places, selector: str, form: str, *, version: int | None = None) -> Iterator[str]:
    """Every value of every metric, one a line. CSV spells NaN `nan`; JSON has null and a flag, and a `version`."""
    head = {} if version is None else {"schema_version": version}
    with open_reader(places) as reader:
        run = reader.run(selector)
        if form == "csv":
            yield ",".join(COLUMNS)
        for name in reader.metric_names(run.id):
            for value in reader.metric_values(run.id, name):
                yield _csv(run.id, name, value) if form == "csv" else _json(head, run.id, name, value)


def write_metrics(places: Places, selector: str, form: str, *, to: Path) -> int:
    """Writes the same into a file, whole, a metric at a time; returns the number of values."""
    to = _regular(to)
    aside = to.with_name(f".{to.name}.{os.getpid()}.tmp")
    num_lines = 0
    try:
        with aside.open("w", encoding="utf-8", errors="surrogateescape", newline="\n") as stream:
            for line in metric_lines(places, selector, form):
                stream.write(f"{line}\n")
                num_lines += 1
        aside.replace(to)
    except OSError as error:
        raise DraftyardError(f"{to} cannot be written: {error.strerror}") from error
    finally:
        aside.unlink(missing_ok=True)
    return num_lines - (1 if form == "csv" else 0)


def write_here(to: Path, content: bytes) -> None:
    """Writes a file a person has named, whole. Raises DraftyardError; a folder mistyped is not made."""
    to = _regular(to)
    try:
        write_whole(to, content)
    except OSError as error:
        raise DraftyardError(f"{to} cannot be written: {error.strerror}") from error


def is_there(to: Path) -> bool:
    """Whether writing there takes the place of something; of what cannot be looked at the writing itself will tell."""
    try:
        return to.exists()
    except OSError:
        return False


def _regular(to: Path) -> Path:
    """Where the file lies, links followed: it takes the place of an old one, and must never take that of a device."""
    if not to.parent.is_dir():
        raise DraftyardError(f"{to} cannot be written: there is no folder {to.parent}")
    if to.exists() and not to.is_file():
        raise DraftyardError(f"{to} cannot be written: it is there and no regular file; name another")
    return to.resolve()


def _csv(run_id: str, name: str, value: MetricValue) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(
        [run_id, name, value.attempt, value.rank, value.step, repr(value.value)]
    )
    return line.getvalue()


def _json(head: Mapping[str, int], run_id: str, name: str, value: MetricValue) -> str:
    place = {"run": run_id, "metric": name, "attempt": value.attempt, "rank": value.rank, "step": value.step}
    body = {**head, **place}
    if math.isfinite(value.value):
        return json.dumps({**body, "value": value.value})
    flag = "nan" if math.isnan(value.value) else "inf" if value.value > 0 else "-inf"
    return json.dumps({**body, "value": None, "value_flag": flag})
