"""The smoke matrix: what stands on each rung, plan against measured, climbing from it and watching."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.actions.places import BUNDLED, find_places
from orchestrator.actions.rungs import ladder, peak_bytes, seconds_of
from orchestrator.store.rows import Document, EvidenceRow, State
from tests.tui.golden import opened, press, shown
from tests.tui.world import GIB, NOW_S, PLAN, Writer, Yard
from tui import smoke as smoke_screen
from tui.app import Draftyard
from tui.ordering import Wish
from tui.pieces import text_of
from tui.plain import screen_text
from tui.run import RunScreen
from tui.smoke_rows import Row, columns, row_cells, rows_of, rung_lines, rung_names
from tui.snapshot import Ask, Room

Open = Callable[..., Draftyard]


def rung(name: str, *, passed: bool = True, fingerprint: str = "f1", at_s: float = NOW_S, **values: Any) -> EvidenceRow:
    return EvidenceRow(
        run_id="smok2345", attempt=1, rung=name, passed=passed, message="" if passed else "leaked", values=values,
        at_s=at_s, fingerprint=fingerprint, fingerprint_parts={}, recipe="r", branch="b", host="h",
    )  # fmt: skip


def cells(row: Row, *, with_times: bool = True) -> list[str]:
    return ["".join(text for text, _ in cell).strip() for cell in row_cells(row, ladder(), "", with_times=with_times)][
        2:
    ]


def test_the_peak_is_the_highest_stage_as_the_rungs_name_them() -> None:
    measured = {"loss": 3.0, "forward_allocated_bytes": 5, "backward_allocated_bytes": 9, "forward_reserved_bytes": 7}

    assert peak_bytes(measured) == 7
    assert peak_bytes({"forward_allocated_bytes": 5}) == 5
    assert peak_bytes({"duration_s": 2.0, "peak_bytes": 11}) == 11
    assert peak_bytes({"loss": 3.0}) is None


@pytest.mark.parametrize("name", ["step_s", "duration_s", "forward_s", "probe_s", "load_s"])
def test_every_rung_tells_its_time(name: str) -> None:
    assert seconds_of({"warm_up_s": 9.0, name: 1.5}) == 1.5


def test_a_cell_says_how_the_rung_stands() -> None:
    row = Row("r", "b", "h", {
        "fwd": rung("fwd", fingerprint="f0", at_s=NOW_S - 60),
        "fwd_bwd": rung("fwd_bwd", step_s=1.27, backward_reserved_bytes=84 * GIB),
        "leak": rung("leak", passed=False),
    })  # fmt: skip

    assert cells(row) == ["· stale", "✓ 84.0 GiB  1.27s", "· missing", "✗ failed", "· missing"]
    assert cells(row, with_times=False)[1] == "✓ 84.0"


def test_the_plan_stands_beside_what_the_whole_step_measured() -> None:
    sizes = {f"{stage['name']}_allocated_bytes": stage["allocated_bytes"] for stage in PLAN["stages"]}  # type: ignore[index,attr-defined]
    sizes["backward_allocated_bytes"] = int(sizes["backward_allocated_bytes"] * 1.1)
    row = Row("r", "b", "h", {"fwd_bwd": rung("fwd_bwd", **sizes)})

    text = text_of(rung_lines(row, ladder(), "fwd_bwd", PLAN, NOW_S, 78))

    assert "Plan against measured" in text
    assert " 0%" in next(line for line in text.splitlines() if line.startswith("  forward"))
    assert "+10%" in next(line for line in text.splitlines() if line.startswith("  backward"))


@pytest.mark.slow
async def test_an_empty_matrix_says_what_to_press_and_what_to_type(tmp_path: Path, open_app: Open) -> None:
    """The first of its keys leads to where the other works; those that could do nothing are not offered."""
    yard = Yard(tmp_path / "runs.db")
    yard.store.close()
    places = find_places(tmp_path, {"HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}, db=yard.path)
    app = open_app(yard.path, places=places)
    async with opened(app, "3", size=(60, 24)) as pilot:
        text = await shown(
            app, pilot, "No rung has been climbed yet.", "choose a branch and a host; m there climbs its rungs"
        )
        await press(app, pilot, "m", "R", "right", "4")
        await shown(app, pilot, "smoke missing")

    assert all(word in text for word in (*ladder(), "draftyard smoke RECIPE --host HOST"))
    assert "run missing" not in text


@pytest.mark.parametrize("factor", [1.0, 0.4, 1.7])
def test_headings_end_where_their_columns_end(factor: float) -> None:
    sizes = {f"{stage['name']}_allocated_bytes": int(stage["allocated_bytes"] * factor) for stage in PLAN["stages"]}  # type: ignore[index,attr-defined]
    row = Row("r", "b", "h", {"fwd_bwd": rung("fwd_bwd", loss=2.5, **sizes)})

    lines = text_of(rung_lines(row, ladder(), "fwd_bwd", PLAN, NOW_S, 78)).splitlines()
    below = lines[next(index for index, line in enumerate(lines) if line.startswith("Plan against")) + 1 :]

    assert len(below[0]) == len(below[1]) == len(below[3])
    assert below[0].index("measured") + len("measured") == list(re.finditer(r"\S+", below[1]))[2].end()
    rungs = next(line for line in lines if "fwd_bwd" in line and "2.500" in line)
    assert lines[1].index("loss") + len("loss") == rungs.index("2.500") + len("2.500")


def test_a_rung_that_failed_says_why() -> None:
    row = Row("r", "b", "h", {"leak": rung("leak", passed=False)})

    assert "leaked" in text_of(rung_lines(row, ladder(), "leak", {}, NOW_S, 78))


@pytest.fixture
def climbing(tmp_path: Path) -> Yard:
    """A smoke run on its second rung; nothing is known of its branch from before."""
    yard = Yard(tmp_path / "runs.db")
    recipe = shutil.copy(BUNDLED / "smollm2.yaml", tmp_path / "by path.yaml")
    launch = {"recipe_file": str(recipe), "overrides": ["train.seed=7"], "named_gpus": ["1"]}
    yard.run("climb234", "smollm2/ce", kind="smoke", host="local", ago_s=30.0, fingerprint="f1",
             documents={Document.PLAN: json.dumps(PLAN), Document.LAUNCH: json.dumps(launch)})  # fmt: skip
    writer = Writer(yard.store, "climb234")
    writer.tell([
        ("stage", NOW_S - 20, {"name": "rung fwd"}),
        ("rung", NOW_S - 15, {"name": "fwd", "passed": True, "message": "", "values": {"forward_s": 0.4, "forward_allocated_bytes": 2 * GIB}}),
        ("stage", NOW_S - 10, {"name": "rung fwd_bwd"}),
    ])  # fmt: skip
    yard.state("climb234", State.RUNNING, evidence="beat")
    yard.writer = writer  # type: ignore[attr-defined]
    return yard


@pytest.mark.slow
async def test_a_climb_is_watched_rung_by_rung(climbing: Yard, open_app: Open) -> None:
    app = open_app(climbing.path)
    async with opened(app, "3", size=(140, 30)) as pilot:
        before = screen_text(app)
        climbing.writer.tell([  # type: ignore[attr-defined]
            ("rung", NOW_S - 5, {"name": "fwd_bwd", "passed": True, "message": "", "values": {"step_s": 1.5, "step_allocated_bytes": 3 * GIB}}),
            ("stage", NOW_S - 5, {"name": "rung multi_doc"}),
        ])  # fmt: skip
        app.tick()
        await app.settle(pilot)
        after = screen_text(app)

    row = next(line for line in before.splitlines() if "smollm2/ce" in line)
    assert "✓ 2.00 GiB  0.40s" in row
    assert "▸ climbing" in row
    row = next(line for line in after.splitlines() if "smollm2/ce" in line)
    assert "✓ 3.00 GiB  1.50s" in row
    assert row.count("climbing") == 1


@pytest.mark.slow
async def test_enter_opens_the_smoke_run(climbing: Yard, open_app: Open) -> None:
    app = open_app(climbing.path)
    async with opened(app, "3", "enter"):
        assert isinstance(app.screen, RunScreen)
        assert "climb234" in screen_text(app)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "wanted"),
    [("m", ((), False)), ("a", ((), True)), ("R", (("fwd",), False)), ("right right R", (("multi_doc",), False))],
)
async def test_keys_climb_what_they_say(
    keys: str, wanted: object, climbing: Yard, tmp_path: Path, open_app: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the action does is tested with the jobs; the screen asks for what the run there was told, path and all."""
    asked: list[tuple[object, ...]] = []

    def smoke(_places: object, wish: Any, _tell: object, *, rungs: tuple[str, ...], again: bool) -> str:
        asked.append((wish, (rungs, again)))
        return "fresh234"

    monkeypatch.setattr(smoke_screen, "smoke", smoke)
    app = open_app(climbing.path, places=find_places(tmp_path, {"HOME": str(tmp_path)}, db=climbing.path))
    async with opened(app, "3") as pilot:
        await press(app, pilot, *keys.split())
        await shown(app, pilot, "smoke run fresh234 started")

    told = Wish(str(tmp_path / "by path.yaml"), "ce", "local", gpus=("1",), overrides=("train.seed=7",))
    assert asked == [(told, wanted)]


