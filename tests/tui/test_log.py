"""The log of a run by byte ranges: cleaning is orchestrator.actions.log_text's, tested there; here is the view."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.store.reads import Reader
from orchestrator.store.rows import RunRow
from tests.tui.golden import opened, press, shown
from tests.tui.world import Yard
from tui.app import Draftyard
from tui.log_page import LogAsk, LogPage, read_log, search_log
from tui.log_sheet import LogSheet
from tui.plain import screen_text

pytestmark = pytest.mark.slow  # a whole app a test

Open = Callable[..., Draftyard]


@pytest.fixture
def yard(tmp_path: Path) -> Yard:
    made = Yard(tmp_path / "runs.db")
    made.run("logs2345", "long/log", ago_s=100.0)
    return made


def page_of(yard: Yard, ask: LogAsk) -> tuple[Reader, RunRow, LogPage]:
    reader = Reader(yard.path)
    run = reader.run("logs2345")
    return reader, run, read_log(reader, run, ask)


def test_the_newest_piece_ends_at_the_end_and_begins_at_a_line(yard: Yard) -> None:
    yard.log("logs2345", "".join(f"line {number:06d}\n" for number in range(100_000)))

    _, _, page = page_of(yard, LogAsk())

    assert page.is_at_end
    assert page.start > 0
    assert page.lines[0].text.startswith("line ")
    assert page.lines[-1].text == "line 099999"


def test_pieces_one_after_the_other_are_the_whole_file(yard: Yard) -> None:
    lines = [f"line {number}" for number in range(60_000)]
    yard.log("logs2345", "\n".join(lines) + "\n")
    start, found = 0, []
    while True:
        _, _, page = page_of(yard, LogAsk(start=start))
        found += [line.text for line in page.lines]
        if page.is_at_end:
            break
        start = page.end

    assert found == lines


def test_a_line_of_a_megabyte_is_cut_with_what_is_left_out(yard: Yard) -> None:
    yard.log("logs2345", "x" * 1_000_000 + "\nafter\n")

    _, _, page = page_of(yard, LogAsk())

    assert page.lines[-1].text == "after"
    assert len(page.lines[-2].text) < 2100
    assert page.lines[-2].text.endswith("…(+998,000)")


def test_five_gigabytes_open_at_once(yard: Yard) -> None:
    yard.log("logs2345", "the end\n")
    path = yard.store.logs.path("logs2345", 1, "stdout")
    with path.open("r+b") as log:  # sparse: costs no disk
        log.truncate(5 * 1024**3)
        log.seek(0, os.SEEK_END)
        log.write(b"\nthe very end\n")

    def open_s() -> float:
        began = time.perf_counter()
        _, _, page = page_of(yard, LogAsk())
        assert page.lines[-1].text == "the very end"
        return time.perf_counter() - began

    assert any(open_s() < 1.0 for _ in range(5))  # a busy neighbour is not our cost


# A process of its own, because the memory of this one holds what other tests have left.
WATCH_A_LOG = """
import asyncio, sys
from pathlib import Path
from tui.app import Draftyard
from tui.plain import screen_text

def highest_kib():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

async def look():
    app = Draftyard(Path(sys.argv[1]), run="logs2345")
    async with app.run_test(size=(80, 24)) as pilot:
        await app.settle(pilot)
        before = highest_kib()
        for key in ("l", "home", "end", "pageup", "end"):
            await pilot.press(key)
            await app.settle(pilot)
        print(highest_kib() - before)
        print(screen_text(app))

