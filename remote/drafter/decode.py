"""Decoding with the target alone, with a drafted chain, and with a drafted tree (DDTree).

All three commit only tokens the target itself chooses: greedily, or by one draw a token from its own
distribution, taken in the order of the text. Drafting therefore changes how many target passes a text
needs and nothing else; a draw meets the same distribution with and without a drafter.

Sources: z-lab/dflash `dflash_generate` (chain), arXiv 2604.12989 (tree). Shapes: V vocabulary, B block
size, Q verified tokens, C captured features. It measures nothing but rounds and seconds; `evaluate` compares.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from remote.drafter.answers import choose
from remote.drafter.decoder import Pass, View
from remote.drafter.model import DFlashDrafter, DraftCache
from remote.drafter.target import Target
from remote.drafter.tree import build_tree, top_marginals, tree_mask, tree_positions, walk


@dataclass(frozen=True)
class Setting:
    """How a text is decoded, whatever drafts it."""

    max_new_tokens: int
    temperature: float = 0.0  # 0 is greedy
    seed: int = 0  # of the draws, where the temperature is not 0


@dataclass(frozen=True)
class Decoded:
    """One text and what it took."""

    ids: tuple[int, ...]  # at most max_new_tokens, up to and with the token that ends it
    accepted: tuple[int, ...]  # tokens each round committed, 1 to B; the last may reach past the end of the text
    seconds: float  # without the prompt's pass and the first draft
    num_timed_tokens: int  # of `ids`, made in those seconds: all but the first, which the prompt's pass gives


def decode_plain(target: Target, prompt: Sequence[int], setting: Setting) -> Decoded:
    """One target pass a token: what drafting is measured against."""
    text = _Text(target, prompt, setting, layers=())
    started = time.perf_counter()
    while not text.is_done:
        states = text.verify([text.token])
        text.commit([0], text.posterior(states)[0], states)
    return text.decoded(time.perf_counter() - started)


def decode_chain(target: Target, drafter: DFlashDrafter, prompt: Sequence[int], setting: Setting) -> Decoded:
    """Every round drafts B - 1 tokens greedily and keeps those the target would have chosen, and its next one."""

    def play(text: _Text, hidden_DH: Tensor) -> None:
        # As the tree takes its candidates: bfloat16 logits tie, and a few drafts in a hundred would be other tokens.
        draft: list[int] = top_marginals(hidden_DH, target.head_VH, width=1)[1][:, 0].tolist()
        states = text.verify([text.token, *draft])
        posterior = text.posterior(states)
        length = 0
        while length < len(draft) and posterior[length] == draft[length]:
            length += 1
        text.commit(list(range(length + 1)), posterior[length], states)

    return _speculate(target, drafter, _Text(target, prompt, setting, layers=drafter.spec.captured_layers), play)


def decode_tree(
    target: Target,
    drafter: DFlashDrafter,
    prompt: Sequence[int],
    setting: Setting,
    *,
    budget: int,
    width: int | None = None,
) -> Decoded:
    """Every round drafts the `budget` most probable prefixes and follows the target through them.

    `width` limits the candidates of each slot; width 1 accepts exactly what the chain accepts.
    """

    def play(text: _Text, hidden_DH: Tensor) -> None:
        log_q_DK, tokens_DK = top_marginals(hidden_DH, target.head_VH, width=min(budget, width or budget))
        tree = build_tree(log_q_DK, budget, tokens_DK=tokens_DK, width=width)
        view = View(allow_QQ=tree_mask(tree, num_past=0, device=target.device))
        states = text.verify([text.token, *tree.tokens], tree_positions(tree, 0), view)
        walked = walk(tree, text.posterior(states))
        text.commit(list(walked.path), walked.bonus, states)

    return _speculate(target, drafter, _Text(target, prompt, setting, layers=drafter.spec.captured_layers), play)


@torch.no_grad()
def replay_chain(
    target: Target, drafter: DFlashDrafter, prompt: Sequence[int], plain: Decoded, setting: Setting
) -> tuple[int, ...]:
    """`Decoded.accepted` of `decode_chain`, where the target's own text is known: its passes over drafts are spared.

    After every right draft the target says what it has said in `plain`, and a slot behind a wrong one is not asked for.
    Equal to decoding but for near ties, which one wide pass over the text may round differently.
    """
    spec, seen, accepted = drafter.spec, DraftCache(drafter.spec.num_layers), list[int]()
    masks = [spec.mask_token_id] * (spec.block_size - 1)
    text, ids_S = list(plain.ids), torch.tensor([*prompt, *plain.ids])
    position_S, layers = torch.arange(len(ids_S)), spec.captured_layers
    features_SC, _ = target.capture(ids_S, torch.zeros_like(ids_S), position_S, layers=layers)
    anchor, num_read = 0, 0
    while anchor < len(plain.ids) - 1:
        block_B = torch.tensor([text[anchor], *masks], device=target.device)
        new_MC, num_read = features_SC[num_read : len(prompt) + anchor], len(prompt) + anchor
        hidden_DH = drafter.draft(new_MC, seen, target.embed(block_B)).to(target.dtype)[1:]
        right = 0
        for hidden_H in hidden_DH:
            place = anchor + 1 + right
            if place == len(text):  # drafted past the end of the text, which decoding does too
                text.append(_next_token(target, prompt, text, setting))
            if int(top_marginals(hidden_H[None], target.head_VH, width=1)[1]) != text[place]:
                break
            right += 1
        accepted.append(right + 1)
        anchor += right + 1
    return tuple(accepted)


def _speculate(target: Target, drafter: DFlashDrafter, text: _Text, play: Callable[[_Text, Tensor], None]) -> Decoded:
    """Draft, verify, commit until the text is done. The first draft is not timed: it reads the whole prompt."""
    spec, seen = drafter.spec, DraftCache(drafter.spec.num_layers)
    masks = [spec.mask_token_id] * (spec.block_size - 1)
    started = time.perf_counter()
    is_first = True
    while not text.is_done:
        block_B = torch.tensor([text.token, *masks], device=target.device)
        hidden_BH = drafter.draft(text.take_features(), seen, target.embed(block_B)).to(target.dtype)
        if is_first:
            _wait_for(target.device)
            started, is_first = time.perf_counter(), False
        play(text, hidden_BH[1:])
    return text.decoded(time.perf_counter() - started)


class _Text:
    """One text in the making: the target's cache holds everything before `token`, which is chosen but not yet read."""

    @torch.no_grad()
    def __init__(self, target: Target, prompt: Sequence[int], setting: Setting, *, layers: Sequence[int]) -> None:
        self.target, self.setting, self.layers = target, setting, layers
        self.generator = torch.Generator().manual_seed(setting.seed)
        self.cache = target.new_cache(capacity=len(prompt) + setting.max_new_tokens + 64)
        self.ids: list[int] = []
        self.accepted: list[int] = []
        states = self.verify(list(prompt))
        self._features_MC = states.features_BQC[0]
        self.token = _Posterior(self, states.last_hidden_BQH[0, -1:])[0]
        self.ids.append(self.token)

    @property
    def is_done(self) -> bool:
        return len(self.ids) >= self.setting.max_new_tokens or not self.target.stop_ids.isdisjoint(self.ids)

    def take_features(self) -> Tensor:
        """Features [M, C] of the positions read since the last call: new context for the drafter."""
        taken, self._features_MC = self._features_MC, self._features_MC[:0]
        return taken

    @torch.no_grad()
    def verify(self, ids: Sequence[int], depth_Q: Tensor | None = None, view: View | None = None) -> Pass:
        """Reads tokens after what is cached: one after the other, or as a tree with a depth each."""
        depth_Q = torch.arange(len(ids)) if depth_Q is None else depth_Q
        position_BQ = (depth_Q + self.cache.length)[None].to(self.target.device)
        self._read = list(ids)
        ids_BQ = torch.tensor([self._read], device=self.target.device)
        return self.target.step(ids_BQ, position_BQ, cache=self.cache, layers=self.layers, view=view)

    def posterior(self, states: Pass) -> _Posterior:
        return _Posterior(self, states.last_hidden_BQH[0])

    def commit(self, path: list[int], bonus: int, states: Pass) -> None:
        """Keeps the tokens at `path` of those last read (the first is `token` itself), then the target's own next one."""
        start = self.cache.length - len(self._read)
        if path == list(range(len(path))):
            self.cache.crop(start + len(path))
        else:
            self.cache.compact(start, path)
        features_QC = states.features_BQC[0]
        self._features_MC = torch.cat([self._features_MC, features_QC[torch.tensor(path, device=features_QC.device)]])
        self.ids += [*(self._read[index] for index in path[1:]), bonus]
        self.token = bonus
        self.accepted.append(len(path))

    def decoded(self, seconds: float) -> Decoded:
        ids = self.ids[: self.setting.max_new_tokens]
        ends = [index + 1 for index, token in enumerate(ids) if token in self.target.stop_ids]
        ids = ids[: ends[0]] if ends else ids
        return Decoded(
            ids=tuple(ids), accepted=tuple(self.accepted), seconds=seconds, num_timed_tokens=max(0, len(ids) - 1)
        )


