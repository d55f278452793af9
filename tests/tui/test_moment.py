"""An old measurement is never told as one of now: ended runs, hosts out of reach, ends that do not slide."""

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from orchestrator.store.reads import Reader
from orchestrator.store.rows import Document, GpuSampleRow, HostRow, State
from tests.tui.world import GIB, NOW_S, Writer, Yard, gpu_events, steps
from tests.tui.yard import DAY_S, HOUR_S, LIVE, UNREACHABLE
from tui.detail import RunDetail, read_detail
from tui.hosts_lines import hosts_lines
from tui.memory import memory_tab_lines
from tui.moment import PRESENT_S, faded, is_of_now, is_present, last_seen
from tui.overview import clock, memory_lines, overview_lines, state_lines
from tui.pieces import Line, text_of
from tui.preview import preview_lines
from tui.runs_rows import COLUMNS, run_cells
from tui.snapshot import Ask, CurvesAsk, Room, Snapshot
from tui.wording import duration

ENDED = "e3nd5run"
LOUD = {"live", "good", "warn", "bad", "strong", "text"}  # inks of what is so now
Page = Callable[[RunDetail, float], list[Line]]
PAGES: dict[str, Page] = {
    "memory": lambda detail, now_s: memory_tab_lines(detail, now_s, 78, 40, ascii_only=False),
    "overview": lambda detail, now_s: overview_lines(detail, now_s, 78, 40, ascii_only=False),
    "preview": lambda detail, now_s: preview_lines(detail, now_s, 78, 40, ascii_only=False),
}


def detail_of(path: Path, run_id: str) -> RunDetail:
    with contextlib.closing(Reader(path)) as reader:
        return read_detail(reader, reader.run(run_id), CurvesAsk(names=("loss",)))


@pytest.fixture
def ended(tmp_path: Path) -> RunDetail:
    """It trained on a card that was full and busy, and ended three days ago."""
    yard = Yard(tmp_path / "runs.db")
    with yard.store:
        run = yard.run(
            ENDED, "mine/fast", ago_s=3 * DAY_S + HOUR_S, documents={Document.LAUNCH: json.dumps({"gpus": ["5"]})}
        )
        Writer(yard.store, run).tell(steps(0, 60, 1, begin_s=NOW_S - 3 * DAY_S - 2400, step_s=40.0, seed=1))
        samples = [
            (kind, at_s - 3 * DAY_S - 10, fields)
            for kind, at_s, fields in gpu_events({5: 84.2}, ago_s=2400, every_s=30)
        ]
        Writer(yard.store, run, name="supervisor").tell(samples)
        yard.state(run, State.SUCCEEDED, ago_s=3 * DAY_S, evidence="exit file: code 0")
    return detail_of(yard.path, run)


def inks(lines: Iterable[Line], word: str) -> set[str]:
    """Of the pieces from one on that begins so, to the end of its line."""
    found: set[str] = set()
    for line in lines:
        begins = [place for place, (text, _) in enumerate(line) if text.startswith(word)]
        found |= {meaning for text, meaning in line[begins[0] :] if text.strip()} if begins else set()
    assert found, word
    return found


def test_what_was_measured_a_moment_ago_is_of_now_and_nothing_else() -> None:
    assert is_of_now(NOW_S - PRESENT_S, NOW_S)
    assert not is_of_now(NOW_S - PRESENT_S - 1, NOW_S)
    assert not is_of_now(None, NOW_S)
    assert not is_of_now(NOW_S + 86_400, NOW_S)  # by a clock that runs ahead
    assert last_seen(NOW_S - 1500, NOW_S) == "last seen 25m ago"
    assert faded([[("a", "strong"), ("b", "line")]]) == [[("a", "faint"), ("b", "line")]]


def test_a_run_that_ended_or_is_out_of_reach_has_no_present(ended: RunDetail) -> None:
    live = dataclasses.replace(ended.run, state=State.RUNNING)

    assert is_present(live, NOW_S, NOW_S)
    assert not is_present(ended.run, NOW_S, NOW_S)
    assert not is_present(dataclasses.replace(live, unreachable_since_s=NOW_S - 5), NOW_S, NOW_S)


@pytest.mark.parametrize("page", PAGES)
def test_the_cards_of_an_ended_run_are_told_as_they_were(page: str, ended: RunDetail) -> None:
    """Whoever looks for a free card must not take this one for a full one."""
    lines = PAGES[page](ended, NOW_S)

    assert "last seen 3d ago" in text_of(lines)
    assert "84." in text_of(line for line in lines if "GPU 5  " in text_of([line]))
    assert not inks(lines, "GPU 5  ") & LOUD


