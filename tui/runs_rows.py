"""The lines of the list of runs: which columns there are and what stands in them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from rich.cells import cell_len

from orchestrator.actions.history import MEMORY_REASONS
from orchestrator.store.rows import RunRow, State
from orchestrator.units import counted
from tui.canvas import spark
from tui.moment import end_s, is_present
from tui.pace import TRAINING
from tui.pieces import Piece, memory_meaning, meter, width_of
from tui.snapshot import RunNumbers
from tui.table import Column
from tui.wording import (
    OUT_OF_MEMORY,
    age,
    duration,
    fit,
    percent,
    rate,
    short_count,
    short_value,
    state_letter,
    state_word,
    told_and_repairs,
)

VALUE_WIDTH = 7
HOST_WIDTH = 7
STATE_WIDTH = 11
LEAST_NAME, MOST_NAME = 14, 24  # cells of a name; the most as well beside what is wrong

# Beside a live state, that its host does not answer. `R?` says so without it, so it cuts no name.
REACH = Column(" ", len("unreachable"), rank=8, beyond=MOST_NAME - LEAST_NAME)

# At 80 columns there is room for what tells two runs apart and whether one learns; the rest comes with the width.
COLUMNS = (
    Column("", 2),
    Column("run", 0, least=LEAST_NAME),
    Column("id", 8, rank=1),
    Column("state", STATE_WIDTH),
    REACH,
    Column("host", HOST_WIDTH, rank=5),
    Column("step", 11, right=True),
    Column("ends in", 7, right=True),
    Column("tok/s", 6, right=True, rank=7),
    Column("memory", 7, right=True, rank=3),
    Column("accept", 6, right=True, rank=4),
    Column("loss", VALUE_WIDTH, right=True),
    Column("curve", 8, rank=2),
    Column("age", 4, right=True, rank=6),
)
NEEDED = tuple(column for column in COLUMNS if column is not REACH)  # what a list should have room for


# Why a run failed, in the cells of its state.
_SHORT_REASONS = {
    **OUT_OF_MEMORY,
    "nonfinite": "NaN",
    "gpu_fault": "gpu fault",
    "unmarked_exit": "no word",
    "missing_dependency": "missing",
    "start_timeout": "no start",
    "max_duration": "time is up",
}

_SHORT_STAGES = {"evaluating": "eval", "preparing": "prepare"}  # beside how far they are

_NEVER = "never started: "  # as the launch says it
_SAID_AGAIN = re.compile(r"^[\w.]*Error: CUDA out of memory\. (?=\S)")  # before what was asked for, in torch's words
_KEY_CHANGED = "HOST KEY HAS CHANGED"  # as SSH says it: nothing can be reached until somebody has looked
STALE_S = 300.0  # a live run that has said nothing for this long is in trouble


def run_cells(run: RunRow, numbers: RunNumbers, now_s: float, *, ascii_only: bool) -> list[Sequence[Piece]]:
    """One sequence of pieces a column, in the order of COLUMNS.

    Of a run that cannot be reached, or that nobody follows, the numbers are those of its last word, and are drawn so.
    """
    is_live, is_old = not run.state.is_final, is_of_then(run, now_s)
    letter = state_letter(run.state, run.reason, unreachable=is_unreachable(run))
    tokens = numbers.latest.get("block_tokens_per_s", numbers.latest.get("context_tokens_per_s"))
    quiet = "text" if is_live and not is_old else "muted"
    loss = numbers.latest.get("loss")
    return [
        [letter],
        name_pieces(run),
        [(run.id[:8], "faint")],
        [(_state_and_share(run, numbers), "muted" if run.state is State.SUCCEEDED else letter[1])],
        [(reach_text(run, numbers.cause), letter[1])],
        [(_where(run), quiet)],
        _step(run),
        _ends_in(run, numbers, now_s) if is_live else [],
        [(rate(tokens), quiet if tokens is not None else "faint")],
        _memory(numbers, ascii_only=ascii_only, is_old=is_old) if is_live else [],
        [(f"{numbers.acceptance:.2f}", "good")] if numbers.acceptance is not None else [],
        [(loss_text(loss), "bad" if loss != loss else quiet)] if loss is not None else [],
        [(spark(numbers.spark, ascii=ascii_only), "live" if is_live and not is_old else "faint")],
        [(age(now_s - (run.ended_s or run.created_s)), "muted")],
    ]


def trouble_cells(run: RunRow, numbers: RunNumbers, now_s: float) -> list[Sequence[Piece]]:
    """One sequence of pieces a column, in the order of `trouble_columns`."""
    letter = state_letter(run.state, run.reason, unreachable=is_unreachable(run))
    badness, why = trouble(run, numbers, now_s)
    return [
        [letter],
        name_pieces(run),
        [(run.id[:8], "faint")],
        [(_where(run), "text")],
        [(why, "warn" if badness >= 3 else "bad" if badness else "muted")] if why else [("nothing", "faint")],
        [(age(now_s - (run.ended_s or run.created_s)), "muted")],
    ]


def trouble_columns(runs: Sequence[RunRow]) -> tuple[Column, ...]:
    """The same list when it is sorted by how badly off runs are: what their names leave is for what is wrong."""
    named = {(run.kind, run.recipe, run.branch): run for run in runs}  # of thousands few have a name of their own
    names = max((width_of(name_pieces(run)) for run in named.values()), default=0)
    return (
        Column("", 2),
        Column("run", max(len("run"), min(MOST_NAME, names))),
        Column("id", 8, rank=2),
        Column("host", HOST_WIDTH, rank=1),
        Column("what is wrong", 0, least=20),
        Column("age", 4, right=True),
    )


def name_pieces(run: RunRow) -> list[Piece]:
    """recipe/branch; other kinds of jobs say which they are."""
    kind: list[Piece] = [] if run.kind == "train" else [(f"{run.kind} ", "muted")]
    is_live = not run.state.is_final
    return [*kind, (run.recipe, "strong" if is_live else "text"), ("/", "faint"), (run.branch, "text")]


def is_unreachable(run: RunRow) -> bool:
    """Whether its host does not answer at the moment: a view on a live run, whose state stays what it was."""
    return run.unreachable_since_s is not None and not run.state.is_final


def is_of_then(run: RunRow, now_s: float) -> bool:
    """Whether what a live run told is no longer of now: its host does not answer, or nothing has come for a while."""
    return run.last_event_s is not None and not run.state.is_final and not is_present(run, run.last_event_s, now_s)


def reach_text(run: RunRow, cause: str = "") -> str:
    """What stands beside a live state; empty where the host answers."""
    if not is_unreachable(run):
        return ""
    return "key changed" if _KEY_CHANGED in cause.upper() else "unreachable"


def state_text(run: RunRow) -> str:
    """The state; of a running job that does not train its stage, of a failed one the reason."""
    if never_started(run):
        return "not started"
    if run.state is State.RUNNING and run.stage and run.stage not in TRAINING:
        return run.stage.replace("_", " ")
    if run.state is State.FAILED and run.reason:
        kind, _, number = run.reason.partition(":")
        return f"{kind} {number}" if number else _SHORT_REASONS.get(kind, kind.replace("_", " "))
    return state_word(run.state)


def _state_and_share(run: RunRow, numbers: RunNumbers) -> str:
    """The state; of a stage that takes no steps how far it is as well, until it is all of it."""
    text, share = state_text(run), numbers.stage_share
    if share is None or run.state is not State.RUNNING or (told := percent(share)) == "100%":
        return text
    room = STATE_WIDTH - 1 - len(told)
    if cell_len(text) > room:
        text = _SHORT_STAGES.get(text, text)
    return f"{text if cell_len(text) <= room else fit(text, room)} {told}"


def _where(run: RunRow) -> str:
    """The first host, and how many more there are, which is never what is cut."""
    more = f"+{len(run.hosts) - 1}" if len(run.hosts) > 1 else ""
    room = HOST_WIDTH - len(more)
    return (run.host if cell_len(run.host) <= room else fit(run.host, room)) + more


def never_started(run: RunRow) -> bool:
    """A launch that was refused, or found no host: there was no job that could have died."""
    return run.state is State.FAILED and run.started_s is None and run.attempt <= 1  # a resume has no start yet


def trouble(run: RunRow, numbers: RunNumbers, now_s: float) -> tuple[int, str]:
    """How badly off a run is (0: not at all) and why; live runs that can still be saved come first.

    One that never started has lost nothing: why is said, but nothing lives that could be worse off.
    """
    if not run.state.is_final:
        if run.unreachable_since_s is not None:
            why = f": {numbers.cause.splitlines()[0]}" if numbers.cause else ""
            return 6, f"host unreachable for {duration(now_s - run.unreachable_since_s)}{why}"
        if run.last_event_s is not None and now_s - run.last_event_s > STALE_S:
            return 5, f"silent for {duration(now_s - run.last_event_s)}"
        if numbers.num_bad:
            return 4, f"loss was NaN {'once' if numbers.num_bad == 1 else counted(numbers.num_bad, 'time')}"
        fraction = memory_fraction(numbers)
        return (3, f"memory {percent(fraction)} full") if fraction is not None and fraction >= 0.95 else (0, "")
    if run.state is State.LOST:
        return 2, f"lost: {run.evidence}"
    if run.state is State.FAILED:
        return _failure(run, numbers)
    return 0, ""


def _failure(run: RunRow, numbers: RunNumbers) -> tuple[int, str]:
    """The known cause, else the reason."""
    if never_started(run):
        told = "; ".join(told_and_repairs(run.evidence.removeprefix(_NEVER))) or _reason_words(run.reason or "failed")
        return 0, f"{_NEVER}{told}"
    cause = " ".join(numbers.cause.split())
    if run.reason in MEMORY_REASONS:
        return 1, f"out of memory: {_SAID_AGAIN.sub('', cause)}" if cause else "out of memory"
    return 1, cause or _reason_words(run.reason or "failed")


def _reason_words(reason: str) -> str:
    """Why a run failed, where there is room for it: `exit:2` is exit 2."""
    kind, _, number = reason.partition(":")
    words = {"nonfinite": "a value became NaN or Inf", "unmarked_exit": "ended without a word"}
    return f"{kind} {number}" if number else words.get(kind, kind.replace("_", " "))


def memory_fraction(numbers: RunNumbers) -> float | None:
    """Of the fullest GPU."""
    shares = [
        sample.used_bytes / sample.total_bytes
        for sample in numbers.gpus
        if sample.used_bytes is not None and sample.total_bytes
    ]
    return max(shares, default=None)


def _step(run: RunRow) -> list[Piece]:
    if run.step is None:
        return [("–", "faint")]
    total: list[Piece] = [] if run.num_steps is None else [("/" + short_count(run.num_steps), "faint")]
    return [(short_count(run.step), "text"), *total]


def _ends_in(run: RunRow, numbers: RunNumbers, now_s: float) -> list[Piece]:
    """The time left. Silence does not put the end off."""
    if numbers.eta_s is None:
        return [("–", "faint")]
    if not is_of_then(run, now_s):
        return [(duration(numbers.eta_s), "strong")]
    left_s = end_s(run, numbers.eta_s, numbers.stepped_s, now_s) - now_s
    return [(duration(left_s) if left_s > 0 else "–", "faint")]


def _memory(numbers: RunNumbers, *, ascii_only: bool, is_old: bool) -> list[Piece]:
    fraction = memory_fraction(numbers)
    if fraction is None:
        return [("–", "faint")]
    meaning = "faint" if is_old else memory_meaning(fraction)
    return [*meter(fraction, 3, meaning, ascii_only=ascii_only), (f"{percent(fraction):>4}", meaning)]


def loss_text(loss: float) -> str:
    """Three decimals, so that the points of a column stand below each other; as few digits as fit where those say nothing."""
    text = f"{loss:.3f}"
    is_told = math.isfinite(loss) and len(text) <= VALUE_WIDTH and (loss == 0 or abs(loss) >= 0.001)
    return text if is_told else short_value(loss, VALUE_WIDTH)
