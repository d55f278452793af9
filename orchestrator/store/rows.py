"""What the store says: frozen rows, and the words for states and reasons.

Every read returns these and nothing else. Times are seconds since the epoch (UTC) and end in `_s`;
sizes end in `_bytes`; a value the job reported as NaN is `math.nan` here. `None` means absent.
This module knows no SQL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

IMPORTED = "imported"  # stands for the host of a run that was read from a folder


class State(StrEnum):
    """The one list of states. "Unreachable since" is a view on a live run, never a state."""

    PENDING = "pending"
    SETTING_UP = "setting_up"
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"

    @property
    def is_final(self) -> bool:
        return self in FINAL_STATES


FINAL_STATES = frozenset({State.SUCCEEDED, State.FAILED, State.STOPPED, State.LOST})
NO_SUPERVISOR = "the job lives; its supervisor was killed, so no exit file will come"  # evidence of a run that goes on


class Reason(StrEnum):
    """Why a run is in its state. EXIT and SIGNAL carry a number: `exit:3`, `signal:15`."""

    EXIT = "exit"
    SIGNAL = "signal"
    GPU_OOM = "gpu_oom"
    HOST_OOM = "host_oom"
    CGROUP_OOM = "cgroup_oom"
    SHM = "shm"
    DISK_FULL = "disk_full"
    REBOOT = "reboot"
    STALLED = "stalled"
    NONFINITE = "nonfinite"
    GPU_FAULT = "gpu_fault"
    UNMARKED_EXIT = "unmarked_exit"
    UNREACHABLE = "unreachable"
    MISSING_DEPENDENCY = "missing_dependency"
    START_TIMEOUT = "start_timeout"
    MAX_DURATION = "max_duration"
    USER = "user"


class Kind(StrEnum):
    """What kind of job a run is; `ls` shows training runs unless asked for others."""

    TRAIN = "train"
    SMOKE = "smoke"
    PREPARE = "prepare"
    EVALUATE = "evaluate"
    EXPORT = "export"
    SCRIPT = "script"


class Document(StrEnum):
    """Long texts kept with a run."""

    SPEC = "spec"  # what runs, every resolved default (JSON)
    PLAN = "plan"  # predicted memory at launch (JSON)
    FINGERPRINT = "fingerprint"  # the parts the fingerprint was made of (JSON)
    GIT_PATCH = "git_patch"  # uncommitted edits that were shipped
    LAUNCH = "launch"  # versions, python, GPUs, overrides and their origins (JSON)
    LAUNCHER = "launcher"  # the process that is starting it (JSON)
    MACHINES = "machines"  # by node, what the machine that it was seen alive on says of itself (JSON)
    HOSTS_FILE = "hosts_file"  # the path of the hosts.yaml that its hosts were found in


@dataclass(frozen=True)
class NewRun:
    """What launch knows before anything has happened on the host."""

    id: str
    kind: str
    recipe: str
    branch: str
    host: str
    documents: Mapping[Document, str]  # at least SPEC
    workdir: str | None = None
    num_steps: int | None = None
    tree_hash: str | None = None
    git_commit: str | None = None
    git_dirty: bool = False
    fingerprint: str | None = None
    parent_run: str | None = None
    forced_reason: str | None = None
    tags: tuple[str, ...] = ()
    why: str = ""
    more_hosts: tuple[str, ...] = ()  # those after the first, where the job runs on several
    created_s: float | None = None  # of one brought from elsewhere; None: now


@dataclass(frozen=True)
class RunRow:
    """One launched job. Facts of its newest attempt are repeated here so that a list is one query."""

    id: str
    kind: str
    recipe: str
    branch: str
    host: str
    state: State
    reason: str | None
    evidence: str  # what decided the state, one line for a person
    created_s: float
    started_s: float | None  # first event of the newest attempt
    ended_s: float | None
    attempt: int  # newest; 0 before the first start
    step: int | None  # newest step reported
    num_steps: int | None  # as the recipe has it, or as a script says when it starts
    stage: str | None  # last stage event: loading, training, ...
    unreachable_since_s: float | None
    last_event_s: float | None
    workdir: str | None  # work folder on the host; of an imported run the folder it was read from. See `folder`
    tree_hash: str | None
    git_commit: str | None
    git_dirty: bool
    fingerprint: str | None
    parent_run: str | None  # evaluate and export: the run they look at; smoke by `--try`: the failed one
    forced_reason: str | None  # given with --force: kept for ever
    tags: tuple[str, ...]
    note: str
    why: str
    removed_s: float | None  # moved to the bin by `rm`; `restore` clears it, `purge` ends it
    more_hosts: tuple[str, ...] = ()  # of a run over several: those after `host`, which has rank 0 and the checkpoints
    node: int = 0  # as the follower sees it: of which host's part this speaks

    @property
    def hosts(self) -> tuple[str, ...]:
        return (self.host, *self.more_hosts)

    @property
    def folder(self) -> str | None:
        """The run's folder: on its host, or here where it is imported. None before its host is known."""
        return self.workdir if self.workdir is None or self.host == IMPORTED else f"{self.workdir}/runs/{self.id}"


@dataclass(frozen=True)
class NodeRow:
    """One host of a run over several, by its number from 0."""

    run_id: str
    number: int
    host: str
    workdir: str | None
    unreachable_since_s: float | None
    ended_attempt: int | None  # the attempt whose part here has ended
    end: Mapping[str, Any]  # how, by the evidence of this host; empty before


