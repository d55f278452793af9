"""Draft trees (DDTree, arXiv 2604.12989): build the most probable prefixes, walk them, and estimate without decoding.

Shapes: D drafted depths (slots 1 .. B-1), K candidate tokens per depth, V vocabulary, n nodes, N blocks, T block tokens.

A block drafts one marginal per depth. Under their product the n most probable prefixes form a tree: a prefix is never
less probable than its extensions. Node 0 is the root, the anchor's token; drafted nodes are 1 .. n, parents before
children. The heap is host work, a few microseconds a node. Decoding with a target lives in `decode`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from remote.drafter.logits import head_logits


@dataclass(frozen=True)
class Tree:
    """Drafted nodes in order of falling probability; entry i describes node i+1."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # node numbers, 0 is the root
    depths: tuple[int, ...]  # 1 for children of the root
    scores: tuple[float, ...]  # log-probability of the prefix, nats

    @property
    def num_nodes(self) -> int:
        """Drafted nodes, the root not counted."""
        return len(self.tokens)

    def children(self) -> dict[tuple[int, int], int]:
        """(parent, token) -> node."""
        return {(parent, token): i + 1 for i, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True))}


@dataclass(frozen=True)
class Walk:
    """What the target accepts of a tree."""

    path: tuple[int, ...]  # accepted nodes from the root on, root included
    bonus: int  # the target's own token after the last of them

    @property
    def acceptance_length(self) -> int:
        """Tokens this round commits: the drafted ones accepted, and the bonus token."""
        return len(self.path)


def build_tree(log_q_DK: Tensor, budget: int, *, tokens_DK: Tensor | None = None, width: int | None = None) -> Tree:
    """The `budget` most probable prefixes under the product of the marginals, best first.

    `log_q_DK` holds log-probabilities; without `tokens_DK` its columns are token ids. `width` limits the
    candidates per depth: width 1 is the greedy chain. Equal scores: the one found first. Fewer nodes where the
    candidates run out.
    """
    if budget < 1 or (width is not None and width < 1):
        raise ValueError(f"a tree needs a budget and a width of at least 1; budget is {budget}, width is {width}")
    num_candidates = min(log_q_DK.shape[1], budget, width or budget)
    best = log_q_DK.topk(num_candidates, dim=1)
    token_DK = best.indices if tokens_DK is None else tokens_DK.gather(1, best.indices)
    return _best_first(best.values.tolist(), token_DK.tolist(), budget)


def walk(tree: Tree, posterior: Sequence[int]) -> Walk:
    """Follows the target: `posterior[i]` is its token after node i (root first), n+1 of them."""
    if len(posterior) != tree.num_nodes + 1:
        raise ValueError(
            f"the tree has {tree.num_nodes + 1} nodes with its root; posterior has {len(posterior)} tokens"
        )
    children = tree.children()
    path = [0]
    while (child := children.get((path[-1], posterior[path[-1]]))) is not None:
        path.append(child)
    return Walk(tuple(path), posterior[path[-1]])


def tree_mask(tree: Tree, *, num_past: int, device: torch.device | str = "cpu") -> Tensor:
    """Who sees whom when the target verifies root and nodes: bool (n+1, num_past+n+1), past, ancestors and self."""
    size = tree.num_nodes + 1
    inside = torch.eye(size, dtype=torch.bool)
    for node, parent in enumerate(tree.parents, start=1):
        inside[node] |= inside[parent]
    return torch.cat([torch.ones(size, num_past, dtype=torch.bool), inside], dim=1).to(device)


