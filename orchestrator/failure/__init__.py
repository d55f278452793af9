"""Why an attempt ended badly: evidence in, causes out, the first cause first. Pure functions.

Three witnesses, most trusted first: what the job itself reported (exception, traceback, stage), what
its stderr holds (tracebacks and the system's own lines, where they stand as such: a line that quotes
an older failure is no evidence), and the supervisor's exit file (signal, counters of the kernel's
out-of-memory killer, disks). What happens to the other ranks after one has died is an echo and comes
after the cause. What a text means is in `texts`, whose words it holds in `spoken`, its numbers in `oom_text`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.failure import xid
from orchestrator.failure.card import fault_of_card
from orchestrator.failure.cause import Scene, cause_of
from orchestrator.failure.job_facts import checked, whole
from orchestrator.failure.last_words import last_words
from orchestrator.failure.texts import (
    CGROUP_LIMIT,
    EXCEPTION,
    FULL_DISK,
    HOST_KILLER,
    KILLED_BY_SOMEBODY,
    NO_SHARED_MEMORY,
    OWN_LIMIT_HINT,
    PINNED,
    Meaning,
    meaning,
)
from orchestrator.failure.tracebacks import (
    Block,
    Raised,
    blocks,
    first_line,
    innermost_frame,
    pins_memory,
    root_of_chain,
)
from orchestrator.store.rows import Reason
from orchestrator.units import format_size

FULL_BELOW_BYTES = 8 * 1024 * 1024  # a disk or /dev/shm with less than this free was full
SIGBUS, SIGKILL = 7, 9
MOST_WAITING = 16  # tracebacks behind that of a cause: a machine's ranks, and what started them
_BEHIND = re.compile(r"(?<=\S) ?\[rank\d+\]:$")  # torch's name for a rank, behind another of the same process
UNEXPLAINED = "unexplained"  # ended badly, and nothing that is known says why


@dataclass(frozen=True)
class Told:
    """A failure event of one writer."""

    writer: str
    at_s: float
    fields: Mapping[str, Any]  # failure, message, stage, step, traceback, facts


@dataclass(frozen=True)
class Findings:
    """All evidence of one attempt's end."""

    told: Sequence[Told] = ()
    stderr: str = ""
    stdout: str = ""
    exit_file: Mapping[str, Any] = field(default_factory=dict)
    grows_segments: bool | None = None  # whether the allocator could, as the job was started; None: not known


@dataclass(frozen=True)
class Failure:
    kind: str  # a Reason, "exception" or "unexplained"
    message: str  # one line
    hint: str
    source: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    traceback: str = ""
    stage: str | None = None
    step: int | None = None
    at_s: float | None = None
    is_certain: bool = True
    is_echo: bool = False
    is_labelled: bool = False  # a label alone says that it is a process's of this job

    @property
    def reason(self) -> str | None:
        """The word for the run's row; None when an exit code or signal says as much."""
        is_word = self.kind not in (EXCEPTION, UNEXPLAINED)
        return self.kind if is_word and self.is_certain and not self.is_echo else None


def causes(findings: Findings) -> list[Failure]:
    """Every failure the evidence shows, each once, causes before echoes, earlier before later."""
    grows = findings.grows_segments
    told = [_from_event(item, grows) for item in sorted(findings.told, key=lambda item: item.at_s)]
    seen = {first_line(failure.message) for failure in told}
    logged = [
        failure for failure in from_log(findings.stderr, "stderr", grows_segments=grows) if failure.message not in seen
    ]
    if not told and all(_is_xid(failure) for failure in logged):
        logged += from_log(findings.stdout, "stdout", grows_segments=grows)
    found = [_with_counters(failure, findings.exit_file) for failure in (*told, *logged)]
    if _from_exit(
        findings.exit_file, may_be_card=False
    ):  # what the kernel counted beats what a job may have labelled itself
        found = [failure for failure in found if not failure.is_labelled]
    may_be_card = _may_be_card(found, findings.exit_file)
    found = [item for item in found if not _is_xid(item) or (may_be_card and _is_of_job(item, findings.exit_file))]
    if not any(failure.is_certain and not failure.is_echo and failure.kind != EXCEPTION for failure in found):
        found = [*_from_exit(findings.exit_file, may_be_card=may_be_card), *found]
    if not found and (words := last_words(findings.exit_file, findings.stderr, findings.stdout)) is not None:
        found = [Failure(UNEXPLAINED, words.message, words.hint, words.source, traceback=words.text)]
    return sorted(_distinct(found), key=lambda failure: failure.is_echo)


