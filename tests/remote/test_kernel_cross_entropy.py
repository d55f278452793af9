"""The kernels of the loss: rows against torch's own in float64, whole losses against the loops, and without Triton too."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from remote.drafter.kernels import cross_entropy
from remote.drafter.kernels.cross_entropy import TargetRows
from remote.drafter.loss import drafter_loss
from remote.drafter.metrics import metrics
from remote.spec import LossSpec
from tests.remote.cuda import CPU, CUDA, in_interpreter, needs_cuda
from tests.remote.packed import blocks_of, packed_row, relative_error
from tests.remote.test_loss import SPECS, case, expected, taught

VOCAB = 53  # of one tile


def rows(count: int, vocab: int, *, device: torch.device = CPU, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    """Logits in float32 and labels."""
    generator = torch.Generator().manual_seed(count)
    logits = scale * torch.randn(count, vocab, generator=generator)
    return logits.to(device), torch.randint(0, vocab, (count,), generator=generator).to(device)


def check_rows(device: torch.device, *, count: int, vocab: int) -> None:
    """Both visits against float64, with and without a target."""
    logits, label = rows(count, vocab, device=device)
    target, _ = rows(7, vocab, device=device, scale=5.0)
    index = torch.arange(count, device=device) % 7
    weight = torch.linspace(0, 1, count, device=device)
    read = cross_entropy.row_statistics(logits, label)
    exact = cross_entropy.row_statistics_reference(logits.double(), label)
    assert torch.equal(read.best_M, exact.best_M)
    assert torch.equal(read.rank_M, exact.rank_M)
    for name in ("log_sum_M", "entropy_M", "label_logit_M"):
        assert torch.allclose(getattr(read, name).double(), getattr(exact, name), rtol=1e-5, atol=1e-5), name
    log_p = cross_entropy.row_statistics(target)
    teacher = TargetRows(target, log_p.log_sum_M, index)
    exact_teacher = TargetRows(target.double(), target.double().logsumexp(-1), index)
    for rows_of, exact_rows in ((None, None), (teacher, exact_teacher)):
        ours, theirs = torch.empty_like(logits), torch.empty_like(logits, dtype=torch.float64)
        terms = {"hard": 0.8, "soft": 0.0 if rows_of is None else 0.3}
        soft = cross_entropy.cross_entropy_gradient(
            logits, read.log_sum_M, label, weight, target=rows_of, out_MV=ours, **terms
        )
        exact_soft = cross_entropy.cross_entropy_gradient_reference(
            logits.double(), exact.log_sum_M, label, weight.double(), target=exact_rows, out_MV=theirs, **terms
        )
        assert relative_error(ours, theirs) < 1e-5
        assert (soft is None) == (rows_of is None)
        assert soft is None or relative_error(soft, exact_soft) < 1e-5
    cross_entropy.entropy_gradient(logits, read.log_sum_M, read.entropy_M, weight, out_MV=ours)
    cross_entropy.entropy_gradient(logits.double(), exact.log_sum_M, exact.entropy_M, weight.double(), out_MV=theirs)
    assert relative_error(ours, theirs) < 1e-5


def check_in_place(device: torch.device, dtype: torch.dtype, *, count: int, vocab: int) -> None:
    """Both gradients, written where the logits stood, have the bits of those that stand alone."""
    logits, label = rows(count, vocab, device=device)
    target, _ = rows(7, vocab, device=device, scale=5.0)
    read = cross_entropy.row_statistics(logits, label)
    teacher = TargetRows(target, target.logsumexp(-1), torch.arange(count, device=device) % 7)
    weight = torch.linspace(0, 1, count, device=device)

    def both(logits_MV: Tensor, out_MV: Tensor, *, is_cap: bool) -> Tensor:
        if is_cap:
            cross_entropy.entropy_gradient(logits_MV, read.log_sum_M, read.entropy_M, weight, out_MV=out_MV)
        else:
            cross_entropy.cross_entropy_gradient(
                logits_MV, read.log_sum_M, label, weight, hard=0.8, soft=0.3, target=teacher, out_MV=out_MV
            )
        return out_MV

    for is_cap in (False, True):
        alone = both(logits, torch.empty_like(logits, dtype=dtype), is_cap=is_cap)
        used = logits.clone()
        assert torch.equal(both(used, cross_entropy.in_their_place(used, dtype), is_cap=is_cap), alone)


@pytest.mark.slow  # the interpreter takes about a second a case
@in_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("vocab", [53, 5001])
def test_a_gradient_in_the_logits_place_has_the_same_bits(vocab: int, dtype: torch.dtype) -> None:
    """The interpreter runs a program whole, tile after tile; warps that overtake each other are the card's test."""
    check_in_place(CPU, dtype, count=5, vocab=vocab)


@pytest.mark.slow  # the interpreter takes about a second a case
@in_interpreter
@pytest.mark.parametrize(("count", "vocab"), [(9, 53), (3, 64), (8, 5001), (1, 2)])
def test_rows_equal_float64(count: int, vocab: int) -> None:
    """Less than a tile, exactly one, several with a rest."""
    check_rows(CPU, count=count, vocab=vocab)


@in_interpreter
def test_no_rows_are_no_launch() -> None:
    logits, label = torch.empty(0, VOCAB), torch.empty(0, dtype=torch.int64)

    read = cross_entropy.row_statistics(logits, label)

    assert read.log_sum_M.shape == (0,)


