"""What a job measured, as sections of a run's page: the smoke ladder, memory against the plan, speed, acceptance."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.actions.history import RunPage
from orchestrator.actions.log_text import inert
from orchestrator.actions.planned_stages import beware_of_stages, planned_stages
from orchestrator.actions.rank_places import RankPlace, rank_places
from orchestrator.actions.rungs import peak_bytes, seconds_of
from orchestrator.actions.throughput import PARTS, MeanStep, Throughput
from orchestrator.store.rows import EvaluationRow, EvidenceRow, MemoryPeakRow, RunRow
from orchestrator.units import REPLAYED, duration, is_replayed, not_measured, spoken, value_words, way_words
from orchestrator.verbs.table import Cell, Column, heading, pairs, table, wrapped
from orchestrator.verbs.words import gib, gib_places, in_gib, metric, number

if TYPE_CHECKING:
    from orchestrator.store.acceptance import Decoded


_DECODED = ("accepted [95 %]", "speed [95 %]", "same", "tie", "bad")  # narrow: 80 columns
_COVERED = "each counts the blocks whose slots before it were all covered, so fewer than the one before"
_TEXTS = "same, tie, bad: texts equal to plain decoding's, unequal by near ties alone, unequal otherwise"


def ladder(page: RunPage, width: int) -> list[str]:
    """The rungs of a smoke run as they were climbed; then predicted and measured memory by stage."""
    cells = [_rung(row) for row in page.rungs]
    names = [name for name in cells[0] if any(row[name] != "-" for row in cells)] if cells else []
    columns = [Column(name, is_number=name not in ("rung", "outcome")) for name in names]
    told = [f"{row.rung}: {row.message}" for row in page.rungs if row.message]
    rows = [[row[name] for name in names] for row in cells]
    lines = [heading("Smoke ladder"), *table(columns, rows, width=width), *_whole_time(page), *told]
    peaks = memory(page, width)
    return [*lines, "", *peaks] if peaks else lines


def memory(page: RunPage, width: int) -> list[str]:
    """Peaks by stage of the newest attempt beside the plan's; kinds of peak are never mixed, empty columns left out."""
    predicted = planned_stages(page.plan, page.run.kind)
    ranks = {place.rank: place for place in rank_places(page.run, page.spec, {peak.rank for peak in page.peaks})}
    peaks = [peak for peak in _highest(page, ranks) if peak.stage in predicted or not (page.rungs and predicted)]
    if not peaks:
        return []
    planned = [None if _runs_target(peak, ranks) else predicted.get(peak.stage) for peak in peaks]  # a drafter's
    rows = [_kinds(peak, size) for peak, size in zip(peaks, planned, strict=True)]
    names = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    places = gib_places(*(row[name] for row in rows for name in names))
    cells = [
        [
            peak.stage,
            _where(peak, ranks, page.run),
            *(in_gib(row[name], places=places, is_signed=name == "unexplained") for name in names),
        ]
        for peak, row in zip(peaks, rows, strict=True)
    ]
    columns = [Column("stage"), Column("where"), *(Column(name, is_number=True) for name in names)]
    of = f" of attempt {page.run.attempt}" if len(page.attempts) > 1 else ""
    beware = [line for text in beware_of_stages(page.plan, page.run.kind, page.peaks) for line in wrapped(text, width)]
    return [heading(f"Memory peaks{of}, in GiB"), *table(columns, cells, width=width), *beware]


def evaluations(page: RunPage, width: int) -> list[str]:
    """The newest evaluation: each way of decoding with its interval, then what the trained drafter is worth."""
    rows = newest_evaluations(page)
    if not rows:
        return []
    newest = rows[-1]
    known = [row for row in rows if _real(row.values, "acceptance_length") is not None]
    title = "Acceptance, tokens a round" if known else "Evaluation"
    lines = [heading(title + (f" at step {newest.step}" if newest.step is not None else ""))]
    if known:
        columns = [Column("way"), *(Column(name, is_number=True) for name in _DECODED)]
        lines += table(columns, [_way(row) for row in known], width=width)
        lines += wrapped(_TEXTS, width)
        lines += wrapped(REPLAYED, width) if any(is_replayed(row.protocol) for row in known) else []
        if newest.protocol.get("device") == "cpu":
            lines.append("speed on a processor says little: look at the tokens a round")
    lines += [text for row in known for text in _gains(row)]
    lines += [line for row in rows if row not in known for line in _other(row, width)]
    is_at_it = not page.run.state.is_final and page.run.attempt == newest.attempt
    missing = not_measured([row.protocol for row in rows], page.spec, is_at_it=is_at_it)
    texts = [*([missing] if missing else []), *_protocol(newest)]
    return [*lines, *(line for text in texts for line in wrapped(text, width))]


def newest_evaluations(page: RunPage) -> list[EvaluationRow]:
    """The ways of decoding that were measured together last."""
    newest = page.evaluations[-1:]
    return [row for row in page.evaluations if (row.attempt, row.step) == (newest[0].attempt, newest[0].step)]


