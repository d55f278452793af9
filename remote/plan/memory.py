"""Bytes of what a training step holds, piece by piece, as the bundled trainer allocates it.

The trainer's modules say what they hold: `model` (eager operations, each keeping its input, or `kernels`, which compute
norms and products again), `attention_sdpa`, `attention_flex` and `kernels.attention`, `loss` (the gradient made in the
forward pass, one chunk of logits at a time), `optim` (one tensor at a time). This file repeats their arithmetic; a test
holds it against torch's own books.

The numbers are bytes of tensors ("allocated"); when they are alive together is `remote.plan.moments`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from remote.plan.attention import largest_chunk_bytes
from remote.plan.kernels import attention_of, has_coarse_head, has_fused_kernels, log_sums_bytes
from remote.plan.sizes import Sizes, has_masters, holds_target, is_soft
from remote.spec import DFlashSpec

# On a CPU the peak that can be measured is the process's: its own memory, mapped files (libraries, weights, hidden
# states) left out, because the kernel takes their pages back whenever memory is short. Measured with torch 2.13,
# transformers 5.24 and one or two threads, 64-bit Linux; other versions and more threads may differ by PROCESS_TOLERANCE_BYTES.
PROCESS_BYTES = 180 * 1024**2
TRANSFORMERS_BYTES = 100 * 1024**2
CPU_WORKSPACE_BYTES = 40 * 1024**2
PROCESS_TOLERANCE_BYTES = 96 * 1024**2  # the most seen was 69 MiB, once in eight runs, beside other work
CUBLAS_WORKSPACE_BYTES = 32 * 1024**2  # one a thread that multiplies: the caller's and the backward's


@dataclass(frozen=True)
class Component:
    """One line of the plan. `why` says what it is made of."""

    name: str
    size_bytes: int
    why: str


def load_components(spec: DFlashSpec, at: Sizes) -> list[Component]:
    """What is there before the first step and stays."""
    device = "cuda" if at.is_cuda else "cpu"
    moment_bytes = 4 if spec.optim.moment_dtype == "float32" else 2
    moments = moment_bytes * 2 * at.parameters
    if spec.optim.name == "muon":  # matrices keep one fp32 momentum, the norms AdamW's two
        matrices = at.parameters - _vector_elements(at)
        moments = 4 * matrices + moment_bytes * 2 * (at.parameters - matrices)
    table = at.vocab * at.hidden * at.element_bytes
    lines = [
        Component("Python and torch", 0 if at.is_cuda else PROCESS_BYTES, _process_why("their own heap")),
        Component("drafter weights", at.parameters * at.element_bytes, f"{at.parameters:,} parameters"),
        Component("fp32 masters", 4 * at.parameters if has_masters(spec, device) else 0, "optim.master_dtype"),
        Component("optimizer moments", moments, "optim.moment_dtype; muon keeps one for a matrix, adamw two"),
    ]
    lines += _target_components(spec, at, table)
    if has_coarse_head(spec, at):
        lines.append(Component("head in fp8", at.vocab * at.hidden, "V·H, loss.hidden_gradient"))
    return lines


def step_components(spec: DFlashSpec, at: Sizes) -> list[Component]:
    """What every moment of forward and backward stands on."""
    lines = [*load_components(spec, at), inputs(spec, at), positions(spec, at)]
    if spec.train.accumulation > 1:
        lines.append(Component("gradients", at.parameters * at.element_bytes, "of the micro-batches before"))
    return [*lines, libraries(at, threads=1)]


def inputs(spec: DFlashSpec, at: Sizes) -> Component:
    """Hidden states and ids of the micro-batches of one step, all on the device at once."""
    per_token = at.state_bytes + 3 * 8 + 1
    per_slot = 5 * 8 + 1  # ids, positions, labels, teacher positions, slots, supervised
    one = at.context_tokens * per_token + at.block_tokens * per_slot + at.supervised_slots * 6 * 8
    why = f"{states_of(at)} and ids, {spec.train.accumulation} micro-batches"
    return Component("inputs", one * spec.train.accumulation, why)


def states_of(at: Sizes) -> str:
    """What hidden states are made of, for a person."""
    return "S·K·H features, the target's expectation (S·H in float32)" if at.is_taught_ahead else "S·(K+1)·H features"


def positions(spec: DFlashSpec, at: Sizes) -> Component:
    """Rotary factors of context and block tokens, and the visible range of every block token."""
    rotary = 2 * (at.context_tokens + at.block_tokens) * at.head_dim * at.element_bytes
    kinds = len(set(spec.drafter.layer_types)) or 1
    ranges = kinds * 2 * 8 * at.block_tokens
    tiles = -(-at.block_tokens // 128) * -(-(at.context_tokens + at.block_tokens) // 128)
    masks = {"flex": 16 * tiles, "triton": 2 * 4 * at.block_tokens}.get(attention_of(spec, at), 0) * kinds
    return Component("positions and masks", rotary + ranges + masks, "rotary factors, visible ranges, mask tiles")


def kept_components(spec: DFlashSpec, at: Sizes, *, layers: int | None = None) -> list[Component]:
    """What the forward keeps for the backward, of the first `layers` layers (None: all) and around them."""
    count = at.layers if layers is None else layers
    ends_rows = (
        at.supervised_slots if count == at.layers else at.block_tokens
    )  # the last layer goes on with these alone
    context = _context_keys(spec, at)
    shared = context_bytes(at, 2 * at.hidden) + _norm(at, at.context_tokens, at.hidden)
    ends = row_bytes(at, ends_rows, at.hidden) + (_norm(at, ends_rows, at.hidden) if layers is None else 0)
    lines = [Component("context features", shared, "fc and hidden_norm of the context, 2·S·H")]
    if is_checkpointed(spec):
        entries = _over_layers(at, count, lambda layer: entry_rows(at, is_first=layer == 0))
        lines.append(Component("activations kept", row_bytes(at, entries, at.hidden) + ends, "each layer's input, T·H"))
        return lines
    lines.append(
        Component("context keys and values", count * context, "3·S·G a layer: keys before and after the norm, values")
    )
    why = "T·(4H + 3Q + 3G + 4I) a layer: the input of every operation"
    if has_fused_kernels(spec, at):
        why = "T·(2H + 2Q + 2G + 2I) a layer: norms, rotation and SwiGLU are computed again"
        if attention_of(spec, at) != "triton":
            why = "T·(2H + 3Q + 3G + 2I) a layer: norms and SwiGLU are computed again"
    activations = _over_layers(at, count, lambda layer: block_activations(at, spec, layer=layer))
    lines.append(Component("activations kept", activations + ends, why))
    return lines


def _over_layers(at: Sizes, count: int, size_of: Callable[[int], int]) -> int:
    """The sum over the first `count` layers: the first and the last are like no other, those between are all alike."""
    ends = sorted({0, at.layers - 1} & set(range(count)))
    between = count - len(ends)
    return sum(map(size_of, ends)) + (between * size_of(1) if between else 0)


def block_activations(at: Sizes, spec: DFlashSpec, *, layer: int) -> int:
    """What one layer keeps of its block tokens; the last one takes only supervised slots past its attention."""
    is_last = layer == at.layers - 1
    attention = _attention_activations(at, spec, is_first=layer == 0, is_last=is_last)
    return attention + mlp_activations(at, spec, is_last=is_last)


def live_layer(at: Sizes, spec: DFlashSpec, *, layer: int) -> int:
    """One layer with everything it keeps, while checkpointing recomputes it; its input is kept already."""
    entered = row_bytes(at, entry_rows(at, is_first=layer == 0), at.hidden)
    return block_activations(at, spec, layer=layer) + _context_keys(spec, at) - entered


def loss_gradients(spec: DFlashSpec, at: Sizes) -> int:
    kinds = 1 + bool(spec.loss.terms.get("cap"))
    return kinds * at.supervised_slots * at.hidden * at.element_bytes


def head_workspace(spec: DFlashSpec, at: Sizes, *, with_gradient: bool = True) -> int:
    """Logits in float32: log q, q and one product; with a soft term p as well; and the target's own rows."""
    if has_fused_kernels(spec, at):
        return _fused_head_workspace(spec, at, with_gradient=with_gradient)
    copies = 4 if is_soft(spec) and not at.is_taught_ahead else 3
    logits = 4 * at.vocab * (copies * at.chunk_slots + at.chunk_targets)
    return logits + _chunk_gradients(spec, at)


