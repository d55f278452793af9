"""Throughput explained: parts that sum to the difference, the right baseline, nothing that was not measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.actions import history
from orchestrator.actions.places import Places, find_places
from orchestrator.actions.throughput import PARTS, MeanStep, explain
from orchestrator.store.rows import Document, State
from orchestrator.store.writes import Store
from orchestrator.verbs.measured import speeds
from orchestrator.verbs.page import run_page
from tests.orchestrator.runs import batch, event, new_run, steps

SECONDS = st.floats(1e-4, 1e3)
PART_SECONDS = st.dictionaries(st.sampled_from(list(PARTS)), st.floats(0, 1e3))
STEPS = st.builds(
    MeanStep, st.just("kaaaaaaa"), st.just("v6"), step_s=SECONDS, block_tokens=st.floats(1, 1e7), parts_s=PART_SECONDS
)

SLOW = {"step_s": 5.0, "wait_s": 2.0, "forward_s": 1.0, "backward_s": 1.5, "optimizer_s": 0.1}
FAST = {"step_s": 0.4, "wait_s": 0.0, "forward_s": 0.1, "backward_s": 0.2, "optimizer_s": 0.05}


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return find_places(tmp_path, {"HOME": str(tmp_path)}, db=tmp_path / "runs.db")


def _record(places: Places, run_id: str, state: State = State.SUCCEEDED, *, gpu: str = "Card", **values: float) -> None:
    with Store(places.db) as store:
        documents = {**new_run().documents, Document.FINGERPRINT: json.dumps({"gpu": gpu, "torch": "2.12"})}
        documents[Document.LAUNCH] = json.dumps({"gpus": ["a"]})
        store.create_run(new_run(run_id, branch=f"branch-{run_id[0]}", documents=documents))
        store.new_attempt(run_id)
        if values:
            store.ingest(batch(steps(1, 150, **values), run_id=run_id))
        store.set_state(run_id, state, evidence="said so")


@given(STEPS, st.none() | STEPS)
def test_the_parts_and_what_no_part_timed_sum_to_the_difference(here: MeanStep, there: MeanStep | None) -> None:
    found = explain(here, there)

    summed = math.fsum(part.difference_s_per_ktok for part in found.parts) + found.untimed_s_per_ktok
    size = 1000 * (here.step_s / here.block_tokens + (there.step_s / there.block_tokens if there else 0))
    size += sum(abs(part.difference_s_per_ktok) for part in found.parts)
    assert summed == pytest.approx(found.difference_s_per_ktok, abs=1e-9 * size)
    rates = 1000 / here.block_tokens_per_s - (1000 / there.block_tokens_per_s if there else 0)
    assert found.difference_s_per_ktok == pytest.approx(rates, abs=1e-9 * size)


@given(STEPS, STEPS)
def test_only_what_both_timed_is_a_part_and_the_weightiest_comes_first(here: MeanStep, there: MeanStep) -> None:
    found = explain(here, there)

    weights = [abs(part.difference_s_per_ktok) for part in found.parts]
    assert weights == sorted(weights, reverse=True)
    assert {part.name for part in found.parts} == {PARTS[name] for name in {*here.parts_s} & {*there.parts_s}}


@given(STEPS)
def test_a_run_differs_from_itself_in_nothing(here: MeanStep) -> None:
    found = explain(here, here)

    assert found.difference_s_per_ktok == 0
    assert all(part.difference_s_per_ktok == 0 for part in found.parts)


def test_the_sentence_of_the_first_users_story(places: Places) -> None:
    _record(places, "v6aaaaaa", block_tokens_per_s=8192 / 0.4, gpu="Card A", **FAST)
    _record(places, "ddaaaaaa", block_tokens_per_s=32_768 / 5.0, gpu="Card B", **SLOW)

    found = history.show(places, "ddaaaaaa").throughput

    assert found is not None
    assert found.sentence == (
        "6,554 against 20,480 block tokens/s of run v6aaaaaa (branch-v): "
        "5.00 s a step of 32,768 block tokens, there 0.400 s a step of 8,192 block tokens; +103.8 ms a Ktok: "
        "data wait +61.0 ms (2.00 s a step, there 0.00 s), backward +21.4 ms (1.50 s a step, there 0.200 s), "
        "forward +18.3 ms (1.00 s a step, there 0.100 s), optimizer -3.1 ms (0.100 s a step, there 0.050 s), "
        "in no timed part +6.1 ms; GPUs 1 x Card B, there 1 x Card A"
    )


@pytest.mark.slow
def test_the_baseline_is_the_newest_earlier_success_of_the_recipe(places: Places) -> None:
    rate = {"block_tokens_per_s": 1000.0}
    _record(places, "aaaaaaaa", **FAST, **rate)
    _record(places, "bbbbbbbb", **FAST, **rate)
    _record(places, "cccccccc", State.FAILED, **FAST, **rate)
    _record(places, "dddddddd")  # a success that told no step times
    _record(places, "eeeeeeee", **SLOW, **rate)
    _record(places, "ffffffff", **FAST, **rate)

    compared = {run: history.show(places, run).throughput for run in ("aaaaaaaa", "eeeeeeee")}
    named = history.show(places, "eeeeeeee", against="aaaa").throughput

    assert compared["aaaaaaaa"] is not None
    assert compared["aaaaaaaa"].there is None
    assert compared["aaaaaaaa"].sentence.startswith(
        "1,000 block tokens/s: 0.400 s a step of 400 block tokens: backward"
    )
    assert compared["eeeeeeee"] is not None
    assert compared["eeeeeeee"].there is not None
    assert compared["eeeeeeee"].there.run_id == "bbbbbbbb"
    assert named is not None
    assert named.there is not None
    assert named.there.run_id == "aaaaaaaa"


def test_a_run_without_step_times_is_not_explained_and_no_named_baseline(places: Places) -> None:
    _record(places, "aaaaaaaa", loss=1.0)
    _record(places, "bbbbbbbb", block_tokens_per_s=1000.0, **FAST)

    assert history.show(places, "aaaaaaaa").throughput is None
    page = history.show(places, "bbbbbbbb", against="aaaaaaaa")

    assert page.throughput is not None
    assert page.throughput.there is None or page.throughput.there.run_id != "aaaaaaaa"
    assert page.no_throughput.startswith("run aaaaaaaa has reported no step_s and no block_tokens_per_s; speeds")
    assert page.no_throughput in click.unstyle("\n".join(run_page(page, width=100, now_s=1.0)))


def test_values_that_are_no_number_are_left_out_of_the_means(places: Places) -> None:
    _record(places, "aaaaaaaa", block_tokens_per_s=1000.0, **FAST)
    with Store(places.db) as store:
        odd = {"step_s": math.nan, "block_tokens_per_s": math.inf}
        huge = {"step_s": 1e308, "block_tokens_per_s": 1.7e308}
        told = [odd, huge, huge]
        store.ingest(
            batch([event(n, "metrics", step=n, values=values) for n, values in enumerate(told, 151)], run_id="aaaaaaaa")
        )

    found = history.show(places, "aaaaaaaa").throughput

    assert found is not None
    assert found.here.block_tokens_per_s == pytest.approx(1000.0)


@pytest.mark.parametrize("recipe", ['a"b', "a,b*[", "(x) OR", "", "  "])
def test_a_recipe_of_any_name_has_a_page(places: Places, recipe: str) -> None:
    with Store(places.db) as store:
        store.create_run(new_run("aaaaaaaa", recipe=recipe))
        store.new_attempt("aaaaaaaa")
        store.ingest(batch(steps(1, 2, block_tokens_per_s=1000.0, **FAST), run_id="aaaaaaaa"))

    found = history.show(places, "aaaaaaaa").throughput

    assert found is not None
    assert found.there is None


def test_a_comparison_holds_every_run_against_the_first(places: Places) -> None:
    _record(places, "aaaaaaaa", block_tokens_per_s=1000.0, **FAST)
    _record(places, "bbbbbbbb", loss=1.0)
    _record(places, "cccccccc", block_tokens_per_s=500.0, **SLOW)

    found = history.compare(places, ["aaaaaaaa", "bbbbbbbb", "cccccccc"]).throughput

    assert [(item.here.run_id, item.there and item.there.run_id) for item in found] == [("cccccccc", "aaaaaaaa")]


def test_a_comparison_tells_speeds_as_a_table(places: Places) -> None:
    _record(places, "aaaaaaaa", block_tokens_per_s=1000.0, **FAST)
    _record(places, "cccccccc", block_tokens_per_s=500.0, **SLOW)
    found = history.compare(places, ["aaaaaaaa", "cccccccc"]).throughput

    _, head, *rows = (click.unstyle(line) for line in speeds(found, width=80))

    assert head.split()[:4] == ["run", "tokens/s", "a", "step"]
    assert head.endswith("not timed")
    assert [row.split()[:2] for row in rows[:2]] == [["aaaaaaaa", "1,000"], ["cccccccc", "500"]]
    assert max(map(len, [head, *rows])) <= 80


def test_of_a_training_with_roles_the_side_that_is_waited_for_is_told(places: Places) -> None:
    """Rank 0 is a drafter of six, with two micro-batches a step; rank 3 is the first target."""
    spec = {"roles": {"target": 5, "drafter": 3, "queue": 20}, "train": {"accumulation": 6}}
    told = {"step_s": 1.8, "wait_s": 0.0, "queue_depth": 20.0, "block_tokens_per_s": 1000.0}
    told["transfer_bytes_per_s"] = 12.5e6
    with Store(places.db) as store:
        documents = {**new_run().documents, Document.SPEC: json.dumps(spec)}
        store.create_run(new_run("rolesaaa", documents=documents))
        store.new_attempt("rolesaaa")
        store.ingest(batch(steps(1, 5, **told), run_id="rolesaaa"))
        store.ingest(batch(steps(1, 5, step_s=0.3, wait_s=0.1), run_id="rolesaaa", writer="rank3"))

    found = history.show(places, "rolesaaa").throughput

    assert found is not None
    assert found.sentence.endswith(
        "; drafter-bound: queue 20/20, hidden states travel at 12.5 MB/s; targets wait 33% of their time, drafters 0%; a batch takes a target rank 200 ms "
        "and a drafter rank 900 ms; 1 target and 7 drafter ranks would balance it, these are 5 and 3"
    )


def test_over_two_hosts_a_target_of_the_first_is_held_against_a_drafter(places: Places) -> None:
    """4 + 4 over two: ranks 0 and 1 are drafters, 2 and 3 targets, and so on the second host."""
    spec = {"roles": {"target": 4, "drafter": 4, "queue": 8}, "train": {"accumulation": 4}}
    drafter = {"step_s": 0.9, "wait_s": 0.0, "queue_depth": 8.0, "block_tokens_per_s": 1000.0}
    with Store(places.db) as store:
        documents = {**new_run().documents, Document.SPEC: json.dumps(spec)}
        store.create_run(new_run("rolesaaa", host="a", more_hosts=("b",), documents=documents))
        store.new_attempt("rolesaaa")
        for rank in range(8):
            told = drafter if rank in (0, 1, 4, 5) else {"step_s": 0.3, "wait_s": 0.1}
            store.ingest(batch(steps(1, 5, **told), run_id="rolesaaa", writer=f"rank{rank}"))

    found = history.show(places, "rolesaaa").throughput

    assert found is not None
    assert "targets wait 33% of their time, drafters 0%; a batch takes a target rank 200 ms" in found.sentence
    assert "a drafter rank 900 ms" in found.sentence
