"""The store's speed at a fiftieth of the benchmark's sizes, as ratios within one run: machines differ, ratios less."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.store import Report, best_ms, measure
from orchestrator.store.reads import Reader
from orchestrator.store.rows import NUM_REPORTS
from orchestrator.store.writes import Store
from tests.orchestrator.runs import RUN, again, batch, event, started, steps


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
    with Store(tmp_path / "runs.db") as store:
        started(store)
        with explained(store.reader) as plans:
            store.reader.latest([RUN], ["loss"])
            store.reader.latest_gpu([RUN])
            store.reader.runs(limit=5)
            store.reader.live_runs()
            store.reader.events(RUN, limit=5)
            store.reader.events(kinds=["state"], after_id=0)
            store.reader.intents()

    assert scans(plans) == []


@pytest.mark.parametrize("tells_first_step", [True, False])  # a rank 0 that reports nothing tells none
def test_a_metric_filter_costs_a_resumed_run_no_more_than_another(tmp_path: Path, tells_first_step: bool) -> None:
    """Counted in steps of SQLite's machine, of which a value costs some ten: where a part of the question was asked again for
    each value, a filter over 10,000 runs took seconds."""
    with Store(tmp_path / "runs.db") as store:
        for run in ("once", "twice"):
            started(store, run)
            store.ingest(batch(steps(1, 400), run_id=run))
        again(store, "twice")
        store.ingest(batch(steps(301, 340), run_id="twice", attempt=2, writer="rank0" if tells_first_step else "rank1"))
        spent = {run: _machine_steps(store.reader, f"loss<2 id:{run}") for run in ("once", "twice")}

    assert spent["once"] < 20 * NUM_REPORTS, spent
    assert spent["twice"] < 1.5 * spent["once"], spent


def _machine_steps(reader: Reader, where: str) -> int:
    taken = 0

    def count() -> int:
        nonlocal taken
        taken += 1
        return 0

    with reader.database.sqlite() as connection:
        connection.set_progress_handler(count, 1)
        assert len(reader.runs(where)) == 1
        connection.set_progress_handler(None, 1)
    return taken


def test_where_a_host_is_found_is_asked_of_its_live_runs_alone(tmp_path: Path) -> None:
    """The follower asks at each pass; documents are specs, plans and patches, hundreds of MB in a large database."""
    with Store(tmp_path / "runs.db") as store:
        started(store, host="gpu")
        with explained(store.reader) as live:
            store.reader.hosts_file_at("gpu")
        with explained(store.reader) as newest:
            store.reader.hosts_file_at("another")

    assert [plan[0] for plan in live] == ["SEARCH r USING INDEX runs_live (state=?)"]
    assert scans([*live, *newest]) == []
    assert not any("TEMP" in step for step in newest[-1])  # backwards by time, so it ends at the first one


@contextmanager
def explained(reader: Reader) -> Iterator[list[list[str]]]:
    """How SQLite goes about each question that is asked meanwhile, step by step; filled at the end."""
    asked: list[str] = []
    plans: list[list[str]] = []
    with reader.database.sqlite() as connection:
        connection.set_trace_callback(asked.append)
        yield plans
        connection.set_trace_callback(None)
        plans += [[row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}")] for sql in asked]


def scans(plans: list[list[str]]) -> list[str]:
    steps = [step for plan in plans for step in plan]
    return [step for step in steps if step.startswith("SCAN") and not re.search(r"INDEX|json_each|subquery", step)]
