"""The fused loss against loops in float64, term by term, gradients included; sums that add; values that must show."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from remote.drafter.blocks import Blocks, Row
from remote.drafter.head_plan import plan_head
from remote.drafter.loss import LossSums, drafter_loss, known_denominator
from remote.drafter.metrics import metrics
from remote.drafter.teacher import Teacher, expect
from remote.spec import LossSpec
from tests.remote.cuda import needs_cuda
from tests.remote.loss_oracle import oracle_loss, random_case
from tests.remote.packed import blocks_of, packed_row, relative_error

BLOCK, HIDDEN, VOCAB = 5, 12, 40

SPECS = {
    "ce": LossSpec(),
    "ce on the teacher's argmax": LossSpec(label="teacher_argmax"),
    "kl": LossSpec(terms={"kl": 1.0}),
    "soft ce": LossSpec(terms={"soft_ce": 0.7}),
    "cap alone": LossSpec(terms={"cap": 0.5}),
    "ce + kl": LossSpec(terms={"ce": 1.0, "kl": 0.15}, gamma=10.0),
    "all terms": LossSpec(terms={"ce": 0.8, "kl": 0.15, "soft_ce": 0.3, "cap": 0.4}),
    "no decay": LossSpec(decay="none", normalization="supervised"),
    "d-pace": LossSpec(decay="dpace", normalization="rows"),
    "d-pace with everything": LossSpec(terms={"ce": 1.0, "kl": 0.2, "cap": 0.1}, decay="dpace", dpace_alpha=0.3),
    "streak": LossSpec(terms={"ce": 1.0, "soft_ce": 0.1}, streak_beta=1.5),
    "streak on the teacher's argmax": LossSpec(terms={"ce": 1.0, "cap": 0.3}, label="teacher_argmax", streak_beta=0.5),
}


def case(*, row: Row | None = None, num_slots: int = 9, seed: int = 0) -> tuple[Row, Blocks, Tensor, Tensor, Tensor]:
    """Three documents, holes in the loss mask, padding, two unused slots; labels of half the slots are made right."""
    row = row or packed_row([14, 6, 11], padding=3, vocab=VOCAB, unmasked=0.2, seed=4)
    blocks = blocks_of(row, num_slots=num_slots, block_size=BLOCK, max_anchors=num_slots - 2)
    hidden_TH, head_VH, teacher_SH = random_case(row, num_slots * BLOCK, hidden_size=HIDDEN, vocab=VOCAB, seed=seed)
    lucky_T = blocks.supervised_T & (torch.arange(num_slots * BLOCK) % 2 == 0)
    hidden_TH[lucky_T] = head_VH[blocks.label_T[lucky_T]]
    easy_T = blocks.supervised_T & (torch.arange(num_slots * BLOCK) % 4 == 0)
    teacher_SH[blocks.teacher_T[easy_T]] = head_VH[blocks.label_T[easy_T]]
    return row, blocks, hidden_TH, head_VH, teacher_SH


def taught(teacher_SH: Tensor, head_VH: Tensor, *, ahead: bool) -> Teacher:
    """What the loss is given: the target's last hidden states, or the expectation made of them ahead."""
    return expect(teacher_SH, head_VH) if ahead else teacher_SH


def expected(spec: LossSpec, row: Row, blocks: Blocks, hidden_TH: Tensor, head_VH: Tensor, teacher_SH: Tensor) -> dict:
    used = blocks.anchors_N[blocks.keep_N].tolist()
    return oracle_loss(hidden_TH, row, used, block_size=BLOCK, head_VH=head_VH, teacher_SH=teacher_SH, spec=spec)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 1000])
