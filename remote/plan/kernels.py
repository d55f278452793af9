"""Which code a step is planned with, as the trainer chooses it: attention, and norms, SwiGLU and the loss's rows.

On a card `auto` takes draftyard's own kernels where nothing in the recipe speaks against them. What only the card knows
(its age, whether Triton is there, whether the kernels pass their check) a plan cannot see: it says what it assumed.
"""

from __future__ import annotations

from remote.plan.sizes import Sizes
from remote.spec import DFlashSpec

# As `remote.drafter.kernels.attention` and `remote.drafter.attention` have them; a test compares.
MIN_HEAD_DIM, MAX_HEAD_DIM, MAX_BLOCK_ROWS = 16, 128, 128
MAX_GROUP = 8  # query heads that share a key; kernels for Hopper cards may take more, which a plan cannot see
MIN_FLEX_HEAD_DIM = 16


def attention_of(spec: DFlashSpec, at: Sizes) -> str:
    """sdpa, flex or triton: what trains on such a device. Eager is planned as sdpa, which takes less."""
    asked = spec.drafter.attention
    if not at.is_cuda or asked in ("sdpa", "eager"):
        return "sdpa"
    if asked != "auto":
        return asked
    if _fits_tiles(at):
        return "triton"
    return "flex" if at.head_dim >= MIN_FLEX_HEAD_DIM else "sdpa"


def has_fused_kernels(spec: DFlashSpec, at: Sizes) -> bool:
    return at.is_cuda and spec.train.kernels != "torch"


def assumption(spec: DFlashSpec, at: Sizes) -> str | None:
    """What `auto` is planned as on a card, where a refusal there would take more; None where the recipe says it."""
    taken = []
    if spec.drafter.attention == "auto" and attention_of(spec, at) == "triton":
        taken.append("attention")
    if spec.train.kernels == "auto" and has_fused_kernels(spec, at):
        taken.append("kernels")
    if not taken:
        return None
    return (
        f"a card where draftyard's own kernels do not run: auto is planned as triton for {' and '.join(taken)}, "
        "and what takes their place holds more"
    )


def log_sums_bytes(at: Sizes) -> int:
    """The log-sum-exp that triton attention keeps of every row of its tiles, padding included."""
    return 4 * at.kv_heads * at.blocks * block_rows(at)


def block_rows(at: Sizes) -> int:
    return _power_of_two(at.block_size) * _power_of_two(at.heads // at.kv_heads)


def _fits_tiles(at: Sizes) -> bool:
    is_narrow = MIN_HEAD_DIM <= at.head_dim <= MAX_HEAD_DIM and at.head_dim == _power_of_two(at.head_dim)
    is_small = block_rows(at) <= MAX_BLOCK_ROWS and at.heads // at.kv_heads <= MAX_GROUP
    return is_narrow and is_small and at.element_bytes == 2


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