def _chunk_gradients(spec: DFlashSpec, at: Sizes) -> int:
    """Of a chunk's hidden states; in float32 where the head is in fp8 or the target known by its expectation, a row of
    which a slot lies beside it then."""
    cap = at.element_bytes * bool(spec.loss.terms.get("cap"))
    each = 4 if has_coarse_head(spec, at) else at.element_bytes
    if at.is_taught_ahead and is_soft(spec):
        each = 2 * 4
    return at.chunk_slots * at.hidden * (each + cap)


def _fused_head_workspace(spec: DFlashSpec, at: Sizes, *, with_gradient: bool) -> int:
    """Logits in float32 once, where their gradient is written too (but with cap), and the target's rows; or, if that is
    more, a chunk's target rows beside those of the chunk before, of which it takes some over."""
    beside = 0  # bytes of the gradient of a logit that does not lie in its place
    if with_gradient and spec.loss.terms.get("cap"):
        beside = 1 if has_coarse_head(spec, at) else at.element_bytes
    rows = 4 * (at.chunk_slots + at.chunk_targets) + beside * at.chunk_slots
    chunk = at.vocab * rows + (_chunk_gradients(spec, at) if with_gradient else 0)
    has_neighbour = at.chunk_slots < at.supervised_slots
    both = 2 * 4 * at.vocab * at.chunk_targets if has_neighbour else 0
    return max(chunk, both)