asyncio.run(look())
"""


def test_five_gigabytes_are_looked_at_within_bounded_memory(yard: Yard) -> None:
    yard.log("logs2345", "the beginning\n")
    path = yard.store.logs.path("logs2345", 1, "stdout")
    with path.open("r+b") as log:
        log.truncate(5 * 1024**3)
        log.seek(0, os.SEEK_END)
        log.write(b"\n" + b"".join(b"line %06d\n" % number for number in range(60_000)) + b"the very end\n")

    done = subprocess.run(
        [sys.executable, "-c", WATCH_A_LOG, str(yard.path)], capture_output=True, text=True, timeout=120, check=True
    )
    grown_kib, shown = done.stdout.split("\n", 1)

    assert "the very end" in shown
    assert "5.00 GiB" in shown
    assert int(grown_kib) < 64 * 1024


def test_searching_goes_both_ways_over_blocks(yard: Yard) -> None:
    text = "".join(f"line {number:07d}\n" for number in range(300_000))
    yard.log("logs2345", text)
    reader, _, page = page_of(yard, LogAsk())
    place = text.index("line 0200000")

    assert search_log(reader, page, "LINE 0200000", after=0).at == place
    assert search_log(reader, page, "line 0200000", after=len(text), backwards=True).at == place
    missing = search_log(reader, page, "no such line", after=0)
    assert (missing.at, missing.is_done) == (None, True)


async def test_scrolling_up_pauses_following_and_end_resumes(yard: Yard, open_app: Open) -> None:
    yard.log("logs2345", "".join(f"line {number:06d}\n" for number in range(50_000)))
    app = open_app(yard.path)
    async with opened(app, "l") as pilot:
        assert "following" in screen_text(app)
        await press(app, pilot, *["pageup"] * 3)
        held = screen_text(app)
        yard.store.keep_log(
            "logs2345", 1, "stdout", content=b"one more\n", read_from=yard.store.position("logs2345", 1, "stdout")
        )
        app.tick()
        await app.settle(pilot)
        still = screen_text(app)
        await press(app, pilot, "end")

        assert "End follows again" in held
        assert held.splitlines()[4:-2] == still.splitlines()[4:-2]
        assert "one more" in screen_text(app)


async def test_paging_up_crosses_pieces_without_losing_a_line(yard: Yard, open_app: Open) -> None:
    """Two pieces and a half of the file, on a tall screen so that few pages are needed."""
    yard.log("logs2345", "".join(f"line {number:06d}{' .' * 100}\n" for number in range(1_500)))
    app = open_app(yard.path)
    async with opened(app, "l", size=(80, 100)) as pilot:
        sheet = app.screen.query_one(LogSheet)
        seen: set[str] = set()
        for _ in range(40):
            seen |= {line[:11] for line in sheet.visible_text().splitlines()}
            if "line 000000" in seen:
                break
            sheet.action_page_up()
            await app.settle(pilot)

    assert {f"line {number:06d}" for number in range(1_500)} <= seen


async def test_a_search_jumps_and_n_goes_on_and_back(yard: Yard, open_app: Open) -> None:
    yard.log("logs2345", "".join(f"line {n}{' needle' if n in (100, 40_000) else ''}\n" for n in range(50_000)))
    app = open_app(yard.path)
    async with opened(app, "l", "home", "slash") as pilot:
        await press(app, pilot, *"needle", "enter")
        await shown(app, pilot, "line 100 needle")
        await press(app, pilot, "n")
        await shown(app, pilot, "line 40000 needle")
        await press(app, pilot, "N")
        await shown(app, pilot, "line 100 needle")


async def test_the_first_error_is_one_key_away(yard: Yard, open_app: Open) -> None:
    text = "".join(f"line {number}\n" for number in range(20_000))
    yard.log("logs2345", text + "Traceback (most recent call last):\nValueError: no\n" + text)
    app = open_app(yard.path)
    async with opened(app, "l", "exclamation_mark") as pilot:
        await shown(app, pilot, "ValueError: no")


@pytest.mark.parametrize(
    "text",
    [
        "a" * 70 + "b" * 70 + "TAIL\n",
        "損失" * 45 + "TAIL\n",
        "".join(f"[rank{rank}]: {'a' * 70}TAIL\n" for rank in range(8)),
    ],
    ids=["narrow", "wide", "ranks"],
)
async def test_wrapping_shows_the_whole_of_a_long_line(text: str, yard: Yard, open_app: Open) -> None:
    yard.log("logs2345", text)
    app = open_app(yard.path)
    async with opened(app, "l") as pilot:
        cut = screen_text(app)
        await press(app, pilot, "w")

        assert "TAIL" not in cut
        assert all(line.endswith("…") for line in cut.splitlines() if "a" * 70 in line or "損" in line)
        assert "TAIL" in screen_text(app)


async def test_ranks_that_say_the_same_are_one_line(yard: Yard, open_app: Open) -> None:
    yard.log("logs2345", "".join(f"[rank{rank}]: warming up\n" for rank in range(8)))
    app = open_app(yard.path)
    async with opened(app, "l") as pilot:
        grouped = screen_text(app)
        await press(app, pilot, "u")

        assert "×8 [rank0]: warming up" in grouped
        assert "[rank7]: warming up" in screen_text(app)


async def test_a_screen_that_only_looks_follows_a_log_all_the_same(yard: Yard, open_app: Open) -> None:
    """The follower's key starts something, that of the log does not: their actions had one name."""
    yard.log("logs2345", "".join(f"line {number}\n" for number in range(100)))
    app = open_app(yard.path, readonly=True)
    async with opened(app, "l", "pageup") as pilot:
        held = screen_text(app)
        await press(app, pilot, "f")
        await shown(app, pilot, "line 99", "following")

    assert "f follow" in held.splitlines()[-1]
