"""The page of a plan: what smoke runs taught it, how far it was checked, and what it says where nothing fits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

from orchestrator.actions.places import Places, find_places
from orchestrator.actions.plan_verdict import NOTHING_FITS
from orchestrator.actions.plans import TIGHT, plan_memory
from orchestrator.errors import UsageError
from orchestrator.recipe import load_recipe
from orchestrator.store.rows import Document
from orchestrator.store.writes import Store
from orchestrator.verbs.plan_page import plan_document, plan_page
from orchestrator.verbs.words import gib_places, in_gib
from remote.plan import plan
from remote.plan.advice import switches
from remote.spec import DFlashSpec, dump
from tests.orchestrator.runs import batch, event, started
from tui.ordering import advised

GIB, MIB = 2**30, 2**20
STEP_ALONE = "What would make a step fit; the target does not"
H200 = "NVIDIA H200 150754820096 bytes"


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return find_places(tmp_path, {}, db=tmp_path / "runs.db")


def _climbed(places: Places, run_id: str, beyond_bytes: int, *overrides: str, gpu: str = "none", **parts: str) -> None:
    """A smoke run whose step took so much more than the plan of its rung had said; a later id is the newer run."""
    spec = load_recipe("smollm2").resolve("ce", overrides).spec
    assert isinstance(spec, DFlashSpec)
    planned = plan(spec, device="cpu" if gpu == "none" else "cuda", rung="fwd_bwd").stage("step").allocated_bytes
    documents = {Document.SPEC: dump(spec), Document.FINGERPRINT: json.dumps({"gpu": gpu, **parts})}
    values = {"step_s": 1.0, "step_allocated_bytes": planned + beyond_bytes}
    with Store(places.db) as store:
        started(store, run_id, kind="smoke", recipe="smollm2", documents=documents)
        told = event(1, "rung", name="fwd_bwd", passed=True, values=values, message="")
        told = replace(told, wall_s=1000.0 + ord(run_id[1]))
        store.ingest(batch([told], run_id=run_id))


def _page(places: Places, word: str, width: int | None = None, **asked: Any) -> list[str]:
    return [click.unstyle(line) for line in plan_page(plan_memory(places, word, **asked), width=width)]


@pytest.mark.slow
def test_the_next_plan_shows_what_smoke_runs_took_beyond_theirs_with_their_number(places: Places) -> None:
    _climbed(places, "kaaaaaaa", 300 * MIB)
    _climbed(places, "kbbbbbbb", 20 * MIB, "train.num_steps=5")
    _climbed(places, "kccccccc", 900 * MIB, "data.max_anchors=9")
    _climbed(places, "kddddddd", 700 * MIB, gpu=H200)

    found = plan_memory(places, "smollm2")
    page = _page(places, "smollm2")

    step = found.plan.stage("step")
    assert (step.unexplained_bytes, step.num_measured) == (300 * MIB, 2)
    assert found.plan.stage("load").num_measured == 0
    assert set(found.measured.runs.run_ids) == {"kbbbbbbb", "kaaaaaaa"}
    assert next(line for line in page if line.startswith("unexplained")).split() == ["unexplained", "+0.293"]
    assert any("+0.293 GiB off at most, in step, by 2 smoke runs of this shape; the newest k" in line for line in page)
    assert plan_document(found)["plan"]["stages"][-1]["unexplained_bytes"] == 300 * MIB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "num"), [({"kind": "cpu", "name": "x86_64"}, 1), ({"kind": "cuda", "name": "NVIDIA H200"}, 0)]
)
def test_a_smoke_run_that_was_imported_counts_by_the_device_it_told_of(
    places: Places, device: dict[str, str], num: int
) -> None:
    _climbed(places, "kaaaaaaa", 300 * MIB)
    with Store(places.db) as store:
        store.keep_document("kaaaaaaa", Document.FINGERPRINT, "{}")
        told = event(1, "start", pid=1, writer="rung-fwd", versions={}, devices=[device], choices={}, num_steps=None)
        store.ingest(batch([told], run_id="kaaaaaaa", writer="rung-fwd"))

    assert plan_memory(places, "smollm2").plan.stage("step").num_measured == num


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trees", "counted"),
    [(("old", "new"), ["kbbbbbbb"]), (("new", "new"), ["kaaaaaaa", "kbbbbbbb"]), ((None, "new"), ["kbbbbbbb"])],
)
def test_smoke_runs_of_other_code_than_the_newest_ones_teach_the_plan_nothing(
    places: Places, trees: tuple[str | None, ...], counted: list[str]
) -> None:
    for run_id, beyond_bytes, tree in zip(("kaaaaaaa", "kbbbbbbb"), (900 * MIB, 20 * MIB), trees, strict=True):
        _climbed(places, run_id, beyond_bytes, **({} if tree is None else {"tree": tree}))

    found = plan_memory(places, "smollm2")

    assert sorted(found.measured.runs.run_ids) == counted
    assert found.plan.stage("step").num_measured == len(counted)


def test_the_peak_is_told_alone_where_what_was_measured_changes_no_order(places: Places) -> None:
    plain = _page(places, "smollm2")
    made = plan_memory(places, "smollm2").plan
    assert any(
        line.split() == ["peak", f"{made.peak.allocated_bytes / GIB:.3f}", "GiB", "allocated,", "in", "forward"]
        for line in plain
    )

    _climbed(places, "kaaaaaaa", MIB // 8)

    page = _page(places, "smollm2")
    assert not any("comes highest" in line for line in page)


def test_a_newer_rung_of_another_shape_says_that_the_code_has_changed(places: Places) -> None:
    _climbed(places, "kaaaaaaa", 900 * MIB, tree="old")
    _climbed(places, "kbbbbbbb", 20 * MIB, "data.max_anchors=9", tree="new")

    assert plan_memory(places, "smollm2").measured.runs.run_ids == ()


@pytest.mark.slow
def test_what_smoke_runs_took_beyond_their_plan_is_a_line_of_what_must_fit(places: Places) -> None:
    with Store(places.db) as store:
        store.host_seen("local", address="here", facts={"gpus": [], "memory": {"total_bytes": GIB}})
    fits = plan_memory(places, "smollm2", host="local")
    _climbed(places, "kaaaaaaa", 2 * GIB)

    found = plan_memory(places, "smollm2", host="local")
    page = _page(places, "smollm2", host="local")

    assert (fits.plan.verdict, found.plan.verdict) == ("fits", "does not fit")
    assert found.plan.driver_bytes == fits.plan.stage("step").allocated_bytes + 2 * GIB
    step, highest = found.plan.stage("step"), found.plan.stage("forward")
    assert (
        f"  peak           {step.allocated_bytes / GIB:.2f} GiB planned of step, which with the next line comes highest;"
        in page[4]
    )
    assert page[4].endswith(f"planned alone, forward does, {highest.allocated_bytes / GIB:.2f} GiB")
    assert "  + unexplained  2.00 GiB that 1 smoke run took in step and no line of the plan explains" in page
    assert found.largest is None, "what is advised leaves that free"
    body = plan_document(found)["plan"]
    assert (body["unexplained_bytes"], body["driver_bytes"]) == (2 * GIB, found.plan.driver_bytes)


def test_each_change_tells_what_must_fit_with_it(places: Places) -> None:
    found = plan_memory(places, "qwen3.6-27b", branch="ddtree", capacity_bytes=40 * GIB)

    page = _page(places, "qwen3.6-27b", branch="ddtree", capacity_bytes=40 * GIB)

    line = page[page.index(STEP_ALONE) + 2]
    best = found.switches[0]
    assert found.time is not None
    assert line.split()[-4:] == [
        in_gib(best.plan.driver_bytes),
        in_gib(best.saved_bytes),
        f"{found.time.step_s * best.work_factor:.3g}",
        "same",
    ]
    assert "s a step, least" in page[page.index(STEP_ALONE) + 1], "a bound times the arithmetic of both"
    assert float(line.split()[-3]) == pytest.approx((found.plan.driver_bytes - best.plan.driver_bytes) / GIB, abs=0.01)


@pytest.mark.parametrize("width", [80, 100])
def test_the_changes_keep_within_the_terminal_and_stay_whole(places: Places, width: int) -> None:
    page = _page(places, "qwen3.6-27b", width, branch="v6", capacity_bytes=24 * GIB)
    start = page.index(STEP_ALONE)
    shown = page[start : page.index("", start)]
    whole = _page(places, "qwen3.6-27b", branch="v6", capacity_bytes=24 * GIB)[start:]
    best = plan_memory(places, "qwen3.6-27b", branch="v6", capacity_bytes=24 * GIB).switches[0]

    assert max(map(len, shown)) <= width
    assert any(len(line) > width for line in whole)
    numbers = shown[2].split()[-4:]
    assert numbers[:2] == [in_gib(best.plan.driver_bytes), in_gib(best.saved_bytes)]
    told = " ".join(" ".join(shown[2:]).split())
    assert all(word in told for word in best.name.replace(",", "").split())
    assert all(any(f"--set {override}" in line for line in shown) for override in best.overrides)


@pytest.mark.slow
@pytest.mark.parametrize("total_bytes", [64 * GIB, 9 * GIB])
def test_what_must_fit_with_a_change_may_be_held_beside_what_must_fit_today(places: Places, total_bytes: int) -> None:
    """Whether today's plan fits or not: both count what smoke runs took beyond their plans."""
    with Store(places.db) as store:
        store.host_seen("local", address="here", facts={"gpus": [], "memory": {"total_bytes": total_bytes}})
    overrides = ["data.max_anchors=256"]
    _climbed(places, "kaaaaaaa", 8 * GIB, *overrides)

    found = plan_memory(places, "smollm2", host="local", overrides=overrides)
    shown = plan_document(found)["switches"]

    assert found.plan.unexplained_bytes == 8 * GIB
    assert found.switches
    for body, switch in zip(shown, found.switches, strict=True):
        assert body["driver_bytes"] == found.plan.driver_bytes - switch.saved_bytes > 8 * GIB
        assert switch.plan.capacity_bytes == total_bytes


