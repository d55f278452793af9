"""Hidden states on their way from target ranks to a drafter rank: a bounded queue in which every batch is granted first.

A drafter grants a micro-batch to its target rank by a small message; only then is it sent. It grants as many as its
queue may hold, and one more whenever its training takes one off, so the grant is the acknowledgement and at most
`queue_capacity` batches wait or travel. Messages are tensors of the CPU: what is wanted and what comes. The states
themselves travel between the devices; their receive is posted when their header has come, so neither side's device
waits for the other side's computation.

    drafter -> target   a micro-batch's number: it may be sent; END: nothing more is wanted
    target -> drafter   a header, then features and last hidden states; or a header that says BYE: nothing more will come

What comes is held against what this rank knows of the row: number, sizes, every token, and a sample of the values
bit by bit. Who computes which micro-batch is `roles`'; what the rows are is `data`'s.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from remote.balance import Pace
from remote.drafter.data import HiddenStates
from remote.roles import Roles
from remote.spec import DFlashSpec

END = BYE = -(2**62)  # no micro-batch has this number
OUTBOX = 2  # batches a target has in flight: the next one is computed while one travels
NUM_SAMPLES = 16  # positions of the row whose values are compared bit by bit
_GRANT, _HEADER, _FEATURES, _LAST = 1, 2, 3, 4  # tags: each kind of message keeps its order


class BorderError(RuntimeError):
    """Hidden states came that are not those of the row they are for."""


@dataclass(frozen=True)
class Shape:
    """What every micro-batch of a training looks like on the way: S tokens, C captured features, H hidden size."""

    num_tokens: int
    num_features: int
    hidden_size: int
    dtype: torch.dtype
    vocab_size: int

    @classmethod
    def of(cls, spec: DFlashSpec, dtype: torch.dtype) -> Shape:
        num_tokens, hidden_size = spec.data.row_tokens * spec.train.rows_per_step, spec.target.hidden_size
        num_features = len(spec.drafter.captured_layers) * hidden_size
        return cls(num_tokens, num_features, hidden_size, dtype, spec.target.vocab_size)

    @property
    def size_bytes(self) -> int:
        """Of one micro-batch: S · (C + H) numbers."""
        return self.num_tokens * (self.num_features + self.hidden_size) * self.dtype.itemsize

    @property
    def as_numbers(self) -> list[int]:
        return [self.num_tokens, self.num_features, self.hidden_size, self.dtype.itemsize]


@dataclass(frozen=True)
class Arrived:
    """One micro-batch at its drafter."""

    micro_batch: int
    ids_S: Tensor  # as the target rank read them
    states: HiddenStates
    pace: Pace
    transfer_s: float  # from its header to its last byte


def _nobody() -> bool:
    return False


class Outbox:
    """The target rank's side: `put` batch after batch, then `finish`.

    `is_stop_wished`: whether this rank was told to stop. It goes with every batch, as drafters alone decide when all do.
    """

    def __init__(self, roles: Roles, shape: Shape, *, is_stop_wished: Callable[[], bool] = _nobody) -> None:
        self._roles, self._shape, self._is_stop_wished = roles, shape, is_stop_wished
        self._in_flight: deque[list[_Sent]] = deque()
        self._ended: set[int] = set()  # drafters that want nothing more
        self._since_s = time.perf_counter()

    def put(self, micro_batch: int, ids_S: Tensor, states: HiddenStates) -> Pace | None:
        """Sends it as soon as its drafter grants it; None: nothing more is wanted, and it is dropped.

        BorderError: there are not as many states as tokens, or they are not of the shape that the drafter expects.
        """
        _check_own(micro_batch, ids_S, states, self._shape)
        drafter, sample = self._roles.drafter_of(micro_batch), _sample(states)  # the host waits for the device here
        computed_s = time.perf_counter()
        if len(self._in_flight) == OUTBOX:
            _see_off(self._in_flight.popleft())
        granted = self._granted(drafter)
        if granted == END:
            return None
        assert granted == micro_batch, f"micro-batch {micro_batch} was to be granted, {granted} was"
        pace = Pace(computed_s - self._since_s, time.perf_counter() - computed_s)
        wish = int(self._is_stop_wished())  # as late as can be: a full queue may have held this batch for long
        numbers = [micro_batch, *self._shape.as_numbers, *_as_numbers(pace), wish, *sample]
        header = torch.tensor([*numbers, *ids_S.tolist()])
        parts = zip((header, *states.tensors), (_HEADER, _FEATURES, _LAST), strict=True)
        self._in_flight.append([_sent(tensor, drafter, tag) for tensor, tag in parts])
        self._since_s = time.perf_counter()
        return pace

    def finish(self) -> None:
        """Says BYE to every drafter and sees everything off; after an END, what the others still granted lapses.

        BYE comes after everybody's END: a drafter that has agreed to stop, and has not come to say so, must not hear of an end
        that it did not ask for. It waits for no BYE before it says END.
        """
        if self._ended:
            for drafter in self._roles.drafters:
                while drafter not in self._ended:
                    self._granted(drafter)
        bye = torch.full((_header_length(self._shape),), BYE)
        byes = [_sent(bye, drafter, _HEADER) for drafter in self._roles.drafters]
        for sent in (*self._in_flight, byes):
            _see_off(sent)

    def _granted(self, drafter: int) -> int:
        grant = torch.empty(1, dtype=torch.int64)
        dist.recv(grant, drafter, tag=_GRANT)
        micro_batch = int(grant.item())
        if micro_batch == END:
            self._ended.add(drafter)
        return micro_batch


class Inbox:
    """The drafter rank's side: `take` gives its micro-batches in order; a thread receives ahead of it."""

    def __init__(self, roles: Roles, shape: Shape, micro_batches: range, device: torch.device) -> None:
        self._roles, self._shape, self._device, self._order = roles, shape, device, micro_batches
        self._arrived: queue.Queue[Arrived | BaseException] = queue.Queue()
        self._grants: deque[_Sent] = deque()
        self._num_granted = self._num_taken = 0
        self._is_ending = False
        self.is_stop_wished = (
            False  # by a target rank; known when the header comes that says it, before its batch is taken
        )
        for _ in range(roles.queue_capacity):
            self._grant()
        self._thread = threading.Thread(target=self._receive_all, name="inbox", daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        """Batches that wait to be trained on."""
        return self._arrived.qsize()

    def take(self) -> Arrived:
        """The next micro-batch, waited for; the one after those granted is granted now."""
        arrived = self._arrived.get()
        if isinstance(arrived, BaseException):
            raise arrived
        self._num_taken += 1
        self._grant()
        if self._device.type == "cuda":  # made on the receiving stream, used on this one
            for tensor in arrived.states.tensors:
                tensor.record_stream(torch.cuda.current_stream(self._device))
        return arrived

    def finish(self) -> int:
        """Wants nothing more, receives what is on its way, and tells how many batches came that nobody trained on."""
        self._is_ending = True
        if self._num_taken < len(self._order):
            for target in self._roles.targets:
                self._say(END, target)
        self._thread.join()
        left = [self._arrived.get_nowait() for _ in range(self.depth)]
        for one in left:
            if isinstance(one, BaseException):
                raise one
        return len(left)

    def _grant(self) -> None:
        if self._num_granted < len(self._order):
            if len(self._grants) > self._roles.queue_capacity:  # the batch of the oldest one has been taken
                _see_off([self._grants.popleft()])  # a send of gloo's is complete for its sender only once waited for
            micro_batch = self._order[self._num_granted]
            self._say(micro_batch, self._roles.target_of(micro_batch))
            self._num_granted += 1

    def _say(self, micro_batch: int, target: int) -> None:
        self._grants.append(_sent(torch.tensor([micro_batch]), target, _GRANT))

    # In the thread --------------------------------------------------------------------------------

    def _receive_all(self) -> None:
        try:
            with nullcontext() if self._device.type != "cuda" else torch.cuda.stream(torch.cuda.Stream(self._device)):
                self._receive_until_bye()
        except BaseException as error:  # noqa: BLE001  # it belongs to the main thread, which meets it in `take`
            self._arrived.put(error)

    def _receive_until_bye(self) -> None:
        gone: set[int] = set()
        for micro_batch in self._order:
            target = self._roles.target_of(micro_batch)
            if target in gone:
                continue
            arrived = self._receive(micro_batch, target)
            if arrived is None:
                gone.add(target)
            else:
                self._arrived.put(arrived)
        for target in self._roles.targets:
            if target not in gone and self._receive(None, target) is not None:
                raise BorderError(f"{self._roles.name(target)} sent more than was granted")

    def _receive(self, expected: int | None, target: int) -> Arrived | None:
        """The next batch of that target; None: it said BYE, which is right after an END or the last batch."""
        header = torch.empty(_header_length(self._shape), dtype=torch.int64)
        dist.recv(header, target, tag=_HEADER)
        numbers = header.tolist()
        where = f"micro-batch {expected} from {self._roles.name(target)}"
        if numbers[0] == BYE:
            if expected is not None and not self._is_ending:
                raise BorderError(f"{where} was granted, and that rank ended before it")
            return None
        _check_header(numbers, expected, self._shape, where)
        self.is_stop_wished |= bool(numbers[_PACE_END])
        started_s = time.perf_counter()
        states = self._receive_states(target)
        found = _sample(states)  # the host waits here until everything has come
        transfer_s = time.perf_counter() - started_s
        _check_sample(found, numbers[_WISH_END:_SAMPLE_END], where)
        pace = Pace(*(number / 1e6 for number in numbers[_SHAPE_END:_PACE_END]))
        return Arrived(numbers[0], header[_SAMPLE_END:], states, pace, transfer_s)

    def _receive_states(self, target: int) -> HiddenStates:
        shape = self._shape
        features_SC, last_hidden_SH = (
            torch.empty(shape.num_tokens, width, dtype=shape.dtype, device=self._device)
            for width in (shape.num_features, shape.hidden_size)
        )
        dist.recv(features_SC, target, tag=_FEATURES)
        dist.recv(last_hidden_SH, target, tag=_LAST)
        return HiddenStates(features_SC, last_hidden_SH)


# A header: number of the micro-batch, its shape, the sender's pace in microseconds, whether it was told to stop, a sample of
# the values, every token.
_SHAPE_END, _PACE_END, _WISH_END, _SAMPLE_END = 5, 7, 8, 8 + 2 * NUM_SAMPLES
_Sent = tuple["dist.Work", Tensor]  # the tensor must live until it has been taken


def _header_length(shape: Shape) -> int:
    return _SAMPLE_END + shape.num_tokens


def _sent(tensor: Tensor, rank: int, tag: int) -> _Sent:
    work = dist.isend(tensor, rank, tag=tag)
    assert work is not None, "this rank is part of the group"
    return work, tensor


def _see_off(sent: list[_Sent]) -> None:
    """The host waits until all of it has gone. For what NCCL sends `wait` alone holds up the stream: the next header
    would go out, and its receive be posted, while that send still waits for another drafter."""
    for work, tensor in sent:
        work.wait()
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()


def _as_numbers(pace: Pace) -> list[int]:
    return [round(pace.busy_s * 1e6), round(pace.wait_s * 1e6)]


def _sample(states: HiddenStates) -> list[int]:
    """Values spread over the row, from one of the first to one of the last tokens, as bits of float64."""
    parts = []
    for tensor in states.tensors:
        steps = torch.linspace(0, 1, NUM_SAMPLES, dtype=torch.float64)
        row, column = ((steps * (size - 1)).round().long().to(tensor.device) for size in tensor.shape)
        parts.append(tensor[row, column])
    found: list[int] = torch.cat(parts).double().cpu().view(torch.int64).tolist()
    return found


def _check_own(micro_batch: int, ids_S: Tensor, states: HiddenStates, shape: Shape) -> None:
    """Before anything is sent: a receive of another size than what comes has no end on some transports."""
    found = [len(ids_S), *([*part.shape, part.dtype] for part in states.tensors)]
    widths = (shape.num_features, shape.hidden_size)
    expected = [shape.num_tokens, *([shape.num_tokens, width, shape.dtype] for width in widths)]
    if found != expected:
        raise BorderError(
            f"micro-batch {micro_batch}: tokens, features and last hidden states are {_sizes(found)}; "
            f"every row of this training has {_sizes(expected)}"
        )


def _sizes(numbers: list[Any]) -> str:
    return ", ".join(str(each).replace("torch.", "") for each in numbers)


def _check_header(numbers: list[int], expected: int | None, shape: Shape, where: str) -> None:
    if numbers[0] != expected:
        raise BorderError(f"{where}: number {numbers[0]} came instead; the ranks disagree on the order of rows")
    if numbers[1:_SHAPE_END] != shape.as_numbers:
        raise BorderError(
            f"{where}: tokens, features, hidden size and bytes a number are {numbers[1:_SHAPE_END]}; "
            f"this rank expects {shape.as_numbers}"
        )
    wrong = next((token for token in numbers[_SAMPLE_END:] if not 0 <= token < shape.vocab_size), None)
    if wrong is not None:
        raise BorderError(f"{where}: token {wrong}; the vocabulary runs from 0 to {shape.vocab_size - 1}")


def _check_sample(found: list[int], sent: list[int], where: str) -> None:
    if found != sent:
        raise BorderError(
            f"{where}: values came that are not those that were sent; the transport damaged or shifted them"
        )
    values = torch.tensor(found).view(torch.float64)
    if not bool(values.isfinite().all()):
        raise BorderError(
            f"{where}: {int((~values.isfinite()).sum())} of {len(values)} sampled hidden states are not finite"
        )
