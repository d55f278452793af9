"""Behaviour of the whole program, driven by keys, over a real database."""

import contextlib
import re
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from textual.geometry import Region
from textual.strip import Strip

from orchestrator.actions.history import show
from orchestrator.actions.places import Places, find_places
from orchestrator.errors import StoreError, UsageError
from orchestrator.follow.lease import lease
from orchestrator.store.reads import Reader
from orchestrator.store.rows import NewRun, State
from orchestrator.store.writes import Store
from tests.tui.golden import opened, press, shown
from tests.tui.test_launch import places_of
from tests.tui.world import NOW_S, Writer, Yard, steps
from tests.tui.yard import LIVE, OOM
from tui.app import Draftyard
from tui.faults import trouble
from tui.following import Following
from tui.keys import binding_names
from tui.opening import run
from tui.plain import screen_text
from tui.runs import RunsScreen
from tui.sheet import Sheet
from tui.table import Table

pytestmark = pytest.mark.slow  # a whole app a test

Open = Callable[..., Draftyard]


async def test_what_is_written_appears_by_itself(yard_copy: Path, open_app: Open) -> None:
    app = open_app(yard_copy)
    async with opened(app) as pilot:
        yard = Yard(yard_copy)
        with yard.store:
            Writer(yard.store, yard.run("n2wq7kdx", "fresh/branch", ago_s=1.0)).tell(
                steps(0, 40, 10, begin_s=NOW_S - 1, step_s=0.1, seed=1)
            )

        app.tick()
        await app.settle(pilot)

        assert "fresh/branch" in screen_text(app)


