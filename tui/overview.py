"""The first tab of a run: its state with the evidence for it, where time and memory go, is it learning.

Pure drawing. `state_lines` and `memory_lines` also serve the preview beside the list of runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.cells import cell_len

from orchestrator.actions.wishes import can_stop, kill_in_s
from orchestrator.store.rows import RunRow, State
from orchestrator.units import counted
from tui.chart import Look, Series, chart_lines
from tui.detail import RATES, MetricCurve, RunDetail
from tui.pace import TRAINING, bottleneck
from tui.pieces import (
    BLANK,
    Line,
    Piece,
    beside,
    broken,
    field,
    fitted,
    flowed,
    heading,
    memory_meaning,
    meter,
    wrapped,
)
from tui.ranks import newest_peaks, rank_lines
from tui.snapshot import newest_samples
from tui.wording import (
    age,
    busy,
    count,
    duration,
    gib,
    gpu_name,
    hosts_told,
    percent,
    rate,
    reason_words,
    seconds,
    state_letter,
    state_word,
    told_and_repairs,
)
from tui.worth import UNIT, worth_words

CHART_METRICS = ("loss", "accuracy", "streak", "block_tokens_per_s")
CHART_SMOOTHING = 0.8
MOST_CHARTS = 34  # lines of all rows of charts
LEAST_CHART = 7  # lines; on a low screen the facts below it are scrolled to


def overview_lines(detail: RunDetail, now_s: float, width: int, height: int, *, ascii_only: bool) -> list[Line]:
    """As many charts as there is room for, above two columns of facts."""
    head = [*state_lines(detail, now_s, width, ascii_only=ascii_only), *cause_lines(detail, width)]
    column = (width - 3) // 2 if width >= 72 else width
    left = speed_lines(detail, column, ascii_only=ascii_only)
    right = _right_column(detail, now_s, column, ascii_only=ascii_only)
    facts = beside((left, column), (right, column), gap=3) if width >= 72 else [*left, BLANK, *right]
    facts += rank_lines(detail.ranks, detail.roles_told, width, ascii_only=ascii_only)
    facts += against_lines(detail, width)
    curves = [curve for name in CHART_METRICS if (curve := detail.curve(name)) is not None and curve.samples]
    room = height - len(head) - len(facts) - 2
    lines = [*head, BLANK]
    if curves:
        lines += [*_charts(curves, width, max(LEAST_CHART, min(room, MOST_CHARTS)), ascii_only=ascii_only), BLANK]
    return [*lines, *facts]


def cause_lines(detail: RunDetail, width: int) -> list[Line]:
    """Why it ended badly, whole: a list has room for its beginning alone."""
    if not detail.failures or detail.run.state is not State.FAILED:
        return []
    told, *repairs = told_and_repairs(detail.failures[0].message)
    return [*wrapped(told, width, "bad"), *(line for repair in repairs for line in wrapped(repair, width, "warn"))]


def state_lines(detail: RunDetail, now_s: float, width: int, *, ascii_only: bool) -> list[Line]:
    """State and why we think so; progress; when it ends and why that moved; what the drafter is worth."""
    run = detail.run
    letter, meaning = state_letter(run.state, run.reason, unreachable=run.unreachable_since_s is not None)
    first: list[Piece] = [(letter, meaning), (f" {state_word(run.state)}", meaning)]
    if run.reason and run.state.is_final:
        first.append((f"  {reason_words(run.reason)}", meaning))
    if run.unreachable_since_s is not None:
        first.append((f"  host unreachable since {clock(run.unreachable_since_s, now_s)}", "warn"))
    if run.stage and not run.state.is_final:
        first.append((f"  {run.stage.replace('_', ' ')}", "text"))
    told, *repairs = _evidence(detail, now_s)
    first.append((f"  {told}" if told else "", "muted"))
    lines: list[Line] = broken(first, width)
    for repair in repairs:
        lines += wrapped(repair, width, "warn")
    if run.unreachable_since_s is not None and detail.host is not None and detail.host.error:
        lines += wrapped(detail.host.error, width, "warn")
    if run.step is not None:
        lines.append(_progress(detail, width, ascii_only=ascii_only))
    newest = detail.stage_progress
    if newest is not None and not run.state.is_final and run.stage not in TRAINING:
        fraction = newest.done / newest.total if newest.total else None
        unit = newest.unit.removesuffix("s") if newest.total == 1 else newest.unit
        done = f"{count(newest.done)} of {count(newest.total)} {unit}" if newest.total else count(newest.done)
        lines.append(
            [(f"{newest.what}  ", "text"), *meter(fraction, 20, ascii_only=ascii_only), (f"  {done}", "muted")]
        )
    ends = _ends(detail, now_s)
    lines += broken(ends, width) if ends else []
    lines += _wishes(detail, now_s)
    worth = worth_words(detail.decoded)
    return [*lines, *flowed([[("accepts", "muted")], *worth, [(UNIT, "muted")]], width)] if worth else lines


def _evidence(detail: RunDetail, now_s: float) -> list[str]:
    """Why we think so, then the repairs that it names. What began a training is no evidence of what it does now: its newest word is."""
    run = detail.run
    if run.state is State.RUNNING and run.step is not None and run.last_event_s is not None:
        return [f"newest word {age(now_s - run.last_event_s)} ago"]
    return told_and_repairs(run.evidence)


def speed_lines(detail: RunDetail, width: int, *, ascii_only: bool) -> list[Line]:
    """Both token rates, the split of a step, the queue with the side that waits."""
    latest, pace = detail.latest, detail.pace
    lines: list[Line] = [heading("Speed", width)]
    for name in RATES:
        if name in detail.rates:
            told = [(rate(detail.rates[name]), "strong"), (" tokens/s", "muted")]
            lines.append(field(name.removesuffix("_tokens_per_s"), told))
    depth, capacity = latest.get("queue_depth"), latest.get("queue_capacity")
    if pace.step_s is not None:
        lines.append(field("step", [(seconds(pace.step_s), "strong")]))
    if pace.step_s is not None or depth is not None:
        words = wrapped(bottleneck(latest, pace), width - 13)
        lines += [field("bottleneck" if index == 0 else "", line) for index, line in enumerate(words)]
    if depth is not None and capacity:
        bar = meter(depth / capacity, 6, ascii_only=ascii_only)
        lines.append(
            field("queue", [*bar, (f" {depth:.0f} of {counted(round(capacity), 'batch', 'batches')}", "muted")])
        )
    lines += _split_bar(detail, width, ascii_only=ascii_only)
    if len(lines) == 1:
        lines.append([(_no_step(detail.run), "muted")])
    return lines


def _no_step(run: RunRow) -> str:
    if not run.state.is_final:
        return "no step yet"
    return "no step was made" if run.kind == "train" else f"a {run.kind} run counts no steps"


def against_lines(detail: RunDetail, width: int) -> list[Line]:
    """The sentence of `show --against`: the baseline marked in the list, else the newest earlier success of the recipe."""
    if not detail.against:
        return []
    return [BLANK, heading("Speed beside a baseline", width), *wrapped(detail.against, width)]


def memory_lines(detail: RunDetail, width: int, *, ascii_only: bool) -> list[Line]:
    """One bar a GPU against the card's size; without GPUs the peaks the job reported."""
    samples = newest_samples(detail.gpu_samples)
    lines: list[Line] = [heading("Memory", width)]
    for sample in samples:
        used, total = sample.used_bytes, sample.total_bytes
        fraction = used / total if used is not None and total else None
        meaning = memory_meaning(fraction)
        numbers = f"  {gib(used, unit=False):>4} of {gib(total)}"
        used_share = f"  busy {busy(sample.utilisation)}" if width >= 44 else ""
        name = f"{gpu_name(detail.run, sample.gpu)}  "
        room = max(6, width - cell_len(name) - len(numbers) - len(used_share))
        bar = meter(fraction, room, meaning, ascii_only=ascii_only)
        lines.append([(name, "muted"), *bar, (numbers, "text"), (used_share, "muted")])
    if not samples:
        for peak in newest_peaks(detail.peaks)[-4:]:
            size = peak.allocated_bytes or peak.driver_bytes or peak.reserved_bytes
            lines.append(field(peak.stage, [(gib(size), "strong"), (" peak", "muted")]))
    return lines if len(lines) > 1 else []


