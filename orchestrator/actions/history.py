"""What is known: lists, pages and comparisons, read from the store. Contacts nothing, writes nothing.

Loads the standard library and the read half of the store only, so that `ls` and `show` stay quick.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.actions import throughput
from orchestrator.actions.places import Places
from orchestrator.actions.throughput import Throughput
from orchestrator.actions.whole_run import whole_series, whole_sketch
from orchestrator.errors import UsageError
from orchestrator.lazy import lazy
from orchestrator.nearest import listed, nearest
from orchestrator.store.acceptance import Decoded, decoded_acceptance, decoded_ways
from orchestrator.store.migrations import BUSY_TIMEOUT_S
from orchestrator.store.queries import SORTS
from orchestrator.store.reads import Reader
from orchestrator.store.rows import (
    AttemptRow,
    CheckpointRow,
    Document,
    EvaluationRow,
    EventRow,
    EvidenceRow,
    FailureRow,
    IntentRow,
    Kind,
    MemoryPeakRow,
    MetricValue,
    NodeRow,
    ProgressRow,
    Reason,
    RunRow,
    SeriesRow,
)

if TYPE_CHECKING:
    from orchestrator import known
    from orchestrator.actions import comparable
    from orchestrator.store import names as all_metrics
else:
    comparable = lazy("orchestrator.actions.comparable")
    known = lazy("orchestrator.known")  # knows hosts.yaml: reading YAML is not for `ls`
    all_metrics = lazy("orchestrator.store.names")

ACCEPT = "accept"  # a list's heading, and the word that sorts by it
# The order in which a person reads metrics; every other one that a run reported comes after, by name.
FIRST_METRICS = (
    "loss", "accuracy", "streak", "acceptance_length", "loss_ce", "loss_kl", "loss_soft_ce", "loss_cap",
    "block_tokens_per_s", "context_tokens_per_s", "grad_norm", "lr", "step_s", "queue_depth", "peak_reserved_bytes",
)  # fmt: skip
MEMORY_REASONS = (Reason.GPU_OOM, Reason.HOST_OOM, Reason.CGROUP_OOM)  # of a run that ran out of memory


@dataclass(frozen=True)
class Listed:
    """A run of a list with the metrics asked for, each the mean of its newest 100 reports.

    `acceptance`: tokens a round as its trained drafter last decoded held-out prompts; None before it ever has.
    """

    run: RunRow
    metrics: Mapping[str, float]
    acceptance: float | None


@dataclass(frozen=True)
class RunPage:
    """Everything `show` and the run screen tell of one run."""

    run: RunRow
    spec: Mapping[str, Any]
    launch: Mapping[str, Any]  # how it was launched: GPUs, versions, overrides
    plan: Mapping[str, Any]  # predicted memory, empty where nothing was planned
    attempts: list[AttemptRow]
    series: list[SeriesRow]  # over all attempts, lowest rank; first metrics first
    peaks: list[MemoryPeakRow]
    rungs: list[EvidenceRow]  # of a smoke run, in the order they were climbed
    evaluations: list[EvaluationRow]
    checkpoints: list[CheckpointRow]
    failures: list[FailureRow]  # newest attempt first, in it the first cause first
    progress: list[ProgressRow]
    intents: list[IntentRow]  # wishes not yet carried out
    events: list[EventRow]  # newest twenty, oldest first
    throughput: Throughput | None  # why it is as fast as it is; None before it has told its step times
    no_throughput: str = ""  # why its speed cannot be held against the run that was named for it
    nodes: Sequence[NodeRow] = ()  # its hosts, where it has several
    time_left_s: float | None = None  # to its last step, while it takes steps
    silence: str = ""  # why its host is unreachable, of several the first one that is


@dataclass(frozen=True)
class Measured:
    """One metric of several runs: mean of its newest 100 reports, and smallest and largest ever seen.

    `unlike`: the keys by which it is another quantity in those that told it; none where it may be compared.
    """

    name: str
    finals: list[float | None]
    minima: list[float | None]
    maxima: list[float | None]
    unlike: list[str]


@dataclass(frozen=True)
class Difference:
    key: str
    values: list[Any]  # one per run; None where the run's spec has no such key


@dataclass(frozen=True)
class Comparison:
    runs: list[RunRow]
    differences: list[Difference]
    metrics: list[Measured]
    throughput: list[Throughput]  # of every run that told its step times, against the first
    decoded: list[dict[str, Decoded]]  # of each run, by way of decoding: what its drafter is worth


def count_others(places: Places, kind: str) -> int:
    """How many runs there are of every kind but this one."""
    with open_reader(places) as reader:
        return reader.count_runs(kind=None) - reader.count_runs(kind=kind)


def find(places: Places, selector: str) -> RunRow:
    """By full id, unique prefix, @last or @failed. Raises RunNotFound."""
    with open_reader(places) as reader:
        return reader.run(selector)


def list_runs(
    places: Places,
    where: str = "",
    *,
    kind: str | None = Kind.TRAIN,
    sort: str = "newest",
    limit: int | None = 50,
    removed: bool = False,
) -> list[RunRow]:
    """Runs that pass the filter, live ones first, then by their newest start; `kind` None means every kind. Raises UsageError for an unknown sort."""
    with open_reader(places) as reader:
        if sort.removeprefix("-") == ACCEPT:
            runs = reader.runs(where, kind=kind, limit=None, removed=removed)
            return _by_acceptance(reader, runs, is_turned=sort != ACCEPT)[:limit]
        return reader.runs(where, kind=kind, sort=_known_sort(reader, sort), limit=limit, removed=removed)


def with_metrics(places: Places, runs: Sequence[RunRow], names: Sequence[str] = ("loss",)) -> list[Listed]:
    """The runs of a list with the recent means of some metrics and their acceptance, by one query each."""
    ids = [run.id for run in runs]
    with open_reader(places) as reader:
        found = reader.latest(ids, names) if runs and names else {}
        decoded = decoded_acceptance(reader, ids) if runs else {}
    metrics = {run_id: {name: row.recent_mean for name, row in rows.items()} for run_id, rows in found.items()}
    return [Listed(run, metrics.get(run.id, {}), decoded.get(run.id)) for run in runs]


def show(places: Places, selector: str, *, against: str | None = None) -> RunPage:
    """Everything known about a run; `against` names the run its speed is held against. Raises RunNotFound."""
    with open_reader(places) as reader:
        run = reader.run(selector)
        speed, no_speed = _speed(reader, run, None if against is None else reader.run(against))
        return RunPage(
            run=run,
            spec=_document(reader, run, Document.SPEC),
            launch=_document(reader, run, Document.LAUNCH),
            plan=_document(reader, run, Document.PLAN),
            attempts=reader.attempts(run.id),
            series=_in_order(whole_series(reader, run.id)),
            peaks=reader.memory_peaks(run.id),
            rungs=reader.evidence(run_id=run.id)[::-1],
            evaluations=reader.evaluations(run.id),
            checkpoints=reader.checkpoints(run.id),
            failures=reader.failures(run.id),
            progress=reader.progress(run.id),
            intents=reader.intents(run.id),
            events=reader.events(run.id, limit=20),
            throughput=speed,
            no_throughput=no_speed,
            nodes=reader.nodes(run.id),
            time_left_s=throughput.time_left_s(reader, run),
            silence=next((host.error for host in reader.hosts() if host.name in run.hosts and host.error), ""),
        )


def _speed(reader: Reader, run: RunRow, against: RunRow | None) -> tuple[Throughput | None, str]:
    """A metric that one of the two lacks costs this section, not the page."""
    try:
        return throughput.of_run(reader, run, against=against), ""
    except UsageError as error:
        return throughput.of_run(reader, run), str(error)


def document(places: Places, selector: str, name: Document) -> str | None:
    """A long text of the run: its spec, its plan, the patch of uncommitted edits."""
    with open_reader(places) as reader:
        return reader.document(reader.run(selector).id, name)


def series(places: Places, selector: str, *, fitting: Sequence[str] = ()) -> tuple[RunRow, list[SeriesRow]]:
    """Every metric of the run, with its newest value and its extremes over all attempts.

    `fitting`: only names that fit one of these patterns of * and ?. Raises UsageError for one that no name fits.
    """
    with open_reader(places) as reader:
        run = reader.run(selector)
        rows = _in_order(whole_series(reader, run.id))
    if not fitting:
        return run, rows
    known = [row.name for row in rows]
    chosen = {name for pattern in fitting for name in _fitting(run, pattern, known)}
    return run, [row for row in rows if row.name in chosen]


def has_pattern(places: Places, selector: str, names: Sequence[str]) -> bool:
    """Whether one of the names holds * or ? and is not itself a metric of the run."""
    wild = {name for name in names if "*" in name or "?" in name}
    if not wild:
        return False
    with open_reader(places) as reader:
        return bool(wild - set(reader.metric_names(reader.run(selector).id)))


def sketches(places: Places, run_id: str, names: Sequence[str], *, buckets: int = 12) -> dict[str, list[float | None]]:
    """Of each metric the mean over so many equal pieces of its steps; None where a piece holds no number."""
    with open_reader(places) as reader:
        return {name: whole_sketch(reader, run_id, name, buckets=buckets) for name in names}


def values(places: Places, selector: str, name: str, *, last: int | None = None) -> list[MetricValue]:
    """Raw values of one metric, by attempt and step. Raises UsageError for a name the run never reported."""
    with open_reader(places) as reader:
        run = reader.run(selector)
        known = reader.metric_names(run.id)
        if name not in known:
            raise UsageError(f"run {run.id} has no metric {name!r}; {_hint(name, known)}")
        return reader.metric_values(run.id, name, last=last)


def compare(places: Places, selectors: Sequence[str]) -> Comparison:
    """Runs side by side: what they were told differently, then what they measured."""
    with open_reader(places) as reader:
        runs = [reader.run(selector) for selector in selectors]
        specs = [_document(reader, run, Document.SPEC) for run in runs]
        measured = [whole_series(reader, run.id) for run in runs]
        steps = [throughput.mean_step(reader, run) for run in runs]
        decoded = decoded_ways(reader, [run.id for run in runs])
    names = in_reading_order({name for rows in measured for name in rows})
    return Comparison(
        runs,
        spec_differences(specs),
        [_measured(name, [rows.get(name) for rows in measured], specs) for name in names],
        [throughput.explain(step, steps[0]) for step in steps[1:] if step is not None and steps[0] is not None],
        [decoded.get(run.id, {}) for run in runs],
    )


def newest_series(rows: Sequence[SeriesRow]) -> list[SeriesRow]:
    """Of every metric the newest attempt and its lowest rank, in reading order; the reader sorts so."""
    newest: dict[str, SeriesRow] = {}
    for row in rows:
        newest.setdefault(row.name, row)
    return _in_order(newest)


def _in_order(rows: Mapping[str, SeriesRow]) -> list[SeriesRow]:
    return [rows[name] for name in in_reading_order(rows)]


def in_reading_order(names: Iterable[str]) -> list[str]:
    """What a person looks at first comes first."""
    ranks = {name: rank for rank, name in enumerate(FIRST_METRICS)}
    return sorted(names, key=lambda name: (ranks.get(name, len(ranks)), name))


def spec_differences(specs: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Keys on which resolved specs disagree, in the order of the first; why and tags last of all."""
    flat = [dict(_leaves(spec)) for spec in specs]
    keys = dict.fromkeys(key for spec in flat for key in spec)
    told = [Difference(key, [spec.get(key) for spec in flat]) for key in keys]
    return [item for item in told if any(value != item.values[0] for value in item.values)]


