"""The settings of PyTorch's allocator that a job runs with: what a supervisor sets by itself, and what a recipe's `env` says."""

from __future__ import annotations

from collections.abc import Mapping

DEFAULT = "expandable_segments:True"  # set for every job, unless its own settings name one of NAMES
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the first is read by newer torch alone, and counts there


def grows_segments(env: Mapping[str, str]) -> bool:
    """Whether a job with this environment of its own gets segments that grow."""
    settings = next((env[name] for name in NAMES if name in env), DEFAULT)
    return DEFAULT in settings.replace(" ", "")
