"""How the drafter's weights move: AdamW or Muon on fp32 masters, schedules, clipping, the non-finite latch.

bf16 weights alone cannot learn: at lr 6e-4 an RMSNorm weight of 1.0 never moves, because the next
bf16 number is 0.8 % away. So every weight that is not fp32 keeps an fp32 master, which the update
changes and the weight copies. `update` clips the gradients by their global norm and applies them
without waiting for the device; a non-finite number makes it and every later one a no-op there.

It computes no loss and reads no clock; `latch.read()` is the only place where the host waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from remote.drafter.kernels import adamw
from remote.drafter.kernels.adamw import Rates, Stored
from remote.report import UserFault
from remote.spec import OptimSpec

WSD_DECAY_SHARE = 0.2  # of all steps: warm-up, stable, then a linear decay over the last fifth


class NonFiniteError(RuntimeError):
    """A loss or a gradient was NaN or infinite; from that step on no weight has changed."""


@dataclass(frozen=True)
class NonFinite:
    """The first place where a number was not finite."""

    step: int
    micro_batch: int | None  # None: the gradient of the whole step
    term: str


class NonFiniteLatch:
    """Closes on the device at the first non-finite number and stays closed; the host asks when it logs anyway."""

    def __init__(self, device: torch.device) -> None:
        self.is_closed = torch.zeros((), device=device)  # 0 or 1, float32: what fused AdamW calls found_inf
        self._place = torch.zeros(4, dtype=torch.int64, device=device)  # step, micro-batch + 1 or 0, group, term
        self._groups: list[tuple[str, ...]] = []  # names that were watched together

    def watch(self, step: int, values: Mapping[str, Tensor], *, micro_batch: int | None = None) -> None:
        """Looks at scalars of the device; remembers step, micro-batch and name of the first one that is not finite."""
        names = tuple(values)
        if names not in self._groups:
            self._groups.append(names)
        is_bad = ~torch.isfinite(torch.stack([value.detach().float().reshape(()) for value in values.values()]))
        closes_now = is_bad.any() & (self.is_closed == 0)
        known = (step, 0 if micro_batch is None else micro_batch + 1, self._groups.index(names))
        place = [torch.full_like(self._place[0], number) for number in known] + [is_bad.to(torch.int64).argmax()]
        self._place = torch.where(closes_now, torch.stack(place), self._place)
        self.is_closed = torch.where(closes_now, 1.0, self.is_closed)

    def read(self) -> NonFinite | None:
        """Waits for the device; None while everything was finite."""
        if not self.is_closed.item():
            return None
        step, micro_batch, group, term = self._place.tolist()
        return NonFinite(step, micro_batch - 1 if micro_batch else None, self._groups[group][term])


def lr_factor(step: int, spec: OptimSpec, *, num_steps: int) -> float:
    """The share of the full learning rate at `step` (from 1): step/warmup first, so that no step is without effect."""
    if step <= spec.warmup_steps:
        return step / spec.warmup_steps
    done = (step - spec.warmup_steps - 1) / max(1, num_steps - spec.warmup_steps)
    if spec.schedule == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    elif spec.schedule == "linear":
        share = 1 - min(done, 1.0)
    else:
        share = min(1.0, max(0.0, (num_steps - step + 1) / max(1.0, WSD_DECAY_SHARE * num_steps)))
    return spec.min_lr_ratio + (1 - spec.min_lr_ratio) * share


def refuse_muon_on_cpu(spec: OptimSpec, device: torch.device) -> None:
    """ValueError: Muon orthogonalises in bf16, which a CPU does 2,500 times slower than AdamW's update."""
    if spec.name == "muon" and device.type == "cpu":
        raise UserFault(
            "optim.name is muon on a CPU: torch's Muon takes 36 s a step there for ten matrices 576 wide "
            "(AdamW 14 ms); use adamw, or run on a GPU"
        )


@dataclass
class _Slot:
    """One trained tensor and what its update keeps."""

    name: str
    weight: nn.Parameter
    master: Tensor | None  # fp32; None: the weight itself is updated
    moments: dict[str, Tensor]
    muon: torch.optim.Optimizer | None = None


