"""Events into rows: exactly once, nothing bent. The oracle for rollups and curves is a plain loop."""

import math
import random
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.store import migrations
from orchestrator.store.event_rows import BadLine
from orchestrator.store.ingest import apply_batch, rank_of
from orchestrator.store.metrics import store_points
from orchestrator.store.reads import Reader
from orchestrator.store.rows import CurvePoint, State
from orchestrator.store.writes import Store
from remote.wire import Event, decode, encode
from tests.orchestrator.runs import RUN, again, batch, event, started, steps


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "runs.db")
    started(store)
    return store


def values_of(reader: Reader, name: str, **chosen: Any) -> list[tuple[int, float]]:
    return [(value.step, value.value) for value in reader.metric_values(RUN, name, **chosen)]


def same(left: object, right: object) -> bool:
    return repr(left) == repr(right)  # nan is nan


# ---------------------------------------------------------------------------------- the first event


@pytest.mark.parametrize("state", [State.PENDING, State.SETTING_UP])
def test_whoever_reads_a_step_reads_that_the_run_is_running(store: Store, state: State) -> None:
    store.set_state(RUN, state, evidence="being started")

    store.ingest(batch(steps(1, 4)))

    run, attempt = store.reader.run(RUN), store.reader.attempts(RUN)[0]
    assert (run.step, run.state, run.evidence) == (4, State.RUNNING, "its job has begun to report")
    assert (attempt.state, attempt.evidence) == (State.RUNNING, run.evidence)
    assert [row.fields["from"] for row in store.reader.events(RUN, kinds=["state"])][-1] == state


@pytest.mark.parametrize("state", [State.RUNNING, State.STOPPING, State.FAILED])
def test_an_event_moves_no_run_that_is_further_on(store: Store, state: State) -> None:
    store.set_state(RUN, state, reason="why", evidence="known already")

    store.ingest(batch(steps(1, 4)))

    run = store.reader.run(RUN)
    assert (run.step, run.state, run.reason, run.evidence) == (4, state, "why", "known already")


def test_a_late_event_of_an_older_attempt_says_nothing_of_the_newer_one(store: Store) -> None:
    again(store)

    store.ingest(batch(steps(1, 4), attempt=1))

    assert store.reader.run(RUN).state is State.PENDING


def test_rank_0_alone_says_how_far_the_run_is(store: Store) -> None:
    """A rank that runs the target computes batches ahead of the steps that will want them."""
    ahead = [event(1, "stage", name="serving hidden states"), event(2, "metrics", step=34, values={"step_s": 1.0})]

    store.ingest(batch([event(1, "stage", name="training"), event(2, "metrics", step=32, values={"loss": 1.0})]))
    store.ingest(batch(ahead, writer="rank1"))

    run, attempt = store.reader.run(RUN), store.reader.attempts(RUN)[0]
    assert (run.step, run.stage, attempt.first_step, attempt.last_step) == (32, "training", 32, 32)
    assert values_of(store.reader, "step_s", rank=1) == [(34, 1.0)]


def test_bad_lines_alone_prove_no_life(store: Store) -> None:
    store.ingest(batch([], bad_lines=[BadLine(0, "no JSON", "x")]))

    assert store.reader.run(RUN).state is State.PENDING


# ---------------------------------------------------------------------------------- exactly once


@pytest.mark.parametrize(
    "hostile",
    [
        event(2, "gpu", samples=[{"index": 2**70}]),
        event(2, "memory", stage="x", allocated_bytes=5, gpu=2**70),
        decode(encode(event(2, "note", text="caf\udce9"))),
        decode(encode(event(2, "metrics", step=2, values={"m\udce9": 1.0}))),
    ],
)
def test_a_hostile_event_never_stops_the_stream(store: Store, hostile: Event) -> None:
    store.ingest(batch([*steps(1, 1), hostile, event(3, "metrics", step=3, values={"loss": 1.0})]))

    assert [step for step, _ in values_of(Reader(store.path), "loss")] == [1, 3]


def test_the_same_batch_again_changes_nothing(store: Store) -> None:
    told = [
        *steps(1, 10),
        event(11, "note", text="hello"),
        event(12, "evaluation", step=10, protocol={}, values={"x": 1}),
    ]
    first = store.ingest(batch(told, offset_bytes=100))
    connection = sqlite3.connect(store.path)
    before = list(connection.iterdump())

    again = store.ingest(batch(told, offset_bytes=100))

    assert first.num_events == 12
    assert again.num_events == 0
    assert list(connection.iterdump()) == before
    connection.close()


