"""The bench of the screens' tests itself, and that what their yard tells does not contradict itself."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.actions.history import spec_differences
from orchestrator.store.reads import Reader
from orchestrator.store.rows import Document, State
from tests.tui.golden import opened
from tests.tui.world import NOW_S
from tests.tui.yard import LIVE, OOM, RESUMED, UNREACHABLE
from tui.app import Draftyard
from tui.launch import LaunchScreen


class _NeverOpens(LaunchScreen):
    def __init__(self) -> None:
        raise NameError("name 'Shape' is not defined")


class _Broken(Draftyard):
    def action_break(self) -> None:
        self.push_screen(_NeverOpens())

    BINDINGS = [("f9", "break", "")]  # noqa: RUF012


@pytest.mark.slow
async def test_a_screen_that_cannot_be_made_fails_the_test_instead_of_hanging_it(filled_yard: Path) -> None:
    app = _Broken(filled_yard, clock=lambda: NOW_S)

    with pytest.raises((NameError, TimeoutError)):
        async with opened(app, "f9", deadline_s=10.0):
            pass


@pytest.fixture
def reader(filled_yard: Path) -> Iterator[Reader]:
    with Reader(filled_yard) as opened_reader:
        yield opened_reader


def test_every_share_of_the_yard_is_one(reader: Reader) -> None:
    rows = [row for run in reader.runs(kind=None) for row in reader.series(run.id, "accuracy")]

    assert len(rows) > 10
    assert all(0 < row.min_value <= row.max_value < 1 for row in rows if row.min_value is not None and row.max_value)


def test_every_run_of_the_yard_happens_in_order(reader: Reader) -> None:
    """Asked for, begun, told of, ended: none after now, and no state that it is in already."""
    for run in reader.runs(kind=None):
        times = [run.created_s, run.started_s, run.last_event_s, run.ended_s]
        known = [at_s for at_s in times if at_s is not None]
        moves = [event for event in reader.events(run.id) if event.kind == "state"]
        assert known == sorted(known), (run.id, times)
        assert known[-1] <= NOW_S
        assert all(event.fields["from"] != event.fields["to"] for event in moves), run.id
        assert all(known[0] <= event.at_s <= NOW_S for event in reader.events(run.id)), run.id
        assert run.ended_s is None or all(event.at_s <= run.ended_s for event in reader.events(run.id)), run.id


def test_evidence_of_the_yard_is_of_its_state(reader: Reader) -> None:
    runs = reader.runs(kind=None)
    told = {state: [run.evidence for run in runs if run.state is state] for state in State}

    assert all("was not there any more" in words for words in told[State.LOST])
    assert all("exit status 0" in words for words in told[State.SUCCEEDED])
    assert all("exit status" in words and "exit status 0" not in words for words in told[State.FAILED])


def test_what_the_cards_of_the_yard_hold_is_told_by_a_cause_and_its_remedy(reader: Reader) -> None:
    (failure,) = reader.failures(OOM)

    remedies = failure.facts["remedies"]
    assert failure.facts["cause"] == "math_fallback"
    assert failure.hint.endswith(remedies[0]["text"])
    assert reader.gpu_samples(OOM)  # though it has ended
    assert max(sample.at_s for sample in reader.gpu_samples(OOM)) < reader.run(OOM).ended_s  # type: ignore[operator]


def test_two_runs_of_the_yard_were_told_differently_and_one_has_two_attempts(reader: Reader) -> None:
    specs = [json.loads(reader.document(run_id, Document.SPEC) or "{}") for run_id in (LIVE, UNREACHABLE)]

    assert len([item for item in spec_differences(specs) if item.key not in ("branch", "why")]) >= 5
    assert [attempt.number for attempt in reader.attempts(RESUMED)] == [1, 2]
    assert reader.logs.size_bytes(RESUMED, 1, "stderr") > 0
