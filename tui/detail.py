"""Everything about one run, read at once: the frozen RunDetail that the tabs of the run screen draw.

Only reading and arranging; what it means is drawn by each tab.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from orchestrator.actions.history import in_reading_order, newest_series
from orchestrator.actions.throughput import PARTS, mean_step, of_run, recent_mean, roles_told, step_s_now
from orchestrator.actions.whole_run import whole_series
from orchestrator.errors import DraftyardError
from orchestrator.store.acceptance import Decoded, Way, decoded_ways
from orchestrator.store.reads import Reader
from orchestrator.store.rows import (
    AttemptRow,
    CheckpointRow,
    CurvePoint,
    Document,
    EvaluationRow,
    EventRow,
    EvidenceRow,
    FailureRow,
    GpuSampleRow,
    HostRow,
    IntentRow,
    MemoryPeakRow,
    ProgressRow,
    RunRow,
    SeriesRow,
    card_of,
)
from orchestrator.units import is_measurable, is_told_newest, unit_of
from tui.answers import NO_ANSWERS, Answers
from tui.curve import Sample
from tui.pace import NO_PACE, Pace, StepTimes, mean_of, pace_at, pace_of
from tui.ranks import Rank, ranks_of

if TYPE_CHECKING:
    from tui.snapshot import CurvesAsk

WATER_LINE_S = 3600.0  # how far back the memory over time goes
EVENT_LIMIT = 60  # the newest
RATES = ("block_tokens_per_s", "context_tokens_per_s")
FIRST_METRICS = ("loss", "accuracy", "streak", "block_tokens_per_s")  # of a comparison, before all others
MOST_OVERLAID = 24  # charts of a comparison
MAX_OLDER_ATTEMPTS = 3  # drawn dimmed behind the newest


@dataclass(frozen=True)
class AttemptCurve:
    attempt: int
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class MetricCurve:
    name: str
    attempts: tuple[AttemptCurve, ...]  # oldest first; the last is the one that counts
    unit: str = ""  # with `mean` where that is what its number is, as under a crosshair, where it is one of some steps
    baseline: tuple[Sample, ...] = ()
    newest: float | None = None  # what it is at now, as `told_now` has it

    @property
    def samples(self) -> tuple[Sample, ...]:
        return self.attempts[-1].samples if self.attempts else ()


@dataclass(frozen=True)
class RunDetail:
    run: RunRow
    attempts: tuple[AttemptRow, ...] = ()
    series: tuple[
        SeriesRow, ...
    ] = ()  # of each metric its summary over all attempts, as `show` has it, in reading order
    curves: tuple[MetricCurve, ...] = ()
    failures: tuple[FailureRow, ...] = ()
    checkpoints: tuple[CheckpointRow, ...] = ()
    evaluations: tuple[EvaluationRow, ...] = ()
    decoded: Mapping[Way, Decoded] = field(default_factory=dict)  # what the drafter is worth, as measured last
    peaks: tuple[MemoryPeakRow, ...] = ()
    ranks: tuple[Rank, ...] = ()  # of a training that is several processes
    roles_told: str = ""  # which role holds the other up, in one sentence
    gpu_samples: tuple[GpuSampleRow, ...] = ()  # of its own GPUs
    progress: tuple[ProgressRow, ...] = ()
    events: tuple[EventRow, ...] = ()
    intents: tuple[IntentRow, ...] = ()
    rungs: tuple[EvidenceRow, ...] = ()  # with the run's own fingerprint, newest first
    spec: Mapping[str, Any] | None = None
    plan: Mapping[str, Any] | None = None
    launch: Mapping[str, Any] | None = None
    host: HostRow | None = None
    pace: Pace = NO_PACE
    rates: Mapping[str, float] = field(default_factory=dict)  # tokens a second over the newest reports, as `pace` is
    answers: Answers = NO_ANSWERS  # asked for by the tabs that show them
    against: str = ""  # its speed beside a baseline's, in one sentence; asked for by the overview

    @property
    def is_ours(self) -> bool:
        """Whether the bundled trainer ran, whose metrics have units that are known."""
        return is_ours(self.spec)

    @property
    def means(self) -> dict[str, float]:
        """Of each metric the one number that `told_now` has."""
        return {row.name: told_now(row) for row in self.series}

    @property
    def stage_progress(self) -> ProgressRow | None:
        return stage_progress(self.progress, self.events)

    def curve(self, name: str) -> MetricCurve | None:
        return next((curve for curve in self.curves if curve.name == name), None)


def read_detail(reader: Reader, run: RunRow, ask: CurvesAsk) -> RunDetail:
    attempts = tuple(reader.attempts(run.id))
    all_series, spec = reader.series(run.id), read_document(reader, run.id, Document.SPEC)
    series = summaries(reader, run.id, all_series)
    peaks = tuple(reader.memory_peaks(run.id))
    since_s = (run.last_event_s or run.created_s) - WATER_LINE_S
    hosts = [host for host in reader.hosts() if host.name == run.host]
    launch = read_document(reader, run.id, Document.LAUNCH)
    return RunDetail(
        run=run,
        attempts=attempts,
        series=series,
        curves=_curves(reader, run, all_series, ask, is_ours=is_ours(spec)),
        failures=tuple(reader.failures(run.id)),
        checkpoints=tuple(reader.checkpoints(run.id)),
        evaluations=tuple(reader.evaluations(run.id)),
        decoded=decoded_ways(reader, [run.id]).get(run.id, {}),
        peaks=peaks,
        ranks=ranks_of(run, all_series, peaks, spec or {}),
        roles_told=roles_told(reader, run) or "",
        gpu_samples=own_samples(run, reader.gpu_samples(run.id, since_s=since_s), reader.gpus_by_host(run.id)),
        progress=tuple(reader.progress(run.id)),
        events=tuple(reader.events(run.id, limit=EVENT_LIMIT)),
        intents=tuple(reader.intents(run.id)),
        rungs=_rungs(reader, run),
        spec=spec,
        plan=read_document(reader, run.id, Document.PLAN),
        launch=launch,
        host=hosts[0] if hosts else None,
        pace=_pace(reader, run, attempts, {row.name for row in series}),
        rates=_rates(series),
    )


def told_now(row: SeriesRow) -> float:
    """The one number of a metric, wherever a screen has room for one: as `ls` and its filters the mean of the newest reports,
    since one alone is too noisy to see learning in. What is set or only grows is told as it is.
    """
    return row.last_value if is_told_newest(row.name) else row.recent_mean


def overlaid(runs: Sequence[Sequence[SeriesRow]]) -> list[str]:
    """What a comparison draws over each other: what two runs or more report, in reading order; first FIRST_METRICS of any run."""
    reports = Counter(name for rows in runs for name in {row.name for row in rows})
    first = [name for name in FIRST_METRICS if name in reports]
    return first + in_reading_order({name for name, number in reports.items() if number > 1} - {*first})


def summaries(reader: Reader, run_id: str, rows: Sequence[SeriesRow]) -> tuple[SeriesRow, ...]:
    """Every metric over all attempts, what one did anew counted once: the numbers of `show` and `compare`."""
    found = whole_series(reader, run_id, rows)
    return tuple(found[name] for name in in_reading_order(found))


def is_ours(spec: Mapping[str, Any] | None) -> bool:
    return (spec or {}).get("entry") == "dflash"


def own_samples(
    run: RunRow, samples: Sequence[GpuSampleRow], promised: Mapping[str, Collection[str]]
) -> tuple[GpuSampleRow, ...]:
    """Those of the GPUs promised to the run on their host, by UUID or index: a supervisor samples every card there is."""

    def is_own(sample: GpuSampleRow) -> bool:
        host, index = card_of(run.hosts, sample.gpu)
        return not {sample.uuid, str(index)}.isdisjoint(promised.get(host, ()))

    return tuple(sample for sample in samples if is_own(sample))


def newest_samples(samples: Sequence[GpuSampleRow]) -> tuple[GpuSampleRow, ...]:
    newest = {sample.gpu: sample for sample in samples}
    return tuple(newest[gpu] for gpu in sorted(newest))


def with_speed(reader: Reader, detail: RunDetail, baseline: str | None) -> RunDetail:
    """As `show` has it: the speed beside a baseline's, and of the run's own block tokens a second the one number that this
    sentence has, all tokens over all seconds; the mean of the rates is another.
    """
    detail = replace(detail, against=_against(reader, detail.run, baseline))
    step, name = mean_step(reader, detail.run), RATES[0]
    if step is None:
        return detail
    curves = tuple(
        replace(each, newest=step.block_tokens_per_s) if each.name == name else each for each in detail.curves
    )
    return replace(detail, rates={**detail.rates, name: step.block_tokens_per_s}, curves=curves)


def _against(reader: Reader, run: RunRow, baseline: str | None) -> str:
    """The sentence of `show --against`, or why there is none; empty where no baseline is named and none is known."""
    try:
        named = reader.run(baseline) if baseline and baseline != run.id else None
        found = of_run(reader, run, against=named)
    except DraftyardError as error:
        return str(error).splitlines()[0]
    return found.sentence if found is not None and found.there is not None else ""


def stage_progress(progress: Sequence[ProgressRow], events: Sequence[EventRow]) -> ProgressRow | None:
    """The newest word on long work, unless a stage has begun since: what came before it is over."""
    newest = max(progress, key=lambda row: row.at_s, default=None)
    begun_s = max((event.at_s for event in events if event.kind == "stage"), default=None)
    return None if newest is None or (begun_s is not None and newest.at_s < begun_s) else newest


def sample_of(point: CurvePoint) -> Sample:
    """A bucket as a sample; what cannot be measured (infinity, 1e300) counts as NaN does."""
    if point.mean is None or point.minimum is None or point.maximum is None:
        return Sample(point.last_step, math.nan, math.nan, math.nan, max(1, point.num_nan))
    if is_measurable(point.minimum) and is_measurable(point.maximum):
        middle = (point.first_step + point.last_step) / 2 if point.num_values > 1 else point.last_step
        return Sample(middle, point.minimum, point.maximum, point.mean, point.num_nan)
    return Sample(point.last_step, math.nan, math.nan, math.nan, point.num_nan + 1)


def samples_of(points: Sequence[CurvePoint]) -> tuple[Sample, ...]:
    """A curve's buckets; the first and the last stand at the very ends, the others in their middles."""
    samples = [sample_of(point) for point in points]
    if len(samples) > 1:
        samples[0] = samples[0]._replace(step=points[0].first_step)
        samples[-1] = samples[-1]._replace(step=points[-1].last_step)
    return tuple(samples)


