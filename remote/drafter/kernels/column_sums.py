"""Σ over the rows of a matrix in eight bits, each row with a weight: one read of it, sums in float32.

No product of a library does it: float8 is multiplied along rows alone.
"""

from __future__ import annotations

from torch import Tensor

from remote.drafter.kernels.launch import can_launch, jit, on_its_device, tl

# Numbers that one program holds at once, and its warps: of 28 tried on an H200 the fastest, 75 µs for 1,054 rows of 248,320 in
# float8, which at the rate of its memory take 61.
ROWS, TILE, WARPS = 16, 256, 4
SLICE = 4096  # columns that a processor sums at once


@on_its_device
def add_column_sums(total_V: Tensor, weight_M: Tensor, rows_MV: Tensor) -> Tensor:
    """total + Σ weight · row, in place (float32); rows may stand apart, each contiguous."""
    assert rows_MV.stride(1) == 1, "rows are read in one piece"
    if not can_launch(total_V):
        return add_column_sums_reference(total_V, weight_M, rows_MV)
    num_rows, width = rows_MV.shape
    if num_rows:
        _column_sums_kernel[(-(-width // TILE),)](
            total_V, weight_M, rows_MV, num_rows, WIDTH=width, APART=rows_MV.stride(0), ROWS=ROWS, TILE=TILE, num_warps=WARPS,
        )  # fmt: skip
    return total_V


def add_column_sums_reference(total_V: Tensor, weight_M: Tensor, rows_MV: Tensor) -> Tensor:
    """The same in plain torch."""
    for first in range(0, len(total_V), SLICE):
        columns = slice(first, first + SLICE)
        total_V[columns] += weight_M @ rows_MV[:, columns].to(total_V.dtype)
    return total_V


@jit(("num_rows",))
def _column_sums_kernel(
    total_ptr, weight_ptr, rows_ptr, num_rows,
    WIDTH: tl.constexpr, APART: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_there = at < WIDTH
    total = tl.zeros([ROWS, TILE], tl.float32)
    for first in range(0, num_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        is_row = row < num_rows
        weight = tl.load(weight_ptr + row, mask=is_row, other=0.0)
        place = row.to(tl.int64)[:, None] * APART + at[None, :]
        share = tl.load(rows_ptr + place, mask=is_row[:, None] & is_there[None, :], other=0.0)
        total += weight[:, None] * share.to(tl.float32)
    sums = tl.load(total_ptr + at, mask=is_there, other=0.0) + tl.sum(total, 0)
    tl.store(total_ptr + at, sums, mask=is_there)
