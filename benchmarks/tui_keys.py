"""Keys typed into the screens while runs report: what each kind of key took, and what the program did in the worst of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.tui_rows import Row, ms, p99_ms
from benchmarks.tui_terminal import Answer, watching

KINDS = {"j": "a move", "k": "a move", "g": "a move", "s": "another order", "o": "another order", "enter": "a run opened",
         "1": "another tab", "2": "another tab", "4": "another tab", "escape": "back (20 ms of it waited for more of a key)"}  # fmt: skip
FIRST = "a run opened, the first time"
WORST = 10
TELL_S = 10.0


def keys(path: Path, seconds: float, events_per_s: int, delivering: AbstractContextManager[None]) -> list[Row]:
    """Each key to the paint that shows it was taken. What was measured is told also where a key had no answer."""
    answers: list[Answer] = []
    told_s = time.monotonic()
    with watching(path) as program, delivering:
        for answer in program.typed(seconds):
            answers.append(answer)
            if time.monotonic() - told_s > TELL_S:
                told_s = time.monotonic()
                sys.stderr.write(f"{len(answers)} keys: {_told(answers)}\n")
        unanswered = program.unanswered
    sys.stderr.writelines(f"{why}\n" for why in (*unanswered, *worst(answers)))
    return rows_of(answers, events_per_s, num_unanswered=len(unanswered))


def rows_of(answers: Sequence[Answer], events_per_s: int, *, num_unanswered: int) -> list[Row]:
    lost = Row("keys without an answer", num_unanswered, "keys", 1, slack=1.0)
    if not answers:
        return [lost]
    paints = [answer.paint_s for answer in answers]
    alone = [answer.paint_s - answer.crowded_s for answer in answers]
    opened = [answer.all_s for answer in answers if answer.key == "enter"]
    strayed = [answer.strayed for answer in answers if answer.strayed]
    by_kind: dict[str, list[Answer]] = {}
    for answer in answers:
        by_kind.setdefault(FIRST if answer.is_first and answer.key == "enter" else KINDS[answer.key], []).append(answer)
    return [
        lost,
        Row("moves to another run than the next", len(strayed), "keys", 1, "; ".join(strayed[:3]), slack=1.0),
        Row(f"key to paint, median of {len(answers)} keys, {events_per_s} events/s", ms(paints), "ms"),
        Row("key to paint, 99th percentile", p99_ms(paints), "ms", 50, f"{p99_ms(alone):.0f} ms had nobody else used its core",
            alone=p99_ms(alone)),
        *own_cpu("a key", answers),
        *(row for kind, some in by_kind.items() for row in own_cpu(kind, some)),
        *([Row("a run opened, read and drawn, median", ms(opened), "ms")] if opened else []),
    ]  # fmt: skip


def own_cpu(what: str, answers: Sequence[Answer]) -> list[Row]:
    """What answering takes of a processor, which no other process changes much; beside it the wait."""
    costs = [answer.cost for answer in answers if answer.cost is not None]
    if not costs:
        return []
    painting, every = [cost.painting_s for cost in costs], [cost.all_s for cost in costs]
    waits = [answer.paint_s for answer in answers]
    told = f"wait {ms(waits):.1f} and {p99_ms(waits):.1f}; with the reading thread {ms(every):.1f} and {p99_ms(every):.1f} ms"
    return [
        Row(f"own CPU of {what.partition(' (')[0]}, median of {len(costs)}", ms(painting), "ms"),
        Row(f"own CPU of {what}, 99th percentile", p99_ms(painting), "ms", note=told),
    ]


def worst(answers: Sequence[Answer]) -> list[str]:
    """The slowest keys in words: what each took, and what the program was at meanwhile, which may overlap."""
    slowest = sorted(answers, key=lambda answer: -answer.paint_s)[:WORST]
    return [f"  {answer.key:6} {_cost_of(answer)}" for answer in slowest]


def _cost_of(answer: Answer) -> str:
    waited = f"{answer.paint_s * 1000:5.0f} ms, {answer.crowded_s * 1000:3.0f} of them crowded"
    if answer.cost is None:
        return waited
    did = ", ".join(f"{word} {took_s * 1000:.0f} ms in {number}" for word, (number, took_s) in answer.cost.did.items())
    return (
        f"{waited}, own CPU {answer.cost.painting_s * 1000:3.0f}, of all threads {answer.cost.all_s * 1000:3.0f}: {did}"
    )


def _told(answers: Sequence[Answer]) -> str:
    paints = [answer.paint_s for answer in answers]
    own = [answer.cost.painting_s for answer in answers if answer.cost is not None] or [0.0]
    return f"{ms(paints):.1f} and {p99_ms(paints):.1f} ms, own CPU {ms(own):.1f} and {p99_ms(own):.1f} ms"
