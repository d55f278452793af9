"""The first tab of a run: its state with the evidence for it, where time and memory go, is it learning.

Pure drawing. `state_lines` and `memory_lines` also serve the preview beside the list of runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate, pairwise

from rich.cells import cell_len

from orchestrator.actions.wishes import can_stop, kill_in_s
from orchestrator.store.rows import RunRow, State
from orchestrator.units import counted, with_article
from tui.attempts import attempt_lines, took
from tui.chart import Look, Series, chart_lines
from tui.detail import RATES, MetricCurve, RunDetail, newest_samples
from tui.keys import key_of
from tui.moment import end_s, faded, is_present, last_seen
from tui.pace import TRAINING, bottleneck
from tui.pieces import (
    BLANK,
    Line,
    Piece,
    beside,
    broken,
    field,
    fields,
    flowed,
    heading,
    memory_meaning,
    meter,
    width_of,
    wrapped,
)
from tui.ranks import newest_peaks, rank_lines
from tui.wording import (
    age,
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
LEAST_SPLIT = 20  # cells of a bar behind the shares of a step
LEAST_CHART = 7  # lines; on a low screen the facts below it are scrolled to


def overview_lines(detail: RunDetail, now_s: float, width: int, height: int, *, ascii_only: bool) -> list[Line]:
    """As many charts as there is room for, above two columns of facts."""
    head = [*state_lines(detail, now_s, width, ascii_only=ascii_only), *cause_lines(detail, width)]
    column = (width - 3) // 2 if width >= 72 else width
    note, is_now = _moment_of_steps(detail, now_s)
    speed = speed_lines(detail, column, note=note, ascii_only=ascii_only)
    split = split_lines(detail, width, ascii_only=ascii_only)
    ranks = rank_lines(detail.ranks, detail.roles_told, width, ascii_only=ascii_only)
    if not is_now:
        speed, split, ranks = [speed[0], *faded(speed[1:])], faded(split), faded(ranks)
    right = _right_column(detail, now_s, column, ascii_only=ascii_only)
    facts = beside((speed, column), (right, column), gap=3) if width >= 72 else [*speed, BLANK, *right]
    facts += [*ranks, *against_lines(detail, width)]
    curves = [curve for name in CHART_METRICS if (curve := detail.curve(name)) is not None and curve.samples]
    room = height - len(head) - len(split) - len(facts) - 2
    if split and room > LEAST_CHART:
        split, room = [*split, BLANK], room - 1
    facts = [*split, *facts]
    lines = [*head, BLANK]
    if curves:
        lines += _charts(curves, width, max(LEAST_CHART, min(room, MOST_CHARTS)), ascii_only=ascii_only)
        lines += [BLANK] if room >= LEAST_CHART or not split else []  # a low screen has the line for the split
    return [*lines, *facts]


def _moment_of_steps(detail: RunDetail, now_s: float) -> tuple[str, bool]:
    """Of when the numbers of a step are, and whether that is now."""
    run = detail.run
    if run.state.is_final:
        return "mean of its last reports", False
    if is_present(run, run.last_event_s, now_s):
        return "mean of newest reports", True
    return last_seen(run.last_event_s, now_s) if run.last_event_s is not None else "of an earlier attempt", False


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
        bar = meter(fraction, 20, ascii_only=ascii_only)
        line: Line = [(f"{newest.what}  ", "text"), *bar, (f"  {done}", "muted")]
        lines += [line] if is_present(run, run.last_event_s, now_s) else faded([line])
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


def speed_lines(detail: RunDetail, width: int, *, note: str = "", ascii_only: bool) -> list[Line]:
    """Both token rates, what a step takes, the queue with the side that waits; `note`: of when that is."""
    latest, pace = detail.means, detail.pace
    lines: list[Line] = [heading("Speed", width, note)]
    for name in RATES:
        if name in detail.rates:
            told = [(rate(detail.rates[name]), "strong"), (" tokens/s", "muted")]
            lines.append(field(name.removesuffix("_tokens_per_s"), told))
    depth, capacity = latest.get("queue_depth"), latest.get("queue_capacity")
    if pace.step_s is not None:
        lines.append(field("step", [(seconds(pace.step_s), "strong")]))
    if pace.step_s is not None or depth is not None:
        lines += fields("bottleneck", wrapped(bottleneck(latest, pace), width - 13))
    if depth is not None and capacity:
        bar = meter(depth / capacity, 6, ascii_only=ascii_only)
        lines.append(
            field("queue", [*bar, (f" {depth:.0f} of {counted(round(capacity), 'batch', 'batches')}", "muted")])
        )
    if len(lines) == 1:
        lines[0] = heading("Speed", width)
        lines.append([(_no_step(detail.run), "muted")])
    return lines


def _no_step(run: RunRow) -> str:
    if not run.state.is_final:
        return "no step yet"
    return "no step was made" if run.kind == "train" else f"{with_article(run.kind)} run counts no steps"


def against_lines(detail: RunDetail, width: int) -> list[Line]:
    """The sentence of `show --against`: the baseline marked in the list, else the newest earlier success of the recipe."""
    if not detail.against:
        return []
    return [BLANK, heading("Speed beside a baseline", width), *wrapped(detail.against, width)]


def memory_lines(detail: RunDetail, now_s: float, width: int, *, ascii_only: bool) -> list[Line]:
    """One bar a GPU against the card's size, as it is or as it was seen last; without GPUs the peaks the job reported."""
    samples = newest_samples(detail.gpu_samples)
    old_s = [sample.at_s for sample in samples if not is_present(detail.run, sample.at_s, now_s)]
    lines: list[Line] = [heading("Memory", width, last_seen(max(old_s), now_s) if old_s else "")]
    for sample in samples:
        used, total = sample.used_bytes, sample.total_bytes
        fraction = used / total if used is not None and total else None
        numbers = f"  {gib(used, unit=False):>4} of {gib(total)}"
        used_share = f"  busy {percent(sample.utilisation)}" if width >= 44 else ""
        name = f"{gpu_name(detail.run, sample.gpu)}  "
        room = max(6, width - cell_len(name) - len(numbers) - len(used_share))
        bar = meter(fraction, room, memory_meaning(fraction), ascii_only=ascii_only)
        line: Line = [(name, "muted"), *bar, (numbers, "text"), (used_share, "muted")]
        lines += faded([line]) if sample.at_s in old_s else [line]
    if not samples:
        for peak in newest_peaks(detail.peaks)[-4:]:
            size = peak.allocated_bytes or peak.driver_bytes or peak.reserved_bytes
            lines.append(field(peak.stage, [(gib(size), "strong"), (" peak", "muted")]))
    return lines if len(lines) > 1 else []


