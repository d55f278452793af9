"""What a pass of the target holds and takes: in a rank of its own, and once before the training of a single process.

Of the target a recipe says only width, depth and number of weights: what a pass makes is bounded from above, its time
from below (two FLOP a weight and token, attention left out), both for a dense target.
"""

from __future__ import annotations

from remote.plan.memory import PROCESS_BYTES, TRANSFORMERS_BYTES, Component, libraries, target_bytes, transformers
from remote.plan.sizes import Sizes, expectation_bytes
from remote.spec import DFlashSpec

# As `remote.drafter.queue` and `remote.drafter.target` have them; a test compares.
OUTBOX = 2  # batches on their way from a target
CAPTURE_TOKENS, PADDED = 4096, 8 / 7  # documents of like length in one pass, padded to the longest
WIDEST = 3  # an MLP's gate, its SiLU's product and up, alive together


def pass_components(spec: DFlashSpec, at: Sizes, *, num_batches: int) -> tuple[Component, ...]:
    """Of a process that computes hidden states and keeps those of so many batches at once."""
    return (
        Component("Python and torch", 0 if at.is_cuda else PROCESS_BYTES, "their own heap"),
        transformers(at),
        Component("target model", target_bytes(spec, at), "frozen; embedding and head among it"),
        Component(
            "hidden states",
            num_batches * batch_bytes(at),
            f"S·(K+1)·H of {num_batches} batches: {num_batches - 1} on their way, one made",
        ),
        Component(
            "a pass of the target",
            target_pass_bytes(spec, at),
            f"captured layers, residual stream and MLP of {at.context_tokens:,} tokens; at most {widest_mlp(spec):,} wide",
        ),
        libraries(at, threads=1),
    )


def conversion_bytes(spec: DFlashSpec) -> int:
    """Of the host's memory while a GGUF file is converted: its weights in float32 as they are read and again in the model,
    and the widest table between the two. Measured 0.3 % above it once, of SmolLM2-135M; 0 where nothing is converted."""
    if not spec.target.source.endswith(".gguf"):
        return 0
    table = spec.target.vocab_size * spec.target.hidden_size
    return PROCESS_BYTES + TRANSFORMERS_BYTES + 4 * (2 * spec.target.num_parameters + table)


def kept_bytes(spec: DFlashSpec, at: Sizes) -> int:
    """On disk, of one token: its hidden states, and what is kept with them of the target; 0 where none are kept."""
    if spec.data.hidden_states != "cached":
        return 0
    states = (at.captured + 1) * at.hidden * at.element_bytes
    return states + (expectation_bytes(at.hidden) if at.is_taught_ahead else 0)


def batch_bytes(at: Sizes) -> int:
    """Hidden states of one batch."""
    return at.context_tokens * (at.captured + 1) * at.hidden * at.element_bytes


def target_pass_bytes(spec: DFlashSpec, at: Sizes) -> int:
    """The most that one pass over a batch has alive beside what it leaves: a document as long as the batch, in the layer's
    MLP; or at its end, where what was captured is joined."""
    return text_pass_bytes(
        spec, at, num_tokens=max(at.context_tokens, min(CAPTURE_TOKENS, round(PADDED * at.context_tokens)))
    )


def text_pass_bytes(spec: DFlashSpec, at: Sizes, *, num_tokens: int) -> int:
    """The same of so many tokens in one pass."""
    held = (at.captured + 2) * at.hidden  # captured layers, the residual stream, its norm
    return num_tokens * at.element_bytes * (held + max(WIDEST * widest_mlp(spec), at.captured * at.hidden))


def widest_mlp(spec: DFlashSpec) -> int:
    """The widest that its weights allow: 3·H·I is no more than a layer has."""
    return -(-_layer_parameters(spec) // (3 * spec.target.hidden_size))


def target_batch_flop(spec: DFlashSpec, at: Sizes) -> float:
    """Its layers over a batch; the head is not asked."""
    layers = spec.target.keep_layers or spec.target.num_layers
    return 2.0 * layers * _layer_parameters(spec) * at.context_tokens


def _layer_parameters(spec: DFlashSpec) -> int:
    target = spec.target
    tables = target.vocab_size * target.hidden_size * (1 if target.tied_embeddings else 2)
    return max(0, target.num_parameters - tables) // target.num_layers
