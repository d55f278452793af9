"""Durations and sizes as people write them, to plain numbers; counts, and the units of metrics, as they are told.

Durations: `90`, `90s`, `2h30m`, `1d`, `500ms`. Sizes: `95GiB` (powers of 1024) and `95GB` (powers
of 1000) are different; a bare `2G` is refused because it could be either.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
BYTES: dict[str, int] = {"B": 1} | {
    f"{prefix}{suffix}": int(base**power)
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}

_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|d|h|m|s)")
LARGEST_BYTES = 2**62  # what a database holds, with room
LONGEST_S = 1e11  # 3,000 years: no calendar here goes further
LARGEST_MEASURE = 1e150  # ranges, sums and products of what is smaller are finite

_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_duration(text: str) -> float:
    """Seconds. Raises ValueError that says what to write."""
    stripped = text.strip()
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", stripped):
        return _at_most(LONGEST_S, float(stripped), text)
    parts = _DURATION_PART.findall(stripped)
    units = [unit for _, unit in parts]
    ordered = sorted(set(units), key=list(SECONDS).index) == units
    if not parts or not ordered or _DURATION_PART.sub("", stripped).strip():
        raise ValueError(f"is {text!r}; write a duration such as 90s, 45m, 2h30m or 1d")
    return _at_most(LONGEST_S, sum(float(number) * SECONDS[unit] for number, unit in parts), text)


def parse_bytes(text: str) -> int:
    """Bytes. Raises ValueError that says what to write."""
    found = _NUMBER_AND_UNIT.fullmatch(text)
    if found is None:
        raise ValueError(f"is {text!r}; write a size such as 512MiB, 95GiB or 2GB")
    number, unit = found[1], found[2]
    known = {name.lower(): name for name in BYTES}.get(unit.lower() or "b")
    if known is None:
        letter = unit[:1].upper()
        if len(unit) == 1 and letter in "KMGT":
            binary, decimal = BYTES[f"{letter}iB"], BYTES[f"{letter}B"]
            raise ValueError(
                f"is {text!r}, which could be either; write {number}{letter}iB (times {binary}) or {number}{letter}B (times {decimal})"
            )
        near = _unit_like(unit)
        hint = f"; did you mean {number + near!r}?" if near else ""
        raise ValueError(f"is {text!r}; the unit {unit!r} is unknown; known units are {', '.join(BYTES)}{hint}")
    return round(_at_most(LARGEST_BYTES, float(number) * BYTES[known], text))


def _unit_like(unit: str) -> str | None:
    """The same letters in another order, or without the last one; GB for GBi would be another size."""
    letters = sorted(unit.lower())
    return next((name for name in BYTES if letters in (sorted(name.lower()), sorted(name.lower()[:-1]))), None)


def _at_most(limit: float, number: float, text: str) -> float:
    if number > limit:
        raise ValueError(f"is {text[:40]!r}, which is larger than {limit:.3g}; nothing here is")
    return number


def spoken(name: str) -> str:
    """A name of a value as it is read: `asked_bytes` is said "asked", `num_blocks` "blocks"."""
    words = name.removesuffix("_bytes").removesuffix("_s").removeprefix("num_").replace("_", " ")
    return words.replace("gpu", "GPU")


def value_words(name: str) -> str:
    """Of an evaluation's value: `tree_tau_16` is said "tree of 16", `coverage_2` "truth among best 2"."""
    stem, _, number = name.rpartition("_")
    known = {"tree_tau": f"tree of {number}", "coverage": f"truth among best {number}"}
    whole = {"chain_tau": "chain", "tree_over_chain": "tree over chain"}
    return whole.get(name) or (known.get(stem) if number.isdigit() else None) or spoken(name)


REPLAYED = "replayed: rounds read off the plain text, which gives those of decoding but for near ties"


def way_words(protocol: Mapping[str, Any]) -> str:
    """Of an evaluation's row by its protocol: `trained tree of 16`, `untrained chain, replayed`."""
    budget = f" of {protocol['budget']}" if protocol.get("budget") else ""
    replayed = ", replayed" if is_replayed(protocol) else ""
    return f"{protocol.get('drafter', '')} {protocol.get('method', 'chain')}{budget}{replayed}".strip()


def is_replayed(protocol: Mapping[str, Any]) -> bool:
    """Whether no decoding made the rounds; older rows say it in another word."""
    return str(protocol.get("rounds", "")).startswith(("replayed", "followed"))