def test_the_axis_of_an_ended_run_ends_where_the_run_did(ended: RunDetail) -> None:
    axis = text_of(line for line in PAGES["memory"](ended, NOW_S) if "min before" in text_of([line]))

    assert "40 min before it ended" in axis
    assert axis.endswith("it ended")
    assert "now" not in text_of(PAGES["memory"](ended, NOW_S))


def test_the_speed_of_an_ended_run_is_that_of_its_last_reports(ended: RunDetail) -> None:
    lines = PAGES["overview"](ended, NOW_S)

    assert "mean of its last reports" in text_of(lines)
    assert not inks(lines, "block  ") & LOUD


def test_the_speed_of_a_new_attempt_that_has_said_nothing_is_that_of_an_earlier_one(ended: RunDetail) -> None:
    run = dataclasses.replace(ended.run, state=State.PENDING, attempt=2, ended_s=None, last_event_s=None)

    lines = PAGES["overview"](dataclasses.replace(ended, run=run), NOW_S)

    assert "of an earlier attempt" in text_of(lines)
    assert not inks(lines, "block  ") & LOUD


def test_a_card_that_is_sampled_is_told_as_it_is(filled_yard: Path) -> None:
    lines = PAGES["memory"](detail_of(filled_yard, LIVE), NOW_S)

    assert "last seen" not in text_of(lines)
    assert "warn" in inks(lines, "GPU 5  ")
    assert any(text_of([line]).endswith("now") for line in lines)


@pytest.mark.parametrize("after_s", [0.0, DAY_S])
def test_the_cards_of_a_run_out_of_reach_say_since_when(after_s: float, filled_yard: Path) -> None:
    lines = memory_lines(detail_of(filled_yard, UNREACHABLE), NOW_S + after_s, 78, ascii_only=False)

    assert ("last seen 1d ago" if after_s else "last seen 25m ago") in text_of(lines)
    assert not inks(lines, "GPU 0") & LOUD


def end_of(detail: RunDetail) -> float:
    """The newest step, and from there what is left of them."""
    told_s, eta_s = detail.attempts[-1].last_step_s, detail.pace.eta_s
    assert told_s is not None
    assert eta_s is not None
    return told_s + eta_s


def test_the_end_of_a_run_out_of_reach_stays_where_its_newest_step_put_it(filled_yard: Path) -> None:
    detail = detail_of(filled_yard, UNREACHABLE)
    end = clock(end_of(detail), NOW_S)

    for after_s, ago in ((0.0, "m ago"), (HOUR_S, "1h ago"), (2 * HOUR_S, "2h ago")):
        text = text_of(state_lines(detail, NOW_S + after_s, 100, ascii_only=False))
        assert re.search(rf"^would end {end}, by its step 25,000, \d*{ago}", text, re.MULTILINE), text
        assert "ends in" not in text


def test_a_run_that_would_have_ended_while_it_was_away_says_so(filled_yard: Path) -> None:
    detail = detail_of(filled_yard, UNREACHABLE)

    text = text_of(state_lines(detail, end_of(detail) + 60, 100, ascii_only=False))

    assert "would have ended" in text


def test_the_list_and_the_page_of_a_silent_run_tell_one_end(tmp_path: Path) -> None:
    """The newest step is an hour old, though the cards were sampled until 25 minutes ago."""
    yard = Yard(tmp_path / "runs.db")
    with yard.store:
        run_id = yard.run(ENDED, "mine/slow", ago_s=9000.0, num_steps=4000)
        Writer(yard.store, run_id).tell(steps(0, 1000, 10, begin_s=NOW_S - 3600 - 4000, step_s=4.0, seed=1))
        Writer(yard.store, run_id, name="supervisor").tell(
            gpu_events({5: 84.2}, ago_s=6000, every_s=30, until_ago_s=1500)
        )
        yard.state(run_id, State.RUNNING)
    room = Room(yard.path)
    snapshot = room.read(Ask(run=run_id), NOW_S)
    room.close()
    assert snapshot is not None
    assert snapshot.detail is not None
    numbers, end = snapshot.numbers[run_id], end_of(snapshot.detail)

    cells = run_cells(snapshot.detail.run, numbers, NOW_S, ascii_only=False)

    assert ("would end", clock(end, NOW_S)) == told_end(state_lines(snapshot.detail, NOW_S, 100, ascii_only=False))
    assert cells[[column.title for column in COLUMNS].index("ends in")] == [(duration(end - NOW_S), "faint")]


def told_end(lines: list[Line]) -> tuple[str, str]:
    found = re.search(r"(would end|would have ended|ends in) (.*?),", text_of(lines))
    assert found is not None
    return found[1], found[2]


