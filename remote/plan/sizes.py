"""The counts a memory plan is made of: tokens, widths and bytes per element of one step.

Symbols, as in the trainer: S context tokens, N anchor slots, B block size, T = N·B block tokens, M supervised
slots, U target positions whose logits a chunk of the loss needs, H hidden size, I inner size, Q query width, G key
and value width, L layers, K captured layers, V vocabulary. All are those of one micro-batch at its worst: every
anchor used, every slot supervised.
"""

from __future__ import annotations

from dataclasses import dataclass

from remote.spec import DataSpec, DFlashSpec, num_drafter_parameters

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
SOFT_TERMS = ("kl", "soft_ce")  # terms that read the target's whole distribution


@dataclass(frozen=True)
class Sizes:
    """One micro-batch of a spec on a device. Widths count elements, not bytes."""

    context_tokens: int
    blocks: int
    block_size: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    captured: int
    vocab: int
    element_bytes: int
    parameters: int
    largest_matrix: int  # elements of the drafter's largest weight
    supervised_slots: int  # anchors spread evenly over documents of equal length: blocks at an end are cut off
    chunk_slots: int  # supervised slots whose logits are alive at once
    chunk_targets: (
        int  # target positions whose logits are alive at once; 0 where the loss reads none, or was taught ahead
    )
    state_bytes: int  # hidden states of one position, and what the loss reads of the target there
    is_taught_ahead: bool
    is_cuda: bool
    is_hopper: bool | None  # None: nobody said which card
    multiplies_float8: bool | None  # likewise

    @property
    def block_tokens(self) -> int:
        return self.blocks * self.block_size

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.kv_heads * self.head_dim


def sizes(
    spec: DFlashSpec,
    *,
    device: str,
    documents: int | None = None,
    is_hopper: bool | None = None,
    multiplies_float8: bool | None = None,
) -> Sizes:
    """`documents` a row, where anchors are counted per document; None: as many as make most slots."""
    drafter, hidden, rows = spec.drafter, spec.target.hidden_size, spec.train.rows_per_step
    blocks = anchor_slots(spec, documents) * rows
    is_cuda, element_bytes = device == "cuda", ELEMENT_BYTES[compute_dtype(spec, device)]
    slots = _chunk_slots(spec, blocks)
    return Sizes(
        context_tokens=spec.data.row_tokens * rows,
        blocks=blocks,
        block_size=drafter.block_size,
        hidden=hidden,
        inner=drafter.intermediate_size,
        heads=drafter.num_heads,
        kv_heads=drafter.num_kv_heads,
        head_dim=drafter.head_dim,
        layers=drafter.num_layers,
        captured=len(drafter.captured_layers),
        vocab=spec.target.vocab_size,
        element_bytes=element_bytes,
        parameters=num_drafter_parameters(spec.target, drafter),
        largest_matrix=hidden * max(drafter.intermediate_size, len(drafter.captured_layers) * hidden),
        supervised_slots=_supervised_slots(spec, blocks, documents),
        chunk_slots=slots,
        chunk_targets=_chunk_targets(spec, blocks, slots) if reads_teacher(spec) and not is_taught_ahead(spec) else 0,
        state_bytes=len(drafter.captured_layers) * hidden * element_bytes + _teacher_bytes(spec, element_bytes),
        is_taught_ahead=is_taught_ahead(spec),
        is_cuda=is_cuda,
        is_hopper=is_hopper if is_cuda else False,
        multiplies_float8=multiplies_float8 if is_cuda else False,
    )


def anchor_slots(spec: DFlashSpec, documents: int | None = None) -> int:
    """Anchor slots of one row, as the trainer makes them: static, so that shapes never change."""
    data = spec.data
    if data.anchors_per == "row":
        return min(data.max_anchors, data.row_tokens)
    return min(data.max_anchors * (worst_documents(data) if documents is None else documents), data.row_tokens)


def worst_documents(data: DataSpec) -> int:
    """Documents of the row that has most anchor slots, where anchors are counted per document.

    As many as give every token of the row a slot, or as can be: a document with an anchor has two tokens.
    """
    return max(1, min(-(-data.row_tokens // data.max_anchors), data.row_tokens // 2))


def compute_dtype(spec: DFlashSpec, device: str) -> str:
    if spec.train.dtype != "auto":
        return spec.train.dtype
    return "bfloat16" if device == "cuda" else "float32"


def holds_target(spec: DFlashSpec) -> bool:
    """Whether a training process has the whole target beside the drafter: it computes hidden states itself, each step."""
    return spec.data.hidden_states == "online" and spec.roles.target == 0


def is_taught_ahead(spec: DFlashSpec) -> bool:
    """Whether what the loss reads of the target is made once, with the hidden states, and kept with them, and not made in
    every step: where these are made for one step alone nothing would be saved, and a label alone is not worth it."""
    return is_soft(spec) and spec.data.hidden_states == "cached"


def expectation_bytes(hidden_size: int) -> int:
    """Of one position: a vector and two numbers in float32, and a token."""
    return 4 * hidden_size + 2 * 4 + 8


def has_masters(spec: DFlashSpec, device: str) -> bool:
    return compute_dtype(spec, device) != "float32" and spec.optim.master_dtype == "float32"


def is_soft(spec: DFlashSpec) -> bool:
    return any(spec.loss.terms.get(term) for term in SOFT_TERMS)


def reads_teacher(spec: DFlashSpec) -> bool:
    return is_soft(spec) or spec.loss.label == "teacher_argmax"


def _teacher_bytes(spec: DFlashSpec, element_bytes: int) -> int:
    """Of one position: the target's last hidden state, or its expectation."""
    hidden = spec.target.hidden_size
    return expectation_bytes(hidden) if is_taught_ahead(spec) else hidden * element_bytes


def _supervised_slots(spec: DFlashSpec, blocks: int, documents: int | None) -> int:
    """Slot k of an anchor counts where its document still goes on: every candidate is as likely as the next."""
    data, reach = spec.data, spec.drafter.block_size - 1
    count = (worst_documents(data) if data.anchors_per == "document" else 1) if documents is None else documents
    length = data.row_tokens // count
    candidates, slots = count * (length - 1), 0
    if candidates > 0:
        whole = max(0, length - 1 - reach)  # anchors of a document with all their slots; the others have 1, 2, …
        cut = min(reach, length - 1)
        slots = count * (whole * reach + cut * (cut + 1) // 2)
    share = min(1.0, blocks / spec.train.rows_per_step / candidates) if candidates > 0 else 0.0
    return round(share * slots) * spec.train.rows_per_step


def _chunk_slots(spec: DFlashSpec, blocks: int) -> int:
    """A chunk holds whole blocks, at least one."""
    per_block = spec.drafter.block_size - 1
    return per_block * min(blocks, max(1, spec.loss.chunk_tokens // per_block))


def _chunk_targets(spec: DFlashSpec, blocks: int, slots: int) -> int:
    """Distinct target positions of a chunk, for anchors spread evenly over the context.

    A position is needed if one of the B-1 positions before it is an anchor: 1 - (1 - N/S)^(B-1) of them are.
    """
    reach = spec.drafter.block_size - 1
    density = min(1.0, blocks / (spec.data.row_tokens * spec.train.rows_per_step))
    span = slots / reach / density + reach
    return min(slots, round(span * (1 - (1 - density) ** reach)))
