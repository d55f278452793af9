"""The drafter's forward written out from its description: no modules, no masks, one block and one head at a time.

Only for small float64 cases. Weights come by their exported names.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from remote.drafter.blocks import Blocks, Row
from remote.spec import DrafterSpec


def oracle_forward(
    weights: dict[str, Tensor], spec: DrafterSpec, row: Row, blocks: Blocks, *, features_SC: Tensor, embedded_TH: Tensor
) -> Tensor:
    """Full layers only: every slot sees its document strictly before the anchor, and its whole own block."""
    context_SH = _norm(features_SC @ weights["fc.weight"].T, weights["hidden_norm.weight"], spec)
    out = []
    for b, (anchor, keep) in enumerate(zip(blocks.anchors_N.tolist(), blocks.keep_N.tolist(), strict=True)):
        before = [c for c in range(anchor) if keep and row.document_S[c] == row.document_S[anchor]]
        rows = slice(b * blocks.block_size, (b + 1) * blocks.block_size)
        positions = [*row.position_S[before].tolist(), *blocks.position_T[rows].tolist()]
        x_BH = embedded_TH[rows]
        for index in range(spec.num_layers):
            layer = {name.split(".", 2)[2]: w for name, w in weights.items() if name.startswith(f"layers.{index}.")}
            x_BH = _layer(layer, spec, x_BH, context_SH[before], positions)
        out.append(_norm(x_BH, weights["norm.weight"], spec))
    return torch.cat(out)


def _layer(w: dict[str, Tensor], spec: DrafterSpec, x_BH: Tensor, context_CH: Tensor, positions: list[int]) -> Tensor:
    y_BH = _norm(x_BH, w["input_layernorm.weight"], spec)
    both = torch.cat([context_CH, y_BH])
    d, group, heads = spec.head_dim, spec.num_heads // spec.num_kv_heads, []
    for h in range(spec.num_heads):
        g = h // group
        q = _norm(y_BH @ w["self_attn.q_proj.weight"][h * d : (h + 1) * d].T, w["self_attn.q_norm.weight"], spec)
        k = _norm(both @ w["self_attn.k_proj.weight"][g * d : (g + 1) * d].T, w["self_attn.k_norm.weight"], spec)
        v = both @ w["self_attn.v_proj.weight"][g * d : (g + 1) * d].T
        q = torch.stack([_turned(x, p, spec.rope_theta) for x, p in zip(q, positions[-len(q) :], strict=True)])
        k = torch.stack([_turned(x, p, spec.rope_theta) for x, p in zip(k, positions, strict=True)])
        heads.append((q @ k.T / math.sqrt(d)).softmax(-1) @ v)
    x_BH = x_BH + torch.cat(heads, dim=1) @ w["self_attn.o_proj.weight"].T
    y_BH = _norm(x_BH, w["post_attention_layernorm.weight"], spec)
    gate = y_BH @ w["mlp.gate_proj.weight"].T
    return x_BH + (gate / (1 + torch.exp(-gate)) * (y_BH @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T


def _norm(x: Tensor, weight: Tensor, spec: DrafterSpec) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + spec.rms_norm_eps) * weight


def _turned(x_D: Tensor, position: int, theta: float) -> Tensor:
    """Pairs (i, i + D/2) turned by position · theta^(-2i/D)."""
    half, out = len(x_D) // 2, x_D.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x_D))
        a, b = x_D[i], x_D[i + half]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out