def test_a_change_that_fits_tightly_is_called_so(places: Places) -> None:
    least = plan_memory(places, "qwen3.6-27b").spec
    while lower := switches(least):
        least = lower[0].spec

    capacity = round(plan(least).driver_bytes * 1.01)
    page = _page(places, "qwen3.6-27b", width=100, capacity_bytes=capacity)

    assert page[page.index(STEP_ALONE) + 1].startswith("change")
    assert f"  {TIGHT}" in page or any(line.endswith(f"; {TIGHT}") for line in page)
    screen = advised(plan_memory(places, "qwen3.6-27b", capacity_bytes=capacity))
    assert screen.changes
    assert all(TIGHT in change.caution for change in screen.changes), "in words too, as a screen says it by colour"


def test_a_hosts_card_is_planned_as_the_kind_it_is(places: Places) -> None:
    """16 query heads on one key: own kernels on a Hopper card, flex on any other."""
    word, peaks = "qwen3.6-27b", {}
    for model in ("NVIDIA H200", "NVIDIA RTX PRO 6000 Blackwell"):
        with Store(places.db) as store:
            gpu = {"index": 0, "name": model, "total_bytes": 95 * GIB}
            store.host_seen("box", address="there", facts={"gpus": [gpu]})
        overrides = ["drafter.num_kv_heads=2", "drafter.block_size=4"]
        made = plan_memory(places, word, host="box", overrides=overrides).plan
        of_size = plan_memory(places, word, host="box", overrides=overrides, capacity_bytes=90 * GIB).plan
        peaks[model] = made.peak.allocated_bytes
        assert (of_size.peak, of_size.capacity_bytes) == (made.peak, 90 * GIB), "a size that is given changes no kind"

    assert peaks["NVIDIA H200"] < peaks["NVIDIA RTX PRO 6000 Blackwell"]


