"""The gradient made with the head in eight bits: its arithmetic exactly, its error against float64, where it is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from remote.coherence import cross_field_errors
from remote.drafter import coarse_head, loss_fused
from remote.drafter.coarse_head import CoarseHead, Drift, ExactTokens
from remote.drafter.kernels import column_sums, cross_entropy, exact_rows
from remote.drafter.loss import drafter_loss
from remote.spec import LossSpec
from tests.remote.cuda import CPU, CUDA, in_interpreter, needs_cuda
from tests.remote.packed import blocks_of, packed_row, relative_error
from tests.remote.specs import tiny_spec
from tests.remote.test_loss import SPECS, VOCAB, case, expected, taught

HARD = [name for name, spec in SPECS.items() if spec.terms.get("ce")]


def gradient_of(spec: LossSpec, tensors: tuple, *, ahead: bool, is_corrected: bool = True) -> tuple[float, Tensor]:
    _, blocks, hidden_TH, head_VH, teacher_SH = tensors
    hidden, teacher = hidden_TH.detach().requires_grad_(), taught(teacher_SH, head_VH, ahead=ahead)
    coarse = replace(CoarseHead.of(head_VH), is_corrected=is_corrected)
    sums = drafter_loss(hidden, blocks, head_VH=head_VH, teacher=teacher, spec=spec, is_fused=True, coarse_head=coarse)
    sums.objective().backward()
    assert hidden.grad is not None
    return float(sums.objective().detach()), hidden.grad


def by_loops(spec: LossSpec, tensors: tuple) -> tuple[float, Tensor]:
    row, blocks, hidden_TH, head_VH, teacher_SH = tensors
    hidden = hidden_TH.clone().requires_grad_()
    oracle = expected(spec, row, blocks, hidden, head_VH, teacher_SH)
    oracle["loss"].backward()
    assert hidden.grad is not None
    return float(oracle["loss"].detach()), hidden.grad


def in_float32(tensors: tuple) -> tuple:
    row, blocks, *others = tensors
    return (row, blocks, *(tensor.float() for tensor in others))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("chunk_tokens", [7, 1000])
@pytest.mark.parametrize("name", HARD)
def test_where_every_token_is_exact_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch, name: str, chunk_tokens: int, ahead: bool
) -> None:
    """The coefficients of the exact tokens alone: against the loops in float64, labels among the likeliest and not."""
    monkeypatch.setattr(loss_fused, "NUM_LIKELIEST", VOCAB)
    spec, tensors = replace(SPECS[name], chunk_tokens=chunk_tokens), case()

    value, gradient = gradient_of(spec, in_float32(tensors), ahead=ahead)

    exact_value, exact_gradient = by_loops(spec, tensors)
    assert value == pytest.approx(exact_value, rel=1e-5)
    assert relative_error(gradient, exact_gradient) < 1e-5


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", HARD)
def test_what_is_coarse_costs_little_and_the_loss_nothing(name: str, ahead: bool) -> None:
    spec, tensors = SPECS[name], case()

    value, gradient = gradient_of(spec, in_float32(tensors), ahead=ahead)

    exact_value, exact_gradient = by_loops(spec, tensors)
    assert value == pytest.approx(exact_value, rel=1e-5)
    assert 1e-5 < relative_error(gradient, exact_gradient) < 0.02


def test_the_coarse_product_is_that_of_the_rounded_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coarse_head, "SLICE", 7)  # not a part of the vocabulary
    monkeypatch.setattr(coarse_head, "MADE_AT_ONCE", 80)
    generator = torch.Generator().manual_seed(0)
    head_VH = torch.randn(48, 16, generator=generator) * torch.logspace(-3, 2, 48)[:, None]
    weight_MV = (100 * torch.randn(5, 48, generator=generator)).to(cross_entropy.COARSE)

    head = CoarseHead.of(head_VH)
    found_MH = head.weighted_rows(weight_MV)

    rounded_VH = head.weight_HV.double().T * head.scale.double()
    assert relative_error(found_MH, weight_MV.double() @ rounded_VH) < 1e-6
    error_VH, size_VH = (rounded_VH - head_VH.double()).abs(), head_VH.double().abs()
    assert (error_VH <= 2**-4 * size_VH + 2**-10 * head.scale).all()  # half a step of three bits, or of the smallest
    assert (error_VH > 0.03 * size_VH).any()

    assert not CoarseHead.of(torch.zeros(16, 16)).weighted_rows(torch.ones(1, 16).to(cross_entropy.COARSE)).any()


def test_what_rounding_the_head_does_to_the_sum_of_all_slots_is_taken_off() -> None:
    """In two chunks, with the weights of slots; what is left is the rounding of the summed weights, three bits of fraction."""
    generator = torch.Generator().manual_seed(0)
    head_VH = torch.randn(512, 32, generator=generator)
    gradient_MV = (400 * torch.rand(40, 512, generator=generator) ** 8).to(cross_entropy.COARSE)
    weight_M, unit_M, rest_M = (torch.rand(40, generator=generator) for _ in range(3))
    head, drift = CoarseHead.of(head_VH), Drift(CoarseHead.of(head_VH))
    for rows in (slice(0, 25), slice(25, 40)):
        nothing = torch.zeros(1)
        drift.count(ExactTokens(nothing, nothing, unit_M[rows], weight_M[rows], rest_M[rows]), gradient_MV[rows])

    share_M, drift_H = drift.spread(head_VH)

    scale_M1 = (weight_M / unit_M).double()[:, None]
    exact_H = (scale_M1 * (gradient_MV.double() @ head_VH.double())).sum(0)
    coarse_MH = scale_M1 * head.weighted_rows(gradient_MV)
    found_MH = coarse_MH + share_M[:, None] * drift_H
    assert (found_MH.sum(0) - exact_H).norm() < 0.05 * (coarse_MH.sum(0) - exact_H).norm()
    torch.testing.assert_close(share_M / share_M.sum(), rest_M / rest_M.sum())


@pytest.mark.parametrize("chunk_tokens", [7, 1000])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", ["ce", "ce + kl", "d-pace with everything", "all terms"])
def test_a_loss_takes_it_off(name: str, ahead: bool, chunk_tokens: int) -> None:
    """A flat drafter, whose slots all give much to many tokens. What is left is the rounding of g, as in one chunk or many."""
    row, blocks, hidden_TH, head_VH, teacher_SH = in_float32(case())
    spec, tensors = replace(SPECS[name], chunk_tokens=chunk_tokens), (row, blocks, 0.1 * hidden_TH, head_VH, teacher_SH)
    _, exact = by_loops(spec, tensors)

    _, corrected = gradient_of(spec, tensors, ahead=ahead)
    _, uncorrected = gradient_of(spec, tensors, ahead=ahead, is_corrected=False)

    assert (corrected - exact).sum(0).norm() < 0.9 * (uncorrected - exact).sum(0).norm()
    assert relative_error(corrected, exact) < 1.02 * relative_error(uncorrected, exact)


@pytest.mark.slow  # the interpreter takes its time for each slot
@pytest.mark.parametrize("denominator", [1.0, 418.7])
def test_bfloat16_rounds_none_of_it_away(monkeypatch: pytest.MonkeyPatch, denominator: float) -> None:
    """It is less than half a step of most numbers that it is added to; in the mean over the slots it must arrive all the same."""
    monkeypatch.setattr(loss_fused, "NUM_LIKELIEST", 1)
    spread, drawn = Drift.spread, list[tuple[Tensor, Tensor]]()
    monkeypatch.setattr(Drift, "spread", lambda drift, head: drawn.append(spread(drift, head)) or drawn[-1])
    row = packed_row([200], vocab=256)
    blocks = blocks_of(row, num_slots=120, block_size=6)
    generator = torch.Generator().manual_seed(1)
    hidden_TH, head_VH = (torch.randn(size, 16, generator=generator).bfloat16() for size in (720, 256))
    found = []
    for is_corrected in (True, False):
        hidden, coarse = hidden_TH.clone().requires_grad_(), replace(CoarseHead.of(head_VH), is_corrected=is_corrected)
        sums = drafter_loss(
            hidden,
            blocks,
            head_VH=head_VH,
            teacher=None,
            spec=LossSpec(chunk_tokens=500),
            is_fused=True,
            coarse_head=coarse,
        )
        (sums.numerator / denominator).backward()
        assert hidden.grad is not None
        found.append(hidden.grad.double().sum(0))

    share_M, drift_H = (part.double() for part in drawn[0])
    due_H, steps_H = share_M.sum() * drift_H / denominator, (found[0] - found[1])
    arrived = float(steps_H @ due_H / (due_H @ due_H))
    assert 0.8 < arrived < 1.2
    size, change = (float(part.double().abs().mean()) for part in (hidden.grad, share_M[:, None] * drift_H))
    assert change / denominator < 2**-9 * size, "no test: bfloat16 would take in a change of this size"


@pytest.mark.parametrize("is_target_there", [False, True])
def test_a_slot_bears_as_much_of_it_as_it_leaves_to_other_tokens(is_target_there: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_MV, target_MV = (3 * torch.randn(4, 20, generator=generator) for _ in range(2))
    label_M, weight_M = torch.tensor([0, 3, 3, 19]), torch.tensor([1.0, 0.5, 0.0, 2.0])
    read = cross_entropy.row_statistics(logits_MV, label_M, num_likeliest=4)
    target = cross_entropy.TargetRows(target_MV, target_MV.logsumexp(-1), torch.arange(4)) if is_target_there else None

    exact = ExactTokens.of(logits_MV, read, label_M, weight_M, hard=1.0, soft=0.5, target=target, expected=None)

    q_MV, p_MV = logits_MV.double().softmax(-1), target_MV.double().softmax(-1)
    for slot in range(4):
        others = [token for token in range(20) if token not in exact.token_MK[slot].tolist()]
        left = 1.5 * q_MV[slot, others].sum() + (0.5 * p_MV[slot, others].sum() if is_target_there else 0)
        assert float(exact.rest_M[slot]) == pytest.approx(float(weight_M[slot] * left), rel=1e-4, abs=1e-6)


def test_where_nothing_is_left_to_other_tokens_there_is_no_such_sum() -> None:
    drift, nothing = Drift(CoarseHead.of(torch.randn(32, 16))), torch.zeros(2)
    gradient_MV = torch.full((2, 32), 448.0).to(cross_entropy.COARSE)
    drift.count(ExactTokens(nothing, nothing, torch.full((2,), 1e-3), torch.ones(2), nothing), gradient_MV)

    share_M, drift_H = drift.spread(torch.randn(32, 16))

    assert share_M.tolist() == [0.0, 0.0]
    assert torch.isfinite(drift_H).all()


def test_a_loss_without_a_slot_has_nothing_to_take_off() -> None:
    row = packed_row([6, 5], unmasked=1.0, vocab=VOCAB)
    blocks = blocks_of(row, num_slots=3, block_size=5)
    hidden, head_VH = torch.randn(15, 12, requires_grad=True), torch.randn(VOCAB, 12)

    sums = drafter_loss(
        hidden,
        blocks,
        head_VH=head_VH,
        teacher=None,
        spec=LossSpec(),
        is_fused=True,
        coarse_head=CoarseHead.of(head_VH),
    )
    sums.objective().backward()

    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_a_token_named_twice_counts_once() -> None:
    """Label, likeliest and the target's best are the same token in the first slot, all others in the second."""
    logits_MV = torch.tensor([[0.0, 3.0, 1.0, -1.0], [2.0, 0.0, 1.0, -1.0]])
    label_M, weight_M = torch.tensor([1, 3]), torch.tensor([1.0, 0.5])
    read = cross_entropy.row_statistics(logits_MV, label_M, num_likeliest=1)

    exact = ExactTokens.of(logits_MV, read, label_M, weight_M, hard=1.0, soft=0.0, target=None, expected=None)

    q_MV = logits_MV.double().softmax(-1)
    assert exact.token_MK.tolist() == [[1, 1], [3, 0]]
    assert exact.coefficient_MK[0].tolist() == pytest.approx([float(q_MV[0, 1]) - 1, 0.0])
    assert exact.coefficient_MK[1].tolist() == pytest.approx([0.5 * (float(q_MV[1, 3]) - 1), 0.5 * float(q_MV[1, 0])])


