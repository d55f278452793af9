"""The small parts of the command line: tables, numbers, JSON values, progress."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from shutil import disk_usage

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.actions.endings import outcome
from orchestrator.actions.history import Listed
from orchestrator.actions.host_facts import MissingDependency
from orchestrator.actions.life import Moment, _moment
from orchestrator.actions.places import find_places
from orchestrator.follow.lease import lease
from orchestrator.nearest import listed
from orchestrator.store.rows import Document, ProgressRow, RunRow, State
from orchestrator.store.writes import Store
from orchestrator.units import duration
from orchestrator.verbs import frame, listing
from orchestrator.verbs.follow import _tell_events
from orchestrator.verbs.frame import Terminal
from orchestrator.verbs.jsonable import jsonable
from orchestrator.verbs.logs import _say_if_unreachable
from orchestrator.verbs.program import as_typed, speller
from orchestrator.verbs.progress import PLAIN_LINE_EVERY_S, SILENT_S, Progress, moment_text
from orchestrator.verbs.table import Cell, Column, cut, pairs, table
from orchestrator.verbs.words import ago, gib, metric, number, sparkline
from tests.orchestrator.runs import RUN, again, batch, event, new_run, started
from tests.orchestrator.yard import Yard

WORDS = st.text(st.characters(min_codepoint=32, exclude_characters="\x7f"), max_size=30)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(JSON_VALUES)
def test_every_value_becomes_strict_json(value: object) -> None:
    json.loads(json.dumps(jsonable({"value": value}), allow_nan=False))


def test_a_number_that_is_none_is_null_with_a_flag() -> None:
    told = jsonable({"loss": math.nan, "low": -math.inf, "fine": 1.5})

    assert told == {"loss": None, "loss_flag": "nan", "low": None, "low_flag": "-inf", "fine": 1.5}


def test_moments_carry_their_offset_and_durations_stay_numbers() -> None:
    assert jsonable({"created_s": 0.25, "duration_s": 3.0}) == {
        "created_at": "1970-01-01T00:00:00.250+00:00",
        "duration_s": 3.0,
    }


@given(st.lists(st.tuples(WORDS, WORDS), max_size=6), st.integers(20, 120))
def test_a_table_is_never_wider_than_the_terminal(rows: list[tuple[str, str]], width: int) -> None:
    columns = [Column("one", gives_way=True, least=3), Column("two", gives_way=True, least=3)]

    lines = table(columns, rows, width=width)

    assert len(lines) == len(rows) + 1
    assert all(len(click.unstyle(line)) <= width for line in lines)


def test_a_table_without_a_width_leaves_every_cell_whole() -> None:
    lines = table([Column("one", gives_way=True)], [["x" * 500]], width=None)

    assert lines[1] == "x" * 500


@pytest.mark.parametrize("accept", [None, 1.71])
@pytest.mark.parametrize("reason", [None, "unreachable", "missing_dependency"])
def test_a_list_fits_the_commonest_terminal(tmp_path: Path, reason: str | None, accept: float | None) -> None:
    """A column in which nothing stands goes before a line breaks, and a long reason is cut at its end."""
    with Store(tmp_path / "runs.db") as store:
        started(store, "k7f3mnpq")
        run = store.reader.run("k7f3mnpq")
    failed = replace(run, state=State.FAILED, reason=reason, step=9_000, num_steps=10_000)
    listed = [Listed(each, {"loss": 0.8917}, accept) for each in (failed, run)]

    lines = [click.unstyle(line) for line in listing.lines(listed, listing.USUAL, width=80)]

    assert max(map(len, lines)) <= 80
    assert "failed" in lines[1]
    assert accept is None or "1.71" in lines[1]
    assert "accept" in listing.lines(listed, listing.USUAL, width=None)[0]


def test_columns_of_numbers_stand_to_the_right_and_wide_characters_count_two() -> None:
    lines = [
        click.unstyle(line)
        for line in table([Column("n", is_number=True), Column("t")], [["1", "漢字"], [Cell("22"), "a"]], width=None)
    ]

    assert lines == [" n  t", " 1  漢字", "22  a"]


@given(WORDS, st.integers(1, 30))
def test_a_cut_text_says_so(text: str, width: int) -> None:
    shown = cut(text, width)

    assert shown == text or shown.endswith("…")


def test_a_value_of_several_lines_stays_in_its_column() -> None:
    assert [click.unstyle(line) for line in pairs([("a", "x\ny"), ("long", "z")])] == ["a     x", "      y", "long  z"]


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (gib(22.31 * 2**30), "22.31 GiB"), (gib(970 * 2**20), "0.95 GiB"), (gib(3 * 2**20), "3.0 MiB"), (gib(61_440), "60.0 KiB"), (gib(12), "12 B"), (gib(None), "-"),
        (duration(0.44), "0.4 s"), (duration(65), "1 min 05 s"), (duration(7980), "2 h 13 min"), (duration(5 * 86400 + 3 * 3600), "5 d 3 h"), (duration(7 * 86400), "7 d"),
        (ago(100, 103), "now"), (ago(100, 400), "5 min ago"), (ago(500, 100), "now"), (ago(None, 0), "never"),
        (number(math.nan), "nan"), (number(-math.inf), "-inf"), (number(1020.0), "1,020"), (number(0.0123456), "0.01235"), (number(None), "-"), (number(26_210.4), "26,210"), (number(9999.4), "9999"), (number(1.5e-7), "1.5e-07"),
        (metric("peak_reserved_bytes", 2**31), "2.00 GiB"), (metric("step_s", 0.31), "0.31 s"), (metric("block_tokens_per_s", 6500), "6,500"),
        (sparkline([0, 1, None, 7]), "▁▂ █"), (sparkline([3, 3]), "▅▅"), (sparkline([None, math.nan]), ""),
    ],
)  # fmt: skip
def test_numbers_read_as_people_say_them(told: str, expected: str) -> None:
    assert told == expected


def _run(tmp_path: Path, *, step: int | None = 213) -> RunRow:
    with Store(tmp_path / "runs.db") as store:
        row = store.create_run(new_run("kxxxaaaa", num_steps=400))
    return RunRow(**{**vars(row), "state": State.RUNNING, "stage": "training", "step": step, "last_event_s": 50.0})


def test_progress_tells_step_bar_numbers_and_time_left(tmp_path: Path) -> None:
    recent = {"loss": 2.31, "block_tokens_per_s": 1020.0}

    text = moment_text(Moment(_run(tmp_path), recent, None, time_left_s=93.5))

    assert text == "training  213/400 [###########         ]  left 1 min 34 s  mean loss 2.31  1,020 block tokens/s"


def test_a_run_that_has_ended_tells_its_mean_loss_as_lists_do_and_no_time_left(yard: Yard) -> None:
    with Store(yard.root / "runs.db") as store:
        started(store, num_steps=200)
        told = [event(n, "metrics", step=n, values={"loss": 10.0 - n, "step_s": 1.0}) for n in range(1, 5)]
        store.ingest(batch(told))
        store.set_state(RUN, State.FAILED, evidence="x")
        text = moment_text(_moment(store.reader, store.reader.run(RUN)))

    assert "4/200" in text
    assert text.endswith("]  mean loss 7.5")


def _silent_run(yard: Yard) -> None:
    """A live run of which nothing was heard for five minutes."""
    with Store(yard.root / "runs.db", clock=lambda: time.time() - 300) as store:
        started(store)


@pytest.mark.slow
def test_ls_and_show_say_when_a_full_disk_keeps_what_live_runs_do_from_being_written(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    _silent_run(yard)
    room = disk_usage(yard.root)
    monkeypatch.setattr("orchestrator.actions.followed.shutil.disk_usage", lambda _: room._replace(free=0))

    with lease(yard.root / "runs.db"):
        for words in (["ls"], ["show", RUN]):
            assert yard.run(*words) == 0
            (line,) = yard.err.splitlines()
            assert "runs.db is full (0 B left), so nothing new of live runs is written, for 5 min" in line
        with Store(yard.root / "runs.db") as store:
            store.set_state(RUN, State.LOST, evidence="x")
        assert yard.run("ls") == 0
        assert yard.err == ""


@pytest.mark.slow
def test_ls_and_show_say_when_nobody_follows_a_live_run(yard: Yard) -> None:
    _silent_run(yard)

    for words in (["ls"], ["show", RUN]):
        assert yard.run(*words) == 0
        assert "nobody follows live runs, the newest word of them is 5 min" in yard.err
        assert "draftyard watch, or draftyard follow" in yard.err
    with lease(yard.root / "runs.db"):
        assert yard.run("ls") == 0
        assert yard.err == ""


@pytest.mark.slow
def test_follow_says_who_follows_already(yard: Yard) -> None:
    _silent_run(yard)

    with lease(yard.root / "runs.db"):
        assert yard.run("follow") == 0

    assert "another process follows the runs of" in yard.err
    assert yard.err.count("nothing was started") == 1


def test_a_follower_by_hand_tells_each_event_to_who_wants_more(yard: Yard, capsys: pytest.CaptureFixture[str]) -> None:
    with Store(yard.root / "runs.db") as store:
        started(store)
        store.set_state(RUN, State.FAILED, evidence="its last words")
    over = threading.Event()
    over.set()
    places = find_places(yard.root, {}, db=yard.root / "runs.db")

    _tell_events(Terminal(places, False, False, False, False, 1, None), 0, over)

    assert re.search(rf"^{RUN}  \w+: .*its last words", capsys.readouterr().err, re.MULTILINE)


@pytest.mark.slow
def test_following_a_log_says_when_its_host_falls_silent_and_answers(
    yard: Yard, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store(yard.root / "runs.db") as store:
        started(store)
        run = store.reader.run(RUN)
    terminal = Terminal(find_places(yard.root, {}), False, False, False, False, 0, None)
    silent = RunRow(**{**vars(run), "unreachable_since_s": 60.0})

    _say_if_unreachable(terminal, run, before_s=None)
    _say_if_unreachable(terminal, silent, before_s=None)
    _say_if_unreachable(terminal, silent, before_s=60.0)
    _say_if_unreachable(terminal, run, before_s=60.0)

    silent_line, again_line = capsys.readouterr().err.splitlines()
    assert silent_line.startswith("host local is unreachable since 1970-01-01 00:01:00 UTC")
    assert again_line == "host local answers again"


def test_the_way_back_is_typed_as_this_shell_finds_it(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(yard.root))
    told = []
    for called in (yard.root / ".venv/bin/draftyard", Path("/opt/a b/draftyard"), Path("/usr/lib/cli.py")):
        monkeypatch.setattr("sys.argv", [str(called)])
        told.append(as_typed())

    assert told == [".venv/bin/draftyard", "'/opt/a b/draftyard'", "draftyard"]


def test_every_command_that_is_printed_is_spelled_as_this_shell_finds_it(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only the way back: a fresh clone has .venv/bin/draftyard, and no shell that was told so."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr("sys.argv", [str(yard.root / ".venv/bin/draftyard")])
    (yard.root / "deep").mkdir()

    assert yard.run("show", "@last") == 5
    assert yard.run("evidence", "--nosuch") == 2
    assert "try: .venv/bin/draftyard evidence --help" in yard.err
    assert yard.run("launch", "tiny") == 3
    assert "repair: .venv/bin/draftyard smoke tiny" in yard.err
    assert "draftyard smoke" in yard.json("launch", "tiny", code=3)["error"]["repair"]
    assert ".venv" not in yard.out
    monkeypatch.chdir(yard.root / "deep")
    assert yard.run("launch", "tiny") == 3
    assert f"repair: '{yard.root}/.venv/bin/draftyard' smoke tiny" in yard.err


def test_only_commands_are_spelled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("sys.argv", ["/opt/draftyard"])

    spelled = speller(["stop", "reset-term"])

    assert spelled("`draftyard stop k`; draftyard reset-term") == "`/opt/draftyard stop k`; /opt/draftyard reset-term"
    for text in ("this draftyard: it", "draftyard stops", "a/draftyard stop", "let draftyard do it", "draftyard-stop"):
        assert spelled(text) == text


def test_a_host_that_nobody_knows_names_the_setting_it_came_from(yard: Yard) -> None:
    (yard.root / "draftyard.yaml").write_text("host: gpu\n", encoding="utf-8")

    assert yard.run("launch", "tiny") == 2

    assert "no host 'gpu'; known: local; " in yard.err
    assert re.search(r"without --host it is the one of .*draftyard.yaml", yard.err)


def test_after_the_last_step_no_time_is_left_to_tell(tmp_path: Path) -> None:
    run = RunRow(**{**vars(_run(tmp_path, step=400)), "stage": "evaluating"})

    assert moment_text(Moment(run, {"loss": 2.0}, None)) == "evaluating"


@pytest.mark.parametrize(
    ("left_s", "told"),
    [(42.4, "killed in 42 s"), (0.3, "killed in 1 s"), (95, "killed in 1 min 35 s"), (0, "being killed")],
)
def test_the_grace_is_counted_down_while_a_run_stops(tmp_path: Path, left_s: float, told: str) -> None:
    run = RunRow(**{**vars(_run(tmp_path)), "state": State.STOPPING})

    silent = RunRow(**{**vars(run), "stage": None})

    assert moment_text(Moment(run, {}, None, left_s)) == f"stopping, training: {told} unless it ends before"
    assert moment_text(Moment(silent, {}, None, left_s)) == f"stopping: {told} unless it ends before"


@pytest.mark.slow
def test_a_waiting_person_sees_means_of_the_newest_steps(yard: Yard) -> None:
    values = [50.0, *([3.0, 5.0] * 50)]
    with Store(yard.root / "runs.db") as store:
        started(store, num_steps=200)
        store.ingest(batch([event(n, "metrics", step=n, values={"loss": value}) for n, value in enumerate(values, 1)]))
        moment = _moment(store.reader, store.reader.run(RUN))

    assert moment.recent == {"loss": 4.0}


def test_long_work_outside_the_steps_is_told_while_it_lasts(tmp_path: Path) -> None:
    row = ProgressRow("kxxxaaaa", 1, "hidden states", 40, 100, "rows", 60.0)

    assert "hidden states [########            ] 40/100 rows" in moment_text(Moment(_run(tmp_path, step=None), {}, row))


def test_progress_is_plain_lines_where_nobody_sees_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 0.0
    places = find_places(tmp_path, {"HOME": str(tmp_path)})
    terminal = Terminal(
        places, wants_json=False, has_colour=False, may_ask=False, is_quiet=False, verbosity=0, width=None
    )
    progress = Progress(terminal, clock=lambda: now_s)

    for moment_s in (SILENT_S / 2, SILENT_S, SILENT_S + 1, SILENT_S + PLAIN_LINE_EVERY_S):
        now_s = moment_s
        progress.show(f"at {moment_s:g}", stage="training")
    progress.end()

    assert capsys.readouterr().err.splitlines() == ["at 2", "at 12"]


@pytest.mark.parametrize("columns", ["\N{SUPERSCRIPT TWO}", "0", "-3", "9" * 5000, ""])
def test_a_width_that_is_none_is_asked_of_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((77, 20)))
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)

    assert frame._width({"COLUMNS": columns}) == 77
    assert frame._width({"COLUMNS": "120"}) == 120


def test_a_run_of_a_database_that_is_not_there_is_said_so(yard: Yard) -> None:
    missing = yard.root / "nowhere.db"

    for word in ("night4xyz", "@last"):
        assert yard.run("--db", str(missing), "show", word) == 5
        assert f"there is no database at {missing}, so no run {word}" in yard.err
    assert not missing.exists()


def test_a_launch_refused_for_missing_packages_says_the_repairs_on_lines_of_their_own_and_leads_to_them(
    yard: Yard,
) -> None:
    error = MissingDependency("host local lacks torch\n  repair: pip install torch\n  or let draftyard do it: x")
    with Store(yard.root / "runs.db") as store:
        store.create_run(new_run(RUN, host="local"))
        with pytest.raises(MissingDependency), outcome(store, RUN, attempt=0):
            raise error

    assert yard.run("show", RUN) == 0

    lines = [line.strip() for line in yard.out.splitlines()]
    assert {"repair: pip install torch", "or let draftyard do it: x"} <= {*lines}
    following = lines[lines.index("Next") + 1 :]
    assert following[0] == "draftyard doctor local --fix"
    assert following[1].startswith("draftyard launch")


def test_a_success_with_checkpoints_leads_to_them_and_an_attempt_without_a_step_says_none(yard: Yard) -> None:
    with Store(yard.root / "runs.db") as store:
        started(store)
        store.set_state(RUN, State.FAILED, evidence="x")
        again(store)
        store.ingest(batch([event(1, "checkpoint", step=1, path="checkpoints/a", size_bytes=1)], attempt=2))
        store.set_state(RUN, State.SUCCEEDED, evidence="y")

    assert yard.run("show", RUN) == 0

    assert f"draftyard pull {RUN} " in yard.out
    assert re.search(r"1 +failed +none +", yard.out)


@pytest.mark.slow
def test_a_size_that_two_runs_were_told_differently_is_spelled_as_one(yard: Yard) -> None:
    with Store(yard.root / "runs.db") as store:
        for run_id, size_bytes in (("aaaa2222", 300 * 2**20), ("bbbb2222", 2**33)):
            spec = json.dumps({"life": {"memory_limit_bytes": size_bytes}})
            store.create_run(new_run(run_id, documents={Document.SPEC: spec}))

    assert yard.run("diff", "aaaa2222", "bbbb2222") == 0

    assert re.search(r"life.memory_limit_bytes +0.29 GiB +8.00 GiB", yard.out)


def test_no_list_of_what_is_known_hides_a_single_word() -> None:
    assert listed("x", "abcdefghi") == "a, b, c, d, e, f, g, h, i"
    assert listed("x", "abcdefghij").endswith("and 2 more")