def test_a_plan_that_nobody_has_measured_shows_no_such_line(places: Places) -> None:
    assert not any(line.startswith(("unexplained", "measured")) for line in _page(places, "smollm2"))


def test_the_range_that_was_checked_is_printed_and_what_leaves_it_marked(places: Places) -> None:
    inside, outside = _page(places, "qwen3.6-27b", capacity_bytes=95 * GIB), _page(places, "smollm2")

    assert "hidden size       5,120  256 to 5,120" in inside
    assert [line.split()[0] for line in inside if "extrapolated" in line] == ["largest"], "beyond what was checked"
    assert next(line for line in outside if line.startswith("hidden size")).endswith("extrapolated")
    assert "hidden size        576  64 to 192     extrapolated" in outside
    assert "context tokens     256  64 to 512" in outside


@pytest.mark.parametrize("word", ["smollm2", "qwen3.6-27b"])
def test_whatever_is_not_modelled_is_listed_at_the_end_of_the_page_and_in_the_document(
    places: Places, word: str
) -> None:
    found = plan_memory(places, word)
    page = _page(places, word)

    left_out = page[page.index("Not in the plan") + 1 :]
    assert [line.strip() for line in left_out] == list(found.plan.not_modelled)
    assert len(left_out) >= 4
    assert list(plan_document(found)["plan"]["not_modelled"]) == list(found.plan.not_modelled)


