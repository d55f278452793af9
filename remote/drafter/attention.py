"""Attention of block tokens over target context and their own block: the choice of backend, and the slow oracle.

Shapes: S context tokens, T block tokens, Q query heads, G key/value heads, D head size. Query head h reads
key/value head h // (Q/G); scale D^-1/2.

A backend turns one Visibility into an `Attend` function once a step; every layer with that visibility then calls it.
Four backends give one result: `eager` (dense, any dtype, the oracle), `sdpa` (anywhere, bounded memory), `flex` (CUDA)
and `triton` (CUDA, this project's own kernels, which `auto` takes where they pass a check on the very card; where those made
for its kind of card are off, `triton-any-card`, those for all cards).
The choice is made once, at start, and carries its reason.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from remote.drafter import attention_flex, attention_sdpa
from remote.drafter.kernels import attention as attention_triton
from remote.drafter.keys import KeyValues
from remote.drafter.self_check import OWN_KERNELS, OWN_KERNELS_OF_ALL_CARDS, Verdict
from remote.drafter.visibility import Visibility, dense_mask
from remote.report import UserFault
from remote.spec import DrafterSpec

# Whether draftyard's own kernels may be taken; asked only where `auto` has the choice. See `self_check.check_attention`.
Check = Callable[[], Verdict]
Attend = Callable[..., Tensor]  # (query_TQD, KeyValues, MadeFrom or nothing) -> out_TQD

MIN_FLEX_HEAD_DIM = 16  # below it torch's flex kernels refuse to compile


@dataclass(frozen=True)
class Backend:
    name: str  # eager, sdpa, flex, triton or triton-any-card
    reason: str
    workspace_bytes: int = 2 * 1024**3

    def for_any_shape(self) -> Backend:
        """Never flex, which is compiled for static shapes and gives up after a few; same result."""
        return dataclasses.replace(self, name="sdpa") if self.name == "flex" else self

    def plan(self, visibility: Visibility) -> Attend:
        """The attention function for these ranges. Cheap; made once per step and layer rule."""
        if self.name == "eager":
            return lambda query_TQD, keys, _=None: eager_attention(query_TQD, keys, visibility)
        if self.name == "flex":
            return attention_flex.plan(visibility)
        if self.name in (OWN_KERNELS, OWN_KERNELS_OF_ALL_CARDS):
            return attention_triton.plan(visibility, for_all_cards=self.name == OWN_KERNELS_OF_ALL_CARDS)
        return attention_sdpa.plan(visibility, workspace_bytes=self.workspace_bytes)


def choose_backend(
    drafter: DrafterSpec, *, device: torch.device, dtype: torch.dtype, check: Check | None = None
) -> Backend:
    """The backend for this drafter on this device. ValueError when the recipe asks for one that cannot work there.

    Without a `check` of the own kernels on this card, auto does not take them.
    """
    requested, workspace = drafter.attention, drafter.attention_workspace_bytes
    if requested == "auto":
        return _auto(drafter, device, dtype, check)
    if requested in _OBSTACLES:
        obstacle = _OBSTACLES[requested](drafter, device=device, dtype=dtype)
        if obstacle is not None:
            raise UserFault(f"drafter.attention is {requested}, which cannot train here: {obstacle}; take auto or sdpa")
    note = f"; {_kernel_note(drafter, device, dtype)}" if requested == "sdpa" else ""
    return Backend(requested, f"asked for by the recipe{note}", workspace)


def _auto(drafter: DrafterSpec, device: torch.device, dtype: torch.dtype, check: Check | None) -> Backend:
    """Own kernels, flex, sdpa: the first that can train here."""
    workspace, out = drafter.attention_workspace_bytes, ""
    if check is not None:
        verdict = check()
        if verdict.is_passed:
            return Backend(verdict.backend, f"auto: draftyard's own kernels, {verdict.reason}", workspace)
        out = f"triton is out ({verdict.reason}); "
    obstacle = flex_obstacle(drafter, device=device, dtype=dtype)
    if obstacle is None:
        return Backend("flex", f"auto: {out}flex on CUDA, block-sparse and compiled once", workspace)
    return Backend("sdpa", f"auto: {out}flex is out ({obstacle}); {_kernel_note(drafter, device, dtype)}", workspace)


def flex_obstacle(drafter: DrafterSpec, *, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why flex cannot train here, or None."""
    if device.type != "cuda":
        return f"its gradients need CUDA, the device is {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"dtype {dtype} is not supported"
    if drafter.head_dim < MIN_FLEX_HEAD_DIM:
        return f"head_dim {drafter.head_dim} is below {MIN_FLEX_HEAD_DIM}"
    return None


_OBSTACLES = {"flex": flex_obstacle, "triton": attention_triton.obstacle}


def eager_attention(query_TQD: Tensor, keys: KeyValues, visibility: Visibility) -> Tensor:
    """Softmax attention written out: the mask is dense, scores are held in full, at least in float32."""
    num_heads, head_dim = query_TQD.shape[1:]
    key, value = (
        torch.cat([keys.context_key_SGD, keys.block_key_TGD]),
        torch.cat([keys.context_value_SGD, keys.block_value_TGD]),
    )
    group = num_heads // key.shape[1]
    work = torch.promote_types(query_TQD.dtype, torch.float32)
    key, value = (x.to(work).repeat_interleave(group, dim=1) for x in (key, value))
    score = torch.einsum("tqd,nqd->qtn", query_TQD.to(work), key) / math.sqrt(head_dim)
    score = score.masked_fill(~dense_mask(visibility), -math.inf)
    return torch.einsum("qtn,nqd->tqd", score.softmax(-1), value).to(query_TQD.dtype)


def _kernel_note(drafter: DrafterSpec, device: torch.device, dtype: torch.dtype) -> str:
    if attention_sdpa.is_fused(device=device, dtype=dtype, head_dim=drafter.head_dim):
        return "a fused SDPA kernel takes masks, scores are never held"
    return "SDPA falls back to its math kernel: float32 scores count against the workspace"
