"""Panes as plain functions: odd input, and the shapes they share with the rooms that make it."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input

from orchestrator.actions.places import Places, find_places
from orchestrator.actions.plans import plan_body, plan_memory
from orchestrator.errors import UsageError
from orchestrator.recipe import load_recipe
from orchestrator.store.reads import Reader
from orchestrator.store.rows import HostRow, State
from remote.plan import plan
from remote.spec import DFlashSpec
from tests.tui.golden import opened, shown
from tests.tui.world import NOW_S, PLAN
from tests.tui.yard import LIVE, OOM, RESUMED, UNREACHABLE
from tui import ordering
from tui.app import Draftyard
from tui.checkpoints import checkpoint_lines
from tui.detail import RunDetail, read_detail
from tui.facts import fact_lines, fact_text
from tui.failure import failure_lines
from tui.hosts_lines import hosts_lines
from tui.launch_lines import choice_lines
from tui.memory import difference, memory_tab_lines, peak_lines, plan_lines, water_lines
from tui.ordering import Offer, Planned, Standing, Wish, offers, planned
from tui.overview import overview_lines, split_lines
from tui.pieces import beside, fitted, flowed, text_of, width_of, wrapped
from tui.snapshot import Ask, CurvesAsk, Snapshot
from tui.spec import spec_lines

pytestmark = pytest.mark.slow  # every pane at every width

GIB = 2**30


def detail_of(path: Path, run_id: str) -> RunDetail:
    with Reader(path) as reader:
        return read_detail(reader, reader.run(run_id), CurvesAsk(names=("loss", "accuracy")))


@pytest.fixture
def with_host(filled_yard: Path, tmp_path: Path) -> Places:
    """The filled yard from a folder that knows its host pve-a."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "hosts.yaml").write_text("hosts:\n  pve-a: {address: pve-a}\n")
    return find_places(tmp_path, {"HOME": str(tmp_path)}, db=filled_yard)


def places_of(tmp_path: Path) -> Any:
    return find_places(tmp_path, {"HOME": str(tmp_path)}, db=tmp_path / "runs.db")


@pytest.mark.parametrize("width", [40, 58, 78, 100, 120, 138, 198])
@pytest.mark.parametrize("run_id", [LIVE, OOM, RESUMED, UNREACHABLE])
def test_no_line_is_wider_than_its_pane(filled_yard: Path, run_id: str, width: int) -> None:
    detail = detail_of(filled_yard, run_id)
    pages = {
        "overview": overview_lines(detail, NOW_S, width, 30, ascii_only=False),
        "memory": memory_tab_lines(detail, NOW_S, width, 30, ascii_only=False),
        "failure": failure_lines(detail, width),
        "files": checkpoint_lines(detail, NOW_S, width) if width >= 58 else [],
    }

    too_wide = [(name, text_of([line])) for name, lines in pages.items() for line in lines if width_of(line) > width]
    assert too_wide == []


def test_a_plan_of_the_planner_is_drawn_line_by_line(tmp_path: Path) -> None:
    made = plan_memory(places_of(tmp_path), "qwen3.6-27b", branch="ddtree", capacity_bytes=95 * GIB)

    text = text_of(plan_lines(plan_body(made.plan), 78, ascii_only=False))

    assert "must fit" in text
    assert "95.0 GiB" in text
    assert max(made.plan.peak.components, key=lambda line: line.size_bytes).name.replace("_", " ")[:20] in text
    assert set(plan_body(made.plan)) >= set(PLAN)


def test_the_lines_of_a_plan_add_up_to_what_must_fit() -> None:
    """With what smoke runs took beyond it, too."""
    spec = load_recipe("smollm2").resolve("ce").spec
    assert isinstance(spec, DFlashSpec)
    body = plan_body(plan(spec, residuals={"step": [8 * GIB]}))

    rows = [text_of([line]).split() for line in plan_lines(body, 78, ascii_only=True)[1:]]
    sizes = {" ".join(row[: row.index("GiB") - 1]): float(row[row.index("GiB") - 1]) for row in rows}
    must_fit = sizes.pop("must fit")

    assert sizes["unexplained"] == 8
    assert sum(sizes.values()) == pytest.approx(must_fit, abs=0.05 * len(rows))


