"""The workbench every step uses, set up once, with a reason for every choice made on the way.

It chooses dtype, attention and kernels, makes the drafter (fresh, or from an exported folder) and its
optimizer. It loads no target: embedding and head are handed in, real or synthetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from remote.coherence import against_fp8
from remote.drafter import coarse_head, self_check
from remote.drafter.attention import Backend, choose_backend
from remote.drafter.coarse_head import CoarseHead
from remote.drafter.export import load_exported
from remote.drafter.kernels import launch
from remote.drafter.measure import Meter
from remote.drafter.model import DFlashDrafter
from remote.drafter.optim import DrafterOptimizer, refuse_muon_on_cpu
from remote.drafter.peers import Peers
from remote.drafter.ranks import Ranks
from remote.drafter.self_check import Verdict
from remote.report import UserFault
from remote.spec import DFlashSpec, num_drafter_parameters


@dataclass(frozen=True)
class Workbench:
    """The drafter, its optimizer, and the target's frozen embedding and head."""

    spec: DFlashSpec
    device: torch.device
    drafter: DFlashDrafter
    shared: nn.Module  # the drafter, or the same whose gradients are added up over the peers
    peers: Peers
    embed: Callable[[Tensor], Tensor]  # token ids (...) -> (..., H)
    head_VH: Tensor
    optimizer: DrafterOptimizer
    meter: Meter
    coarse_head: CoarseHead | None = None  # where the gradient of the hidden states is made with it


@dataclass(frozen=True)
class Choices:
    """What the spec leaves open, decided for this device."""

    dtype: torch.dtype
    backend: Backend
    is_fused: bool  # norms, rotary embedding, SwiGLU, the loss's rows and AdamW by draftyard's own kernels
    reasons: dict[str, str]
    is_coarse: bool = False  # the gradient of the hidden states with the head in fp8


# A rank that can take one can take those before it.
BACKENDS = ("eager", "sdpa", "flex", self_check.OWN_KERNELS_OF_ALL_CARDS, self_check.OWN_KERNELS)
DTYPES = (torch.float32, torch.bfloat16)

Check = Callable[[DFlashSpec, torch.device, torch.dtype], Verdict]


class Checks(NamedTuple):
    """Whether the own kernels may be taken on a card where the recipe leaves it to us."""

    attention: Check = self_check.check_attention
    kernels: Check = self_check.check_kernels
    hidden_gradient: Check = self_check.check_hidden_gradient


def _unasked(spec: DFlashSpec, device: torch.device, dtype: torch.dtype) -> Verdict:
    return Verdict(False, "this rank runs the target alone")


UNASKED = Checks(_unasked, _unasked, _unasked)  # of a rank that trains nothing: what it could take decides nothing


def choose(spec: DFlashSpec, device: torch.device, *, checks: Checks = Checks()) -> Choices:  # noqa: B008 - frozen
    """ValueError where the recipe asks for something this device cannot do."""
    refuse_muon_on_cpu(spec.optim, device)
    if spec.train.dtype == "auto":
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        dtype_reason = f"auto: {_word(dtype)} on {device.type}"
    else:
        dtype = torch.bfloat16 if spec.train.dtype == "bfloat16" else torch.float32
        dtype_reason = f"{_word(dtype)}: asked for by the recipe"
    check = partial(checks.attention, spec, device, dtype) if device.type == "cuda" else None
    backend = choose_backend(spec.drafter, device=device, dtype=dtype, check=check)
    is_fused, kernels_reason = _choose_kernels(spec, device, dtype, checks.kernels)
    is_coarse, gradient_reason = _choose_hidden_gradient(spec, device, dtype, checks.hidden_gradient, is_fused=is_fused)
    reasons = {
        "device": f"{device.type}: {'a CUDA card is there' if device.type == 'cuda' else 'no CUDA card is there'}",
        "dtype": dtype_reason,
        "attention": f"{backend.name}: {backend.reason}",
        "kernels": kernels_reason,
        "hidden gradient": gradient_reason,
        "masters": _master_reason(spec, dtype),
        "noise": _noise_reason(spec),
        "start": (
            f"weights of {spec.drafter.init_from}" if spec.drafter.init_from else f"fresh, seed {spec.train.seed}"
        )
        + ", unless a checkpoint of this run is there",
    }
    return Choices(dtype, backend, is_fused, reasons, is_coarse)


