"""Which drafters draftyard's own attention kernels can train: arithmetic on their widths, the same without torch.

Asked at start on the card, before the kernels are checked there, and by the memory plan on a laptop. There are two kinds
of them: those for Hopper cards, and those for all cards, which take what the others do not.
"""

from __future__ import annotations

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 128
MAX_BLOCK_ROWS = 128  # slots × heads of a group, each padded: a tile must hold one block
MIN_PRODUCT = 16  # the shortest sum of a product that Triton compiles
MAX_GROUP = MAX_BLOCK_ROWS // MIN_PRODUCT  # a tile's own tokens are summed over; those for Hopper cards sum otherwise
HOPPER_HEAD_DIMS = (64, 128)  # narrower rows do not fill the 128 bytes in which copies are woven
# A copy moves 16 bytes, a float32 a token; where a head's began within them an H200 raised an illegal instruction.
HOPPER_COPIED_TOKENS = 4


def fits_hopper(*, block_size: int, head_dim: int, element_bytes: int) -> bool:
    """Whether those for Hopper cards take it, where the card is one: every count of tokens must be whole copies."""
    return element_bytes == 2 and head_dim in HOPPER_HEAD_DIMS and block_size % HOPPER_COPIED_TOKENS == 0


def misfit(*, block_size: int, group: int, head_dim: int, is_hopper: bool, is_float32: bool) -> str | None:
    """What no tile can hold, or None. `group`: query heads that share a key. `is_hopper`: by those for Hopper cards."""
    rows = block_rows(block_size, group)
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM or head_dim != power_of_two(head_dim):
        return f"head_dim {head_dim} is not a power of two from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
    if rows > MAX_BLOCK_ROWS:
        return (
            f"block_size × heads that share a key, each rounded up to a power of two, is {rows}, above {MAX_BLOCK_ROWS}"
        )
    if not is_hopper and power_of_two(group) > MAX_GROUP:
        return f"{group} query heads share a key, above {MAX_GROUP}: a tile would own fewer than {MIN_PRODUCT} tokens"
    if is_float32:
        return "float32 tiles do not fit the shared memory of every card"
    return None


def block_rows(block_size: int, group: int) -> int:
    """Rows that one block takes of a tile."""
    return power_of_two(block_size) * power_of_two(group)


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`: what Triton's tiles must be wide."""
    return 1 << (number - 1).bit_length()
