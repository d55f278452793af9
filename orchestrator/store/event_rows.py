"""Events as typed rows, one list per table, before any SQL.

An event of a known kind whose fields make no sense becomes a bad line, an unknown kind an oddity:
neither stops the stream. Numbers are checked here so that nothing can fail inside the transaction.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from orchestrator.redact import redact, redact_tree
from orchestrator.store.metrics import LARGEST_STEP, flatten
from remote.rundir import has_control
from remote.wire import KINDS, Event

MAX_EXCERPT = 200  # characters of a bad line kept with its event


@dataclass(frozen=True)
class BadLine:
    offset_bytes: int
    reason: str
    excerpt: str


@dataclass
class TypedRows:
    """Typed rows gathered from events, by table; a row may be rewritten by a later one of the same key."""

    run_id: str
    points: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    steps: list[tuple[int, float]] = field(default_factory=list)  # step, wall_s
    memory: list[tuple[Any, ...]] = field(default_factory=list)
    gpu: list[tuple[Any, ...]] = field(default_factory=list)
    rungs: list[tuple[Any, ...]] = field(default_factory=list)
    checkpoints: list[tuple[Any, ...]] = field(default_factory=list)
    removed_checkpoints: list[str] = field(default_factory=list)  # paths; gone before `checkpoints` came
    evaluations: list[tuple[Any, ...]] = field(default_factory=list)
    progress: list[tuple[Any, ...]] = field(default_factory=list)
    events: list[tuple[str, str, str, float]] = field(default_factory=list)  # kind, text, fields, at
    unknown: list[tuple[str, str, str, float]] = field(default_factory=list)
    bad: list[BadLine] = field(default_factory=list)
    stage: str | None = None
    outcome: str | None = None
    num_steps: int | None = None


def typed_rows(events: Sequence[Event], rank: int, run_id: str) -> TypedRows:
    """Everything `events` of that run say, in their order."""
    rows = TypedRows(run_id)
    for event in events:
        read = _READERS.get(event.kind)
        if event.kind not in KINDS:
            rows.unknown.append((event.kind, f"unknown kind {event.kind!r}", _kept_text(event.fields), event.wall_s))
        elif read is not None:
            try:
                read(rows, event, rank)
            except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
                excerpt = json_text(event.fields)[:MAX_EXCERPT]
                rows.bad.append(BadLine(0, redact(f"{event.kind} event, seq {event.seq}: {_say(error)}"), excerpt))
    return rows


def _say(error: Exception) -> str:
    return f"field {error} is missing" if isinstance(error, KeyError) else str(error)


def json_text(fields: object) -> str:
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


def _kept_text(fields: object) -> str:
    return json_text(redact_tree(fields))


def _step(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST_STEP:
        raise ValueError(f"step is {value!r}; it must be a whole number from 0")
    return value


def _index(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise ValueError(f"{value!r} is no index of a GPU")
    return value


def _size(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**62:
        raise ValueError(f"{value!r} is no number of bytes")
    return int(value)


def _real(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r} is no number")
    if not math.isfinite(value):
        raise ValueError(f"{value!r} is no amount")
    return float(value)


def _named(values: Any) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise ValueError(f"values is {values!r}; it must be an object of names and values")
    return values


def _metrics(rows: TypedRows, event: Event, rank: int) -> None:
    step = _step(event.fields["step"])
    flat: list[tuple[str, float]] = []  # first whole, so that an event counts whole or not at all
    for name, value in event.fields["values"].items():
        if type(value) is float:
            flat.append((name, value))
        else:
            flat += flatten(str(name), value)
    for name, value in flat:
        rows.points[name][step] = value
    rows.steps.append((step, event.wall_s))


def _memory(rows: TypedRows, event: Event, rank: int) -> None:
    fields = event.fields
    gpu = -1 if fields.get("gpu") is None else _index(fields["gpu"])
    sizes = [_size(fields.get(name)) for name in ("allocated_bytes", "reserved_bytes", "driver_bytes")]
    rows.memory.append((rank, str(fields["stage"]), gpu, *sizes, event.wall_s))


def _gpu(rows: TypedRows, event: Event, rank: int) -> None:
    for sample in event.fields["samples"]:
        utilisation = sample.get("utilisation")
        rows.gpu.append(
            (
                _index(sample["index"]),
                event.wall_s,
                None if sample.get("uuid") is None else str(sample["uuid"]),
                _size(sample.get("used_bytes")),
                _size(sample.get("total_bytes")),
                None if utilisation is None else _real(utilisation),
            )
        )


def _rung(rows: TypedRows, event: Event, rank: int) -> None:
    fields = event.fields
    passed = fields["passed"]
    if not isinstance(passed, bool):
        raise ValueError(f"passed is {passed!r}; it must be true or false")
    message = redact(str(fields.get("message") or ""))
    rows.rungs.append(
        (str(fields["name"]), passed, message, _kept_text(_named(fields.get("values") or {})), event.wall_s)
    )


def _below(path: Any, run_id: str) -> str:
    """A path below the run's folder, as the Reporter tells it; an older one told it from the root."""
    place = PurePosixPath(str(path))
    is_inside = not place.is_absolute() or f"/runs/{run_id}/" in str(path)
    if not is_inside or not place.parts or ".." in place.parts or has_control(str(path)):
        raise ValueError(f"{str(path)!a} is no path below the run's folder")
    return str(path)


