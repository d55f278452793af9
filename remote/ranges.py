"""The numbers a spec may hold, field by field: what would else be found after days, in the middle of a run.

One table, read from top to bottom. It knows no fields that hang together: those are
`remote.coherence.cross_field_errors`, which calls this as well. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

# What a plan goes through one by one is bounded well above anything that is trained: a zero too many is told at once.
_LAYERS = "target.num_layers drafter.num_layers"
_ROW_TOKENS = "data.row_tokens"
_AT_ONCE = "train.rows_per_step roles.drafter"
_AT_LEAST_1 = """
    target.hidden_size target.vocab_size target.num_parameters
    drafter.intermediate_size drafter.num_heads drafter.num_kv_heads drafter.head_dim
    drafter.max_position_embeddings drafter.attention_workspace_bytes
    data.max_anchors data.answer_tokens data.answer_batch loss.chunk_tokens
    train.num_steps train.accumulation train.log_every train.checkpoint_every train.keep_last
    train.num_threads evaluate.num_prompts evaluate.max_new_tokens evaluate.tree_budgets smoke.timed_steps
    life.num_gpus life.memory_limit_bytes roles.queue
"""
_POSITIVE = """
    drafter.rope_theta drafter.rms_norm_eps loss.gamma optim.lr optim.muon_lr optim.eps
    life.max_duration_s life.start_timeout_s life.stall_factor
"""
_NOT_NEGATIVE = """
    data.num_workers data.answer_temperature data.noise.scale loss.streak_beta evaluate.temperature
    optim.warmup_steps optim.weight_decay optim.clip_norm life.grace_s life.retries
"""
_SHARE = "loss.dpace_alpha optim.min_lr_ratio"
_BELOW_1 = "optim.beta1 optim.beta2 optim.muon_momentum"
MOST_TOKENS = 2**18  # of the rows that go through the drafter at once
_WAITS = "life.grace_s life.max_duration_s life.start_timeout_s"

# (dotted paths, what is right, what it must do in words)
_RULES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (_LAYERS, lambda value: 1 <= value <= 1_000, "be from 1 to 1,000"),
    ("drafter.block_size", lambda value: 2 <= value <= 4_096, "be from 2 to 4,096"),
    (_ROW_TOKENS, lambda value: 1 <= value <= MOST_TOKENS, f"be from 1 to {MOST_TOKENS:,}"),
    (_AT_ONCE, lambda value: 1 <= value <= 1_024, "be from 1 to 1,024"),
    ("roles.target", lambda value: 0 <= value <= 1_024, "be from 0 to 1,024"),
    (_AT_LEAST_1, lambda value: value >= 1, "be at least 1"),
    (_POSITIVE, lambda value: value > 0, "be positive"),
    (_NOT_NEGATIVE, lambda value: value >= 0, "not be negative"),
    (_SHARE, lambda value: 0 <= value <= 1, "lie in [0, 1]"),
    (_BELOW_1, lambda value: 0 <= value < 1, "lie in [0, 1)"),
    (_WAITS, lambda value: value <= 1e9, "be at most 1e9 s, which is 30 years"),
)


def range_errors(spec: Any) -> list[tuple[str, str]]:
    """(dotted path, message) of every number out of its range; a field this entry has not, or left empty, is no error."""
    return [
        (path, f"is {_shown(value)}; it must {due}")
        for paths, is_right, due in _RULES
        for path in paths.split()
        for value in _values(spec, path)
        if not (_is_held(value) and is_right(value))
    ]


def range_of(path: str) -> str:
    """What a number at the dotted path must do, `be at least 1`; empty where any may stand."""
    return next((due for paths, _, due in _RULES if path in paths.split()), "")


def _is_held(value: float) -> bool:
    """Finite, and of 64 bits where it is whole: a larger one is no float either."""
    return abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value)


def _shown(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}" if _is_held(value) else "a number of more than 64 bits"
    return f"{value:g}"


def _values(spec: Any, path: str) -> list[float]:
    """The number at the path, or each of a list."""
    found = spec
    for name in path.split("."):
        found = getattr(found, name, None)
    if found is None:
        return []
    return list(found) if isinstance(found, list) else [found]