@pytest.mark.slow
async def test_a_read_only_screen_climbs_nothing(climbing: Yard, open_app: Open) -> None:
    app = open_app(climbing.path, readonly=True)
    async with opened(app, "3", "R"):
        assert "only looks" in screen_text(app)


def test_a_branch_of_a_script_of_ones_own_misses_no_rung_that_its_recipe_does_not_want(tmp_path: Path) -> None:
    yard = Yard(tmp_path / "runs.db")
    spec = {"entry": "script", "recipe": "mine", "branch": "fast", "smoke": {"rungs": ["three_steps"]}}
    with yard.store:
        run = yard.run("three234", "mine/fast", kind="smoke", documents={Document.SPEC: json.dumps(spec)})
        told = {"name": "three_steps", "passed": True, "values": {}, "message": ""}
        Writer(yard.store, run).tell([("rung", NOW_S - 60, told)])
        yard.state(run, State.SUCCEEDED)
    room = Room(yard.path)
    snapshot = room.read(Ask(wants_list=False, wants_evidence=True), NOW_S)
    room.close()
    assert snapshot is not None

    rows = rows_of(snapshot.evidence, snapshot.live, snapshot.wanted)
    text = text_of(rung_lines(rows[0], rung_names(rows), "three_steps", {}, NOW_S, 78))

    assert rung_names(rows) == ("three_steps",)
    assert "missing" not in text
    assert "three_steps passed" in text


def test_the_rungs_of_the_row_under_the_cursor_keep_their_columns_longest() -> None:
    names = ("fwd", "fwd_bwd", "multi_doc", "leak", "checkpoint", "three_steps")

    ranks = {column.title: column.rank for column in columns(names, ("three_steps",), with_times=False)}

    assert ranks["three_steps"] < min(rank for name, rank in ranks.items() if name in names[:5])
