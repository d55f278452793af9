"""Ranks hear of one another's end: a death, a failure with its words, and a part that is done."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from remote.drafter import watch as watching
from remote.drafter.watch import RankLost, RankStopped, Watch, WayLost
from remote.processes import Identity
from remote.roles import Roles

ROLES = Roles(num_drafters=1, num_targets=1)


@pytest.fixture
def store() -> dist.Store:  # type: ignore[name-defined]
    return dist.HashStore()  # type: ignore[attr-defined]


@pytest.fixture
def other(store) -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for rank 1 and has beaten once."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    identity = Identity.of(process.pid)
    assert identity is not None
    numbers = watching._process_numbers()
    store.set("process/1", json.dumps([identity.pid, identity.start_ticks, identity.boot_id, numbers]))
    store.set("beat/1", "1")
    yield process
    process.kill()
    process.wait()


def watch_of(store, rank: int = 0) -> Watch:
    found = Watch(store, ROLES, rank, lambda cause: None)
    found.start()
    return found


@pytest.mark.slow  # beats are half a second apart
def test_a_killed_process_is_named_within_seconds(store, other) -> None:
    watch = watch_of(store)

    other.kill()
    other.wait()

    cause = watch.cause(wait_s=20.0)
    assert isinstance(cause, RankLost)
    assert str(cause).startswith(f"rank 1 (target 0) is gone without a word (process {other.pid})")


@pytest.mark.slow  # beats are half a second apart
def test_a_process_that_ended_with_its_part_done_is_no_loss(store, other) -> None:
    store.set("done/1", "1")
    other.kill()
    other.wait()

    watch = watch_of(store)

    assert watch.cause(wait_s=2.0) is None
    watch.finish()


@pytest.mark.slow  # beats are half a second apart
def test_the_first_cause_that_was_told_is_everybodys(store) -> None:
    first, second = watch_of(store, 0), watch_of(store, 1)

    first.tell("rank 0 (drafter 0) failed: ValueError: no rows")
    second.tell("rank 1 (target 0) failed: RuntimeError: Connection closed by peer")

    told = [watch.cause(wait_s=0.0) for watch in (first, second)]
    assert [str(cause) for cause in told] == ["rank 0 (drafter 0) failed: ValueError: no rows"] * 2


@pytest.mark.slow  # beats are half a second apart
def test_a_rank_that_was_told_to_end_is_no_loss_to_the_others(store) -> None:
    first, second = watch_of(store, 0), watch_of(store, 1)

    second.tell("rank 1 (target 0) was told to end: signal 15", is_stop=True)

    cause = first.cause(wait_s=20.0)
    assert isinstance(cause, RankStopped)
    assert str(cause) == "rank 1 (target 0) was told to end: signal 15"


@pytest.mark.parametrize(("way", "kind"), [("nosuch0", WayLost), ("lo", RankLost), (None, RankLost)])
def test_a_silence_on_a_host_whose_own_interface_is_gone_is_told_as_that(store, way: str | None, kind: type) -> None:
    watch = Watch(store, ROLES, 0, lambda cause: None, way=way)

    watch.tell("rank 1 (target 0) was not heard for 15 s: its machine is out of reach")

    cause = watch.cause(wait_s=0.0)
    assert type(cause) is kind
    assert str(cause).endswith("its machine is out of reach")
    assert ("interface nosuch0, by which this host reaches the others, is gone" in str(cause)) == (kind is WayLost)


def test_an_interface_that_is_gone_explains_no_rank_that_failed_by_itself(store) -> None:
    watch = Watch(store, ROLES, 0, lambda cause: None, way="nosuch0")

    watch.tell("rank 1 (target 0) failed: ValueError: no rows")

    assert type(watch.cause(wait_s=0.0)) is RankLost


class Driven(Watch):
    """A watch whose time goes by as it is waited for; it keeps when it learnt of a loss and when it ended."""

    def __init__(self, store, *, rank: int = 0, roles: Roles = ROLES, save_s: float = 0.0) -> None:
        super().__init__(store, roles, rank, self._end, save_s=save_s)
        self.at_s, self.named_s, self.ended_s = 0.0, math.inf, math.inf
        self._then: list[tuple[float, Callable[[], object]]] = []

    def then(self, at_s: float, work: Callable[[], object]) -> None:
        self._then.append((at_s, work))

    def _end(self, cause: BaseException) -> None:
        self.ended_s = self.at_s

    def _now_s(self) -> float:
        return self.at_s

    def _is_over_after(self, wait_s: float) -> bool:
        if self.cause(wait_s=0.0) is not None:
            self.named_s = min(self.named_s, self.at_s)
        self.at_s += wait_s
        for at_s, work in self._then:
            if self.at_s >= at_s:
                work()
        assert self.at_s < 3600, "nobody has ended this rank"
        return False


def test_a_rank_that_is_frozen_is_named_after_15_s_and_has_ended_the_others_within_30(store, other) -> None:
    """Its process lives and beats no more; the other's main thread hangs in what the two would do together."""
    watch = Driven(store)

    watch.run()

    told = f"rank 1 (target 0) was not heard for 15 s (process {other.pid}): it is frozen"
    assert str(watch.cause(wait_s=0.0)).startswith(told)
    assert 15 <= watch.named_s < 17
    assert watch.named_s < watch.ended_s < 30