def test_where_nothing_fits_the_page_says_so(places: Places) -> None:
    page = _page(places, "qwen3.6-27b", capacity_bytes=10 * GIB)

    assert page[page.index("What would fit") + 1] == NOTHING_FITS
    assert any("not one anchor fits" in line for line in page)


@pytest.mark.parametrize(("gib", "is_said"), [(48, True), (51, True), (54, True), (60, False)])
def test_a_pass_of_the_target_that_no_change_makes_fit_is_said_at_the_top(
    places: Places, gib: int, is_said: bool
) -> None:
    """Its weights alone are 50.10 GiB: with a pass it is as large as a rank of the target."""
    for branch in ("v6", "ddtree"):
        asked = {"branch": branch, "capacity_bytes": gib * GIB, "overrides": ["evaluate.at_end=false"]}
        lines = _page(places, "qwen3.6-27b", **asked)
        body = plan_document(plan_memory(places, "qwen3.6-27b", **asked))["plan"]

        told = [line for line in lines if line.startswith("target pass")]
        assert [line.split()[2] for line in told] == ["54.79"]
        assert (": does not fit" in told[0]) is is_said
        assert (": fits" in lines[2]) is not is_said
        assert (body["verdict"] == "does not fit") is is_said
        helps = is_said and gib > 50  # a training loads the target though nothing is left to compute
        assert any("draftyard prepare qwen3.6-27b" in line and "--host HOST" in line for line in lines) is helps
        assert any(line.startswith("rsync -a HOST:.local/share/draftyard/cache/ ~/") for line in lines) is helps
        told = [line.partition("  ")[2].strip()[:13] for line in lines if line.startswith("what helps")]
        assert told == ([] if not is_said else ["hidden states"] if helps else ["a larger card"])
        assert not any("rsync" in line and len(line) > 80 for line in lines)


def test_a_card_too_small_for_a_rank_of_the_target_fits_nothing_on_the_first_line(places: Places) -> None:
    page = _page(places, "qwen3.6-27b", branch="ddtree-8gpu", capacity_bytes=48 * GIB)

    assert (
        "does not fit, 16.20 GiB too much, in a drafter rank; the evaluation at the end lacks 11.81 GiB; a target rank lacks 6.79 GiB"
        in page[2]
    )
    assert ": fits" not in page[2]


def test_a_size_that_no_card_has_is_refused_with_one_to_write(places: Places) -> None:
    with pytest.raises(UsageError, match="--gpu: 95 bytes are no card's memory; write a size such as 95GiB"):
        plan_memory(places, "smollm2", capacity_bytes=95)