def decoded_mean(row: EvaluationRow) -> str | None:
    """`1.85 [1.67, 2.02]`: tokens a round with the interval, where there is one; None of a row that has none."""
    mean = _real(row.values, "acceptance_length")
    if mean is None:
        return None
    return f"{mean:.2f} {_interval(row.values, 'acceptance_length')}".removesuffix(" -")


def worth(decoded: Sequence[Mapping[str, Decoded]], run_ids: Sequence[str], *, width: int | None) -> list[str]:
    """Decoded acceptance of each run by way; those measured by another protocol than the first are marked, not ranked."""
    ways = list(dict.fromkeys(way for run in decoded for way in run))
    if not ways:
        return []
    others: set[str] = set()
    rows = []
    for way in ways:
        first = next(run[way] for run in decoded if way in run)
        row = [way]
        for run in decoded:
            differs = way in run and sorted(_differing(first.protocol, run[way].protocol))
            others.update(differs or ())
            row.append((_spanned(run[way]) + ("*" if differs else "")) if way in run else "-")
        rows.append(row)
    columns = [Column("way"), *(Column(run_id, is_number=True) for run_id in run_ids)]
    note = [f"* measured with another {', '.join(sorted(others))}: not to be compared"] if others else []
    return [heading("Acceptance, tokens a round [95 %]"), *table(columns, rows, width=width), *note]