@pytest.fixture(scope="module")
def bare() -> Iterator[sqlite3.Connection]:
    """One run in memory, for properties: a transaction per example costs nothing."""
    connection = sqlite3.connect(":memory:")
    connection.executescript(migrations.schema_sql())
    connection.execute(
        "INSERT INTO runs (key, id, kind, recipe, branch, host, state, evidence, created_s, attempt, git_dirty, note, why)"
        " VALUES (1, 'r', 'train', 'x', 'y', 'z', 'running', '', 0, 1, 0, '', '')"
    )
    connection.commit()
    connection.isolation_level = None
    yield connection
    connection.close()


@contextmanager
def undone(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    connection.execute("BEGIN")
    yield connection
    connection.execute("ROLLBACK")


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=8))
def test_any_overlapping_reads_leave_one_row_per_step(bare: sqlite3.Connection, reads: list[tuple[int, int]]) -> None:
    """Reads begin at or before what is known, as a follower's do, and overlap at will."""
    with undone(bare) as connection:
        known = 0
        for back, length in reads:
            first = max(1, known + 1 - back)
            apply_batch(connection, 1, batch(steps(first, first + length - 1)))
            known = max(known, first + length - 1)

        assert connection.execute("SELECT count(*), min(step), max(step) FROM metrics").fetchone() == (known, 1, known)
        assert connection.execute("SELECT num_values, last_step FROM series").fetchone() == (known, known)
        assert connection.execute("SELECT last_seq FROM streams").fetchone() == (known,)
        assert connection.execute("SELECT count(*) FROM events").fetchone() == (0,)


def test_times_of_a_host_whose_clock_is_off_are_kept_as_this_machines(store: Store) -> None:
    told = [event(2, "checkpoint", step=1, path="checkpoints/step-1", size_bytes=1), event(3, "note", text="x")]
    store.ingest(batch([*steps(1, 1), *told], clock_offset_s=-360.0))

    run, attempt = store.reader.run(RUN), store.reader.attempts(RUN)[0]
    assert (run.started_s, run.last_event_s) == (1361.0, 1363.0)
    assert (attempt.started_s, attempt.last_job_event_s, attempt.duration_s) == (1361.0, 1363.0, 2.0)
    assert [row.at_s for row in store.reader.checkpoints(RUN)] == [1362.0]
    assert [row.at_s for row in store.reader.events(RUN, kinds=["note"])] == [1363.0]


def test_a_missing_stretch_is_said_and_the_rest_kept(store: Store) -> None:
    store.ingest(batch([*steps(1, 3), *steps(7, 9)]))

    assert [step for step, _ in values_of(store.reader, "loss")] == [1, 2, 3, 7, 8, 9]
    assert [row.text for row in store.reader.events(RUN, kinds=["gap"])] == ["records 4 to 6 of rank0 never arrived"]


def test_writers_have_streams_of_their_own(store: Store) -> None:
    for rank in (0, 3):
        store.ingest(batch(steps(1, 2, loss=float(rank)), writer=f"rank{rank}"))
    store.ingest(batch([event(1, "beat", pid=1)], writer="supervisor"))

    assert values_of(store.reader, "loss", rank=3) == [(1, 3.0), (2, 3.0)]
    assert [row.rank for row in store.reader.series(RUN, "loss")] == [0, 3]
    attempt = store.reader.attempts(RUN)[0]
    assert (attempt.last_event_s, attempt.last_job_event_s) == (1002.0, 1002.0)


def test_a_supervisors_beat_is_no_word_of_the_job(store: Store) -> None:
    store.ingest(batch([event(5, "beat", pid=1)], writer="supervisor"))

    attempt = store.reader.attempts(RUN)[0]
    assert (attempt.last_event_s, attempt.last_job_event_s) == (1005.0, None)


# ---------------------------------------------------------------------------------- what is kept


