"""What a failure says of the memory that ran out: what was needed beyond the plan, what others held, what the process was
allowed. Pure functions of the failure's facts and the plan that was kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.failure.oom_text import idle_bytes, others_bytes
from orchestrator.store.rows import FailureRow
from remote.allocator import DEFAULT, NAMES

GROW = "expandable_segments"  # the word of the remedy that lets segments grow
GROW_NAME = "segments that grow"


@dataclass(frozen=True)
class Exceeded:
    """The stage that a run ended in, where it needed more than its plan had said; and the plan's largest line there."""

    stage: str
    planned_bytes: int  # allocated
    needed_bytes: int  # alive when it ended, and what was asked for
    component: str  # its name, and that it is the largest: no plan knows which line grew
    component_bytes: int
    held: tuple[int, str] | None = None  # bytes of the place in the code that held most when it ended, and the place


def held(facts: Mapping[str, Any]) -> tuple[int, tuple[int, ...]]:
    """What other processes held of the card, and their pids. Of what this one is known to have had nothing is another's."""
    own_bytes = max(int(facts.get("own_use_bytes", 0)), int(facts.get("allocated_bytes", 0)) + idle_bytes(facts))
    total_bytes, others = facts.get("total_bytes"), others_bytes(facts)
    held_bytes = others if total_bytes is None else max(0, min(others, int(total_bytes) - own_bytes))
    return held_bytes, tuple(int(item["pid"]) for item in facts.get("other_processes") or ()) if held_bytes else ()


def remedy_of_pieces(facts: Mapping[str, Any]) -> str:
    """The word of the first remedy of memory that lay in pieces; empty where it did not."""
    if facts.get("cause") != "fragmentation":
        return ""
    return str(next((item.get("word") for item in facts.get("remedies") or ()), "even_sizes"))


def setting_of(pieces: str, launch: Mapping[str, Any]) -> dict[str, str]:
    """The variables that make segments grow, where that is the first remedy: those of the allocator's that the run had, as
    newer torch reads one of them before the other, else the one that every torch reads. Empty where it is not.
    """
    if pieces != GROW:
        return {}
    had = launch.get("env")
    return dict.fromkeys([name for name in NAMES if isinstance(had, list) and name in had] or NAMES[1:], DEFAULT)


def pieces_told(setting: Mapping[str, str]) -> str:
    """Of memory that was there, but in pieces: what to try first, and that it changes no plan. `setting`: as above."""
    told = "it ran out of pieces that were large enough"
    if not setting:
        return f"{told}, and its segments grow already: the first thing to try, a few sizes in place of many, is no change of the plan"
    return f"{told}; the first thing to try is a setting of the allocator, no change of the plan:"


def allowed(facts: Mapping[str, Any], capacity_bytes: int | None, told: str) -> tuple[int | None, str]:
    """The card or the machine, or less where the process was allowed less: what fits must fit there."""
    limits = [facts.get(name) for name in ("allowed_bytes", "limit_bytes")]
    least = min((size for size in limits if isinstance(size, int)), default=None)
    if least is None or (capacity_bytes is not None and capacity_bytes <= least):
        return capacity_bytes, told
    return least, "what the process was allowed"


def short_bytes(failures: Sequence[FailureRow], kept: Mapping[str, Any]) -> int:
    """What the failure shows to have been needed, less what the plan said must fit; never below zero.

    What the allocator had reserved and not in use is no need, but for the slack that the plan counts as well.
    """
    facts = failures[0].facts if failures else {}
    sizes = [facts.get(name) for name in ("own_use_bytes", "requested_bytes")]
    idle = max(0, idle_bytes(facts) - int(kept.get("slack_bytes") or 0))
    needed_bytes = sum(size for size in sizes if isinstance(size, int)) - idle
    return max(0, needed_bytes - int(kept.get("driver_bytes") or 0)) if None not in sizes else 0


def exceeded(failures: Sequence[FailureRow], kept: Mapping[str, Any]) -> Exceeded | None:
    """None where the failure names no stage, or says too little, or its plan was kept."""
    first = failures[0] if failures else None
    stage = next((each for each in kept.get("stages") or () if first is not None and each["name"] == first.stage), None)
    sizes = [first.facts.get(name) for name in ("allocated_bytes", "requested_bytes")] if first is not None else []
    known = [size for size in sizes if isinstance(size, int)]
    if stage is None or len(known) < 2 or sum(known) <= stage["allocated_bytes"]:
        return None
    most = max(stage["components"], key=lambda component: int(component["size_bytes"]))
    places = first.facts.get("memory_held") or () if first is not None else ()
    held = max(((int(item["bytes"]), str(item.get("frame") or "")) for item in places), default=None)
    return Exceeded(
        stage["name"],
        stage["allocated_bytes"],
        sum(known),
        f"{most['name']}, the largest line",
        most["size_bytes"],
        held if held is not None and held[1] else None,
    )
