"""What drafters are worth: the acceptance length of real decoding, by way, with its interval. Pure drawing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.store.acceptance import Decoded, Way
from orchestrator.store.rows import EvaluationRow, RunRow
from orchestrator.units import REPLAYED, counted, is_replayed, not_measured, spoken, value_words, way_words
from tui.facts import fact_lines, fact_text
from tui.pieces import BLANK, Line, Piece, heading, wrapped
from tui.wording import count, fit

UNIT = "tokens a round"
PLAIN = "without a drafter"
_PROTOCOL = ("temperature", "max_tokens", "num_degenerate", "dtype", "device")  # what a reader asks for first


def spanned(mean: float, low: float | None, high: float | None) -> str:
    """`1.63 [1.35, 1.92]`: the mean and its 95 % interval, where there is one."""
    return f"{mean:.2f}" if low is None or high is None else f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def worth_words(decoded: Mapping[Way, Decoded]) -> list[Line]:
    """One word of several pieces a way: `chain 1.63 [1.35, 1.92]`."""
    return [[(f"{way} ", "muted"), (spanned(seen.mean, seen.low, seen.high), "good")] for way, seen in decoded.items()]


def worth_rows(decoded: Sequence[Mapping[Way, Decoded]]) -> tuple[list[tuple[Way, list[str]]], str]:
    """A row a way, a cell a run, and a note; a cell measured otherwise than the first of its row bears a star."""
    rows: list[tuple[Way, list[str]]] = []
    others: set[str] = set()
    for way in dict.fromkeys(way for run in decoded for way in run):
        first = next(run[way] for run in decoded if way in run)
        cells = []
        for run in decoded:
            seen = run.get(way)
            differing = _differing(first.protocol, seen.protocol) if seen else []
            others.update(differing)
            cells.append("–" if seen is None else spanned(seen.mean, seen.low, seen.high) + "*" * bool(differing))
        rows.append((way, cells))
    names = ", ".join(name.replace("_", " ") for name in sorted(others))
    return rows, f"* measured with another {names}: not to be compared" if others else ""


def evaluation_lines(
    evaluations: Sequence[EvaluationRow], width: int, *, run: RunRow, spec: Mapping[str, Any]
) -> list[Line]:
    """The newest evaluation in words: each way of decoding, estimates apart from it, what of the spec is not measured,
    and how it was measured."""
    if not evaluations:
        return []
    newest = evaluations[-1]
    rows = [row for row in evaluations if (row.attempt, row.step) == (newest.attempt, newest.step)]
    ways = {way_words(row.protocol): row for row in rows if _number(row, "acceptance_length") is not None}
    at = f" at step {count(newest.step)}" if newest.step is not None else ""
    label = max(len(name) for name in (*ways, PLAIN)) + 2
    lines: list[Line] = []
    if ways:
        lines += [BLANK, heading(f"Acceptance{at}", width, f"{UNIT} [95 %]"), *_way_lines(ways, label, width)]
        lines += wrapped(REPLAYED, width, "faint") if any(is_replayed(row.protocol) for row in ways.values()) else []
    others = {way_words(row.protocol): row for row in rows if row not in ways.values()}.values()
    plain = [line for row in others if _is_plain(row) for line in _other_lines(row, at, label, width)]
    if plain and not ways:
        lines += [BLANK, heading(f"Evaluation{at}", width)]  # the plain decode has none of its own
    lines += plain
    lines += [line for row in others if not _is_plain(row) for line in _other_lines(row, at, label, width)]
    is_at_it = not run.state.is_final and run.attempt == newest.attempt
    missing = not_measured([row.protocol for row in rows], spec, is_at_it=is_at_it)
    lines += wrapped(missing, width, "muted") if missing else []
    return [*lines, *_protocol_lines(newest.protocol, width)]


def _is_plain(row: EvaluationRow) -> bool:
    return row.protocol.get("method") == "plain"


def _way_lines(ways: Mapping[str, EvaluationRow], label: int, width: int) -> list[Line]:
    lines: list[Line] = []
    for name, row in ways.items():
        pieces: list[Piece] = [(fit(name, label), "text"), (fit(_interval(row, "acceptance_length"), 18), "good")]
        if _number(row, "speed_up") is not None:
            pieces.append((f"  ×{_interval(row, 'speed_up')} plain speed", "muted"))
        lines.append(pieces)
        for key, other in (("over_untrained", "the untrained drafter"), ("over_chain", "the chain")):
            if _number(row, key) is not None:
                lines.append([(" " * label + f"{_interval(row, key, sign='+')} over {other}", "muted")])
        if wrong := _number(row, "mismatches"):
            lines += _wrong(round(wrong), width)
    return lines


def _wrong(number: int, width: int) -> list[Line]:
    return wrapped(
        f"{counted(number, 'text')} {'differs' if number == 1 else 'differ'} from plain decoding", width, "bad"
    )


def _other_lines(row: EvaluationRow, at: str, label: int, width: int) -> list[Line]:
    """Estimates and what a script measured; the decode without a drafter says its speed alone."""
    if _is_plain(row):
        speed = _number(row, "tokens_per_s")
        return [[(fit(PLAIN, label), "muted"), (f"{speed:.2f} tokens/s", "text")]] if speed is not None else []
    title = "Estimated from the answers, not decoded" if row.protocol.get("method") == "offline" else f"Evaluation{at}"
    bounds = {f"{name}{end}" for name in row.values for end in ("_low", "_high")}
    told = {
        value_words(name): _interval(row, name) if f"{name}_low" in row.values else fact_text(name, value)
        for name, value in row.values.items()
        if name not in bounds
    }
    return [BLANK, heading(title, width), *fact_lines(told, width)]


def _protocol_lines(protocol: Mapping[str, Any], width: int) -> list[Line]:
    """How it was measured: rows of different protocols are not comparable."""
    number = protocol.get("num_prompts")
    told = [counted(number, "prompt") if isinstance(number, int) else ""]
    told[0] += f" of {protocol['prompts']}" if "prompts" in protocol else ""
    told += [f"{spoken(name)} {fact_text(name, protocol[name])}" for name in _PROTOCOL if name in protocol]
    words = ", ".join(part for part in told if part)
    return wrapped(f"measured on {words}", width, "faint") if words else []


def _interval(row: EvaluationRow, name: str, *, sign: str = "") -> str:
    mean = _number(row, name) or 0.0
    return (
        f"{mean:{sign}.2f}"
        + spanned(mean, _number(row, f"{name}_low"), _number(row, f"{name}_high"))[len(f"{mean:.2f}") :]
    )


def _number(row: EvaluationRow, name: str) -> float | None:
    number = row.values.get(name)
    return float(number) if isinstance(number, int | float) and not isinstance(number, bool) else None


def _differing(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """What of the two ways of measuring is unlike; how the untrained drafter beside it was measured is another row's."""
    names = [name for name in {**left, **right} if name != "untrained_rounds"]
    return [name for name in names if left.get(name) != right.get(name)]