def _right_column(detail: RunDetail, now_s: float, width: int, *, ascii_only: bool) -> list[Line]:
    memory = memory_lines(detail, now_s, width, ascii_only=ascii_only)
    lines = [*memory, BLANK] if memory else []
    lines += [heading("Run", width)]
    run = detail.run
    where = hosts_told(run, [sample.gpu for sample in newest_samples(detail.gpu_samples)])
    lines += fields("host", wrapped(where, width - 13))
    lines += fields("gate", _gate(detail, width - 13))
    lines += attempt_lines(detail, width)
    if detail.checkpoints:
        newest = detail.checkpoints[-1]
        lines.append(field("checkpoint", f"step {count(newest.step)}, {age(now_s - newest.at_s)} ago"))
    if run.tags:
        lines.append(field("tags", " ".join(run.tags)))
    return lines + fields("note" if run.note else "why", wrapped(run.note or run.why, width - 13, "muted")[:3])


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
        return took(detail, now_s)
    if run.state is not State.RUNNING:
        return None
    if pace.eta_s is None:
        return _since(detail, now_s)
    if not is_present(run, run.last_event_s, now_s):
        return _would_end(detail, now_s, pace.eta_s)
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


def _would_end(detail: RunDetail, now_s: float, eta_s: float) -> Line:
    """Of one that tells nothing at the moment: counted from its newest step, as more than that is not known."""
    at_s = end_s(detail.run, eta_s, detail.attempts[-1].last_step_s if detail.attempts else None, now_s)
    return [
        ("would end " if at_s > now_s else "would have ended ", "muted"),
        (clock(at_s, now_s), "text"),
        (f", by its step {count(detail.run.step)}, {age(now_s + eta_s - at_s)} ago", "muted"),
    ]


