"""What the screens show: one frozen Snapshot per reading of the store, and the one function that reads.

A screen says what it wants with an Ask; `Room.read` answers with a Snapshot, or with None when
neither the store, nor a log, nor the Ask has changed since the last one. It runs in the reading
thread; nothing else in this folder reads. Numbers of runs that cannot change are kept between
readings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.actions import followed, history
from orchestrator.actions.places import Places
from orchestrator.actions.rungs import required_names
from orchestrator.actions.throughput import time_left_s
from orchestrator.errors import RunNotFound
from orchestrator.store.acceptance import decoded_acceptance
from orchestrator.store.place import Place
from orchestrator.store.reads import Reader
from orchestrator.store.rows import (
    Document,
    EvidenceRow,
    GpuSampleRow,
    HostRow,
    IntentRow,
    RunRow,
    SeriesRow,
    State,
    card_of,
)
from tui.answers import Answers, answers_of
from tui.curve import thin
from tui.detail import (
    EVENT_LIMIT,
    MOST_OVERLAID,
    RunDetail,
    is_ours,
    overlaid,
    own_samples,
    read_detail,
    read_document,
    sample_of,
    stage_progress,
    told_now,
    with_speed,
)
from tui.log_page import LogAsk, LogPage, read_log
from tui.pace import TRAINING
from tui.wording import LIVE_STATES

LIST_METRICS = ("loss", "block_tokens_per_s", "context_tokens_per_s", "step_s", "peak_reserved_bytes")
SPARK_POINTS = 16  # two a cell
LIST_LIMIT = 500
_IS_LIVE = f"status:{','.join(LIVE_STATES)}"
STEPS = 2000  # of SQLite's machine: some ten microseconds
READER_WAIT_S = 0.1  # what one reading stands still at most, for others
BUSY_TIMEOUT_S = 0.25  # a busy database is told on the screen, not waited for


@dataclass(frozen=True)
class CurvesAsk:
    """Which metrics of a run, in how fine a grain."""

    names: tuple[str, ...] = ()  # empty: the first of all
    first: int = 0  # of all metrics, when no names are given
    count: int = 0
    buckets: int = 160
    window: tuple[int, int] | None = None  # steps
    baseline: str | None = None  # another run's id


@dataclass(frozen=True)
class Ask:
    """What a screen wants read."""

    where: str = ""  # a filter of `ls`
    kind: str | None = "train"
    sort: str = "created"
    limit: int | None = LIST_LIMIT
    in_sight: tuple[int, int] = (0, 60)  # rows of the list whose numbers are needed
    wants_list: bool = True
    run: str | None = None  # a run's id or selector: everything about it
    curves: CurvesAsk = CurvesAsk()
    log: LogAsk | None = None
    compared: tuple[str, ...] = ()  # run ids
    wants_hosts: bool = False
    wants_evidence: bool = False
    wants_against: bool = False  # the run's speed beside a baseline's
    baseline: str | None = None  # the one that is marked; else the one that `show` takes
    wants_answers: bool = False  # of the recipe about the run: origins, what would fit


@dataclass(frozen=True)
class RunNumbers:
    """What a list shows of a run beyond its row."""

    latest: Mapping[str, float] = field(default_factory=dict)
    spark: tuple[float | None, ...] = ()
    gpus: tuple[GpuSampleRow, ...] = ()  # newest sample of each of its own
    cause: str = ""  # of a failed run, in the words of its first cause; of an unreachable one, in those of its host
    num_bad: int = 0  # NaN values of the loss
    eta_s: float | None = None  # of a live run that has steps left, from its newest steps
    stepped_s: float | None = None  # when it took the newest of them
    stage_share: float | None = None  # 0..1 of its stage, of a running one that takes no steps now
    is_ours: bool = True  # whether the bundled trainer runs, or ran
    acceptance: float | None = None  # tokens a round, really decoded in a chain


@dataclass(frozen=True)
class Snapshot:
    ask: Ask
    at_s: float
    runs: tuple[RunRow, ...] = ()
    num_runs: int = 0  # that pass the filter, also those beyond the limit
    num_others: int = 0  # of other kinds, where there is none to list
    num_live: int = 0
    numbers: Mapping[str, RunNumbers] = field(default_factory=dict)
    detail: RunDetail | None = None
    compared: tuple[RunDetail, ...] = ()
    log: LogPage | None = None
    hosts: tuple[HostRow, ...] = ()
    promised: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # host -> GPU (UUID or index) -> live run
    sampled: Mapping[str, Mapping[int, GpuSampleRow]] = field(
        default_factory=dict
    )  # host -> index -> newest of that GPU
    live: tuple[RunRow, ...] = ()  # of every kind
    wishes: tuple[IntentRow, ...] = ()  # still open, of every run
    evidence: tuple[EvidenceRow, ...] = ()
    plans: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # recipe/branch@host -> of what was tested
    wanted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # likewise -> rungs that a launch wants passed
    is_followed: bool = True
    was_replaced: bool = False  # what is read took the place of what was read first
    is_another: bool = False  # the first of a database that has taken the place of the one before


class Room:
    """The reading thread's own: a Reader, and what was read before."""

    def __init__(
        self, db_path: Path, places: Places | None = None, *, give_way: Callable[[float], float] | None = None
    ) -> None:
        """`give_way` is called again and again while it reads, with the seconds that it may still stand still in that reading,
        and returns what is left of them."""
        self._places = places
        open_one = partial(Reader, db_path) if places is None else partial(history.open_reader, places)
        self.open_reader = partial(open_one, busy_timeout_s=BUSY_TIMEOUT_S)  # also for who reads beside this thread
        self._give_way, self._may_stand_s = give_way, 0.0
        self._reader: Reader | None = None
        self._place, self._is_another, self._was_replaced = Place(db_path), False, False
        self._seen: tuple[object, ...] = ()
        self._numbers: dict[str, tuple[tuple[object, ...], RunNumbers]] = {}
        self._plans: dict[str, Mapping[str, Any]] = {}  # of smoke runs
        self._wanted: dict[str, tuple[str, ...]] = {}  # likewise
        self._answers: tuple[tuple[object, ...], Answers] = ((), Answers())

    def read(self, ask: Ask, at_s: float) -> Snapshot | None:
        """The newest snapshot, or None when it would equal the last one but for the clock.

        Raises FilterError, RunNotFound and StoreError.
        """
        self._look_at_place()
        reader = self.reader
        self._be_polite(reader)
        is_followed = self._places is None or followed.is_followed(self._places)
        seen = (ask, reader.data_version(), _log_size(reader, ask), is_followed)
        if seen == self._seen:
            return None
        read = self._read(reader, ask, at_s)
        self._was_replaced |= self._is_another
        snapshot = dataclasses.replace(
            read, is_followed=is_followed, is_another=self._is_another, was_replaced=self._was_replaced
        )
        self._seen, self._is_another = seen, False
        return snapshot

    def _be_polite(self, reader: Reader) -> None:
        """Before every question to the database, and every so many steps of one, whoever is in a hurry goes first."""
        self._may_stand_s = READER_WAIT_S
        if self._give_way is not None:
            reader.give_way(self._stand, steps=STEPS)

    def _stand(self, _sql: str = "") -> None:
        assert self._give_way is not None
        self._may_stand_s = self._give_way(self._may_stand_s)

    @property
    def reader(self) -> Reader:
        """Opened when first needed, in the thread that reads."""
        if self._reader is None:
            self._reader = self.open_reader()
        return self._reader

    def _look_at_place(self) -> None:
        """What lies there now is read, and what was read of another database is forgotten. Raises StoreError."""
        must_reopen = self._place.must_reopen()
        if must_reopen or self._place.was_written:
            self.close()
            self._seen = ()
        if must_reopen:
            self._is_another |= self._place.is_another
            self._numbers = {}
            self._plans, self._wanted, self._answers = {}, {}, ((), Answers())

    def forget(self) -> None:
        """The next reading answers whatever has been seen."""
        self._seen = ()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _read(self, reader: Reader, ask: Ask, at_s: float) -> Snapshot:
        live = tuple(reader.live_runs())
        snapshot = Snapshot(ask=ask, at_s=at_s, live=live, wishes=tuple(reader.intents()), num_live=len(live))
        if ask.wants_list:
            snapshot = self._with_list(reader, snapshot)
        chosen = _chosen(reader, ask)
        if chosen is not None:
            detail = read_detail(reader, chosen, ask.curves)
            if ask.wants_answers:
                detail = dataclasses.replace(detail, answers=self._answers_of(detail))
            if ask.wants_against:
                detail = with_speed(reader, detail, ask.baseline)
            log = None if ask.log is None else read_log(reader, detail.run, ask.log)
            snapshot = dataclasses.replace(snapshot, detail=detail, log=log)
        if ask.compared:
            snapshot = dataclasses.replace(snapshot, compared=_compared(reader, ask))
        if ask.wants_hosts:
            numbers = {run.id: self._of_run(reader, run) for run in live}
            snapshot = dataclasses.replace(
                snapshot,
                hosts=tuple(reader.hosts()),
                numbers={**snapshot.numbers, **numbers},
                promised=_promised(reader, live),
                sampled=_sampled(reader, live),
            )
        if ask.wants_evidence:
            evidence = tuple(reader.evidence())
            newest = {f"{item.recipe}/{item.branch}@{item.host}": item.run_id for item in reversed(evidence)}
            newest |= {f"{run.recipe}/{run.branch}@{run.host}": run.id for run in live if run.kind == "smoke"}
            plans, wanted = self._tested(reader, newest)
            snapshot = dataclasses.replace(snapshot, evidence=evidence, plans=plans, wanted=wanted)
        return snapshot

    def _answers_of(self, detail: RunDetail) -> Answers:
        """From memory until the run begins another attempt, ends, or is read anew."""
        run = detail.run
        key = (run.id, run.attempt, run.state, run.reason)
        if self._answers[0] != key:
            self._answers = (key, answers_of(self._places, detail))
        return self._answers[1]

    def _tested(
        self, reader: Reader, newest: Mapping[str, str]
    ) -> tuple[dict[str, Mapping[str, Any]], dict[str, tuple[str, ...]]]:
        """Plan and wanted rungs of the newest smoke run by branch and host; read once, as they never change."""
        for run_id in set(newest.values()) - self._plans.keys():
            self._plans[run_id] = read_document(reader, run_id, Document.PLAN) or {}
            self._wanted[run_id] = required_names(read_document(reader, run_id, Document.SPEC) or {})
        plans = {key: self._plans[run_id] for key, run_id in newest.items()}
        return plans, {key: self._wanted[run_id] for key, run_id in newest.items()}

    def _with_list(self, reader: Reader, snapshot: Snapshot) -> Snapshot:
        ask = snapshot.ask
        found = reader.runs(ask.where, kind=ask.kind, sort=ask.sort, limit=ask.limit)
        is_cut = len(found) == ask.limit
        if ask.sort == "created":
            found = _live_first(reader, ask, found, is_cut=is_cut)
        num_runs = reader.count_runs(ask.where, kind=ask.kind) if is_cut else len(found)
        num_others = 0 if found or ask.kind is None else reader.count_runs(ask.where, kind=None)
        first, count = ask.in_sight
        numbers = self._numbers_of(reader, found[max(0, first) : first + count])
        known = {**snapshot.numbers, **numbers}
        return dataclasses.replace(snapshot, runs=tuple(found), num_runs=num_runs, num_others=num_others, numbers=known)

    def _numbers_of(self, reader: Reader, runs: Sequence[RunRow]) -> dict[str, RunNumbers]:
        """From memory where nothing was reported since; one query for the rest, a curve each."""
        stale = [run for run in runs if self._numbers.get(run.id, ((), None))[0] != _stamp(run)]
        latest = reader.latest([run.id for run in stale], LIST_METRICS) if stale else {}
        live = [run for run in stale if not run.state.is_final]
        gpus = reader.latest_gpu([run.id for run in live]) if live else {}
        promised = _promised(reader, live)
        for run in stale:
            own = {
                host: [gpu for gpu, owner in promised.get(host, {}).items() if owner == run.id] for host in run.hosts
            }
            numbers = _numbers(reader, run, latest[run.id], own_samples(run, gpus.get(run.id, ()), own))
            self._numbers[run.id] = (_stamp(run), numbers)
        # An evaluation is another run's doing, so it is read anew: one query for all.
        accepted = decoded_acceptance(reader, [run.id for run in runs])
        are_cut_off = any(run.unreachable_since_s is not None for run in runs)
        errors = {host.name: host.error or "" for host in reader.hosts()} if are_cut_off else {}
        return {run.id: self._completed(run, accepted.get(run.id), errors) for run in runs}

    def _completed(self, run: RunRow, acceptance: float | None, errors: Mapping[str, str]) -> RunNumbers:
        """With what others say of it: an evaluation, and the host that is not reached."""
        _, numbers = self._numbers[run.id]
        if run.unreachable_since_s is not None and not run.state.is_final:
            numbers = dataclasses.replace(numbers, cause=errors.get(run.host, ""))
        return dataclasses.replace(numbers, acceptance=acceptance)

    def _of_run(self, reader: Reader, run: RunRow) -> RunNumbers:
        return self._numbers_of(reader, [run])[run.id]


