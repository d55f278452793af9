"""What is said of a run with several attempts is said of the whole run, at each step of the newest attempt."""

from __future__ import annotations

import math
import random
import statistics
from pathlib import Path

import pytest

from orchestrator.actions import history
from orchestrator.actions.places import Places, find_places
from orchestrator.actions.throughput import recent_mean
from orchestrator.actions.whole_run import whole_series, whole_sketch
from orchestrator.store import queries
from orchestrator.store.reads import Reader
from orchestrator.store.writes import Store
from remote.wire import Event
from tests.orchestrator.runs import RUN, again, batch, event, started, steps


def told(first: int, last: int) -> list[Event]:
    """A loss that falls with the step, from 1,000 at step 0."""
    return [event(step, "metrics", step=step, values={"loss": 1000.0 - step}) for step in range(first, last + 1)]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return find_places(tmp_path, {"HOME": str(tmp_path)}, db=tmp_path / "runs.db")


@pytest.fixture
def resumed(places: Places) -> Store:
    """Steps 1-77, from the checkpoint of step 70 on again: 71-84, whose losses are a half lower."""
    store = Store(places.db)
    started(store)
    store.ingest(batch([*told(1, 77), event(78, "metrics", step=60, values={"eval": math.nan})]))
    again(store)
    again_told = [event(step, "metrics", step=step, values={"loss": 999.5 - step}) for step in range(71, 85)]
    store.ingest(batch(again_told, attempt=2))
    return store


def test_a_summary_covers_every_attempt_and_nothing_that_was_done_anew(resumed: Store) -> None:
    with resumed.reader as reader:
        found = whole_series(reader, RUN)

    loss, mean = found["loss"], (sum(range(930, 1000)) + sum(999.5 - step for step in range(71, 85))) / 84
    assert (loss.first_step, loss.last_step, loss.attempt, loss.num_values) == (1, 84, 2, 84)
    assert (loss.last_value, loss.recent_mean, loss.min_value, loss.max_value) == (915.5, mean, 915.5, 999.0)
    assert (found["eval"].num_nan, found["eval"].attempt) == (1, 1)


def test_show_metrics_and_compare_say_the_same(resumed: Store, places: Places) -> None:
    shown = {row.name: row for row in history.show(places, RUN).series}
    listed = {row.name: row for row in history.series(places, RUN)[1]}
    compared = {item.name: item for item in history.compare(places, [RUN, RUN]).metrics}

    assert shown == listed
    assert (compared["loss"].finals[0], compared["loss"].maxima[1]) == (shown["loss"].recent_mean, 999.0)


def test_a_sketch_runs_through_every_attempt(resumed: Store) -> None:
    with resumed.reader as reader:
        means = whole_sketch(reader, RUN, "loss", buckets=12)

    assert len(means) == 12
    assert means == sorted(means, key=lambda mean: -(mean or 0))  # falls without a jump back
    assert (means[0] or 0) > 990


def test_an_attempt_that_began_anew_stands_for_the_run(tmp_path: Path) -> None:
    with Store(tmp_path / "runs.db") as store:
        started(store)
        store.ingest(batch(steps(1, 50, loss=9.0)))
        again(store)
        store.ingest(batch(steps(1, 20, loss=2.0), attempt=2))

        (loss,) = whole_series(store.reader, RUN).values()

    assert (loss.first_step, loss.last_step, loss.max_value) == (1, 20, 2.0)


@pytest.mark.parametrize("step", [1, 2, 255, 256, 257, 600, 601, 900])
def test_a_series_before_a_step_is_what_its_raw_values_say(tmp_path: Path, step: int) -> None:
    with Store(tmp_path / "runs.db") as store:
        started(store)
        store.ingest(batch(told(1, 600)))
        with Reader(store.path) as reader:
            (row,) = reader.series(RUN)
            found = reader.series_before(row, step)

    if step == 1:
        assert found is None
        return
    last = min(step - 1, 600)
    assert found is not None
    assert (found.last_step, found.last_value, found.num_values) == (last, 1000.0 - last, last)
    assert (found.min_value, found.max_value, found.num_nan) == (1000.0 - last, 999.0, 0)


def test_a_rare_metric_of_discarded_steps_counts_no_more(places: Places) -> None:
    with Store(places.db) as store:
        started(store)
        evals = [event(90 + step, "metrics", step=step, values={"eval": step}) for step in (50, 69)]
        store.ingest(
            batch([*told(1, 100), *evals, event(300, "metrics", step=100, values={"eval": 1000.0, "old": 1.0})])
        )
        again(store)
        store.ingest(batch([*told(78, 200), event(300, "metrics", step=200, values={"eval": 5.0})], attempt=2))

        found = whole_series(store.reader, RUN)

    assert (found["eval"].max_value, found["eval"].num_values) == (69.0, 3)
    assert "old" not in found