@pytest.mark.parametrize("name", SPECS)
def test_value_and_gradient_equal_the_loops(name: str, chunk_tokens: int, ahead: bool) -> None:
    spec = replace(SPECS[name], chunk_tokens=chunk_tokens)
    row, blocks, hidden_TH, head_VH, teacher_SH = case()
    ours, theirs = hidden_TH.clone().requires_grad_(), hidden_TH.clone().requires_grad_()
    oracle = expected(spec, row, blocks, theirs, head_VH, teacher_SH)
    oracle["loss"].backward()

    sums = drafter_loss(ours, blocks, head_VH=head_VH, teacher=taught(teacher_SH, head_VH, ahead=ahead), spec=spec)
    loss = sums.objective()
    loss.backward()

    assert float(loss.detach()) == pytest.approx(float(oracle["loss"].detach()), rel=1e-12)
    assert float(sums.denominator) == pytest.approx(oracle["denominator"], rel=1e-12)
    assert relative_error(ours.grad, theirs.grad) < 1e-12


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    unmasked=st.sampled_from([0.0, 0.3, 0.6]),
    name=st.sampled_from(["all terms", "d-pace with everything", "streak on the teacher's argmax"]),
    chunk_tokens=st.integers(1, 30),
    seed=st.integers(0, 1000),
    ahead=st.booleans(),
)
def test_any_row_gives_what_the_loops_give(
    lengths: list[int], unmasked: float, name: str, chunk_tokens: int, seed: int, ahead: bool
) -> None:
    spec = replace(SPECS[name], chunk_tokens=chunk_tokens)
    row = packed_row(lengths, padding=1, vocab=VOCAB, unmasked=unmasked, seed=seed)
    row, blocks, hidden_TH, head_VH, teacher_SH = case(row=row, num_slots=5, seed=seed)
    assume(bool(blocks.supervised_T.any()))
    ours, theirs = hidden_TH.clone().requires_grad_(), hidden_TH.clone().requires_grad_()
    expected(spec, row, blocks, theirs, head_VH, teacher_SH)["loss"].backward()

    teacher = taught(teacher_SH, head_VH, ahead=ahead)
    drafter_loss(ours, blocks, head_VH=head_VH, teacher=teacher, spec=spec).objective().backward()

    assert relative_error(ours.grad, theirs.grad) < 1e-11


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_metrics_equal_the_loops(name: str, ahead: bool) -> None:
    spec = SPECS[name]
    row, blocks, hidden_TH, head_VH, teacher_SH = case()
    oracle = expected(spec, row, blocks, hidden_TH, head_VH, teacher_SH)

    teacher = taught(teacher_SH, head_VH, ahead=ahead)
    seen = metrics(drafter_loss(hidden_TH, blocks, head_VH=head_VH, teacher=teacher, spec=spec))

    assert seen["loss"] == pytest.approx(float(oracle["loss"]))
    for term, coefficient in spec.terms.items():
        divisor = max(oracle["cap_denominator"], 1.0) if term == "cap" else oracle["denominator"]
        assert coefficient
        assert seen[f"loss_{term}"] == pytest.approx(float(oracle["terms"][term]) / divisor)
    assert seen["accuracy"] == pytest.approx(oracle["accuracy"])
    assert 0 < seen["accuracy"] < 1
    assert seen["streak"] == pytest.approx(oracle["streak"])
    assert seen["acceptance_length"] == pytest.approx(oracle["streak"] + 1)
    assert {k: seen[f"topk_{k}"] for k in (2, 4, 8)} == pytest.approx(oracle["topk"])
    assert seen["entropy_right"] == pytest.approx(oracle["entropy_right"])


def test_accuracy_by_slot_weighs_back_to_the_whole() -> None:
    _, blocks, hidden_TH, head_VH, _ = case()

    sums = drafter_loss(hidden_TH, blocks, head_VH=head_VH, teacher=None, spec=LossSpec())

    seen, cases = metrics(sums), sums.totals["supervised_at"][1:]
    assert len(seen["accuracy_at"]) == BLOCK - 1
    assert float(torch.tensor(seen["accuracy_at"], dtype=torch.float64) @ cases / cases.sum()) == pytest.approx(
        seen["accuracy"]
    )


@pytest.mark.slow
def test_gradient_passes_gradcheck_where_weights_are_constant() -> None:
    spec = LossSpec(terms={"ce": 0.5, "kl": 0.3, "cap": 0.2}, chunk_tokens=6)
    row = packed_row([9], vocab=VOCAB)
    _, blocks, hidden_TH, head_VH, teacher_SH = case(row=row, num_slots=3)
    hidden_TH.requires_grad_()

    def loss(hidden: Tensor) -> Tensor:
        return drafter_loss(hidden, blocks, head_VH=head_VH, teacher=teacher_SH, spec=spec).objective()

    assert torch.autograd.gradcheck(loss, (hidden_TH,))


@pytest.mark.parametrize("name", ["ce + kl", "streak", "d-pace"])
def test_two_micro_batches_add_to_the_whole(name: str) -> None:
    spec = replace(SPECS[name], normalization="weights")
    _, blocks, hidden_TH, head_VH, teacher_SH = case()
    whole = hidden_TH.clone().requires_grad_()
    drafter_loss(whole, blocks, head_VH=head_VH, teacher=teacher_SH, spec=spec).objective().backward()

    parts = hidden_TH.clone().requires_grad_()
    half = 4 * BLOCK
    total = torch.zeros((), dtype=torch.float64)
    joined: LossSums | None = None
    for rows, piece in (
        (slice(0, half), _blocks_slice(blocks, 0, 4)),
        (slice(half, None), _blocks_slice(blocks, 4, 9)),
    ):
        sums = drafter_loss(parts[rows], piece, head_VH=head_VH, teacher=teacher_SH, spec=spec)
        sums.numerator.backward()
        total += sums.denominator
        joined = sums if joined is None else joined + sums

    assert relative_error(parts.grad / total, whole.grad) < 1e-13
    once = drafter_loss(whole, blocks, head_VH=head_VH, teacher=teacher_SH, spec=spec)
    assert torch.allclose(joined.totals_F, once.totals_F, rtol=1e-13)


