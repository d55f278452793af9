"""The numbers a spec may hold, field by field: what would else be found after days, in the middle of a run.

One table, read from top to bottom. It knows no fields that hang together: those are
`remote.coherence.cross_field_errors`, which calls this as well. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

_AT_LEAST_1 = """
    target.hidden_size target.num_layers target.vocab_size target.num_parameters
    drafter.num_layers drafter.intermediate_size drafter.num_heads drafter.num_kv_heads drafter.head_dim
    drafter.max_position_embeddings drafter.attention_workspace_bytes
    data.max_anchors data.answer_tokens data.answer_batch loss.chunk_tokens
    train.num_steps train.rows_per_step train.accumulation train.log_every train.checkpoint_every train.keep_last
    train.num_threads evaluate.num_prompts evaluate.max_new_tokens evaluate.tree_budgets smoke.timed_steps
    life.num_gpus life.memory_limit_bytes roles.drafter roles.queue
"""
_POSITIVE = """
    drafter.rope_theta drafter.rms_norm_eps loss.gamma optim.lr optim.muon_lr optim.eps
    life.max_duration_s life.start_timeout_s life.stall_factor
"""
_NOT_NEGATIVE = """
    data.num_workers data.answer_temperature data.noise.scale loss.streak_beta evaluate.temperature
    optim.warmup_steps optim.weight_decay optim.clip_norm life.grace_s life.retries roles.target
"""
_SHARE = "loss.dpace_alpha optim.min_lr_ratio"
_BELOW_1 = "optim.beta1 optim.beta2 optim.muon_momentum"
_WAITS = "life.grace_s life.max_duration_s life.start_timeout_s"

# (dotted paths, what is right, what it must do in words)
_RULES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
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
        (path, f"is {value:g}; it must {due}")
        for paths, is_right, due in _RULES
        for path in paths.split()
        for value in _values(spec, path)
        if not (math.isfinite(value) and is_right(value))
    ]


def range_of(path: str) -> str:
    """What a number at the dotted path must do, `be at least 1`; empty where any may stand."""
    return next((due for paths, _, due in _RULES if path in paths.split()), "")


def _values(spec: Any, path: str) -> list[float]:
    """The number at the path, or each of a list."""
    found = spec
    for name in path.split("."):
        found = getattr(found, name, None)
    if found is None:
        return []
    return list(found) if isinstance(found, list) else [found]
