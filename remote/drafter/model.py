"""The drafter: a Qwen3-style block-diffusion model over captured layers of the target (DFlash).

Shapes: S context tokens, T block tokens (N blocks of B), M new context tokens while decoding, H hidden size,
C = K·H captured features, Q query heads, G key/value heads, D head size.

The module tree and the 11·L+3 tensor names are those of the public implementation (z-lab/dflash), so that exported
folders load elsewhere. Embedding and head belong to the target and stay there: block tokens come in embedded,
and the result is the normed hidden state. The context c = hidden_norm(fc(h)) is computed once and feeds every
layer without a further norm. Losses, masks' rules and weights on disk belong to other rooms.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from remote.drafter.attention import Attend, Backend
from remote.drafter.blocks import Blocks, Row
from remote.drafter.kernels import body
from remote.drafter.kernels.body import BodyOperations
from remote.drafter.keys import KeyValues, MadeFrom
from remote.drafter.rope import Rotary, rotary, spread_rows
from remote.drafter.visibility import LayerRule, layer_rule, visible, visible_in_decoding
from remote.spec import DrafterSpec, TargetSpec

Checkpointing = Literal["none", "non_reentrant", "reentrant"]

INIT_STD = 0.02  # Qwen3's initializer_range


class Positions(NamedTuple):
    """Rotary factors of the context and of the block tokens."""

    context: Rotary
    block: Rotary


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight, computed in float32 whatever the dtype."""

    def __init__(self, size: int, eps: float, operations: BodyOperations = body.TORCH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.operations = eps, operations

    def forward(self, x: Tensor) -> Tensor:
        return self.operations.rms_norm(x, self.weight, self.eps)

    def then(self, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        """Each linear of the normed input."""
        return self.operations.norm_linears(x, self.weight, self.eps, *(linear.weight for linear in linears))

    def then_rotate(self, x: Tensor, at: Rotary, spread: int = 1) -> Tensor:
        """The normed heads, rotated, of as many tokens as there are positions."""
        return self.operations.head_norm_rotate(x, self.weight, self.eps, at, spread)


class DrafterAttention(nn.Module):
    """Queries from block tokens; keys and values from context and block tokens through the same weights."""

    def __init__(self, hidden_size: int, drafter: DrafterSpec, operations: BodyOperations) -> None:
        super().__init__()
        self.head_dim = drafter.head_dim
        heads, kv_heads = drafter.num_heads * drafter.head_dim, drafter.num_kv_heads * drafter.head_dim
        self.q_proj = nn.Linear(hidden_size, heads, bias=False)
        self.k_proj = nn.Linear(hidden_size, kv_heads, bias=False)
        self.v_proj = nn.Linear(hidden_size, kv_heads, bias=False)
        self.o_proj = nn.Linear(heads, hidden_size, bias=False)
        self.q_norm = RMSNorm(drafter.head_dim, drafter.rms_norm_eps, operations)
        self.k_norm = RMSNorm(drafter.head_dim, drafter.rms_norm_eps, operations)

    def key_value(self, x_NH: Tensor, at: Rotary) -> tuple[Tensor, Tensor]:
        """Rotated keys and values of N context tokens, each (N, G, D)."""
        return self.k_norm.then_rotate(self._heads(self.k_proj(x_NH)), at), self._heads(self.v_proj(x_NH))

    def forward(
        self, x_UH: Tensor, norm: RMSNorm, context: tuple[Tensor, Tensor], at: Rotary, attend: Attend,
        rows_M: Tensor | None = None, spread: int = 1,
    ) -> Tensor:  # fmt: skip
        """What attention adds to the block tokens, or to the rows that are asked for; all are keys either way."""
        query, key, value = map(self._heads, norm.then(x_UH, self.q_proj, self.k_proj, self.v_proj))

        def rotate(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            return self.q_norm.then_rotate(query, at, spread), self.k_norm.then_rotate(key, at, spread)

        made_from, (query, key) = MadeFrom(query, key, rotate), rotate(query, key)
        out_TQD = attend(query, KeyValues(*context, key, spread_rows(value, spread)), made_from)
        return self.o_proj(_rows(out_TQD, rows_M).flatten(1))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class DrafterMLP(nn.Module):
    """down(silu(gate(x)) · up(x)) of the normed input."""

    def __init__(self, hidden_size: int, intermediate_size: int, operations: BodyOperations) -> None:
        super().__init__()
        self.operations = operations
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:
        matrices = (linear.weight for linear in (self.gate_proj, self.up_proj, self.down_proj))
        return self.operations.norm_mlp(x, norm.weight, norm.eps, *matrices)


class DrafterLayer(nn.Module):
    def __init__(self, hidden_size: int, drafter: DrafterSpec, operations: BodyOperations) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, drafter.rms_norm_eps, operations)
        self.self_attn = DrafterAttention(hidden_size, drafter, operations)
        self.post_attention_layernorm = RMSNorm(hidden_size, drafter.rms_norm_eps, operations)
        self.mlp = DrafterMLP(hidden_size, drafter.intermediate_size, operations)

    def forward(
        self, x_UH: Tensor, context_SH: Tensor, positions: Positions, attend: Attend,
        rows_M: Tensor | None = None, spread: int = 1,
    ) -> Tensor:  # fmt: skip
        context = self.self_attn.key_value(context_SH, positions.context)
        return self.advance(x_UH, context, positions.block, attend, rows_M, spread)

    def advance(
        self, x_UH: Tensor, context: tuple[Tensor, Tensor], at: Rotary, attend: Attend,
        rows_M: Tensor | None = None, spread: int = 1,
    ) -> Tensor:  # fmt: skip
        """The residual stream of the block tokens after this layer, given the context's keys and values.

        With `rows_M` of those rows alone, (M, H): the others end at this layer's keys and values. With `spread` the tokens
        come in as `rope.spread_rows` takes them: what they share goes through norm and products once.
        """
        added = self.self_attn(x_UH, self.input_layernorm, context, at, attend, rows_M, spread)
        x_MH = _rows(spread_rows(x_UH, spread), rows_M) + added
        return x_MH + self.mlp(x_MH, self.post_attention_layernorm)


class DraftCache:
    """Keys and values of the context seen so far, per layer, while one text is decoded.

    Only accepted context enters, and block tokens never do, so nothing is ever cut off again.
    """

    def __init__(self, num_layers: int) -> None:
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    @property
    def num_tokens(self) -> int:
        first = self._layers[0]
        return 0 if first is None else first[0].shape[0]

    def extend(self, layer: int, new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Appends the new tokens' keys and values of one layer and returns all of that layer's."""
        old = self._layers[layer]
        whole = new if old is None else (torch.cat([old[0], new[0]]), torch.cat([old[1], new[1]]))
        self._layers[layer] = whole
        return whole


class DFlashDrafter(nn.Module):
    """The trainable drafter. `backend` is chosen once by `attention.choose_backend`; `is_fused` takes the kernels' operations."""

    def __init__(
        self,
        target: TargetSpec,
        drafter: DrafterSpec,
        *,
        backend: Backend,
        activation_checkpointing: Checkpointing = "none",
        is_fused: bool = False,
    ) -> None:
        super().__init__()
        hidden_size, operations = target.hidden_size, body.FUSED if is_fused else body.TORCH
        self.spec, self.backend, self.is_fused = drafter, backend, is_fused
        self.activation_checkpointing = activation_checkpointing
        self.rules = [layer_rule(drafter, index) for index in range(drafter.num_layers)]
        self.fc = nn.Linear(len(drafter.captured_layers) * hidden_size, hidden_size, bias=False)
        self.hidden_norm = RMSNorm(hidden_size, drafter.rms_norm_eps, operations)
        self.layers = nn.ModuleList(DrafterLayer(hidden_size, drafter, operations) for _ in range(drafter.num_layers))
        self.norm = RMSNorm(hidden_size, drafter.rms_norm_eps, operations)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Normal(0, 0.02) matrices, ones in the norms. Drawn where the generator lives: a CPU one is the same everywhere."""
        for parameter in self.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            drawn = torch.empty(parameter.shape, device=generator.device).normal_(0.0, INIT_STD, generator=generator)
            parameter.copy_(drawn)

    def forward(
        self, features_SC: Tensor, block_embeddings_UH: Tensor, row: Row, blocks: Blocks, rows_M: Tensor | None = None
    ) -> Tensor:
        """Normed hidden states (T, H) of every block token, in the drafter's dtype.

        Embeddings of `blocks.distinct_ids`, (N + 1, H), or of each block token, (T, H), as a probe may want them: the same
        numbers, and the first layer's products are made for every mask slot anew.
        With `rows_M` (int64, none twice) those of these rows alone, (M, H), the same numbers: where only the slots that carry loss
        are read, the last layer's output product and MLP are spared for all others.
        """
        num_context = row.input_ids_S.shape[0]
        attends = {rule: self.backend.plan(visible(rule, blocks, num_context)) for rule in set(self.rules)}
        positions = Positions(self._rotary(row.position_S), self._rotary(blocks.position_T))
        context_SH = self.context(features_SC)
        x = block_embeddings_UH.to(context_SH.dtype)
        spread = blocks.block_size if len(x) == blocks.num_blocks + 1 else 1
        for number, (layer, rule) in enumerate(zip(self.layers, self.rules, strict=True), start=1):
            wanted_M = rows_M if number == len(self.layers) else None
            x, spread = self._run(layer)(x, context_SH, positions, attends[rule], wanted_M, spread), 1
        return self.norm(x)

    def for_any_shape(self) -> DFlashDrafter:
        """The same weights, with attention that takes rows of ever other lengths; training's may be compiled for one."""
        shared = copy.copy(self)
        shared.backend = self.backend.for_any_shape()
        return shared

    @torch.no_grad()
    def draft(self, features_MC: Tensor, cache: DraftCache, block_embeddings_BH: Tensor) -> Tensor:
        """Normed hidden states (B, H) of one block while decoding a single text.

        The features of the M context tokens not yet cached (M ≥ 1 at the first call) are appended to `cache`;
        the block's anchor then stands at position cache.num_tokens. Equal to the training forward on the same inputs.
        """
        past, new, size = cache.num_tokens, features_MC.shape[0], block_embeddings_BH.shape[0]
        index = torch.arange(past + new + size, device=features_MC.device)
        at = Positions(self._rotary(index[past : past + new]), self._rotary(index[past + new :]))
        attends = self._decoding_attention(past + new, size, features_MC.device)
        context_MH = self.context(features_MC)
        x_BH = block_embeddings_BH.to(context_MH.dtype)
        for number, (layer, rule) in enumerate(zip(self.layers, self.rules, strict=True)):
            assert isinstance(layer, DrafterLayer)
            context = cache.extend(number, layer.self_attn.key_value(context_MH, at.context))
            x_BH = layer.advance(x_BH, context, at.block, attends[rule])
        return self.norm(x_BH)

    def context(self, features_NC: Tensor) -> Tensor:
        """What every layer sees of N context tokens: hidden_norm(fc(features)), (N, H)."""
        return self.hidden_norm(self.fc(features_NC.to(self.fc.weight.dtype)))

    def _decoding_attention(self, num_context: int, block_size: int, device: torch.device) -> dict[LayerRule, Attend]:
        """The context grows every round."""
        backend = self.backend.for_any_shape()
        return {
            rule: backend.plan(visible_in_decoding(rule, num_context=num_context, block_size=block_size, device=device))
            for rule in set(self.rules)
        }

    def _rotary(self, position_N: Tensor) -> Rotary:
        spec = self.spec
        return rotary(position_N, head_dim=spec.head_dim, theta=spec.rope_theta, dtype=self.fc.weight.dtype)

    def _run(self, layer: nn.Module) -> Callable[..., Tensor]:
        """The layer, or the layer under activation checkpointing (it has no randomness to restore)."""
        if self.activation_checkpointing == "none" or not torch.is_grad_enabled():
            return layer
        reentrant = self.activation_checkpointing == "reentrant"
        return partial(checkpoint, layer, use_reentrant=reentrant, preserve_rng_state=False)


class _DistinctRows(torch.autograd.Function):
    """Some rows, none twice: their gradients are put in place. index_select's would add them, ten times as slowly."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows_M: Tensor) -> Tensor:
        ctx.save_for_backward(rows_M)
        ctx.shape = x.shape
        return x.index_select(0, rows_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows_M,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_copy_(0, rows_M, grad), None


def _rows(x: Tensor, rows_M: Tensor | None) -> Tensor:
    if rows_M is None:
        return x
    chosen: Tensor = _DistinctRows.apply(x, rows_M)
    return chosen


def tensor_shapes(target: TargetSpec, drafter: DrafterSpec) -> dict[str, tuple[int, ...]]:
    """The 11·L+3 tensors of an exported drafter by name, without allocating any."""
    with torch.device("meta"):
        model = DFlashDrafter(target, drafter, backend=Backend("eager", "shapes only"))
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
