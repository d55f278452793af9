"""One line to whoever waits for an action: what it does now, or what it had to leave out."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.store.rows import Kind

Tell = Callable[[str], None]


def silent(_: str) -> None:
    """Nobody wants to hear."""


def beginning(run_id: str, kind: Kind, recipe: str, branch: str, *, parent: str | None = None, step: int | None) -> str:
    """What a job is about to do; `step`: of its parent's checkpoint that it reads."""
    what = f"{recipe}, branch {branch}"
    match kind:
        case Kind.SMOKE:
            return f"climbing the smoke ladder of {what}, as run {run_id}"
        case Kind.SCRIPT:
            return f"running the script beside {what}, as run {run_id}"
        case Kind.PREPARE:
            return f"preparing what {what}, trains on, as run {run_id}"
        case Kind.EXPORT | Kind.EVALUATE:
            doing = "exporting" if kind is Kind.EXPORT else "evaluating"
            return f"{doing} step {step}, the newest checkpoint of run {parent}, as run {run_id}"
    return f"starting run {run_id}: {what}"