def test_nan_and_infinities_survive_as_themselves(store: Store) -> None:
    awkward = [1.0, math.nan, math.inf, -math.inf, 0.0, 5e-324]
    told = [event(step, "metrics", step=step, values={"loss": value}) for step, value in enumerate(awkward, start=1)]
    store.ingest(batch([decode(encode(item)) for item in told]))
    store.ingest(batch([decode(encode(item)) for item in told]))  # the same NaN twice is no conflict

    assert same([value for _, value in values_of(store.reader, "loss")], awkward)
    (series,) = store.reader.series(RUN, "loss")
    assert (series.num_values, series.num_nan, series.min_value, series.max_value) == (6, 1, -math.inf, math.inf)
    assert series.last_value == 5e-324
    assert sum(point.num_nan for point in store.reader.curve(RUN, "loss")) == 1


def test_a_series_of_nothing_but_nan_has_no_extremes(store: Store) -> None:
    store.ingest(batch(steps(1, 3, loss=math.nan)))

    (series,) = store.reader.series(RUN, "loss")
    assert math.isnan(series.last_value)
    assert (series.min_value, series.max_value, series.num_nan) == (None, None, 3)
    assert {point.mean for point in store.reader.curve(RUN, "loss")} == {None}


@pytest.mark.parametrize("name", ["loss", "Loss", "λ/β 🚀", "x" * 500, "", "a b", "100%", "'; DROP TABLE runs; --"])
def test_any_metric_name_is_kept(store: Store, name: str) -> None:
    store.ingest(batch([event(1, "metrics", step=1, values={name: 2.5})]))

    assert store.reader.metric_names(RUN) == [name]
    assert values_of(store.reader, name) == [(1, 2.5)]


def test_a_list_becomes_numbered_metrics(store: Store) -> None:
    store.ingest(batch([event(1, "metrics", step=1, values={"accuracy_at": [0.5, 0.25, math.nan]})]))

    assert store.reader.metric_names(RUN) == ["accuracy_at_1", "accuracy_at_2", "accuracy_at_3"]
    assert values_of(store.reader, "accuracy_at_2") == [(1, 0.25)]


def test_a_step_told_again_in_one_attempt_takes_the_newer_value(store: Store) -> None:
    store.ingest(batch(steps(1, 300)))
    store.ingest(batch([event(301, "metrics", step=5, values={"loss": 9.0})]))

    assert values_of(store.reader, "loss")[4] == (5, 9.0)
    (series,) = store.reader.series(RUN, "loss")
    assert (series.num_values, series.max_value, series.last_step, series.last_value) == (300, 9.0, 300, 1.0)


def test_a_resume_keeps_both_attempts(store: Store) -> None:
    store.ingest(batch(steps(1, 10, loss=1.0)))
    again(store)
    store.ingest(batch(steps(6, 12, loss=2.0), attempt=2))  # seq starts over in a new attempt's own file

    assert [step for step, _ in values_of(store.reader, "loss", attempt=1)] == list(range(1, 11))
    assert [step for step, _ in values_of(store.reader, "loss", attempt=2)] == list(range(6, 13))
    assert [point.mean for point in store.reader.curve(RUN, "loss", buckets=1)] == [2.0]
    assert store.reader.latest([RUN], ["loss"])[RUN]["loss"].attempt == 2
    assert store.reader.run(RUN).step == 12


def test_the_step_of_a_resumed_run_is_its_newest_attempts(store: Store) -> None:
    store.ingest(batch(steps(1, 10)))
    again(store)
    assert store.reader.run(RUN).step == 10

    store.ingest(batch(steps(6, 7), attempt=2))

    assert store.reader.run(RUN).step == 7


