"""Values as JSON documents carry them: bytes are integers, times RFC 3339 in UTC, NaN is null plus a flag.

A key `x` whose number is not finite becomes null and gains a neighbour `x_flag` with "nan", "inf" or
"-inf". Seconds since the epoch (the names below) become text with their offset; durations stay numbers.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

from remote.wire import LATEST_S

# Fields that hold a moment, and what the moment is called in a document.
MOMENTS: Mapping[str, str] = {
    "at_s": "at",
    "created_s": "created_at",
    "started_s": "started_at",
    "ended_s": "ended_at",
    "last_event_s": "last_event_at",
    "last_job_event_s": "last_job_event_at",
    "last_step_s": "last_step_at",
    "unreachable_since_s": "unreachable_since",
    "removed_s": "removed_at",
    "seen_s": "seen_at",
    "asked_s": "asked_at",
    "done_s": "done_at",
}


def jsonable(value: Any) -> Any:
    """The value as plain JSON types, finite numbers only."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return jsonable({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return _mapping(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (str, int)) or value is None:
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (Sequence, set, frozenset)):
        return [jsonable(item) for item in (value if isinstance(value, Sequence) else sorted(value))]
    raise TypeError(f"{type(value).__name__} has no JSON form")


def moment(seconds: float) -> str:
    """2026-01-31T09:30:00.250+00:00"""
    return datetime.fromtimestamp(min(max(seconds, 0.0), LATEST_S), UTC).isoformat(timespec="milliseconds")


def _mapping(body: Mapping[Any, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for key, value in body.items():
        name = str(key)
        if name in MOMENTS and isinstance(value, (int, float, type(None))):
            told[MOMENTS[name]] = None if value is None else moment(value)
        elif name == "spec_json":
            told["spec"] = json.loads(value) if value else None
        else:
            told[name] = jsonable(value)
            if isinstance(value, float) and not math.isfinite(value):
                told[f"{name}_flag"] = "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return told
