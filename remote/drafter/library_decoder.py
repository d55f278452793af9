"""Any other target, run by the library's own forward pass: hybrid and linear-attention models, experts, and so on.

Their state cannot be cropped, masked as a tree or compacted by us, so nothing is kept between passes but
the text: each pass reads the whole text again, and a drafted tree is read path by path. Slower than `decoder`
by the length of the text and exactly as right; captures for training, which keep nothing anyway, cost the same.

It has the interface of `decoder.Decoder`. Shapes: B rows, Q new tokens a row, C captured layers × H.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from remote.drafter.decoder import Pass, View


class TextCache:
    """The tokens read so far, slot by slot; None where a ragged prompt was padded."""

    def __init__(self, batch: int) -> None:
        self.rows: list[list[int | None]] = [[] for _ in range(batch)]

    @property
    def length(self) -> int:
        return len(self.rows[0])

    def real(self, row: int) -> list[int]:
        """The row's tokens without padding."""
        return [token for token in self.rows[row] if token is not None]

    def extend(self, ids_BQ: Tensor, real_BQ: Tensor | None) -> None:
        real = torch.ones_like(ids_BQ, dtype=torch.bool) if real_BQ is None else real_BQ
        for row, ids, marks in zip(self.rows, ids_BQ.tolist(), real.tolist(), strict=True):
            row += [token if mark else None for token, mark in zip(ids, marks, strict=True)]

    def crop(self, length: int) -> None:
        """Forgets everything after the first `length` slots."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop a cache of {self.length} slots to {length}")
        self.rows = [row[:length] for row in self.rows]

    def compact(self, start: int, kept: Sequence[int]) -> None:
        """Keeps the slots before `start` and, after them, `start + i` for each i of `kept`, in order."""
        self.rows = [[*row[:start], *(row[start + index] for index in kept)] for row in self.rows]

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Leaves only these rows of the batch, in this order."""
        self.rows = [self.rows[row] for row in rows]


class LibraryDecoder:
    """Runs the library's model as it is, on whole texts."""

    def __init__(self, body: Any) -> None:
        self._body = body
        self.layers = list(body.layers)
        self.norm = body.norm
        self.embedding = body.embed_tokens

    def new_cache(self, *, batch: int, capacity: int) -> TextCache:
        return TextCache(batch)  # a text needs no room made before

    @torch.no_grad()
    def run(
        self,
        ids_BQ: Tensor,
        position_BQ: Tensor,
        *,
        cache: TextCache | None = None,
        layers: Sequence[int] = (),
        view: View | None = None,
    ) -> Pass:
        """What `Decoder.run` gives. Positions are those of the text; the library counts them itself."""
        view = view or View()
        if cache is None:
            return self._forward(ids_BQ, layers)
        past = [cache.real(row) for row in range(len(ids_BQ))]
        cache.extend(ids_BQ, view.real_BQ)
        if view.allow_QQ is not None:
            return self._read_tree(past[0], ids_BQ[0].tolist(), view.allow_QQ, layers)
        texts = [cache.real(row) for row in range(len(ids_BQ))]
        states = self._forward(_ragged(texts, ids_BQ.device), layers)
        spans = [range(len(before), len(before) + ids_BQ.shape[1]) for before in past]
        index_BQ = torch.tensor([[min(i, len(t) - 1) for i in span] for span, t in zip(spans, texts, strict=True)])
        return _picked(states, torch.arange(len(texts))[:, None].expand_as(index_BQ), index_BQ)

    def _read_tree(self, past: list[int], nodes: list[int], allow_QQ: Tensor, layers: Sequence[int]) -> Pass:
        """Every path from the root to a leaf as a text of its own; a node's state is found on any path through it."""
        seen = [row.nonzero().flatten().tolist() for row in allow_QQ.cpu()]  # ancestors and self, root first
        inner = {ancestor for path in seen for ancestor in path[:-1]}
        leaves = [node for node in range(len(nodes)) if node not in inner]
        texts = [[*past, *(nodes[node] for node in seen[leaf])] for leaf in leaves]
        states = self._forward(_ragged(texts, self.embedding.weight.device), layers)
        row_of = [next(row for row, leaf in enumerate(leaves) if node in seen[leaf]) for node in range(len(nodes))]
        place = [len(past) + len(path) - 1 for path in seen]
        return _picked(states, torch.tensor([row_of]), torch.tensor([place]))

    def _forward(self, ids_BQ: Tensor, layers: Sequence[int]) -> Pass:
        with self._listening(layers) as heard:
            last_hidden = self._body(input_ids=ids_BQ, use_cache=False).last_hidden_state
        features = [heard[layer] for layer in layers] or [last_hidden[..., :0]]
        return Pass(last_hidden_BQH=last_hidden, features_BQC=torch.cat(features, dim=-1))

    @contextmanager
    def _listening(self, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Outputs of these layers while the block runs, caught where they leave the layer."""
        heard: dict[int, Tensor] = {}

        def catch(index: int, output: Any) -> None:
            heard[index] = output[0] if isinstance(output, tuple) else output

        hooks = [
            self.layers[index].register_forward_hook(lambda _module, _given, output, index=index: catch(index, output))
            for index in layers
        ]
        try:
            yield heard
        finally:
            for hook in hooks:
                hook.remove()


def _picked(states: Pass, row_BQ: Tensor, index_BQ: Tensor) -> Pass:
    return Pass(states.last_hidden_BQH[row_BQ, index_BQ], states.features_BQC[row_BQ, index_BQ])


def _ragged(texts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """[texts, longest], padded on the right, which no real token sees."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True).to(device)
