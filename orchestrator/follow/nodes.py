"""A run over several hosts as the follower sees it: a view for each host, and one verdict made of all their ends.

Each host's thread reads, stops and judges its own part, as if it were a run on that host alone, and keeps how the part
ended. The run has ended when every part has. Its cause is the end that no other explains: what torch, NCCL or gloo say
of a rank that is gone is an echo, and so is a part that was stopped because another one had fallen.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from orchestrator.follow.status import Verdict
from orchestrator.store.ingest import is_supervisor
from orchestrator.store.reads import Reader
from orchestrator.store.rows import AttemptRow, EventRow, NodeRow, Reason, RunRow, State, StreamRow

# How long the ranks of a part have to end by themselves when another part has fallen: those that stand hear of a rank
# that is gone after 15 s and end within 10 more. Where the fallen part's own ranks had heard so, the time has passed.
LONELY_S, HEARD_S = 30.0, 10.0
LONELY_GRACE_S = 10.0  # then: nothing that they could still save together
LONELY = "lonely"  # why a part is stopped that another one has left alone: in stop.json, exit.json and the store
# What a rank reports of the loss of another one, and of its own host's way to the others; the class's name, whatever its module.
ECHO, CUT_OFF = "RankLost", "WayLost"


def views_on(reader: Reader, host: str, runs: Iterable[RunRow]) -> list[RunRow]:
    """Of live runs, each as its part on that host; a part that has ended only of the first host, which speaks for all."""
    return [view for run in runs for view in _views(reader, run) if view.host == host]


def live_hosts(reader: Reader) -> set[str]:
    """Hosts of which a live run wants something."""
    return {view.host for run in reader.live_runs() for view in _views(reader, run)}


def silent_hosts(reader: Reader, run: RunRow) -> tuple[str, ...]:
    """Those of the run's hosts that do not answer, in its order."""
    found: Sequence[NodeRow | RunRow] = reader.nodes(run.id) or [run]
    return tuple(each.host for each in found if each.unreachable_since_s is not None)


def _views(reader: Reader, run: RunRow) -> list[RunRow]:
    if not run.more_hosts:
        return [run]
    return [
        replace(
            run, host=node.host, workdir=node.workdir, unreachable_since_s=node.unreachable_since_s, node=node.number
        )
        for node in reader.nodes(run.id)
        if node.number == 0 or node.ended_attempt != run.attempt
    ]


def end_of(reader: Reader, view: RunRow) -> Mapping[str, Any]:
    """How this part of the attempt has ended; empty while it has not."""
    found = [node for node in reader.nodes(view.id) if node.number == view.node and node.ended_attempt == view.attempt]
    return found[0].end if found else {}


# ------------------------------------------------------------------------------ one part


def own_part(
    attempt: AttemptRow, writers: Collection[str], streams: Sequence[StreamRow], finals: Sequence[EventRow]
) -> AttemptRow:
    """The attempt as one host's own writers tell it: whether they have spoken, and their last word."""
    spoken = {row.writer for row in streams if row.attempt == attempt.number and row.writer in writers and row.last_seq}
    words = {row.fields.get("outcome") for row in finals if row.attempt == attempt.number and row.writer in writers}
    worst = next((word for word in ("failed", "stopped", "succeeded") if word in words), None)
    return replace(
        attempt,
        last_event_s=attempt.last_event_s if spoken else None,
        last_job_event_s=attempt.last_job_event_s if any(not is_supervisor(name) for name in spoken) else None,
        final_outcome=worst,
    )


@dataclass(frozen=True)
class End:
    """How a part has ended."""

    number: int
    host: str
    verdict: Verdict
    exit: Mapping[str, Any]  # the supervisor's exit file
    writers: tuple[str, ...]  # events files of this host
    held: str = ""  # what its cards still hold

    def dump(self) -> dict[str, Any]:
        return {
            "verdict": asdict(self.verdict),
            "exit": dict(self.exit),
            "writers": list(self.writers),
            "held": self.held,
        }

    @classmethod
    def of(cls, node: NodeRow) -> End:
        told = node.end["verdict"]
        verdict = Verdict(**{**told, "state": State(told["state"])})
        return cls(node.number, node.host, verdict, node.end["exit"], tuple(node.end["writers"]), node.end["held"])


# ------------------------------------------------------------------------------ all of them


def all_ended(reader: Reader, run: RunRow) -> list[End] | None:
    """Every part's end, by number; None while one goes on."""
    nodes = reader.nodes(run.id)
    if any(node.ended_attempt != run.attempt for node in nodes):
        return None
    return [End.of(node) for node in nodes]


def fallen(reader: Reader, view: RunRow) -> End | None:
    """Another part of the same attempt that has ended otherwise than well: this one cannot go on without it."""
    others = [node for node in reader.nodes(view.id) if node.number != view.node and node.ended_attempt == view.attempt]
    return next((end for end in map(End.of, others) if end.verdict.state is not State.SUCCEEDED), None)


