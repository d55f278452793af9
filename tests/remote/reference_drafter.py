"""A drafter written a second time, from the public format's description, to load exported folders with.

Shapes are batched and plain PyTorch: config.json in, modules named as the tensors are. It shares nothing with
`remote.drafter.model`. B rows, S context tokens, Q block tokens, H hidden, C captured features.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn


class Norm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide / (wide.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config, kind):
        super().__init__()
        hidden, self.d = config["hidden_size"], config["head_dim"]
        heads, groups = config["num_attention_heads"] * self.d, config["num_key_value_heads"] * self.d
        self.q_proj, self.o_proj = nn.Linear(hidden, heads, bias=False), nn.Linear(heads, hidden, bias=False)
        self.k_proj, self.v_proj = nn.Linear(hidden, groups, bias=False), nn.Linear(hidden, groups, bias=False)
        self.q_norm, self.k_norm = Norm(self.d, config["rms_norm_eps"]), Norm(self.d, config["rms_norm_eps"])
        is_sliding = kind == "sliding_attention"
        self.window = config["sliding_window"] if is_sliding else None
        stated = config["dflash_config"].get("causal")
        self.causal = is_sliding if stated is None else stated
        self.theta = config["rope_parameters"]["rope_theta"]

    def turn(self, x, position):
        angle = position[:, None] / self.theta ** (torch.arange(0, self.d, 2) / self.d)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x[..., : self.d // 2], x[..., self.d // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, block, context):
        total, size = len(context) + len(block), len(block)
        split = lambda x: x.unflatten(-1, (-1, self.d))  # noqa: E731
        q = self.turn(self.q_norm(split(self.q_proj(block))), torch.arange(total - size, total))
        both = torch.cat([context, block])
        k = self.turn(self.k_norm(split(self.k_proj(both))), torch.arange(total))
        v = split(self.v_proj(both))
        mixed = []
        for head in range(q.shape[1]):
            group = head // (q.shape[1] // k.shape[1])
            score = q[:, head] @ k[:, group].T / math.sqrt(self.d)
            for row in range(size):
                place = total - size + row
                for column in range(total):
                    ahead = self.causal and column > place
                    behind = self.window is not None and place - column >= self.window
                    if ahead or behind:
                        score[row, column] = -math.inf
            mixed.append(score.softmax(-1) @ v[:, group])
        return self.o_proj(torch.cat(mixed, -1))


class Mlp(nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config, kind):
        super().__init__()
        self.self_attn, self.mlp = Attention(config, kind), Mlp(config["hidden_size"], config["intermediate_size"])
        self.input_layernorm = Norm(config["hidden_size"], config["rms_norm_eps"])
        self.post_attention_layernorm = Norm(config["hidden_size"], config["rms_norm_eps"])

    def forward(self, block, context):
        block = block + self.self_attn(self.input_layernorm(block), context)
        return block + self.mlp(self.post_attention_layernorm(block))


class ReferenceDrafter(nn.Module):
    """Loads an exported folder strictly; one block after the whole context."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        config = json.loads((folder / "config.json").read_text())
        hidden, captured = config["hidden_size"], len(config["dflash_config"]["target_layer_ids"])
        self.fc = nn.Linear(captured * hidden, hidden, bias=False)
        self.hidden_norm, self.norm = Norm(hidden, config["rms_norm_eps"]), Norm(hidden, config["rms_norm_eps"])
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config["layer_types"])
        self.load_state_dict(load_file(folder / "model.safetensors"), strict=True)

    @torch.no_grad()
    def forward(self, features_SC, block_QH):
        context = self.hidden_norm(self.fc(features_SC))
        for layer in self.layers:
            block_QH = layer(block_QH, context)
        return self.norm(block_QH)
