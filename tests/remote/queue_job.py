"""Two processes and the queue between them, without a trainer: what either does and in which order, for test_queue_flow.

`queue_job.py FOLDER RANK SCENE`: rank 0 is the drafter, rank 1 the target. Each writes `events-RANK.jsonl`; they wait for one
another's deeds by keys of a store, never for a time.
    full      the drafter takes nothing until the target asks for a place that the queue does not have
    overlap   no transfer ends before the next batch is computed, no batch is taken before the one after it is there
    empty     the target computes a batch only when the drafter has asked for it
    enough    the drafter wants no more after five batches
"""

from __future__ import annotations

import json
import queue
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from remote.drafter import queue as border
from remote.drafter.data import HiddenStates
from remote.drafter.queue import Inbox, Outbox, Shape
from remote.roles import Roles

FOLDER, RANK, SCENE = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
NUM_BATCHES, CAPACITY, ENOUGH = 12, 3, 5
ROLES = Roles(num_drafters=1, num_targets=1, queue_capacity=CAPACITY)
SHAPE = Shape(num_tokens=64, num_features=32, hidden_size=16, dtype=torch.float32, vocab_size=100)
PATIENCE = timedelta(seconds=100)  # until a deed that never comes has failed the test


def note(what: str, batch: int, **values: Any) -> None:
    with (FOLDER / f"events-{RANK}.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({"what": what, "batch": batch, "at_s": time.monotonic(), **values}) + "\n")


class Watched(queue.Queue[Any]):
    """The drafter's own queue, which notes how full it is with each batch that comes."""

    def put(self, item: Any, *arguments: Any, **named: Any) -> None:
        if not isinstance(item, BaseException):  # noted before it can be taken
            note("arrived", item.micro_batch, depth=self.qsize() + 1)
        super().put(item, *arguments, **named)


class Asking(Outbox):
    """Tells before it waits for a grant."""

    num_asked = 0

    def _granted(self, drafter: int) -> int:
        deeds.set(f"asks {self.num_asked}", "1")
        self.num_asked += 1
        return super()._granted(drafter)


class Held(Inbox):
    """Notes what it grants. In `overlap` a batch is received only once the next one is computed."""

    def _say(self, micro_batch: int, target: int) -> None:
        note("granted", micro_batch)
        super()._say(micro_batch, target)

    def _receive_states(self, target: int) -> HiddenStates:
        self.num_received = getattr(self, "num_received", -1) + 1
        if SCENE == "overlap" and self.num_received + 1 < NUM_BATCHES:
            deeds.wait([f"computed {self.num_received + 1}"], PATIENCE)
        return super()._receive_states(target)


def target() -> None:
    outbox = Asking(ROLES, SHAPE)
    for batch in range(NUM_BATCHES):
        if SCENE == "empty":
            deeds.wait([f"wants {batch}"], PATIENCE)
        generator = torch.Generator().manual_seed(batch)
        ids_S = torch.randint(100, (64,), generator=generator)
        states = HiddenStates(*(torch.randn(64, width, generator=generator) for width in (32, 16)))
        note("computed", batch)
        deeds.set(f"computed {batch}", "1")
        if outbox.put(batch, ids_S, states) is None:
            note("unwanted", batch)
            break
        note("sent", batch)
    outbox.finish()


def drafter() -> None:
    inbox = Held(ROLES, SHAPE, range(NUM_BATCHES), torch.device("cpu"))
    if SCENE == "full":
        deeds.wait([f"asks {CAPACITY}"], PATIENCE)
        until(lambda: inbox.depth >= CAPACITY)
    for batch in range(ENOUGH if SCENE == "enough" else NUM_BATCHES):
        deeds.set(f"wants {batch}", "1")
        note("takes", batch)
        arrived = inbox.take()
        note("taken", arrived.micro_batch)
        if SCENE == "overlap" and batch + 1 < NUM_BATCHES:
            until(lambda: inbox.depth > 0)
    note("left", 0, batches=inbox.finish())


def until(is_so: Any) -> None:
    last_s = time.monotonic() + PATIENCE.total_seconds()
    while not is_so():
        assert time.monotonic() < last_s, "it did not happen"
        time.sleep(0.002)


border.queue = SimpleNamespace(Queue=Watched)  # type: ignore[assignment]
store = dist.FileStore(str(FOLDER / "store"), 2)  # type: ignore[attr-defined]
deeds = dist.PrefixStore("deeds", store)  # type: ignore[attr-defined]
dist.init_process_group("gloo", store=dist.PrefixStore("ranks", store), rank=RANK, world_size=2)  # type: ignore[attr-defined]
(drafter if RANK == 0 else target)()
dist.all_reduce(torch.zeros(1))  # neither goes before the other has done
dist.destroy_process_group()
