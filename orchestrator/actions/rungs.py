"""What a rung says of itself, under which names: its time and its peak. One home for every reader.

Values are named as the rungs report them: seconds of what was timed, `<stage>_allocated_bytes` and
`<stage>_reserved_bytes` of the trainer's rungs, `duration_s` and `peak_bytes` of a user's own script.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from orchestrator.lazy import lazy

if TYPE_CHECKING:
    from orchestrator import gate
    from remote import spec
else:
    gate = lazy("orchestrator.gate")
    spec = lazy("remote.spec")  # it costs a third of a `show`

_TIMES = ("step_s", "duration_s", "forward_s", "probe_s", "load_s")  # the first that is there tells a rung's time
_PEAKS = ("_reserved_bytes", "_allocated_bytes", "peak_bytes")  # endings; the first that is there at all


def ladder() -> tuple[str, ...]:
    """The rungs of the bundled trainer, in the order in which they are climbed."""
    return spec.BUNDLED_RUNGS


def planned_rung(climbed: Collection[str]) -> str | None:
    """The one whose plan a smoke run is measured against: the largest that it climbs. None where none has the recipe's
    own drafter: `checkpoint` has a small one, `ranks` the smallest roles, a script what it likes.
    """
    if spec.REAL_RUNG in climbed or "fwd_bwd" in climbed:  # real rows take a training's own step
        return "fwd_bwd"
    return next((name for name in ("multi_doc", "fwd", "leak") if name in climbed), None)


def required_names(told: Mapping[str, Any]) -> tuple[str, ...]:
    """What a launch by this spec, as it was kept, wants passed, as `gate.required_rungs` has it."""
    named = told.get("smoke", {}).get("rungs")
    if told.get("entry") == "script":
        return tuple(named or ())
    return tuple(dict.fromkeys([*(ladder() if named is None else named), *gate.FLOOR]))


def seconds_of(values: Mapping[str, Any]) -> float | None:
    return next((float(values[name]) for name in _TIMES if isinstance(values.get(name), int | float)), None)


def peak_bytes(values: Mapping[str, Any]) -> float | None:
    """The highest of any stage: as reserved where that was measured, else as allocated, else of the whole process."""
    for ending in _PEAKS:
        sizes = [size for name, size in values.items() if name.endswith(ending) and isinstance(size, int | float)]
        if sizes:
            return float(max(sizes))
    return None
