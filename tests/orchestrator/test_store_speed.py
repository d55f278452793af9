"""The store's speed at a fiftieth of the benchmark's sizes, as ratios within one run: machines differ, ratios less."""

import re
from pathlib import Path

import pytest

from benchmarks.store import Report, best_ms, measure
from orchestrator.store.reads import Reader
from orchestrator.store.writes import Store
from tests.orchestrator.runs import RUN, batch, event, started


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return measure(tmp_path_factory.mktemp("speed"), runs=500, values=200_000)


@pytest.mark.slow
@pytest.mark.xdist_group("store_speed")  # what they share costs some seconds to make
def test_a_value_takes_at_most_30_bytes_with_its_rollups(report: Report) -> None:
    assert report.bytes_per_value <= 30


@pytest.mark.slow
@pytest.mark.xdist_group("store_speed")  # what they share costs some seconds to make
def test_ingest_costs_at_most_six_plain_inserts_a_value(report: Report) -> None:
    """Typed, keyed, rolled up, in one transaction with its offset; measured 2.2 on an idle machine."""
    assert report.plain_values_per_s / report.ingest_values_per_s < 6


@pytest.mark.slow
@pytest.mark.xdist_group("store_speed")  # what they share costs some seconds to make
def test_lists_filters_and_curves_answer_in_milliseconds(report: Report) -> None:
    assert report.list_ms < 100
    assert report.filter_ms < 100
    assert report.curve_ms < report.curve_raw_ms / 2


@pytest.mark.slow
def test_twelve_thousand_metric_names_are_listed_at_once(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs.db")
    started(store)
    store.ingest(
        batch([event(step, "metrics", step=step, values={f"m{n}": 1.0 for n in range(12_000)}) for step in (1, 2)])
    )

    with Reader(store.path) as reader:
        assert len(reader.metric_names(RUN)) == 12_000
        assert len(reader.series(RUN)) == 12_000
        assert reader.latest([RUN], ["m7"])[RUN]["m7"].num_values == 2
        listing_ms = best_ms(lambda: reader.metric_names(RUN)) + best_ms(lambda: reader.latest([RUN], ["m7"]))
    assert listing_ms < 200


def test_the_queries_of_a_list_use_their_indexes(tmp_path: Path) -> None:
    """A plan that scans every value or series would be seen only with many runs; the planner says it now. What a subquery
    has found by an index is walked, and no more."""
    store = Store(tmp_path / "runs.db")
    started(store)
    asked: list[str] = []
    reader = store.reader
    with reader.database.sqlite() as connection:
        connection.set_trace_callback(asked.append)
    reader.latest([RUN], ["loss"])
    reader.latest_gpu([RUN])
    reader.runs(limit=5)
    reader.live_runs()
    reader.events(RUN, limit=5)
    reader.events(kinds=["state"], after_id=0)
    reader.intents()
    connection.set_trace_callback(None)

    for sql in asked:
        plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}")]
        scans = [step for step in plan if step.startswith("SCAN") and not re.search(r"INDEX|json_each|subquery", step)]
        assert scans == [], (sql, plan)
