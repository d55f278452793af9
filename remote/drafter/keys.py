"""Keys and values of one attention call, context and block apart so that nobody copies the context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class KeyValues(NamedTuple):
    """S context tokens, T block tokens, G key/value heads, D head size."""

    context_key_SGD: Tensor
    context_value_SGD: Tensor
    block_key_TGD: Tensor
    block_value_TGD: Tensor


@dataclass(frozen=True)
class MadeFrom:
    """What queries and block keys were made of, and how: a backward that keeps these may make them once more, bit for bit."""

    query: Tensor
    block_key: Tensor
    make: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
