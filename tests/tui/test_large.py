"""What is large on a screen: many metrics, long curves, long lines, long logs. By processor time of the best of a few."""

import re
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from orchestrator.store.reads import Reader
from tests.tui.golden import opened, press, shown
from tests.tui.world import NOW_S, Writer, Yard
from tui.app import Draftyard
from tui.compare import MOST_RUNS
from tui.detail import read_detail, samples_of
from tui.log_sheet import LogSheet
from tui.plain import screen_text
from tui.snapshot import CurvesAsk

pytestmark = pytest.mark.slow  # a whole app a test

Open = Callable[..., Draftyard]
RUN = "many2345"


@pytest.fixture
def yard(tmp_path: Path) -> Yard:
    made = Yard(tmp_path / "runs.db")
    made.run(RUN, "large/one", ago_s=100.0)
    return made


async def test_twelve_thousand_metrics_are_listed_and_found_by_name(yard: Yard, open_app: Open) -> None:
    names = [f"layer.{number:05d}.norm" for number in range(12_000)]
    Writer(yard.store, RUN).tell([("metrics", NOW_S, {"step": 1, "values": dict.fromkeys(names, 0.5)})])
    app = open_app(yard.path)
    async with opened(app, "enter", "2", size=(140, 40)) as pilot:
        await press(app, pilot, "slash", *"9876")
        listed = await shown(app, pilot, "layer.09876.norm")
        await press(app, pilot, "enter")
        found = await shown(app, pilot, "▸ layer.09876.norm")

    with Reader(yard.path) as reader:
        run = reader.run(RUN)
        took_s = best_s(lambda: read_detail(reader, run, CurvesAsk(count=12)))

    assert "layer.00001.norm" not in listed
    assert "layer.09877.norm" in found
    assert took_s < 1.5  # 0.17 on two cores; claimed is 0.2


def test_a_curve_over_ten_times_the_steps_costs_no_more_and_is_no_longer(yard: Yard) -> None:
    """Counted in steps of SQLite's machine, which no neighbour slows down."""
    Writer(yard.store, RUN).tell(
        [("metrics", NOW_S, {"step": step, "values": {"loss": 1.0 / (step + 1)}}) for step in range(100_000)]
    )
    yard.run("few23456", "large/few", ago_s=90.0)
    Writer(yard.store, "few23456").tell(
        [("metrics", NOW_S, {"step": step, "values": {"loss": 1.0}}) for step in range(10_000)]
    )

    counts, lengths = {}, {}
    with Reader(yard.path) as reader, reader.database.sqlite() as connection:
        for run_id in ("few23456", RUN):
            counted = [0]

            def count(counted: list[int] = counted) -> None:
                counted[0] += 1

            connection.set_progress_handler(count, 100)
            lengths[run_id] = len(samples_of(reader.curve(run_id, "loss", buckets=240)))
            connection.set_progress_handler(None, 0)
            counts[run_id] = counted[0]

    assert max(lengths.values()) <= 240
    assert 0 < counts[RUN] < 1.5 * counts["few23456"]


async def test_ten_charts_of_ten_runs_are_each_there_at_once(tmp_path: Path, open_app: Open) -> None:
    """A million values in a hundred curves; over ten times the steps each costs no more (above). Six of the runs over each other."""
    yard = Yard(tmp_path / "runs.db")
    ids = [f"ten{number}wq7k" for number in range(10)]
    names = ("loss", "accuracy", "streak", "lr", "grad_norm", *(f"own.{number}" for number in range(5)))
    for number, run_id in enumerate(ids):
        yard.run(run_id, f"ten/runs{number}", ago_s=100.0 + number)
    values = [
        ("metrics", NOW_S, {"step": step, "values": dict.fromkeys(names, 1.0 / (step + 1))}) for step in range(10_000)
    ]
    Writer(yard.store, ids[0]).tell(values)
    with sqlite3.connect(yard.path) as connection:
        copy_metrics(connection, ids)

    app = open_app(yard.path)
    async with opened(app, size=(170, 50)) as pilot:
        took_s, texts = [], []
        for run_id in ids:
            began_s = time.process_time()
            app.open_run(run_id, "curves")
            await app.settle(pilot)
            texts.append(await shown(app, pilot, run_id, *names))
            took_s.append(time.process_time() - began_s)
            await press(app, pilot, "escape")
        began_s = time.process_time()
        await press(app, pilot, *["space"] * MOST_RUNS, "c")
        compared = await shown(app, pilot, f"compare {MOST_RUNS} runs")
        compare_s = time.process_time() - began_s

    assert min(len(re.findall("[\u2801-\u28ff]", text)) for text in texts) > 300
    assert "loss" in compared
    assert max(took_s) < 5.0  # 0.15 s on two cores; claimed is 1
    assert compare_s < 5.0