class DrafterOptimizer:
    """Moves the named parameters by their summed gradients.

    AdamW: Loshchilov and Hutter, arXiv 1711.05101. Muon (torch's own) takes the matrices and AdamW
    the rest. Weight decay is for matrices only: a norm's weight is a scale, not a direction.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        spec: OptimSpec,
        *,
        num_steps: int,
        is_fused: bool = False,  # AdamW and the norm by this project's kernels
    ) -> None:
        self.spec = spec
        self.num_steps = num_steps
        self.is_fused = is_fused
        self._slots = [self._slot(name, weight) for name, weight in named_parameters if weight.requires_grad]
        self.device = self._slots[0].weight.device
        self.latch = NonFiniteLatch(self.device)

    def lr(self, step: int) -> float:
        """AdamW's learning rate at `step`, counted from 1."""
        return self.spec.lr * lr_factor(step, self.spec, num_steps=self.num_steps)

    @torch.no_grad()
    def update(self, step: int) -> Tensor:
        """One update from the gradients; returns their global norm before clipping (a device scalar), drops them.

        A closed latch, or a norm that closes it now, leaves every weight as it was.
        """
        grads = [self._gradient(slot) for slot in self._slots]
        grad_norm = adamw.global_norm(grads) if self.is_fused else adamw.global_norm_reference(grads)
        self.latch.watch(step, {"grad_norm": grad_norm})
        divisor = torch.clamp((grad_norm + 1e-6) / self.spec.clip_norm, min=1.0) if self.spec.clip_norm > 0 else None
        factor = lr_factor(step, self.spec, num_steps=self.num_steps)
        for slot, grad in zip(self._slots, grads, strict=True):
            move = self._move_by_adamw if slot.muon is None else self._move_by_muon
            move(slot, grad, step=step, factor=factor, divisor=divisor)
            slot.weight.grad = None
        return grad_norm

    def trained(self) -> dict[str, Tensor]:
        """What each update changes, by name: the master where there is one, else the weight."""
        return {slot.name: slot.weight.detach() if slot.master is None else slot.master for slot in self._slots}

    def state(self) -> dict[str, Tensor]:
        """Everything a resume needs, by name: `master/<weight>`, `exp_avg/<weight>`, ..."""
        return dict(self._named_state())

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what `state` gave; ValueError names a tensor that is missing or of another shape or dtype."""
        for name, own in self._named_state():  # all are looked at before any is changed
            found = state.get(name)
            if found is None:
                raise ValueError(f"optimizer state has no {name}")
            if found.shape != own.shape or found.dtype != own.dtype:
                raise ValueError(f"optimizer state {name} is {_kind(found)}; this recipe needs {_kind(own)}")
        for name, own in self._named_state():
            own.copy_(state[name])

    # One tensor at a time, so that at most one fp32 copy of a gradient is alive ------------------

    def _slot(self, name: str, weight: nn.Parameter) -> _Slot:
        needs_master = weight.dtype != torch.float32 and self.spec.master_dtype == "float32"
        master = weight.detach().float() if needs_master else None
        if self.spec.name == "muon" and weight.ndim == 2:
            moved = master if master is not None else weight.detach()
            muon = torch.optim.Muon(
                [moved], lr=self.spec.muon_lr, weight_decay=self.spec.weight_decay, momentum=self.spec.muon_momentum
            )
            momentum = torch.zeros_like(moved)
            muon.state[moved]["momentum_buffer"] = momentum  # made now: a resume fills it before the first step
            return _Slot(name, weight, master, {"momentum": momentum}, muon)
        dtype = torch.float32 if self.spec.moment_dtype == "float32" else torch.bfloat16
        moments = {kind: torch.zeros_like(weight, dtype=dtype) for kind in ("exp_avg", "exp_avg_sq")}
        return _Slot(name, weight, master, moments)

    def _gradient(self, slot: _Slot) -> Tensor:
        return torch.zeros_like(slot.weight) if slot.weight.grad is None else slot.weight.grad

    def _move_by_adamw(self, slot: _Slot, grad: Tensor, *, step: int, factor: float, divisor: Tensor | None) -> None:
        spec, stored = self.spec, Stored(slot.weight.detach(), slot.master, *slot.moments.values())
        weight_decay = spec.weight_decay if slot.weight.ndim == 2 else 0.0
        rates = Rates(step, spec.lr * factor, spec.beta1, spec.beta2, spec.eps, weight_decay)
        move = adamw.adamw_step if self.is_fused else adamw.adamw_step_reference
        move(grad, stored, rates, divisor=divisor, is_closed=self.latch.is_closed)

    def _move_by_muon(self, slot: _Slot, grad: Tensor, *, step: int, factor: float, divisor: Tensor | None) -> None:
        assert slot.muon is not None
        group = slot.muon.param_groups[0]
        (moved,) = group["params"]
        is_closed = self.latch.is_closed.bool()
        before = moved.clone()
        momentum_before = slot.moments["momentum"].clone()
        moved.grad = torch.where(is_closed, 0.0, grad if divisor is None else grad / divisor).to(moved.dtype)
        group["lr"] = self.spec.muon_lr * factor
        slot.muon.step()
        moved.grad = None
        moved.copy_(torch.where(is_closed, before, moved))
        slot.moments["momentum"].copy_(torch.where(is_closed, momentum_before, slot.moments["momentum"]))
        if slot.master is not None:
            slot.weight.copy_(slot.master)

    def _named_state(self) -> Iterator[tuple[str, Tensor]]:
        for slot in self._slots:
            if slot.master is not None:
                yield f"master/{slot.name}", slot.master
            for kind, tensor in slot.moments.items():
                yield f"{kind}/{slot.name}", tensor


def _kind(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
