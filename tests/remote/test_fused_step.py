"""A whole step by the kernels, from features to the gradient of every trained tensor, against the plain path in float64."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from remote.drafter import synthetic, workbench
from remote.drafter.attention import Backend
from remote.drafter.coarse_head import CoarseHead
from remote.drafter.head_plan import plan_head
from remote.drafter.kernels.attention_backward import context_gradient_kernel, query_gradient_kernel
from remote.drafter.kernels.attention_forward import forward_kernel
from remote.drafter.kernels.column_sums import _column_sums_kernel
from remote.drafter.kernels.cross_entropy import _cross_entropy_kernel, _statistics_kernel
from remote.drafter.kernels.exact_rows import _exact_rows_kernel
from remote.drafter.kernels.norm import _head_gradient_kernel, _norm_gradient_kernel
from remote.drafter.loss import drafter_loss
from remote.drafter.measure import Meter
from remote.drafter.model import Checkpointing, DFlashDrafter
from remote.drafter.step import assemble, run_step
from remote.report import UserFault
from remote.spec import DFlashSpec, DrafterSpec, LossSpec
from tests.remote.cuda import CPU, CUDA, in_interpreter, needs_cuda, never_waiting
from tests.remote.interpreter import launched
from tests.remote.packed import blocks_of, packed_row, relative_error
from tests.remote.specs import tiny_spec

ROOT = Path(__file__).resolve().parents[2]
TARGET = tiny_spec().target
DRAFTER = replace(tiny_spec().drafter, layer_types=["sliding", "full"], sliding_window=6)
LOSS = LossSpec(terms={"ce": 1.0, "kl": 0.15}, gamma=10.0, chunk_tokens=3)


def step(
    drafter: DrafterSpec = DRAFTER,
    *,
    is_fused: bool,
    dtype: torch.dtype,
    device: torch.device = CPU,
    checkpointing: Checkpointing = "none",
) -> tuple[float, dict[str, Tensor]]:
    """The loss and each gradient by name; weights and inputs are bfloat16 numbers, so that no dtype rounds them."""
    row = packed_row([7, 5], padding=1, vocab=TARGET.vocab_size)
    blocks = blocks_of(row, num_slots=3, max_anchors=2, block_size=drafter.block_size).to(device)
    generator = torch.Generator().manual_seed(4)
    backend = Backend("triton" if is_fused else "eager", "test")
    model = DFlashDrafter(TARGET, drafter, backend=backend, activation_checkpointing=checkpointing, is_fused=is_fused)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.2 * drawn if parameter.ndim == 2 else 1 + 0.1 * drawn)
    features, table, teacher = (
        torch.randn(*size, generator=generator).bfloat16().to(device, dtype)
        for size in ((13, 3 * TARGET.hidden_size), (TARGET.vocab_size, TARGET.hidden_size), (13, TARGET.hidden_size))
    )
    model = model.bfloat16().to(device, dtype)
    plan = plan_head(blocks, chunk_tokens=LOSS.chunk_tokens) if is_fused else None  # the plain one computes every row
    rows_M = None if plan is None else plan.index_M
    ids = blocks.distinct_ids if is_fused else blocks.ids_T
    hidden = model(features, table[ids], row.to(device), blocks, rows_M)
    loss = drafter_loss(
        hidden, blocks, head_VH=table, teacher=teacher, spec=LOSS, plan=plan, is_fused=is_fused
    ).objective()
    loss.backward()
    return float(loss.detach()), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.slow  # the interpreter takes a few seconds
@in_interpreter
@pytest.mark.parametrize(("kinds", "checkpointing"), [(["sliding", "full"], "none"), (["sliding"], "non_reentrant")])
def test_fused_step_equals_float64(kinds: list, checkpointing: Checkpointing) -> None:
    drafter = replace(DRAFTER, num_layers=len(kinds), layer_types=kinds)
    value, grads = step(drafter, is_fused=True, dtype=torch.float32, checkpointing=checkpointing)

    exact, oracle = step(drafter, is_fused=False, dtype=torch.float64)

    assert value == pytest.approx(exact, rel=1e-6)
    assert {name: relative_error(grad, oracle[name]) < 1e-5 for name, grad in grads.items()} == dict.fromkeys(
        grads, True
    )


def test_fused_step_without_kernels_is_the_plain_one() -> None:
    value, grads = step(is_fused=True, dtype=torch.float64)

    exact, oracle = step(is_fused=False, dtype=torch.float64)

    assert value == pytest.approx(exact, rel=1e-12)
    assert all(relative_error(grad, oracle[name]) < 1e-11 for name, grad in grads.items())


def test_kernels_are_taken_where_the_recipe_names_them_and_refused_where_they_cannot_run() -> None:
    plain, asked = tiny_spec(), tiny_spec(train={"kernels": "triton"})

    assert workbench.choose(plain, CPU).reasons["kernels"].startswith("torch: auto, Triton needs CUDA")
    with pytest.raises(UserFault, match=r"train\.kernels is triton, which cannot train here: Triton needs CUDA"):
        workbench.choose(asked, CPU)


def trained_step(spec: DFlashSpec, device: torch.device, choices: workbench.Choices) -> tuple[Tensor, Tensor]:
    """Loss sums and gradient norm of the first step of a training on one synthetic row."""
    target = synthetic.stand_in(spec, device=device, dtype=choices.dtype)
    bench = workbench.build(spec, choices, meter=Meter(device), embed=target.embed, head_VH=target.head_VH)
    batch = synthetic.batch(spec, [spec.data.row_tokens], like=torch.empty(0, dtype=choices.dtype))
    result = run_step(1, [assemble(batch, bench, num_slots=spec.data.max_anchors)], bench)
    return result.sums.totals_F, result.grad_norm


@pytest.mark.slow  # the interpreter takes a few seconds
@in_interpreter
def test_a_training_step_with_fused_kernels_is_that_of_torch() -> None:
    spec = tiny_spec(data={"row_tokens": 12, "max_anchors": 2}, drafter={"num_layers": 1})
    choices = workbench.choose(spec, CPU)

    with launched() as kernels:
        ours = trained_step(spec, CPU, replace(choices, is_fused=True))
        num_ours = len(kernels)
        theirs = trained_step(spec, CPU, replace(choices, is_fused=False))

    assert torch.allclose(ours[0], theirs[0], rtol=1e-5)
    assert torch.allclose(ours[1], theirs[1], rtol=1e-5)
    assert (num_ours > 0, len(kernels)) == (True, num_ours), "each took its own way"


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it fails from here on
import torch
from remote.drafter.kernels import cross_entropy, launch, norm, swiglu
assert not launch.is_installed
x, weight, label = torch.randn(4, 8), torch.randn(8), torch.tensor([1, 0, 7, 2])
assert torch.equal(norm.rms_norm(x, weight, 1e-6), norm.rms_norm_reference(x, weight, 1e-6))
assert torch.equal(swiglu.swiglu_linear(x, x, x), swiglu.swiglu_linear_reference(x, x, x))
assert torch.equal(cross_entropy.row_statistics(x, label).rank_M, cross_entropy.row_statistics_reference(x, label).rank_M)
assert "not installed" in launch.obstacle(device=torch.device("cuda"), dtype=torch.bfloat16)
"""