def test_a_slot_of_no_weight_has_no_gradient() -> None:
    row, blocks, hidden_TH, head_VH, teacher_SH = in_float32(case())

    _, gradient = gradient_of(LossSpec(gamma=0.01), (row, blocks, hidden_TH, head_VH, teacher_SH), ahead=True)

    assert torch.isfinite(gradient).all()  # w_k = exp(-(k-1)/gamma) is zero in float32 from the third slot on
    assert gradient.any()


def test_a_bad_number_stays_bad() -> None:
    row, blocks, hidden_TH, head_VH, teacher_SH = in_float32(case())
    at = int(blocks.supervised_T.nonzero()[3])
    hidden_TH[at, 0] = torch.nan

    value, gradient = gradient_of(SPECS["ce + kl"], (row, blocks, hidden_TH, head_VH, teacher_SH), ahead=True)

    assert value != value
    assert not torch.isfinite(gradient[at]).any()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"loss": {"terms": {"ce": 1.0}}}, []),
        ({"loss": {"terms": {"ce": 1.0, "kl": 0.5, "soft_ce": 0.5, "cap": 2.0}}}, []),
        ({"loss": {"terms": {"ce": 0.3, "kl": 0.1, "soft_ce": 0.2}}}, []),
        ({"loss": {"terms": {"kl": 1.0}}}, ["it needs at least as much of ce as of soft terms; here are 0 and 1"]),
        ({"loss": {"terms": {"ce": 0.1, "kl": 0.15}}}, ["it needs at least as much of ce as of soft terms; here are 0.1 and 0.15"]),
        ({"loss": {"terms": {"cap": 1.0}}}, ["it needs at least as much of ce as of soft terms; here are 0 and 0"]),
        ({"target": {"vocab_size": 151_937}}, ["its product takes multiples of 16; the target has vocab_size 151,937"]),
        ({"train": {"kernels": "torch", "dtype": "float32"}}, ["it is a part of draftyard's own kernels; train.kernels is torch", "it belongs to bfloat16; train.dtype is float32"]),
    ],
)  # fmt: skip
def test_a_recipe_that_fp8_would_harm_or_cannot_take_is_told_why(changes: dict, told: list[str]) -> None:
    spec = tiny_spec(**{"loss": {"hidden_gradient": "fp8"} | changes.pop("loss", {}), **changes})

    assert cross_field_errors(spec) == [("loss.hidden_gradient", f"is fp8: {why}") for why in told]


