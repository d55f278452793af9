"""The right half of the launch screen: what would run, whether it fits, what the gate says."""

from __future__ import annotations

from tui.fits import fit_lines, use_lines
from tui.keys import key_of
from tui.memory import plan_lines
from tui.ordering import Offer, Planned, Standing, Wish
from tui.outside import to_type
from tui.pieces import BLANK, Line, heading, wrapped
from tui.wording import fit

_MEANINGS = {"passed": "good", "failed": "bad", "stale": "warn", "missing": "muted"}
_MARKS = {"passed": "✓", "failed": "✗", "stale": "·", "missing": "·"}


def choice_lines(
    wish: Wish | None,
    offer: Offer | None,
    answers: tuple[Planned | None, Standing | None],
    width: int,
    *,
    ascii_only: bool,
) -> list[Line]:
    plan, standing = answers
    if offer is not None and offer.fault:
        return [[(f"{offer.recipe} cannot be read", "bad")], *wrapped(to_type(offer.fault), width)]
    if wish is None:
        return nothing_lines("", "", width)
    lines = gate_lines(wish, standing, width)
    if plan is None:
        return [*lines, BLANK, heading("Plan", width), [("planning", "muted")]]
    if plan.fault or plan.note:
        told = wrapped(to_type(plan.fault or plan.note), width, "bad" if plan.fault else "muted")
        return [*lines, BLANK, heading("Plan", width), *told]
    lines += [BLANK, *plan_lines(plan.body, width, ascii_only=ascii_only)]
    lines += [BLANK, heading("Time", width), *wrapped(to_type(plan.time), width)] if plan.time else []
    spent = use_lines(plan, width)
    return [*lines, *([BLANK, *spent] if spent else []), BLANK, *fit_lines(plan, width)]


def nothing_lines(name: str, why: str, width: int) -> list[Line]:
    """No branch is chosen; where a run of that name led here, why its own is not."""
    told: list[Line] = [[(f"{name} is not offered here", "warn")], *wrapped(to_type(why), width)]
    lines = told if name else [[("Nothing is chosen.", "muted")]]
    return [*lines, BLANK, [("j k", "key"), (" choose a branch", "muted")]]


def refused(standing: Standing) -> str:
    """Why, in a sentence."""
    left = [f"{rung} {how}" for rung, how, _ in standing.rungs if how != "passed"]
    return standing.fault or f"{', '.join(left)}; {key_of('launch.smoke')} climbs what is missing"


def gate_lines(wish: Wish, standing: Standing | None, width: int) -> list[Line]:
    lines: list[Line] = [heading("Gate", width, f"{wish.recipe}/{wish.branch} on {wish.host}")]
    if standing is None:
        lines.append([("enter", "key"), (" looks at the host; nothing is started", "muted")])
        return [*lines, [("tab", "key"), (" goes on to host, gpus and overrides", "muted")]]
    if standing.fault:
        return [*lines, *wrapped(to_type(standing.fault), width, "bad")]
    for rung, how, why in standing.rungs:
        meaning = _MEANINGS.get(how, "text")
        lines.append(
            [
                (f"{_MARKS.get(how, '?')} ", meaning),
                (fit(rung, 12), "text"),
                (how, meaning),
                (f"  {why}" if why else "", "muted"),
            ]
        )
    lines += wrapped(to_type(standing.caution), width, "warn")
    if standing.is_allowed:
        lines.append([("Launch is allowed: ", "good"), (key_of("launch.launch"), "key"), (" starts it", "muted")])
    else:
        lines.append(
            [("Launch is refused: ", "bad"), (key_of("launch.smoke"), "key"), (" climbs what is missing", "muted")]
        )
    if standing.gpus:
        chosen = "" if wish.gpus else ", chosen by the gate"
        lines.append([(f"GPU {' '.join(standing.gpus)}{chosen}", "muted")])
    return lines
