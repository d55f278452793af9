"""The optimizer against torch's own AdamW and Muon, the schedules against their ends, the latch bit for bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from remote.drafter.optim import DrafterOptimizer, NonFinite, NonFiniteLatch, lr_factor, refuse_muon_on_cpu
from remote.spec import OptimSpec
from tests.remote.cuda import in_interpreter, needs_cuda, never_waiting

CPU = torch.device("cpu")


def small_net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)).to(dtype)


def give_gradients(net: nn.Module, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in net.parameters():
        weight.grad = (torch.randn(weight.shape, generator=generator) * scale).to(weight.dtype)


def weights(net: nn.Module) -> list[Tensor]:
    return [weight.detach().clone() for weight in net.parameters()]


def test_adamw_with_clipping_moves_as_torchs_own() -> None:
    spec = OptimSpec(lr=1e-2, weight_decay=0.1, clip_norm=0.7, schedule="linear", warmup_steps=2)
    ours, theirs = small_net(), small_net()
    optimizer = DrafterOptimizer(ours.named_parameters(), spec, num_steps=10)
    matrices = [weight for weight in theirs.parameters() if weight.ndim == 2]
    others = [weight for weight in theirs.parameters() if weight.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)

    for step in range(1, 11):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        norm = optimizer.update(step)
        reference_norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.7)
        for group in reference.param_groups:
            group["lr"] = optimizer.lr(step)
        reference.step()

        torch.testing.assert_close(norm, reference_norm)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-5, atol=1e-6)
    assert all(weight.grad is None for weight in ours.parameters())


def test_a_bf16_norm_weight_moves_only_because_its_master_does() -> None:
    spec = OptimSpec(lr=6e-4, clip_norm=0.0)
    with_master, without = nn.LayerNorm(8).bfloat16(), nn.LayerNorm(8).bfloat16()
    first = DrafterOptimizer(with_master.named_parameters(), spec, num_steps=40)
    second = DrafterOptimizer(without.named_parameters(), replace(spec, master_dtype="none"), num_steps=40)

    for step in range(1, 41):
        for net, optimizer in ((with_master, first), (without, second)):
            net.weight.grad = torch.ones_like(net.weight)
            net.bias.grad = torch.zeros_like(net.bias)
            optimizer.update(step)

    assert (with_master.weight < 1).all()
    assert torch.equal(without.weight, torch.ones_like(without.weight))


def test_bf16_weights_are_their_masters_rounded() -> None:
    net = small_net(torch.bfloat16)
    optimizer = DrafterOptimizer(net.named_parameters(), OptimSpec(lr=1e-2), num_steps=5)

    for step in range(1, 6):
        give_gradients(net, step)
        optimizer.update(step)

    state = optimizer.state()
    for name, weight in net.named_parameters():
        assert torch.equal(weight, state[f"master/{name}"].bfloat16())


def test_bf16_moments_stay_close_to_fp32_ones() -> None:
    nets = small_net(), small_net()
    optimizers = [
        DrafterOptimizer(net.named_parameters(), OptimSpec(lr=1e-2, moment_dtype=dtype), num_steps=20)
        for net, dtype in zip(nets, ("float32", "bfloat16"), strict=True)
    ]

    for step in range(1, 21):
        for net, optimizer in zip(nets, optimizers, strict=True):
            give_gradients(net, step)
            optimizer.update(step)

    assert all(m.dtype == torch.bfloat16 for n, m in optimizers[1].state().items() if n.startswith("exp_avg"))
    torch.testing.assert_close(weights(nets[0]), weights(nets[1]), rtol=0.05, atol=4e-3)


def test_muon_moves_matrices_as_torchs_own_and_adamw_the_rest() -> None:
    spec = OptimSpec(name="muon", lr=1e-3, muon_lr=1e-2, clip_norm=0.0, schedule="linear")
    ours, theirs = small_net(), small_net()
    optimizer = DrafterOptimizer(ours.named_parameters(), spec, num_steps=5)
    matrices = [weight for weight in theirs.parameters() if weight.ndim == 2]
    others = [weight for weight in theirs.parameters() if weight.ndim != 2]
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.0, momentum=0.95)
    adamw = torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)

    for step in range(1, 6):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.update(step)
        muon.param_groups[0]["lr"] = 1e-2 * lr_factor(step, spec, num_steps=5)
        adamw.param_groups[0]["lr"] = optimizer.lr(step)
        muon.step()
        adamw.step()

    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-4, atol=1e-6)


def test_muon_is_refused_on_a_cpu_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"muon on a CPU: .* 36 s a step .* use adamw"):
        refuse_muon_on_cpu(OptimSpec(name="muon"), CPU)

    refuse_muon_on_cpu(OptimSpec(name="muon"), torch.device("cuda"))
    refuse_muon_on_cpu(OptimSpec(name="adamw"), CPU)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_a_non_finite_gradient_on_nothing_moves_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    net = small_net(dtype)
    optimizer = DrafterOptimizer(net.named_parameters(), OptimSpec(name=name, weight_decay=0.1), num_steps=9)  # type: ignore[arg-type]
    give_gradients(net, 1)
    optimizer.update(1)
    before, state_before = weights(net), {key: value.clone() for key, value in optimizer.state().items()}

    give_gradients(net, 2)
    next(net.parameters()).grad[0, 0] = torch.inf  # type: ignore[index]
    optimizer.update(2)
    give_gradients(net, 3)
    optimizer.update(3)

    assert all(torch.equal(a, b) for a, b in zip(before, weights(net), strict=True))
    assert all(torch.equal(state_before[key], value) for key, value in optimizer.state().items())
    assert optimizer.latch.read() == NonFinite(2, None, "grad_norm")


def test_the_latch_names_the_first_step_micro_batch_and_term() -> None:
    latch = NonFiniteLatch(CPU)
    good, bad = torch.tensor(1.0), torch.tensor(torch.nan)

    latch.watch(1, {"loss_ce": good, "loss_kl": good}, micro_batch=0)
    assert latch.read() is None
    latch.watch(2, {"loss_ce": good, "loss_kl": bad}, micro_batch=3)
    latch.watch(2, {"grad_norm": bad})
    latch.watch(3, {"loss_ce": bad, "loss_kl": bad}, micro_batch=0)

    assert latch.read() == NonFinite(2, 3, "loss_kl")


def test_state_taken_and_given_back_continues_bit_for_bit() -> None:
    for name in ("adamw", "muon"):
        spec = OptimSpec(name=name, lr=1e-2)  # type: ignore[arg-type]
        whole, parts = small_net(torch.bfloat16), small_net(torch.bfloat16)
        run = DrafterOptimizer(whole.named_parameters(), spec, num_steps=6)
        first = DrafterOptimizer(parts.named_parameters(), spec, num_steps=6)
        for step in range(1, 7):
            give_gradients(whole, step)
            run.update(step)
        for step in range(1, 4):
            give_gradients(parts, step)
            first.update(step)

        saved = {key: value.clone() for key, value in first.state().items()}
        second = DrafterOptimizer(parts.named_parameters(), spec, num_steps=6)
        second.load_state(saved)
        for step in range(4, 7):
            give_gradients(parts, step)
            second.update(step)

        assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(parts), strict=True))


def test_state_of_another_shape_is_refused_by_name() -> None:
    net = small_net()
    optimizer = DrafterOptimizer(net.named_parameters(), OptimSpec(), num_steps=1)
    state = {key: value.clone() for key, value in optimizer.state().items()}

    with pytest.raises(ValueError, match=r"no exp_avg/0\.weight"):
        optimizer.load_state({key: value for key, value in state.items() if key != "exp_avg/0.weight"})
    with pytest.raises(ValueError, match=r"exp_avg/0\.weight is \[2\] float32; this recipe needs \[8, 6\] float32"):
        optimizer.load_state(state | {"exp_avg/0.weight": torch.zeros(2)})


@given(
    schedule=st.sampled_from(["cosine", "linear", "wsd"]),
    num_steps=st.integers(1, 60),
    warmup=st.integers(0, 20),
    floor=st.floats(0, 1),
)
def test_every_schedule_rises_to_full_then_never_rises_again(
    schedule: str, num_steps: int, warmup: int, floor: float
) -> None:
    spec = OptimSpec(schedule=schedule, warmup_steps=warmup, min_lr_ratio=floor)  # type: ignore[arg-type]
    factors = [lr_factor(step, spec, num_steps=num_steps) for step in range(1, num_steps + 1)]

    rising, falling = factors[:warmup], factors[warmup:]
    assert rising == [step / warmup for step in range(1, len(rising) + 1)]
    assert all(a >= b for a, b in pairwise(falling))
    assert all(0 < factor <= 1 for factor in factors)
    assert all(factor >= floor - 1e-12 for factor in falling)
    if falling and schedule != "wsd":
        assert falling[0] == pytest.approx(1.0)


def test_wsd_is_stable_until_its_last_fifth() -> None:
    spec = OptimSpec(schedule="wsd", warmup_steps=10)
    factors = [lr_factor(step, spec, num_steps=100) for step in range(1, 101)]

    assert factors[10:80] == [1.0] * 70
    assert factors[99] == pytest.approx(0.05)


@pytest.mark.slow
@in_interpreter
@pytest.mark.parametrize("clip_norm", [0.0, 0.7])
def test_the_fused_update_moves_as_torchs_does(clip_norm: float) -> None:
    spec = OptimSpec(lr=1e-2, weight_decay=0.1, clip_norm=clip_norm, schedule="linear", warmup_steps=2)
    nets = small_net(torch.float16), small_net(torch.float16)
    fused, plain = (
        DrafterOptimizer(net.named_parameters(), spec, num_steps=6, is_fused=is_fused)
        for net, is_fused in zip(nets, (True, False), strict=True)
    )

    for step in range(1, 7):
        for net in nets:
            give_gradients(net, step)
        torch.testing.assert_close(fused.update(step), plain.update(step))

    assert fused.state().keys() == plain.state().keys()
    for name, value in fused.state().items():
        torch.testing.assert_close(value, plain.state()[name], rtol=1e-5, atol=1e-7)
    assert all(weight.grad is None for weight in nets[0].parameters())


@pytest.mark.slow
@in_interpreter
def test_a_fused_update_resumes_bit_for_bit_and_a_closed_latch_holds_it() -> None:
    net, spec = small_net(torch.float16), OptimSpec(lr=1e-2)
    first = DrafterOptimizer(net.named_parameters(), spec, num_steps=6, is_fused=True)
    give_gradients(net, 1)
    first.update(1)
    other = small_net(torch.float16)
    other.load_state_dict(net.state_dict())
    second = DrafterOptimizer(other.named_parameters(), spec, num_steps=6, is_fused=True)
    second.load_state(first.state())

    for step in (2, 3):
        for each, optimizer in ((net, first), (other, second)):
            give_gradients(each, step)
            if step == 3:
                next(each.parameters()).grad[0, 0] = torch.nan  # type: ignore[index]
            optimizer.update(step)
        if step == 2:
            before = weights(net)

    assert all(torch.equal(a, b) for a, b in zip(weights(net), weights(other), strict=True))
    assert all(torch.equal(value, second.state()[name]) for name, value in first.state().items())
    assert all(torch.equal(a, b) for a, b in zip(weights(net), before, strict=True))
    assert first.latch.read() == NonFinite(3, None, "grad_norm")


# ---- on a card


@needs_cuda
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_cuda_card_moves_the_weights_as_a_cpu_does(name: str, is_fused: bool) -> None:
    spec = OptimSpec(name=name, lr=1e-2, weight_decay=0.1, clip_norm=0.5)  # type: ignore[arg-type]
    nets = [small_net(), small_net().cuda()]
    optimizers = [DrafterOptimizer(net.named_parameters(), spec, num_steps=6, is_fused=is_fused) for net in nets]

    for step in range(1, 7):
        give_gradients(nets[0], step)
        for ours, theirs in zip(nets[1].parameters(), nets[0].parameters(), strict=True):
            ours.grad = None if theirs.grad is None else theirs.grad.cuda()
        norms = [optimizer.update(step).cpu() for optimizer in optimizers]
        torch.testing.assert_close(norms[1], norms[0])

    moved = [weight.cpu() for weight in weights(nets[1])]
    torch.testing.assert_close(moved, weights(nets[0]), rtol=2e-3, atol=2e-4)  # Muon multiplies in bfloat16


@needs_cuda
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_on_a_cuda_card_a_closed_latch_keeps_every_weight_and_no_step_waits(name: str, is_fused: bool) -> None:
    net, spec = small_net(torch.bfloat16).cuda(), OptimSpec(name=name)  # type: ignore[arg-type]
    optimizer = DrafterOptimizer(net.named_parameters(), spec, num_steps=9, is_fused=is_fused)
    give_gradients_on_card(net, 1)
    optimizer.update(1)
    before = weights(net)

    give_gradients_on_card(net, 2)
    next(net.parameters()).grad[0, 0] = torch.nan  # type: ignore[index]
    with never_waiting():
        optimizer.update(2)

    assert all(torch.equal(a, b) for a, b in zip(before, weights(net), strict=True))
    assert optimizer.latch.read() == NonFinite(2, None, "grad_norm")


def give_gradients_on_card(net: nn.Module, seed: int) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    for weight in net.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator, device="cuda").to(weight.dtype)