def tree_positions(tree: Tree, start: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Positions of root and nodes in the text, int64 (n+1,); the root stands at `start`."""
    return torch.tensor([0, *tree.depths], device=device) + start


@torch.no_grad()
def top_marginals(hidden_TH: Tensor, head_VH: Tensor, *, width: int, chunk_tokens: int = 2048) -> tuple[Tensor, Tensor]:
    """The `width` most probable tokens of every slot: log-probabilities (T, K) and token ids (T, K), falling."""
    values, tokens = [], []
    for hidden in hidden_TH.split(chunk_tokens):
        logits = head_logits(hidden, head_VH)
        best = logits.topk(min(width, logits.shape[1]), dim=1)
        values.append(best.values - logits.logsumexp(1, keepdim=True))
        tokens.append(best.indices)
    return torch.cat(values), torch.cat(tokens)


def chain_lengths(tokens_NDK: Tensor, label_ND: Tensor, supervised_ND: Tensor) -> Tensor:
    """Chain-τ per block, int64 (N,): leading greedy tokens that equal the data, plus the bonus token.

    A slot without a label ends the walk, in the tree as in the chain.
    """
    right_ND = (tokens_NDK[..., 0] == label_ND) & supervised_ND
    return right_ND.cumprod(1).sum(1) + 1


def tree_lengths(
    log_q_NDK: Tensor, tokens_NDK: Tensor, label_ND: Tensor, supervised_ND: Tensor, *, budgets: Iterable[int]
) -> dict[int, Tensor]:
    """Tree-τ(n) per block, int64 (N,) for every budget n: the walk along the data's tokens, plus the bonus token.

    One tree is built per block: best first, the tree of a smaller budget is its beginning.
    """
    sizes = sorted(set(budgets))
    lengths = torch.ones(len(sizes), log_q_NDK.shape[0], dtype=torch.int64)
    log_q, tokens, labels = log_q_NDK.cpu(), tokens_NDK.cpu(), label_ND.tolist()
    walkable = supervised_ND.cumprod(1).sum(1).tolist()
    for block, num_labels in enumerate(walkable):
        if num_labels == 0:
            continue
        tree = build_tree(log_q[block], sizes[-1], tokens_DK=tokens[block])
        path = _data_path(tree, labels[block][:num_labels])
        for row, budget in enumerate(sizes):
            lengths[row, block] += sum(node <= budget for node in path)
    return dict(zip(sizes, lengths, strict=True))


def coverage(
    tokens_NDK: Tensor, label_ND: Tensor, supervised_ND: Tensor, *, widths: Iterable[int]
) -> dict[int, list[float]]:
    """Per width K and depth k: the share of labels among the K most probable, given that all depths before were.

    NaN where no block got that far.
    """
    shares = {}
    for width in widths:
        covered_ND = (tokens_NDK[..., :width] == label_ND[..., None]).any(-1) & supervised_ND
        reached_ND = torch.ones_like(covered_ND)
        reached_ND[:, 1:] = covered_ND.cumprod(1)[:, :-1].bool()
        cases_ND = reached_ND & supervised_ND
        share_D = (covered_ND & cases_ND).sum(0).double() / cases_ND.sum(0)
        shares[width] = share_D.tolist()
    return shares


def _best_first(log_q: list[list[float]], tokens: list[list[int]], budget: int) -> Tree:
    """Pops the best prefix; pushes its next sibling and its first child. Candidates fall within each depth.

    Impossible prefixes (log-probability -inf) are left out.
    """
    nodes: list[tuple[int, int, int, float]] = []  # token, parent, depth, score
    heap: list[tuple[float, int, int, int, int, float]] = []
    order = itertools.count()

    def push(depth: int, rank: int, parent: int, parent_score: float) -> None:
        if depth <= len(log_q) and rank < len(log_q[depth - 1]):
            score = parent_score + log_q[depth - 1][rank]
            heapq.heappush(heap, (-score, next(order), depth, rank, parent, parent_score))

    push(1, 0, 0, 0.0)
    while heap and len(nodes) < budget and heap[0][0] < math.inf:
        negative, _, depth, rank, parent, parent_score = heapq.heappop(heap)
        nodes.append((tokens[depth - 1][rank], parent, depth, -negative))
        push(depth, rank + 1, parent, parent_score)
        push(depth + 1, 0, len(nodes), -negative)
    return Tree(*map(tuple, zip(*nodes, strict=True))) if nodes else Tree((), (), (), ())


def _data_path(tree: Tree, labels: list[int]) -> list[int]:
    """The nodes along the data's tokens, as far as the tree holds them."""
    children, path, node = tree.children(), [], 0
    for label in labels:
        child = children.get((node, label))
        if child is None:
            break
        path.append(child)
        node = child
    return path