def _is_xid(failure: Failure) -> bool:
    """A line of the driver's that stands in a log: it tells of a card, and maybe of another job's."""
    return bool(xid.facts(failure.message)) and not failure.traceback


def _is_of_job(failure: Failure, exit_file: Mapping[str, Any]) -> bool:
    return failure.kind == Reason.GPU_FAULT and xid.is_of_the_job(failure.message, exit_file)


def _may_be_card(found: Sequence[Failure], exit_file: Mapping[str, Any]) -> bool:
    """Whether what the driver says can be the cause: not where a program, or the kernel, ended it for a reason of its own."""
    own = [failure for failure in found if not (failure.is_echo or _is_xid(failure))]
    if any(failure.is_certain and failure.kind not in (EXCEPTION, Reason.GPU_FAULT) for failure in own):
        return False
    return xid.leaves_room(failure.message for failure in own) and not _from_exit(exit_file, may_be_card=False)


def _distinct(found: Sequence[Failure]) -> list[Failure]:
    kept: dict[tuple[str, str, str], Failure] = {}
    for failure in found:
        kept.setdefault((failure.source, failure.kind, failure.message), failure)
    return list(kept.values())


# ------------------------------------------------------------------------ what the job reported


def _from_event(told: Told, grows_segments: bool | None) -> Failure:
    fields = told.fields
    kind, message = str(fields.get("failure") or ""), str(fields.get("message") or "")
    text = str(fields.get("traceback") or "")
    raised = root_of_chain(text) or Raised(kind, message)
    found = meaning(raised.kind, raised.text)
    if found.kind == EXCEPTION:
        found = meaning(kind, message)
    facts = {
        **found.facts,
        **innermost_frame(text),
        **(_grows(grows_segments) if found.kind == Reason.GPU_OOM else {}),
        **checked(fields.get("facts")),
    }
    stage, step = fields.get("stage"), whole(fields.get("step"))
    found = _with_cause(replace(found, facts=facts), text, stage=stage, step=step)
    return Failure(
        kind=found.kind,
        message=first_line(message) or kind,
        hint=found.hint,
        source=told.writer,
        facts=found.facts,
        traceback=text,
        stage=None if stage is None else str(stage),
        step=step,
        at_s=told.at_s,
        is_certain=found.is_certain,
        is_echo=found.is_echo,
    )


def _grows(grows_segments: bool | None) -> dict[str, Any]:
    """As the fact that a snapshot would tell, which knows better."""
    return {} if grows_segments is None else {"expandable_segments": grows_segments}


def _with_cause(found: Meaning, traceback: str, *, stage: Any = None, step: int | None = None) -> Meaning:
    """Of the card's memory alone: what filled it, where evidence says so, and what to change."""
    if found.kind != Reason.GPU_OOM:
        return found
    if found.facts.get("level") == "driver" and pins_memory(traceback):
        pinned = PINNED("")
        return replace(pinned, facts={**found.facts, **pinned.facts})
    scene = Scene(
        found.facts,
        traceback,
        stage=stage if isinstance(stage, str) else None,
        step=step,
    )
    cause = cause_of(scene)
    if cause is None:
        return found
    remedies = [{"word": remedy.word, "text": remedy.text} for remedy in cause.remedies]
    return replace(found, hint=cause.hint, facts={**found.facts, "cause": cause.name, "remedies": remedies})


# -------------------------------------------------------------------------- what a log shows


def from_log(text: str, source: str, *, grows_segments: bool | None = None) -> list[Failure]:
    """Failures a log really shows: the last traceback of each process, and the system's own lines."""
    found = list(blocks(text))
    last = _last_of_each(found)
    known = _grows(grows_segments)
    return [_from_block(block, source, known) for block in found if block.is_system or id(block) in last]


