"""Which role holds the other up, and how many of each would balance."""

from __future__ import annotations

import pytest

from remote.balance import Pace, Sides, sentence


def sides(target: Pace, drafter: Pace, *, ranks: tuple[int, int] = (5, 3)) -> Sides:
    return Sides(*ranks, target, drafter)


@pytest.mark.parametrize(
    ("target", "drafter", "bound"),
    [
        (Pace(0.25, 0.15), Pace(0.9, 0.01), "drafter-bound"),
        (Pace(0.9, 0.01), Pace(0.25, 0.15), "target-bound"),
        (Pace(0.5, 0.01), Pace(0.5, 0.01), "balanced"),
    ],
)
def test_the_side_that_is_waited_for_is_named(target: Pace, drafter: Pace, bound: str) -> None:
    assert sides(target, drafter).bound == bound


def test_the_balance_is_the_ratio_of_seconds_a_batch() -> None:
    """A batch takes a target 0.2 s and a drafter 0.6 s: of eight ranks two targets keep six drafters busy."""
    assert sides(Pace(0.2, 0.5), Pace(0.6, 0.0)).balanced == (2, 6)


@pytest.mark.parametrize(("target_s", "expected"), [(1e-6, (1, 7)), (1e6, (7, 1))])
def test_no_role_is_ever_left_without_a_rank(target_s: float, expected: tuple[int, int]) -> None:
    assert sides(Pace(target_s, 0.0), Pace(1.0, 0.0)).balanced == expected


def test_the_sentence_tells_queue_waits_and_the_ranks_that_would_balance() -> None:
    told = sentence(sides(Pace(0.2, 0.3), Pace(0.6, 0.0)), depth=20.0, capacity=20, bytes_per_s=383e9)

    assert told == (
        "drafter-bound: queue 20/20, hidden states travel at 383 GB/s; targets wait 60% of their time, drafters 0%; a batch takes a target rank 200 ms "
        "and a drafter rank 600 ms; 2 target and 6 drafter ranks would balance it, these are 5 and 3"
    )


@pytest.mark.parametrize(("seconds", "told"), [(0.9996, "1.00 s"), (0.9994, "999 ms"), (0.0012, "1.2 ms")])
def test_seconds_of_a_batch_read_as_people_write_them(seconds: float, told: str) -> None:
    assert f"a drafter rank {told};" in sentence(sides(Pace(0.2, 0.3), Pace(seconds, 0.0)), depth=1.0, capacity=2)


def test_where_no_other_division_is_better_the_ratio_is_told() -> None:
    told = sentence(sides(Pace(0.01, 0.5), Pace(0.5, 0.0), ranks=(1, 1)), depth=2.0, capacity=2)

    assert told.endswith("the balance is 0.02 target ranks for each drafter, these are 1 and 1")
