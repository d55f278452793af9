"""cuBLASLt asked directly, through ctypes: all the algorithms that it would consider for a product, each to be timed.

torch takes the first suggestion. C (m × n) by rows; A and B by rows or by columns. Constants are those of cublasLt.h, 12 and 13.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TYPES = {torch.float32: 0, torch.bfloat16: 14}  # CUDA_R_32F, CUDA_R_16BF
COMPUTE_32F, TRANSPOSED = 68, 1
DESC_TRANSA, DESC_TRANSB = 3, 4
PREF_MAX_WORKSPACE_BYTES = 1
CONFIG = {"id": 0, "tile": 1, "split_k": 2, "reduction": 3, "swizzle": 4, "custom": 5, "stages": 6, "inner": 7, "cluster": 8}  # fmt: skip
MOST_SUGGESTED = 24


class _Result(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True)
class Suggestion:
    """One way to multiply A and B into C."""

    library: Library
    problem: tuple[Any, ...]  # descriptor, tensors and their layouts
    result: _Result

    @property
    def workspace_bytes(self) -> int:
        return int(self.result.workspace_bytes)

    @property
    def waves(self) -> float:
        return round(float(self.result.waves), 2)

    def config(self) -> dict[str, int]:
        """Numbers of the library's own tables."""
        return {name: self.library.attribute(self.result, number) for name, number in CONFIG.items()}

    def run(self) -> None:
        self.library.multiply(self.problem, self.result)


class Library:
    """cuBLASLt as this process has it loaded, with a workspace."""

    def __init__(self, device: torch.device, *, workspace_bytes: int) -> None:
        one = torch.ones(16, 16, device=device, dtype=torch.bfloat16)
        torch.mm(one, one)  # loads it
        self.calls = ctypes.CDLL(_loaded("libcublasLt.so"))
        self.device, self.handle = device, ctypes.c_void_p()
        self._call("cublasLtCreate", ctypes.byref(self.handle))
        self.workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)
        self.preference = ctypes.c_void_p()
        self._call("cublasLtMatmulPreferenceCreate", ctypes.byref(self.preference))
        size = ctypes.c_uint64(workspace_bytes)
        self._call(
            "cublasLtMatmulPreferenceSetAttribute", self.preference, PREF_MAX_WORKSPACE_BYTES, ctypes.byref(size), ctypes.c_size_t(8)
        )  # fmt: skip

    def suggestions(self, left: Tensor, right: Tensor, out: Tensor) -> list[Suggestion]:
        """For out = left · right, best first as the library thinks. By columns it is outᵀ = rightᵀ · leftᵀ."""
        descriptor = ctypes.c_void_p()
        self._call("cublasLtMatmulDescCreate", ctypes.byref(descriptor), COMPUTE_32F, TYPES[torch.float32])
        for attribute, tensor in ((DESC_TRANSA, right), (DESC_TRANSB, left)):
            is_transposed = ctypes.c_int32(TRANSPOSED if _lies_by_columns(tensor) else 0)
            self._call("cublasLtMatmulDescSetAttribute", descriptor, attribute, ctypes.byref(is_transposed), ctypes.c_size_t(4))  # fmt: skip
        problem = (descriptor, right, left, out, *(self._layout(tensor) for tensor in (right, left, out)))
        results, count = (_Result * MOST_SUGGESTED)(), ctypes.c_int()
        _, _, _, _, first, second, third = problem
        self._call(
            "cublasLtMatmulAlgoGetHeuristic", self.handle, descriptor, first, second, third, third, self.preference,
            MOST_SUGGESTED, results, ctypes.byref(count),
        )  # fmt: skip
        return [Suggestion(self, problem, result) for result in results[: count.value] if result.state == 0]

    def multiply(self, problem: tuple[Any, ...], result: _Result) -> None:
        descriptor, right, left, out, first, second, third = problem
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (right, left, out, self.workspace)]
        self._call(
            "cublasLtMatmul", self.handle, descriptor, ctypes.byref(one), pointers[0], first, pointers[1], second,
            ctypes.byref(zero), pointers[2], third, pointers[2], third, ctypes.byref(result.algorithm), pointers[3],
            ctypes.c_size_t(self.workspace.numel()), ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream),
        )  # fmt: skip

    def attribute(self, result: _Result, number: int) -> int:
        value, written = ctypes.c_uint32(0), ctypes.c_size_t()
        size = ctypes.c_size_t(2 if number >= CONFIG["inner"] else 4)
        self._call(
            "cublasLtMatmulAlgoConfigGetAttribute", ctypes.byref(result.algorithm), number, ctypes.byref(value), size, ctypes.byref(written)
        )  # fmt: skip
        return value.value

    def _layout(self, tensor: Tensor) -> ctypes.c_void_p:
        """As the library sees it: by columns, so a matrix by rows is its transpose."""
        layout, by_columns = ctypes.c_void_p(), _lies_by_columns(tensor)
        rows, columns, apart = (*tensor.shape, tensor.stride(1)) if by_columns else (*tensor.shape[::-1], tensor.stride(0))  # fmt: skip
        self._call(
            "cublasLtMatrixLayoutCreate", ctypes.byref(layout), TYPES[tensor.dtype], ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(apart)
        )  # fmt: skip
        return layout

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.calls, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} ended with status {status}")


def _lies_by_columns(tensor: Tensor) -> bool:
    return tensor.stride(0) == 1 and tensor.stride(1) != 1


def _loaded(name: str) -> str:
    """The file that this process has loaded under the name. RuntimeError where it has none."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if f"/{name}" in line:
            return line.split()[-1]
    raise RuntimeError(f"this process has loaded no {name}; is torch built with CUDA?")
