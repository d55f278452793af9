"""Anchors, blocks, labels and base weights: from one packed row to what the drafter is trained on.

Shapes: S context tokens of the packed row, N anchor slots, B block size, T = N·B block tokens, M rows.
Rules: D(p) document of position p, m[p] loss mask. An anchor p needs D(p) = D(p+1) and m[p], m[p+1]; slot k of
its block predicts token p+k, supervised while that token is in the same document and in the loss mask.

Build all of this on the CPU and move it once with `.to(device)`: no step of the training then waits for the
device. This file knows no model: position weights belong to `loss`, visibility to `visibility`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Held = TypeVar("Held", bound="DataclassInstance")

PAD_DOCUMENT = -1
UNSUPERVISED_LABEL = -100  # torch's own ignore_index; as an index it fails loudly


@dataclass(frozen=True)
class Row:
    """One packed row: documents one after the other, each contiguous; several rows joined are again one row."""

    input_ids_S: Tensor  # int64
    document_S: Tensor  # int64, -1 where padded
    position_S: Tensor  # int64, restarts at 0 in every document
    loss_mask_S: Tensor  # bool, True on the tokens the target itself wrote
    num_rows: int = 1  # rows joined in this one

    def to(self, device: torch.device | str) -> Row:
        return on_device(self, device)


@dataclass(frozen=True)
class Blocks:
    """N blocks of B slots. Slot 0 holds the anchor's own token and is never supervised."""

    block_size: int
    num_rows: int
    anchors_N: Tensor  # int64, sorted; unused slots are last and stand on S-1
    keep_N: Tensor  # bool, False: the slot is unused
    document_N: Tensor  # int64, -1 where unused
    context_start_N: Tensor  # int64, the document's first index; equal to the anchor where unused
    ids_T: Tensor  # int64, what is embedded: the anchor's token, then mask tokens
    position_T: Tensor  # int64, in the document, for the rotary embedding
    label_T: Tensor  # int64, the data token; UNSUPERVISED_LABEL where not supervised
    supervised_T: Tensor  # bool, ω of the loss
    teacher_T: Tensor  # int64, index of the target's last hidden state that predicts this slot; valid where supervised
    slot_T: Tensor  # int64, k in 0 .. B-1
    ranges: tuple[
        tuple[int, int], ...
    ]  # host copy of [context start, anchor) per block, so that nobody asks the device

    @property
    def num_blocks(self) -> int:
        return self.anchors_N.shape[0]

    @property
    def distinct_ids(self) -> Tensor:
        """(N + 1,): each block's first token, then the mask token, which all other slots have in common."""
        return torch.cat([self.ids_T[:: self.block_size], self.ids_T[1:2]])

    def to(self, device: torch.device | str) -> Blocks:
        return on_device(self, device)


def check_row(row: Row) -> None:
    """Raises ValueError when the row breaks what this module relies on. Reads values: call it on the CPU."""
    size = row.input_ids_S.shape[0]
    lengths = {field: getattr(row, field).shape for field in ("input_ids_S", "document_S", "position_S", "loss_mask_S")}
    if set(lengths.values()) != {(size,)} or size == 0:
        raise ValueError(f"a packed row's tensors must have one common length, at least 1; seen {lengths}")
    if row.loss_mask_S.dtype != torch.bool:
        raise ValueError(f"loss_mask_S has dtype {row.loss_mask_S.dtype}; it must be bool")
    padded_S = row.document_S == PAD_DOCUMENT
    if bool((row.loss_mask_S & padded_S).any()):
        raise ValueError("the loss mask covers padding; a padded token can be no label")
    documents = torch.unique_consecutive(row.document_S[~padded_S])
    if documents.numel() != documents.unique().numel():
        raise ValueError("a document of the packed row is not contiguous; join its pieces or number them apart")
    expected_S = torch.arange(size) - document_starts(row)
    if not torch.equal(row.position_S[~padded_S], expected_S[~padded_S]):
        raise ValueError("position_S must restart at 0 in every document and rise by 1")


def document_starts(row: Row) -> Tensor:
    """First index of each position's document, (S,)."""
    index_S = torch.arange(row.document_S.shape[0], device=row.document_S.device)
    changed_S = torch.ones_like(row.document_S, dtype=torch.bool)
    changed_S[1:] = row.document_S[1:] != row.document_S[:-1]
    return torch.cummax(torch.where(changed_S, index_S, 0), 0).values


def join_rows(rows: Sequence[Row]) -> Row:
    """The rows of one step as one row. Documents are renumbered so that rows stay apart."""
    documents, offset = [], 0
    for row in rows:
        documents.append(torch.where(row.document_S == PAD_DOCUMENT, PAD_DOCUMENT, row.document_S + offset))
        offset += int(row.document_S.max()) + 1
    return Row(
        input_ids_S=torch.cat([row.input_ids_S for row in rows]),
        document_S=torch.cat(documents),
        position_S=torch.cat([row.position_S for row in rows]),
        loss_mask_S=torch.cat([row.loss_mask_S for row in rows]),
        num_rows=sum(row.num_rows for row in rows),
    )