def attention_workspace(spec: DFlashSpec, at: Sizes, *, backward: bool) -> int:
    """What attention takes beyond what it keeps; bounded by the recipe for sdpa."""
    gradients = token_bytes(at, 2 * at.query_width + 2 * at.key_width)
    kind = attention_of(spec, at)
    if kind == "triton":  # queries and keys again; every gradient, its own and that of the output; a number a row
        again = token_bytes(at, at.query_width + at.key_width)
        context = 2 * at.context_tokens * at.key_width * at.element_bytes
        return again + gradients + context + log_sums_bytes(at) if backward else again
    if kind == "flex":
        joined = 2 * (at.context_tokens + at.block_tokens) * at.key_width * at.element_bytes
        return joined + gradients if backward else joined
    sums = 2 * at.context_tokens * at.key_width * 4
    chunk = largest_chunk_bytes(spec, at, backward=backward)
    return chunk + gradients + sums if backward else chunk


def optimizer_temporaries(spec: DFlashSpec, at: Sizes) -> int:
    """Copies made while the largest weight is moved."""
    if spec.optim.name == "adamw" and has_fused_kernels(spec, at):
        return 0  # one kernel reads and writes what is stored
    if at.element_bytes == 4 and spec.optim.name == "adamw":
        copies = 0 if spec.optim.moment_dtype == "float32" else 8
    elif spec.optim.name == "muon":
        copies = 22  # two saved copies, the gradient twice, the update, three bf16 iterates
    else:
        masters = 0 if has_masters(spec, "cuda" if at.is_cuda else "cpu") else 4
        copies = 4 + masters + (0 if spec.optim.moment_dtype == "float32" else 8)
    return copies * at.largest_matrix


def is_checkpointed(spec: DFlashSpec) -> bool:
    return spec.train.activation_checkpointing != "none"


def target_bytes(spec: DFlashSpec, at: Sizes) -> int:
    """Weights of the target, or of the layers of it that are kept."""
    kept = spec.target.num_parameters
    if spec.target.keep_layers is not None:
        tables = at.vocab * at.hidden * (1 if spec.target.tied_embeddings else 2)
        kept = tables + (kept - tables) * spec.target.keep_layers // spec.target.num_layers
    return kept * at.element_bytes


def _target_components(spec: DFlashSpec, at: Sizes, table: int) -> list[Component]:
    if holds_target(spec):
        return [Component("target model", target_bytes(spec, at), "frozen; embedding and head among it")]
    head = 0 if spec.target.tied_embeddings else table
    return [
        Component("target embedding", table, "frozen, V·H; it is the head too where the two are tied"),
        Component("target head", head, "frozen, V·H"),
    ]


def _attention_activations(at: Sizes, spec: DFlashSpec, *, is_first: bool, is_last: bool) -> int:
    """Input and, but for fused kernels, its norm; queries and keys before norm and rotation, but for triton after it too;
    values; the output."""
    is_fused, kind, entered = has_fused_kernels(spec, at), attention_of(spec, at), entry_rows(at, is_first=is_first)
    tokens = row_bytes(at, entered, (1 if is_fused else 2) * at.hidden + at.query_width + at.key_width)
    tokens += token_bytes(at, at.key_width)
    if kind != "triton":  # which makes them once more
        tokens += token_bytes(at, at.query_width + at.key_width)
    tokens += row_bytes(at, passed_rows(at, is_last=is_last), at.query_width)
    if is_last and kind != "sdpa":  # whose own output is kept whole beside the rows that go on
        tokens += token_bytes(at, at.query_width)
    norms = _norm(at, entered, at.hidden)
    if not is_fused:
        norms += _norm(at, entered, at.query_width, at.heads)
        norms += _norm(at, entered, at.key_width, at.kv_heads)
    sums = {"flex": 4 * at.block_tokens * at.heads, "triton": log_sums_bytes(at)}.get(kind, 0)
    return tokens + norms + sums


