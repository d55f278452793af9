"""Position weights: published sums, and D-PACE and streaks against loops over one block."""

from __future__ import annotations

import math

import pytest
import torch

from remote.drafter.weights import (
    dpace_weights,
    exponential_weights,
    position_weights,
    streak_factor,
    streak_lengths,
)
from remote.spec import LossSpec


def grid(seed: int, *, blocks: int = 20, size: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cross-entropies, right slots and supervised slots; slot 0 is neither right nor supervised."""
    source = torch.Generator().manual_seed(seed)
    ce_NB = torch.rand(blocks, size, generator=source, dtype=torch.float64) * 3
    supervised_NB = torch.rand(blocks, size, generator=source) < 0.7
    supervised_NB[:, 0] = False
    right_NB = (torch.rand(blocks, size, generator=source) < 0.6) & supervised_NB
    return ce_NB, right_NB, supervised_NB


@pytest.mark.parametrize(
    ("size", "gamma", "total", "last"),
    [(16, 7, 6.631, 0.135), (24, 10, 9.455, 0.111), (32, 10, 10.035, 0.050), (32, 7, 7.422, 0.014)],
)
def test_exponential_weights_have_the_published_sums(size: int, gamma: float, total: float, last: float) -> None:
    weight_B = exponential_weights(torch.zeros(1, size, dtype=torch.float64), gamma=gamma)[0]

    assert float(weight_B[1]) == 1.0
    assert float(weight_B[1:].sum()) == pytest.approx(total, abs=5e-4)
    assert float(weight_B[-1]) == pytest.approx(last, abs=5e-4)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dpace_weights_sum_the_chains_that_pass_a_slot(alpha: float) -> None:
    ce_NB, _, supervised_NB = grid(1)

    weight_NB = dpace_weights(ce_NB, supervised_NB, alpha=alpha)

    for b in range(20):
        for k in range(1, 6):
            expected = 0.0
            for j in range(k, 6):
                if supervised_NB[b, j]:
                    inside = [i for i in range(1, j + 1) if supervised_NB[b, i]]
                    expected += math.prod((1 - alpha) * math.exp(-float(ce_NB[b, i])) + alpha for i in inside)
            assert float(weight_NB[b, k]) == pytest.approx(expected)


def test_dpace_of_a_certain_drafter_counts_the_slots_that_follow() -> None:
    supervised_NB = torch.tensor([[False, True, True, True]])

    assert dpace_weights(torch.zeros(1, 4), supervised_NB, alpha=0.5)[0, 1:].tolist() == [3.0, 2.0, 1.0]


def test_streak_factor_and_length_follow_unbroken_right_slots() -> None:
    _, right_NB, supervised_NB = grid(2)

    factor_NB, length_N = streak_factor(right_NB, supervised_NB, beta=2.0), streak_lengths(right_NB, supervised_NB)

    for b in range(20):
        unbroken, length = True, 0
        for k in range(1, 6):
            assert float(factor_NB[b, k]) == (3.0 if unbroken else 1.0)
            if supervised_NB[b, k]:
                unbroken = unbroken and bool(right_NB[b, k])
                length += unbroken
        assert int(length_N[b]) == length


@pytest.mark.parametrize("decay", ["exponential", "dpace", "none"])
def test_unsupervised_slots_weigh_nothing(decay: str) -> None:
    ce_NB, right_NB, supervised_NB = grid(3)

    weight_NB = position_weights(ce_NB, right_NB, supervised_NB, LossSpec(decay=decay, streak_beta=0.5))

    assert not weight_NB[~supervised_NB].any()
    assert (weight_NB[supervised_NB] > 0).all()
