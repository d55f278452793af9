"""The gradient of the hidden states with the head in eight bits: the one product of a step that can bear it.

Σ g·W over the vocabulary, g the gradient of a slot's logits, is a third of the head's work and nothing of the loss: logits,
labels and metrics are made by the full head. Its error is that of what is summed, and what weighs there are a few
tokens: the label, the target's best one and the drafter's own likeliest. These are kept out of it and added in full. What
is left to float8_e4m3fn (three bits of fraction in g and in W, 3.7 % off together, float32 sums) is many small parts.
It must not be what remains of two large ones: a loss without a hard label, whose q − p vanishes, has no use for it
(`remote.coherence` refuses it).

What the rounding of g does is another thing at every slot and step, and averages out. That of W is the same thing at all of
them: `Drift` takes its sum over a loss's slots off again.

Shapes: M slots, K exact tokens of each, V vocabulary, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from remote.drafter.kernels.column_sums import add_column_sums
from remote.drafter.kernels.cross_entropy import COARSE, COARSE_MOST, RowStatistics, TargetRows
from remote.drafter.kernels.exact_rows import add_exact_rows
from remote.drafter.logits import weighted_rows
from remote.drafter.teacher import Expectation

NUM_LIKELIEST = 4  # of the drafter's own tokens kept exact; other numbers were not tried
MIN_CAPABILITY = (8, 9)  # of the cards that multiply float8
SLICE = 4096  # tokens of the head that a processor multiplies at once
MADE_AT_ONCE = 2**18  # numbers: a wider copy in float32 would be the peak of a small training's load


@dataclass(frozen=True)
class CoarseHead:
    """The head by columns, as the product wants it."""

    weight_HV: Tensor  # float8_e4m3fn
    scale: Tensor  # float32, what one unit of the weight is worth
    is_corrected: bool = True  # by `Drift`; benchmarks and tests look at what it does

    @classmethod
    @torch.no_grad()
    def of(cls, head_VH: Tensor) -> CoarseHead:
        """V·H bytes beside the head, and no other copy of it on the way."""
        vocab, hidden = head_VH.shape
        weight_HV = torch.empty(hidden, vocab, dtype=COARSE, device=head_VH.device)
        lowest, highest = torch.aminmax(head_VH)
        scale = torch.maximum(-lowest, highest).float().clamp_min(torch.finfo(torch.float32).tiny) / COARSE_MOST
        step = max(1, MADE_AT_ONCE // hidden)
        for first in range(0, vocab, step):
            rows = slice(first, first + step)
            shares = head_VH[rows].to(torch.float32, copy=True).div_(scale).clamp_(-COARSE_MOST, COARSE_MOST)
            weight_HV[:, rows] = shares.to(COARSE).T
        return cls(weight_HV, scale)

    def weighted_rows(self, weight_MV: Tensor) -> Tensor:
        """Σ weight · head, (M, H), in float32; weights are float8_e4m3fn."""
        if weight_MV.is_cuda:
            one = torch.ones_like(self.scale)
            return torch._scaled_mm(
                weight_MV, self.weight_HV.t(), scale_a=one, scale_b=self.scale, out_dtype=torch.float32
            )
        sums_MH = torch.zeros(len(weight_MV), len(self.weight_HV))
        for first in range(0, self.weight_HV.shape[1], SLICE):
            columns = slice(first, first + SLICE)
            sums_MH += weight_MV[:, columns].float() @ self.weight_HV[:, columns].float().T
        return sums_MH.mul_(self.scale)


def obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the card cannot multiply so, or None."""
    if device.type != "cuda":
        return f"products of float8 need CUDA, the device is {device.type}"
    if dtype != torch.bfloat16:
        return f"the drafter's dtype is {str(dtype).removeprefix('torch.')}, and that of the product is for bfloat16"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"products of float8 need compute capability 8.9, the card has {capability[0]}.{capability[1]}"
    return None