def candidates(row: Row) -> Tensor:
    """Where an anchor may stand, bool (S,): D(p) = D(p+1) ≠ -1, m[p] and m[p+1].

    Partial blocks at a document's end are allowed; otherwise documents shorter than B would teach nothing.
    """
    allowed_S = torch.zeros_like(row.loss_mask_S)
    same_S = (row.document_S[:-1] == row.document_S[1:]) & (row.document_S[:-1] != PAD_DOCUMENT)
    allowed_S[:-1] = same_S & row.loss_mask_S[:-1] & row.loss_mask_S[1:]
    return allowed_S


def sample_anchors(
    row: Row, *, num_slots: int, max_anchors: int, per: Literal["row", "document"], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Uniform anchors without replacement: (anchors_N sorted, keep_N), always `num_slots` wide.

    At most `max_anchors` per row or per document, and never more than `num_slots` in all. A row with fewer
    candidates (or none) leaves slots unused; the shapes stay. One draw from `generator` per call, whatever the row.
    """
    size = row.loss_mask_S.shape[0]
    order_S = torch.randperm(size, generator=generator, device=generator.device).to(row.loss_mask_S.device)
    allowed_S = candidates(row)
    if per == "document":
        allowed_S = allowed_S & (_rank_in_document(row, allowed_S, order_S) < max_anchors)
    chosen = torch.where(allowed_S, order_S, size).sort(stable=True).indices
    quota = num_slots if per == "document" else min(num_slots, max_anchors)
    num_chosen = allowed_S.sum().clamp(max=quota)
    anchors_N = torch.full((num_slots,), size - 1, device=chosen.device)
    width = min(num_slots, size)
    slot = torch.arange(num_slots, device=chosen.device)
    keep_N = slot < num_chosen
    anchors_N[:width] = torch.where(keep_N[:width], chosen[:width], size - 1)
    return anchors_N.sort().values, keep_N


def join_anchors(parts: Sequence[tuple[Tensor, Tensor]], row_lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The anchors of rows sampled one by one, as anchors of `join_rows` of them; unused slots go last."""
    total, offset, shifted = sum(row_lengths), 0, []
    for (anchors_N, keep_N), length in zip(parts, row_lengths, strict=True):
        shifted.append(torch.where(keep_N, anchors_N + offset, total - 1))
        offset += length
    num_kept = torch.stack([keep_N.sum() for _, keep_N in parts]).sum()
    anchors_N = torch.cat(shifted).sort().values
    return anchors_N, torch.arange(anchors_N.shape[0], device=anchors_N.device) < num_kept


def build_blocks(row: Row, anchors_N: Tensor, keep_N: Tensor, *, block_size: int, mask_token_id: int) -> Blocks:
    """Blocks of the given anchors, which must be sorted with the unused slots last.

    ω(b,k) = keep · [k ≥ 1] · [a+k < S] · [D(a+k) = D(a)] · m[a+k]; the target position that predicts slot k is a+k-1.
    """
    size = row.input_ids_S.shape[0]
    slot_B = torch.arange(block_size, device=anchors_N.device)
    index_NB = anchors_N[:, None] + slot_B
    inside_NB = index_NB < size
    index_NB = index_NB.clamp(max=size - 1)
    document_N = torch.where(keep_N, row.document_S[anchors_N], PAD_DOCUMENT)
    own_NB = inside_NB & (row.document_S[index_NB] == document_N[:, None]) & keep_N[:, None]
    supervised_NB = own_NB & row.loss_mask_S[index_NB] & (slot_B >= 1)
    ids_NB = torch.full_like(index_NB, mask_token_id)
    ids_NB[:, 0] = torch.where(keep_N, row.input_ids_S[anchors_N], mask_token_id)
    start_N = torch.where(keep_N, document_starts(row)[anchors_N], anchors_N)
    return Blocks(
        block_size=block_size,
        num_rows=row.num_rows,
        anchors_N=anchors_N,
        keep_N=keep_N,
        document_N=document_N,
        context_start_N=start_N,
        ids_T=ids_NB.flatten(),
        position_T=(row.position_S[anchors_N][:, None] + slot_B).flatten(),
        label_T=torch.where(supervised_NB, row.input_ids_S[index_NB], UNSUPERVISED_LABEL).flatten(),
        supervised_T=supervised_NB.flatten(),
        teacher_T=(anchors_N[:, None] + (slot_B - 1).clamp(min=0)).clamp(max=size - 1).flatten(),
        slot_T=slot_B.repeat(anchors_N.shape[0]),
        ranges=tuple(zip(start_N.tolist(), anchors_N.tolist(), strict=True)),
    )


def _rank_in_document(row: Row, allowed_S: Tensor, order_S: Tensor) -> Tensor:
    """How many allowed positions of the same document come before this one in the random order, (S,)."""
    size = order_S.shape[0]
    sort_key_S = document_starts(row) * (size + 1) + torch.where(allowed_S, order_S, size)
    by_document = sort_key_S.sort(stable=True).indices
    rank_S = torch.empty_like(by_document)
    rank_S[by_document] = torch.arange(size, device=by_document.device)
    return rank_S - document_starts(row)  # documents are contiguous: their ranks start at their first index


def on_device(value: Held, device: torch.device | str) -> Held:
    """The same dataclass with every tensor on `device`; copies do not wait."""
    tensors = {
        field.name: getattr(value, field.name).to(device, non_blocking=True)
        for field in dataclasses.fields(value)
        if isinstance(getattr(value, field.name), Tensor)
    }
    return dataclasses.replace(value, **tensors)