def _checkpoint(rows: TypedRows, event: Event, rank: int) -> None:
    fields = event.fields
    size_bytes = _size(fields.get("size_bytes"))
    rows.checkpoints.append(
        (
            _step(fields["step"]),
            _below(fields["path"], rows.run_id),
            size_bytes,
            bool(fields.get("is_best")),
            event.wall_s,
        )
    )


def _checkpoint_removed(rows: TypedRows, event: Event, rank: int) -> None:
    """Attempts share the folder, so a path means the file of every attempt; one written again later is there again."""
    path = str(event.fields["path"])
    rows.removed_checkpoints.append(path)
    rows.checkpoints = [row for row in rows.checkpoints if row[1] != path]


def _evaluation(rows: TypedRows, event: Event, rank: int) -> None:
    fields = event.fields
    step = None if fields.get("step") is None else _step(fields["step"])
    protocol = fields.get("protocol") or {}
    named = protocol if isinstance(protocol, Mapping) else {"name": protocol}
    rows.evaluations.append((step, _kept_text(named), _kept_text(_named(fields["values"])), event.wall_s))


def _progress(rows: TypedRows, event: Event, rank: int) -> None:
    fields = event.fields
    total = None if fields.get("total") is None else _real(fields["total"])
    rows.progress.append(
        (str(fields["what"]), _real(fields["done"]), total, str(fields.get("unit") or ""), event.wall_s)
    )


def _stage(rows: TypedRows, event: Event, rank: int) -> None:
    rows.stage = str(event.fields["name"])
    _keep(rows, event, rows.stage)


def _final(rows: TypedRows, event: Event, rank: int) -> None:
    rows.outcome = str(event.fields["outcome"])
    _keep(rows, event, f"the job's last word: {rows.outcome}")


def _start(rows: TypedRows, event: Event, rank: int) -> None:
    told = event.fields.get("num_steps")
    rows.num_steps = rows.num_steps if told is None else _step(told)
    _keep(rows, event, f"started, pid {event.fields.get('pid')}")


def _note(rows: TypedRows, event: Event, rank: int) -> None:
    _keep(rows, event, str(event.fields["text"]))


def _failure(rows: TypedRows, event: Event, rank: int) -> None:
    text = f"{event.fields['failure']}: {event.fields.get('message') or ''}"
    _keep(rows, event, text)


def _beat(rows: TypedRows, event: Event, rank: int) -> None:
    """The attempt's last_event_s says it all."""


def _keep(rows: TypedRows, event: Event, text: str) -> None:
    line = " ".join(redact(text).split())
    rows.events.append((event.kind, line, _kept_text(event.fields), event.wall_s))


_READERS: dict[str, Callable[[TypedRows, Event, int], None]] = {
    "start": _start,
    "progress": _progress,
    "metrics": _metrics,
    "memory": _memory,
    "gpu": _gpu,
    "rung": _rung,
    "checkpoint": _checkpoint,
    "checkpoint_removed": _checkpoint_removed,
    "evaluation": _evaluation,
    "failure": _failure,
    "note": _note,
    "stage": _stage,
    "beat": _beat,
    "final": _final,
}