class OutOfReach(dist.HashStore):  # type: ignore[name-defined,misc]
    """A store whose machine is cut off at some moment: what is asked of it then is never answered."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.over, self.num_asked = threading.Event(), threading.Event(), 0

    def check(self, keys: list[str]) -> bool:
        self.num_asked += self.cut.is_set()
        return super().check(keys)

    def set(self, key: str, value: str) -> None:
        if self.cut.is_set():
            self.over.wait(60)
        super().set(key, value)


def known_loss(store, save_s: float) -> tuple[Watch, threading.Event]:
    """A watch of rank 0 to which a loss is told before it starts, and what happens when it ends the process."""
    ended = threading.Event()
    watch = Watch(store, ROLES, 0, lambda cause: ended.set(), save_s=save_s)
    watch.tell("rank 1 (target 0) is gone without a word")
    return watch, ended


@pytest.mark.slow  # beats are half a second apart
def test_a_checkpoint_that_is_being_written_is_written_to_its_end(monkeypatch: pytest.MonkeyPatch, store) -> None:
    monkeypatch.setattr(watching, "GRACE_S", 0.1)
    watch, ended = known_loss(store, save_s=300.0)

    with watch.saving():
        watch.start()
        assert not ended.wait(3.0)  # thirty times the grace of a rank that saves nothing

    assert ended.wait(60)


@pytest.mark.slow  # beats are half a second apart
def test_a_checkpoint_that_is_never_written_ends_with_the_grace_of_the_job(
    monkeypatch: pytest.MonkeyPatch, store
) -> None:
    monkeypatch.setattr(watching, "GRACE_S", 0.1)
    watch, ended = known_loss(store, save_s=1.0)

    with watch.saving():
        watch.start()
        assert ended.wait(60)


def survivor(
    store,
    first: Identity,
    *,
    save_s: float,
    cause: str = "rank 2 (target 0) is gone without a word",
    num_nodes: int = 1,
) -> Driven:
    """Rank 1, which has seen rank 0, on its own host, and knows that rank 2 is lost."""
    numbers = watching._process_numbers()
    store.set("process/0", json.dumps([first.pid, first.start_ticks, first.boot_id, numbers]))
    store.set("beat/0", "1")
    found = Driven(store, rank=1, roles=Roles(2, 0 if num_nodes > 1 else 1, num_nodes=num_nodes), save_s=save_s)
    found._look()
    found._learn(cause)
    return found


def own_identity() -> Identity:
    found = Identity.of(os.getpid())
    assert found is not None
    return found


def test_a_rank_with_a_known_loss_lets_rank_0_of_its_host_finish_its_checkpoint(store) -> None:
    first = Watch(store, ROLES, 0, lambda cause: None)
    watch = survivor(store, own_identity(), save_s=300.0)
    saved_s = 100.0

    with ExitStack() as saving:
        saving.enter_context(first.saving())
        watch.then(saved_s, saving.close)
        watch.let_first_save()

    assert saved_s <= watch.at_s < saved_s + 2
    watch.let_first_save()
    assert watch.at_s < saved_s + 2  # nothing is being written any more


def test_a_checkpoint_of_rank_0_that_is_never_whole_holds_no_other_rank_beyond_the_grace(store) -> None:
    watch = survivor(store, own_identity(), save_s=60.0)

    with Watch(store, ROLES, 0, lambda cause: None).saving():
        watch.let_first_save()

    assert 60 <= watch.at_s < 62


@pytest.mark.parametrize(
    ("cause", "num_nodes"),
    [
        ("rank 1 (drafter 1) failed: ValueError: no rows", 2),
        ("the first host's launcher was not heard for 15 s: out of reach", 1),
    ],
    ids=["of another host", "whose launcher does not answer"],
)
def test_a_rank_asks_no_store_that_may_never_answer_for_the_save_of_rank_0(cause: str, num_nodes: int) -> None:
    """Two hosts of one kernel look like one by their processes."""
    store = OutOfReach()
    watch = survivor(store, own_identity(), save_s=300.0, cause=cause, num_nodes=num_nodes)
    store.cut.set()

    watch.let_first_save()

    assert store.num_asked == 0


def test_a_rank_0_that_died_as_it_saved_holds_nobody(store) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    dead = Identity.of(process.pid)
    process.communicate()
    assert dead is not None
    watch = survivor(store, dead, save_s=300.0)
    store.set(watching._SAVING, "1")

    watch.let_first_save()

    assert watch.at_s < 2


@pytest.mark.slow  # beats are half a second apart
def test_a_store_that_never_answers_ends_the_rank_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "SILENCE_S", 1.0)
    monkeypatch.setattr(watching, "GRACE_S", 0.5)
    store, told = OutOfReach(), list[str]()
    ended = threading.Event()

    def end(cause: BaseException) -> None:
        told.append(str(cause))
        ended.set()

    watch = Watch(store, ROLES, 1, end)
    watch.start()
    store.cut.set()

    assert ended.wait(60)
    store.over.set()
    assert told[0] == "the first host's launcher was not heard for 1 s: that machine is out of reach"


def test_what_another_thread_hears_later_does_not_take_the_first_cause_away(store) -> None:
    """The launcher that is gone because of it, say: the guard of the watch has no answer to its question any more."""
    watch = Watch(store, ROLES, 0, lambda cause: None)
    watch.tell("rank 1 (target 0) failed: ValueError: no rows")

    watch._learn("the first host's launcher was not heard for 15 s: that machine is out of reach")

    assert str(watch.cause(wait_s=0.0)) == "rank 1 (target 0) failed: ValueError: no rows"