def evidence(places: Places, recipe: str | None = None) -> list[EvidenceRow]:
    """Rungs as they were reported, newest first."""
    with open_reader(places) as reader:
        return reader.evidence(recipe=recipe)


def sort_words(places: Places) -> list[str]:
    """What a list can be sorted by: columns, and every metric of any run."""
    with open_reader(places) as reader:
        return [*SORTS, *all_metrics.metrics(reader)]


def exported_path(run: RunRow) -> str:
    """Where an export run wrote its drafter, relative to the run's folder; `remote.drafter.jobs` chose the name."""
    return f"attempts/{run.attempt}/artifacts/export"


def open_reader(places: Places, *, busy_timeout_s: float = BUSY_TIMEOUT_S) -> Reader:
    """The database for reading, and the logs without what their jobs were given in secret. Raises StoreError."""

    def secrets_of(reader: Reader, run_id: str) -> Collection[str]:
        return _known(places.db, places.hosts_file).of(reader, run_id)

    return Reader(places.db, busy_timeout_s=busy_timeout_s, secrets_of=secrets_of)


@cache
def _known(db: Path, hosts_file: Path) -> known.Known:
    """One per database: a value that was seen once stays known."""
    return known.Known(hosts_file)


def _fitting(run: RunRow, pattern: str, known: Sequence[str]) -> list[str]:
    """The names that a pattern of * and ? fits, or that it is."""
    found = [name for name in known if name == pattern or fnmatchcase(name, pattern.replace("[", "[[]"))]
    if not found:
        raise UsageError(f"no metric of run {run.id} fits {pattern}; {_hint(pattern, known)}")
    return found