def agree(choices: Choices, ranks: Ranks) -> Choices:
    """What all drafters take: the most that each of them can. Every rank calls it; alone, a rank keeps its own.

    Weights are never compared again, so drafters that compute differently would drift apart in silence.
    UserFault where dtypes differ: gradients and hidden states travel in them.
    """
    own = [
        DTYPES.index(choices.dtype),
        BACKENDS.index(choices.backend.name),
        int(choices.is_fused),
        int(choices.is_coarse),
    ]
    found = ranks.of_all(own)
    if len({each[0] for each in found}) > 1:
        told = ", ".join(f"{ranks.roles.name(rank)} {_word(DTYPES[each[0]])}" for rank, each in enumerate(found))
        raise UserFault(f"ranks must compute in one dtype; auto chose {told}: name train.dtype in the recipe")
    if not ranks.is_drafter:  # it uses none of the others
        return choices
    drafters = ranks.roles.drafters
    backend, fused, coarse = (min(found[rank][place] for rank in drafters) for place in (1, 2, 3))
    reasons = dict(choices.reasons)

    def other(place: int, least: int) -> str:
        names = ", ".join(ranks.roles.name(rank) for rank in drafters if found[rank][place] == least)
        return f"auto, as {names} takes it, whose log says why, and drafters must compute alike"

    if backend != own[1]:
        reasons["attention"] = f"{BACKENDS[backend]}: {other(1, backend)}; here: {reasons['attention']}"
        choices = replace(choices, backend=replace(choices.backend, name=BACKENDS[backend], reason=other(1, backend)))
    if fused != own[2]:
        reasons["kernels"] = f"torch: {other(2, fused)}; here: {reasons['kernels']}"
    if coarse != own[3]:
        reasons["hidden gradient"] = f"full: {other(3, coarse)}; here: {reasons['hidden gradient']}"
    return replace(choices, is_fused=bool(fused), is_coarse=bool(coarse), reasons=reasons)


def build(
    spec: DFlashSpec,
    choices: Choices,
    *,
    meter: Meter,
    embed: Callable[[Tensor], Tensor],
    head_VH: Tensor,
    peers: Peers | None = None,
) -> Workbench:
    """A workbench with a fresh drafter, or the one of `drafter.init_from`; without `peers` it works alone."""
    device, peers = meter.device, peers or Peers()
    drafter = fresh_drafter(spec, choices, device=device)
    if spec.drafter.init_from is not None:
        load_exported(Path(spec.drafter.init_from), drafter, spec.target)
    optimizer = DrafterOptimizer(
        drafter.named_parameters(), spec.optim, num_steps=spec.train.num_steps, is_fused=choices.is_fused
    )
    coarse = CoarseHead.of(head_VH) if choices.is_coarse else None
    return Workbench(spec, device, drafter, peers.shared(drafter), peers, embed, head_VH, optimizer, meter, coarse)


def fresh_drafter(spec: DFlashSpec, choices: Choices, *, device: torch.device) -> DFlashDrafter:
    """The drafter before its first step. Made in its own dtype at once: a wide fp32 copy would be the load's peak."""
    with torch.device("meta"):
        drafter = DFlashDrafter(
            spec.target,
            spec.drafter,
            backend=choices.backend,
            activation_checkpointing=spec.train.activation_checkpointing,
            is_fused=choices.is_fused,
        )
    drafter = drafter.to(choices.dtype).to_empty(device=device)
    # Drawn on the device: a CPU takes 20 s for 1.7 billion numbers, longer than a rung of the ladder may.
    drafter.init_weights(torch.Generator(device).manual_seed(spec.train.seed))
    return drafter


