"""Which code a step is planned with, as the trainer chooses it: attention, and norms, SwiGLU and the loss's rows.

On a card `auto` takes draftyard's own kernels where nothing in the recipe speaks against them, by the rule that the trainer
asks too (`remote.own_attention`). What only the card knows (whether Triton is there, whether the kernels pass their check;
its kind, where nobody said it) a plan cannot see: it says what it assumed.
"""

from __future__ import annotations

from remote import own_attention
from remote.coherence import against_fp8
from remote.plan.sizes import Sizes
from remote.spec import DFlashSpec

MIN_FLEX_HEAD_DIM = 16  # as `remote.drafter.attention` has it; a test compares


def attention_of(spec: DFlashSpec, at: Sizes) -> str:
    """sdpa, flex or triton: what trains on such a device. Eager is planned as sdpa, which takes less."""
    asked = spec.drafter.attention
    if not at.is_cuda or asked in ("sdpa", "eager"):
        return "sdpa"
    if asked != "auto":
        return asked
    if _is_own(at, is_hopper=bool(at.is_hopper)):
        return "triton"
    return "flex" if at.head_dim >= MIN_FLEX_HEAD_DIM else "sdpa"


def has_fused_kernels(spec: DFlashSpec, at: Sizes) -> bool:
    return at.is_cuda and spec.train.kernels != "torch"


def has_coarse_head(spec: DFlashSpec, at: Sizes) -> bool:
    """Whether the head is there in fp8 as well: also where a card that is known to have none is asked for it, which refuses."""
    asked = spec.loss.hidden_gradient
    can = asked == "fp8" or (asked == "auto" and at.multiplies_float8 is not False)
    return can and has_fused_kernels(spec, at) and not against_fp8(spec)


def assumptions(spec: DFlashSpec, at: Sizes) -> list[str]:
    """What `auto` is planned as on a card, where another choice there takes more or less; empty where the recipe says it."""
    told, taken = [], []
    if spec.drafter.attention == "auto":
        if _is_known_by_the_card_alone(at):
            told.append(
                f"a Hopper card, where draftyard's own kernels take {at.heads // at.kv_heads} query heads on one key: "
                f"auto is planned as {attention_of(spec, at)} for attention, which holds more"
            )
        elif attention_of(spec, at) == "triton":
            taken.append("attention")
    if spec.train.kernels == "auto" and has_fused_kernels(spec, at):
        taken.append("kernels")
    if taken:
        told.append(
            f"a card where draftyard's own kernels do not run: auto is planned as triton for {' and '.join(taken)}, "
            "and what takes their place holds more"
        )
    if spec.loss.hidden_gradient == "fp8" and has_coarse_head(spec, at) and at.multiplies_float8 is False:
        told.append(
            "this card does not multiply float8, so a training with loss.hidden_gradient fp8 refuses to start; take auto or full"
        )
    if spec.loss.hidden_gradient == "auto" and has_coarse_head(spec, at) and at.multiplies_float8 is None:
        told.append(
            "a card that does not multiply float8 (older than Ada and Hopper): auto is planned as fp8 for the hidden gradient, "
            "and the full head alone holds less"
        )
    return told


def log_sums_bytes(at: Sizes) -> int:
    """The log-sum-exp that triton attention keeps of every row of its tiles: padding included, but for Hopper cards'."""
    if at.is_hopper and _fits_hopper(at):
        return 4 * at.heads * at.block_tokens
    return 4 * at.kv_heads * at.blocks * own_attention.block_rows(at.block_size, at.heads // at.kv_heads)


def _is_own(at: Sizes, *, is_hopper: bool) -> bool:
    misfit = own_attention.misfit(
        block_size=at.block_size,
        group=at.heads // at.kv_heads,
        head_dim=at.head_dim,
        is_hopper=is_hopper and _fits_hopper(at),
        is_float32=at.element_bytes == 4,
    )
    return misfit is None


def _fits_hopper(at: Sizes) -> bool:
    return own_attention.fits_hopper(block_size=at.block_size, head_dim=at.head_dim, element_bytes=at.element_bytes)


def _is_known_by_the_card_alone(at: Sizes) -> bool:
    """Nobody said the kind of card, and own kernels take it on a Hopper card alone."""
    is_open = at.is_cuda and at.is_hopper is None
    return is_open and _is_own(at, is_hopper=True) and not _is_own(at, is_hopper=False)
