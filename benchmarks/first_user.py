"""The first user's way of a training step, rebuilt from their description, as the baseline of `benchmarks.step`.

Every block gathers its own copy of the whole context's keys, blocks go through SDPA in checkpointed chunks under a
boolean mask; the loss projects student and teacher for every block token in checkpointed chunks, in the model's dtype,
and a third pass of the head makes the metrics. Shapes as in `remote.drafter.attention` and `remote.drafter.loss`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from remote.drafter.blocks import Blocks
from remote.drafter.keys import KeyValues, MadeFrom
from remote.drafter.visibility import Visibility

BLOCKS_A_CHUNK = 64
TOKENS_A_CHUNK = 2048


class GatheredAttention:
    """Stands where `remote.drafter.attention.Backend` stands."""

    name = "gathered SDPA"

    def plan(self, seen: Visibility) -> Callable[..., Tensor]:
        def attend(query_TQD: Tensor, keys: KeyValues, _: MadeFrom | None = None) -> Tensor:
            both = (
                torch.cat([keys.context_key_SGD, keys.block_key_TGD]),
                torch.cat([keys.context_value_SGD, keys.block_value_TGD]),
            )
            rows = BLOCKS_A_CHUNK * seen.block_size
            firsts = range(0, query_TQD.shape[0], rows)
            chunks = [_chunk(query_TQD[first : first + rows], *both, seen, first) for first in firsts]
            return torch.cat(chunks)

        return attend


def _chunk(query: Tensor, key: Tensor, value: Tensor, seen: Visibility, first: int) -> Tensor:
    size, num_context = seen.block_size, seen.num_context
    num_blocks = query.shape[0] // size
    device = query.device
    context = torch.arange(num_context, device=device)
    own = num_context + torch.arange(first, first + query.shape[0], device=device).view(num_blocks, size)
    index = torch.cat([context.expand(num_blocks, num_context), own], dim=1)
    start, end = (bound[first : first + query.shape[0] : size, None] for bound in (seen.start_T, seen.end_T))
    mask = torch.cat([(context >= start) & (context < end), torch.ones_like(own, dtype=torch.bool)], dim=1)
    grouped = query.view(num_blocks, size, *query.shape[1:]).transpose(1, 2)
    out = checkpoint(_gather_and_attend, grouped, key, value, index, mask[:, None, None], use_reentrant=False)
    return out.transpose(1, 2).reshape(query.shape)


def _gather_and_attend(query: Tensor, key: Tensor, value: Tensor, index: Tensor, mask: Tensor) -> Tensor:
    keys, values = (tensor[index].transpose(1, 2) for tensor in (key, value))
    mask = mask.expand(-1, 1, query.shape[2], -1)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


def checkpointed_loss(
    hidden_TH: Tensor, blocks: Blocks, *, head_VH: Tensor, teacher_hidden_SH: Tensor, kl: float, gamma: float
) -> Tensor:
    """CE + kl·KL of every block token, weighted by exp(−(k−1)/γ) where supervised, over the sum of the weights."""
    weight_T = torch.exp(-(blocks.slot_T.float() - 1) / gamma) * blocks.supervised_T
    label_T = blocks.label_T.clamp(min=0)
    total, num_right = hidden_TH.new_zeros((), dtype=torch.float32), torch.zeros((), device=hidden_TH.device)
    for first in range(0, hidden_TH.shape[0], TOKENS_A_CHUNK):
        rows = slice(first, first + TOKENS_A_CHUNK)
        hidden, teacher = hidden_TH[rows], teacher_hidden_SH[blocks.teacher_T[rows]]
        total = total + checkpoint(
            _loss_chunk, hidden, teacher, head_VH, label_T[rows], weight_T[rows], kl, use_reentrant=False
        )
        with torch.no_grad():
            right = F.linear(hidden, head_VH).argmax(-1) == label_T[rows]
            num_right += (right & blocks.supervised_T[rows]).sum()
    return total / weight_T.sum()


def _loss_chunk(hidden: Tensor, teacher: Tensor, head_VH: Tensor, label: Tensor, weight: Tensor, kl: float) -> Tensor:
    logits = F.linear(hidden, head_VH)
    with torch.no_grad():
        wanted = F.linear(teacher, head_VH).softmax(-1)
    ce = F.cross_entropy(logits, label, reduction="none")
    divergence = F.kl_div(logits.log_softmax(-1), wanted, reduction="none").sum(-1)
    return (weight * (ce + kl * divergence)).sum().float()