def _compared(reader: Reader, ask: Ask) -> tuple[RunDetail, ...]:
    """Each with the same curves: those that are drawn over each other."""
    names = overlaid([reader.series(run_id) for run_id in ask.compared])[:MOST_OVERLAID]
    curves = dataclasses.replace(ask.curves, names=tuple(names))
    return tuple(read_detail(reader, reader.run(run_id), curves) for run_id in ask.compared)


def _live_first(reader: Reader, ask: Ask, found: Sequence[RunRow], *, is_cut: bool) -> list[RunRow]:
    """Live runs on top, those also that are older than all of a list that ends at its limit."""
    where = f"({ask.where}) {_IS_LIVE}" if ask.where.strip() else _IS_LIVE
    beyond = reader.runs(where, kind=ask.kind) if is_cut else []
    listed = {run.id for run in found}
    every = [*found, *(run for run in beyond if run.id not in listed)]
    return sorted(every, key=lambda run: run.state.is_final)  # the sort is stable


def _chosen(reader: Reader, ask: Ask) -> RunRow | None:
    """The run asked for. Beside a list it may have been purged meanwhile; alone that is an error."""
    if ask.run is None:
        return None
    try:
        return reader.run(ask.run)
    except RunNotFound:
        if ask.wants_list:
            return None
        raise


