"""The target's forward pass, written out for Llama- and Qwen3-style decoders, with our own key/value cache.

Why not the library's: its cache argument changed its name and its `crop` changed its meaning between
two releases we support, and a drafted tree needs a mask of its own and a cache that can be compacted.
The weights and the rotary frequencies are the library's modules', shared and never copied; a test
compares every hidden state with the library's own.

It knows tensors only: no text, no files, no drafter.

Shapes: B rows of a batch, Q new tokens a row, P cached slots a row, H hidden, C = captured layers x H,
h heads, g key/value heads, d head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from remote.drafter.product import linear

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROTARY_KINDS = ("default", "linear", "llama3", "yarn")  # frequencies that do not depend on the length

CosSin = tuple[Tensor, Tensor]  # rotary factors, [B, 1, Q, d] each


class KVCache:
    """Keys and values of every decoded token; room is made before it is needed.

    `visible_BP` is False where a ragged prompt was padded: nothing ever attends there.
    """

    def __init__(self, keys_LBgPd: Tensor, position_BP: Tensor) -> None:
        self._keys = keys_LBgPd
        self._values = torch.zeros_like(keys_LBgPd)
        self._position = position_BP
        self._visible = torch.zeros_like(position_BP, dtype=torch.bool)
        self._is_ragged = False
        self.length = 0  # slots in use

    @property
    def visible_BP(self) -> Tensor:
        return self._visible[:, : self.length]

    @property
    def position_BP(self) -> Tensor:
        return self._position[:, : self.length]

    @property
    def is_ragged(self) -> bool:
        """Whether some slot in use holds padding."""
        return self._is_ragged

    def extend(self, position_BQ: Tensor, real_BQ: Tensor | None = None) -> None:
        """Takes Q more slots; layers fill them with `write`."""
        start, self.length = self.length, self.length + position_BQ.shape[1]
        if self.length > self._position.shape[1]:
            self._grow(max(self.length, 2 * self._position.shape[1]))
        self._position[:, start : self.length] = position_BQ
        self._visible[:, start : self.length] = True if real_BQ is None else real_BQ
        self._is_ragged |= real_BQ is not None

    def write(self, layer: int, keys_BgQd: Tensor, values_BgQd: Tensor) -> tuple[Tensor, Tensor]:
        """Stores one layer's newest keys and values; returns all of that layer's, oldest first."""
        start = self.length - keys_BgQd.shape[2]
        self._keys[layer, :, :, start : self.length] = keys_BgQd
        self._values[layer, :, :, start : self.length] = values_BgQd
        return self._keys[layer, :, :, : self.length], self._values[layer, :, :, : self.length]

    def crop(self, length: int) -> None:
        """Forgets everything after the first `length` slots."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop a cache of {self.length} slots to {length}")
        self.length = length

    def compact(self, start: int, kept: Sequence[int]) -> None:
        """Keeps the slots before `start` and, after them, `start + i` for each i of `kept`, in order.

        This is the commit of a verified tree (DDTree, arXiv 2604.12989, round step 5).
        """
        index = torch.tensor([start + i for i in kept], device=self._position.device)
        end = start + len(kept)
        for rows in (self._keys, self._values):
            rows[:, :, :, start:end] = rows.index_select(3, index)
        for marks in (self._position, self._visible):
            marks[:, start:end] = marks.index_select(1, index)
        self.length = end

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Leaves only these rows of the batch, in this order."""
        index = torch.tensor(list(rows), device=self._position.device)
        self._keys, self._values = (held.index_select(1, index) for held in (self._keys, self._values))
        self._position, self._visible = (held.index_select(0, index) for held in (self._position, self._visible))

    def _grow(self, capacity: int) -> None:
        more = capacity - self._position.shape[1]
        self._keys = F.pad(self._keys, (0, 0, 0, more))
        self._values = F.pad(self._values, (0, 0, 0, more))
        self._position = F.pad(self._position, (0, more))
        self._visible = F.pad(self._visible, (0, more))


@dataclass(frozen=True)
class Pass:
    """What one forward pass leaves."""

    last_hidden_BQH: Tensor  # after the final norm, which is applied exactly once
    features_BQC: Tensor  # outputs of the captured layers side by side; C is 0 where none was asked for


Attend = tuple[KVCache | None, Tensor | None]  # where keys and values go, and who sees whom


class Decoder:
    """Runs the library's decoder layers with attention and cache of our own.

    The library's modules are `Any` to the type checker: their attributes differ between families.
    """

    def __init__(self, body: Any, config: Any) -> None:
        self.layers = list(body.layers)
        self.norm = body.norm
        self.embedding = body.embed_tokens
        self._rotary = body.rotary_emb
        self._num_kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._windows = _windows(config)

    def new_cache(self, *, batch: int, capacity: int) -> KVCache:
        weight = self.embedding.weight
        shape = (len(self.layers), batch, self._num_kv_heads, capacity, self.head_dim)
        position = torch.zeros(batch, capacity, dtype=torch.long, device=weight.device)
        return KVCache(weight.new_zeros(shape), position)

    @torch.no_grad()
    def run(
        self,
        ids_BQ: Tensor,
        position_BQ: Tensor,
        *,
        cache: KVCache | None = None,
        layers: Sequence[int] = (),
        view: View | None = None,
    ) -> Pass:
        """One pass over Q new tokens a row, after everything in `cache` (which takes them in).

        `layers` are 0-based: id i is the output of layer i, which Hugging Face calls hidden_states[i + 1].
        """
        view = view or View()
        past = 0 if cache is None else cache.length
        if cache is not None:
            cache.extend(position_BQ, view.real_BQ)
        masks = _Masks(view, cache=cache, past=past, position_BQ=position_BQ)
        cos_sin = self._cos_sin(position_BQ)
        hidden, captured = self.embedding(ids_BQ), {}
        for index, layer in enumerate(self.layers):
            hidden = self._layer(layer, index, hidden, cos_sin=cos_sin, attend=(cache, masks.of(self._windows[index])))
            if index in layers:
                captured[index] = hidden
        features = [captured[index] for index in layers] or [hidden[..., :0]]
        return Pass(last_hidden_BQH=self.norm(hidden), features_BQC=torch.cat(features, dim=-1))

    def _cos_sin(self, position_BQ: Tensor) -> CosSin:
        angle_BQd = position_BQ[..., None].float() * self._rotary.inv_freq.float()
        angle_BQd = torch.cat((angle_BQd, angle_BQd), dim=-1)[:, None]
        scale, dtype = self._rotary.attention_scaling, self.embedding.weight.dtype
        return (angle_BQd.cos() * scale).to(dtype), (angle_BQd.sin() * scale).to(dtype)

    def _layer(self, layer: Any, index: int, hidden: Tensor, *, cos_sin: CosSin, attend: Attend) -> Tensor:
        attended = self._attention(
            layer.self_attn, index, layer.input_layernorm(hidden), cos_sin=cos_sin, attend=attend
        )
        hidden = hidden + attended
        normed = layer.post_attention_layernorm(hidden)
        gated = layer.mlp.act_fn(_project(layer.mlp.gate_proj, normed)) * _project(layer.mlp.up_proj, normed)
        return hidden + _project(layer.mlp.down_proj, gated)

    def _attention(self, attn: Any, index: int, hidden: Tensor, *, cos_sin: CosSin, attend: Attend) -> Tensor:
        cache, mask = attend
        heads = (*hidden.shape[:-1], -1, self.head_dim)
        queries, keys = _project(attn.q_proj, hidden).view(heads), _project(attn.k_proj, hidden).view(heads)
        if hasattr(attn, "q_norm"):  # Qwen3 normalises every head
            queries, keys = attn.q_norm(queries), attn.k_norm(keys)
        queries, keys = _rotate(queries.transpose(1, 2), cos_sin), _rotate(keys.transpose(1, 2), cos_sin)
        values = _project(attn.v_proj, hidden).view(heads).transpose(1, 2)
        if cache is not None:
            keys, values = cache.write(index, keys, values)
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None and queries.shape[2] > 1, enable_gqa=True
        )
        return _project(attn.o_proj, mixed.transpose(1, 2).flatten(2))


@dataclass(frozen=True)
class View:
    """Who is real and who sees whom among the new tokens; the default is plain causal order."""

    real_BQ: Tensor | None = None  # False where a row is padded (padding only at the end of a row)
    allow_QQ: Tensor | None = None  # a drafted tree: True where query may see key, both new


class _Masks:
    """The attention masks of one pass: one for full layers, one for each window, made when first asked for."""

    def __init__(self, view: View, *, cache: KVCache | None, past: int, position_BQ: Tensor) -> None:
        self._view, self._cache, self._past, self._position = view, cache, past, position_BQ
        self._made: dict[int | None, Tensor | None] = {}

    def of(self, window: int | None) -> Tensor | None:
        """[B, 1, Q, P + Q], True where seen; None where the kernel's own causal rule says the same."""
        if window is not None and int(self._position.max()) < window:
            window = None  # nothing is far enough away to be hidden
        if window not in self._made:
            self._made[window] = self._make(window)
        return self._made[window]

    def _make(self, window: int | None) -> Tensor | None:
        num_new = self._position.shape[1]
        # Right padding needs no mask in a first pass: a real token never looks to its right.
        plain = self._view.allow_QQ is None and (self._past == 0 or num_new == 1)
        ragged = self._past > 0 and self._cache is not None and self._cache.is_ragged
        if plain and not ragged and window is None:
            return None
        allow = self._view.allow_QQ
        if allow is None:
            allow = torch.ones(num_new, num_new, dtype=torch.bool, device=self._position.device).tril()
        seen = allow[None].expand(self._position.shape[0], -1, -1)
        key_position = self._position
        if self._cache is not None:
            past_seen = self._cache.visible_BP[:, None, : self._past].expand(-1, num_new, -1)
            seen = torch.cat((past_seen, seen), dim=2)
            key_position = self._cache.position_BP
        if window is not None:
            seen = seen & (self._position[:, :, None] - key_position[:, None] < window)
        return seen[:, None]


def _project(layer: Any, x: Tensor) -> Tensor:
    return (
        linear(x, layer.weight, layer.bias) if type(layer) is nn.Linear else layer(x)
    )  # one of eight bits has its own way


def _rotate(heads_BhQd: Tensor, cos_sin: CosSin) -> Tensor:
    cos, sin = cos_sin
    left, right = heads_BhQd.chunk(2, dim=-1)
    return heads_BhQd * cos + torch.cat((-right, left), dim=-1) * sin


def can_run(config: Any) -> bool:
    """Whether this forward pass is the model's; others go through `library_decoder`."""
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return config.model_type in FAMILIES and rotary in ROTARY_KINDS and config.hidden_act == "silu"


def _windows(config: Any) -> list[int | None]:
    """The attention window of each layer in tokens, None where it sees everything."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # Mistral: a window holds for all layers
        kinds = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]