@pytest.mark.slow  # a process that imports torch
def test_the_kernels_files_load_and_compute_without_triton() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


class Unwaiting(TorchDispatchMode):
    """Refuses what makes the host wait for a card, also where there is none."""

    WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.unique", "aten.equal")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not str(function).startswith(self.WAITS), f"{function} reads a number from the device"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_coarse", [False, True])
def test_the_loss_reads_no_number_from_the_device(is_coarse: bool) -> None:
    row = packed_row([7, 5], padding=1, vocab=TARGET.vocab_size)
    blocks = blocks_of(row, num_slots=3, max_anchors=2, block_size=5)
    head = torch.randn(TARGET.vocab_size, 16)
    plan, coarse = plan_head(blocks, chunk_tokens=LOSS.chunk_tokens), CoarseHead.of(head) if is_coarse else None
    hidden, teacher = torch.randn(len(plan.index_M), 16, requires_grad=True), torch.randn(13, 16)
    assert len(plan.chunks) > 1

    with Unwaiting():
        drafter_loss(
            hidden, blocks, head_VH=head, teacher=teacher, spec=LOSS, plan=plan, is_fused=True, coarse_head=coarse
        ).objective().backward()
        with pytest.raises(AssertionError, match="reads a number"):
            float(hidden.sum())

    assert hidden.grad is not None
    assert hidden.grad.any()