# ---- the kernels, in Triton's interpreter


def check_exact_rows(device: torch.device, *, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    product, head, other = drawn(5, width), drawn(30, width).to(dtype), drawn(5, width)
    scale, coefficient, other_scale = drawn(5), drawn(5, 3), drawn(5)
    token = torch.randint(0, 30, (5, 3), generator=generator).to(device)
    for named in ({}, {"other_MH": other, "other_scale_M": other_scale}):
        ours = exact_rows.add_exact_rows(product.clone(), scale, token, coefficient, head, **named)
        exact = exact_rows.add_exact_rows_reference(
            product.double(), scale.double(), token, coefficient.double(), head.double(),
            **{name: tensor.double() for name, tensor in named.items()},
        )  # fmt: skip
        assert relative_error(ours, exact) < 1e-6


@pytest.mark.slow  # the interpreter takes about a second a case
@in_interpreter
@pytest.mark.parametrize(("width", "dtype"), [(16, torch.float32), (1500, torch.float16)])
def test_exact_rows_equal_float64(width: int, dtype: torch.dtype) -> None:
    check_exact_rows(CPU, width=width, dtype=dtype)


def check_column_sums(device: torch.device, *, num_rows: int, width: int, dtype: torch.dtype) -> None:
    """Rows that stand four times their width apart, as where the logits stood; added to what was there."""
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(num_rows, 4 * width, generator=generator).to(device).to(dtype)[:, :width]
    weight, total = (torch.randn(size, generator=generator).to(device) for size in (num_rows, width))

    ours = column_sums.add_column_sums(total.clone(), weight, rows)

    assert relative_error(ours, total.double() + weight.double() @ rows.double()) < 1e-6


@pytest.mark.slow  # the interpreter takes about a second a case
@in_interpreter
@pytest.mark.parametrize(("num_rows", "width"), [(0, 16), (5, 16), (33, 1500)])
def test_column_sums_equal_float64(num_rows: int, width: int) -> None:
    check_column_sums(CPU, num_rows=num_rows, width=width, dtype=torch.float16)  # it knows no float8


def check_likeliest(device: torch.device, *, vocab: int, count: int) -> None:
    """The first is the best, all are tokens, none stands twice where there are enough, each is the best of its lane."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(6, vocab, generator=generator).to(device)

    read = cross_entropy.row_statistics(logits, num_likeliest=count)

    assert torch.equal(read.likeliest_MK[:, 0], logits.argmax(-1))
    assert int(read.likeliest_MK.min()) >= 0
    assert int(read.likeliest_MK.max()) < vocab
    if vocab >= count:
        assert all(len(set(row)) == count for row in read.likeliest_MK.tolist())
        found = logits.gather(1, read.likeliest_MK)
        assert torch.equal(found, found.sort(-1, descending=True).values)


@pytest.mark.slow  # the interpreter takes about a second a case
@in_interpreter
@pytest.mark.parametrize(("vocab", "count"), [(53, 4), (3, 4), (5001, 4), (64, 1)])
def test_the_likeliest_are_the_best_of_their_lanes(vocab: int, count: int) -> None:
    check_likeliest(CPU, vocab=vocab, count=count)


# ---- on a card


@needs_cuda
@pytest.mark.parametrize(("width", "dtype"), [(16, torch.float32), (5120, torch.bfloat16)])
def test_exact_rows_on_cuda_equal_float64(width: int, dtype: torch.dtype) -> None:
    check_exact_rows(CUDA, width=width, dtype=dtype)


@needs_cuda
@pytest.mark.parametrize(("num_rows", "width"), [(5, 16), (1054, 151_936)])
def test_column_sums_on_cuda_equal_float64(num_rows: int, width: int) -> None:
    check_column_sums(CUDA, num_rows=num_rows, width=width, dtype=cross_entropy.COARSE)


@needs_cuda
@pytest.mark.parametrize(("vocab", "count"), [(53, 4), (3, 4), (248_320, 4)])
def test_the_likeliest_on_cuda(vocab: int, count: int) -> None:
    check_likeliest(CUDA, vocab=vocab, count=count)


@needs_cuda
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("scale", [0.15, 0.5, 1.0])  # of head and hidden states: flat, and ever more peaked
@pytest.mark.parametrize("name", ["ce", "ce + kl", "d-pace with everything", "ce on the teacher's argmax"])
def test_a_coarse_gradient_on_cuda_against_float64(name: str, scale: float, ahead: bool) -> None:
    """A real vocabulary in bfloat16; the full head's own error stands in the message."""
    row = packed_row([60, 40], vocab=151_936)
    blocks = blocks_of(row, num_slots=8, block_size=16)
    generator = torch.Generator().manual_seed(2)
    sizes = ((128, 256), (151_936, 256), (100, 256))
    hidden, head, teacher = (
        (scale * torch.randn(*size, generator=generator)).to(CUDA, torch.bfloat16) for size in sizes
    )
    spec = replace(SPECS[name], chunk_tokens=50)
    tensors = (row, blocks.to("cuda"), hidden, head, teacher)

    value, gradient = gradient_of(spec, tensors, ahead=ahead)

    found = {}
    for is_fused, dtype in ((True, torch.bfloat16), (False, torch.float64)):
        leaf = hidden.to(dtype).detach().requires_grad_()
        table = head.to(dtype)
        sums = drafter_loss(leaf, tensors[1], head_VH=table, teacher=teacher.to(dtype), spec=spec, is_fused=is_fused)
        sums.objective().backward()
        found[dtype] = float(sums.objective().detach()), leaf.grad
    exact_value, exact = found[torch.float64]
    full = relative_error(found[torch.bfloat16][1], exact)
    assert value == pytest.approx(exact_value, rel=1e-3)
    assert relative_error(gradient, exact) < max(0.01, 3 * full), f"the full head is off by {full:.1e}"