def test_every_other_kind_finds_its_table(store: Store) -> None:
    told = [
        event(1, "start", pid=7, writer="rank0", versions={}, devices=[], choices={}),
        event(2, "stage", name="training"),
        event(3, "memory", stage="forward", gpu=5, allocated_bytes=100, reserved_bytes=200, driver_bytes=None),
        event(4, "memory", stage="forward", gpu=5, allocated_bytes=90, reserved_bytes=250, driver_bytes=300),
        event(5, "memory", stage="load", gpu=None, allocated_bytes=1, reserved_bytes=None, driver_bytes=None),
        event(
            6, "gpu", samples=[{"index": 5, "uuid": "GPU-1", "used_bytes": 10, "total_bytes": 20, "utilisation": 0.5}]
        ),
        event(7, "rung", name="fwd_bwd", passed=True, values={"peak_allocated_bytes": 3}, message=""),
        event(8, "checkpoint", step=10, path="checkpoints/step-00000010", size_bytes=5, is_best=True),
        event(9, "checkpoint", step=20, path="checkpoints/step-00000020", size_bytes=5, is_best=True),
        event(10, "evaluation", step=20, protocol={"prompts": 8}, values={"acceptance_length": 1.7}),
        event(11, "progress", what="hidden states", done=3, total=9, unit="rows"),
        event(12, "progress", what="hidden states", done=4, total=9, unit="rows"),
        event(13, "failure", failure="builtins.ValueError", message="ValueError: no", traceback="T", facts={}),
        event(14, "note", text="two\nlines"),
        event(15, "final", outcome="failed", exit_code=1),
    ]
    store.ingest(batch(told))
    reader = store.reader

    peaks = {row.stage: row for row in reader.memory_peaks(RUN)}
    assert (peaks["forward"].allocated_bytes, peaks["forward"].reserved_bytes, peaks["forward"].driver_bytes) == (
        100,
        250,
        300,
    )
    assert (peaks["load"].gpu, peaks["forward"].gpu) == (None, 5)
    assert [(row.gpu, row.used_bytes, row.utilisation) for row in reader.gpu_samples(RUN)] == [(5, 10, 0.5)]
    assert reader.latest_gpu([RUN])[RUN][0].uuid == "GPU-1"
    assert [(row.rung, row.passed, row.values) for row in reader.evidence(run_id=RUN)] == [
        ("fwd_bwd", True, {"peak_allocated_bytes": 3})
    ]
    assert [(row.step, row.is_best) for row in reader.checkpoints(RUN)] == [(10, False), (20, True)]
    assert [(row.step, row.values) for row in reader.evaluations(RUN)] == [(20, {"acceptance_length": 1.7})]
    assert [(row.what, row.done, row.total) for row in reader.progress(RUN)] == [("hidden states", 4.0, 9.0)]
    assert [row.text for row in reader.events(RUN, kinds=["note", "failure"])] == [
        "builtins.ValueError: ValueError: no",
        "two lines",
    ]
    assert reader.run(RUN).stage == "training"
    assert reader.attempts(RUN)[0].final_outcome == "failed"


def test_a_secret_in_what_a_job_tells_is_not_stored(store: Store) -> None:
    secret = "hf_CanaryCanaryCanary1"
    told = [
        event(1, "note", text=f"using {secret}"),
        event(2, "failure", failure="x", message=f"401 for {secret}", traceback=f"T {secret}", facts={"url": [secret]}),
        event(3, "start", pid=1, writer="rank0", versions={}, devices=[], choices={"token": secret}),
        event(4, "rung", name="fwd", passed=False, values={}, message=f"no {secret}"),
    ]
    store.ingest(batch(told))

    connection = sqlite3.connect(store.path)
    assert secret not in "".join(connection.iterdump())
    connection.close()


# ------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("kind", "fields", "complaint"),
    [
        ("metrics", {"values": {"loss": 1}}, "field 'step' is missing"),
        ("metrics", {"step": -1, "values": {"loss": 1}}, "step is -1; it must be a whole number from 0"),
        ("metrics", {"step": 2**60, "values": {"loss": 1}}, "it must be a whole number"),
        ("metrics", {"step": 1.5, "values": {"loss": 1}}, "step is 1.5"),
        ("metrics", {"step": True, "values": {"loss": 1}}, "step is True"),
        ("metrics", {"step": 1, "values": {"loss": "high"}}, "metric 'loss' is 'high'; it must be a number"),
        ("metrics", {"step": 1, "values": {"loss": {"a": 1}}}, "it must be a number or a list"),
        ("metrics", {"step": 1, "values": [1]}, "metrics event, seq 1"),
        ("metrics", {"step": 1, "values": {"loss": 10**400}}, "metrics event, seq 1"),
        ("gpu", {"samples": [{"index": "x"}]}, "gpu event, seq 1"),
        ("memory", {"stage": "load", "allocated_bytes": "much"}, "'much' is no number of bytes"),
        ("rung", {"name": "fwd", "passed": "yes"}, "passed is 'yes'; it must be true or false"),
        ("checkpoint", {"step": 3}, "field 'path' is missing"),
        ("progress", {"what": "x", "done": "half"}, "'half' is no number"),
    ],
)
def test_an_event_that_makes_no_sense_is_a_bad_line_and_the_rest_goes_on(
    store: Store, kind: str, fields: dict[str, Any], complaint: str
) -> None:
    store.ingest(batch([event(1, kind, **fields), *steps(2, 3)]))

    assert [step for step, _ in values_of(store.reader, "loss")] == [2, 3]
    (row,) = store.reader.events(RUN, kinds=["bad_line"])
    assert complaint in row.text
    assert store.reader.attempts(RUN)[0].num_bad_lines == 1