def _right_column(detail: RunDetail, now_s: float, width: int, *, ascii_only: bool) -> list[Line]:
    memory = memory_lines(detail, width, ascii_only=ascii_only)
    lines = [*memory, BLANK] if memory else []
    lines += [heading("Run", width)]
    run = detail.run
    lines.append(field("host", hosts_told(run, [sample.gpu for sample in newest_samples(detail.gpu_samples)])))
    lines.append(field("gate", _gate(detail)))
    lines += _attempts(detail, now_s)
    if detail.checkpoints:
        newest = detail.checkpoints[-1]
        lines.append(field("checkpoint", f"step {count(newest.step)}, {age(now_s - newest.at_s)} ago"))
    if run.tags:
        lines.append(field("tags", " ".join(run.tags)))
    for index, line in enumerate(wrapped(run.note or run.why, width - 13, "muted")[:3]):
        lines.append(field(("note" if run.note else "why") if index == 0 else "", line))
    return lines


def _progress(detail: RunDetail, width: int, *, ascii_only: bool) -> Line:
    run = detail.run
    step, total = run.step, run.num_steps
    fraction = step / total if step is not None and total else None
    meaning = state_letter(run.state, run.reason)[1]
    words = f"step {count(step)}" + (f" of {count(total)}" if total else "")
    tail = f"  {percent(fraction)}" if fraction is not None else ""
    bar = meter(fraction, max(8, min(48, width - len(words) - len(tail) - 4)), meaning, ascii_only=ascii_only)
    return [(words, "text"), ("  ", "text"), *bar, (tail, "text")]