def is_told_newest(name: str) -> bool:
    """Of a metric that is set, or that only grows: a mean of such values is none that ever was."""
    return name in ("lr", "queue_capacity", "allocation_retries") or name.endswith("_bytes")


def is_measurable(number: float) -> bool:
    """Finite, and small enough to be drawn and averaged; a larger one is told as it stands, as infinity is."""
    return abs(number) <= LARGEST_MEASURE


def format_size(size_bytes: float) -> str:
    """`17.25 GiB`, `60.0 KiB`, `90 B`: the largest unit of which there is a tenth, GiB at most, as memory is told in it."""
    for unit, places in (("GiB", 2), ("MiB", 1), ("KiB", 1)):
        if abs(size_bytes) >= BYTES[unit] / 10:
            return f"{size_bytes / BYTES[unit]:.{places}f} {unit}"
    return f"{size_bytes:.0f} B"


def with_article(word: str) -> str:
    """`a train`, `an evaluate`: of a word as it is read, by its first letter."""
    return f"{'an' if word[:1].lower() in tuple('aeiou') else 'a'} {word}"


def counted(number: int, one: str, many: str | None = None) -> str:
    """`1 host`, `2,000 hosts`, `2 processes`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def duration(seconds: float | None) -> str:
    """As it is read: 0.4 s, 42 s, 3 min 05 s, 2 h 12 min, 5 d 3 h, 7 d."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    hours = whole % 86400 // 3600
    return f"{whole // 86400} d" + (f" {hours} h" if hours else "")


def format_duration(seconds: float) -> str:
    """As it is typed: `2h30m`, `51s`, `0.25s`, at most two parts."""
    if seconds < 60:
        return f"{seconds:.3g}s"
    parts: list[tuple[int, str]] = []
    rest = round(seconds)
    for unit in ("d", "h", "m", "s"):
        count, rest = divmod(rest, int(SECONDS[unit]))
        if count or parts:
            parts.append((count, unit))
    return "".join(f"{count}{unit}" for count, unit in parts[:2] if count)


def not_measured(known: Sequence[Mapping[str, Any]], spec: Mapping[str, Any], *, is_at_it: bool) -> str:
    """`not measured yet: trained chain`: the ways that a run's spec asks for and none of an evaluation's protocols tells of.

    Empty where none is missing. Of the bundled trainer alone, whose first row is the plain decode; a script measures
    what it likes. `is_at_it`: whether the attempt that measures still runs.
    """
    plain = next((protocol for protocol in known if protocol.get("method") == "plain"), None)
    choices = spec.get("evaluate")
    if plain is None or not isinstance(choices, Mapping):
        return ""
    asked = choices.get("tree_budgets")
    budgets = sorted(size for size in asked if isinstance(size, int)) if isinstance(asked, list) else []
    budgets = budgets if plain.get("device") == "cuda" else budgets[:1]  # as the trainer takes them
    ways: list[Mapping[str, Any]] = [{"drafter": "trained", "method": "chain"}]
    ways += [{"drafter": "trained", "method": "tree", "budget": size} for size in budgets]
    if choices.get("compare_untrained"):
        ways.insert(0, {"drafter": "untrained", "method": "chain"})
    measured = [{name: protocol.get(name) for name in ("drafter", "method", "budget")} for protocol in known]
    missing = [way_words(way) for way in ways if {"budget": None, **way} not in measured]
    return f"not measured{' yet' if is_at_it else ''}: {', '.join(missing)}" if missing else ""


def unit_of(metric: str, *, is_ours: bool) -> str:
    """The unit that a metric's name tells; empty where it has none.

    `is_ours`: whether the bundled trainer reported it. What the loss of somebody's own script is in, nobody has told.
    """
    for ending, unit in (("bytes_per_s", "bytes/s"), ("tokens_per_s", "tokens/s"), ("_per_s", "a second")):
        if metric.endswith(ending):
            return unit
    if metric.endswith("_s"):
        return "s"
    if metric.endswith("_bytes"):
        return "bytes"
    if not is_ours:
        return ""
    if metric.startswith(("loss", "entropy")):
        return "nats"
    if metric.startswith(("streak", "acceptance_length", "tree_tau")):
        return "tokens"
    return "batches" if metric.startswith("queue_") else ""
