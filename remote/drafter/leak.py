"""The leak probe: does a block see what it must not see, and does it see what it may?

Shapes: S context tokens, N blocks of B slots, T = N·B, C captured features, H hidden.

A drafter that sees its anchor's own hidden state, a neighbour's block or another document learns
fast, shows 95 % accuracy and accepts nothing when it serves. So: everything a block must not see is
replaced by noise and its output must stay the same bit for bit; then single things it may see are
replaced and its output must change. What may be seen is written down here a second time, from
documents and anchors alone, and shares no code with the masks it checks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from remote.drafter.blocks import Blocks, Row
from remote.drafter.step import MicroBatch
from remote.drafter.workbench import Workbench
from remote.spec import DrafterSpec

_SEED = 20_260_101


def probe(micro_batch: MicroBatch, bench: Workbench, *, num_blocks: int = 4) -> list[str]:
    """Findings in plain words, empty when all is well. Looks closely at `num_blocks` blocks spread over the row."""
    row, blocks = micro_batch.row, micro_batch.blocks
    embeddings_TH = bench.embed(blocks.ids_T)
    other_SC = _noise_like(micro_batch.features_SC)
    other_TH = _noise_like(embeddings_TH)
    findings = label_findings(row, blocks)

    def output_of(block: int, features_SC: Tensor, block_embeddings_TH: Tensor) -> Tensor:
        with torch.no_grad():
            hidden_TH = bench.drafter(features_SC, block_embeddings_TH, row, blocks)
        return hidden_TH[_slots(blocks, block)]

    for block in _spread(blocks, num_blocks):
        before_BH = output_of(block, micro_batch.features_SC, embeddings_TH)
        may_S = may_see(block, row, blocks, drafter=bench.spec.drafter)
        own_T = torch.zeros_like(blocks.supervised_T)
        own_T[_slots(blocks, block)] = True
        features_SC = torch.where(may_S[:, None], micro_batch.features_SC, other_SC)
        if not torch.equal(before_BH, output_of(block, features_SC, embeddings_TH)):
            findings.append(f"{_name(block, blocks)} sees hidden states it must not see")
        if not torch.equal(
            before_BH, output_of(block, micro_batch.features_SC, torch.where(own_T[:, None], embeddings_TH, other_TH))
        ):
            findings.append(f"{_name(block, blocks)} sees tokens of another block")
        own_TH = embeddings_TH.clone()
        own_TH[block * blocks.block_size] = other_TH[block * blocks.block_size]
        if torch.equal(before_BH, output_of(block, micro_batch.features_SC, own_TH)):
            findings.append(f"{_name(block, blocks)} does not see its own anchor's token")
        if may_S.any():
            nearest = int(may_S.nonzero().max())
            features_SC = micro_batch.features_SC.clone()
            features_SC[nearest] = other_SC[nearest]
            if torch.equal(before_BH, output_of(block, features_SC, embeddings_TH)):
                findings.append(f"{_name(block, blocks)} does not see the hidden state right before its anchor")
    return findings


def may_see(block: int, row: Row, blocks: Blocks, *, drafter: DrafterSpec) -> Tensor:
    """Context positions that some layer shows to some slot of the block, bool (S,)."""
    anchor = int(blocks.anchors_N[block])
    position_S = torch.arange(len(row.document_S), device=row.document_S.device)
    may_S = (row.document_S == row.document_S[anchor]) & (position_S < anchor)
    if not bool(blocks.keep_N[block]):
        return torch.zeros_like(may_S)
    reach = _widest_reach(drafter)
    return may_S if reach is None else may_S & (position_S >= anchor - reach)


def _widest_reach(drafter: DrafterSpec) -> int | None:
    """How many positions before the anchor the farthest-looking layer shows; None: the whole document."""
    one_window = drafter.sliding_window is not None and drafter.window_rule in ("automodel", "modelopt")
    kinds = drafter.layer_types or ["sliding" if one_window else "full"]
    if "full" in kinds:
        return None
    assert drafter.sliding_window is not None, "the spec's own check wants a window where a layer slides"
    return drafter.sliding_window - (0 if drafter.window_rule == "speculators" else 1)


def label_findings(row: Row, blocks: Blocks) -> list[str]:
    """Supervised slots whose token lies in another document than their anchor."""
    anchor_T = blocks.anchors_N.repeat_interleave(blocks.block_size)
    label_T = (anchor_T + blocks.slot_T).clamp(max=len(row.document_S) - 1)
    crossing = blocks.supervised_T & (row.document_S[label_T] != row.document_S[anchor_T])
    num_crossing = int(crossing.sum())
    return [f"{num_crossing} label slots belong to another document than their anchor"] if num_crossing else []


def _spread(blocks: Blocks, wanted: int) -> list[int]:
    """Used blocks, evenly spread from the first to the last."""
    used = blocks.keep_N.nonzero().flatten().tolist()
    if len(used) <= wanted:
        return used
    return [used[round(i * (len(used) - 1) / (wanted - 1))] for i in range(wanted)]


def _slots(blocks: Blocks, block: int) -> slice:
    return slice(block * blocks.block_size, (block + 1) * blocks.block_size)


def _name(block: int, blocks: Blocks) -> str:
    return f"block {block} (anchor {int(blocks.anchors_N[block])})"


def _noise_like(tensor: Tensor) -> Tensor:
    generator = torch.Generator(tensor.device).manual_seed(_SEED)
    return torch.empty_like(tensor).normal_(0.0, 1.0, generator=generator)