def _curves(
    reader: Reader, run: RunRow, series: Sequence[SeriesRow], ask: CurvesAsk, *, is_ours: bool
) -> tuple[MetricCurve, ...]:
    names = list(ask.names) or _chosen(series, ask)
    return tuple(_curve(reader, run, series, name, ask, unit_of(name, is_ours=is_ours)) for name in names)


def _chosen(series: Sequence[SeriesRow], ask: CurvesAsk) -> list[str]:
    names = [row.name for row in newest_series(series)]
    return names[ask.first : ask.first + ask.count]


def _curve(
    reader: Reader, run: RunRow, series: Sequence[SeriesRow], name: str, ask: CurvesAsk, unit: str
) -> MetricCurve:
    numbers = sorted({row.attempt for row in series if row.name == name})[-1 - MAX_OLDER_ATTEMPTS :]
    first, last = ask.window or (None, None)

    def read(run_id: str, attempt: int | None) -> tuple[Sample, ...]:
        points = reader.curve(run_id, name, buckets=ask.buckets, attempt=attempt, first_step=first, last_step=last)
        return samples_of(points)

    attempts = tuple(AttemptCurve(number, read(run.id, number)) for number in numbers)
    baseline = read(reader.run(ask.baseline).id, None) if ask.baseline else ()
    newest = next((told_now(row) for row in series if row.name == name), None)  # newest attempt first
    return MetricCurve(name, attempts, told_in(name, unit), baseline, newest)