def _differing(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """What of the two ways of measuring is unlike; how the untrained drafter beside it was measured is another row's."""
    names = [name for name in {**left, **right} if name != "untrained_rounds"]
    return [name for name in names if left.get(name) != right.get(name)]


def _spanned(seen: Decoded) -> str:
    mean = f"{seen.mean:.2f}"
    return mean if seen.low is None or seen.high is None else f"{mean} [{seen.low:.2f}, {seen.high:.2f}]"


def speed(told: Sequence[Throughput], *, width: int | None) -> list[str]:
    """Of each run one sentence: its speed beside the baseline's and the parts of a step that make the difference."""
    if not told:
        return []
    reports = min(item.here.num_reports for item in told)
    lines = [inert(f"{item.here.run_id}: {item.sentence}" if len(told) > 1 else item.sentence) for item in told]
    return [
        heading(f"Throughput, means of the newest {reports} reports"),
        *(part for line in lines for part in (textwrap.wrap(line, width, break_on_hyphens=False) if width else [line])),
    ]


def speeds(told: Sequence[Throughput], *, width: int | None) -> list[str]:
    """Of several runs a table, the first run on top: rates, then where the seconds of a step go; of machines what differs."""
    if not told or told[0].there is None:
        return []
    steps = [told[0].there, *(item.here for item in told)]
    timed = [name for name in PARTS if all(name in step.parts_s for step in steps)]
    columns = [Column("run"), *(Column(name, is_number=True) for name in ("tokens/s", "a step"))]
    columns += [Column(name, is_number=True) for name in (*(PARTS[name] for name in timed), "not timed")]
    rows = [_speed_row(step, timed) for step in steps]
    differing = [
        inert(f"{item.here.run_id}: {name} {ours}, there {theirs}")
        for item in told
        for name, ours, theirs in item.machine
    ]
    reports = min(step.num_reports for step in steps)
    return [heading(f"Speed, means of the newest {reports} reports"), *table(columns, rows, width=width), *differing]


def _speed_row(step: MeanStep, timed: Sequence[str]) -> list[str]:
    seconds = [step.parts_s[name] for name in timed]
    rest_s = max(0.0, step.step_s - sum(seconds))
    cells = [step.step_s, *seconds, rest_s]
    return [step.run_id, number(round(step.block_tokens_per_s, 1)), *(metric("step_s", value) for value in cells)]


def fact(name: str, value: Any) -> str:
    """A value of an event as text: units by the end of its name, lists joined; a process's number is no count."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return str(value) if name.split("_")[-1] == "pid" else metric(name, value)
    if isinstance(value, Mapping):
        return ", ".join(f"{spoken(str(key))} {fact(str(key), item)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(fact(name, item) for item in value)
    return str(value)


def _whole_time(page: RunPage) -> list[str]:
    """A rung's time is its own work: processes start and models are loaded beside it."""
    known_s = [item.duration_s for item in page.attempts if item.duration_s is not None]
    return [f"with every start and load: {duration(known_s[-1])}"] if known_s and page.run.state.is_final else []


def _rung(row: EvidenceRow) -> dict[str, str | Cell]:
    values = row.values
    return {
        "rung": row.rung,
        "outcome": Cell("passed", colour="green") if row.passed else Cell("FAILED", colour="red"),
        "time": duration(seconds_of(values)),
        "peak": gib(peak_bytes(values)),
        **{name: number(_real(values, name)) for name in ("loss", "accuracy", "streak")},
    }


def _highest(page: RunPage, ranks: Mapping[int, RankPlace]) -> list[MemoryPeakRow]:
    """Of each stage and place the highest allocated peak, over every rung and repetition of the newest attempt; of a job
    of several ranks that of the fullest rank of each role."""
    found: dict[tuple[str, int | str | None], MemoryPeakRow] = {}
    for peak in page.peaks:
        key = (peak.stage, ranks[peak.rank].role if peak.rank in ranks else peak.gpu)
        if peak.attempt == page.run.attempt and (peak.allocated_bytes or 0) >= (
            found[key].allocated_bytes or 0 if key in found else 0
        ):
            found[key] = peak
    return list(found.values())


def _runs_target(peak: MemoryPeakRow, ranks: Mapping[int, RankPlace]) -> bool:
    return peak.rank in ranks and ranks[peak.rank].role == "target"


def _where(peak: MemoryPeakRow, ranks: Mapping[int, RankPlace], run: RunRow) -> str:
    card = "host" if peak.gpu is None else f"GPU {peak.gpu}"
    if peak.rank not in ranks:
        return card
    place = ranks[peak.rank]
    if not run.more_hosts:
        return f"{place.name}, {card}"
    return f"{place.name}, {place.host}" + ("" if peak.gpu is None else f" {card}")


def _kinds(peak: MemoryPeakRow, predicted: int | None) -> dict[str, int | None]:
    """A stage's bytes by what counted them, and what no line of the plan explains."""
    unexplained = None
    if predicted is not None and peak.allocated_bytes is not None:
        unexplained = peak.allocated_bytes - predicted
    return {
        "predicted": predicted,
        "allocated": peak.allocated_bytes,
        "unexplained": unexplained,
        "reserved": peak.reserved_bytes,
        "driver": peak.driver_bytes,
    }


def _way(row: EvaluationRow) -> list[str | Cell]:
    values = row.values
    wrong = _real(values, "mismatches")
    return [
        way_words(row.protocol),
        f"{_real(values, 'acceptance_length') or 0:.2f} {_interval(values, 'acceptance_length')}",
        f"x{values['speed_up']:.2f} {_interval(values, 'speed_up')}"
        if isinstance(values.get("speed_up"), float)
        else "-",
        number(_real(values, "texts_equal")),
        number(_real(values, "near_ties")),
        Cell(number(wrong), colour="red" if wrong else None),
    ]


def _gains(row: EvaluationRow) -> list[str]:
    """`trained chain over untrained: +0.71 [0.52, 0.91]`."""
    told = []
    for name, other in (("over_untrained", "the untrained drafter"), ("over_chain", "the chain")):
        gain = _real(row.values, name)
        if gain is not None:
            what = f"{row.protocol.get('drafter', '')} {row.protocol.get('method', '')}".strip()
            told.append(f"{what} over {other}: {gain:+.2f} tokens a round {_interval(row.values, name)}")
    return told


def _other(row: EvaluationRow, width: int) -> list[str]:
    """Values that are no way of decoding with a drafter: the plain decode, estimates; an interval beside its mean."""
    values, method = row.values, row.protocol.get("method", "also")
    if method == "plain" and (speed := _real(values, "tokens_per_s")) is not None:
        return [f"without a drafter: {speed:.2f} tokens/s {_interval(values, 'tokens_per_s')}".removesuffix(" -")]
    bounds = {f"{name}{end}" for name in values for end in ("_low", "_high")}
    told = [
        (value_words(name), f"{_by_slot(name, value)} {_interval(values, name)}".removesuffix(" -"))
        for name, value in values.items()
        if name not in bounds
    ]
    title = "estimated from the answers, not decoded" if method == "offline" else method
    lists = [value for name, value in values.items() if _is_by_slot(name, value)]
    slots = wrapped(f"slots 1 to {max(map(len, lists))}; {_COVERED}", width) if lists else []
    return [f"{title}:", *pairs(told, indent=2), *slots] if told else []


def _is_by_slot(name: str, value: Any) -> bool:
    return name.startswith("coverage_") and isinstance(value, Sequence) and not isinstance(value, str)


def _by_slot(name: str, value: Any) -> str:
    """A list of shares has a dash for the slot that no block came to."""
    if not _is_by_slot(name, value):
        return fact(name, value)
    return ", ".join("-" if item is None or math.isnan(item) else fact(name, item) for item in value)


def _real(values: Mapping[str, Any], name: str) -> float | None:
    """What a job reported under the name, where that is a number."""
    value = values.get(name)
    return value if isinstance(value, (int, float)) else None


def _interval(values: Mapping[str, Any], name: str) -> str:
    low, high = values.get(f"{name}_low"), values.get(f"{name}_high")
    return f"[{low:.2f}, {high:.2f}]" if isinstance(low, float) and isinstance(high, float) else "-"


def _protocol(row: EvaluationRow) -> list[str]:
    """How it was measured: rows of different protocols are not comparable."""
    told = row.protocol
    if not told:
        return []
    names = ("temperature", "max_tokens", "num_degenerate", "dtype", "device")
    others = [f"{spoken(name)} {fact(name, told[name])}" for name in names if name in told]
    prompts = f"{told.get('num_prompts', '?')} prompts of {told.get('prompts', '?')}"
    return [f"measured on {', '.join([prompts, *others])}"]
