"""The target's expectation against sums written out in float64; what rounding it costs; rows apart and together."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from remote.drafter import teacher
from remote.drafter.loss import drafter_loss
from remote.drafter.teacher import Expectation, expect, teacher_of, tensors_of
from remote.spec import LossSpec
from tests.remote.cuda import needs_cuda
from tests.remote.loss_oracle import random_case
from tests.remote.packed import blocks_of, packed_row, relative_error

HIDDEN, VOCAB = 6, 17


def drawn(num_positions: int, *, seed: int = 0, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((num_positions, HIDDEN), (VOCAB, HIDDEN))
    last_hidden_SH, head_VH = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return last_hidden_SH * scale, head_VH


@given(
    num_positions=st.integers(0, 9),
    seed=st.integers(0, 500),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    rows=st.integers(1, 5),
)
def test_an_expectation_is_the_sum_written_out(num_positions: int, seed: int, scale: float, rows: int) -> None:
    last_hidden_SH, head_VH = drawn(num_positions, seed=seed, scale=scale)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teacher, "EXPECT_ROWS", rows)
        found = expect(last_hidden_SH, head_VH)

    for s in range(num_positions):
        logits = [sum(float(a * b) for a, b in zip(last_hidden_SH[s], head_VH[v], strict=True)) for v in range(VOCAB)]
        top = max(logits)
        total = sum(math.exp(logit - top) for logit in logits)
        p = [math.exp(logit - top) / total for logit in logits]
        best = logits.index(top)
        mean = [sum(p[v] * float(head_VH[v, h]) for v in range(VOCAB)) for h in range(HIDDEN)]
        assert int(found.best_S[s]) == best
        assert float(found.entropy_S[s]) == pytest.approx(-sum(q * math.log(q) for q in p if q), abs=1e-12)
        assert float(found.best_p_S[s]) == pytest.approx(p[best], rel=1e-12)
        assert (found.rest_SH[s] + p[best] * head_VH[best]).tolist() == pytest.approx(mean, rel=1e-10, abs=1e-12)


def test_the_soft_cross_entropy_needs_no_more_of_the_target() -> None:
    last_hidden_SH, head_VH = drawn(5)
    hidden_SH, _ = drawn(5, seed=3)
    found, logits_SV = expect(last_hidden_SH, head_VH), hidden_SH @ head_VH.T

    best_logit_S = logits_SV.gather(1, found.best_S[:, None])[:, 0]
    soft_ce_S = found.soft_ce(logits_SV.logsumexp(-1), best_logit_S, found.rest_logit(hidden_SH))

    p_SV = (last_hidden_SH @ head_VH.T).softmax(-1)
    torch.testing.assert_close(soft_ce_S, -(p_SV * logits_SV.log_softmax(-1)).sum(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_position_that_is_not_finite_says_so_and_spoils_no_other(bad: float) -> None:
    last_hidden_SH, head_VH = drawn(3)
    last_hidden_SH[1, 0] = bad

    found = expect(last_hidden_SH, head_VH)

    assert torch.isfinite(found.entropy_S).tolist() == [True, False, True]
    assert torch.isfinite(found.rest_SH).all(1).tolist() == [True, False, True]
    assert bool(((found.best_S >= 0) & (found.best_S < VOCAB)).all())


def test_parts_stay_together_when_taken_apart() -> None:
    last_hidden_SH, head_VH = drawn(7)
    whole = expect(last_hidden_SH, head_VH)

    again = teacher_of(tensors_of(whole))

    assert isinstance(again, Expectation)
    assert all(a is b for a, b in zip(again.tensors, whole.tensors, strict=True))
    assert teacher_of(tensors_of(last_hidden_SH)) is last_hidden_SH


@pytest.mark.slow
@pytest.mark.usefixtures("without_triton")  # whose interpreter cuts numbers off where a card rounds them
@pytest.mark.parametrize("terms", [{"ce": 1.0, "kl": 0.15}, {"kl": 1.0}])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.3])
def test_in_bfloat16_an_expectation_costs_the_gradient_no_more_than_the_logits_would(
    temperature: float, terms: dict[str, float]
) -> None:
    """A flat and two peaked teachers, a drafter that is half right; the oracle is the same loss in float64."""
    row, vocab, hidden_size = packed_row([40, 30], vocab=4000), 4000, 128
    blocks = blocks_of(row, num_slots=8, block_size=8)
    hidden, head, last = (
        (tensor * hidden_size**-0.25 / temperature**0.5).bfloat16()
        for tensor in random_case(row, 64, hidden_size=hidden_size, vocab=vocab)
    )
    head = (
        head + (0.5 * head.float().std() * torch.randn(hidden_size)).bfloat16()
    )  # rows of real heads have much in common
    near = blocks.supervised_T & (torch.arange(64) % 2 == 0)
    hidden[near] = last[blocks.teacher_T[near]]  # what a drafter that has learnt says
    spec = replace(LossSpec(terms=terms, gamma=10.0), chunk_tokens=20)

    def gradient(known: object, head: Tensor, dtype: torch.dtype) -> Tensor:
        ours = hidden.to(dtype, copy=True).requires_grad_()
        drafter_loss(ours, blocks, head_VH=head, teacher=known, spec=spec).objective().backward()
        assert ours.grad is not None
        return ours.grad

    exact = gradient(last.double(), head.double(), torch.float64)
    by_logits = relative_error(gradient(last, head, torch.bfloat16), exact)
    ahead = relative_error(gradient(expect(last, head), head, torch.bfloat16), exact)

    assert ahead < max(0.005, 1.25 * by_logits)


@pytest.mark.slow
@pytest.mark.usefixtures("without_triton")
def test_a_drafter_that_says_what_the_target_says_has_no_divergence_from_it_in_bfloat16() -> None:
    """Of every slot, not of their mean; and where nothing is to be learnt the gradient is next to nothing."""
    check_equal_to_the_target(torch.device("cpu"))


@needs_cuda
def test_a_drafter_that_says_what_the_target_says_has_no_divergence_from_it_on_cuda() -> None:
    """Where the shares go in two halves."""
    check_equal_to_the_target(torch.device("cuda"))


def check_equal_to_the_target(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(4000, 128, generator=generator) + 0.7 * torch.randn(1, 128, generator=generator)
    hidden, head = (
        (tensor * 128**-0.25).to(device, torch.bfloat16) for tensor in (torch.randn(64, 128, generator=generator), head)
    )
    found, logits = expect(hidden, head), hidden.double() @ head.double().T

    best_logit = logits.gather(1, found.best_S[:, None])[:, 0]
    soft_ce = found.soft_ce(logits.logsumexp(-1), best_logit, found.rest_logit(hidden))

    assert float((soft_ce - found.entropy_S).abs().max()) < 1e-3
    p = logits.softmax(-1).scatter(1, found.best_S[:, None], 0.0)
    assert relative_error(found.rest_SH, p @ head.double()) < 1e-4