@in_interpreter
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy of the interpreter, and what is tested
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_number_shows_in_its_row_alone(bad: float) -> None:
    logits, label = rows(3, VOCAB)
    logits[1, 7] = bad

    read = cross_entropy.row_statistics(logits, label)

    assert torch.isfinite(read.log_sum_M).tolist() == [True, False, True]
    assert torch.isfinite(read.entropy_M).tolist() == [True, False, True]
    assert read.best_M[1] == -1 or math.isinf(bad)


def whole_loss(spec: LossSpec, tensors: tuple, *, fused: bool, ahead: bool = False) -> tuple[float, Tensor, dict]:
    _, blocks, hidden_TH, head_VH, teacher_SH = tensors
    hidden, teacher = hidden_TH.detach().requires_grad_(), taught(teacher_SH, head_VH, ahead=ahead)
    sums = drafter_loss(hidden, blocks, head_VH=head_VH, teacher=teacher, spec=spec, is_fused=fused)
    sums.objective().backward()
    return float(sums.objective().detach()), hidden.grad, metrics(sums)


@pytest.mark.slow
@in_interpreter
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("chunk_tokens", [7, 1000])
@pytest.mark.parametrize("name", SPECS)
def test_fused_loss_equals_the_loops(name: str, chunk_tokens: int, ahead: bool) -> None:
    """Every term, decay and label of the recipe language; float32 against the float64 loops."""
    spec = replace(SPECS[name], chunk_tokens=chunk_tokens)
    row, blocks, *tensors = case()
    exact = tensors[0].clone().requires_grad_()
    oracle = expected(spec, row, blocks, exact, *tensors[1:])
    oracle["loss"].backward()

    value, gradient, seen = whole_loss(spec, (row, blocks, *(x.float() for x in tensors)), fused=True, ahead=ahead)

    assert value == pytest.approx(float(oracle["loss"].detach()), rel=1e-5)
    assert relative_error(gradient, exact.grad) < 1e-5
    assert seen["accuracy"] == pytest.approx(oracle["accuracy"])
    assert seen["streak"] == pytest.approx(oracle["streak"])
    assert {k: seen[f"topk_{k}"] for k in (2, 4, 8)} == pytest.approx(oracle["topk"])


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_fused_loss_without_kernels_is_the_chunked_loss(name: str, ahead: bool) -> None:
    """Float64 takes the references, as a machine without Triton does."""
    tensors = case()

    fused, chunked = (whole_loss(SPECS[name], tensors, fused=fused, ahead=ahead) for fused in (True, False))

    assert fused[0] == pytest.approx(chunked[0], rel=1e-13)
    assert relative_error(fused[1], chunked[1]) < 1e-12
    assert fused[2].pop("accuracy_at") == pytest.approx(chunked[2].pop("accuracy_at"), rel=1e-12)
    assert fused[2] == pytest.approx(chunked[2], rel=1e-12)


@pytest.mark.slow
@in_interpreter
def test_fused_loss_of_nothing_supervised_is_zero() -> None:
    row = packed_row([12], vocab=40, unmasked=1.0)
    row, blocks, *tensors = case(row=row, num_slots=4)

    value, gradient, _ = whole_loss(SPECS["all terms"], (row, blocks, *(x.float() for x in tensors)), fused=True)

    assert value == 0
    assert not gradient.any()


def test_fused_loss_shows_one_bad_hidden_state() -> None:
    row, blocks, hidden_TH, *tensors = case()
    at = int(blocks.supervised_T.nonzero()[3])
    hidden_TH[at, 0] = math.nan

    value, gradient, seen = whole_loss(SPECS["ce + kl"], (row, blocks, hidden_TH, *tensors), fused=True)

    assert not math.isfinite(value)
    assert not any(math.isfinite(seen[name]) for name in ("loss", "loss_ce", "loss_kl"))
    assert not torch.isfinite(gradient[at]).all()


# ---- on a card


@needs_cuda
@pytest.mark.parametrize(("count", "vocab"), [(9, 53), (300, 248_320), (64, 151_937)])
def test_rows_on_cuda_equal_float64(count: int, vocab: int) -> None:
    check_rows(CUDA, count=count, vocab=vocab)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [53, 151_937, 248_320])
def test_a_gradient_in_the_logits_place_has_the_same_bits_on_cuda(vocab: int, dtype: torch.dtype) -> None:
    for _ in range(3):
        check_in_place(CUDA, dtype, count=600, vocab=vocab)


@needs_cuda
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_fused_loss_on_cuda_equals_the_chunked_one(name: str, ahead: bool) -> None:
    """A real vocabulary in bfloat16; both make fp32 logits of the same product and differ by summation alone."""
    row = packed_row([60, 40], vocab=151_936)
    blocks = blocks_of(row, num_slots=8, block_size=16)
    generator = torch.Generator().manual_seed(2)
    sizes = ((128, 256), (151_936, 256), (100, 256))
    hidden, head, teacher = ((0.5 * torch.randn(*size, generator=generator)).to(CUDA, torch.bfloat16) for size in sizes)
    tensors = (row, blocks.to("cuda"), hidden, head, teacher)

    fused, chunked = (
        whole_loss(replace(SPECS[name], chunk_tokens=50), tensors, fused=fused, ahead=ahead) for fused in (True, False)
    )

    assert fused[0] == pytest.approx(chunked[0], rel=1e-4)
    assert relative_error(fused[1], chunked[1]) < 1e-3