def _last_of_each(found: Sequence[Block]) -> set[int]:
    """By identity the last traceback of each process; with the one before it where the last is of what only waited for it.

    One that its process ignored counts where that has no other. More than MOST_WAITING in a row are no ranks and launchers of
    one end. What only a label calls another process's was handled, or copied, where one without any label comes after it.
    """
    kept: dict[str, list[Block]] = {}
    ended = {_process(block) for block in found if not (block.is_system or block.is_ignored)}
    for block in found:
        if block.is_system or (block.is_ignored and _process(block) in ended):
            continue
        own, has_waited = kept.setdefault(_process(block), []), _only_waited(block)
        if not (block.follows and has_waited):
            own.clear()
        if not (block.is_labelled or block.is_ignored or has_waited or block.raised[-1].kind == "KeyboardInterrupt"):
            kept = {prefix: held for prefix, held in kept.items() if not any(each.is_labelled for each in held)}
        own.append(block)
    few = (own if len(own) <= 1 + MOST_WAITING else own[-1:] for own in kept.values())
    return {id(block) for own in few for block in own}


def _process(block: Block) -> str:
    """Whose it is: torch's name for a rank behind a launcher's for its process (`[default0]:[rank0]:`) names no other."""
    return _BEHIND.sub("", block.prefix)


def _only_waited(block: Block) -> bool:
    """Whether its process has no failure of its own: it started a program that failed, or lost a peer."""
    meant = [meaning(raised.kind, raised.text) for raised in block.raised]
    return all(each.kind == EXCEPTION and each.is_echo for each in meant)


def _from_block(block: Block, source: str, known: Mapping[str, Any]) -> Failure:
    meanings = [meaning(raised.kind, raised.text) for raised in block.raised]
    chosen = next((i for i, found in enumerate(meanings) if found.kind != EXCEPTION), len(meanings) - 1)
    frame = innermost_frame(block.text)
    found = meanings[chosen]
    if found.kind == Reason.GPU_OOM:
        frame |= known
    found = _with_cause(replace(found, facts={**found.facts, **frame}), block.text)
    return Failure(
        kind=found.kind,
        message=block.raised[chosen].line,
        hint=found.hint,
        source=f"{source} {block.prefix.strip(' :')}".strip(),
        facts=found.facts,
        traceback="" if block.is_system else block.text,
        is_certain=found.is_certain,
        is_echo=found.is_echo,
        is_labelled=block.is_labelled,
    )


# --------------------------------------------------------------------- what the exit file shows


def _with_counters(failure: Failure, exit_file: Mapping[str, Any]) -> Failure:
    """A kill that only looks like the out-of-memory killer's is decided by the kernel's counters."""
    if failure.kind != Reason.HOST_OOM:
        return failure
    if failure.is_certain:
        return _with_peak_and_limit(failure, exit_file)
    found = _killer(exit_file)
    if found is not None:
        return replace(
            failure, kind=found.kind, hint=found.hint, facts={**failure.facts, **found.facts}, is_certain=True
        )
    if _count(exit_file, "oom_kill_delta") == 0 or _count(exit_file, "host_oom_kill_delta") == 0:
        return replace(failure, kind=EXCEPTION, hint=KILLED_BY_SOMEBODY)
    return failure


def _with_peak_and_limit(failure: Failure, exit_file: Mapping[str, Any]) -> Failure:
    """What the job's largest process held and each was allowed, unless the job itself said so better."""
    known = {"peak_bytes": _count(exit_file, "peak_bytes"), "limit_bytes": _count(exit_file, "memory_limit_bytes")}
    facts = known | {name: value for name, value in failure.facts.items() if value is not None or name not in known}
    facts = {name: value for name, value in facts.items() if value is not None or name not in known}
    hint = _limit_hint(facts) if "limit_bytes" in facts else failure.hint
    return replace(failure, facts=facts, hint=hint)


def _limit_hint(facts: Mapping[str, Any]) -> str:
    """With the sum that went over the limit where it is known: data, which is less or more than what is resident."""
    sizes = [_count(facts, name) for name in ("data_bytes", "limit_bytes", "requested_bytes")]
    known = [format_size(size) for size in sizes if size is not None]
    if len(known) < len(sizes):
        return OWN_LIMIT_HINT
    return f"{OWN_LIMIT_HINT}; it had allocated {known[0]} of {known[1]} and asked for {known[2]} more"


