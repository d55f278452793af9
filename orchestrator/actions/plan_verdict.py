"""The answer of a plan: whether it fits, what lacks most where it does not, and what helps. One rule for pages and screens."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.actions.again import Words, command_line
from orchestrator.actions.plans import Planned, target_loaded_bytes
from orchestrator.units import counted
from orchestrator.units import format_size as gib
from remote.plan import StagePlan

PASS, TARGET_RANK = "the target's pass before training", "a target rank"
AT_END, WITHOUT = "the evaluation at the end", "--set evaluate.at_end=false"
_BAD = ("does not fit", "tight")
USE, LOWER, FIT = "What would use the room", "What would lower the peak", "What would fit"
NOTHING_FITS = (
    "nothing that draftyard can change makes it fit, alone or with others; a smaller target or a shorter row is needed"
)


@dataclass(frozen=True)
class Want:
    """What one part of a training wants of a card, and how much of that there is not; negative: what it leaves."""

    name: str
    over_bytes: int

    @property
    def told(self) -> str:
        return f"{self.name} {'lacks' if self.over_bytes > 0 else 'leaves'} {gib(abs(self.over_bytes))}"


def capacity_text(found: Planned, card_bytes: int | None = None) -> str:
    """The verdict over the step and over what the target wants: "fits" stands here for a job that can begin and end alone, and
    the amount that lacks is the largest of all wants.
    """
    made = found.plan
    if made.capacity_bytes is None or made.headroom_bytes is None:
        return "not given; --gpu 95GiB or --host HOST says whether it fits"
    step, *others = _wants(found)
    far = ", extrapolated" if made.extrapolated else ""
    card = f"{gib(card_bytes or made.capacity_bytes)} ({found.capacity_from})"
    if any(want.over_bytes > 0 for want in others):
        most, *rest = sorted((step, *others), key=lambda want: -want.over_bytes)
        told = "; ".join([f"{gib(most.over_bytes)} too much, in {most.name}", *(want.told for want in rest)])
        return f"{card}: does not fit, {told}{far}"
    left = f"{gib(made.headroom_bytes)} left" if made.headroom_bytes >= 0 else f"{gib(-made.headroom_bytes)} too much"
    if made.verdict != made.step_verdict:
        left = "; ".join(want.told for want in (*others, step))
    told = f"{card}: {made.verdict}, {left}{far}"
    target = None if found.by_role is None else found.by_role.plan.target
    return told if target is None else f"{told}, of a drafter rank; a target rank: {target.verdict}"


def too_small_for(found: Planned) -> str:
    """What beside a step finds no room, in a word or two, whatever is changed of a step; empty where all of it does."""
    lacking = [want.name for want in _wants(found)[1:] if want.over_bytes > 0]
    if not lacking:
        return ""
    if TARGET_RANK in lacking:
        return TARGET_RANK
    if not _is_loaded(found):
        return "the target"
    return "the target's pass" if PASS in lacking else "the evaluation"


def changes_title(found: Planned) -> str:
    """Of the changes that a plan advises: what they would do."""
    if found.plan.step_verdict != "does not fit":
        return LOWER
    small = too_small_for(found)
    return f"What would make {step_name(found)} fit; {small} does not" if small and found.switches else FIT


def step_name(found: Planned) -> str:
    return "a drafter rank" if _has_target_rank(found) else "a step"


def what_helps(found: Planned) -> str:
    """Where changes of a step alone do not help; empty where all beside it has room. A training loads the target even where
    nothing is left to compute, so a card that its weights alone fill is too small.
    """
    has_changes = found.plan.step_verdict == "does not fit" and found.switches
    more = "; and a change of the step, below" if has_changes else ""
    match too_small_for(found):
        case "":
            return ""
        case "the target":
            loaded = gib(target_loaded_bytes(found))
            return f"a larger card, and no change of a step: every training loads the target first, {loaded}, prepared or not"
        case "the target's pass":
            is_last = found.plan.evaluation_verdict == "does not fit"
            last = f"; {WITHOUT}, as {AT_END} does not fit either" if is_last else ""
            return f"hidden states made on a larger card, by the lines below{last}{more}"
        case "the evaluation":
            return f"{WITHOUT}, which leaves {AT_END} out{more}"
        case small:
            return f"a larger card for {small}: what is changed below is of a drafter rank"


def prepared_elsewhere(found: Planned) -> list[str]:
    """What to type where the pass does not fit, but the target alone does: no change of a step makes the pass less."""
    if too_small_for(found) != "the target's pass":
        return []
    line = command_line("prepare", Words(found.spec.recipe, found.spec.branch, ("HOST",)))
    folder = ".local/share/draftyard/cache/"
    then = "# then this, on the host with the smaller card (docs/recipes.md tells more)"
    return [f"{line}    # on a larger card", then, f"rsync -a HOST:{folder} ~/{folder}"]


def target_items(found: Planned, *, is_whole: bool) -> list[tuple[str, str]]:
    """The pass before training, what the target takes that every training loads, and the evaluation at the end; where they have
    room only if `is_whole`."""
    made = found.plan
    before, is_loaded = made.target_pass, _is_loaded(found)
    items = []
    if before is not None and (is_whole or before.num_measured or made.pass_verdict in _BAD):
        size = f"{gib(made.target_pass_bytes)} once before training, with the whole target loaded"
        seen, verdict = _seen(before, "as where hidden states are found kept"), _worded(made.pass_verdict)
        items.append(("target pass", f"{size}{verdict}{seen}" if seen else f"{size}, an estimate{verdict}"))
    if before is not None and not is_loaded:
        loaded = gib(target_loaded_bytes(found))
        items.append(
            ("target load", f"{loaded} before the first step of every training, prepared or not: does not fit")
        )
    if made.evaluation is not None and (is_whole or made.evaluation.num_measured or made.evaluation_verdict in _BAD):
        size = f"{gib(made.evaluation_bytes)} at the end, decoding with the whole target"
        estimate = ", an estimate that no card has verified" if made.device == "cuda" else ", an estimate"
        told = _seen(made.evaluation, "its prompts being shorter than a row") or estimate
        items.append(("evaluation", f"{size}{told}{_worded(made.evaluation_verdict)}; {WITHOUT} leaves it out"))
    return items


def _worded(verdict: str | None) -> str:
    """Behind a size, whether it has room; empty where it has, or nobody said how much there is."""
    return {"tight": ": tight", "does not fit": ": does not fit, whatever is changed of a step"}.get(verdict or "", "")


def _wants(found: Planned) -> list[Want]:
    """Of a step first. None but that where no capacity is known."""
    made = found.plan
    if made.capacity_bytes is None:
        return [Want(step_name(found), 0)]
    wants = [Want(step_name(found), made.driver_bytes - made.capacity_bytes)]
    for name, verdict, size_bytes in (
        (PASS, made.pass_verdict, made.target_pass_bytes),
        (AT_END, made.evaluation_verdict, made.evaluation_bytes),
    ):
        if verdict in _BAD:
            wants.append(Want(name, size_bytes - made.capacity_bytes - made.reserve_bytes))
    target = None if found.by_role is None else found.by_role.plan.target
    if target is not None:
        wants.append(Want(TARGET_RANK, target.driver_bytes - made.capacity_bytes))
    return wants


def _has_target_rank(found: Planned) -> bool:
    return found.by_role is not None and found.by_role.plan.target is not None


def _is_loaded(found: Planned) -> bool:
    """Whether the card holds the target alone; so too where nobody said how large it is."""
    made = found.plan
    return made.capacity_bytes is None or target_loaded_bytes(found) <= made.capacity_bytes + made.reserve_bytes


def _seen(stage: StagePlan, why_less: str) -> str:
    """What trainings took in it, beside the estimate; empty where none was measured."""
    if stage.unexplained_bytes is None:
        return ""
    trainings = counted(stage.num_measured, "training")
    if stage.unexplained_bytes > 0:
        return f"; measured in {trainings}; the estimate was {gib(stage.allocated_bytes)} allocated"
    took = gib(stage.allocated_bytes + stage.unexplained_bytes)
    return f", an estimate; {trainings} took {took} at most, {why_less}"
