"""Trees against brute force over all prefixes; walks, masks and estimators against loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from remote.drafter.tree import (
    Tree,
    build_tree,
    chain_lengths,
    coverage,
    top_marginals,
    tree_lengths,
    tree_mask,
    tree_positions,
    walk,
)


def marginals(depths: int, vocab: int, seed: int, *, blocks: int | None = None) -> Tensor:
    shape = (depths, vocab) if blocks is None else (blocks, depths, vocab)
    return (2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).log_softmax(-1)


def prefixes(tree: Tree) -> list[tuple[int, ...]]:
    """The tokens from the root to every drafted node."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*found[parent], token))
    return found[1:]


def all_prefixes(log_q: Tensor) -> dict[tuple[int, ...], float]:
    depths, vocab = log_q.shape
    return {
        prefix: sum(float(log_q[d, token]) for d, token in enumerate(prefix))
        for length in range(1, depths + 1)
        for prefix in itertools.product(range(vocab), repeat=length)
    }


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 40), st.integers(0, 10_000))
def test_nodes_are_the_most_probable_prefixes(depths: int, vocab: int, budget: int, seed: int) -> None:
    log_q = marginals(depths, vocab, seed)
    every = all_prefixes(log_q)

    tree = build_tree(log_q, budget)

    mine = prefixes(tree)
    assert len(set(mine)) == tree.num_nodes == min(budget, len(every))
    assert list(tree.scores) == pytest.approx(sorted(every.values(), reverse=True)[:budget])
    assert list(tree.scores) == pytest.approx([every[prefix] for prefix in mine])
    assert list(tree.depths) == [len(prefix) for prefix in mine]


@given(st.integers(1, 5), st.integers(2, 6), st.integers(1, 60), st.integers(0, 10_000))
def test_parents_come_before_children_and_smaller_trees_are_beginnings(
    depths: int, vocab: int, budget: int, seed: int
) -> None:
    log_q = marginals(depths, vocab, seed)

    tree, larger = build_tree(log_q, budget), build_tree(log_q, budget + 7)

    assert all(parent <= i for i, parent in enumerate(tree.parents))
    assert (larger.tokens[:budget], larger.parents[:budget]) == (tree.tokens, tree.parents)


def test_width_one_is_the_greedy_chain() -> None:
    log_q = marginals(6, 20, seed=3)

    tree = build_tree(log_q, 100, width=1)

    assert tree.tokens == tuple(log_q.argmax(1).tolist())
    assert tree.parents == (0, 1, 2, 3, 4, 5)


def test_candidate_tokens_name_the_columns() -> None:
    log_q = marginals(3, 30, seed=1)
    best = log_q.topk(8, dim=1)

    assert build_tree(best.values, 8, tokens_DK=best.indices) == build_tree(log_q, 8)


def test_impossible_prefixes_are_left_out() -> None:
    log_q = torch.tensor([[0.0, -math.inf, -math.inf], [math.log(0.5), math.log(0.5), -math.inf]])

    tree = build_tree(log_q, 50)

    assert prefixes(tree) == [(0,), (0, 0), (0, 1)]


@pytest.mark.parametrize(("budget", "width"), [(0, None), (4, 0)])
def test_empty_budget_is_refused(budget: int, width: int | None) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        build_tree(marginals(2, 3, seed=0), budget, width=width)


@pytest.mark.slow
@given(st.integers(1, 4), st.integers(2, 4), st.integers(1, 30), st.integers(0, 10_000))
def test_walk_accepts_the_longest_prefix_the_target_agrees_with(
    depths: int, vocab: int, budget: int, seed: int
) -> None:
    """The target is a function from prefix to next token; without a tree it would write `text`."""
    tree = build_tree(marginals(depths, vocab, seed), budget)
    source = torch.Generator().manual_seed(seed)
    after: dict[tuple[int, ...], int] = {}

    def target(prefix: tuple[int, ...]) -> int:
        return after.setdefault(prefix, int(torch.randint(vocab, (), generator=source)))

    text: tuple[int, ...] = ()
    for _ in range(depths + 1):
        text = (*text, target(text))

    result = walk(tree, [target(prefix) for prefix in [(), *prefixes(tree)]])

    held = {(), *prefixes(tree)}
    longest = max(length for length in range(depths + 1) if text[:length] in held)
    committed = [prefixes(tree)[node - 1][-1] for node in result.path[1:]] + [result.bonus]
    assert result.acceptance_length == longest + 1
    assert tuple(committed) == text[: longest + 1]


def test_walk_wants_one_token_for_every_node() -> None:
    with pytest.raises(ValueError, match="5 nodes with its root; posterior has 4"):
        walk(build_tree(marginals(2, 3, seed=0), 4), [0, 0, 0, 0])