def test_a_stage_out_of_reach_does_not_grow_with_the_clock(filled_yard: Path) -> None:
    detail = detail_of(filled_yard, UNREACHABLE)
    begun = dataclasses.replace(detail.events[-1], kind="stage", at_s=NOW_S - 7200)
    run = dataclasses.replace(detail.run, stage="converting", step=None)
    away = dataclasses.replace(detail, run=run, events=(begun,), pace=dataclasses.replace(detail.pace, eta_s=None))

    now, later = (text_of(state_lines(away, NOW_S + after_s, 100, ascii_only=False)) for after_s in (0.0, DAY_S))

    assert "converting for 1h35m, last seen 25m ago" in now
    assert "converting for 1h35m, last seen 1d ago" in later


def hosts_at(path: Path, now_s: float) -> list[Line]:
    room = Room(path)
    snapshot = room.read(Ask(wants_list=False, wants_hosts=True), now_s)
    room.close()
    assert snapshot is not None
    return hosts_lines(snapshot, 100, ascii_only=False)


def test_a_host_out_of_reach_says_when_its_cards_were_seen(tmp_path: Path) -> None:
    yard = Yard(tmp_path / "runs.db")
    with yard.store:
        run = yard.run(ENDED, "mine/fast", documents={Document.LAUNCH: json.dumps({"gpus": ["5"]})})
        Writer(yard.store, run, name="supervisor").tell(gpu_events({5: 91.8}, ago_s=60, every_s=30))
        yard.state(run, State.RUNNING)
        cards = [
            {"index": card, "uuid": f"GPU-{card:08x}", "total_bytes": 95 * GIB, "used_bytes": 0} for card in (4, 5)
        ]
        yard.store.host_seen("pve-a", address="ssh pve-a", facts={"gpus": cards, "disk_free_bytes": 900 * GIB})
        yard.store.host_unreachable("pve-a", error="no route to host")

    lines = hosts_at(yard.path, NOW_S + DAY_S)

    assert "last seen 1d ago" in next(text_of([line]) for line in lines if "unreachable since" in text_of([line]))
    for card in ("GPU 4", "GPU 5"):
        told = text_of(line for line in lines if card in text_of([line])[:6])
        assert "1d ago" in told
        assert "busy" not in told
        assert not inks([line for line in lines if text_of([line]).startswith(card)], card) & LOUD
    assert "was free" in text_of(lines)


def test_a_host_that_nobody_looks_at_is_not_called_reachable(tmp_path: Path) -> None:
    """Its facts are of the day of its last launch or doctor; no run of ours lives there, so nobody has asked since."""
    cards = [{"index": 0, "total_bytes": 95 * GIB, "used_bytes": 60 * GIB, "utilisation": 0.9}]
    host = HostRow("pve-a", "", {"gpus": cards}, NOW_S - 3 * DAY_S, None, None, 0.0)

    lines = hosts_lines(Snapshot(Ask(), NOW_S, hosts=(host,)), 100, ascii_only=False)

    assert "reachable" not in text_of(lines)
    assert "last seen 3d ago" in text_of(lines)
    assert not inks(lines, "GPU 0") & LOUD


def test_a_look_at_a_host_is_as_old_as_what_it_found(tmp_path: Path) -> None:
    """The host answers all the time; its disk and cards were looked at three days ago."""
    cards = [{"index": 0, "total_bytes": 95 * GIB, "used_bytes": 60 * GIB, "utilisation": 0.9}]
    facts = {"gpus": cards, "time_s": NOW_S - 3 * DAY_S, "disk_free_bytes": 900 * GIB}
    host = HostRow("pve-a", "", facts, NOW_S - 5, None, None, 0.0)

    lines = hosts_lines(Snapshot(Ask(), NOW_S, hosts=(host,)), 100, ascii_only=False)

    assert "reachable" in text_of(lines)
    assert "disk 900 GiB free 3d ago" in text_of(lines)
    assert "3d ago" in text_of(line for line in lines if text_of([line]).startswith("GPU 0"))


def test_the_newer_of_two_looks_at_a_card_counts(tmp_path: Path) -> None:
    cards = [{"index": 0, "total_bytes": 95 * GIB, "used_bytes": 60 * GIB, "utilisation": 0.9}]
    host = HostRow("pve-a", "", {"gpus": cards, "time_s": NOW_S - 9}, NOW_S - 5, None, None, 0.0)
    sample = GpuSampleRow(ENDED, 1, 0, None, NOW_S - 3000, 11 * GIB, 95 * GIB, 0.1)

    lines = hosts_lines(Snapshot(Ask(), NOW_S, hosts=(host,), sampled={"pve-a": {0: sample}}), 100, ascii_only=False)

    assert "60.0 of 95.0 GiB  busy  90%" in text_of(lines)