@dataclass(frozen=True)
class ExactTokens:
    """The tokens of each slot that stay out of the coarse product. One that is named twice counts where it stands first."""

    token_MK: Tensor  # int64; the label is the first
    coefficient_MK: Tensor  # of the token's row of the head in the gradient of the hidden state
    unit_M: Tensor  # what the other tokens' gradients, before the slot's weight, are multiplied with to fill float8
    weight_M: Tensor
    rest_M: (
        Tensor  # how much is left to all other tokens, of the drafter's and the target's shares, with the slot's weight
    )

    @classmethod
    def of(
        cls, logits_MV: Tensor, read: RowStatistics, label_M: Tensor, weight_M: Tensor, *,
        hard: float, soft: float, target: TargetRows | None, expected: Expectation | None,
    ) -> ExactTokens:  # fmt: skip
        """Of w · (hard·(q − [label]) + soft·(q − p)), while the logits are there."""
        named = [label_M[:, None], read.likeliest_MK]
        if expected is not None:
            named.append(expected.best_S[:, None])
        token_MK = torch.cat(named, 1)
        q_MK = (logits_MV.gather(1, token_MK) - read.log_sum_M[:, None]).exp()
        p_MK = _target_shares(token_MK, target, expected)
        slope_MK = (hard + soft) * q_MK if p_MK is None else (hard + soft) * q_MK - soft * p_MK
        is_first_MK = _is_first(token_MK)
        coefficient_MK = slope_MK * is_first_MK
        coefficient_MK[:, 0] -= hard
        largest_M = (hard + soft) * q_MK.amax(1)
        if target is not None and target.best_p_U is not None:  # its shares go through the product as well
            largest_M = torch.maximum(largest_M, soft * target.best_p_U.index_select(0, target.index_M))
        rest_M = (hard + soft) * (1 - (q_MK * is_first_MK).sum(1)).clamp_min(0)
        if target is not None and p_MK is not None:  # otherwise its other tokens come by another way
            rest_M += soft * (1 - (p_MK * is_first_MK).sum(1)).clamp_min(0)
        return cls(token_MK, coefficient_MK * weight_M[:, None], COARSE_MOST / largest_M, weight_M, rest_M * weight_M)

    def clear(self, gradient_MV: Tensor) -> None:
        """Takes them out of the coarse gradient."""
        gradient_MV.view(torch.uint8).scatter_(1, self.token_MK, 0)

    def added_to(self, product_MH: Tensor, head_VH: Tensor, expected: Expectation | None, soft: float) -> Tensor:
        """The whole gradient of the hidden states, (M, H) in float32, in place of the coarse product."""
        return add_exact_rows(
            product_MH, self.weight_M / self.unit_M, self.token_MK, self.coefficient_MK, head_VH,
            other_MH=None if expected is None else expected.rest_SH,
            other_scale_M=None if expected is None else -soft * self.weight_M,
        )  # fmt: skip


class Drift:
    """The sum of what the head's rounding does to all gradients of one loss: Σ g · (W − its float8), over slots and tokens.

    W is rounded in the same way in every step, so this points nearly the same way in each, and adds up where noise does not
    (docs/benchmarks.md: trainings with and without it). g needs no more than its size here: it is summed as it stands in float8,
    and that sum is rounded once more.
    """

    def __init__(self, head: CoarseHead) -> None:
        self.head = head
        self._weight_V = torch.zeros(head.weight_HV.shape[1], device=head.scale.device)
        self._rest = [self._weight_V[:0]]

    def count(self, exact: ExactTokens, gradient_MV: Tensor) -> None:
        """One chunk's slots, with the coarse gradient as it is multiplied."""
        add_column_sums(self._weight_V, exact.weight_M / exact.unit_M, gradient_MV)
        self._rest.append(exact.rest_M)

    def spread(self, head_VH: Tensor) -> tuple[Tensor, Tensor]:
        """(M,) and (H,), float32: their outer product is to be added to the hidden states' gradients.

        A slot bears as much of it as it leaves to tokens that are not exact.
        """
        tiny = torch.finfo(torch.float32).tiny
        unit = self._weight_V.abs().amax().clamp_min(tiny) / COARSE_MOST
        rounded_1V = (self._weight_V / unit).to(COARSE)[None]
        drift_1H = weighted_rows(rounded_1V.to(head_VH.dtype), head_VH) - self.head.weighted_rows(rounded_1V)
        if not self.head.is_corrected:
            drift_1H = torch.zeros_like(drift_1H)
        rest_M = torch.cat(self._rest)
        return rest_M / rest_M.sum().clamp_min(tiny) * unit, drift_1H[0]


def _target_shares(token_MK: Tensor, target: TargetRows | None, expected: Expectation | None) -> Tensor | None:
    """p of these tokens, as far as the target's part does not come by another way."""
    if target is not None:
        logits_MK = target.logits_UV[target.index_M[:, None], token_MK]
        return (logits_MK - target.log_sum_U.index_select(0, target.index_M)[:, None]).exp()
    if expected is not None:  # all others are in its vector
        return expected.best_p_S[:, None] * (token_MK == expected.best_S[:, None])
    return None


def _is_first(token_MK: Tensor) -> Tensor:
    """Where a token stands for the first time in its row, (M, K)."""
    same_MKK = token_MK[:, :, None] == token_MK[:, None, :]
    return ~same_MKK.tril(-1).any(-1)