def test_mask_shows_past_ancestors_and_self() -> None:
    tree = build_tree(marginals(3, 4, seed=2), 12)
    paths = [set(), *(set() for _ in range(12))]
    for node, parent in enumerate(tree.parents, start=1):
        paths[node] = paths[parent] | {parent}

    mask = tree_mask(tree, num_past=3)

    assert mask.shape == (13, 16)
    for node in range(13):
        assert mask[node].tolist() == [True] * 3 + [other == node or other in paths[node] for other in range(13)]
    assert tree_positions(tree, 7).tolist() == [7, *(7 + depth for depth in tree.depths)]


def estimator_case(
    seed: int = 0, *, blocks: int = 40, depths: int = 5, vocab: int = 6
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Labels follow the marginals; a block's labels stop early now and then."""
    log_q = marginals(depths, vocab, seed, blocks=blocks)
    source = torch.Generator().manual_seed(seed + 1)
    label = torch.multinomial(log_q.exp().view(-1, vocab), 1, generator=source).view(blocks, depths)
    supervised = torch.arange(depths) < torch.randint(1, depths + 2, (blocks, 1), generator=source)
    best = log_q.sort(dim=-1, descending=True)
    return best.values, best.indices, label, supervised


def test_chain_and_tree_lengths_equal_walks_with_the_data() -> None:
    log_q, tokens, label, supervised = estimator_case()

    chain = chain_lengths(tokens, label, supervised)
    trees = tree_lengths(log_q, tokens, label, supervised, budgets=[64, 1, 8])

    assert list(trees) == [1, 8, 64]
    for block in range(40):
        wanted = label[block][supervised[block]].tolist()
        greedy = tokens[block, :, 0].tolist()
        assert int(chain[block]) == 1 + next(
            (i for i, (g, w) in enumerate(zip(greedy, wanted, strict=False)) if g != w), len(wanted)
        )
        for budget, lengths in trees.items():
            held = prefixes(build_tree(log_q[block], budget, tokens_DK=tokens[block]))
            longest = max((i for i in range(1, len(wanted) + 1) if tuple(wanted[:i]) in held), default=0)
            assert int(lengths[block]) == longest + 1


def test_wide_trees_reach_further_than_the_chain() -> None:
    log_q, tokens, label, supervised = estimator_case(blocks=200)

    chain = chain_lengths(tokens, label, supervised).double().mean()
    by_budget = tree_lengths(log_q, tokens, label, supervised, budgets=[16, 32, 64, 128])

    means = [float(lengths.double().mean()) for lengths in by_budget.values()]
    assert float(chain) < means[0]
    assert means == sorted(means)


def test_block_without_labels_counts_the_bonus_token_alone() -> None:
    log_q, tokens, label, supervised = estimator_case(blocks=1)

    none = torch.zeros_like(supervised)

    assert chain_lengths(tokens, label, none).tolist() == [1]
    assert tree_lengths(log_q, tokens, label, none, budgets=[4])[4].tolist() == [1]


def test_coverage_is_conditional_on_the_depths_before() -> None:
    _, tokens, label, supervised = estimator_case(blocks=300)

    shares = coverage(tokens, label, supervised, widths=[1, 3, 6])

    for width, by_depth in shares.items():
        for depth in range(5):
            cases, hits = 0, 0
            for block in range(300):
                inside = [
                    bool(supervised[block, d]) and int(label[block, d]) in tokens[block, d, :width].tolist()
                    for d in range(depth + 1)
                ]
                if all(inside[:depth]) and supervised[block, depth]:
                    cases, hits = cases + 1, hits + inside[depth]
            assert by_depth[depth] == pytest.approx(hits / cases)
    assert shares[6] == [1.0] * 5


def test_coverage_of_a_depth_nobody_reached_is_not_a_number() -> None:
    _, tokens, label, supervised = estimator_case(blocks=2)

    shares = coverage(tokens, torch.full_like(label, 99), supervised, widths=[2])

    assert shares[2][0] == 0.0
    assert math.isnan(shares[2][1])


def test_top_marginals_are_the_heads_own_whatever_the_chunk() -> None:
    source = torch.Generator().manual_seed(0)
    hidden_TH, head_VH = torch.randn(11, 8, generator=source), torch.randn(50, 8, generator=source)

    log_q, tokens = top_marginals(hidden_TH, head_VH, width=7, chunk_tokens=4)

    best = (hidden_TH @ head_VH.T).log_softmax(-1).topk(7)
    assert torch.equal(tokens, best.indices)
    assert torch.allclose(log_q, best.values, atol=1e-6)