def _hint(name: str, known: Sequence[str]) -> str:
    """The nearest name, else some of those there are; a run may have thousands."""
    near = nearest(name, known)
    return f"did you mean {near!r}?" if near else f"it has {listed(name, known) or 'none yet'}"


def _by_acceptance(reader: Reader, runs: Sequence[RunRow], *, is_turned: bool) -> list[RunRow]:
    """The best drafter first, or last; in either case before the runs that never decoded."""
    decoded = decoded_acceptance(reader, [run.id for run in runs])
    measured = sorted(
        (run for run in runs if run.id in decoded), key=lambda run: decoded[run.id], reverse=not is_turned
    )
    return [*measured, *(run for run in runs if run.id not in decoded)]


# Headings of a list that are not the name of what they sort by.
_HEADINGS = {"state": "status", "run": "created"}


def _known_sort(reader: Reader, sort: str) -> str:
    """The word as the reader knows it: a column, or a metric that is on the wire or that some run reported."""
    name = _HEADINGS.get(sort.removeprefix("-"), sort.removeprefix("-"))
    if name and name not in SORTS and not all_metrics.is_metric(reader, name):
        near = nearest(name, [*SORTS, *_HEADINGS, ACCEPT, *all_metrics.metrics(reader)])
        hint = f"did you mean {near!r}?" if near else f"known are {', '.join(SORTS)} and every metric"
        raise UsageError(f"--sort {sort}: {name!r} is neither a column nor a metric of any run; {hint}")
    return ("-" if sort.startswith("-") else "") + name


def _document(reader: Reader, run: RunRow, name: Document) -> Mapping[str, Any]:
    text = reader.document(run.id, name)
    found: Mapping[str, Any] = json.loads(text) if text else {}
    return found


def _measured(name: str, rows: Sequence[SeriesRow | None], specs: Sequence[Mapping[str, Any]]) -> Measured:
    return Measured(
        name,
        [row.recent_mean if row else None for row in rows],
        [row.min_value if row else None for row in rows],
        [row.max_value if row else None for row in rows],
        comparable.unlike(name, [spec for row, spec in zip(rows, specs, strict=True) if row]),
    )


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found += _leaves(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found
