"""Rows made from shapes alone: the worst a recipe allows, without a target, a tokenizer or data.

Token ids, hidden states, embedding and head are random and frozen, of the right shapes and dtypes,
so that time and memory are those of the real thing; losses are those of noise. Where hidden states
are computed online, the target's layers stay beside the drafter, and a block of their size does here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from remote.drafter.blocks import PAD_DOCUMENT, Row, join_rows
from remote.drafter.data import Batch
from remote.drafter.teacher import Expectation, Teacher
from remote.plan.sizes import holds_target, is_taught_ahead, worst_documents
from remote.spec import DFlashSpec

MULTI_DOC = (3000, 4000, 5000)  # tokens; the packed test the first users of this trainer ran by hand
_EMBEDDING_STD = 0.02


@dataclass(frozen=True)
class StandIn:
    """What a real target gives a workbench: embedding and head, here random."""

    embedding_VH: Tensor
    head_VH: Tensor
    layers: Tensor | None  # stands for the target's layers where they stay on the device beside the drafter

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embedding_VH)


def stand_in(spec: DFlashSpec, *, device: torch.device, dtype: torch.dtype) -> StandIn:
    """One table where the target ties embedding and head, else two."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (spec.target.vocab_size, spec.target.hidden_size)

    def table() -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype).normal_(0.0, _EMBEDDING_STD, generator=generator)

    embedding_VH = table()
    head_VH = embedding_VH if spec.target.tied_embeddings else table()
    layers = None
    if holds_target(spec):
        layers = torch.ones(_num_layer_parameters(spec), device=device, dtype=dtype)
    return StandIn(embedding_VH, head_VH, layers)


def worst_layout(spec: DFlashSpec) -> list[int]:
    """Document lengths of the row that costs most: every anchor slot is used, and every context as long as can be.

    With anchors per row one document fills the row; with anchors per document the row holds as many as make most
    slots, each of even length: all its anchors are used, or all but those that its last token cannot be.
    """
    if spec.data.anchors_per == "row":
        return [spec.data.row_tokens]
    return _even(spec.data.row_tokens, worst_documents(spec.data))


def multi_doc_layout(spec: DFlashSpec) -> list[int]:
    """3000 + 4000 + 5000 tokens where the row allows them, else a quarter, a third and the rest of it."""
    size = spec.data.row_tokens
    if size >= sum(MULTI_DOC):
        return list(MULTI_DOC)
    quarter, third = size // 4, size // 3
    return [quarter, third, size - quarter - third]


def batch(spec: DFlashSpec, layout: Sequence[int], *, like: Tensor, position: int = 0) -> Batch:
    """The micro-batch at `position`: rows of documents of these lengths, all of it learnt from.

    Ids lie on the CPU as those of real rows do, hidden states where `like` is, in its dtype: drawing them on a CPU
    takes seconds.
    """
    keys = tuple((0, position * spec.train.rows_per_step + index) for index in range(spec.train.rows_per_step))
    parts = tuple(_row(spec, layout, seed=key[1]) for key in keys)
    generator = torch.Generator(like.device).manual_seed(position)
    num_tokens, width = sum(len(part.input_ids_S) for part in parts), len(spec.drafter.captured_layers)
    return Batch(
        row=parts[0] if len(parts) == 1 else join_rows(parts),
        features_SC=like.new_empty(num_tokens, width * spec.target.hidden_size).normal_(generator=generator),
        teacher=_teacher(spec, num_tokens, like=like, generator=generator),
        parts=parts,
        keys=keys,
    )


def _teacher(spec: DFlashSpec, num_tokens: int, *, like: Tensor, generator: torch.Generator) -> Teacher:
    """Last hidden states, or an expectation of the size it has: nobody's, as every number here."""
    hidden_SH = like.new_empty(num_tokens, spec.target.hidden_size).normal_(generator=generator)
    if not is_taught_ahead(spec):
        return hidden_SH
    rest_SH = hidden_SH.to(torch.promote_types(like.dtype, torch.float32)) * _EMBEDDING_STD
    number_S = rest_SH.new_full((num_tokens,), 0.5)
    best_S = torch.randint(spec.target.vocab_size, (num_tokens,), generator=generator, device=like.device)
    return Expectation(rest_SH, number_S, number_S.clone(), best_S)


def _num_layer_parameters(spec: DFlashSpec) -> int:
    """Of the target's layers that are kept, without embedding and head."""
    target = spec.target
    tables = target.vocab_size * target.hidden_size * (1 if target.tied_embeddings else 2)
    return (target.num_parameters - tables) * (target.keep_layers or target.num_layers) // target.num_layers


def _row(spec: DFlashSpec, layout: Sequence[int], *, seed: int) -> Row:
    pad = spec.data.row_tokens - sum(layout)
    documents = [torch.full((length,), index) for index, length in enumerate(layout)]
    generator = torch.Generator().manual_seed(seed)
    document_S = torch.cat([*documents, torch.full((pad,), PAD_DOCUMENT)])
    return Row(
        input_ids_S=torch.randint(spec.target.vocab_size, (spec.data.row_tokens,), generator=generator),
        document_S=document_S,
        position_S=torch.cat([*(torch.arange(length) for length in layout), torch.zeros(pad, dtype=torch.int64)]),
        loss_mask_S=document_S != PAD_DOCUMENT,
    )


def _even(total: int, parts: int) -> list[int]:
    """`total` cut into `parts` lengths that differ by at most one."""
    return [total // parts + (index < total % parts) for index in range(parts)]