def _from_exit(exit_file: Mapping[str, Any], *, may_be_card: bool) -> list[Failure]:
    number = exit_file.get("signal")
    code = exit_file.get("exit_code")
    if number is None and isinstance(code, int) and code > 128:
        number = code - 128
    found = None
    if number == SIGKILL:
        found = _killer(exit_file)
    elif number == SIGBUS and _is_full(_free_bytes(exit_file, "shm")):
        found = NO_SHARED_MEMORY("")
    elif exit_file.get("reason") == "start_failed":
        return [_start_failed(str(exit_file.get("message") or ""))]
    is_told = exit_file.get("signal") is not None  # else the exit status is what is known: the job may have chosen it
    what = f"signal {number}" if is_told else f"exit status {code}"
    fault = fault_of_card(exit_file) if may_be_card and found is None else None
    if fault is not None:
        line, meant = fault
        return [Failure(meant.kind, f"{what}; {line}", meant.hint, "exit file", facts=meant.facts)]
    if found is None and code not in (0, None) and _disk_is_full(exit_file):
        found = FULL_DISK("")
    if found is None:
        return []
    message = f"{what}; {_counter_text(exit_file, found)}"
    return [Failure(found.kind, message, found.hint, "exit file", facts=found.facts)]


def _start_failed(message: str) -> Failure:
    found = meaning("", message)
    if found.kind == EXCEPTION and re.search(r"No such file or directory|not found", message):
        hint = "the command is not on the host: check `python` of the host's entry, and doctor"
        found = Meaning(Reason.MISSING_DEPENDENCY, hint)
    return Failure(found.kind, f"the job could not be started: {message}", found.hint, "exit file", facts=found.facts)


def _killer(exit_file: Mapping[str, Any]) -> Meaning | None:
    """Whose memory limit it was: the container's when its own counter rose and it has a limit, else the host's."""
    cgroup = exit_file.get("cgroup")
    limit = cgroup.get("limit_bytes") if isinstance(cgroup, Mapping) else None
    facts: dict[str, Any] = {}
    if isinstance(cgroup, Mapping):
        facts = {
            name: cgroup[name] for name in ("version", "limit_bytes", "peak_bytes") if cgroup.get(name) is not None
        }
    if (_count(exit_file, "oom_kill_delta") or 0) > 0 and limit is not None:
        found = CGROUP_LIMIT("")
    elif (_count(exit_file, "oom_kill_delta") or 0) > 0 or (_count(exit_file, "host_oom_kill_delta") or 0) > 0:
        found = HOST_KILLER("")
    else:
        return None
    return replace(
        found, facts={f"cgroup_{name}" if name == "version" else name: value for name, value in facts.items()}
    )


def _counter_text(exit_file: Mapping[str, Any], found: Meaning) -> str:
    match found.kind:
        case Reason.CGROUP_OOM:
            return f"the container's oom_kill counter rose by {_count(exit_file, 'oom_kill_delta')}"
        case Reason.HOST_OOM:
            name = "host_oom_kill_delta" if _count(exit_file, "host_oom_kill_delta") else "oom_kill_delta"
            return f"the kernel's oom_kill counter rose by {_count(exit_file, name)}"
        case Reason.SHM:
            return f"/dev/shm had {format_size(_free_bytes(exit_file, 'shm') or 0)} free"
        case _:
            return f"the disk had {format_size(_free_bytes(exit_file, 'disk') or 0)} free"


def _count(exit_file: Mapping[str, Any], name: str) -> int | None:
    value = exit_file.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _free_bytes(exit_file: Mapping[str, Any], name: str) -> int | None:
    facts = exit_file.get(name)
    return _count(facts, "free_bytes") if isinstance(facts, Mapping) else None


def _is_full(free_bytes: int | None) -> bool:
    return free_bytes is not None and free_bytes < FULL_BELOW_BYTES


def _disk_is_full(exit_file: Mapping[str, Any]) -> bool:
    disk = exit_file.get("disk")
    return isinstance(disk, Mapping) and (_is_full(_free_bytes(exit_file, "disk")) or disk.get("free_inodes") == 0)