def told_in(name: str, unit: str) -> str:
    """What the number in a curve's title is in: most are means of the newest reports."""
    return unit if is_told_newest(name) else f"{unit}, mean".removeprefix(", ")


def _rungs(reader: Reader, run: RunRow) -> tuple[EvidenceRow, ...]:
    """A smoke run's own rungs; of another run, those its launch rested on."""
    own = reader.evidence(run_id=run.id)
    if own or run.fingerprint is None:
        return tuple(own)
    return tuple(reader.evidence(fingerprint=run.fingerprint))


def read_document(reader: Reader, run_id: str, name: Document) -> Mapping[str, Any] | None:
    """A document that is a JSON object; None where there is none or it is something else."""
    text = reader.document(run_id, name)
    if text is None:
        return None
    body = json.loads(text)
    return body if isinstance(body, dict) else None


def _rates(series: Sequence[SeriesRow]) -> dict[str, float]:
    told = {row.name: row.recent_mean for row in series if row.name in RATES}
    return {name: told[name] for name in RATES if name in told and is_measurable(told[name])}


def _pace(reader: Reader, run: RunRow, attempts: Sequence[AttemptRow], names: set[str]) -> Pace:
    if not attempts:
        return NO_PACE
    attempt = attempts[-1]
    if "step_s" not in names:
        return pace_at(step_s_now(reader, run), step=run.step, num_steps=run.num_steps)
    recent: dict[str, float] = {}
    overall: dict[str, float] = {}
    for name in ("step_s", *(part for part in PARTS if part in names)):
        known = recent_mean(reader, run.id, name, attempt=attempt.number)
        whole = mean_of([point.mean for point in reader.curve(run.id, name, buckets=64) if point.mean is not None])
        if known is not None and whole is not None:
            recent[name], overall[name] = known, whole
    return pace_of(StepTimes(recent, overall), step=run.step, num_steps=run.num_steps)