def _ends(detail: RunDetail, now_s: float) -> Line | None:
    """When it ends and why that moved; for one that has ended, how long it took."""
    run, pace = detail.run, detail.pace
    if run.state.is_final:
        if run.started_s is None or run.ended_s is None:
            return None
        return [
            ("took ", "muted"),
            (duration(run.ended_s - run.started_s), "text"),
            (f", ended {age(now_s - run.ended_s)} ago", "muted"),
        ]
    if run.state is not State.RUNNING:
        return None
    if pace.eta_s is None:
        return _since(detail, now_s)
    at = clock(now_s + pace.eta_s, now_s)
    line: list[Piece] = [
        ("ends in ", "muted"),
        (duration(pace.eta_s), "strong"),
        (f" {at}" if " " in at else f" at {at}", "muted"),
    ]
    if pace.why_moved and pace.moved_s is not None:
        way = "later" if pace.moved_s > 0 else "earlier"
        line.append(
            (
                f"  {duration(abs(pace.moved_s))} {way} than its mean pace: {pace.why_moved}",
                "warn" if pace.moved_s > 0 else "good",
            )
        )
    return line


def _wishes(detail: RunDetail, now_s: float) -> list[Line]:
    """What is still to be done to the run: the kill at the end of its grace, the retry of one that has ended."""
    left_s = kill_in_s(detail.run, detail.intents, detail.spec or {}, now_s)
    lines: list[Line] = []
    if left_s is not None:
        at = time.strftime("%H:%M:%S", time.localtime(now_s + left_s))
        lines.append([("asked to end; what still lives is killed at ", "muted"), (at, "warn")])
    if detail.run.state.is_final and can_stop(detail.run, detail.intents):
        lines.append([("a retry is to come; ", "warn"), ("x", "key"), (" calls it off", "muted")])
    return lines


def _since(detail: RunDetail, now_s: float) -> Line | None:
    """Where no step is left to tell an end from: for how long the stage has gone on."""
    begun_s = max((event.at_s for event in detail.events if event.kind == "stage"), default=None)
    stage = detail.run.stage
    if begun_s is None or stage is None or stage in TRAINING:
        return None
    return [(f"{stage.replace('_', ' ')} for ", "muted"), (duration(now_s - begun_s), "text")]


