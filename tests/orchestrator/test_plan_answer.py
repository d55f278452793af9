"""The answer of a plan: what lacks most, what helps, what would use the room of a card, and what is kept on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from orchestrator.actions.places import Places, find_places
from orchestrator.actions.plans import plan_memory
from orchestrator.recipe import load_recipe
from orchestrator.store.rows import Document
from orchestrator.store.writes import Store
from orchestrator.verbs.plan_page import plan_document, plan_page
from orchestrator.verbs.words import in_gib
from remote.spec import dump
from tests.orchestrator.runs import batch, event, started

GIB = 2**30
AT_END = "evaluate.at_end=false"


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return find_places(tmp_path, {}, db=tmp_path / "runs.db")


def _page(places: Places, word: str, **asked: Any) -> list[str]:
    return [click.unstyle(line) for line in plan_page(plan_memory(places, word, **asked), width=None)]


def _section(page: list[str], title: str) -> list[str]:
    start = page.index(title)
    return page[start : [*page, ""].index("", start)]


def _item(page: list[str], name: str) -> str:
    return next(line for line in page if line.startswith(f"{name}  "))


@pytest.mark.parametrize(
    ("branch", "gib", "title"),
    [
        ("ddtree", 48, "What would make a step fit; the target does not"),
        ("ddtree", 24, "What would make a step fit; the target does not"),
        ("v6", 34, "What would make a step fit; the target does not"),
        ("ddtree-8gpu", 48, "What would make a drafter rank fit; a target rank does not"),
    ],
)
def test_changes_that_make_a_step_fit_beside_a_target_that_does_not_are_not_called_what_would_fit(
    places: Places, branch: str, gib: int, title: str
) -> None:
    found = plan_memory(places, "qwen3.6-27b", branch=branch, capacity_bytes=gib * GIB)
    page = _page(places, "qwen3.6-27b", branch=branch, capacity_bytes=gib * GIB)

    assert "What would fit" not in page
    assert len(_section(page, title)) > 2
    assert page[3].startswith("what helps"), "the answer stands below the verdict"
    assert "larger card" in page[3]
    largest = _item(page, "largest")
    assert ("anchors" not in largest) or "fit in a step alone" in largest or "fit in a drafter rank alone" in largest
    assert found.switches


def test_what_is_planned_to_fit_where_the_pass_fits_is_still_called_so(places: Places) -> None:
    overrides = ["data.max_anchors=1500", AT_END]
    page = _page(places, "qwen3.6-27b", branch="ddtree", capacity_bytes=56 * GIB, overrides=overrides)

    assert ": does not fit, " in page[2]
    assert "What would fit" in page
    assert not any(line.startswith("what helps") for line in page)


@pytest.mark.parametrize(
    ("branch", "gib", "told"),
    [
        ("ddtree", 48, "does not fit, 6.79 GiB too much, in the target's pass before training; a step lacks 3.18 GiB"),
        ("ddtree", 52, "does not fit, 2.79 GiB too much, in the target's pass before training; a step leaves 0.82 GiB"),
        ("ddtree-8gpu", 48, "does not fit, 16.20 GiB too much, in a drafter rank; a target rank lacks 6.79 GiB"),
        ("ddtree-8gpu", 60, "does not fit, 4.20 GiB too much, of a drafter rank; a target rank: fits"),
    ],
)
def test_the_lacking_amount_is_the_largest_of_what_is_wanted(places: Places, branch: str, gib: int, told: str) -> None:
    assert told in _page(places, "qwen3.6-27b", branch=branch, capacity_bytes=gib * GIB, overrides=[AT_END])[2]


def test_the_pass_of_the_target_and_loading_it_are_told_apart(places: Places) -> None:
    page = _page(places, "qwen3.6-27b", branch="ddtree", capacity_bytes=48 * GIB)

    assert "54.79 GiB once before training" in _item(page, "target pass")
    assert "50.68 GiB" in _item(page, "target load")
    assert "before the first step of every training" in _item(page, "target load")


@pytest.mark.parametrize("capacity_bytes", [None, 95 * GIB, 52 * GIB])
def test_the_pass_stands_in_the_head_alone(places: Places, capacity_bytes: int | None) -> None:
    page = _page(places, "qwen3.6-27b", branch="ddtree", capacity_bytes=capacity_bytes)

    assert "54.79 GiB once before training" in _item(page, "target pass")
    assert not any("pass before training" in line for line in _section(page, "Not in the plan"))


@pytest.mark.parametrize(
    ("gib", "verdict", "helps"),
    [
        (95, ": fits, 43.82 GiB left", None),
        (60, ": tight, the evaluation at the end leaves 0.19 GiB; a step leaves 8.82 GiB", None),
        (
            56,
            "3.81 GiB too much, in the evaluation at the end; the target's pass before training leaves 1.21 GiB; a step leaves 4.82 GiB",
            f"--set {AT_END}, which leaves the evaluation at the end out",
        ),
        (
            52,
            "7.81 GiB too much, in the evaluation at the end; the target's pass",
            f"lines below; --set {AT_END}, as the",
        ),
    ],
)
def test_the_evaluation_at_the_end_counts_in_the_verdict_and_says_what_leaves_it_out(
    places: Places, gib: int, verdict: str, helps: str | None
) -> None:
    page = _page(places, "qwen3.6-27b", branch="ddtree", capacity_bytes=gib * GIB)

    assert verdict in page[2]
    assert [helps in line for line in page if line.startswith("what helps")] == ([] if helps is None else [True])
    line = _item(page, "evaluation")
    assert "59.81 GiB at the end" in line
    assert "an estimate that no card has verified" in line
    assert line.endswith(f"; --set {AT_END} leaves it out")
    page = _page(places, "qwen3.6-27b", branch="ddtree", capacity_bytes=gib * GIB, overrides=[AT_END])
    assert not any("evaluation" in line for line in page)


def test_the_most_anchors_that_fit_name_what_to_type(places: Places) -> None:
    for gib in (95, 60, 40):
        found = plan_memory(places, "qwen3.6-27b", branch="ddtree", capacity_bytes=gib * GIB)
        assert found.largest is not None
        typed = f"--set data.max_anchors={found.largest.max_anchors}"
        assert _item(_page(places, "qwen3.6-27b", branch="ddtree", capacity_bytes=gib * GIB), "largest").endswith(typed)
        same = [f"data.max_anchors={found.largest.max_anchors}"]
        page = _page(places, "qwen3.6-27b", branch="ddtree", capacity_bytes=gib * GIB, overrides=same)
        assert "--set" not in _item(page, "largest"), "as it is already"


def test_a_card_with_room_is_told_what_would_use_it(places: Places) -> None:
    found = plan_memory(places, "qwen3.6-27b", branch="ddtree", capacity_bytes=95 * GIB)
    shown = _section(_page(places, "qwen3.6-27b", branch="ddtree", capacity_bytes=95 * GIB), "What would use the room")

    assert {key.partition("=")[0] for use in found.uses for key in use.overrides} == {
        "data.max_anchors",
        "data.row_tokens",
        "train.rows_per_step",
    }
    for use in found.uses:
        again = plan_memory(
            places, "qwen3.6-27b", branch="ddtree", capacity_bytes=95 * GIB, overrides=list(use.overrides)
        )
        assert (again.plan.verdict, again.plan.driver_bytes) == ("fits", use.plan.driver_bytes)
        assert use.plan.driver_bytes > found.plan.driver_bytes
        assert any(use.overrides[0] in line for line in shown)
    assert shown[1].split()[:6] == ["change", "must", "fit", "GiB", "left", "GiB"]
    assert [body["overrides"] for body in plan_document(found)["uses"]] == [use.overrides for use in found.uses]


@pytest.mark.parametrize("gib", [40, 48, 51, 52])
def test_a_card_without_room_is_told_nothing_of_how_to_use_it(places: Places, gib: int) -> None:
    page = _page(places, "qwen3.6-27b", branch="ddtree", capacity_bytes=gib * GIB)

    assert "What would use the room" not in page
    assert plan_memory(places, "qwen3.6-27b", branch="ddtree").uses == [], "nobody said how much there is"


@pytest.mark.parametrize(
    ("branch", "overrides", "told"),
    [
        ("v6", [], "81,936 bytes a token"),
        ("v6", ["loss.terms={kl: 0, ce: 1.0}"], "61,440 bytes a token"),
        ("ddtree", ["data.hidden_states=online"], None),
        ("ddtree-8gpu", [], None),
    ],
)
def test_what_hidden_states_take_on_disk_is_a_line(
    places: Places, branch: str, overrides: list[str], told: str | None
) -> None:
    page = _page(places, "qwen3.6-27b", branch=branch, overrides=overrides)
    found = plan_memory(places, "qwen3.6-27b", branch=branch, overrides=overrides)

    lines = [line for line in page if line.startswith("on disk")]
    assert [told in line for line in lines] == ([] if told is None else [True])
    assert all(" GiB a million" in line for line in lines)
    assert (plan_document(found)["kept"] is None) is (told is None)


def _read(places: Places, run_id: str, said: str, *overrides: str) -> None:
    """A training that said what it read."""
    spec = load_recipe("smollm2").resolve("ce", overrides).spec
    with Store(places.db) as store:
        started(store, run_id, kind="train", recipe="smollm2", documents={Document.SPEC: dump(spec)})
        store.ingest(batch([event(1, "note", text=said)], run_id=run_id))


def test_the_answers_that_a_run_has_read_are_counted_on_disk(places: Places) -> None:
    read = "data: 900 documents, 2000000 tokens (1000 learnt from), in 10 rows of 256 tokens, 50% full"
    _read(places, "raaaaaaa", read)
    _read(places, "rbbbbbbb", "data: nothing to tell of")
    _read(places, "rccccccc", read.replace("2000000", "7"), "data.answers=others.jsonl")

    found = plan_memory(places, "smollm2")
    line = _item(_page(places, "smollm2"), "on disk")

    assert found.kept is not None
    assert (found.kept.num_tokens, found.kept.run_id) == (2_000_000, "raaaaaaa")
    size = in_gib(2_000_000 * found.kept.token_bytes)
    assert f"{size} GiB for the 2,000,000 tokens that run raaaaaaa read" in line