def test_given_denominators_replace_its_own() -> None:
    _, blocks, hidden_TH, head_VH, _ = case()
    spec = LossSpec(terms={"ce": 1.0, "cap": 0.5})
    sums = drafter_loss(hidden_TH, blocks, head_VH=head_VH, teacher=None, spec=spec)

    given = sums.objective(torch.tensor(8.0), torch.tensor(4.0))

    assert float(given) == pytest.approx(float(sums.numerator) / 8 + float(sums.cap_numerator) / 4)


@pytest.mark.parametrize(
    "name", [name for name, spec in SPECS.items() if spec.decay != "dpace" and not spec.streak_beta]
)
def test_known_denominator_is_the_one_the_loss_finds(name: str) -> None:
    _, blocks, hidden_TH, head_VH, teacher_SH = case()
    sums = drafter_loss(hidden_TH, blocks, head_VH=head_VH, teacher=teacher_SH, spec=SPECS[name])

    assert float(known_denominator(blocks, SPECS[name])) == pytest.approx(float(sums.denominator), rel=1e-12)


def test_denominator_that_depends_on_the_outputs_is_not_known_beforehand() -> None:
    _, blocks, *_ = case()

    assert known_denominator(blocks, LossSpec(decay="dpace")) is None
    assert known_denominator(blocks, LossSpec(streak_beta=1.0)) is None
    assert known_denominator(blocks, LossSpec(decay="dpace", normalization="rows")) is not None


def test_nothing_supervised_gives_zero_loss_and_zero_gradient() -> None:
    row = packed_row([12], vocab=VOCAB, unmasked=1.0)
    _, blocks, hidden_TH, head_VH, teacher_SH = case(row=row, num_slots=4)
    hidden_TH.requires_grad_()

    sums = drafter_loss(hidden_TH, blocks, head_VH=head_VH, teacher=teacher_SH, spec=SPECS["all terms"])
    sums.objective().backward()

    assert metrics(sums) == {"loss": 0.0, "loss_ce": 0.0, "loss_kl": 0.0, "loss_soft_ce": 0.0, "loss_cap": 0.0}
    assert torch.equal(hidden_TH.grad, torch.zeros_like(hidden_TH))


def test_unsupervised_rows_get_no_gradient_and_do_not_matter() -> None:
    _, blocks, hidden_TH, head_VH, teacher_SH = case()
    hidden_TH[~blocks.supervised_T] = math.nan
    hidden_TH.requires_grad_()

    loss = drafter_loss(hidden_TH, blocks, head_VH=head_VH, teacher=teacher_SH, spec=SPECS["all terms"]).objective()
    loss.backward()

    assert torch.isfinite(loss)
    assert not hidden_TH.grad[~blocks.supervised_T].any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_hidden_state_shows_in_loss_gradient_and_metrics(bad: float) -> None:
    _, blocks, hidden_TH, head_VH, teacher_SH = case()
    at = int(blocks.supervised_T.nonzero()[3])
    hidden_TH[at, 0] = bad
    hidden_TH.requires_grad_()

    sums = drafter_loss(hidden_TH, blocks, head_VH=head_VH, teacher=teacher_SH, spec=SPECS["ce + kl"])
    sums.objective().backward()

    assert not any(math.isfinite(metrics(sums)[name]) for name in ("loss", "loss_ce", "loss_kl"))
    assert not torch.isfinite(hidden_TH.grad[at]).all()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_bad_teacher_shows_under_its_own_term(ahead: bool) -> None:
    _, blocks, hidden_TH, head_VH, teacher_SH = case()
    teacher_SH[blocks.teacher_T[blocks.supervised_T][0], 0] = math.nan

    known = taught(teacher_SH, head_VH, ahead=ahead)
    sums = drafter_loss(hidden_TH, blocks, head_VH=head_VH, teacher=known, spec=SPECS["ce + kl"])

    assert math.isfinite(metrics(sums)["loss_ce"])
    assert not any(math.isfinite(metrics(sums)[name]) for name in ("loss", "loss_kl"))


def test_nan_logits_count_as_wrong_everywhere() -> None:
    _, blocks, hidden_TH, head_VH, _ = case()

    seen = metrics(drafter_loss(hidden_TH * math.nan, blocks, head_VH=head_VH, teacher=None, spec=LossSpec()))

    assert (seen["accuracy"], seen["topk_2"], seen["topk_8"]) == (0.0, 0.0, 0.0)


