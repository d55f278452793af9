"""Whether a drafted text is the target's own: the plain text, or one that near ties alone part from it.

Where two tokens are so near that the rounding of a wider pass decides, a drafted text may take the other one and
is another text from there on, which the plain one says nothing of. So a text that differs is read once by the
target, and each of its tokens must be the best one after the tokens before it, or as good as the best. Anything else
is a mismatch, wherever it stands.

Greedy texts only. Shapes: S tokens of the drafted text, C candidates, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from remote.drafter.target import Target

# Two logits closer than this may change places when the same token is computed in a wider pass. Float32:
# ten times what a few hundred positions of SmolLM2 differed by; bfloat16 keeps 8 bits of logits near 30.
NEAR_TIE_LOGITS = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
_LOGIT_ROWS = 256  # whose logits are there at once: of a long text and a large vocabulary all of them take gigabytes


@dataclass(frozen=True)
class Difference:
    """What parts a drafted text from the plain one."""

    is_near: bool  # every token is the target's own, but for near ties
    words: str


def difference_from_plain(
    target: Target, prompt: Sequence[int], *, plain: Sequence[int], text: Sequence[int], limit: int
) -> Difference | None:
    """None where the two are equal. Both are greedy and cut at `limit` tokens; a text below it has to end with a token
    that ends it."""
    if tuple(text) == tuple(plain):
        return None
    length = min(len(text), len(plain))
    if tuple(text[:length]) == tuple(plain[:length]):  # no two tokens part here, so no rounding does
        which, other = ("the text", "the plain one") if length == len(text) else ("the plain text", "this one")
        return _fault(f"{which} ends after {length} tokens where {other} goes on")
    place = next(index for index in range(length) if text[index] != plain[index])
    start = f"from token {place + 1} on the text differs from the plain one"
    ends = [index + 1 for index, token in enumerate(text) if token in target.stop_ids]
    if ends and ends[0] < len(text):
        return _fault(f"{start}; it goes on after token {ends[0]}, which ends it")
    if not ends and len(text) < limit:
        told = f"it ends after {len(text)} tokens, below the limit of {limit} and with none that ends a text"
        return _fault(f"{start}; {told}")
    plain_there = [*text[:place], plain[place], *text[place + 1 :]]
    best, (below, plain_below) = _below_best(target, prompt, text, candidates=[list(text), plain_there])
    tie = NEAR_TIE_LOGITS.get(target.dtype, 0.0)
    apart = f"{_word(target, plain[place])} and {_word(target, text[place])} are "
    apart += f"{abs(plain_below[place] - below[place]):.2g} logits apart"
    if not max(plain_below[place], below[place]) <= tie:  # what is not a number is no tie either
        return _fault(f"{start}; {apart}")
    wrong = next((index for index, gap in enumerate(below) if not gap <= tie), None)
    if wrong is not None:
        said, own = _word(target, text[wrong]), _word(target, best[wrong])
        return _fault(
            f"{start}; its token {wrong + 1}, {said}, is {below[wrong]:.2g} logits below the target's own {own}"
        )
    num_ties = len({place, *(index for index, token in enumerate(text) if token != best[index])})
    ties = "a near tie" if num_ties == 1 else f"the first of {num_ties} near ties"
    return Difference(True, f"{start}; {apart}, {ties}: the wider pass rounds differently")


def _fault(words: str) -> Difference:
    return Difference(False, f"{words}, NOT a near tie: decoding is not lossless")


def _word(target: Target, token: int) -> str:
    return repr(target.tokenizer.decode([token]))


@torch.no_grad()
def _below_best(
    target: Target, prompt: Sequence[int], text: Sequence[int], *, candidates: Sequence[Sequence[int]]
) -> tuple[list[int], list[list[float]]]:
    """The best token at each place of the text [S], and of each candidate [S] how many logits it lies below the best."""
    ids_BS = torch.tensor([[*prompt, *text[:-1]]], device=target.device)
    position_BS = torch.arange(ids_BS.shape[1], device=target.device)[None]
    hidden_SH = target.decoder.run(ids_BS, position_BS).last_hidden_BQH[0, len(prompt) - 1 :]
    candidates_SC = torch.tensor(candidates, device=target.device).T
    best, below = list[int](), list[Tensor]()
    for start in range(0, len(text), _LOGIT_ROWS):
        rows = slice(start, start + _LOGIT_ROWS)
        logits_SV = target.logits(hidden_SH[rows]).float()
        top = logits_SV.max(-1)
        best += top.indices.tolist()
        below.append(top.values[:, None] - logits_SV.gather(1, candidates_SC[rows]))
    below_CS: list[list[float]] = torch.cat(below).T.tolist()
    return best, below_CS
