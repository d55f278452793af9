"""The least exact arithmetic of one training step, part by part: what no exact method avoids, in floating-point operations.

A multiply and an add are two. Counted: every weight once forward and twice backward (layer 0's inputs are frozen
embeddings, one for all mask slots, whose queries, keys and values are one row; the target's states need no gradient), exactly the query-key pairs that are seen, the last layer's output
and MLP for rows that carry loss alone, one head product forward and one backward for each of these, and, unless the loss is
taught ahead, the target's head once for each position whose logits are read. Causal and sliding layers are not among the benchmark's cases.
"""

from __future__ import annotations

from dataclasses import dataclass

from remote.drafter.blocks import Blocks
from remote.drafter.head_plan import HeadPlan
from remote.spec import DrafterSpec, TargetSpec

ATTENTION_BACKWARD = 2.5  # five products against the forward's two


@dataclass(frozen=True)
class Work:
    """Floating-point operations."""

    body: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        return self.body + self.attention + self.head


def least_work(
    target: TargetSpec,
    drafter: DrafterSpec,
    blocks: Blocks,
    plan: HeadPlan,
    *,
    num_context: int,
    is_taught_ahead: bool,
    is_coarse: bool = False,
) -> Work:
    hidden, layers = target.hidden_size, drafter.num_layers
    query, keys = drafter.num_heads * drafter.head_dim, 2 * drafter.num_kv_heads * drafter.head_dim
    num_tokens, num_loss = blocks.ids_T.shape[0], plan.index_M.shape[0]
    after_attention = query * hidden + 3 * hidden * drafter.intermediate_size
    forward = 2.0 * num_tokens * layers * (hidden * (query + keys) + after_attention)
    forward -= 2.0 * (num_tokens - num_loss) * after_attention
    num_distinct = blocks.num_blocks + 1
    forward -= 2.0 * (num_tokens - num_distinct) * hidden * (query + keys)
    backward = 2 * forward - 2.0 * num_distinct * hidden * (query + keys)
    fc = 2.0 * num_context * len(drafter.captured_layers) * hidden**2
    context_keys = 2.0 * num_context * hidden * keys * layers
    pairs = sum(end - start for start, end in blocks.ranges) * blocks.block_size + num_tokens * blocks.block_size
    attention = layers * 4.0 * drafter.head_dim * drafter.num_heads * pairs
    head, products = 2.0 * target.vocab_size * hidden, 1.5 if is_coarse else 2.0  # fp8 has twice the rate
    return Work(
        body=forward + backward + 2 * fc + 3 * context_keys,
        attention=(1 + ATTENTION_BACKWARD) * attention,
        head=head * (products * num_loss + (0 if is_taught_ahead else plan.teacher_U.shape[0])),
    )