def test_what_a_list_shows_filters_and_sorts_by_is_one_mean_of_the_newest_hundred(places: Places) -> None:
    """One step's loss is too noisy to see learning in."""
    store = Store(places.db)
    started(store)
    store.ingest(batch(told(1, 300)))

    (listed,) = history.with_metrics(places, history.list_runs(places, "loss>749 loss<750", sort="loss"))

    assert listed.metrics["loss"] == recent_mean(store.reader, RUN, "loss", attempt=1) == 749.5


def test_a_mean_of_a_metric_that_ends_in_nan_is_nan(places: Places) -> None:
    store = Store(places.db)
    started(store)
    store.ingest(batch([*told(1, 5), event(6, "metrics", step=6, values={"loss": math.nan})]))

    (listed,) = history.with_metrics(places, history.list_runs(places, "loss=nan"))

    assert math.isnan(listed.metrics["loss"])


@pytest.mark.parametrize("writer", ["rank0", "rank1"])
def test_steps_that_a_newer_attempt_did_anew_count_no_more_though_it_has_not_told_that_metric(
    places: Places, writer: str
) -> None:
    """Its first word may be of another metric, and of another rank; a page leaves those steps out as well."""
    store = Store(places.db)
    started(store)
    store.ingest(batch(told(1, 300)))
    again(store)
    store.ingest(batch([event(1, "metrics", step=201, values={"lr": 1.0})], attempt=2, writer=writer))

    (listed,) = history.with_metrics(places, history.list_runs(places, "loss>849 loss<850"))

    assert listed.metrics["loss"] == whole_series(store.reader, RUN)["loss"].recent_mean == 849.5


def _plain_mean(attempts: list[dict[int, float]]) -> float:
    """Slow and obvious: a newer attempt's first step takes all from there on away, then the newest hundred count."""
    history: dict[int, float] = {}
    for values in attempts:
        history = {step: value for step, value in history.items() if step < min(values)} | values
    newest = [history[step] for step in sorted(history)[-100:]]
    return math.nan if math.isnan(newest[-1]) else statistics.fmean(value for value in newest if not math.isnan(value))


@pytest.mark.parametrize("seed", range(12))
def test_every_verb_and_the_filter_take_the_mean_over_all_attempts(places: Places, seed: int) -> None:
    draw = random.Random(seed)
    attempts: list[dict[int, float]] = []
    with Store(places.db) as store:
        started(store)
        for attempt in range(1, draw.randint(2, 4) + 1):
            first = draw.randint(1, max(attempts[-1]) + 1) if attempts else 1
            told_steps = range(first, first + draw.randint(1, 150), draw.choice([1, 1, 3]))
            values = {step: draw.choice([draw.random(), draw.random(), draw.random(), math.nan]) for step in told_steps}
            if attempt > 1:
                again(store)
            told_now = [
                event(n, "metrics", step=step, values={"x": value}) for n, (step, value) in enumerate(values.items(), 1)
            ]
            store.ingest(batch(told_now, attempt=attempt))
            attempts.append(values)
        mean = _plain_mean(attempts)

        (listed,) = history.with_metrics(places, history.list_runs(places, sort="x"), ("x",))
        (shown,) = history.show(places, RUN).series
        (compared,) = history.compare(places, [RUN, RUN]).metrics

    same = pytest.approx(mean, nan_ok=True)
    assert (listed.metrics["x"], shown.recent_mean, compared.finals[0]) == (same, same, same)
    fitting = "x=nan" if math.isnan(mean) else f"x>{mean - 1e-9!r} x<{mean + 1e-9!r}"
    assert len(history.list_runs(places, fitting)) == 1


def test_a_list_and_its_filter_know_no_metric_whose_every_step_was_done_anew(places: Places) -> None:
    with Store(places.db) as store:
        started(store)
        store.ingest(batch([event(5, "metrics", step=5, values={"old": 1.0})]))
        again(store)
        store.ingest(batch(told(1, 9), attempt=2))

    (listed,) = history.with_metrics(places, history.list_runs(places), ("old",))
    assert "old" not in listed.metrics
    assert not history.list_runs(places, "old=nan")
    assert not history.list_runs(places, "old=1")


def test_an_attempt_of_which_rank_0_tells_nothing_takes_steps_anew_too(places: Places) -> None:
    with Store(places.db) as store:
        started(store)
        store.ingest(batch(told(1, 9), writer="rank1"))
        again(store)
        store.ingest(batch([event(1, "metrics", step=5, values={"loss": 1.0})], attempt=2, writer="rank1"))

    (listed,) = history.with_metrics(places, history.list_runs(places))
    assert listed.metrics["loss"] == (999.0 + 998.0 + 997.0 + 996.0 + 1.0) / 5


def test_a_mean_reads_no_more_than_it_counts(tmp_path: Path) -> None:
    """Without a sort: a list of many long runs would otherwise read all that they ever told."""
    with Store(tmp_path / "runs.db") as store, store.reader.database.sqlite() as connection:
        plan = connection.execute(
            f"EXPLAIN QUERY PLAN SELECT {queries.run_mean('loss')} FROM runs r", ("x", "x")
        ).fetchall()

    assert not [row[3] for row in plan if "TEMP B-TREE" in row[3]]
