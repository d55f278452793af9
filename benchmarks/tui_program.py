"""The program itself, `draftyard watch` in a pseudo-terminal: how soon it shows a run, what it costs at rest, what it grows to.

First paint ends with the first bytes painted that show a run of the list. The cold process counts to there from just before it is
started; "after imports" from when a process that has imported what the verb and its screens import goes on as the program does.
Processor time and memory are those of that process, as the kernel counts them.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tui_rows import Row, ms
from benchmarks.tui_terminal import Watching, watching_as_installed
from orchestrator.store.reads import Reader

SETTLED_S = 1.5  # after the first paint: other screens are made, what was imported is swept
KEY_S = 0.06  # between two keys: longer than an Escape waits to be told from an arrow
LOOK_S = 0.2
# From the list back to it, and what must have been on the screen on the way: keys that lead nowhere would measure nothing.
ROUND = ("j k", "enter", "2", "4", "escape", "space space c", "escape", "escape g")
PLACES = ("2:hosts", "1:overview", "compare 2 runs")
# Once before: hosts, smoke and launch, which the program makes by itself as soon as nobody has typed for half a second. That is 8 MB,
# the recipes for the launch among them, and came whenever a busy machine held up the keys.
ONCE = ("2", "3", "4", "escape g", *ROUND)


def first_paint(path: Path, repeats: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "imported"
        cold = [_painted(path) for _ in range(repeats)]
        warm = [_painted(path, notes) for _ in range(repeats)]
    with Reader(path) as reader:
        what = f"first paint after imports, {reader.count_runs():,} runs"
    return [_row(what, warm, 300), _row("whole cold process, from its start to a run painted", cold, 900)]


@dataclass(frozen=True)
class Opening:
    paint_s: float  # until a run is painted
    crowded_s: float  # of which the painting thread could run and another process had its processor
    cpu_s: float  # of the process from its start


def _painted(path: Path, notes: Path | None = None) -> Opening:
    """`notes`: counted from when the process has imported all, as it writes there."""
    with watching_as_installed(path, notes) as program:
        painted_at = program.painted_run()
        cpu_s, crowded_s = cpu_s_of(program.pid), program.crowded_s()
        if notes is None:
            return Opening(painted_at - program.began, crowded_s, cpu_s)
        imported_at, crowded_before_s = map(float, notes.read_text().split())
        return Opening(painted_at - imported_at, crowded_s - crowded_before_s, cpu_s)


def _row(what: str, some: Sequence[Opening], bound: float) -> Row:
    alone = ms([one.paint_s - one.crowded_s for one in some])
    note = f"{alone:.0f} ms had nobody else used its core; CPU from its start {ms([one.cpu_s for one in some]):.0f} ms"
    return Row(what, ms([one.paint_s for one in some]), "ms", bound, note, alone=alone)


def idle(path: Path, seconds: float, num_live: int) -> list[Row]:
    """CPU of the program while it only watches, nobody writing."""
    with watching_as_installed(path) as program:
        program.painted_run()
        program.rest(SETTLED_S)
        before, began = cpu_s_of(program.pid), time.perf_counter()
        program.rest(seconds)
        share = (cpu_s_of(program.pid) - before) / (time.perf_counter() - began) * 100
    return [Row(f"idle with {num_live} live runs", share, "% of a core", 3, slack=2.0)]


def memory(
    path: Path, seconds: float, delivering: AbstractContextManager[None], events_per_s: int, *, is_quick: bool
) -> list[Row]:
    """The resident size while keys lead through list, run, curves, log and compare again and again.

    Growth is of the last half, its last tenth by its first, as single readings jump. A few seconds are mostly caches that
    fill, so the quick form holds it by a bound that only a leak of megabytes a second breaks.
    """
    sizes: list[float] = []
    seen: set[str] = set()
    with watching_as_installed(path) as program, delivering:
        program.painted_run()
        for keys in ONCE:  # every screen has been there: what it is made of stays
            _tap(program, keys)
        ends = time.monotonic() + seconds
        while not sizes or time.monotonic() < ends:
            for keys in ROUND:
                _tap(program, keys)
                seen |= {place for place in PLACES if place in str(program.face)}
                sizes.append(resident_bytes(program.pid) / 1e6)
                if len(sizes) % 100 == 0:
                    sys.stderr.write(f"{sizes[-1]:.1f} MB, {max(sizes):.1f} at the most\n")
    if missing := set(PLACES) - seen:
        raise RuntimeError(f"the keys did not lead to {', '.join(sorted(missing))}; on the screen is:\n{program.face}")
    half = sizes[len(sizes) // 2 :]
    tenth = max(1, len(half) // 10)
    growth = statistics.median(half[-tenth:]) - statistics.median(half[:tenth])
    told = f"{events_per_s} events/s for {seconds:.0f} s"
    bound, note = (20.0, "1 in the long form") if is_quick else (1.0, "")
    return [
        Row(f"memory at the most, {told}", max(sizes), "MB", 250, slack=1.0),
        Row("growth in the last half", growth, "MB", bound, note, slack=1.0),
    ]


def _tap(program: Watching, keys: str) -> None:
    for key in keys.split():
        program.tap(key)
        program.rest(KEY_S)
    program.rest(LOOK_S)


def cpu_s_of(pid: int) -> float:
    """Processor time of a process, threads that have ended included."""
    if sys.platform == "linux":
        return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3), which Python has not
    return seconds_told(_told_by_ps(pid, "cputime"))


def seconds_told(span: str) -> float:
    """`1-02:03:04.56`, as ps has it."""
    words = span.replace("-", ":").split(":")
    return sum(float(word) * unit for word, unit in zip(reversed(words), (1, 60, 3600, 86_400), strict=False))


def resident_bytes(pid: int) -> int:
    told = Path(f"/proc/{pid}/statm")
    if told.exists():
        return int(told.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return int(_told_by_ps(pid, "rss")) * 1024


def _told_by_ps(pid: int, what: str) -> str:
    command = ["ps", "-o", f"{what}=", "-p", str(pid)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
