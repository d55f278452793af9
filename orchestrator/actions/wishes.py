"""What a run's open wishes mean for whoever looks at it: pure functions over rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.store.rows import IntentRow, RunRow, State
from remote.spec import LifeSpec


def can_stop(run: RunRow, wishes: Iterable[IntentRow]) -> bool:
    """Whether there is something to stop: the run itself, or, where it has ended, the retry that is to come."""
    return not run.state.is_final or any(wish.kind == "retry" for wish in wishes)


def kill_in_s(run: RunRow, wishes: Iterable[IntentRow], spec: Mapping[str, Any], now_s: float) -> float | None:
    """Until what still lives of a run that is asked to stop is killed; None for any other.

    `wishes`: those still open; `spec`: the run's own, whose grace counts where the wish names none.
    """
    wish = next((wish for wish in wishes if wish.kind == "stop"), None)
    if wish is None or run.state is not State.STOPPING:
        return None
    grace = wish.grace_s if wish.grace_s is not None else grace_s(spec)
    return max(0.0, wish.asked_s + grace - now_s)


def grace_s(spec: Mapping[str, Any]) -> float:
    """Seconds between asking a run to end and killing it, by its own spec."""
    return float(spec.get("life", {}).get("grace_s", LifeSpec().grace_s))
