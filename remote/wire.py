"""Events: one JSON object a line, written on the host and read back by byte offset.

A line carries version, seq (per writer and attempt, from 1), kind, monotonic and wall time, the
fields of its kind, and a crc32 of the line without its crc field. JSON has no NaN or infinity:
they travel as the strings "nan", "inf", "-inf" inside `values`. This module knows neither files
nor the database; it turns an Event into bytes and bytes into an Event.
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass
from typing import Any

WIRE_VERSION = 1
LARGEST_SEQ = 2**62  # what a database column holds, with room

# kind -> the fields it carries. A reader counts and shows unknown kinds and goes on.
KINDS: dict[str, tuple[str, ...]] = {
    "start": (
        "pid",
        "writer",
        "versions",
        "devices",
        "choices",
        "num_steps",
    ),  # the job speaks: facts, choices with reasons
    "progress": ("what", "done", "total", "unit"),  # long work outside the step loop
    "metrics": ("step", "values"),  # name -> number, or a list that becomes name_1 .. name_n at ingest
    "memory": ("stage", "gpu", "allocated_bytes", "reserved_bytes", "driver_bytes"),  # peaks of one stage
    "gpu": ("samples",),  # supervisor: list of {index, uuid, used_bytes, total_bytes, utilisation}
    "rung": ("name", "passed", "values", "message"),  # one step of the smoke ladder
    "checkpoint": ("step", "path", "size_bytes", "is_best"),
    "checkpoint_removed": ("step", "path"),  # that checkpoint is no longer on the host's disk; path as it was reported
    "evaluation": ("step", "protocol", "values"),  # acceptance length and its kin, with how they were measured
    "failure": ("failure", "message", "stage", "step", "traceback", "facts"),
    "note": ("text",),  # one line for a person
    "stage": ("name",),  # setting up, loading, training, evaluating, ...
    "beat": ("pid",),  # supervisor: still here
    "final": ("outcome", "exit_code"),  # the job's own last word; exit 0 without it is unmarked_exit
}

# The only metric names, with their units (docs: "Names of metrics"). A script may report others.
METRIC_UNITS: dict[str, str] = {
    "loss": "nats",
    "loss_ce": "nats",
    "loss_kl": "nats",
    "loss_soft_ce": "nats",
    "loss_cap": "nats",
    "accuracy": "",
    "accuracy_at": "",
    "topk_2": "",
    "topk_4": "",
    "topk_8": "",
    "streak": "tokens",
    "acceptance_length": "tokens",  # of a training: streak + 1 over its anchors, short blocks included, so an estimate
    "tree_tau_16": "tokens",
    "tree_tau_32": "tokens",
    "tree_tau_64": "tokens",
    "tree_tau_128": "tokens",
    "entropy_right": "nats",
    "grad_norm": "",
    "lr": "",
    "block_tokens_per_s": "tokens/s",
    "context_tokens_per_s": "tokens/s",
    "step_s": "s",
    "wait_s": "s",
    "forward_s": "s",
    "backward_s": "s",
    "optimizer_s": "s",
    "queue_depth": "batches",
    "queue_capacity": "batches",
    "transfer_bytes_per_s": "bytes/s",  # of hidden states from target to drafter, while they travel
    "peak_allocated_bytes": "bytes",
    "peak_reserved_bytes": "bytes",
    "allocation_retries": "",
}


# Made once: json.dumps with such options makes a new one a call, a third of the cost of an event.
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True, allow_nan=False)


LONGEST_CRC = 11  # ten digits and the brace
LATEST_S = 2e11  # the year 8307; calendars end soon after
DEEPEST = 32  # levels of an event's fields
LARGEST_WHOLE = 2**63 - 1  # what a database holds
MOST_DIGITS = 100  # reading more takes long, and thousands are refused by Python


class WireError(ValueError):
    """A line that is not a whole event of a version this code reads."""


class WireVersionError(WireError):
    """A whole line of a version this code does not read: stop this stream and say which side to update."""


@dataclass(frozen=True)
class Event:
    seq: int
    kind: str
    wall_s: float  # seconds since the epoch, the writer's clock
    monotonic_s: float  # the writer's monotonic clock; durations come from this one
    fields: dict[str, Any]
    version: int = WIRE_VERSION


def encode(event: Event) -> bytes:
    """One whole line, newline included."""
    head = {
        "v": event.version,
        "seq": event.seq,
        "kind": event.kind,
        "t": round(event.wall_s, 6),
        "mono": round(event.monotonic_s, 6),
    }
    try:
        text = _ENCODER.encode({**head, **event.fields})
    except ValueError:  # a number JSON cannot hold: rare, so only then is every field looked through
        text = _ENCODER.encode({**head, **_spell_numbers(event.fields)})
    crc = zlib.crc32(text.encode("ascii"))
    return f'{text[:-1]},"crc":{crc}}}\n'.encode("ascii")


def decode(line: bytes) -> Event:
    """The event of one whole line; WireError says what is wrong with it."""
    text, separator, tail = line.strip().rpartition(b',"crc":')
    if not separator or not tail.endswith(b"}") or not tail[:-1].isdigit() or len(tail) > LONGEST_CRC:
        raise WireError("no crc at the end of the line")
    if zlib.crc32(text + b"}") != int(tail[:-1]):
        raise WireError("crc does not match the line")
    try:
        body = _DECODER.decode((text + b"}").decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}") from error
    # What few lines hold is looked for in the bytes: going through every value took a third of the time of a line.
    if b"\\ud" in text:
        # Half a surrogate pair (a file name in another encoding, say) is no text that a database or a terminal takes.
        body = whole_text(body)
    if text.count(b"{") + text.count(b"[") > DEEPEST:
        body = bounded(body)
    return _event(body, has_spelled=b'nan"' in text or b'inf"' in text)


def _event(body: Any, *, has_spelled: bool) -> Event:
    if not isinstance(body, dict):
        raise WireError("not an object")
    version = body.pop("v", None)
    if version != WIRE_VERSION:
        older = "this program" if isinstance(version, int) and version > WIRE_VERSION else "the shipped tree"
        raise WireVersionError(f"wire version {version!r}, this code reads {WIRE_VERSION}: update {older}")
    try:
        seq, kind = int(body.pop("seq")), str(body.pop("kind"))
        wall_s, monotonic_s = float(body.pop("t")), float(body.pop("mono"))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise WireError(f"missing or wrong field: {error}") from error
    if not 0 <= seq <= LARGEST_SEQ or not math.isfinite(wall_s) or not math.isfinite(monotonic_s):
        raise WireError(f"seq {seq} or the time {wall_s} is out of range")
    if not 0 <= wall_s <= LATEST_S or abs(monotonic_s) > LATEST_S:
        raise WireError(f"the time {wall_s} or {monotonic_s} is no time")
    fields = _read_numbers(body) if has_spelled else body
    return Event(seq=seq, kind=kind, wall_s=wall_s, monotonic_s=monotonic_s, fields=fields)


def _whole(digits: str) -> int | float:
    """A whole number, or infinity where a database holds none so large."""
    return _within(int(digits)) if len(digits) < MOST_DIGITS else math.copysign(math.inf, -1 if digits[0] == "-" else 1)


def _within(number: int) -> int | float:
    if -LARGEST_WHOLE <= number <= LARGEST_WHOLE:
        return number
    return math.inf if number > 0 else -math.inf


_DECODER = json.JSONDecoder(parse_int=_whole)


def bounded(value: Any, deepest: int = DEEPEST, *, depth: int = 0) -> Any:
    """The same tree; WireError where it is deeper, and infinity where a whole number is larger, than anything here means."""
    if depth > deepest:
        raise WireError(f"nested deeper than {deepest}")
    if isinstance(value, dict):
        return {key: bounded(item, deepest, depth=depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [bounded(item, deepest, depth=depth + 1) for item in value]
    return _within(value) if isinstance(value, int) else value


def whole_text(value: Any) -> Any:
    """The same tree with each lone surrogate replaced by a question mark."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {whole_text(key): whole_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole_text(item) for item in value]
    return value


_SPELLED = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _spell_numbers(value: Any) -> Any:
    """Replaces floats that JSON cannot hold by their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {str(key): _spell_numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spell_numbers(item) for item in value]
    return value


def _read_numbers(fields: dict[str, Any]) -> dict[str, Any]:
    """Undoes `_spell_numbers` where numbers are due (`values`); text fields keep their words."""
    values = fields.get("values")
    if isinstance(values, dict):
        fields["values"] = {name: _number(item) for name, item in values.items()}
    return fields


def _number(value: Any) -> Any:
    if isinstance(value, list):
        return [_number(item) for item in value]
    return _SPELLED.get(value, value) if isinstance(value, str) else value
