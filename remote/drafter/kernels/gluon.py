"""Gluon, which Triton brings: the only import of it, and what its versions call differently.

In it a kernel says which warps load and which multiply, where Triton's own compiler decides. Without it, or with a Triton
that calls things otherwise, the kernels' files still load, undecorated, and nobody launches them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CAPABILITY = (9, 0)  # of the cards whose products and copies the kernels name: Hopper

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_init,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # by the version
    sync_warps = getattr(gl, "thread_barrier", None) or gl.barrier
except (ImportError, AttributeError):  # absent, a library of it is, or it has moved on
    gluon = gl = mbarrier = tma = warpgroup_mma = warpgroup_mma_init = warpgroup_mma_wait = None
    TensorDescriptor = copy_tile = sync_warps = None

is_installed = gluon is not None


def jit(lengths: tuple[str, ...] = ()) -> Any:
    """Decorates a kernel; it is not compiled anew for other values of the arguments named in `lengths`."""
    if not is_installed:
        return lambda function: function
    return gluon.jit(do_not_specialize=lengths)


def can_launch(device: torch.device) -> bool:
    return is_installed and device.type == "cuda" and torch.cuda.get_device_capability(device) == CAPABILITY


def rows_of(tensor: Tensor, rows: int) -> Any:
    """(tokens, heads, D) as a matrix of which a copy takes `rows` tokens of one head; what lies beyond its end is zero."""
    flat = tensor.view(tensor.shape[0], -1)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, tensor.shape[-1]], layout)


def numbers_of(tensor: Tensor, count: int) -> Any:
    """A float32 tensor as one row of which a copy takes `count` numbers."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return TensorDescriptor(tensor.view(-1), [tensor.numel()], [1], [count], layout)
