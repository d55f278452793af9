"""Hidden states flow as the queue promises: bounded, two at a time, each side held up by the other, nothing lost in silence.

Two real processes on gloo. What is claimed is an order of events, which no machine is too slow for.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.remote.jobs import TREE

pytestmark = pytest.mark.slow  # two processes each
NUM_BATCHES, CAPACITY, ENOUGH = 12, 3, 5  # as in queue_job


def flow(folder: Path, scene: str) -> list[dict[str, Any]]:
    """What both did, in its order."""
    command = [*warm.python("remote.drafter"), str(TREE / "tests" / "remote" / "queue_job.py"), str(folder)]
    environment = os.environ | {"PYTHONPATH": str(TREE), "OMP_NUM_THREADS": "1"}
    begun = [
        subprocess.Popen([*command, rank, scene], env=environment, stderr=subprocess.PIPE, text=True) for rank in "01"
    ]
    told = [process.communicate(timeout=240)[1] for process in begun]
    assert [process.returncode for process in begun] == [0, 0], "\n".join(told)
    files = (folder / f"events-{rank}.jsonl" for rank in "01")
    every = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return sorted(every, key=lambda event: event["at_s"])


def batches(events: list[dict[str, Any]], what: str) -> list[int]:
    return [event["batch"] for event in events if event["what"] == what]


def at_s(events: list[dict[str, Any]], what: str) -> list[float]:
    """When it happened, of each batch."""
    return [event["at_s"] for event in events if event["what"] == what]


def test_no_more_batches_wait_or_travel_than_the_recipe_says_and_the_target_waits_for_a_place(tmp_path: Path) -> None:
    events = flow(tmp_path, "full")

    granted_s, sent_s, takes_s = (at_s(events, what) for what in ("granted", "sent", "takes"))
    for done_s in (granted_s, sent_s):  # so many while nobody takes one, then one more for each that is taken
        assert sum(each_s < takes_s[0] for each_s in done_s) == CAPACITY
        assert all(taken_s < each_s for taken_s, each_s in zip(takes_s, done_s[CAPACITY:], strict=False))
    assert max(event["depth"] for event in events if event["what"] == "arrived") == CAPACITY
    assert batches(events, "taken") == list(range(NUM_BATCHES))
    assert events[-1]["batches"] == 0


def test_a_batch_travels_while_the_target_computes_the_next_and_the_drafter_trains_on_the_one_before(
    tmp_path: Path,
) -> None:
    events = flow(tmp_path, "overlap")

    computed_s, arrived_s, takes_s = (at_s(events, what) for what in ("computed", "arrived", "takes"))
    assert all(next_s < here_s for next_s, here_s in zip(computed_s[1:], arrived_s, strict=False))
    assert all(next_s < here_s for next_s, here_s in zip(arrived_s[1:], takes_s[1:], strict=True))
    assert batches(events, "taken") == list(range(NUM_BATCHES))


def test_a_drafter_waits_for_a_target_that_is_slower(tmp_path: Path) -> None:
    events = flow(tmp_path, "empty")

    assert {event["depth"] for event in events if event["what"] == "arrived"} == {1}
    assert batches(events, "taken") == list(range(NUM_BATCHES))


def test_what_came_ahead_of_a_stop_is_counted_and_what_was_computed_is_not_sent(tmp_path: Path) -> None:
    events = flow(tmp_path, "enough")

    assert batches(events, "taken") == list(range(ENOUGH))
    (left,) = (event["batches"] for event in events if event["what"] == "left")
    num_sent = len(batches(events, "sent"))
    assert num_sent == ENOUGH + left <= ENOUGH + CAPACITY
    assert batches(events, "unwanted") == [num_sent]