# ---- on a card


@needs_cuda
def test_a_training_step_on_cuda_with_all_kernels_is_that_of_torch() -> None:
    spec = tiny_spec(data={"row_tokens": 512, "max_anchors": 64})
    fused, plain = (
        replace(spec, train=replace(spec.train, kernels=kernels), drafter=replace(spec.drafter, attention=attention))
        for kernels, attention in (("triton", "triton"), ("torch", "flex"))
    )

    ours, theirs = (trained_step(each, CUDA, workbench.choose(each, CUDA)) for each in (fused, plain))

    assert torch.allclose(ours[1], theirs[1], rtol=0.02)
    assert torch.allclose(ours[0][:1], theirs[0][:1], rtol=0.01)


@needs_cuda
@pytest.mark.parametrize("checkpointing", ["none", "non_reentrant"])
def test_fused_step_on_cuda_is_as_near_to_float64_as_the_plain_one(checkpointing: Checkpointing) -> None:
    """bfloat16; twice the plain path's own error is granted to single small tensors."""
    drafter = replace(DRAFTER, head_dim=64)
    _, fused = step(drafter, is_fused=True, dtype=torch.bfloat16, device=CUDA, checkpointing=checkpointing)
    _, plain = step(drafter, is_fused=False, dtype=torch.bfloat16, device=CUDA)

    _, oracle = step(drafter, is_fused=False, dtype=torch.float64, device=CUDA)

    for name, grad in fused.items():
        assert relative_error(grad, oracle[name]) < max(0.01, 2 * relative_error(plain[name], oracle[name])), name


@needs_cuda
@pytest.mark.parametrize("hidden_gradient", ["full", "fp8"])
def test_other_lengths_and_anchors_compile_nothing_anew_and_nothing_waits(hidden_gradient: str) -> None:
    base = tiny_spec(
        data={"row_tokens": 512, "max_anchors": 64},
        train={"kernels": "triton"},
        loss={"chunk_tokens": 37, "hidden_gradient": hidden_gradient},
    )
    spec = replace(base, drafter=replace(base.drafter, attention="triton"))
    choices = workbench.choose(spec, CUDA)
    target = synthetic.stand_in(spec, device=CUDA, dtype=choices.dtype)
    bench = workbench.build(spec, choices, meter=Meter(CUDA), embed=target.embed, head_VH=target.head_VH)

    def batches(size: int, slots: int) -> list:
        batch = synthetic.batch(spec, [size], like=torch.empty(0, dtype=choices.dtype))
        return [assemble(batch, bench, num_slots=slots)]

    run_step(1, batches(512, 64), bench)
    kernels = (
        forward_kernel, query_gradient_kernel, context_gradient_kernel, _statistics_kernel, _cross_entropy_kernel,
        _norm_gradient_kernel, _head_gradient_kernel, _exact_rows_kernel, _column_sums_kernel,
    )  # fmt: skip
    before = [len(kernel.device_caches[0][0]) for kernel in kernels]
    others = [batches(size, slots) for size, slots in ((511, 64), (480, 33), (333, 7))]
    torch.cuda.synchronize()
    with never_waiting():
        for number, micro_batches in enumerate(others, start=2):
            run_step(number, micro_batches, bench)

    assert [len(kernel.device_caches[0][0]) for kernel in kernels] == before
