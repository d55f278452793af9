"""How quick the screens are: first paint, key to paint, idle cost, memory, charts over many points.

    python -m benchmarks.tui                 the whole table (about eight minutes, of which filling 10,000 runs and 10 million values is two)
    python -m benchmarks.tui --quick         twenty seconds, for a look after a change
    python -m benchmarks.tui --quick --loose 10   exit status 1 where something takes over ten times what is claimed

Claims (on two cores of an ordinary laptop, nothing else running): first paint under 300 ms after
imports, the whole cold process under 900 ms; key to paint under 50 ms at the 99th percentile while 8
runs deliver 100 events/s; idle with 8 live runs under 3 % of a core; at ten times that rate for five
minutes under 250 MB and no growth in the last half; a chart over a hundred times as many points (a
million by ten thousand) within 1.5 times of one over the few.

All but the charts is measured on the program itself, `draftyard watch` in a pseudo-terminal of 170 x 45 (tui_terminal.py): a first
paint ends with the first bytes that show a run, a cold process begins with its start, rest and memory are those of that process
(tui_program.py). Keys are typed there and timed to the bytes that answer them; that program is the same but for a driver that takes notes (tui_cost.py).
Where a machine is shared, the CPU times beside the waits say what the program itself costs: of the thread that paints, from
the key being read to the bytes being written, kind by kind. Whoever delivers the events is a process of its own.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.tui_keys import keys
from benchmarks.tui_program import first_paint, idle, memory
from benchmarks.tui_rows import Row, measured
from orchestrator.store.reads import Reader
from orchestrator.store.rows import NewRun, State
from orchestrator.store.writes import Store
from tests.tui.world import Writer, Yard, steps
from tui.chart import Look, Series, chart_lines
from tui.detail import samples_of

EVENTS_PER_S = 100  # of all eight live runs together
NUM_LIVE = 8
MANY, FEW = "many2345", "few23456"
MANY_BY_FEW = 100  # as many points: a cost that grows with them would show
NAMES = ("loss", "accuracy", "streak", "lr", "grad_norm", "step_s", "wait_s", "forward_s", "backward_s", "optimizer_s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--loose", type=float, help="fail where a time is over so many times what is claimed")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--values", type=int, default=10_000_000)
    parser.add_argument("--db", type=Path, help="keep the database here and use it again")
    asked = parser.parse_args()
    num_runs, num_values, names = (1000, 100_000, NAMES[:1]) if asked.quick else (asked.runs, asked.values, NAMES)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = asked.db or Path(folder) / "runs.db"
        if not path.exists():
            fill(path, num_runs=num_runs, num_values=num_values, names=names)
        rows, failed = measure(path, is_quick=asked.quick)
    print("\n".join(map(str, rows)))
    print(f"took {time.perf_counter() - began:.0f} s in all", file=sys.stderr)
    if failed:
        sys.exit("not measured: " + "; ".join(failed))
    if asked.loose and (beyond := [row.what for row in rows if not row.holds(asked.loose)]):
        sys.exit(f"over {asked.loose:g} times what is claimed: {', '.join(beyond)}")


def measure(path: Path, *, is_quick: bool) -> tuple[list[Row], list[str]]:
    """Idle before anybody delivers events, so that nothing is left to be read. What failed is told beside what was measured."""
    repeats, keys_s, memory_s, idle_s = (2, 3.0, 3.0, 2.0) if is_quick else (7, 50.0, 300.0, 20.0)
    fast = 10 * EVENTS_PER_S
    return measured(
        [
            ("first paint", lambda: first_paint(path, repeats)),
            ("charts", lambda: charts(path)),
            ("idle", lambda: idle(path, idle_s, NUM_LIVE)),
            ("keys", lambda: keys(path, keys_s, EVENTS_PER_S, delivering(path, EVENTS_PER_S))),
            ("memory", lambda: memory(path, memory_s, delivering(path, fast), fast, is_quick=is_quick)),
        ]
    )


def fill(path: Path, *, num_runs: int, num_values: int, names: Sequence[str] = NAMES) -> None:
    """Runs through the Store where they need metrics, the crowd by SQL alone."""
    began = time.perf_counter()
    yard = Yard(path)
    yard.now_s = time.time()
    with yard.store as store:
        for number in range(NUM_LIVE):
            run_id = f"live{number:04d}"
            store.create_run(NewRun(run_id, "train", "bench", f"live-{number}", "local", {}, num_steps=10_000_000))
            store.new_attempt(run_id)
            Writer(store, run_id).tell(steps(0, 200, 1, begin_s=time.time(), step_s=0.1, seed=number))
            store.set_state(run_id, State.RUNNING, evidence="benchmark")
        num_steps = num_values // len(names)
        many(store, MANY, num_steps=num_steps, names=names)
        many(store, FEW, num_steps=num_steps // MANY_BY_FEW, names=names)
    with sqlite3.connect(path) as connection:
        columns = [
            row[1]
            for row in connection.execute("PRAGMA table_info(runs)")
            if row[1] not in ("key", "id", "state", "ended_s")
        ]
        names = ", ".join(columns)
        connection.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)"
            f" INSERT INTO runs (id, state, ended_s, {names})"
            f" SELECT printf('c%07d', i), 'succeeded', created_s, {names} FROM n, runs WHERE id = '{FEW}'",
            (num_runs,),
        )
    print(f"filled in {time.perf_counter() - began:.0f} s: {path.stat().st_size / 2**20:.0f} MiB", file=sys.stderr)


def many(store: Store, run_id: str, *, num_steps: int, names: Sequence[str]) -> None:
    store.create_run(NewRun(run_id, "train", "bench", run_id, "local", {}, num_steps=num_steps))
    store.new_attempt(run_id)
    writer = Writer(store, run_id)
    for first in range(0, num_steps, 5000):
        writer.tell(
            [
                ("metrics", float(step), {"step": step, "values": dict.fromkeys(names, 1.0 / (1 + step))})
                for step in range(first, min(first + 5000, num_steps))
            ]
        )
    store.set_state(run_id, State.SUCCEEDED, evidence="benchmark")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}


def charts(path: Path) -> list[Row]:
    """Reading and drawing one chart, over few points and over many."""
    took, best = {}, {}
    with Reader(path) as reader:
        for run_id in (FEW, MANY):
            times = []
            for _ in range(15):
                began = time.perf_counter()
                samples = samples_of(reader.curve(run_id, "loss", buckets=240))
                chart_lines("loss", "nats", [Series("loss", "live", samples)], (120, 30), Look(smoothing=0.6))
                times.append((time.perf_counter() - began) * 1000)
            took[run_id], best[run_id] = statistics.median(times), min(times)
        sizes = {run_id: reader.series(run_id, "loss")[0].num_values for run_id in took}
    few, many = (f"chart over {sizes[run_id]:,} points" for run_id in (FEW, MANY))
    return [
        Row(few, took[FEW], "ms"),
        Row(many, took[MANY], "ms"),
        Row(
            "the second by the first",
            took[MANY] / took[FEW],
            "times",
            1.5,
            slack=3.0,  # over so few points a moment of a neighbour is much; tests/tui/test_large.py counts SQLite's steps
            alone=best[MANY] / best[FEW],
        ),
    ]


@contextmanager
def delivering(path: Path, events_per_s: int) -> Iterator[None]:
    """Another process that delivers events, as the follower is one."""
    code = "import sys; from pathlib import Path; from benchmarks.tui import feed; feed(Path(sys.argv[1]), int(sys.argv[2]))"
    feeder = subprocess.Popen([sys.executable, "-c", code, str(path), str(events_per_s)], env=environment())
    try:
        yield
        assert feeder.poll() is None, "nobody delivered events any more"
    finally:
        feeder.terminate()
        feeder.wait()


def feed(path: Path, events_per_s: int) -> None:
    """Over the live runs, in ten commits a second as a follower makes them; never ends by itself."""
    with Store(path) as store:
        writers = [Writer(store, f"live{number:04d}", name="rank0") for number in range(NUM_LIVE)]
        first = int(time.time()) % 100_000 * 90  # beyond what a feeder before it has told
        for writer in writers:
            writer.skip_to(first * 1_000_000)
        began, done = time.monotonic(), 0
        while True:
            due = int((time.monotonic() - began) * events_per_s)
            told: dict[int, list[tuple[str, float, dict[str, object]]]] = {}
            for step in range(done + 1, due + 1):
                values = {"loss": 1 / step, "step_s": 0.1}
                told.setdefault(step % NUM_LIVE, []).append(
                    ("metrics", time.time(), {"step": first + step, "values": values})
                )
            done = due
            for number, events in told.items():
                writers[number].tell(events)
            time.sleep(0.1)


if __name__ == "__main__":
    main()