@dataclass(frozen=True)
class AttemptRow:
    """One start of a run on its host."""

    run_id: str
    number: int
    state: State
    reason: str | None
    evidence: str
    created_s: float
    started_s: float | None
    ended_s: float | None
    duration_s: float | None  # from the host's monotonic clock
    first_step: int | None
    last_step: int | None
    exit_code: int | None
    signal: int | None
    pid: int | None
    boot_id: str | None
    start_ticks: int | None
    last_event_s: float | None
    last_job_event_s: float | None  # of the job itself, the supervisor's beats left out
    last_step_s: float | None  # when the newest step was reported, the host's clock
    final_outcome: str | None  # the job's own last word
    num_bad_lines: int
    num_unknown_events: int


@dataclass(frozen=True)
class FailureRow:
    """Why an attempt ended badly. The first cause comes first; later echoes follow."""

    run_id: str
    attempt: int
    kind: str  # a Reason word
    message: str  # one line
    hint: str
    source: str  # where the evidence was found: rank0, stderr, exit file, ...
    stage: str | None
    step: int | None
    traceback: str  # whole, never cut
    facts: Mapping[str, Any]  # parsed numbers (bytes), frames, shapes
    at_s: float | None
    is_first_cause: bool


@dataclass(frozen=True)
class CheckpointRow:
    run_id: str
    attempt: int
    step: int
    path: str  # on the host
    size_bytes: int | None
    is_best: bool
    at_s: float


@dataclass(frozen=True)
class EvidenceRow:
    """One rung as it was reported, with the fingerprint of the run that climbed it. The gate judges it."""

    run_id: str
    attempt: int
    rung: str
    passed: bool
    message: str
    values: Mapping[str, Any]
    at_s: float
    fingerprint: str | None
    fingerprint_parts: Mapping[str, Any]
    recipe: str
    branch: str
    host: str


@dataclass(frozen=True)
class EvaluationRow:
    run_id: str
    attempt: int
    step: int | None
    protocol: Mapping[str, Any]  # how it was measured
    values: Mapping[str, Any]
    at_s: float


@dataclass(frozen=True)
class MemoryPeakRow:
    """Peaks of one stage on one GPU; the three kinds of peak are never mixed."""

    run_id: str
    attempt: int
    rank: int
    stage: str
    gpu: int | None  # None: host memory
    allocated_bytes: int | None
    reserved_bytes: int | None
    driver_bytes: int | None
    at_s: float


MOST_GPUS = 100  # of a host: GPU 3 of node 2 is kept as 203


def card_of(hosts: Sequence[str], gpu: int) -> tuple[str, int]:
    """The host and the index there of a GPU as a sample has it; `hosts` are the run's, by node."""
    node, index = divmod(gpu, MOST_GPUS)
    return (hosts[node] if node < len(hosts) else f"host {node}"), index


@dataclass(frozen=True)
class GpuSampleRow:
    run_id: str
    attempt: int
    gpu: int  # of all of the run's hosts: `card_of` says which that is
    uuid: str | None
    at_s: float
    used_bytes: int | None
    total_bytes: int | None
    utilisation: float | None  # 0..1


@dataclass(frozen=True)
class ProgressRow:
    """Newest word on long work outside the step loop."""

    run_id: str
    attempt: int
    what: str
    done: float
    total: float | None
    unit: str
    at_s: float


@dataclass(frozen=True)
class EventRow:
    """Everything else that happened: notes, stages, starts, state changes, bad lines, unknown kinds."""

    id: int
    run_id: str | None
    attempt: int | None
    writer: str  # rank0, supervisor, or "draftyard" for what was written here
    kind: str
    text: str  # one line for a person
    fields: Mapping[str, Any]
    at_s: float


@dataclass(frozen=True)
class HostRow:
    """A host as it was last seen."""

    name: str
    address: str
    facts: Mapping[str, Any]  # what probe.py answered
    seen_s: float | None
    unreachable_since_s: float | None
    error: str | None
    clock_offset_s: float | None  # host minus here


NUM_REPORTS = (
    100  # the newest of a metric: what a step is worth or takes now; one alone is too noisy to see learning in
)


@dataclass(frozen=True)
class SeriesRow:
    """One metric of one attempt and rank: its newest value and its extremes (finite or infinite, NaN left out).

    `recent_mean`: of the whole run, over its newest 100 reports (`NUM_REPORTS`), which lists and headings show: a step that
    was done anew counts once, as the newest attempt had it. NaN where the newest is. Of what is set, as `lr`, the newest.
    """

    run_id: str
    attempt: int
    rank: int
    name: str
    num_values: int  # NaN included
    num_nan: int
    first_step: int
    last_step: int
    last_value: float
    min_value: float | None
    max_value: float | None
    recent_mean: float


@dataclass(frozen=True)
class MetricValue:
    attempt: int
    rank: int
    step: int
    value: float


@dataclass(frozen=True)
class CurvePoint:
    """One bucket of a curve: steps [first_step, last_step], NaN left out of the three values but counted."""

    first_step: int
    last_step: int
    minimum: float | None
    mean: float | None
    maximum: float | None
    num_values: int  # numbers in the bucket
    num_nan: int


@dataclass(frozen=True)
class StreamRow:
    """How far one events file has been read."""

    run_id: str
    attempt: int
    writer: str
    offset_bytes: int
    last_seq: int
    num_bad_lines: int
    num_unknown_events: int
    stopped_because: str | None  # a wire version this code does not read


@dataclass(frozen=True)
class IntentRow:
    """A wish of a user's, carried out by the follower."""

    id: int
    run_id: str
    kind: str  # stop, retry
    grace_s: float | None
    asked_s: float
    done_s: float | None
    outcome: str | None