def test_unknown_kinds_are_counted_and_shown_once_each(store: Store) -> None:
    store.ingest(batch([event(1, "hologram", a=1), event(2, "hologram", a=2), event(3, "smell", b=1), *steps(4, 4)]))
    store.ingest(batch([event(5, "hologram", a=3)]))

    assert store.reader.attempts(RUN)[0].num_unknown_events == 4
    assert [(row.text, row.fields) for row in store.reader.events(RUN, kinds=["unknown"])] == [
        ("unknown kind 'hologram'", {"a": 1}),
        ("unknown kind 'smell'", {"b": 1}),
    ]


def test_bad_lines_of_the_reader_are_kept_with_their_place(store: Store) -> None:
    store.ingest(batch([], bad_lines=[BadLine(77, "crc does not match the line", '{"v":1')]))

    (row,) = store.reader.events(RUN, kinds=["bad_line"])
    assert (row.text, row.fields["excerpt"]) == ("bad line at byte 77: crc does not match the line", '{"v":1')


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELD_NAMES = [
    "step",
    "values",
    "stage",
    "gpu",
    "samples",
    "name",
    "passed",
    "path",
    "protocol",
    "what",
    "done",
    "total",
    "outcome",
    "text",
    "failure",
]


@pytest.mark.slow
@given(
    st.sampled_from(
        [
            "metrics",
            "memory",
            "gpu",
            "rung",
            "checkpoint",
            "evaluation",
            "progress",
            "note",
            "stage",
            "failure",
            "final",
            "start",
        ]
    ),
    st.dictionaries(st.sampled_from(FIELD_NAMES), json_values, max_size=6),
)
def test_no_event_of_any_shape_breaks_the_transaction(
    bare: sqlite3.Connection, kind: str, fields: dict[str, Any]
) -> None:
    with undone(bare) as connection:
        told = apply_batch(connection, 1, batch([Event(1, kind, 1.0, 1.0, fields), *steps(2, 2)]))

        assert told.num_events == 2
        assert connection.execute("SELECT last_seq FROM streams").fetchone() == (2,)


# --------------------------------------------------------------------------- curves and rollups