def mlp_activations(at: Sizes, spec: DFlashSpec, *, is_last: bool) -> int:
    """Input, gate and up; but for fused kernels also the input's norm, gate's SiLU and the product."""
    width = at.hidden + 2 * at.inner if has_fused_kernels(spec, at) else 2 * at.hidden + 4 * at.inner
    rows = passed_rows(at, is_last=is_last)
    return row_bytes(at, rows, width) + _norm(at, rows, at.hidden)


def entry_rows(at: Sizes, *, is_first: bool) -> int:
    """Rows that a layer is given: in the first one each anchor's and the one that all mask slots share."""
    return at.blocks + 1 if is_first else at.block_tokens


def passed_rows(at: Sizes, *, is_last: bool) -> int:
    """Block tokens that a layer takes past its attention: in the last one those that carry loss."""
    return at.supervised_slots if is_last else at.block_tokens


def _context_keys(spec: DFlashSpec, at: Sizes) -> int:
    """Keys of the context before and after the norm, and values, of one layer."""
    norms = 0 if has_fused_kernels(spec, at) else _norm(at, at.context_tokens, at.key_width, at.kv_heads)
    return context_bytes(at, 3 * at.key_width) + norms


def _norm(at: Sizes, rows: int, width: int, groups: int = 1) -> int:
    """What an RMSNorm keeps beside its input: one float32 a group on CUDA (fused), the normed input as well on a CPU."""
    return 4 * rows * groups + (0 if at.is_cuda else rows * width * 4)


def token_bytes(at: Sizes, width: int) -> int:
    """Of one number per block token and unit of width."""
    return row_bytes(at, at.block_tokens, width)


def row_bytes(at: Sizes, rows: int, width: int) -> int:
    """Of one number per row and unit of width."""
    return rows * width * at.element_bytes


def context_bytes(at: Sizes, width: int) -> int:
    """Of one number per context token and unit of width."""
    return at.context_tokens * width * at.element_bytes


def _vector_elements(at: Sizes) -> int:
    return at.layers * (2 * at.hidden + 2 * at.head_dim) + 2 * at.hidden


def around_layers(at: Sizes) -> int:
    """Parameters outside the layers: fc and two norms."""
    return at.captured * at.hidden**2 + 2 * at.hidden


def libraries(at: Sizes, *, threads: int) -> Component:
    """What cuBLAS (on a CPU oneDNN) keeps, in every moment after the first product."""
    if not at.is_cuda:
        return Component("library workspace", CPU_WORKSPACE_BYTES, _process_why("oneDNN and OpenMP, which keep theirs"))
    size = threads * CUBLAS_WORKSPACE_BYTES
    return Component("library workspace", size, "cuBLAS, one a thread that multiplies; it stays once made")


def transformers(at: Sizes) -> Component:
    """What reading the target leaves in a training process; a rung reads none."""
    size = 0 if at.is_cuda else TRANSFORMERS_BYTES
    return Component("transformers and the tokenizer", size, _process_why("modules, vocabulary, rows"))


def ranks_components(spec: DFlashSpec, at: Sizes, lines: Sequence[Component], *, is_training: bool) -> list[Component]:
    """What a drafter that shares its training holds beside `lines`: the queue of hidden states, gradients that stay."""
    found, made = [], sum(line.size_bytes for line in lines if line.name == "gradients")
    if spec.roles.target > 0 and is_training:
        per_token = at.state_bytes
        why = f"roles.queue {spec.roles.queue} x {at.context_tokens:,} tokens x {per_token:,} B, {states_of(at)}"
        found.append(Component("hidden-state queue", spec.roles.queue * at.context_tokens * per_token, why))
    if spec.roles.drafter > 1:
        kept = at.parameters * at.element_bytes - made
        found.append(Component("gradient buckets", max(0, kept), "DDP keeps room for every gradient from the start"))
    return found


def _process_why(what: str) -> str:
    return f"{what}; an estimate, within {PROCESS_TOLERANCE_BYTES // 1024**2} MiB"
