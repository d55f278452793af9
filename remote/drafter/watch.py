"""Ranks that end together: every rank hears within seconds that another is gone, and all name the same cause.

Collectives of a dead rank's peers wait for minutes, and what they raise then names a socket. So each rank has a
thread with its own connection to the launcher's store. It beats there, looks at the processes of its own machine and
at the beats of all, and the first one to see a death writes the sentence that every rank then fails with. A rank that
fails by itself writes its own, so that the others name the cause and not its echo.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from remote.processes import Identity, boot_id
from remote.reach import DOWN, GONE, trouble
from remote.roles import Roles

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

BEAT_S = 0.5
SILENCE_S = 15.0  # a beat needs no more than the interpreter's lock, which long calls of torch give up
GRACE_S = 10.0  # for the main thread to fail by itself, with its own traceback
_CAUSE = "cause"
_SAVING = "saving"  # "1" while rank 0 writes a checkpoint
_STOP = "stop: "  # before the text of a cause that is no loss
_SILENT = ("was not heard for", "launcher of the ranks is gone")  # what a lost way looks like from here


class RankLost(RuntimeError):
    """Another rank has ended, and this one cannot go on without it."""


class WayLost(RankLost):
    """This host has lost the interface by which it reaches the others: what they say of it comes of that."""


class RankStopped(KeyboardInterrupt):
    """Another rank was told to end before it could take part in a step, so this one ends as told, too."""


class Watch(threading.Thread):
    """Watches the other ranks until `finish`; `on_lost` is called in this thread when the main one does not end.

    `save_s`: how long, from the moment a loss is known, a checkpoint that is being written is waited for. `way`: the
    interface by which this host reaches the others.
    """

    def __init__(
        self,
        store: Store,
        roles: Roles,
        rank: int,
        on_lost: Callable[[RankLost | RankStopped], None],
        *,
        save_s: float = 0.0,
        way: str | None = None,
    ) -> None:
        super().__init__(name="watch", daemon=True)
        self._store, self._roles, self._rank, self._on_lost = store, roles, rank, on_lost
        self._way = way
        self._save_s, self._is_saved = save_s, threading.Event()
        self._is_saved.set()
        self._cause: RankLost | RankStopped | None = None
        self._learning = threading.Lock()  # the guard may learn while this thread does
        self._is_known, self._is_over = threading.Event(), threading.Event()
        self._known: dict[int, Identity] = {}
        self._near: set[int] = set()  # ranks whose processes can be looked at from here
        self._heard: dict[int, tuple[bytes, float]] = {}  # rank -> its newest beat, and when it was new here
        self._num_beats = self._num_looks = 0
        own = Identity.of(os.getpid())
        assert own is not None
        store.set(f"process/{rank}", json.dumps([own.pid, own.start_ticks, own.boot_id, _process_numbers()]))

    def cause(self, *, wait_s: float) -> RankLost | RankStopped | None:
        """Why the ranks cannot go on, waited for a little; None: nothing is known."""
        self._is_known.wait(wait_s)
        return self._cause

    def tell(self, text: str, *, is_stop: bool = False) -> None:
        """This rank fails, or ends as told: its word is what the others will give, unless one was written before."""
        self._learn(self._store.compare_set(_CAUSE, "", f"{_STOP if is_stop else ''}{text}").decode())

    def _learn(self, told: str) -> None:
        """The first cause stands: what another thread hears later comes of it."""
        is_silent = any(words in told for words in _SILENT)
        lost = trouble(self._way) if self._way is not None and is_silent else None
        found: RankLost | RankStopped
        if told.startswith(_STOP):
            found = RankStopped(told.removeprefix(_STOP))
        elif lost in (GONE, DOWN):
            found = WayLost(f"interface {self._way}, by which this host reaches the others, {lost}: {told}")
        else:  # a link that is not there may be the other host's doing
            found = RankLost(told if lost is None else f"{told}; interface {self._way} of this host {lost}")
        with self._learning:
            self._cause = self._cause or found
        self._is_known.set()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around the writing of a checkpoint, which needs no other rank and is worth more than an end within seconds."""
        self._is_saved.clear()
        with suppress(RuntimeError):  # the launcher may be gone: the checkpoint is written all the same
            self._store.set(_SAVING, "1")
        try:
            yield
        finally:
            self._is_saved.set()
            with suppress(RuntimeError):
                self._store.set(_SAVING, "")

    def let_first_save(self) -> None:
        """This rank ends for a loss: not before rank 0, on this host, has written the checkpoint it is writing.

        A launcher ends all of its host 30 s after the first of its ranks has ended, whatever the grace of the run. Not waited
        for: a rank 0 that has died, that is itself the loss, or that is on another host, under a launcher of its own, whose
        store may never answer; nor is a launcher asked that is itself out of reach.
        """
        told, is_elsewhere = str(self._cause), self._rank * self._roles.num_nodes >= self._roles.num_ranks
        is_its_loss = told.startswith(self._roles.name(0)) or "launcher" in told
        if self._rank == 0 or 0 not in self._near or is_elsewhere or is_its_loss:
            return
        last_s = self._now_s() + self._save_s
        with suppress(RuntimeError):
            while self._store.check([_SAVING]) and self._store.get(_SAVING) and self._known[0].is_alive:
                if self._now_s() >= last_s or self._is_over_after(BEAT_S):
                    return

    def finish(self) -> None:
        """This rank has done its part; its end is no loss from now on."""
        self._store.set(f"done/{self._rank}", "1")
        self._is_over.set()
        self.join()

    def run(self) -> None:
        threading.Thread(target=self._guard, name="guard of the watch", daemon=True).start()
        while not self._is_over_after(BEAT_S) and not self._is_known.is_set():
            try:
                self._look()
            except RuntimeError as error:  # the store is the launcher's
                self._learn(f"the launcher of the ranks is gone ({str(error).splitlines()[0]})")
            self._num_looks += 1
        self._end_if_known()

    def _guard(self) -> None:
        """A question to the store of a machine that is out of reach has no answer and no end: only another thread can say so.

        Its own turns are counted, not seconds: while this whole process stood still, nobody was out of reach.
        """
        looked, turns = self._num_looks, 0
        while not self._is_over.wait(BEAT_S) and not self._is_known.is_set():
            looked, turns = self._num_looks, turns + 1 if looked == self._num_looks else 0
            if turns * BEAT_S > SILENCE_S:
                self._learn(
                    f"the first host's launcher was not heard for {SILENCE_S:g} s: that machine is out of reach"
                )
                self._end_if_known()

    def _end_if_known(self) -> None:
        if self._cause is None:
            return
        last_s = self._now_s() + self._save_s
        self.let_first_save()  # as the main thread does, which then has its time to fail
        while not self._is_over_after(GRACE_S):  # again after a save: the main thread only now meets the loss
            left_s = last_s - self._now_s()
            if self._is_saved.is_set() or left_s <= 0 or not self._is_saved.wait(left_s):
                self._on_lost(self._cause)
                return

    # Both are all that this thread knows of time; the guard's is its own, as it stands for one that waits for ever.
    def _now_s(self) -> float:
        return time.monotonic()

    def _is_over_after(self, wait_s: float) -> bool:
        return self._is_over.wait(wait_s)

    def _look(self) -> None:
        self._num_beats += 1
        self._store.set(f"beat/{self._rank}", str(self._num_beats))
        if not self._store.check([_CAUSE]):
            for rank in range(self._roles.num_ranks):
                if rank != self._rank and (what := self._missing(rank)):
                    self.tell(f"{self._roles.name(rank)} {what}")
                    return
            return
        self._learn(self._store.get(_CAUSE).decode())

    def _missing(self, rank: int) -> str | None:
        """What has become of a rank that is neither here nor done; None while all is well or it has not come yet."""
        if rank not in self._known:
            if not self._store.check([f"process/{rank}", f"beat/{rank}"]):
                return None
            *told, numbers = json.loads(self._store.get(f"process/{rank}"))
            self._known[rank] = Identity(*told)
            if numbers == _process_numbers() and self._known[rank].boot_id == boot_id():
                self._near.add(rank)
        beat, now = self._store.get(f"beat/{rank}"), self._now_s()
        last, since = self._heard.setdefault(rank, (beat, now))
        if beat != last:
            self._heard[rank] = (beat, now)
            return None
        process = self._known[rank]
        is_gone = rank in self._near and not process.is_alive
        if (not is_gone and now - since < SILENCE_S) or self._store.check([f"done/{rank}"]):
            return None
        if is_gone:
            return (
                f"is gone without a word (process {process.pid}): killed from outside, or by the kernel for its memory"
            )
        return (
            f"was not heard for {SILENCE_S:g} s (process {process.pid}): it is frozen, or its machine is out of reach"
        )


def _process_numbers() -> str:
    """Which numbering of processes this one lives in: in another container a pid means another process."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