def copy_metrics(connection: sqlite3.Connection, run_ids: Sequence[str]) -> None:
    """What the first run has reported is what the others have; through the Store it would take a minute."""
    keys = [connection.execute("SELECT key FROM runs WHERE id = ?", (run_id,)).fetchone()[0] for run_id in run_ids]
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    columns = {name: [row[1] for row in connection.execute(f"PRAGMA table_info({name})")] for name in tables}
    series = ", ".join(name for name in columns["series"] if name not in ("id", "run_key"))
    for key in keys[1:]:
        connection.execute(
            f"INSERT INTO series (run_key, {series}) SELECT ?, {series} FROM series WHERE run_key = ?", (key, keys[0])
        )
    same = "SELECT new.id, old.id FROM series new JOIN series old USING (name, attempt, rank) WHERE new.run_key = ? AND old.run_key = ?"
    for key in keys[1:]:
        for new, old in connection.execute(same, (key, keys[0])).fetchall():
            for table in (name for name in tables if "series" in columns[name]):
                rest = ", ".join(name for name in columns[table] if name != "series")
                connection.execute(
                    f"INSERT INTO {table} (series, {rest}) SELECT ?, {rest} FROM {table} WHERE series = ?",
                    (new, old),
                )


@pytest.mark.parametrize("length", [90_000, 1_000_000])
async def test_a_line_of_any_length_is_scrolled_past_frame_by_frame(length: int, yard: Yard, open_app: Open) -> None:
    """A frame is a key answered."""
    before, after = ("".join(f"line {number}\n" for number in range(first, first + 60)) for first in (0, 60))
    yard.log(RUN, before + '{"json": "' + "x" * length + '"}\n' + after)
    app = open_app(yard.path, run=RUN)
    async with opened(app, "4", size=(120, 40)) as pilot:
        frames_s, lines = [], set()
        for key in ("pageup", "w", "pageup", "pageup", "pagedown", "w", "pageup"):
            frames_s.append(await frame_s(app, pilot, key))
            lines |= set(screen_text(app).splitlines())
        kept = [line.text for line in app.shown.log.lines if len(line.text) > 1000]  # type: ignore[union-attr]

    assert len(kept) == 1
    assert re.search(r"…\(\+\d+,\d+\)$", kept[0])
    assert any("xxxx" in line for line in lines)
    assert sorted(frames_s)[len(frames_s) // 2] < 0.3  # 11 to 20 ms on two cores; claimed is 0.1


async def test_half_a_million_lines_scroll_without_being_drawn(yard: Yard, open_app: Open) -> None:
    yard.log(RUN, "".join(f"[rank0]: line {number:06d} of a job that says a lot\n" for number in range(500_000)))
    app = open_app(yard.path, run=RUN)
    async with opened(app, "4", size=(120, 40)) as pilot:
        frames_s = [await frame_s(app, pilot, "pageup") for _ in range(12)]
        top = app.screen.query_one(LogSheet).visible_text()

    assert "line 499999" not in top
    assert min(frames_s) < 3 / 20  # 12 ms on two cores; drawing every line would take seconds


async def frame_s(app: Draftyard, pilot: object, key: str) -> float:
    """Processor time of all threads, from the key to the screen that answers it."""
    began = time.process_time()
    await press(app, pilot, key)  # type: ignore[arg-type]
    return time.process_time() - began


def best_s(do: Callable[[], object]) -> float:
    took = []
    for _ in range(5):
        began = time.process_time()
        do()
        took.append(time.process_time() - began)
    return min(took)
