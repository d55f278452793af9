"""Arithmetic of one optimizer step, part by part, and what a time can be estimated from.

A multiplication and an addition count as two. The counts are what the bundled trainer does (mask slots once in the first
layer's queries, keys and values, attention's backward with its recomputation), not the least possible.
"""

from __future__ import annotations

from dataclasses import dataclass

from remote.plan.kernels import attention_of, has_coarse_head
from remote.plan.memory import entry_rows, is_checkpointed
from remote.plan.sizes import Sizes, holds_target, reads_teacher, worst_documents
from remote.plan.target import target_batch_flop
from remote.spec import DFlashSpec

# Of an 8192 x 8192 x 8192 product in bfloat16, torch 2.11: no training reaches it. No other card or type was measured.
CEILING_FLOP_PER_S = 797e12
CEILING = "the most that one H200 was measured to do"


@dataclass(frozen=True)
class Work:
    """FLOP of one optimizer step by part, and the tokens it handles."""

    body: float
    attention: float
    head: float
    recomputed: float  # by layer checkpointing
    target: float  # of a target beside the drafter, its pass in every step; attention and head left out
    block_tokens: int
    context_tokens: int

    @property
    def total(self) -> float:
        return self.body + self.attention + self.head + self.recomputed + self.target

    def seconds(self, flop_per_s: float) -> float:
        """An estimate: all of the arithmetic at one measured rate."""
        return self.total / flop_per_s


def work(spec: DFlashSpec, at: Sizes) -> Work:
    """The counts of one step, all its micro-batches together."""
    times = spec.train.accumulation
    linear = 2 * at.hidden * (at.query_width + at.key_width) + 3 * at.hidden * at.inner
    body = 2.0 * at.block_tokens * linear * at.layers
    spared = at.block_tokens - entry_rows(at, is_first=True)  # of the first layer's queries, keys and values
    body -= 2.0 * spared * at.hidden * (at.query_width + 2 * at.key_width)
    features = 2.0 * at.context_tokens * at.captured * at.hidden**2
    keys = 4.0 * at.context_tokens * at.hidden * at.key_width * at.layers
    attention = _attention(spec, at)
    recomputed = body + keys + attention if is_checkpointed(spec) else 0.0
    backward = 2.5 if attention_of(spec, at) == "flex" else 3.5
    return Work(
        body=times * (3 * body + 2 * features + 3 * keys),
        attention=times * (1 + backward) * attention,
        head=times * _head(spec, at),
        recomputed=times * recomputed,
        target=times * target_batch_flop(spec, at) if holds_target(spec) else 0.0,
        block_tokens=times * at.block_tokens,
        context_tokens=times * at.context_tokens,
    )


def _attention(spec: DFlashSpec, at: Sizes) -> float:
    """Forward, exact pairs: half of the document on average, or the window."""
    document: float = spec.data.row_tokens
    if spec.data.anchors_per == "document":
        document /= worst_documents(spec.data)
    kinds = spec.drafter.layer_types or ["full"] * at.layers
    window = spec.drafter.sliding_window or document
    seen = sum(min(window, document / 2) if kind == "sliding" else document / 2 for kind in kinds)
    return 4.0 * at.query_width * at.block_tokens * (seen + at.layers * at.block_size)


def _head(spec: DFlashSpec, at: Sizes) -> float:
    """Logits and the gradient of the hidden states; the target's logits once a position and chunk.

    A product in fp8 counts half: that is its time by those in bfloat16.
    """
    product = 2.0 * at.vocab * at.hidden
    gradients = (0.5 if has_coarse_head(spec, at) else 1.0) + bool(spec.loss.terms.get("cap"))
    targets = at.chunk_targets * at.supervised_slots / at.chunk_slots if reads_teacher(spec) else 0.0
    return product * ((1 + gradients) * at.supervised_slots + targets)