class _Posterior(Sequence[int]):
    """The target's own token after each verified one.

    Sampled tokens are drawn when first asked for: only along the walked path, in the order of the text, as
    decoding without a drafter would draw them.
    """

    def __init__(self, text: _Text, hidden_QH: Tensor) -> None:
        self._logits_QV = text.target.logits(hidden_QH)
        self._text = text
        greedy = text.setting.temperature == 0
        self._tokens: dict[int, int] = dict(enumerate(self._logits_QV.argmax(-1).tolist())) if greedy else {}

    def __len__(self) -> int:
        return len(self._logits_QV)

    def __getitem__(self, index: Any) -> Any:  # Sequence would have slices too; nobody asks for one
        if index not in self._tokens:
            self._tokens[index] = choose(self._logits_QV[index], self._text.setting.temperature, self._text.generator)
        return self._tokens[index]


def _next_token(target: Target, prompt: Sequence[int], ids: Sequence[int], setting: Setting) -> int:
    """What the target says after `ids`; where it draws, after a draw for each of them."""
    text = _Text(target, prompt, setting, layers=())
    hidden_QH = text.verify(ids).last_hidden_BQH[0]
    token = text.token
    for hidden_H in hidden_QH if setting.temperature > 0 else hidden_QH[-1:]:
        token = _Posterior(text, hidden_H[None])[0]
    return token


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
