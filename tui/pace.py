"""How fast a run goes, where a step's time is spent, when it ends, and why that moved.

Arithmetic over values the run reported itself: the newest steps against the whole attempt. What was
not reported is not guessed; a missing part is left out, and what the parts do not add up to is
called "other".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.actions.throughput import PARTS
from orchestrator.units import is_measurable

TRAINING = ("training", "train")  # the stage in which steps are taken


@dataclass(frozen=True)
class StepTimes:
    """Mean seconds of a step and of its parts, over the newest steps and over the whole attempt."""

    recent: Mapping[str, float]  # metric name -> seconds
    overall: Mapping[str, float]


@dataclass(frozen=True)
class Pace:
    step_s: float | None
    steps_left: int | None
    eta_s: float | None
    parts: tuple[tuple[str, float], ...]  # name without unit, seconds of a recent step; "other" last
    moved_s: float | None  # how much later the end is than at the attempt's own mean pace
    why_moved: str  # the parts that changed most, empty where nothing moved


NO_PACE = Pace(None, None, None, (), None, "")


def pace_of(times: StepTimes, *, step: int | None, num_steps: int | None) -> Pace:
    """The pace from reported step times."""
    step_s = times.recent.get("step_s")
    left = None if step is None or num_steps is None else max(0, num_steps - step)
    eta_s = eta_of(left, step_s)
    before_s = times.overall.get("step_s")
    moved_s = None if left is None or step_s is None or before_s is None else left * (step_s - before_s)
    return Pace(step_s, left, eta_s, _parts(times.recent, step_s), moved_s, _why_moved(times, moved_s, eta_s))


def pace_at(step_s: float | None, *, step: int | None, num_steps: int | None) -> Pace:
    """The pace of a run that reports no step times."""
    left = None if step is None or num_steps is None else max(0, num_steps - step)
    return Pace(step_s, left, eta_of(left, step_s), (), None, "")


def eta_of(left: int | None, step_s: float | None) -> float | None:
    """Seconds to the last step; None where no step is left, as what follows has a pace of its own."""
    return left * step_s if left and step_s is not None else None


def mean_of(values: Sequence[float]) -> float | None:
    known = [number for number in values if is_measurable(number)]
    return sum(known) / len(known) if known else None


def bottleneck(latest: Mapping[str, float], pace: Pace) -> str:
    """Which side waits for the other, from the queue of hidden states, else from the share of waiting."""
    depth, capacity = latest.get("queue_depth"), latest.get("queue_capacity")
    if depth is not None and capacity:
        if depth >= 0.75 * capacity:
            return "the trainer: hidden states wait for it"
        if depth <= 0.25 * capacity:
            return "the target: the trainer waits for hidden states"
        return "neither: the queue is half full"
    waits = dict(pace.parts).get("wait")
    if waits is None or not pace.step_s:
        return "not reported"
    share = waits / pace.step_s
    return f"{'the data side' if share > 0.3 else 'the trainer'}: {share * 100:.0f}% of a step is waiting for data"


def _parts(recent: Mapping[str, float], step_s: float | None) -> tuple[tuple[str, float], ...]:
    named = [(name.removesuffix("_s"), recent[name]) for name in PARTS if name in recent]
    if not named or step_s is None:
        return tuple(named)
    rest = step_s - sum(seconds for _, seconds in named)
    return (*named, ("other", rest)) if rest > 0.005 * step_s else tuple(named)


def _why_moved(times: StepTimes, moved_s: float | None, eta_s: float | None) -> str:
    """The parts whose change explains the move; nothing below two per cent of the time left."""
    if moved_s is None or eta_s is None or abs(moved_s) < max(0.02 * eta_s, 1.0):
        return ""
    changes = [
        (name.removesuffix("_s"), times.recent[name] - times.overall[name])
        for name in PARTS
        if name in times.recent and name in times.overall
    ]
    same_way = [(name, change) for name, change in changes if change * moved_s > 0]
    told = sorted(same_way, key=lambda item: -abs(item[1]))[:2]
    return ", ".join(f"{name} {_signed(change)} a step" for name, change in told if abs(change) >= 5e-4)


def _signed(seconds: float) -> str:
    sign = "+" if seconds > 0 else "−"
    size = abs(seconds)
    return f"{sign}{size * 1000:.0f} ms" if size < 1 else f"{sign}{size:.2f} s"