def numbers(spec: DFlashSpec) -> str:
    """Sizes of the drafter and of one step, for a person, before the first step."""
    block_tokens = spec.data.max_anchors * spec.drafter.block_size
    rows = spec.train.rows_per_step * spec.train.accumulation
    return (
        f"drafter: {num_drafter_parameters(spec.target, spec.drafter):,} parameters in {spec.drafter.num_layers} layers, "
        f"block {spec.drafter.block_size}, captured layers {spec.drafter.captured_layers}; "
        f"a step: {rows} {'row' if rows == 1 else 'rows'} of {spec.data.row_tokens} context tokens, "
        f"up to {block_tokens:,} block tokens a {spec.data.anchors_per}"
    )


def _choose_kernels(spec: DFlashSpec, device: torch.device, dtype: torch.dtype, check: Check) -> tuple[bool, str]:
    """Whether to take the fused ones, and why."""
    what = "norms, rotary embedding, SwiGLU, the loss's rows and AdamW are fused"
    if spec.train.kernels == "torch":
        return False, "torch: asked for by the recipe"
    if spec.train.kernels == "triton":
        obstacle = launch.obstacle(device=device, dtype=dtype)
        if obstacle is not None:
            raise UserFault(f"train.kernels is triton, which cannot train here: {obstacle}; take auto or torch")
        return True, f"triton: asked for by the recipe; {what}"
    if device.type != "cuda":
        return False, f"torch: auto, Triton needs CUDA and the device is {device.type}"
    verdict = check(spec, device, dtype)
    if verdict.is_passed:
        return True, f"triton: auto, {verdict.reason}; {what}"
    return False, f"torch: auto, triton is out ({verdict.reason})"


def _choose_hidden_gradient(
    spec: DFlashSpec, device: torch.device, dtype: torch.dtype, check: Check, *, is_fused: bool
) -> tuple[bool, str]:
    """Whether to make it with the head in fp8, and why. UserFault where that is asked for and cannot be, or is wrong here."""
    asked = spec.loss.hidden_gradient
    if asked == "full":
        return False, "full: by the recipe"
    if check is _unasked:  # makes none: what it cannot do keeps no drafter from it
        return False, f"full: {check(spec, device, dtype).reason}"
    obstacle = next(iter(against_fp8(spec)), None) or coarse_head.obstacle(device, dtype)
    if obstacle is None and not is_fused:
        obstacle = "it is a part of draftyard's own kernels, which are out"
    verdict = Verdict(False, obstacle) if obstacle is not None else check(spec, device, dtype)
    if verdict.is_passed:
        why = "auto" if asked == "auto" else "by the recipe"
        return True, f"fp8: {why}, {verdict.reason}; the label and the likeliest tokens in full"
    if asked == "auto":
        return False, f"full: auto, fp8 is out ({verdict.reason})"
    raise UserFault(f"loss.hidden_gradient is fp8, which cannot train here: {verdict.reason}; take auto or full")


def _master_reason(spec: DFlashSpec, dtype: torch.dtype) -> str:
    if dtype == torch.float32:
        return "none needed: the weights are float32 themselves"
    if spec.optim.master_dtype == "float32":
        return "float32: a bfloat16 norm weight of 1.0 never moves at usual learning rates"
    return "none: asked for by the recipe; norm weights may never move"


def _noise_reason(spec: DFlashSpec) -> str:
    noise = spec.data.noise
    if noise.kind == "none" or noise.scale == 0:
        return "none"
    measure = "standard deviation" if noise.kind == "gaussian" else "half width"
    return f"{noise.kind} on the captured hidden states, {measure} {noise.scale:g}"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
