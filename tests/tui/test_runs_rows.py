"""The rows of the list: enough at 80 columns to tell runs apart, nothing said that is not so."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.store.reads import Reader
from orchestrator.store.rows import RunRow, State
from tests.tui.golden import opened, press, shown
from tests.tui.test_launch import places_of
from tests.tui.world import NOW_S, Writer, Yard, steps
from tests.tui.yard import DONE, LIVE, OOM, STOPPED, UNREACHABLE
from tui.app import Draftyard
from tui.detail import read_detail
from tui.frame import LEAST_WIDTH
from tui.overview import state_lines
from tui.pieces import text_of
from tui.plain import screen_text
from tui.runs_rows import COLUMNS, NEEDED, loss_text, run_cells, trouble, trouble_columns
from tui.snapshot import Ask, CurvesAsk, Room, RunNumbers, Snapshot
from tui.table import Column
from tui.wording import short_value


def cells_of(run: RunRow, numbers: RunNumbers) -> dict[str, str]:
    cells = run_cells(run, numbers, NOW_S, ascii_only=False)
    return {column.title: text_of([cell]) for column, cell in zip(COLUMNS, cells, strict=True)}


def seen(path: Path) -> Snapshot:
    """What the list reads."""
    room = Room(path)
    snapshot = room.read(Ask(), NOW_S)
    room.close()
    assert snapshot is not None
    return snapshot


def row_of(path: Path, run_id: str) -> dict[str, str]:
    snapshot = seen(path)
    run = next(run for run in snapshot.runs if run.id == run_id)
    return cells_of(run, snapshot.numbers[run_id])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "missing"),
    [(135, set()), (134, {"unreachable"}), (113, {"unreachable"}), (112, {"unreachable", "tok/s"})],
)
async def test_every_column_stands_from_113_cells_on(
    width: int, missing: set[str], open_app: Callable[..., Draftyard]
) -> None:
    """As docs/screens.md says; the word beside a state that `R?` says too is the first to leave, then the speed."""
    app = open_app()
    async with opened(app, size=(width, 24)):
        text = screen_text(app)
        header = next(line for line in text.splitlines() if "ends in" in line)
        cut_off = next(line for line in text.splitlines() if "R? " in line)

    assert width < 135 or "qwen27b/ddtree-narrow" in text  # a word that is said twice cuts no name
    titles = {column.title for column in NEEDED if column.title not in header}
    assert titles | ({"unreachable"} - set(cut_off.split())) == missing
    assert "running" in cut_off


@pytest.mark.slow
async def test_two_runs_of_a_branch_differ_at_eighty_columns(open_app: Callable[..., Draftyard]) -> None:
    app = open_app()
    async with opened(app):
        lines = screen_text(app).splitlines()

    first, second = (line for line in lines if " qwen27b/v6" in line or "▌R? qwen27b/v6" in line)
    assert "▌R? " in first
    assert "b4tw9rne running" in first
    assert "m8yb2hqc succeeded" in second
    assert "2.237" in first
    assert "1.901" in second


def test_a_run_that_has_ended_ends_no_more(filled_yard: Path) -> None:
    stopped = row_of(filled_yard, STOPPED)

    assert stopped["state"] == "stopped"
    assert stopped["ends in"] == ""
    assert row_of(filled_yard, LIVE)["ends in"] == "1d15h"


@pytest.mark.parametrize(
    ("reason", "words"), [("gpu_oom", "GPU OOM"), ("nonfinite", "NaN"), ("exit:2", "exit 2"), (None, "failed")]
)
def test_a_failed_run_says_why_in_ten_cells(filled_yard: Path, reason: str | None, words: str) -> None:
    with Reader(filled_yard) as reader:
        run = dataclasses.replace(reader.run(STOPPED), state=State.FAILED, reason=reason)

    assert cells_of(run, RunNumbers())["state"] == words


def test_what_was_seen_before_the_host_went_silent_is_drawn_as_old(filled_yard: Path) -> None:
    """An hour later the end has not moved away by an hour, and a full card is no alarm any more."""
    snapshot = seen(filled_yard)
    run, numbers = next(run for run in snapshot.runs if run.id == UNREACHABLE), snapshot.numbers[UNREACHABLE]
    gpu = dataclasses.replace(numbers.gpus[0], used_bytes=numbers.gpus[0].total_bytes)
    numbers = dataclasses.replace(numbers, gpus=(gpu,), eta_s=7200.0, stepped_s=NOW_S)
    run = dataclasses.replace(run, last_event_s=NOW_S)
    ends = {}
    for late_s in (0.0, 3600.0, 7200.0):
        cells = dict(zip([column.title for column in COLUMNS], run_cells(run, numbers, NOW_S + late_s, ascii_only=False), strict=True))  # fmt: skip
        ends[late_s] = cells["ends in"]
        inks = {meaning for title in ("ends in", "tok/s", "memory", "loss", "curve") for _, meaning in cells[title]}

    assert ends == {0.0: [("2h00m", "faint")], 3600.0: [("1h00m", "faint")], 7200.0: [("–", "faint")]}
    assert inks == {"faint", "muted", "line"}


@pytest.mark.parametrize(
    ("loss", "told"),
    [(1.57, "1.570"), (2.915, "2.915"), (12.3456, "12.346"), (0.0, "0.000"), (-0.25, "-0.250"), (123.456, "123.456")],
)
def test_the_points_of_a_column_of_losses_stand_below_each_other(loss: float, told: str) -> None:
    assert loss_text(loss) == told


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 1e-5, 1e6, 1e30, -99999.9, 999.9999])
def test_a_loss_that_three_decimals_do_not_tell_is_told_all_the_same(loss: float) -> None:
    assert loss_text(loss) == short_value(loss, 7)
    assert len(loss_text(loss)) <= 7


def test_out_of_memory_is_said_once(filled_yard: Path) -> None:
    """The words of the exception say it again, and in a narrow list they would be all that is seen."""
    snapshot = seen(filled_yard)
    run = next(run for run in snapshot.runs if run.id == OOM)

    told = trouble(run, snapshot.numbers[OOM], NOW_S)[1]
    assert told.startswith("out of memory: Tried to allocate 11.15 GiB. GPU 0 has a total capacity")
    assert trouble(run, RunNumbers(cause="the container's limit"), NOW_S)[1] == "out of memory: the container's limit"


def test_the_list_says_what_a_drafter_is_worth(filled_yard: Path) -> None:
    assert row_of(filled_yard, DONE)["accept"] == "1.71"
    assert row_of(filled_yard, LIVE)["accept"] == ""


@pytest.mark.parametrize(
    "number", [1.83e-5, -1.83e-5, 0.0018312, 4.9143, 12345.678, -12345.678, 123456.0, 9.9999e-300, 1e12, -0.00183]
)
def test_a_number_gets_fewer_digits_before_it_is_cut(number: float) -> None:
    text = short_value(number, 7)

    assert len(text) <= 7
    assert not text.endswith("…")
    if "," not in text and text[-1].isdigit():
        assert float(text) == pytest.approx(number, rel=0.3)


def test_after_the_last_step_the_stage_tells_how_far_it_is(tmp_path: Path) -> None:
    """The answers of before are over: they say nothing of the evaluation."""
    yard = Yard(tmp_path / "runs.db")
    with yard.store:
        run = yard.run("evalrun2", "smollm2/ce", num_steps=100)
        rank0 = Writer(yard.store, run)
        rank0.tell([("progress", NOW_S - 900, {"what": "answers", "done": 700, "total": 700, "unit": "prompts"})])
        rank0.tell([("stage", NOW_S - 800, {"name": "training"})])
        rank0.tell(steps(1, 100, 1, begin_s=NOW_S - 700, step_s=1.0, seed=1))
        rank0.tell([("stage", NOW_S - 200, {"name": "evaluating"})])
        yard.state(run, State.RUNNING)
        before = row_of(yard.path, run)
        rank0.tell([("progress", NOW_S - 100, {"what": "decoding", "done": 4, "total": 16, "unit": "prompts"})])
        after = row_of(yard.path, run)
        with Reader(yard.path) as reader:
            head = text_of(state_lines(read_detail(reader, reader.run(run), CurvesAsk()), NOW_S, 78, ascii_only=False))

    assert (before["state"], before["ends in"]) == ("evaluating", "–")
    assert (after["state"], after["ends in"]) == ("eval 25%", "–")
    assert "decoding" in head
    assert "4 of 16 prompts" in head
    assert "evaluating for 3m20s" in head
    assert "ends in" not in head
    assert "answers" not in head


@pytest.mark.parametrize("columns", [COLUMNS, trouble_columns(())], ids=["list", "worst off"])
def test_what_names_a_run_never_leaves_the_list(columns: tuple[Column, ...]) -> None:
    """Nor does what is wrong with it: a narrower screen takes the columns of a rank, and only those."""
    fixed = [column for column in columns if not column.rank]

    assert sum((column.width or column.least) + 1 for column in fixed) < LEAST_WIDTH


def test_the_numbers_of_a_run_that_nobody_follows_are_of_then(yard_copy: Path) -> None:
    """Silent for an hour is not told in the ink of now, though no host was marked as out of reach; an end does not slide."""
    snapshot = seen(yard_copy)
    run = next(run for run in snapshot.runs if run.id == LIVE)
    numbers = snapshot.numbers[LIVE]

    now, then = (
        dict(zip((column.title for column in COLUMNS), run_cells(run, numbers, at_s, ascii_only=False), strict=True))
        for at_s in (NOW_S, NOW_S + 3600)
    )

    assert now["ends in"][0][1] == "strong"
    assert {meaning for title in ("ends in", "memory") for _, meaning in then[title]} <= {"faint", "line"}
    assert text_of([then["ends in"]]) != text_of([now["ends in"]])


def test_the_age_of_a_run_is_counted_from_its_launch_whatever_attempt_runs(yard_copy: Path) -> None:
    with Reader(yard_copy) as reader:
        run = dataclasses.replace(reader.run(LIVE), created_s=NOW_S - 3 * 86_400, started_s=NOW_S - 600, ended_s=None)

    assert cells_of(run, RunNumbers())["age"] == "3d"


@pytest.mark.slow
async def test_a_list_without_a_training_says_that_there_are_other_runs(
    tmp_path: Path, open_app: Callable[..., Draftyard]
) -> None:
    """While the first smoke ran, `1 live` stood above `No runs yet`."""
    yard = Yard(tmp_path / "runs.db")
    with yard.store:
        yard.run("aaaawq7k", "smollm2/ce", kind="smoke")
        yard.state("aaaawq7k", State.RUNNING)
    app = open_app(yard.path)
    async with opened(app) as pilot:
        text = await shown(app, pilot, "1 live")
        with yard.store:
            yard.run("bbbbwq7k", "smollm2/ce", kind="export")
        two = await shown(app, pilot, "2 runs of other kinds")
        await press(app, pilot, "a")
        await shown(app, pilot, "smoke smollm2/ce")

    assert "No training yet; there is 1 run of another kind: a lists every kind" in text
    assert "draftyard ls --kind all" in " ".join(two.split())
    assert "No runs yet" not in text


@pytest.mark.slow
async def test_an_empty_list_offers_the_keys_that_lead_on_and_no_others(
    tmp_path: Path, open_app: Callable[..., Draftyard]
) -> None:
    """Open, mark, sort, log and compare stood below `No runs yet`, and not the key that begins."""
    yard = Yard(tmp_path / "runs.db")
    app = open_app(yard.path, places=places_of(tmp_path, yard.path))
    async with opened(app) as pilot:
        empty = await shown(app, pilot, "No runs yet. 3 climbs the first rungs")
        with yard.store:
            yard.run("aaaawq7k", "smollm2/ce")
        filled = await shown(app, pilot, "smollm2/ce", "open")

    offered = [word for word in ("open", "mark", "sort", "log", "compare") if f" {word}" in empty.splitlines()[-1]]
    assert offered == []
    assert all(f" {word}" in filled.splitlines()[-1] for word in ("open", "mark", "sort", "log", "compare"))


def test_a_share_of_a_stage_stands_beside_its_name_and_not_where_the_end_is_told(tmp_path: Path) -> None:
    """`75%` below `ends in` was read as a part of the time."""
    yard = Yard(tmp_path / "runs.db")
    events = [
        ("stage", 1.0, {"name": "loading"}),
        ("progress", 2.0, {"what": "layers", "done": 3, "total": 4, "unit": "layers"}),
    ]
    with yard.store as store:
        for run_id, stage in (("aaaawq7k", "loading"), ("bbbbwq7k", "evaluating")):
            yard.run(run_id, "smollm2/ce")
            yard.state(run_id, State.RUNNING)
            Writer(store, run_id).tell([("stage", 1.0, {"name": stage}), *events[1:]])

    assert (row_of(yard.path, "aaaawq7k")["state"], row_of(yard.path, "aaaawq7k")["ends in"]) == ("loading 75%", "–")
    assert (row_of(yard.path, "bbbbwq7k")["state"], row_of(yard.path, "bbbbwq7k")["ends in"]) == ("eval 75%", "–")
