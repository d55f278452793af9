"""Norms, rotary embedding and SwiGLU against torch's own in float64, values and gradients; memory that is not kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from remote.drafter.kernels import norm, swiglu
from remote.drafter.rope import rotary
from tests.remote.cuda import CPU, CUDA, in_interpreter, needs_cuda
from tests.remote.packed import relative_error

EPS = 1e-6
Operation = Callable[..., Tensor]


def draw(*sizes: tuple[int, ...], device: torch.device = CPU) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*size, generator=generator, dtype=torch.float64).to(device) for size in sizes]


def head_norm_rotate(operation: Operation, *, spread: int = 1) -> Operation:
    """With the rotary factors of positions 0, 2, 4, ... in the dtype of the input."""

    def apply(x: Tensor, weight: Tensor) -> Tensor:
        num_tokens = x.shape[0] if spread == 1 else (x.shape[0] - 1) * spread
        position = 2 * torch.arange(num_tokens, device=x.device)
        return operation(x, weight, EPS, rotary(position, head_dim=x.shape[2], theta=1e4, dtype=x.dtype), spread)

    return apply


def joined(operation: Callable[..., tuple[Tensor, ...]]) -> Operation:
    return lambda x, weight, *matrices: torch.cat(operation(x, weight, EPS, *matrices), dim=1)


OPERATIONS: dict[str, tuple[Operation, Operation, tuple[tuple[int, ...], ...]]] = {
    "rms_norm": (
        lambda x, weight: norm.rms_norm(x, weight, EPS),
        lambda x, weight: norm.rms_norm_reference(x, weight, EPS),
        ((7, 12), (12,)),
    ),
    "norm_linears": (
        joined(norm.norm_linears), joined(norm.norm_linears_reference), ((9, 20), (20,), (6, 20), (3, 20), (3, 20))
    ),
    "head_norm_rotate": (
        head_norm_rotate(norm.head_norm_rotate), head_norm_rotate(norm.head_norm_rotate_reference), ((5, 3, 8), (8,))
    ),
    "head_norm_rotate of shared rows": (
        head_norm_rotate(norm.head_norm_rotate, spread=3),
        head_norm_rotate(norm.head_norm_rotate_reference, spread=3),
        ((4, 3, 8), (8,)),
    ),
    "swiglu_linear": (swiglu.swiglu_linear, swiglu.swiglu_linear_reference, ((6, 11), (6, 11), (4, 11))),
}  # fmt: skip


def value_and_gradients(operation: Operation, inputs: list[Tensor]) -> list[Tensor]:
    """Of copies: a kernel may write over its inputs in the backward."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = operation(*(leaf * 1 for leaf in leaves))
    (upstream,) = draw(tuple(out.shape))
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out))]


def errors(name: str, *, dtype: torch.dtype, device: torch.device = CPU, scale: int = 1) -> list[float]:
    kernel, reference, sizes = OPERATIONS[name]
    inputs = [tensor.to(dtype) for tensor in draw(*(tuple(scale * n for n in size) for size in sizes), device=device)]
    ours = value_and_gradients(kernel, inputs)
    oracle = value_and_gradients(reference, [tensor.double() for tensor in inputs])
    return [relative_error(a, b) for a, b in zip(ours, oracle, strict=True)]


@in_interpreter
@pytest.mark.parametrize("name", OPERATIONS)
def test_kernels_equal_float64(name: str) -> None:
    assert max(errors(name, dtype=torch.float32)) < 1e-6


@in_interpreter
@pytest.mark.parametrize("name", OPERATIONS)
def test_half_precision_stays_within_its_rounding(name: str) -> None:
    assert max(errors(name, dtype=torch.float16)) < 2e-3


@pytest.mark.parametrize("name", OPERATIONS)
def test_without_kernels_the_functions_are_their_references(name: str) -> None:
    kernel, reference, sizes = OPERATIONS[name]
    inputs = draw(*sizes)

    for ours, oracle in zip(value_and_gradients(kernel, inputs), value_and_gradients(reference, inputs), strict=True):
        assert torch.equal(ours, oracle)


def test_a_head_size_that_is_no_power_of_two_takes_the_reference() -> None:
    x, weight = (tensor.float() for tensor in draw((4, 2, 10), (10,)))

    ours = head_norm_rotate(norm.head_norm_rotate)(x, weight)

    assert torch.equal(ours, head_norm_rotate(norm.head_norm_rotate_reference)(x, weight))


@in_interpreter
def test_nothing_but_inputs_and_one_number_a_row_is_kept() -> None:
    x, weight, gate, up, first, second, down = (
        tensor.float().requires_grad_()
        for tensor in draw((8, 16), (16,), (8, 32), (8, 32), (32, 16), (32, 16), (16, 32))
    )
    kept: list[tuple[int, ...]] = []

    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(tuple(t.shape)), t)[1], lambda t: t):
        norm.norm_linears(x, weight, EPS, first, second)
        swiglu.swiglu_linear(gate, up, down)

    assert sorted(kept) == sorted([(8, 16), (16,), (8,), (32, 16), (32, 16), (8, 32), (8, 32), (16, 32)])


@in_interpreter
def test_a_second_backward_through_swiglu_is_refused() -> None:
    gate, up, down = (tensor.float().requires_grad_() for tensor in draw((3, 8), (3, 8), (2, 8)))
    loss = swiglu.swiglu_linear(gate * 1, up * 1, down).sum()

    loss.backward(retain_graph=True)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- on a card


@needs_cuda
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.01), (torch.float32, 1e-4)])
@pytest.mark.parametrize("scale", [1, 16])
@pytest.mark.parametrize("name", OPERATIONS)
def test_kernels_on_cuda_equal_float64(name: str, scale: int, dtype: torch.dtype, tolerance: float) -> None:
    assert max(errors(name, dtype=dtype, device=CUDA, scale=scale)) < tolerance
