"""The loss as slow float64 loops, written from the formulas alone: one slot, one block, one sum at a time.

It shares no line with the product. Weights are constants to the gradient; logits are differentiable tensors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from remote.drafter.blocks import Row
from remote.spec import LossSpec


def oracle_loss(
    hidden_TH: Tensor,
    row: Row,
    anchors: list[int],
    *,
    block_size: int,
    head_VH: Tensor,
    teacher_SH: Tensor,
    spec: LossSpec,
) -> dict[str, object]:
    """Loss, denominators, term sums and metrics over blocks standing on `anchors` (used slots only)."""
    out: dict[str, object] = {"terms": dict.fromkeys(("ce", "kl", "soft_ce", "cap"), 0.0)}
    weights, right_weights, supervised, right, streaks, ranks, entropies = 0.0, 0.0, 0, 0, [], [], []
    for number, anchor in enumerate(anchors):
        slots = {}
        for k in range(1, block_size):
            if supervised_slot(row, anchor, k):
                slots[k] = _slot(hidden_TH[number * block_size + k], row, anchor + k, head_VH, teacher_SH, spec)
        for k, slot in slots.items():
            w = slot_weight(k, slots, block_size, spec)
            weights += w
            supervised += 1
            ranks.append(slot["rank"])
            for term in ("ce", "kl", "soft_ce"):
                out["terms"][term] = out["terms"][term] + w * slot[term]
            if slot["right"]:
                right += 1
                right_weights += w
                entropies.append(float(slot["entropy"].detach()))
                out["terms"]["cap"] = out["terms"]["cap"] + w * slot["entropy"]
        if slots:
            streaks.append(_streak(slots, block_size))
    denominator = {"weights": weights, "supervised": supervised, "rows": row.num_rows}[spec.normalization]
    loss = sum(spec.terms.get(term, 0.0) * out["terms"][term] for term in ("ce", "kl", "soft_ce")) / denominator
    out["loss"] = loss + spec.terms.get("cap", 0.0) * out["terms"]["cap"] / max(right_weights, 1.0)
    out |= {"denominator": denominator, "cap_denominator": right_weights, "accuracy": right / supervised}
    out |= {
        "streak": sum(streaks) / len(streaks),
        "topk": {k: sum(r < k for r in ranks) / supervised for k in (2, 4, 8)},
    }
    out["entropy_right"] = sum(entropies) / len(entropies) if entropies else None
    return out


def supervised_slot(row: Row, anchor: int, k: int) -> bool:
    position = anchor + k
    if position >= row.input_ids_S.shape[0]:
        return False
    return bool(row.loss_mask_S[position]) and int(row.document_S[position]) == int(row.document_S[anchor])


def slot_weight(k: int, slots: dict[int, dict], block_size: int, spec: LossSpec) -> float:
    if spec.decay == "exponential":
        weight = math.exp(-(k - 1) / spec.gamma)
    elif spec.decay == "none":
        weight = 1.0
    else:
        weight = sum(_chain(j, slots, spec.dpace_alpha) for j in range(k, block_size) if j in slots)
    unbroken = all(slots[i]["right"] for i in range(1, k) if i in slots)
    return weight * (1 + spec.streak_beta * unbroken)


def _chain(j: int, slots: dict[int, dict], alpha: float) -> float:
    product = 1.0
    for i in range(1, j + 1):
        if i in slots:
            product *= (1 - alpha) * math.exp(-float(slots[i]["ce"].detach())) + alpha
    return product


def _slot(hidden_H: Tensor, row: Row, position: int, head_VH: Tensor, teacher_SH: Tensor, spec: LossSpec) -> dict:
    q, p = (head_VH @ hidden_H).softmax(0), (head_VH @ teacher_SH[position - 1]).softmax(0)
    label = int(row.input_ids_S[position]) if spec.label == "data" else int(p.argmax())
    soft_ce = -(p * q.log()).sum()
    return {
        "ce": -q[label].log(),
        "soft_ce": soft_ce,
        "kl": (p * (p.log() - q.log())).sum(),
        "entropy": -(q * q.log()).sum(),
        "right": int(q.argmax()) == label,
        "rank": int((q > q[label]).sum()),
    }


def _streak(slots: dict[int, dict], block_size: int) -> int:
    length = 0
    for k in range(1, block_size):
        if k in slots and not slots[k]["right"]:
            break
        length += k in slots
    return length


def random_case(
    row: Row, num_tokens: int, *, hidden_size: int, vocab: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Float64 hidden states of the drafter, head, and hidden states of the target; peaked enough to be right at times."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return draw(num_tokens, hidden_size), draw(vocab, hidden_size), draw(row.input_ids_S.shape[0], hidden_size)