async def test_a_follower_that_cannot_start_is_said_once_and_to_who_asks(
    yard_copy: Path, open_app: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(places: Places) -> None:
        raise StoreError("no follower could be started")

    said: list[str] = []
    now_s = [NOW_S]
    monkeypatch.setitem(Following.keep.__globals__, "start_follower", refuse)
    places = find_places(yard_copy.parent, {"HOME": str(yard_copy.parent)}, db=yard_copy)
    app = open_app(yard_copy, places=places)
    async with opened(app) as pilot:
        monkeypatch.setattr(Draftyard, "is_headless", False)
        monkeypatch.setattr(app, "fail_from_thread", said.append)
        app.clock = lambda: now_s[0]
        assert app.shown is not None
        for _ in range(3):
            now_s[0] += 11.0
            app._following.keep(app.shown)
            await app.workers.wait_for_complete()

        assert len(said) == 1
        await pilot.press("F")
        await app.workers.wait_for_complete()
        assert len(said) == 2


async def test_nothing_new_means_nothing_drawn_again(open_app: Open) -> None:
    app = open_app()
    async with opened(app) as pilot:
        drawn: list[int] = []
        table = app.screen.query_one("#list", Table)
        original = table.painted

        def counted(y: int, *sizes: Any) -> Any:
            drawn.append(y)
            return original(y, *sizes)

        table.painted = counted  # type: ignore[method-assign]
        for _ in range(5):
            app.tick()
            await app.settle(pilot)

        assert drawn == []


async def test_a_changed_run_redraws_its_own_line_alone(yard_copy: Path, open_app: Open) -> None:
    app = open_app(yard_copy)
    async with opened(app) as pilot:
        table = app.screen.query_one("#list", Table)
        drawn: list[int] = []
        original = table.painted

        def counted(y: int, *sizes: Any) -> Any:
            drawn.append(y)
            return original(y, *sizes)

        table.painted = counted  # type: ignore[method-assign]
        with Store(yard_copy, clock=lambda: NOW_S) as store:
            store.set_state(LIVE, State.STOPPING, reason="user", evidence="asked to stop")
        app.tick()
        await app.settle(pilot)

        assert set(drawn) == {2}


async def test_a_locked_database_is_said_and_keys_go_on(yard_copy: Path, open_app: Open) -> None:
    with sqlite3.connect(yard_copy) as alone:
        alone.execute("PRAGMA journal_mode = DELETE")  # without the write-ahead log a writer keeps readers out
    alone.close()
    seconds = iter(float(NOW_S + 25 * number) for number in range(10_000))
    app = Draftyard(yard_copy, clock=lambda: next(seconds))
    async with opened(app) as pilot:
        with sqlite3.connect(yard_copy) as other:
            other.execute("BEGIN EXCLUSIVE")
            app.tick()
            await app.settle(pilot)
            await pilot.press("j")
            text = await shown(app, pilot, "▌R  qwen27b/ddtree")
            other.rollback()
        other.close()

    assert "database is locked for" in text or "reading takes" in text  # whichever the reader reached on this machine
    assert "▌R  qwen27b/ddtree" in text


async def test_keys_are_answered_while_a_reading_waits_for_a_locked_database(yard_copy: Path, open_app: Open) -> None:
    """The reading waits for as long as the database is locked; whoever read in the thread that paints would wait as well."""
    patience_s = 600.0
    with sqlite3.connect(yard_copy) as alone:
        alone.execute("PRAGMA journal_mode = DELETE")
    alone.close()
    app = open_app(yard_copy)
    async with opened(app, size=(120, 40)) as pilot:
        await app.reading.do(lambda room: room.reader.database.wait_at_most(patience_s))
        with contextlib.closing(sqlite3.connect(yard_copy)) as other:
            other.execute("BEGIN EXCLUSIVE")
            began_s = time.monotonic()
            app.tick()
            for key, words in (
                ("j", "▌R  qwen27b/ddtree"),
                ("question_mark", "Filter, as ls"),
                ("escape", "⏎ open"),
                ("enter", "1:overview"),
            ):
                await pilot.press(key)
                await shown(app, pilot, words)
            took_s, is_reading = time.monotonic() - began_s, app._is_reading
            other.rollback()
        await shown(app, pilot, "bottleneck")  # once it is free the page that was opened is read

    assert is_reading
    assert took_s < 60.0


def test_what_passes_is_a_wait_and_keeps_its_reason() -> None:
    locked = StoreError("runs.db: a long way to say it", is_passing=True)
    locked.__cause__ = sqlite3.OperationalError("disk I/O error")

    assert trouble(locked, 3.2) == "disk I/O error for 3 s; shown is what was read before"
    assert trouble(StoreError("runs.db: file is not a database"), 3.2) == "runs.db: file is not a database"


async def test_a_filter_narrows_the_list_and_escape_widens_it(open_app: Open) -> None:
    app = open_app()
    async with opened(app, "slash") as pilot:
        await press(app, pilot, *"status:lost", "enter")
        narrowed = screen_text(app)
        await press(app, pilot, "escape")

        assert "1 run " in narrowed
        assert "own-script/fast" in narrowed
        assert "qwen27b/v6" not in narrowed
        assert "qwen27b/v6" in screen_text(app)


async def test_a_fault_in_the_filter_is_shown_while_typing(open_app: Open) -> None:
    app = open_app()
    async with opened(app, "slash", size=(140, 30)) as pilot:
        await press(app, pilot, *"stats:x")

        assert "column 1" in screen_text(app)


async def test_pasted_keys_are_text_not_commands(open_app: Open) -> None:
    app = open_app()
    async with opened(app) as pilot:
        from textual.events import Paste

        app.screen.post_message(Paste("q\nx"))
        await app.settle(pilot)

        assert app.is_running
        assert isinstance(app.screen, RunsScreen)


async def test_leaving_stops_nothing(yard_copy: Path, open_app: Open) -> None:
    app = open_app(yard_copy)
    async with opened(app, "q"):
        pass

    with Reader(yard_copy) as reader:
        assert reader.run(LIVE).state is State.RUNNING
        assert reader.intents() == []
    assert app.num_live == 2


async def test_stop_names_run_host_and_gpus_and_asks_the_follower(
    yard_copy: Path, tmp_path: Path, open_app: Open
) -> None:
    places = find_places(tmp_path, {"HOME": str(tmp_path)}, db=yard_copy)
    app = open_app(yard_copy, places=places)
    with lease(yard_copy):  # somebody follows already, so none is started
        async with opened(app, "j", "x") as pilot:
            question = await shown(app, pilot, "stop qwen27b/ddtree", "GPU 5 6 7")
            await pilot.press("y")
            await shown(app, pilot, "asked to stop")

    assert "stop qwen27b/ddtree  h7kq2mxd" in question
    assert "may save first" in question
    assert "grace" in question
    assert "killed." in question  # the whole sentence, on as many lines as it needs
    assert "lost" not in question  # a stop lets training write a checkpoint
    assert "on pve-a, GPU 5 6 7" in question
    with Reader(yard_copy) as reader:
        assert [(wish.run_id, wish.kind) for wish in reader.intents()] == [(LIVE, "stop")]


async def test_a_stop_of_a_run_that_has_ended_calls_its_retry_off(
    yard_copy: Path, tmp_path: Path, open_app: Open
) -> None:
    """By the rule and the function of the CLI; without a retry to come there is nothing to stop."""
    with Store(yard_copy, clock=lambda: NOW_S) as store:
        store.set_state(LIVE, State.FAILED, reason="exit:3", evidence="exit status 3", wish="retry")
    app = open_app(yard_copy, places=find_places(tmp_path, {"HOME": str(tmp_path)}, db=yard_copy))
    with lease(yard_copy):
        async with opened(app, "slash", size=(120, 40)) as pilot:
            await press(app, pilot, *"status:failed", "enter", "enter")
            await shown(app, pilot, "a retry is to come; x calls it off")
            await press(app, pilot, "x")
            await shown(app, pilot, "what is called off is the retry")
            await press(app, pilot, "y")
            await shown(app, pilot, "its retry is called off; it stays failed")
            await app.settle(pilot)
            after = screen_text(app)

    assert "a retry is to come" not in after
    assert "x stop" not in after
    with Reader(yard_copy) as reader:
        assert reader.intents() == []


async def test_a_run_that_stops_says_when_it_is_killed(yard_copy: Path, open_app: Open) -> None:
    with Store(yard_copy, clock=lambda: NOW_S) as store:
        store.set_state(LIVE, State.STOPPING, reason="user", evidence="asked to stop")
        store.ask(LIVE, "stop", grace_s=30.0)
    async with opened(open_app(yard_copy, run=LIVE), size=(120, 40)) as pilot:
        await shown(pilot.app, pilot, "what still lives is killed at 14:13:50")  # type: ignore[arg-type]


async def test_the_speed_of_a_run_stands_beside_the_marked_baseline(yard_places: Places, open_app: Open) -> None:
    """The sentence of `show --against`; without a mark it is against the run that `show` itself takes."""
    app = open_app(places=yard_places)
    async with opened(app, "j", "enter", size=(140, 50)) as pilot:
        by_itself = await shown(app, pilot, "Speed beside a baseline", "m8yb2hqc (v6)")
        await press(app, pilot, "escape", "k", "B", "j", "enter")
        marked = await shown(app, pilot, "Speed beside a baseline", "b4tw9rne (v6)")

    found = show(yard_places, LIVE, against="b4tw9rne").throughput
    assert found is not None
    assert found.sentence[:60] in marked  # a toast lies over the rest
    assert "a Ktok" in by_itself


async def test_no_to_the_question_stops_nothing(yard_copy: Path, tmp_path: Path, open_app: Open) -> None:
    app = open_app(yard_copy, places=find_places(tmp_path, {"HOME": str(tmp_path)}, db=yard_copy))
    async with opened(app, "j", "x") as pilot:
        await shown(app, pilot, "stop qwen27b/ddtree")
        await press(app, pilot, "n")

    with Reader(yard_copy) as reader:
        assert reader.intents() == []


async def test_a_read_only_screen_refuses_deeds(yard_copy: Path, tmp_path: Path, open_app: Open) -> None:
    places = find_places(tmp_path, {"HOME": str(tmp_path)}, db=yard_copy)
    app = open_app(yard_copy, places=places, readonly=True)
    async with opened(app, "j", "x"):
        assert isinstance(app.screen, RunsScreen)
        assert "only looks" in screen_text(app)


@pytest.mark.parametrize("size", [(20, 5), (59, 24), (80, 13)])
async def test_a_terminal_too_small_gets_a_message(size: tuple[int, int], open_app: Open) -> None:
    app = open_app()
    async with opened(app, size=size):
        assert "is too small" in screen_text(app)


async def test_resizing_again_and_again_ends_well(open_app: Open) -> None:
    app = open_app()
    async with opened(app, "j", "enter") as pilot:
        for width in (200, 20, 61, 140, 400, 80):
            await pilot.resize_terminal(width, 24 if width != 400 else 120)
        await app.settle(pilot)

        assert "bottleneck" in screen_text(app)


@pytest.mark.parametrize("size", [(1, 1), (500, 1), (1, 300), (2, 2), (0, 0)])
async def test_a_run_beside_the_list_outlives_any_size(size: tuple[int, int], open_app: Open) -> None:
    """Drawn once more before it is laid out anew, or in no cells at all."""
    app = open_app()
    async with opened(app, "!", "escape", size=(160, 50)) as pilot:
        for width, height in (size, (200, 50), size, (80, 24)):
            await pilot.resize_terminal(width, height)
        await app.settle(pilot)

        assert "qwen27b" in screen_text(app)
    assert app.crash is None


@pytest.mark.parametrize("size", [(2, 2), (1, 1), (1, 500), (300, 1)])
@pytest.mark.parametrize("key", ["?", ":"])
async def test_what_lies_over_a_screen_outlives_any_size(key: str, size: tuple[int, int], open_app: Open) -> None:
    """It shows the screen below, which may not be laid out for its size yet."""
    app = open_app()
    async with opened(app, key, size=(160, 50)) as pilot:
        for width, height in (size, (200, 50), size, (80, 24)):
            await pilot.resize_terminal(width, height)
        await app.settle(pilot)

        assert len(app.screen_stack) > 1
    assert app.crash is None


async def test_a_dialogue_has_all_its_cells_where_the_screen_below_has_fewer(
    open_app: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between two sizes of the terminal: a cell that nothing covers ended the program, in a real terminal alone."""
    app = open_app()
    async with opened(app, "?", size=(80, 24)) as pilot:
        below, dialogue = app.screen_stack[-2:]
        monkeypatch.setattr(below._compositor, "render_strips", lambda size: [Strip.blank(3)] * 2)

        lines = dialogue.render_lines(Region(10, 1, 60, 20))

        assert [line.cell_length for line in lines] == [60] * 20
        monkeypatch.undo()
        await app.settle(pilot)


async def test_escape_sequences_in_names_are_inert(tmp_path: Path, open_app: Open) -> None:
    path = tmp_path / "runs.db"
    evil = "a\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
    with Store(path, clock=lambda: NOW_S) as store:
        store.create_run(NewRun(id="evil2345", kind="train", recipe=evil, branch=evil, host=evil, documents={}))
    app = open_app(path)

    for keys in ((), ("enter",)):
        async with opened(app, *keys, size=(140, 30)):
            text = screen_text(app)
        app = open_app(path)

        assert not set(text) & {"\x1b", "\x07", "\x9b", "\u202e"}
        assert "owned" in text


async def test_wide_characters_keep_the_columns_in_line(tmp_path: Path, open_app: Open) -> None:
    path = tmp_path / "runs.db"
    with Store(path, clock=lambda: NOW_S) as store:
        for run_id, name in (
            ("wide2345", "日本語ブランチ😀日本語ブランチ😀日本語"),
            ("thin2345", "plain"),
            ("odd23456", "e\u0301té"),
        ):
            store.create_run(NewRun(id=run_id, kind="train", recipe=name, branch="b", host="hhh", documents={}))
    app = open_app(path)
    async with opened(app, size=(120, 24)):
        lines = [line for line in screen_text(app).splitlines() if "hhh" in line]

    assert len({cell_len(line.split("hhh")[0]) for line in lines}) == 1


async def test_an_empty_yard_says_how_to_begin(tmp_path: Path, open_app: Open) -> None:
    app = open_app(tmp_path / "runs.db")
    async with opened(app):
        assert "draftyard smoke RECIPE" in screen_text(app)


async def test_a_run_that_is_not_there_is_said_on_the_top_line(open_app: Open) -> None:
    app = open_app(run="nosuchrun")
    async with opened(app, size=(120, 30)):
        assert "no run's id begins with 'nosuchrun'" in screen_text(app)


async def test_every_attempt_is_told_with_why_it_ended(open_app: Open) -> None:
    app = open_app()
    async with opened(app, "j", "j", "enter", size=(140, 40)):
        text = screen_text(app)

    assert "attempt 1" in text
    assert "attempt 2" in text
    assert "reboot" in text


async def test_curves_zoom_pan_and_show_the_value_under_the_crosshair(open_app: Open) -> None:
    app = open_app()
    async with opened(app, "j", "enter", "2", "z", size=(140, 40)) as pilot:
        whole = screen_text(app)
        await press(app, pilot, "plus", "left", "left")
        zoomed = screen_text(app)
        await press(app, pilot, "0", "escape")

        assert "0 " in whole.splitlines()[-2]
        assert "65,000" in zoomed
        assert "step 12" in zoomed


async def test_a_row_keeps_its_cursor_while_others_come_and_go(yard_copy: Path, open_app: Open) -> None:
    app = open_app(yard_copy)
    async with opened(app, "j", "j", "j") as pilot:
        table = app.screen.query_one("#list", Table)
        before = table.cursor_key
        yard = Yard(yard_copy)
        with yard.store:
            yard.run("p3wq7kdx", "newer/one", ago_s=0.0)
        app.tick()
        await app.settle(pilot)

        assert before == OOM
        assert table.cursor_key == OOM


async def test_keys_are_remapped_by_their_ids(open_app: Open) -> None:
    app = open_app()
    app.set_keymap({"runs.sort": "z"})
    async with opened(app, "z", size=(120, 30)):
        assert "worst off first" in screen_text(app)


@pytest.mark.slow
async def test_a_sentence_names_the_key_that_a_settings_file_gave(tmp_path: Path, open_app: Open) -> None:
    yard = Yard(tmp_path / "runs.db")
    app = open_app(yard.path, places=places_of(tmp_path, yard.path))
    app.set_keymap(
        {
            "home.launch": "9",
            "home.smoke": "8",
            "runs.kinds": "K",
            "runs.compare": "V",
            "launch.smoke": "M",
            "app.quit": "Q",
        }
    )
    async with opened(app, size=(140, 40)) as pilot:
        empty = await shown(app, pilot, "No runs yet. 8 climbs the first rungs")
        await press(app, pilot, "8")
        await shown(app, pilot, "9  choose a branch and a host; M there climbs its rungs")
        with yard.store:
            yard.run("bbbbwq7k", "smollm2/ce", kind="export")
        await press(app, pilot, "1")
        await shown(app, pilot, "K lists every kind")
        await press(app, pilot, "K")
        await shown(app, pilot, "bbbbwq7k")
        await press(app, pilot, "V")
        await shown(app, pilot, "then press V.")

    assert empty.rstrip().endswith("Q quit")


async def test_a_screen_that_only_looks_names_no_key_that_launches(tmp_path: Path, open_app: Open) -> None:
    app = open_app(Yard(tmp_path / "runs.db").path, readonly=True)
    async with opened(app, size=(120, 30)) as pilot:
        text = await shown(app, pilot, "No runs yet; draftyard smoke RECIPE is a beginning.")

    assert "climbs" not in text


def test_a_name_that_no_key_has_is_refused_with_its_place_and_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "draftyard.yaml").write_text("keys:\n  runs.sotr: z\n")
    places = find_places(tmp_path, {"HOME": str(tmp_path)})

    with pytest.raises(UsageError, match=r"draftyard.yaml:2:14: .*'runs.sotr'; did you mean 'runs.sort'"):
        run(places.db, places=places, once=True)


@pytest.mark.parametrize("content", [b"no database" * 100, b"SQLite format 3\0"], ids=["garbage", "cut"])
def test_a_printed_screen_of_a_database_that_cannot_be_read_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    (tmp_path / "runs.db").write_bytes(content)

    code = run(tmp_path / "runs.db", once=True)

    told = capsys.readouterr()
    assert (code, told.out) == (1, "")
    assert "runs.db" in told.err


def test_every_key_has_one_name() -> None:
    names = binding_names()

    assert len(names) > 50
    assert all(re.fullmatch(r"[a-z]+(\.[a-z_]+)+", name) for name in names)


async def test_help_lists_the_keys_of_the_screen_below(open_app: Open) -> None:
    app = open_app()
    async with opened(app, "question_mark", size=(120, 40)):
        sheet = app.screen.query_one(Sheet)
        words = "\n".join("".join(text for text, _ in line) for line in sheet.lines)

    assert "Filter" in words
    assert "Compare" in words
    assert "failed, out of memory" in words


async def test_a_run_is_opened_with_nothing_of_the_one_before(open_app: Open) -> None:
    """One screen shows every run: neither its tab, nor a zoom, a search, or an answer that comes late may stay."""
    app = open_app()
    async with opened(app, "j", "enter", "2", "z", "L", "left", size=(120, 40)) as pilot:
        late = app.shown
        await press(app, pilot, "4", "slash", *"zzz", "enter")
        for _ in range(3):
            await press(app, pilot, "escape")
        await press(app, pilot, "j", "j")
        await press(app, pilot, "enter")
        assert late is not None
        app.screen.take(late)  # type: ignore[attr-defined]
        overview = screen_text(app)
        await press(app, pilot, "2")
        curves = screen_text(app)
        await press(app, pilot, "4")
        log = screen_text(app)

    assert "qwen27b/ddtree" not in overview
    assert "O failed  GPU OOM" in overview
    assert "log" not in curves.splitlines()[3]
    assert "grad_norm" in curves  # the grid, not one chart alone
    assert "zzz" not in log