def _stamp(run: RunRow) -> tuple[object, ...]:
    return (run.attempt, run.step, run.last_event_s, run.state)


def _numbers(reader: Reader, run: RunRow, latest: Mapping[str, SeriesRow], gpus: Sequence[GpuSampleRow]) -> RunNumbers:
    loss = latest.get("loss")
    points = [] if loss is None else reader.curve(run.id, "loss", buckets=SPARK_POINTS * 3, attempt=loss.attempt)
    return RunNumbers(
        is_ours=not run.state.is_final or is_ours(read_document(reader, run.id, Document.SPEC)),
        latest={name: told_now(row) for name, row in latest.items()},
        spark=tuple(thin([sample_of(point) for point in points], SPARK_POINTS)),
        gpus=tuple(gpus),
        cause=_cause(reader, run) if run.state is State.FAILED else "",  # it is written before the state
        num_bad=0 if loss is None else loss.num_nan,
        eta_s=time_left_s(reader, run),
        stepped_s=_stepped_s(reader, run),
        stage_share=_stage_share(reader, run),
    )


def _stepped_s(reader: Reader, run: RunRow) -> float | None:
    attempts = [] if run.state.is_final or run.step is None else reader.attempts(run.id)
    return attempts[-1].last_step_s if attempts else None


def _cause(reader: Reader, run: RunRow) -> str:
    failures = reader.failures(run.id)
    return failures[0].message if failures else ""