def plain_curve(points: dict[int, float], low: int, high: int, buckets: int, level: int) -> list[CurvePoint]:
    """Steps grouped as `curves` says, by an obvious loop."""
    first, last = low // level, high // level
    groups: dict[int, list[tuple[int, float]]] = {}
    for step, value in sorted(points.items()):
        if first <= step // level <= last and (level > 1 or low <= step <= high):
            groups.setdefault((step // level - first) * buckets // (last - first + 1), []).append((step, value))
    result = []
    for members in groups.values():
        numbers = [value for _, value in members if not math.isnan(value)]
        shown = [step // level * level for step, _ in members]
        result.append(
            CurvePoint(
                max(min(shown), low),
                min(max(shown) + level - 1, high),
                min(numbers, default=None),
                sum(numbers) / len(numbers) if numbers else None,
                max(numbers, default=None),
                len(numbers),
                len(members) - len(numbers),
            )
        )
    return result


@pytest.mark.slow
def test_a_curve_is_what_a_plain_loop_makes_of_the_raw_values(store: Store) -> None:
    chance = random.Random(3)
    points = {
        step: math.nan if chance.random() < 0.01 else chance.gauss(0, 1)
        for step in range(1, 60_001)
        if chance.random() < 0.9
    }
    told = [
        event(seq, "metrics", step=step, values={"loss": value})
        for seq, (step, value) in enumerate(points.items(), start=1)
    ]
    for start in range(0, len(told), 7919):
        store.ingest(batch(told[start : start + 7919]))

    for buckets, first, last, level in [
        (500, None, None, 1),
        (100, None, None, 256),
        (2, None, None, 16384),
        (50, 10_000, 50_000, 256),
        (10, 777, 1234, 1),
        (1, 5, 5, 1),
    ]:
        low, high = first or min(points), last or max(points)
        curve = store.reader.curve(RUN, "loss", buckets=buckets, first_step=first, last_step=last)
        expected = plain_curve(points, low, high, buckets, level)
        assert len(curve) == len(expected) <= buckets
        for got, due in zip(curve, expected, strict=True):
            assert (got.first_step, got.last_step, got.minimum, got.maximum) == (
                due.first_step,
                due.last_step,
                due.minimum,
                due.maximum,
            )
            assert (got.num_values, got.num_nan) == (due.num_values, due.num_nan)
            assert got.mean == pytest.approx(due.mean, rel=1e-9, abs=1e-9)


@given(st.lists(st.tuples(st.integers(0, 40_000), st.floats(-10, 10) | st.just(math.nan)), min_size=1, max_size=80))
def test_rollups_agree_with_the_raw_values_in_any_order(
    bare: sqlite3.Connection, points: list[tuple[int, float]]
) -> None:
    bare.execute("BEGIN")
    connection = bare
    for start in range(0, len(points), 17):
        store_points(connection, (1, 1, 0), {"loss": dict(points[start : start + 17])})

    raw = dict(points)
    for level in (256, 16_384):
        rows = connection.execute(
            "SELECT bucket, minimum, maximum, num_values, num_nan FROM rollups WHERE level = ?", (level,)
        )
        for bucket, minimum, maximum, num_values, num_nan in rows.fetchall():
            members = [value for step, value in raw.items() if step // level == bucket]
            numbers = [value for value in members if not math.isnan(value)]
            assert (minimum, maximum) == (min(numbers, default=None), max(numbers, default=None))
            assert (num_values, num_nan) == (len(numbers), len(members) - len(numbers))
        assert connection.execute(
            "SELECT sum(num_values + num_nan) FROM rollups WHERE level = ?", (level,)
        ).fetchone() == (len(raw),)
    bare.execute("ROLLBACK")


@pytest.mark.parametrize("writer", ["rank99999999999999999999", "rank²", "rank", "rankx", "other"])
def test_a_writer_with_no_rank_in_its_name_speaks_for_rank_0(writer: str) -> None:
    assert rank_of(writer) == 0


def test_a_progress_that_is_no_amount_is_a_bad_line(store: Store) -> None:
    store.ingest(batch([event(1, "progress", what="w", done=math.nan, total=1.0, unit="x"), *steps(2, 3)]))

    assert store.reader.progress(RUN) == []
    assert store.reader.run(RUN).step == 3


def test_a_script_says_how_many_steps_it_will_take_and_the_newest_word_counts(store: Store) -> None:
    store.ingest(batch([event(1, "start", pid=1, num_steps=40), *steps(2, 3)]))
    first = store.reader.run(RUN).num_steps
    store.ingest(batch([event(4, "start", pid=1, num_steps=60), event(5, "start", pid=1)]))
    store.ingest(batch([event(6, "start", pid=1, num_steps="many"), event(7, "start", pid=1, num_steps=-3)]))

    assert first == 40
    assert store.reader.run(RUN).num_steps == 60
    assert store.reader.run(RUN).step == 3


def test_what_a_rung_says_of_its_steps_is_not_the_length_of_a_training(store: Store) -> None:
    run_id = started(store, "20260101-120000-bbbb", kind="smoke")

    store.ingest(batch([event(1, "start", pid=1, num_steps=3)], run_id=run_id))

    assert store.reader.run(run_id).num_steps is None


@pytest.mark.parametrize("kind", ["evaluation", "rung"])
def test_values_without_names_are_a_bad_line(store: Store, kind: str) -> None:
    fields = {"protocol": {}, "step": 1} if kind == "evaluation" else {"name": "fwd", "passed": True}
    store.ingest(batch([event(2, kind, values=[1.0], **fields)]))

    (row,) = store.reader.events(RUN, kinds=["bad_line"])
    assert "values is [1.0]; it must be an object" in row.text
    assert store.reader.evaluations(RUN) == []