def test_missing_teacher_is_the_users_error() -> None:
    _, blocks, hidden_TH, head_VH, _ = case()

    with pytest.raises(ValueError, match="need the target's last hidden states"):
        drafter_loss(hidden_TH, blocks, head_VH=head_VH, teacher=None, spec=SPECS["kl"])


def test_no_graph_is_made_without_gradients() -> None:
    _, blocks, hidden_TH, head_VH, _ = case()

    with torch.no_grad():
        sums = drafter_loss(hidden_TH.requires_grad_(), blocks, head_VH=head_VH, teacher=None, spec=LossSpec())

    assert not sums.numerator.requires_grad


def test_every_teacher_position_is_projected_once() -> None:
    row = packed_row([40, 25], vocab=VOCAB)
    blocks = blocks_of(row, num_slots=30, block_size=BLOCK)

    plan = plan_head(blocks, chunk_tokens=10)

    wanted = blocks.teacher_T[blocks.supervised_T].unique()
    assert len(plan.chunks) > 5
    assert torch.equal(plan.teacher_U.sort().values, wanted)


def test_plan_covers_every_supervised_slot_once_within_the_chunk_size() -> None:
    _, blocks, *_ = case()

    plan = plan_head(blocks, chunk_tokens=7)

    assert torch.equal(plan.index_M, blocks.supervised_T.nonzero().flatten())
    assert [chunk.slots[0] for chunk in plan.chunks[1:]] == [chunk.slots[1] for chunk in plan.chunks[:-1]]
    assert all(chunk.slots[1] - chunk.slots[0] <= 7 for chunk in plan.chunks)


@pytest.mark.slow
def test_all_logits_are_never_held() -> None:
    """The largest tensor made while the loss runs is one chunk of logits, the teacher's included."""
    row, blocks, hidden_TH, _, teacher_SH = case()
    _, head_VH, _ = random_case(row, 1, hidden_size=HIDDEN, vocab=500)
    spec = replace(SPECS["all terms"], chunk_tokens=4)

    with _LargestTensor(head_VH) as largest:
        loss = drafter_loss(hidden_TH.requires_grad_(), blocks, head_VH=head_VH, teacher=teacher_SH, spec=spec)
        loss.objective().backward()

    assert int(blocks.supervised_T.sum()) == 25
    assert largest.num_elements == 4 * 500


@needs_cuda
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_bfloat16_gradient_on_cuda_is_within_half_a_percent_of_float64(temperature: float, ahead: bool) -> None:
    """248,320 tokens, a flat and a peaked teacher; the oracle is plain float64 autograd on the same rounded inputs."""
    row = packed_row([60, 40], vocab=248_320)
    blocks = blocks_of(row, num_slots=8, block_size=16)
    drawn = random_case(row, 128, hidden_size=256, vocab=248_320)
    scale = 256**-0.25 / temperature**0.5
    hidden, head, teacher = ((tensor * scale).to("cuda", torch.bfloat16) for tensor in drawn)
    spec = LossSpec(terms={"ce": 1.0, "kl": 0.15}, gamma=10.0, chunk_tokens=50)
    hidden.requires_grad_()
    exact = hidden.detach().double().requires_grad_()

    known = taught(teacher, head, ahead=ahead)
    sums = drafter_loss(hidden, blocks.to("cuda"), head_VH=head, teacher=known, spec=spec)
    sums.objective().backward()

    at = blocks.supervised_T.cuda()
    log_q = (exact[at] @ head.double().T).log_softmax(-1)
    log_p = (teacher.double()[blocks.teacher_T.cuda()[at]] @ head.double().T).log_softmax(-1)
    weight = torch.exp(-(blocks.slot_T.cuda()[at].double() - 1) / 10)
    ce = -log_q.gather(1, blocks.label_T.cuda()[at][:, None])[:, 0]
    loss = (weight * (ce + 0.15 * (log_p.exp() * (log_p - log_q)).sum(-1))).sum() / weight.sum()
    loss.backward()
    assert float(sums.objective().detach()) == pytest.approx(float(loss.detach()), rel=1e-4)
    assert relative_error(hidden.grad, exact.grad) < 0.005


class _LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Elements of the largest tensor any operation returns, the given one and its views left out."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.known, self.num_elements = known.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() != self.known:
                self.num_elements = max(self.num_elements, tensor.numel())
        return out


def _blocks_slice(blocks: Blocks, first: int, end: int) -> Blocks:
    size = blocks.block_size
    cut = {name: getattr(blocks, name)[first:end] for name in ("anchors_N", "keep_N", "document_N", "context_start_N")}
    cut |= {
        name: getattr(blocks, name)[first * size : end * size]
        for name in ("ids_T", "position_T", "label_T", "supervised_T", "teacher_T", "slot_T")
    }
    return replace(blocks, **cut, ranges=blocks.ranges[first:end])
