"""Whose each micro-batch is: every one has one drafter and one target, whatever the numbers of ranks."""

from __future__ import annotations

import pytest

from remote.drafter.log import peers_rank
from remote.drafter.step import ON_PEER
from remote.roles import Roles


@pytest.mark.parametrize(
    "roles",
    [
        *(Roles(1, 1), Roles(3, 5), Roles(2, 1), Roles(4, 2)),
        *(Roles(5, 3, num_nodes=2), Roles(6, 2, num_nodes=2), Roles(40, 24, num_nodes=8), Roles(4, 0, num_nodes=2)),
    ],
    ids=str,
)
def test_every_micro_batch_has_one_rank_of_each_role(roles: Roles) -> None:
    first, last = 7 * roles.num_drafters, 19 * roles.num_drafters

    trained = sorted(m for rank in roles.drafters for m in roles.share(rank, first, last))
    computed = sorted(m for rank in roles.targets for m in roles.share(rank, first, last))

    assert trained == list(range(first, last))
    assert all(m in roles.share(roles.drafter_of(m), first, last) for m in trained)
    assert sorted([*roles.drafters, *roles.targets]) == list(range(roles.num_ranks))
    assert (roles.drafters[0], len(roles.drafters)) == (0, roles.num_drafters)
    if roles.num_targets:
        assert computed == trained
        assert all(m in roles.share(roles.target_of(m), first, last) for m in trained)


@pytest.mark.parametrize(
    "roles", [Roles(2, 2, num_nodes=2), Roles(6, 4, num_nodes=2), Roles(40, 24, num_nodes=8)], ids=str
)
def test_over_hosts_hidden_states_stay_on_theirs_where_both_roles_can_be_shared_out(roles: Roles) -> None:
    each = roles.num_ranks // roles.num_nodes

    assert all(roles.drafter_of(m) // each == roles.target_of(m) // each for m in range(500))
    assert [sum(rank // each == node for rank in roles.drafters) for node in range(roles.num_nodes)] == [
        roles.num_drafters // roles.num_nodes
    ] * roles.num_nodes


def test_roles_that_cannot_be_shared_out_lie_one_after_the_other() -> None:
    roles = Roles(num_drafters=1, num_targets=3, num_nodes=2)

    assert (roles.drafters, roles.targets) == ([0], [1, 2, 3])


def test_each_step_gives_every_drafter_as_many_micro_batches() -> None:
    roles, accumulation = Roles(num_drafters=3), 6

    for step in range(4):
        span = step * accumulation, (step + 1) * accumulation
        assert [len(roles.share(rank, *span)) for rank in roles.drafters] == [2, 2, 2]


def test_a_rank_is_named_with_its_role() -> None:
    assert [Roles(1, 2).name(rank) for rank in range(3)] == [
        "rank 0 (drafter 0)",
        "rank 1 (target 0)",
        "rank 2 (target 1)",
    ]
    assert [Roles(2, 2, num_nodes=2).name(rank) for rank in (1, 2)] == [
        "rank 1 (target 0, node 0)",
        "rank 2 (drafter 1, node 1)",
    ]


def test_a_loss_of_another_drafter_is_of_the_rank_that_has_its_place_among_them() -> None:
    """Over hosts that is not the drafter of that number."""
    roles = Roles(num_drafters=4, num_targets=4, num_nodes=2)

    ranks = [peers_rank(f"{ON_PEER}{index}", roles) for index in range(4)]

    assert ranks == roles.drafters
    assert [roles.title(rank) for rank in ranks] == ["drafter 0", "drafter 2", "drafter 1", "drafter 3"]