def is_lonely(reader: Reader, view: RunRow) -> bool:
    """Whether this part is ended because another one had fallen, perhaps by a follower before this one."""
    notes = reader.events(view.id, kinds=["note"]) if fallen(reader, view) is not None else []
    return any(note.attempt == view.attempt and note.fields.get(LONELY) == view.node for note in notes)


def patience_s(reader: Reader, view: RunRow, other: End) -> float:
    """How long a part is left alone when that other one has fallen."""
    return HEARD_S if _guilt(other, last_words(reader, view)) == 1 else LONELY_S


def last_words(reader: Reader, run: RunRow) -> list[EventRow]:
    """What the attempt's writers have said of their beginning and their end."""
    return [row for row in reader.events(run.id, kinds=["start", "final", "failure"]) if row.attempt == run.attempt]


def whole(ends: Sequence[End], told: Sequence[EventRow], *, stop_was_asked: bool) -> tuple[Verdict, End]:
    """The run's verdict, and the part it is taken from. `told`: its `last_words`."""
    chosen = max(ends, key=lambda end: (_guilt(end, told), -_ended_s(end), -end.number))
    match _guilt(chosen, told):
        case 0:
            chosen = _quiet(ends, stop_was_asked=stop_was_asked)
        case 1:
            chosen = _stopped_before(chosen, ends, stop_was_asked=stop_was_asked) or chosen
    ended_s = max((end.verdict.ended_s for end in ends if end.verdict.ended_s is not None), default=None)
    held = "; ".join(f"host {end.host}: {end.held}" for end in ends if end.held)
    others = [end.host for end in ends if end is not chosen]
    lost = f", cut off from {' and '.join(others)}" if _is_cut_off(chosen, told) else ""
    evidence = f"host {chosen.host}{lost}: {chosen.verdict.evidence}{f'; {held}' if held else ''}"
    if chosen.verdict.state is State.SUCCEEDED:
        evidence = f"on all {len(ends)} hosts: {chosen.verdict.evidence}"
    return replace(chosen.verdict, evidence=evidence, ended_s=ended_s), chosen


def _quiet(ends: Sequence[End], *, stop_was_asked: bool) -> End:
    """Where nothing failed: the first part that was stopped for a cause of its own speaks for all, else the first host."""
    stopped = [end for end in ends if end.verdict.state is State.STOPPED]
    if not stopped:
        return ends[0]
    return min(stopped, key=lambda end: (_borrowed(end, stop_was_asked=stop_was_asked), _ended_s(end), end.number))


def _stopped_before(echo: End, ends: Sequence[End], *, stop_was_asked: bool) -> End | None:
    """The part whose stop that echo is of. A supervisor speaks a moment after its ranks, of whose end others hear at
    once; a part is left alone with the echo for longer than that moment."""
    first = _quiet(ends, stop_was_asked=stop_was_asked)
    not_own = {None} if stop_was_asked else {None, Reason.USER}
    is_own = first.verdict.state is State.STOPPED and first.verdict.reason not in not_own
    return first if is_own and _ended_s(first) <= _ended_s(echo) + HEARD_S else None


def _borrowed(end: End, *, stop_was_asked: bool) -> int:
    """Of a part that was stopped: 0 for a cause of its own, 2 because another one had fallen, 1 where that may be.

    Without a wish, "user" is a stop by hand on the host, or what a supervisor says that knows of no other parts.
    """
    if end.verdict.reason is None:
        return 2
    return 0 if (end.verdict.reason == Reason.USER) is stop_was_asked else 1


def _is_cut_off(end: End, told: Sequence[EventRow]) -> bool:
    return any(row.kind == "failure" and row.writer in end.writers and _named(row) == CUT_OFF for row in told)


def _named(failure: EventRow) -> str:
    """The class of a failure, as a job has reported it with its module."""
    return str(failure.fields.get("failure")).rpartition(".")[2]


def _ended_s(end: End) -> float:
    """When, to be sorted by: a time that nobody knows is no early one."""
    return math.inf if end.verdict.ended_s is None else end.verdict.ended_s


def _guilt(end: End, told: Sequence[EventRow]) -> int:
    """0 where it ended well or was stopped, 1 an echo of another part, 2 a failure of its own, 3 gone as a whole."""
    verdict = end.verdict
    if verdict.state is State.LOST:
        return 3
    if verdict.state is not State.FAILED:
        return 0
    own = [row for row in told if row.writer in end.writers]
    if not (verdict.reason or "").startswith(Reason.EXIT) or end.exit.get("reason") == "start_failed":
        return 3
    if any(row.kind == "failure" and _named(row) != ECHO for row in own):
        return 2
    begun = {row.writer for row in own if row.kind == "start" and not is_supervisor(row.writer)}
    has_spoken = {row.writer for row in own if row.kind in ("final", "failure")}
    return 2 if begun - has_spoken or not begun else 1  # killed without a word, or never begun
