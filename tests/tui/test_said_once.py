"""One size, one state, one order: what a first hour with the screens found said twice, or said falsely."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.errors import StoreError
from orchestrator.gate import UNTESTED_RECIPE
from orchestrator.store.place import Place
from orchestrator.store.reads import Reader
from orchestrator.store.rows import CheckpointRow, Document, MemoryPeakRow, State
from tests.tui.golden import opened, shown
from tests.tui.world import GIB, NOW_S, Yard
from tests.tui.yard import LIVE
from tui.acting import why_not
from tui.app import Draftyard
from tui.chart import Look
from tui.checkpoints import checkpoint_lines
from tui.compare import compare_lines
from tui.deeds import DEEDS
from tui.detail import RunDetail, read_detail
from tui.facts import fact_text
from tui.launch_lines import gate_lines
from tui.memory import peak_lines, plan_lines
from tui.ordering import Standing, Wish
from tui.overview import CHART_METRICS, speed_lines, state_lines
from tui.pieces import text_of
from tui.plain import screen_text
from tui.runs_rows import state_text
from tui.snapshot import CurvesAsk
from tui.spec import LABEL_WIDTH, _fitting
from tui.wording import told_and_repairs


@pytest.fixture
def live(filled_yard: Path) -> RunDetail:
    with Reader(filled_yard) as reader:
        return read_detail(reader, reader.run(LIVE), CurvesAsk(names=CHART_METRICS, buckets=60))


def test_the_gate_says_that_nothing_was_tested_before_the_key_that_launches() -> None:
    text = text_of(gate_lines(Wish("own", "main"), Standing(True, caution=UNTESTED_RECIPE), 100))

    assert text.index("nothing of it was tested") < text.index("Launch is allowed")


@pytest.mark.slow
def test_a_repair_stands_on_a_line_of_its_own(live: RunDetail) -> None:
    evidence = "never started: box lacks gguf\n  repair: python -m pip install gguf\n  or let draftyard do it: draftyard doctor box --fix"
    run = dataclasses.replace(live.run, state=State.FAILED, evidence=evidence, ended_s=NOW_S)

    lines = text_of(state_lines(dataclasses.replace(live, run=run), NOW_S, 100, ascii_only=False)).splitlines()

    assert "repair: python -m pip install gguf" in lines
    assert "or let draftyard do it: draftyard doctor box --fix" in lines
    assert told_and_repairs("a disk is full") == ["a disk is full"]


@pytest.mark.slow
def test_a_size_is_told_in_its_own_unit_everywhere(live: RunDetail) -> None:
    small = CheckpointRow(
        run_id=live.run.id, attempt=1, step=20, path="checkpoints/s.bin", size_bytes=100_000, at_s=NOW_S, is_best=False
    )

    assert fact_text("budget_bytes", 300 * 2**20) == "0.29 GiB"
    assert "97.7 KiB" in text_of(checkpoint_lines(dataclasses.replace(live, checkpoints=(small,)), NOW_S, 100))


def test_sizes_that_two_runs_were_told_are_sizes(live: RunDetail) -> None:
    other = dataclasses.replace(live, spec={**(live.spec or {}), "life": {"budget_bytes": 300 * 2**20}})

    assert "0.29 GiB" in text_of(compare_lines([live, other], 120, Look()))


def test_parts_of_a_small_plan_on_a_large_card_have_bars_that_differ() -> None:
    parts = [{"name": name, "size_bytes": size * GIB} for name, size in (("drafter", 0.4), ("inputs", 0.1))]
    stage = {"name": "step", "allocated_bytes": GIB // 2, "components": parts}
    plan = {"capacity_bytes": 80 * GIB, "driver_bytes": GIB // 2, "peak_stage": "step", "stages": [stage]}

    lines = text_of(plan_lines(plan, 80, ascii_only=True)).splitlines()

    filled = {line.split()[0]: line.count("#") for line in lines}
    assert filled["drafter"] > 3 * filled["inputs"] > 0


def test_a_measured_stage_without_a_plan_is_said_to_have_none(live: RunDetail) -> None:
    peak = dataclasses.replace(live.peaks[-1], stage="target", allocated_bytes=2 * GIB)
    assert isinstance(peak, MemoryPeakRow)

    text = text_of(peak_lines(dataclasses.replace(live, peaks=(peak,), ranks=()), 90))

    assert "target: not planned, and no part of what must fit" in text


def test_the_event_that_began_a_run_is_no_evidence_once_steps_are_told(live: RunDetail) -> None:
    run = dataclasses.replace(live.run, state=State.RUNNING, evidence="its job has begun to report", step=523)

    text = text_of(state_lines(dataclasses.replace(live, run=run), NOW_S, 100, ascii_only=False))

    assert "first event" not in text
    assert "newest word" in text


def test_a_job_that_has_ended_without_steps_is_not_waited_for(live: RunDetail) -> None:
    run = dataclasses.replace(live.run, kind="smoke", state=State.SUCCEEDED)
    ended = RunDetail(run=run)

    assert "yet" not in text_of(speed_lines(ended, 60, ascii_only=False))


@pytest.mark.parametrize("width", [80, 120, 160])
def test_an_origin_stands_in_its_column_however_long_the_value_is(width: int) -> None:
    places = set()
    for value in ("1", "a" * 16, "a/b" * 9, "a word " * 9, "x" * 200):
        lines = text_of(_fitting("data.path", [(value, "text")], "own.yaml:7  base", width)).splitlines()
        assert max(map(len, lines)) <= width
        places |= {line.index("own.yaml") for line in lines if "own.yaml" in line}

    assert len(places) == 1
    assert places.pop() > LABEL_WIDTH


def test_a_database_cut_to_nothing_is_said(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    path.write_bytes(b"")
    place = Place(path)
    place.must_reopen()  # one that is being made
    path.write_bytes(b"SQLite")
    place.must_reopen()
    path.write_bytes(b"")

    with pytest.raises(StoreError, match="is empty now"):
        place.must_reopen()
    path.write_bytes(b"SQLite")

    assert place.must_reopen()
    assert place.is_another


@pytest.mark.slow
async def test_a_database_made_anew_is_not_a_yard_that_never_had_a_run(
    tmp_path: Path, open_app: Callable[..., Draftyard]
) -> None:
    with Yard(tmp_path / "runs.db").store:
        pass
    app = open_app(tmp_path / "runs.db")
    async with opened(app) as pilot:
        first = await shown(app, pilot, "No runs yet")
        for part in tmp_path.iterdir():
            part.unlink()
        with Yard(tmp_path / "runs.db").store:
            pass
        app.tick()
        text = await shown(app, pilot, "was replaced or emptied")

    assert "replaced" not in first
    assert "No runs yet" not in text


def test_the_list_and_the_page_of_a_run_name_the_memory_that_ran_out_alike(live: RunDetail) -> None:
    for reason in ("gpu_oom", "host_oom", "cgroup_oom"):
        run = dataclasses.replace(live.run, state=State.FAILED, reason=reason, ended_s=NOW_S)
        word = state_text(run)

        assert "OOM" in word
        assert word in text_of(state_lines(dataclasses.replace(live, run=run), NOW_S, 100, ascii_only=False))


@pytest.mark.slow
async def test_what_has_nothing_wrong_stands_below_what_never_started(
    tmp_path: Path, open_app: Callable[..., Draftyard]
) -> None:
    yard = Yard(tmp_path / "runs.db")
    with yard.store:
        for number, (state, evidence) in enumerate(
            [
                (State.FAILED, "never started: no torch"),
                (State.STOPPED, "asked"),
                (State.FAILED, "never started: no gguf"),
            ]
        ):
            yard.run(f"n{number}wq7kdx", f"own/b{number}", ago_s=900.0 - number)
            yard.state(f"n{number}wq7kdx", state, ago_s=10, evidence=evidence)
    app = open_app(yard.path)
    async with opened(app, "s", size=(110, 30)):
        rows = [line for line in screen_text(app).splitlines()[:6] if "own/" in line]

    assert ["own/b1" in row for row in rows] == [False, False, True]
    assert "nothing" in rows[-1]


@pytest.mark.slow
async def test_no_evaluation_is_offered_of_what_a_script_did(
    tmp_path: Path, open_app: Callable[..., Draftyard]
) -> None:
    yard = Yard(tmp_path / "runs.db")
    with yard.store:
        for run_id, entry in (("n1wq7kdx", "script"), ("n2wq7kdx", "dflash")):
            yard.run(run_id, "own/main", documents={Document.SPEC: json.dumps({"entry": entry})})
            yard.state(run_id, State.SUCCEEDED)
    app = open_app(yard.path)
    async with opened(app, size=(110, 30)) as pilot:
        offered: dict[str, set[str]] = {}
        for run in app.shown.runs if app.shown else ():
            offered[run.id] = {deed.name for deed in DEEDS if not why_not(app, deed, run)}
        await pilot.pause()

    assert {"evaluate", "export"} <= offered["n2wq7kdx"]
    assert offered["n1wq7kdx"].isdisjoint({"evaluate", "export"})
    assert "resume" in offered["n1wq7kdx"]