def test_measured_stages_stand_beside_the_plan_by_kind_of_peak(filled_yard: Path) -> None:
    text = text_of(peak_lines(detail_of(filled_yard, LIVE), 78))
    backward = next(line for line in text.splitlines() if line.startswith("backward, GPU 5"))

    # planned, allocated, the difference of the two, reserved, driver
    assert backward.split()[-6:] == ["83.2", "82.6", "-0.57", "-1%", "83.9", "84.7"]


def test_what_was_allocated_far_beyond_the_plan_stands_out_as_in_the_rungs(filled_yard: Path) -> None:
    """A stage that took a fifth more than was planned is why the next run dies."""
    for width in (40, 78):
        lines = {text_of([line[:1]]).strip(): line for line in peak_lines(detail_of(filled_yard, LIVE), width)}
        inks = {stage: meaning for stage, line in lines.items() for text, meaning in line if text.strip().endswith("%")}

        assert inks["step, GPU 5"] == "warn"  # 20 % beyond it
        assert inks["backward, GPU 5"] == "good"
        assert "+20%" in text_of([lines["step, GPU 5"]])


def test_the_targets_pass_of_a_training_stands_beside_its_plan(filled_yard: Path) -> None:
    """A plan that was kept before it had the pass says of that stage that it was not planned."""
    detail = detail_of(filled_yard, LIVE)
    target = dataclasses.replace(detail.peaks[0], stage="target", allocated_bytes=40 * 2**30)
    detail = dataclasses.replace(detail, peaks=(*detail.peaks, target))
    of_pass = {"name": "target", "allocated_bytes": 50 * 2**30, "components": []}
    known = dataclasses.replace(detail, plan={**PLAN, "target_pass": of_pass})
    rung = dataclasses.replace(known, run=dataclasses.replace(known.run, kind="smoke"))

    before, told, of_rung = (text_of(peak_lines(one, 100)) for one in (detail, known, rung))

    assert "target: not planned" in before
    assert "target: not planned" in of_rung
    assert "not planned" not in told
    assert re.search(r"^target.* 50\.0 +40\.0 +-10\.00 -20%", told, re.MULTILINE)
    assert "one that finds hidden states kept takes less" in told


def test_a_low_screen_has_plan_and_measured_at_its_top(filled_yard: Path) -> None:
    top = text_of(memory_tab_lines(detail_of(filled_yard, LIVE), NOW_S, 78, 20, ascii_only=False)[:20])

    assert re.search(r"^must fit +86.3 GiB", top, re.MULTILINE)
    assert re.search(r"^capacity +95.0 GiB  tight", top, re.MULTILINE)
    assert all(
        re.search(rf"^{stage}, GPU 5 +[\d.]+", top, re.MULTILINE) for stage in ("load", "forward", "backward", "step")
    )
    assert re.search(r"^target layers +45.6 GiB", top, re.MULTILINE)


@pytest.mark.parametrize(("retries", "meaning"), [(0.0, "muted"), (3.0, "warn")])
def test_the_allocator_trying_again_is_a_warning(filled_yard: Path, retries: float, meaning: str) -> None:
    detail = detail_of(filled_yard, LIVE)
    told = dataclasses.replace(detail.series[0], name="allocation_retries", last_value=retries)

    lines = peak_lines(dataclasses.replace(detail, series=(*detail.series, told)), 78)

    assert (f"allocator retries {retries:.0f}", meaning) in [piece for line in lines for piece in line]


def test_the_files_tab_names_the_artifacts_that_are_known(filled_yard: Path) -> None:
    died, live = detail_of(filled_yard, OOM), detail_of(filled_yard, LIVE)
    exported = dataclasses.replace(live, run=dataclasses.replace(live.run, kind="export", state=State.SUCCEEDED))
    of_death, of_live, of_export = (text_of(checkpoint_lines(one, NOW_S, 100)) for one in (died, live, exported))

    assert "attempts/1/artifacts/memory-rank0.pickle" in of_death
    assert f"draftyard pull {OOM} --artifacts" in of_death
    assert f"draftyard pull {LIVE} --artifacts" in of_live
    assert "/artifacts/" not in of_live
    assert "attempts/1/artifacts/export" in of_export


