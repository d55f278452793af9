"""The border between target and drafter: what is not the row's own states is refused with its place.

Transport and grants are tested with real processes in test_ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from remote.balance import Pace
from remote.drafter import feed as feed_module
from remote.drafter.data import Dataset, Document, HiddenStates
from remote.drafter.feed import QueuedFeed
from remote.drafter.queue import (
    _SAMPLE_END,
    Arrived,
    BorderError,
    Shape,
    _check_header,
    _check_own,
    _check_sample,
    _sample,
)
from remote.roles import Roles
from remote.spec import TrainSpec

SHAPE = Shape(num_tokens=12, num_features=15, hidden_size=5, dtype=torch.bfloat16, vocab_size=50)
ROLES = Roles(num_drafters=1, num_targets=1)


def states() -> HiddenStates:
    generator = torch.Generator().manual_seed(0)
    features_SC = torch.randn(12, 15, generator=generator).bfloat16()
    return HiddenStates(features_SC, torch.randn(12, 5, generator=generator).bfloat16())


def header(number: int = 4, *, ids: list[int] | None = None, shape: list[int] | None = None) -> list[int]:
    before = [number, *(SHAPE.as_numbers if shape is None else shape)]
    return [*before, *[0] * (_SAMPLE_END - len(before)), *(ids or list(range(12)))]


def test_a_batch_of_the_27b_shape_is_61440_bytes_a_token() -> None:
    shape = Shape(num_tokens=8000, num_features=5 * 5120, hidden_size=5120, dtype=torch.bfloat16, vocab_size=248_320)

    assert shape.size_bytes == 8000 * 61_440


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (header(5), "number 5 came instead"),
        (header(shape=[12, 15, 5, 4]), r"bytes a number are \[12, 15, 5, 4\]; this rank expects \[12, 15, 5, 2\]"),
        (header(ids=[*range(11), 50]), "token 50; the vocabulary runs from 0 to 49"),
        (header(ids=[-1, *range(11)]), "token -1; the vocabulary"),
    ],
    ids=["another batch", "another dtype", "a token too large", "a token below zero"],
)
def test_a_header_that_is_not_the_expected_batchs_is_refused(numbers: list[int], words: str) -> None:
    _check_header(header(), 4, SHAPE, "here")

    with pytest.raises(BorderError, match=words):
        _check_header(numbers, 4, SHAPE, "here")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda found: HiddenStates(found.features_SC.roll(1, 0), found.teacher),
        lambda found: HiddenStates(found.features_SC, found.teacher.roll(-1, 0)),
        lambda found: HiddenStates(found.features_SC.roll(5, 1), found.teacher),
        lambda found: HiddenStates(torch.zeros_like(found.features_SC), found.teacher),
    ],
    ids=["a token later", "last hidden a token earlier", "layers exchanged", "never filled"],
)
def test_states_that_were_shifted_on_the_way_are_refused(spoil: Callable[[HiddenStates], HiddenStates]) -> None:
    sent = _sample(states())

    with pytest.raises(BorderError, match="not those that were sent"):
        _check_sample(_sample(spoil(states())), sent, "here")


def test_states_that_are_not_finite_are_refused_though_they_came_as_they_were_sent() -> None:
    found = states()
    found.teacher[0] = torch.nan
    sample = _sample(found)

    with pytest.raises(BorderError, match="1 of 32 sampled hidden states are not finite"):
        _check_sample(sample, sample, "here")


@pytest.mark.parametrize(
    ("ids", "spoil", "words"),
    [
        (
            12,
            lambda found: HiddenStates(found.features_SC[:11], found.teacher),
            r"are 12, \[11, 15, bfloat16\], ",
        ),
        (
            12,
            lambda found: HiddenStates(found.features_SC, found.teacher[:, :4]),
            r", \[12, 4, bfloat16\]; every",
        ),
        (12, lambda found: HiddenStates(found.features_SC.float(), found.teacher), r"\[12, 15, float32\]"),
        (
            11,
            lambda found: found,
            r"are 11, .* every row of this training has 12, \[12, 15, bfloat16\], \[12, 5, bfloat16\]",
        ),
    ],
    ids=["a state short", "another width", "another dtype", "a token short"],
)
def test_states_that_are_not_those_of_a_row_are_refused_before_they_are_sent(
    ids: int, spoil: Callable[[HiddenStates], HiddenStates], words: str
) -> None:
    _check_own(4, torch.arange(12), states(), SHAPE)

    with pytest.raises(BorderError, match=words):
        _check_own(4, torch.arange(ids), spoil(states()), SHAPE)


class Batches:
    """An inbox with these depths and paces, of the same row."""

    def __init__(self, found: list[tuple[int, Pace]], *, transfer_s: float) -> None:
        self._found, self._transfer_s = found, transfer_s

    @property
    def depth(self) -> int:
        return self._found[0][0]

    def take(self) -> Arrived:
        _, pace = self._found.pop(0)
        return Arrived(0, torch.arange(12), states(), pace, self._transfer_s)

    def finish(self) -> int:
        return 0


class OneBatch:
    """An inbox that holds one batch."""

    depth = 1

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def take(self) -> Arrived:
        return Arrived(0, torch.tensor(self._ids), states(), Pace(0.1, 0.0), 0.01)


def test_depth_and_rate_are_of_the_window_and_the_first_batch_is_in_no_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches of two steps: what a batch took is the time from the one before, less the wait for it."""
    document = Document(ids=tuple(range(12)), loss_mask=(True,) * 12)
    dataset, roles = Dataset([document], None, row_tokens=12, seed=0), Roles(1, 1, queue_capacity=3)
    inbox, size_bytes = Batches([(2, Pace(5.0, 1.0)), (1, Pace(0.3, 0.2))], transfer_s=0.5), 12 * 20 * 2
    clock = iter([0.0, 7.0, 9.0, 9.4, 9.5])  # made; asked and came, twice
    monkeypatch.setattr(feed_module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    feed = QueuedFeed(dataset, inbox, roles, SHAPE, TrainSpec(num_steps=2, accumulation=1))  # type: ignore[arg-type]

    feed.take()
    first = feed.told()
    feed.take()
    second = feed.told()

    assert first == {"queue_depth": 2.0, "queue_capacity": 3.0, "transfer_bytes_per_s": size_bytes / 0.5}
    assert second == first | {"queue_depth": 1.0}
    assert feed.told() == {}
    told = feed.finish()
    assert told is not None
    assert told.startswith("drafter-bound: queue 2/3, hidden states travel at 0.00096 MB/s; targets wait 40% of their")
    assert "a batch takes a target rank 300 ms and a drafter rank 400 ms" in told


def test_tokens_that_are_not_those_of_the_drafters_own_row_are_refused_with_the_row() -> None:
    document = Document(ids=tuple(range(12)), loss_mask=(True,) * 12)
    dataset = Dataset([document], None, row_tokens=12, seed=0)

    def feed(ids: list[int]) -> QueuedFeed:
        return QueuedFeed(dataset, OneBatch(ids), ROLES, SHAPE, TrainSpec(num_steps=1))  # type: ignore[arg-type]

    assert torch.equal(feed(list(range(12))).take().row.input_ids_S, torch.arange(12))
    with pytest.raises(
        BorderError, match=r"rank 1 \(target 0\): 2 of its 12 tokens are not those of rows \[\(0, 0\)\]"
    ):
        feed([1, 0, *range(2, 12)]).take()
