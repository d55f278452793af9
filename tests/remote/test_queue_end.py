"""How the queue ends, and what it keeps: ranks are threads, and the transport between them one that holds no surprises.

What is claimed is an order of events: a drafter is held back until nothing more can happen without it. That the same goes
over gloo between processes is tested in test_queue_flow and test_ranks.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from remote.drafter import queue as border
from remote.drafter.data import HiddenStates
from remote.drafter.queue import END, Inbox, Outbox, Shape
from remote.roles import Roles

SHAPE = Shape(num_tokens=8, num_features=6, hidden_size=4, dtype=torch.float32, vocab_size=50)
PATIENCE_S = 60.0  # until a deed that never comes has failed the test
CPU = torch.device("cpu")


class Transport:
    """Messages between threads, as `torch.distributed` takes them: each kind between two ranks keeps its order.

    As with gloo, a send is complete for its sender only once it has been waited for.
    """

    Work = object

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._pipes: dict[tuple[int, int, int], deque[tuple[Tensor, threading.Event]]] = defaultdict(deque)
        self._rank_of: dict[threading.Thread, int] = {}
        self._waiting: dict[threading.Thread, deque[Any]] = {}  # for a message in that pipe
        self.ends: dict[int, int] = defaultdict(int)  # said by a rank

    def enter(self, rank: int) -> None:
        """The calling thread is of that rank."""
        with self.changed:
            self._rank_of[threading.current_thread()] = rank

    def isend(self, tensor: Tensor, rank: int, tag: int = 0) -> Any:
        taken, waited = threading.Event(), threading.Event()
        with self.changed:
            own = self._rank_of[threading.current_thread()]
            self._pipes[own, rank, tag].append((tensor.clone(), taken))
            self.ends[own] += tag == border._GRANT and int(tensor[0]) == END
            self.changed.notify_all()

        def wait() -> None:
            assert taken.wait(PATIENCE_S), "a sender waits for what nobody takes"
            waited.set()

        return SimpleNamespace(wait=wait, is_completed=waited.is_set)

    def recv(self, tensor: Tensor, rank: int, tag: int = 0) -> None:
        thread = threading.current_thread()
        with self.changed:
            pipe = self._pipes[rank, self._rank_of[thread], tag]
            self._waiting[thread] = pipe
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: pipe, PATIENCE_S), "a message that never came"
            del self._waiting[thread]
            found, taken = pipe.popleft()
        tensor.copy_(found)
        taken.set()

    def is_still(self, threads: list[threading.Thread]) -> bool:
        """Whether each of them waits for a message that is not there, or has ended."""
        with self.changed:
            return all(not each.is_alive() or not self._waiting.get(each, [None]) for each in threads)


class Held(Inbox):
    """Its thread receives as the rank that made it."""

    def _receive_all(self) -> None:
        transport = border.dist
        assert isinstance(transport, Transport)
        transport.enter(self.rank)
        super()._receive_all()

    @classmethod
    def of(cls, roles: Roles, rank: int, num_batches: int) -> Held:
        found = cls.__new__(cls)
        found.rank = rank  # type: ignore[attr-defined]
        found.__init__(roles, SHAPE, roles.share(rank, 0, num_batches), CPU)  # type: ignore[misc]
        return found


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Transport:
    found = Transport()
    monkeypatch.setattr(border, "dist", found)
    return found


def until(is_so: Callable[[], bool]) -> None:
    last_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < last_s, "it did not happen"
        time.sleep(0.002)


def begun(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def serving(
    transport: Transport, roles: Roles, rank: int, num_batches: int, sent: list[int], **wishes: Callable[[], bool]
) -> threading.Thread:
    """A target that sends its batches until it is told that nothing more is wanted; what it sent is noted."""

    def serve() -> None:
        transport.enter(rank)
        outbox = Outbox(roles, SHAPE, **wishes)
        for micro_batch in roles.share(rank, 0, num_batches):
            states = HiddenStates(torch.full((8, 6), 1.0), torch.full((8, 4), float(micro_batch)))
            if outbox.put(micro_batch, torch.arange(8), states) is None:
                break
            sent.append(micro_batch)
        outbox.finish()

    return begun(serve)


def orders(num: int) -> list[tuple[int, ...]]:
    """In which so many drafters come to say that they end: all where they are few, else rising, falling and from the middle."""
    rising = tuple(range(num))
    return list(permutations(rising)) if num < 4 else [rising, rising[::-1], rising[num // 2 :] + rising[: num // 2]]


@pytest.mark.slow
@pytest.mark.parametrize(("num_targets", "num_drafters"), [(1, 2), (2, 4), (3, 5), (3, 2)])
def test_drafters_that_agreed_to_stop_say_so_in_any_order_and_at_any_time(
    transport: Transport, num_targets: int, num_drafters: int
) -> None:
    """One that still writes a checkpoint has not said END when the others have: no target ends before it has heard all."""
    roles = Roles(num_drafters, num_targets, queue_capacity=3)
    for order in orders(num_drafters):
        sent, dropped = list[int](), list[int]()
        transport.ends.clear()
        inboxes, taken, release = dict[int, Held](), list[int](), {rank: threading.Event() for rank in roles.drafters}

        def draft(
            rank: int, inboxes: Any = inboxes, taken: Any = taken, release: Any = release, dropped: Any = dropped
        ) -> None:
            transport.enter(rank)
            inboxes[rank] = inbox = Held.of(roles, rank, 100)
            taken += [inbox.take().micro_batch for _ in range(7)]
            assert release[rank].wait(PATIENCE_S)
            dropped.append(inbox.finish())

        targets = [serving(transport, roles, rank, 100, sent) for rank in roles.targets]
        drafters = [begun(lambda rank=rank: draft(rank)) for rank in roles.drafters]  # type: ignore[misc]
        for index in order:
            rank = roles.drafters[index]
            until(lambda: len(taken) == 7 * num_drafters)  # noqa: B023
            receiving = [*targets, *(inbox._thread for inbox in inboxes.values())]
            until(lambda: transport.is_still(receiving))  # noqa: B023  # nothing moves before the next one comes
            release[rank].set()
            until(lambda: transport.ends[rank] == num_targets)  # noqa: B023
        for thread in (*drafters, *targets):
            thread.join(PATIENCE_S)

        assert len(dropped) == num_drafters, "each has ended, and none with an error"
        assert sum(dropped) == len(sent) - len(taken)


def test_a_targets_wish_to_stop_is_heard_with_its_next_batch_and_before_those_that_wait_are_taken(
    transport: Transport,
) -> None:
    """The batch that waits for a place in a full queue when the wish comes is the one that tells it."""
    roles, wish = Roles(1, 1, queue_capacity=3), threading.Event()
    transport.enter(0)
    inbox = Held.of(roles, 0, 100)
    target = serving(transport, roles, 1, 100, [], is_stop_wished=wish.is_set)
    until(lambda: inbox.depth == 3 and transport.is_still([target]))

    wish.set()
    assert not inbox.is_stop_wished
    first = inbox.take().micro_batch
    until(lambda: inbox.is_stop_wished)

    assert first == 0
    assert inbox.finish() == 3
    target.join(PATIENCE_S)


def test_a_drafter_keeps_no_grant_whose_batch_has_come(transport: Transport) -> None:
    """Hundreds of thousands of batches make a training: what is kept of each would be gigabytes, looked through at each take."""
    roles, num_batches = Roles(1, 1, queue_capacity=3), 200
    transport.enter(0)
    inbox = Held.of(roles, 0, num_batches)
    target = serving(transport, roles, 1, num_batches, [])

    kept = []
    for _ in range(num_batches):
        inbox.take()
        kept.append(len(inbox._grants))

    assert inbox.finish() == 0
    target.join(PATIENCE_S)
    assert max(kept) <= roles.queue_capacity + 1