_SPLIT_MEANINGS = {
    "wait": "warn",
    "forward": "series_1",
    "backward": "series_3",
    "optimizer": "series_4",
    "other": "faint",
}


def _split_bar(detail: RunDetail, width: int, *, ascii_only: bool) -> list[Line]:
    """One bar in the colours of the parts, and their shares below it."""
    step_s, parts = detail.pace.step_s, detail.pace.parts
    if not parts or not step_s:
        return []
    room = width - 13
    bar: list[Piece] = []
    words: list[Line] = []
    for name, part_s in parts:
        cells = round(part_s / step_s * room)
        bar.append((("#" if ascii_only else "━") * cells, _SPLIT_MEANINGS[name]))
        words.append([(f"{name} ", _SPLIT_MEANINGS[name]), (percent(part_s / step_s), "muted")])
    return [field("a step", fitted(bar, room)), *(field("", line) for line in flowed(words, room))]


def _gate(detail: RunDetail) -> Line:
    if detail.run.forced_reason:
        return [("forced: ", "warn"), (detail.run.forced_reason, "text")]
    newest: dict[str, bool] = {}
    for row in reversed(detail.rungs):
        newest[row.rung] = row.passed
    if not newest:
        return [("no rungs on record", "muted")]
    passed = sum(newest.values())
    failed = [rung for rung, is_passed in newest.items() if not is_passed]
    if failed:
        return [(f"{counted(passed, 'rung')} passed, failed: {', '.join(failed)}", "bad")]
    return [(f"{counted(passed, 'rung')} passed", "good")]


def _attempts(detail: RunDetail, now_s: float) -> list[Line]:
    if len(detail.attempts) < 2:
        return []
    lines = []
    for attempt in detail.attempts[-3:]:
        meaning = state_letter(attempt.state, attempt.reason)[1]
        steps = f"steps {count(attempt.first_step)}–{count(attempt.last_step)}" if attempt.last_step else "no step"
        told = f" {reason_words(attempt.reason) if attempt.reason else state_word(attempt.state)}"
        lines.append(field(f"attempt {attempt.number}", [(steps, "text"), (told, meaning)]))
    return lines


def _charts(curves: Sequence[MetricCurve], width: int, height: int, *, ascii_only: bool) -> list[Line]:
    """One across below 72 columns, two to 150, then four; a second row where two charts of a good height fit."""
    num = min(len(curves), 1 if width < 72 else 2 if width < 150 else 4)
    num_rows = 2 if height >= 22 and len(curves) > num else 1
    room = (width - 3 * (num - 1)) // num
    each = (height - (num_rows - 1)) // num_rows
    look = Look(smoothing=CHART_SMOOTHING, ascii_only=ascii_only)
    lines: list[Line] = []
    for start in range(0, num * num_rows, num):
        blocks = [(_chart(curve, (room, each), look), room) for curve in curves[start : start + num]]
        lines += [*([BLANK] if lines else []), *beside(*blocks, gap=3)]
    return lines


def _chart(curve: MetricCurve, size: tuple[int, int], look: Look) -> list[Line]:
    older = [Series(f"attempt {one.attempt}", "faint", one.samples, is_dimmed=True) for one in curve.attempts[:-1]]
    series = [*older, Series(curve.name, "live", curve.samples, curve.newest)]
    return chart_lines(curve.name, curve.unit, series, size, look)


def clock(at_s: float, now_s: float) -> str:
    """The time of day, with its day where that is not today's: `06:11`, `Wed 06:11`, `3 Nov 06:11`."""
    at, now = time.localtime(at_s), time.localtime(now_s)
    if (at.tm_year, at.tm_yday) == (now.tm_year, now.tm_yday):
        return time.strftime("%H:%M", at)
    day = time.strftime("%a", at) if abs(at_s - now_s) < 6 * 86_400 else f"{at.tm_mday} {time.strftime('%b', at)}"
    return f"{day} {time.strftime('%H:%M', at)}"
