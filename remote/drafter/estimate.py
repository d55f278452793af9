"""What drafting would accept, estimated from one forward pass over finished texts, without decoding.

A block is drafted at every answer token that has a whole block of answer after it, and compared with the
text: chain-τ is the leading right guesses plus the bonus token, tree-τ(n) the walk in a tree of n nodes.
For greedy answers of the target this is what greedy decoding accepts when it happens to stand there; decoding
itself stands only where its rounds end, so the two differ a little.

Shapes: S text tokens, N anchors, B block size, D = B - 1 drafted slots, K candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from remote.drafter.blocks import Row, build_blocks
from remote.drafter.decode import Decoded
from remote.drafter.model import DFlashDrafter
from remote.drafter.target import Target
from remote.drafter.target_files import Progress, silent
from remote.drafter.tree import chain_lengths, coverage, top_marginals, tree_lengths

COVERAGE_WIDTHS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Estimates:
    """Mean lengths of each text, in tokens with the bonus; a text too short for one block is not in them."""

    chain_tau: tuple[float, ...]
    tree_tau: dict[int, tuple[float, ...]]  # by node budget
    coverage: dict[int, list[float]]  # by K: P(label among the K best of slot k | the slots before covered), k = 1 ..


def estimate(
    drafter: DFlashDrafter,
    target: Target,
    texts: Sequence[tuple[Sequence[int], Decoded]],
    *,
    budgets: Sequence[int],
    progress: Progress = silent,
) -> Estimates:
    """`texts` are prompts with the target's own answers to them."""
    drafter = drafter.for_any_shape()  # every text has a length of its own
    say = partial(progress, "estimating acceptance", total=len(texts), unit="texts")
    guesses, chain, trees = [], list[float](), {budget: list[float]() for budget in budgets}
    for done, (prompt, text) in enumerate(texts):
        say(done=done)
        guess = _guess(drafter, target, prompt, text.ids, width=max(budgets))
        if not len(guess.label_ND):
            continue
        guesses.append(guess)
        supervised_ND = torch.ones_like(guess.label_ND, dtype=torch.bool)
        chain.append(float(chain_lengths(guess.tokens_NDK, guess.label_ND, supervised_ND).double().mean()))
        lengths = tree_lengths(guess.log_q_NDK, guess.tokens_NDK, guess.label_ND, supervised_ND, budgets=budgets)
        for budget, length_N in lengths.items():
            trees[budget].append(float(length_N.double().mean()))
    if texts:
        say(done=len(texts))
    return Estimates(
        chain_tau=tuple(chain),
        tree_tau={budget: tuple(means) for budget, means in trees.items()},
        coverage=_coverage(guesses),
    )


@dataclass(frozen=True)
class _Guess:
    """What the drafter says at every anchor of one text."""

    log_q_NDK: Tensor
    tokens_NDK: Tensor
    label_ND: Tensor


@torch.no_grad()
def _guess(
    drafter: DFlashDrafter, target: Target, prompt: Sequence[int], answer: Sequence[int], *, width: int
) -> _Guess:
    spec = drafter.spec
    ids_S = torch.tensor([*prompt, *answer])
    row = Row(
        input_ids_S=ids_S,
        document_S=torch.zeros_like(ids_S),
        position_S=torch.arange(len(ids_S)),
        loss_mask_S=torch.arange(len(ids_S)) >= len(prompt),
    )
    anchors_N = torch.arange(len(prompt), max(len(ids_S) - spec.block_size + 1, len(prompt)))
    if not len(anchors_N):
        nothing = torch.zeros(0, spec.block_size - 1, dtype=torch.long)
        return _Guess(nothing[..., None].float(), nothing[..., None], nothing)
    keep_N = torch.ones_like(anchors_N, dtype=torch.bool)
    blocks = build_blocks(row, anchors_N, keep_N, block_size=spec.block_size, mask_token_id=spec.mask_token_id)
    features_SC, _ = target.capture(row.input_ids_S, row.document_S, row.position_S, layers=spec.captured_layers)
    row, blocks = row.to(target.device), blocks.to(target.device)
    hidden_TH = drafter(features_SC, target.embed(blocks.ids_T), row, blocks)
    drafted_TH = hidden_TH.unflatten(0, (-1, spec.block_size))[:, 1:].flatten(0, 1).to(target.dtype)
    log_q_TK, tokens_TK = top_marginals(drafted_TH, target.head_VH, width=max(width, *COVERAGE_WIDTHS))
    shape = (len(anchors_N), spec.block_size - 1)
    label_ND = blocks.label_T.unflatten(0, (-1, spec.block_size))[:, 1:]
    return _Guess(log_q_TK.unflatten(0, shape).cpu(), tokens_TK.unflatten(0, shape).cpu(), label_ND.cpu())


def _coverage(guesses: Sequence[_Guess]) -> dict[int, list[float]]:
    if not guesses:
        return {}
    tokens_NDK = torch.cat([guess.tokens_NDK for guess in guesses])
    label_ND = torch.cat([guess.label_ND for guess in guesses])
    return coverage(tokens_NDK, label_ND, torch.ones_like(label_ND, dtype=torch.bool), widths=COVERAGE_WIDTHS)
