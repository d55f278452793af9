"""Triton, where it is installed: the only import of it, and whether a kernel can run on a tensor.

Without Triton the kernels' files still load, undecorated, and nobody launches them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MIN_CAPABILITY = (8, 0)  # bf16 in Triton's products

try:
    import triton
    import triton.language as tl
except ImportError:  # absent, or a library of it is
    triton = tl = None

is_installed = triton is not None

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True)
class RowTile:
    """How a kernel reads a long row; found by timing on an H200 (`benchmarks.tiles`)."""

    size: int  # numbers of the row that one program holds at once
    warps: int
    stages: int = 1  # of the software pipeline, where the kernel walks the row

    def constants(self, width: int) -> dict[str, int]:
        """For rows of `width` numbers: no more than one tile where they are shorter."""
        return {"TILE": min(self.size, triton.next_power_of_2(width)), "num_warps": self.warps}


def jit(lengths: tuple[str, ...] = (), *, slices: tuple[str, ...] = ()) -> Any:
    """Decorates a kernel; it is not compiled anew for other values of the arguments named in `lengths`.

    Nor for other alignments of those in `slices`, which begin anywhere in a larger tensor.
    """
    if not is_installed:
        return lambda function: function
    return triton.jit(do_not_specialize=lengths, do_not_specialize_on_alignment=slices)


def on_its_device(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Runs it with the first tensor's card as the current one: Triton launches there, wherever the tensors are."""

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with torch.cuda.device_of(args[0]):  # nothing for a tensor of the CPU
            return function(*args, **kwargs)

    return run


def can_launch(tensor: Tensor) -> bool:
    """On CUDA; on a CPU only in Triton's interpreter (TRITON_INTERPRET=1 before Triton is first imported), for tests."""
    if not is_installed or tensor.dtype not in DTYPES:
        return False
    return tensor.is_cuda or (tensor.device.type == "cpu" and triton.knobs.runtime.interpret)


def obstacle(*, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot train here, or None."""
    if device.type != "cuda":
        return f"Triton needs CUDA, the device is {device.type}"
    if not is_installed:
        return "Triton is not installed"
    if dtype not in DTYPES:
        return f"dtype {dtype} is not supported"
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return f"Triton's products need compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
    return None


def precision(tensor: Tensor) -> str:
    """How a product multiplies float32: exactly. (tf32 would be off by 1e-3; other dtypes do not read it.)"""
    return "ieee" if tensor.dtype == torch.float32 else "tf32"
