"""What a page offers after a run that ran out of a card's memory: against the real card, beside others, in pieces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest

from orchestrator.actions import history
from orchestrator.actions.again import Words
from orchestrator.actions.history import RunPage
from orchestrator.actions.places import Places, find_places
from orchestrator.actions.plans import Fits, plan_body, would_fit
from orchestrator.failure import Findings, Told, causes
from orchestrator.recipe import load_recipe
from orchestrator.store.rows import Document, FailureRow, State
from orchestrator.store.writes import Store
from orchestrator.verbs.fits_page import fits_document, fits_lines
from orchestrator.verbs.page import run_page
from remote.allocator import DEFAULT, NAMES
from remote.plan import plan
from remote.spec import DFlashSpec, dump
from tests.orchestrator.runs import batch, new_run, steps

GIB = 2**30
RUN = "oom2345x"
CARD = round(94.97 * GIB)
FULL = 0.5  # GiB free where nothing else is said
TRACE = (
    'Traceback (most recent call last):\n  File "/w/remote/drafter/train.py", line 200, in train\n    loss.backward()\n'
)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return find_places(tmp_path, {}, db=tmp_path / "runs.db")


def gib(size: float) -> str:
    return f"{size:.2f} GiB"


def text(*, asked: float, own: float, allocated: float, idle: float, free: float = FULL, more: str = "") -> str:
    return (
        f"CUDA out of memory. Tried to allocate {gib(asked)}. GPU 0 has a total capacity of 94.97 GiB of which {gib(free)} is"
        f" free.{more} Including non-PyTorch memory, this process has {gib(own)} memory in use. Of the allocated memory"
        f" {gib(allocated)} is allocated by PyTorch, and {gib(idle)} is reserved by PyTorch but unallocated."
    )


PIECES = text(asked=2, own=94.47, allocated=52, idle=40)
BESIDE = text(asked=2, own=34.47, allocated=33, idle=0.4, more=" Process 4242 has 60.00 GiB memory in use.")
CROWDED = text(asked=2, own=9.47, allocated=8, idle=0.4, more=" Process 4242 has 85.00 GiB memory in use.")
SHORT_OF_PIECES = text(asked=4, own=94.47, allocated=86, idle=8)
SHORT = text(asked=3, own=94.47, allocated=92.5, idle=0.2)


def ran(
    places: Places,
    message: str,
    *,
    grows: bool = True,
    facts: Mapping[str, Any] | None = None,
    stage: str = "forward",
) -> RunPage:
    """A training of the 27B recipe whose plan was made against a card of 94.97 GiB."""
    spec = load_recipe("qwen3.6-27b").resolve("ddtree").spec
    assert isinstance(spec, DFlashSpec)
    kind = "torch.OutOfMemoryError"
    told = {"failure": kind, "message": message, "traceback": f"{TRACE}{kind}: {message}", "stage": stage}
    (found, *_) = causes(Findings(told=[Told("rank0", 1.0, {**told, "facts": facts or {}})], grows_segments=grows))
    documents = {Document.SPEC: dump(spec), Document.PLAN: json.dumps(plan_body(plan(spec, capacity_bytes=CARD)))}
    row = FailureRow(
        run_id=RUN, attempt=1, kind=found.kind, message=found.message, hint=found.hint, source="rank0", stage=stage,
        step=1, traceback=found.traceback, facts=dict(found.facts), at_s=1.0, is_first_cause=True,
    )  # fmt: skip
    with Store(places.db) as store:
        store.create_run(new_run(RUN, recipe="qwen3.6-27b", branch="ddtree", documents=documents))
        store.new_attempt(RUN)
        store.replace_failures(RUN, 1, [row])
        store.set_state(RUN, State.FAILED, reason="gpu_oom", evidence="exit file: code 1")
    return history.show(places, RUN)


def offered(places: Places, message: str, **more: Any) -> tuple[Fits, dict[str, Any], str]:
    """What would fit, as a document, and as the page has it."""
    fits = would_fit(places, ran(places, message, **more))
    assert fits is not None
    lines = fits_lines(fits, Words("qwen3.6-27b", "ddtree", ("gpu",)), width=100)
    return fits, fits_document(fits), "\n".join(click.unstyle(line) for line in lines)


def flat(page: str) -> str:
    return " ".join(page.split())


def line_of(page: str, word: str) -> str:
    return next(line for line in page.splitlines() if line.startswith(word))


def test_what_lies_idle_in_the_allocator_is_no_need_and_the_card_stays_the_card(places: Places) -> None:
    """52 GiB were alive and 40 reserved and unused: it needed some 57 of the 95."""
    fits, body, page = offered(places, PIECES)

    assert fits.short_bytes / GIB == pytest.approx(
        94.47 - 40 + 2 + body["planned"]["plan"]["slack_bytes"] / GIB - 51.18, abs=0.1
    )
    assert line_of(page, "capacity").startswith("capacity       94.97 GiB (the run's own): fits")
    assert body["planned"]["plan"]["capacity_bytes"] == CARD
    assert "target pass" not in page, "it fits this card"
    assert "What would fit" not in page


def test_the_page_and_the_document_tell_everything_that_is_known_of_it(places: Places) -> None:
    facts = {
        "tensors": [{"name": "logits_MV", "shape": [24_576, 248_320], "dtype": "bfloat16", "function": "loss"}],
        "memory_held": [{"frame": "/w/loss.py:70 loss", "bytes": 3 * GIB, "num_blocks": 2}],
        "memory_held_bytes": 72 * GIB,
    }
    message = text(asked=2, own=74.47, allocated=72, idle=0.4, more=" Process 4242 has 20.00 GiB memory in use.")
    shown = ran(places, message, facts=facts)
    fits = would_fit(places, shown)
    assert fits is not None
    words = Words("qwen3.6-27b", "ddtree", ("gpu",))
    lines = [*run_page(shown, width=100, now_s=2.0, only_failure=True), *fits_lines(fits, words, width=100)]
    page = [click.unstyle(line) for line in lines]

    def row(name: str) -> str:
        return next((" ".join(line.removeprefix(name).split()) for line in page if line.startswith(f"{name} ")), "")

    assert "Failure: gpu_oom" in page, "class"
    assert (row("requested"), row("total"), row("free"), row("own use")) == (
        "2.00 GiB",
        "94.97 GiB",
        "0.50 GiB",
        "74.47 GiB",
    )
    assert row("where") == "stage forward, step 1, train.py:200, attempt 1", "frame, stage and step"
    assert row("shapes") == "logits_MV 24,576 x 248,320 bfloat16"
    assert row("held") == "3.00 GiB in 2 tensors, /w/loss.py:70 loss", "live memory by frame"
    assert row("other processes") == "pid 4242, used 20.00 GiB"
    assert (row("shortage"), row("cause")) == ("other_process", "other_process")
    told = flat("\n".join(page))
    assert "exceeded: forward was planned with 49.61 GiB allocated, 16.75 GiB of it activations kept" in told
    assert "it needed 74.00 GiB" in told
    (head,) = [line for line in page if line.startswith("change ")]
    assert " ".join(head.split()) == "change must fit GiB saves GiB s a step, least result", "predicted peak and time"
    (first,) = [line for line in page if line.startswith("1 ")]
    body = fits_document(fits)
    offer = body["planned"]["switches"][0]
    assert first.split()[-4:] == [
        f"{offer['driver_bytes'] / GIB:.2f}",
        f"{offer['saved_bytes'] / GIB:.2f}",
        f"{offer['step_s']:.3g}",
        "same",
    ]
    assert any(line.startswith("draftyard smoke ") and "--try 1" in line for line in page)
    assert body["planned"]["time"]["is_measured"] is False


def test_the_time_of_a_change_is_that_of_the_runs_own_steps_where_it_took_some(places: Places) -> None:
    ran(places, SHORT)
    with Store(places.db) as store:
        store.keep_document(RUN, Document.FINGERPRINT, json.dumps({"gpu": "NVIDIA H200 150754820096 bytes"}))
        store.ingest(batch(steps(1, 3, step_s=2.0, block_tokens_per_s=100.0), run_id=RUN))

    fits = would_fit(places, history.show(places, RUN))

    assert fits is not None
    body = fits_document(fits)["planned"]
    assert (body["time"]["step_s"], body["time"]["source"]) == (pytest.approx(2.0), f"run {RUN} on local, NVIDIA H200")
    assert body["switches"][0]["step_s"] == pytest.approx(2.0 * body["switches"][0]["work_factor"])


def test_of_pieces_the_allocators_setting_is_the_first_suggestion_and_try_takes_it(places: Places) -> None:
    _, body, page = offered(places, PIECES, grows=False)

    assert "the first thing to try is a setting of the allocator, no change of the plan" in flat(page)
    assert f"1 segments that grow\n  --env {NAMES[1]}={DEFAULT}\n" in page
    assert "draftyard smoke qwen3.6-27b -b ddtree --host gpu --try 1    # the rungs with it" in page
    assert body["setting"] == {"name": "segments that grow", "env": {NAMES[1]: DEFAULT}}


def test_changes_of_a_plan_are_numbered_behind_the_setting(places: Places) -> None:
    page = offered(places, SHORT_OF_PIECES, grows=False)[2]

    first, second = (next(line for line in page.splitlines() if line.startswith(f"{n} ")) for n in (1, 2))
    assert first == "1 segments that grow"
    assert "GiB" not in second
    assert page.index(first) < page.index(second) < page.index("--try 1")


def test_the_setting_is_of_the_name_that_the_run_had(places: Places) -> None:
    """Newer torch reads the other name first: setting the one that every torch reads would change nothing."""
    fits = would_fit(places, ran(places, PIECES, grows=False))
    assert fits is not None

    named = fits_document(fits, launch={"env": ["HF_HOME", NAMES[0]]})

    assert named["setting"]["env"] == {NAMES[0]: DEFAULT}
    assert fits_document(fits, launch={"env": list(NAMES)})["setting"]["env"] == dict.fromkeys(NAMES, DEFAULT)
    assert fits_document(fits, launch={"env": "no list"})["setting"]["env"] == {NAMES[1]: DEFAULT}


def test_pieces_where_segments_grow_already_want_no_setting(places: Places) -> None:
    _, body, page = offered(places, PIECES, grows=True)

    assert "no change of the plan" in page
    assert "--env" not in page
    assert "--try" not in page
    assert body["setting"] is None


def test_nothing_is_offered_that_does_not_fit_beside_another_process(places: Places) -> None:
    fits, body, page = offered(places, BESIDE)

    assert fits.held_bytes / GIB == pytest.approx(60, abs=0.1)
    assert body["held_bytes"] == fits.held_bytes
    assert body["planned"]["plan"]["capacity_bytes"] == CARD
    assert body["planned"]["plan"]["verdict"] == "does not fit"
    room = CARD - fits.held_bytes - fits.short_bytes
    assert body["planned"]["switches"], "something fits in 35 GiB"
    assert all(switch["driver_bytes"] <= room for switch in body["planned"]["switches"])
    assert "process 4242" in page
    assert not any("60 anchors" in item["name"] for item in body["planned"]["switches"]), "most of the signal gone"
    assert "target pass" not in page, "it was over when the forward ran out"
    assert "another card" in page
    assert "fits, 44" not in page


def test_a_display_beside_it_is_taken_off_the_card_without_a_word_on_ending_it(places: Places) -> None:
    display = text(asked=3, own=94.06, allocated=92.5, idle=0.2, more=" Process 9 has 410.00 MiB memory in use.")

    fits, _, page = offered(places, display)

    assert fits.held_bytes / GIB == pytest.approx(0.41, abs=0.02)
    assert "0.41 GiB held by process 9" in line_of(page, "  - others")
    assert "end it" not in page


def test_where_nothing_fits_beside_another_process_it_is_named_with_what_to_do(places: Places) -> None:
    _, body, page = offered(places, CROWDED)

    assert body["planned"]["switches"] == []
    assert (
        "nothing fits beside the 85.00 GiB that process 4242 holds: end it, or choose another card with --gpus"
        in flat(page)
    )
    assert "--try" not in page
    assert "a smaller target" not in page


def test_what_is_offered_leaves_free_what_the_plan_had_not_said(places: Places) -> None:
    fits, body, page = offered(places, SHORT)

    assert fits.short_bytes > 40 * GIB
    assert all(item["driver_bytes"] <= CARD - fits.short_bytes for item in body["planned"]["switches"])
    assert f"{fits.short_bytes / GIB:.2f} GiB" in line_of(page, "  - left free")


def test_the_largest_line_of_a_stage_is_not_told_as_what_grew(places: Places) -> None:
    held = [{"bytes": 22 * GIB, "num_blocks": 2, "frame": "/w/attention.py:88 attend"}]
    page = offered(places, SHORT, facts={"memory_held": held})[2]

    told = flat(page).partition("exceeded:")[2]
    assert "activations kept, the largest line; it needed" in told
    assert "22.00 GiB" in told
    assert "/w/attention.py:88 attend" in told


@pytest.mark.parametrize(
    ("stage", "told"),
    [
        ("evaluating", "in the evaluation, after its last step and its last checkpoint"),
        ("target", "while the whole target was loaded"),
    ],
)
def test_no_change_of_a_step_is_offered_where_none_ran(places: Places, stage: str, told: str) -> None:
    fits, _, page = offered(places, SHORT, stage=stage)

    assert told in fits.note
    assert "--set" not in page