def test_more_anchors_than_a_row_has_tokens_are_said_to_be_no_more(places: Places) -> None:
    many, few = (_page(places, "qwen3.6-27b", overrides=[f"data.max_anchors={count}"]) for count in (10**8, 8000))

    assert any("of 100,000,000 anchors no more than a row's 8,000 tokens" in line for line in many)
    assert not any("no more than a row" in line for line in few)


def test_what_workers_read_ahead_is_said_of_the_host(places: Places) -> None:
    spec = ["data.num_workers=8"]
    made = plan_memory(places, "qwen3.6-27b", overrides=spec).plan

    assert f"{in_gib(made.host_queue_bytes)} GiB of the host's memory, by 8 workers" in " ".join(
        _page(places, "qwen3.6-27b", overrides=spec)
    )


def test_of_a_hosts_cards_the_one_that_counts_is_named_and_what_was_held_of_it(places: Places) -> None:
    gpus = [
        {"index": 0, "name": "NVIDIA H200", "total_bytes": 95 * GIB, "used_bytes": 80 * GIB},
        {"index": 1, "name": "NVIDIA L4", "total_bytes": 24 * GIB, "used_bytes": 20 * GIB},
    ]
    with Store(places.db) as store:
        store.host_seen("box", address="there", facts={"gpus": gpus})

    told = plan_memory(places, "qwen3.6-27b", host="box").capacity_from

    assert told == "GPU 1 of host box, the smallest of 2, as last seen, when 20.00 GiB of it were held"


def test_an_extrapolation_is_marked_where_it_is_told_and_in_the_document(places: Places) -> None:
    found = plan_memory(places, "smollm2", capacity_bytes=95 * GIB)
    body = plan_document(found)

    assert _page(places, "smollm2", capacity_bytes=95 * GIB)[2].endswith("left, extrapolated")
    assert body["plan"]["extrapolated"] == list(found.plan.extrapolated) != []
    assert found.largest is not None
    assert found.largest.is_extrapolated


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("smollm2", "an estimate, below all that was measured: 0.04 to 4.74, cached"),
        ("qwen3.6-27b", "an estimate; measured 0.04 to 4.74, cached"),
    ],
)
def test_an_estimate_outside_what_was_measured_of_it_says_so(places: Places, word: str, told: str) -> None:
    page = _page(places, word, capacity_bytes=140 * GIB)

    assert told in next(line for line in page if line.startswith("  + allocator"))


def test_the_answer_comes_first_and_each_kind_of_peak_is_named(places: Places) -> None:
    page = _page(places, "qwen3.6-27b", capacity_bytes=95 * GIB)
    left = plan_memory(places, "qwen3.6-27b", capacity_bytes=95 * GIB).plan.headroom_bytes

    assert [line.split()[0] for line in page[2:4]] == ["capacity", "must"]
    assert f"fits, {in_gib(left)} GiB left" in page[2]
    kinds = (
        "allocated, in ",
        "GiB reserved beyond it",
        "on the card, as its driver counts",
        "of the driver, an estimate",
    )
    assert [word for word in kinds if not any(word in line for line in page)] == []


@pytest.mark.parametrize("word", ["qwen3.6-27b", "smollm2"])
def test_no_line_but_what_is_typed_is_wider_than_the_terminal_and_sizes_are_in_gib(places: Places, word: str) -> None:
    page = _page(places, word, width=80, capacity_bytes=8 * GIB)

    assert [line for line in page if len(line) > 80 and not line.startswith(("  --set", "draftyard "))] == []
    assert [line for line in page if "MiB" in line or " 0 B" in line or line != line.rstrip()] == []


def test_points_of_a_column_line_up() -> None:
    assert gib_places(GIB // 2, None) == 3
    assert gib_places(GIB // 2, GIB) == 2
    assert [in_gib(size) for size in (None, 0, 1, GIB // 2, 12 * GIB)] == ["", "0.00", "<0.01", "0.50", "12.00"]
    assert in_gib(-GIB // 2, places=3, is_signed=True) == "-0.500"
