"""This process among the ranks of its training: joining them, its role, and ending with them.

torch's elastic launcher starts one process a card and holds the store where they meet. Small messages are tensors of
the CPU and travel by gloo, large ones are the card's and travel by NCCL (on a CPU all by gloo). Without a launcher
there is one rank, which has every role, and nothing here talks to anybody.

The environment is read in `__main__`; what is sent between ranks is `queue`'s and `peers`'.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from remote.drafter.peers import Peers
from remote.drafter.watch import RankLost, RankStopped, Watch
from remote.report import Reporter, UserFault
from remote.roles import Roles

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# The watch ends ranks within seconds; this is for what it cannot see, a rank that beats and never comes.
LONGEST_WAIT = timedelta(minutes=30)
MEETING = timedelta(minutes=5)  # for the last rank to start
ECHO_S = 20.0  # how long the cause of a broken connection is waited for; a silent rank is told after 15 s
STOP_S = 2.0  # the same where the launcher asks to end: it does so when a rank has died, too


@dataclass(frozen=True)
class Place:
    """Where the launcher put this process, by its own names."""

    rank: int
    local_rank: int
    world_size: int
    address: str
    port: int
    num_nodes: int = 1  # hosts
    interface: str | None = None  # by which this one reaches the others, where that was found out


@dataclass(frozen=True)
class Ranks:
    """This rank, the roles of all, and the peers it trains with."""

    rank: int = 0
    roles: Roles = field(default_factory=Roles)
    peers: Peers = field(default_factory=Peers)
    watch: Watch | None = None

    @property
    def is_drafter(self) -> bool:
        return self.roles.is_drafter(self.rank)

    @property
    def name(self) -> str:
        return self.roles.name(self.rank)

    def from_first(self, numbers: list[int]) -> list[int]:
        """Rank 0's numbers, at every rank."""
        if self.roles.num_ranks == 1:
            return numbers
        shared = torch.tensor(numbers)
        dist.broadcast(shared, 0)
        found: list[int] = shared.tolist()
        return found

    def of_all(self, numbers: list[int]) -> list[list[int]]:
        """Every rank's numbers, in the order of ranks, at every rank."""
        if self.roles.num_ranks == 1:
            return [numbers]
        shared = [torch.zeros(len(numbers), dtype=torch.int64) for _ in range(self.roles.num_ranks)]
        dist.all_gather(shared, torch.tensor(numbers))
        return [each.tolist() for each in shared]

    def before_others(self, work: Callable[[], object]) -> None:
        """Rank 0 does it, and no rank goes on before it is done."""
        if self.watch is None or not dist.is_initialized():
            return
        if self.rank == 0:
            work()
        dist.all_reduce(torch.zeros(1))

    def saving(self) -> AbstractContextManager[None]:
        """Around the writing of a checkpoint: where another rank is lost meanwhile, this one ends after it."""
        return nullcontext() if self.watch is None else self.watch.saving()

    def leave(self) -> None:
        """This rank has done its part, as have all when it returns; what one does afterwards is its own."""
        if self.watch is not None:
            dist.all_reduce(torch.zeros(1))
            self.watch.finish()
            dist.destroy_process_group()

    def cause_of(self, error: Exception) -> Exception | RankStopped:
        """What it comes of: the loss of another rank, or its stop, where that is what broke a connection; else itself."""
        return error if self.watch is None else _cause_of(error, self.watch)


@contextmanager
def alone() -> Iterator[Ranks]:
    """The one rank of a job that is no training."""
    yield Ranks()


@contextmanager
def joined(
    place: Place | None, roles: Roles, device: torch.device, reporter: Reporter, *, save_s: float = 0.0
) -> Iterator[Ranks]:
    """This rank among the others, from the meeting of all to its own end, of which the others hear.

    `save_s`: how long it may go on writing a checkpoint once another rank is lost; the job's grace.
    UserFault: the launcher started another number of ranks than there are roles. Without a launcher there is one.
    """
    num_started = 1 if place is None else place.world_size
    if num_started != roles.num_ranks:
        raise UserFault(
            f"{num_started} processes were started; roles want {roles.num_targets} target + {roles.num_drafters} drafter "
            f"= {roles.num_ranks}: python -m torch.distributed.run --standalone --nproc-per-node {roles.num_ranks}"
        )
    if place is None:
        yield Ranks()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, watched = _store(place), _store(place)
    watch = Watch(
        watched,
        roles,
        place.rank,
        lambda cause: _end_at_once(cause, reporter),
        save_s=save_s,
        way=place.interface if place.num_nodes > 1 else None,
    )
    watch.start()
    try:
        with _other_named(watch):
            # Without device_id: each pair of ranks then has a communicator of its own, and no receive of hidden states waits
            # behind another one's. See "Hidden states and gradients" in docs/decisions.md.
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=dist.PrefixStore("ranks", store),  # type: ignore[attr-defined]  # torch's stubs leave it out
                rank=place.rank,
                world_size=place.world_size,
                timeout=LONGEST_WAIT,
            )
            group = dist.new_group(roles.drafters)
            index = roles.drafters.index(place.rank) if roles.is_drafter(place.rank) else 0
            peers = Peers(index, roles.num_drafters, group) if roles.is_drafter(place.rank) else Peers()
            yield Ranks(place.rank, roles, peers, watch)
    except BaseException as error:
        with suppress(RuntimeError):  # the launcher, and its store, may be gone
            words = str(error).strip().splitlines() or [""]
            if isinstance(error, KeyboardInterrupt):
                watch.tell(f"{roles.name(place.rank)} was told to end: {words[0]}", is_stop=True)
            else:
                watch.tell(f"{roles.name(place.rank)} failed: {type(error).__name__}: {words[0]}")
            watch.let_first_save()
        raise


def _cause_of(error: Exception, watch: Watch) -> Exception | RankStopped:
    return error if not _is_echo(error) else watch.cause(wait_s=ECHO_S) or error


@contextmanager
def _other_named(watch: Watch) -> Iterator[None]:
    """What the end of another rank breaks becomes that end, wherever it is met: a connection, or an interrupt by the
    launcher, which follows the death of a rank."""
    try:
        yield
    except Exception as error:
        cause = _cause_of(error, watch)
        if cause is error:
            raise
        raise cause from error
    except KeyboardInterrupt:
        lost = watch.cause(wait_s=STOP_S)
        if isinstance(lost, RankLost):
            raise lost from None
        raise


def _store(place: Place) -> Store:
    return dist.TCPStore(  # type: ignore[attr-defined]  # as above
        place.address, place.port, is_master=False, timeout=MEETING, wait_for_workers=False
    )


def _is_echo(error: Exception) -> bool:
    """Whether it is what a collective raises when another rank is gone."""
    is_told_by = any(word in str(error) for word in ("gloo", "NCCL"))
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and is_told_by)


def _end_at_once(cause: RankLost | RankStopped, reporter: Reporter) -> None:
    """Ends this process from its watch: the main thread waits for a rank that will never answer."""
    has_failed = isinstance(cause, RankLost)
    if has_failed:
        reporter.failure(cause)
    reporter.final("failed" if has_failed else "stopped", exit_code=int(has_failed))
    sys.stderr.write(f"{cause}; this rank was waiting for it and ends\n")
    sys.stderr.flush()
    os._exit(int(has_failed))