def _wishes(detail: RunDetail, now_s: float) -> list[Line]:
    """What is still to be done to the run: the kill at the end of its grace, the retry of one that has ended."""
    left_s = kill_in_s(detail.run, detail.intents, detail.spec or {}, now_s)
    lines: list[Line] = []
    if left_s is not None:
        at = time.strftime("%H:%M:%S", time.localtime(now_s + left_s))
        lines.append([("asked to end; what still lives is killed at ", "muted"), (at, "warn")])
    if detail.run.state.is_final and can_stop(detail.run, detail.intents):
        lines.append([("a retry is to come; ", "warn"), (key_of("app.stop"), "key"), (" calls it off", "muted")])
    return lines


def _since(detail: RunDetail, now_s: float) -> Line | None:
    """Where no step is left to tell an end from: for how long the stage has gone on."""
    begun_s = max((event.at_s for event in detail.events if event.kind == "stage"), default=None)
    stage = detail.run.stage
    if begun_s is None or stage is None or stage in TRAINING:
        return None
    seen_s = detail.run.last_event_s
    is_now = seen_s is None or is_present(detail.run, seen_s, now_s)
    until_s, then = (now_s, "") if seen_s is None or is_now else (seen_s, f", {last_seen(seen_s, now_s)}")
    return [(f"{stage.replace('_', ' ')} for ", "muted"), (duration(until_s - begun_s), "text"), (then, "muted")]


_SPLIT_MEANINGS = {
    "wait": "warn",
    "forward": "series_1",
    "backward": "series_3",
    "optimizer": "series_4",
    "other": "faint",
}


def split_lines(detail: RunDetail, width: int, *, ascii_only: bool) -> list[Line]:
    """The share of each part of a step in words of its colour; where there is room behind them a bar of the same."""
    step_s, parts = detail.pace.step_s, detail.pace.parts
    if not parts or not step_s:
        return []
    shares = [(name, part_s / step_s) for name, part_s in parts]
    words = flowed(
        [[(f"{name} ", _SPLIT_MEANINGS[name]), (percent(share), "text")] for name, share in shares], width - 13
    )
    room = width - 13 - width_of(words[0]) - 3
    if len(words) == 1 and room >= LEAST_SPLIT:
        sign, end = "#|" if ascii_only else "━╸"  # each part has an end: without colours, or faded, it is one line else
        ends = [round(so_far * room) for so_far in accumulate(share for _, share in shares)]
        cells = [min(end, room) - min(begin, room) for begin, end in pairwise([0, *ends])]
        bar: list[Piece] = [
            (sign * (num - 1) + end if num else "", _SPLIT_MEANINGS[name])
            for (name, _), num in zip(shares, cells, strict=True)
        ]
        words = [[*words[0], ("   ", "text"), *bar]]
    return fields("a step", words)


def _gate(detail: RunDetail, width: int) -> list[Line]:
    if detail.run.forced_reason:
        return wrapped(f"forced: {detail.run.forced_reason}", width, "warn")
    newest: dict[str, bool] = {}
    for row in reversed(detail.rungs):
        newest[row.rung] = row.passed
    if not newest:
        return wrapped("no rungs on record", width, "muted")
    passed = sum(newest.values())
    failed = [rung for rung, is_passed in newest.items() if not is_passed]
    told = f"{counted(passed, 'rung')} passed" + (f", failed: {', '.join(failed)}" if failed else "")
    return wrapped(told, width, "bad" if failed else "good")


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