def _promised(reader: Reader, live: Sequence[RunRow]) -> dict[str, dict[str, str]]:
    return {host: reader.promised_gpus(host) for host in {host for run in live for host in run.hosts}}


def _sampled(reader: Reader, live: Sequence[RunRow]) -> dict[str, dict[int, GpuSampleRow]]:
    """What any of the live runs saw last of each card of their hosts, its own or not."""
    newest: dict[str, dict[int, GpuSampleRow]] = {}
    samples = reader.latest_gpu([run.id for run in live])
    found = [(run, sample) for run in live for sample in samples.get(run.id, ())]
    for run, sample in sorted(found, key=lambda item: item[1].at_s):
        host, index = card_of(run.hosts, sample.gpu)
        newest.setdefault(host, {})[index] = sample
    return newest


def _stage_share(reader: Reader, run: RunRow) -> float | None:
    if run.state is not State.RUNNING or run.stage is None or run.stage in TRAINING:
        return None
    newest = stage_progress(reader.progress(run.id), reader.events(run.id, limit=EVENT_LIMIT))
    return newest.done / newest.total if newest is not None and newest.total else None


def _log_size(reader: Reader, ask: Ask) -> tuple[int, ...]:
    """A log grows by itself, before the store says so."""
    if ask.log is None or ask.run is None:
        return ()
    run = reader.run(ask.run)
    attempt = ask.log.attempt or run.attempt
    return tuple(reader.logs.size_bytes(run.id, attempt, stream) for stream in ("stdout", "stderr"))