def test_every_gpu_has_a_water_line_of_its_own(filled_yard: Path) -> None:
    lines = water_lines(detail_of(filled_yard, LIVE), NOW_S, 78, ascii_only=False)

    assert all(f"{mark} GPU {gpu}" in text_of(lines) for mark, gpu in (("●", 5), ("▲", 6), ("■", 7)))
    assert len({meaning for line in lines[1:-1] for _, meaning in line if meaning.startswith("series")}) == 3
    assert re.search(r"^ +\d+ min ago .*now$", text_of(lines), re.MULTILINE)


def test_the_water_line_has_the_size_of_the_card_above_it(filled_yard: Path) -> None:
    """How far a card is from full is what one looks for."""
    lines = water_lines(detail_of(filled_yard, LIVE), NOW_S, 78, ascii_only=False)

    assert text_of(lines[:1]).startswith("used of 95.0 GiB")
    assert text_of(lines[1:2]).split()[0] == "95.0"
    assert all(meaning == "faint" for text, meaning in lines[1] if set(text) & {"⠉", "⠒"})


def test_of_a_card_that_is_mostly_free_the_curve_is_not_pressed_flat(filled_yard: Path) -> None:
    detail = detail_of(filled_yard, LIVE)
    samples = tuple(dataclasses.replace(one, used_bytes=(one.used_bytes or 0) // 9) for one in detail.gpu_samples)

    lines = water_lines(dataclasses.replace(detail, gpu_samples=samples), NOW_S, 78, ascii_only=False)

    assert text_of(lines[:1]).startswith("used of 95.0 GiB")
    assert float(text_of(lines[1:2]).split()[0]) < 12


def test_the_shares_of_a_step_are_words_at_every_size(filled_yard: Path) -> None:
    """Without colours a bar of five parts is one part."""
    for width, most in ((78, 20), (138, 40)):
        lines = overview_lines(detail_of(filled_yard, LIVE), NOW_S, width, most, ascii_only=True)[:most]
        line = next(text for text in text_of(lines).splitlines() if text.startswith("a step"))

        shares = dict(re.findall(r"([a-z]+) +(\d+)%", line))
        assert list(shares) == ["wait", "forward", "backward", "optimizer", "other"]
        assert sum(map(int, shares.values())) == pytest.approx(100, abs=3)
        assert ("#" * 19 in line) is (width == 138)


def test_the_bar_of_a_steps_shares_is_never_cut(filled_yard: Path) -> None:
    """Rounded one by one its parts may be a cell too many."""
    detail = detail_of(filled_yard, RESUMED)

    for width in range(100, 180):
        (line,) = split_lines(detail, width, ascii_only=True)
        assert "…" not in text_of([line])
        assert width_of(line) <= width


def test_the_parts_of_a_steps_bar_have_ends(filled_yard: Path) -> None:
    """In the one ink of a run that has ended, or without colours, they were one line."""
    for ascii_only, end in ((False, "╸"), (True, "|")):
        (line,) = split_lines(detail_of(filled_yard, RESUMED), 138, ascii_only=ascii_only)

        assert text_of([line]).count(end) == 5


@pytest.mark.parametrize(("height", "is_apart"), [(20, False), (40, True)])
def test_the_shares_of_a_step_stand_apart_where_there_is_room(filled_yard: Path, height: int, is_apart: bool) -> None:
    lines = text_of(overview_lines(detail_of(filled_yard, LIVE), NOW_S, 138, height, ascii_only=False)).splitlines()
    place = next(row for row, line in enumerate(lines) if line.startswith("a step"))

    assert (lines[place + 1].strip() == "") is is_apart
    assert len(lines) <= height or not is_apart


@pytest.mark.parametrize(
    ("planned_gib", "measured", "told"),
    [(66.4, 66.1, "-0.30   0%"), (70.2, 84.0, "+13.80 +20%"), (83.2, 82.6, "-0.60  -1%")],
)
def test_a_difference_of_no_percent_has_no_sign(planned_gib: float, measured: float, told: str) -> None:
    assert difference(planned_gib * GIB, measured * GIB)[0] == told


def test_a_wrong_override_is_a_fault_of_the_wish(tmp_path: Path) -> None:
    wish = Wish("smollm2", "ce", overrides=("train.num_stepz=3",))

    answer = planned(places_of(tmp_path), wish)

    assert "num_step" in answer.fault


@pytest.mark.parametrize(
    ("host", "gpus", "fault"),
    [
        ("pve-a", ("5", "6"), ""),
        ("pve-a", ("GPU-00000005",), ""),
        ("pve-a", ("99",), "host pve-a has no GPU 99; it has 0 (RTX PRO 6000 Blackwell)"),
        ("pve-a", ("x",), "host pve-a has no GPU x"),
        ("local", ("0",), "host local has no GPU 0; it has none"),
    ],
)
def test_gpus_are_checked_against_the_host_as_last_seen(
    host: str, gpus: tuple[str, ...], fault: str, with_host: Places
) -> None:
    told = planned(with_host, Wish("smollm2", "ce", host, gpus)).fault

    assert told.startswith(fault) if fault else not told


@pytest.mark.parametrize(("gpus", "is_fault"), [("5", False), ("GPU-00000005", False), ("x", True), ("-1", True)])
def test_of_a_host_never_seen_a_gpu_must_look_like_one(gpus: str, is_fault: bool, tmp_path: Path) -> None:
    assert ("neither an index" in planned(places_of(tmp_path), Wish("smollm2", "ce", gpus=(gpus,))).fault) is is_fault


@pytest.mark.slow
@pytest.mark.parametrize("typed", ["5 6", "5,6", " 5, 6 "])
async def test_the_gpus_that_are_typed_reach_the_order(
    typed: str, with_host: Places, monkeypatch: pytest.MonkeyPatch, open_app: Callable[..., Draftyard]
) -> None:
    orders: list[Any] = []

    def rehearse(_places: Places, order: Any) -> None:
        orders.append(order)
        raise UsageError("seen")

    monkeypatch.setattr(ordering.actions("jobs"), "rehearse", rehearse)
    app = open_app(places=with_host)
    async with opened(app, "2", "4", size=(100, 30)) as pilot:
        await shown(app, pilot, "looks at the host")
        app.screen.query_one("#host", Input).value = "pve-a"
        app.screen.query_one("#gpus", Input).value = "99"
        await shown(app, pilot, "has no GPU 99")
        app.screen.query_one("#gpus", Input).value = typed
        await pilot.press("enter")
        await shown(app, pilot, "seen")

    assert [(order.host, order.gpus) for order in orders] == [("pve-a", ("5", "6"))]


def test_every_bundled_branch_is_offered_and_can_be_planned_or_says_why(tmp_path: Path) -> None:
    found = offers(places_of(tmp_path))

    assert "smollm2/ce" in {offer.key for offer in found}
    assert not [offer for offer in found if offer.fault]
    answer = planned(places_of(tmp_path), Wish("own-script", found[0].branch))
    assert answer.note or answer.body


@pytest.mark.parametrize(
    ("standing", "words"),
    [
        (None, "enter looks at the host"),
        (Standing(False, fault="host pve-a cannot be reached"), "cannot be reached"),
        (Standing(True, (("fwd", "passed", ""),)), "Launch is allowed"),
        (Standing(False, (("leak", "stale", "changed since: tree"),)), "changed since: tree"),
    ],
)
def test_the_gate_says_how_it_stands(standing: Standing | None, words: str) -> None:
    wish = Wish("smollm2", "ce")

    text = text_of(choice_lines(wish, Offer("smollm2", "ce"), (Planned({}), standing), 78, ascii_only=False))

    assert words in text


@pytest.mark.parametrize(("named", "told"), [((), "GPU 4, chosen by the gate"), (("4",), "GPU 4")])
def test_gpus_that_nobody_named_are_told_as_chosen(named: tuple[str, ...], told: str) -> None:
    """The field said that all would be taken, and below it stood the one that is."""
    wish, standing = Wish("smollm2", "ce", gpus=named), Standing(True, (("fwd", "passed", ""),), ("4",))

    text = text_of(choice_lines(wish, Offer("smollm2", "ce"), (Planned({}), standing), 78, ascii_only=False))

    assert told in text.splitlines()


def test_what_a_step_takes_stands_below_its_memory() -> None:
    wish, made = (
        Wish("smollm2", "ce"),
        Planned({}, time="0.27 s a step, 3m09s for all 700; measured: run a2mf6hky on local"),
    )

    text = text_of(choice_lines(wish, Offer("smollm2", "ce"), (made, None), 78, ascii_only=False))

    assert "0.27 s a step, 3m09s for all 700; measured: run a2mf6hky on local" in text


@pytest.mark.parametrize(
    ("gpu", "owner"),
    [
        ({"index": 0, "used_bytes": 0, "total_bytes": 95 * GIB}, "free"),
        ({"index": 0, "used_bytes": 60 * GIB, "total_bytes": 95 * GIB}, "held from outside"),
        (
            {"index": 0, "used_bytes": 60 * GIB, "total_bytes": 95 * GIB, "processes": [{"pid": 7, "user": "eva", "used_bytes": 59 * GIB}]},
            "pid 7, user eva",
        ),
    ],
)  # fmt: skip
def test_a_gpu_says_who_holds_its_memory(gpu: Mapping[str, Any], owner: str) -> None:
    host = HostRow("pve-a", "", {"gpus": [gpu]}, NOW_S, None, None, 0.0)

    text = text_of(hosts_lines(Snapshot(Ask(), NOW_S, hosts=(host,)), 100, ascii_only=False))

    assert owner in text


@pytest.mark.parametrize(
    ("free_gib", "clock_s", "told"),
    [
        (49, 0.4, {("  disk 49.0 GiB free", "warn"), ("  clock +0.4 s", "muted")}),
        (51, -6.0, {("  disk 51.0 GiB free", "muted"), ("  clock -6.0 s", "warn")}),
        (51, 5.5, {("  disk 51.0 GiB free", "muted"), ("  clock +5.5 s", "warn")}),
    ],
)
def test_a_host_with_little_disk_or_another_time_is_warned_of(
    free_gib: int, clock_s: float, told: set[tuple[str, str]]
) -> None:
    host = HostRow("pve-a", "", {"disk": {"free_bytes": free_gib * GIB}}, NOW_S, None, None, clock_s)

    lines = hosts_lines(Snapshot(Ask(), NOW_S, hosts=(host,)), 100, ascii_only=False)

    assert told <= {piece for line in lines for piece in line}


def test_facts_read_by_the_units_their_names_tell() -> None:
    assert fact_text("asked_bytes", 12_205_424_640) == "11.37 GiB"
    assert fact_text("took_s", 2.5) == "2.5 s"
    assert fact_text("shape", [182, 8, 8032, 128]) == "182, 8, 8,032, 128"
    assert fact_text("ok", True) == "yes"
    assert "pid 3" in text_of(fact_lines({"other_processes": [{"pid": 3}]}, 60))


def test_the_spec_marks_what_somebody_chose(filled_yard: Path) -> None:
    text = text_of(spec_lines(detail_of(filled_yard, LIVE), 100))

    assert "num_steps" in text
    assert "240000" in text
    assert "uncommitted edits" in text


@pytest.mark.parametrize("width", [1, 7, 8, 40])
def test_a_word_of_wide_signs_is_broken_by_cells_and_loses_none(width: int) -> None:
    word = "zz_名前s.yaml:4:10" * 3
    lines = wrapped(word, width)

    assert "".join(text_of([line]) for line in lines) == word
    assert all(width_of(line) <= max(2, width) for line in lines)


@pytest.mark.parametrize("indent", ["", "      "])
@pytest.mark.parametrize("width", [-13, -1, 0, 1, 2, 6, 7])
def test_words_have_a_cell_at_least_and_none_is_lost(width: int, indent: str) -> None:
    """What is left beside a label in a terminal of one cell."""
    lines = wrapped("ab 名前 c", width, indent=indent)

    assert "".join("".join(text_of([line]).split()) for line in lines) == "ab名前c"
    assert all(width_of(line) <= max(2, width) for line in lines)


def test_words_and_columns_keep_to_their_width() -> None:
    assert all(width_of(line) <= 10 for line in wrapped("a word andaverylongone here", 10))
    assert width_of(fitted([("日本語日本語", "text")], 7)) == 7
    assert [width_of(line) for line in beside(([[("ab", "text")]], 4), ([], 3), gap=1)] == [8]
    assert len(flowed([[("aaaa", "text")], [("bbbb", "text")]], 6)) == 2
