"""A run over several hosts: a view for each, one verdict of all their ends, and which of them is the cause."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.follow.nodes import HEARD_S, LONELY_S, End, fallen, live_hosts, patience_s, views_on, whole
from orchestrator.follow.status import Verdict
from orchestrator.store.rows import EventRow, Reason, RunRow, State
from orchestrator.store.writes import Store
from tests.orchestrator.runs import RUN, batch, event, new_run

DONE = Verdict(State.SUCCEEDED, None, "exit status 0 and the job's final event", 50.0)
STOPPED = Verdict(State.STOPPED, Reason.USER, "stopped as asked", 52.0)
FAILED = Verdict(State.FAILED, "exit:1", "exit status 1 in the exit file", 50.0, True)
REBOOTED = Verdict(State.LOST, Reason.REBOOT, "the host was restarted", 40.0)


def end(number: int, verdict: Verdict, *, exit_file: dict[str, Any] | None = None, held: str = "") -> End:
    writers = (f"rank{number}", "supervisor" if number == 0 else f"supervisor{number}")
    return End(number, "abc"[number], verdict, exit_file or {}, writers, held)


def said(writer: str, kind: str, **fields: Any) -> EventRow:
    return EventRow(id=1, run_id=RUN, attempt=1, writer=writer, kind=kind, text="", fields=fields, at_s=1.0)


BOTH_BEGAN = [said("rank0", "start"), said("rank1", "start")]
ECHO_OF = {number: said(f"rank{number}", "failure", failure="RankLost", message="rank x is gone") for number in (0, 1)}


def test_a_run_has_succeeded_when_every_part_has() -> None:
    verdict, _ = whole([end(0, DONE), end(1, DONE)], BOTH_BEGAN, stop_was_asked=False)

    assert (verdict.state, verdict.evidence) == (State.SUCCEEDED, f"on all 2 hosts: {DONE.evidence}")


@pytest.mark.parametrize(
    ("ends", "told", "cause"),
    [
        ([end(0, FAILED), end(1, FAILED)], [ECHO_OF[0]], "b"),  # rank 1 was killed without a word
        ([end(0, FAILED), end(1, FAILED)], [ECHO_OF[1], said("rank0", "failure", failure="ValueError")], "a"),
        ([end(0, FAILED), end(1, REBOOTED)], [ECHO_OF[0]], "b"),
        ([end(0, FAILED), end(1, STOPPED)], [ECHO_OF[0]], "a"),  # a frozen rank, whose host was stopped afterwards
        ([end(0, STOPPED), end(1, FAILED, exit_file={"reason": "start_failed"})], [], "b"),
        ([end(0, DONE), end(1, FAILED)], [said("rank1", "failure", failure="OutOfMemoryError")], "b"),
    ],
    ids=["killed", "raised", "rebooted", "frozen", "never started", "after the first was done"],
)
def test_the_cause_is_the_part_that_no_other_explains(ends: list[End], told: list[EventRow], cause: str) -> None:
    verdict, chosen = whole(ends, [*BOTH_BEGAN, *told], stop_was_asked=False)

    assert chosen.host == cause
    assert verdict.state in (State.FAILED, State.LOST)
    assert verdict.evidence.startswith(f"host {cause}: ")
    assert verdict.ended_s == max(each.verdict.ended_s or 0 for each in ends)


def test_of_two_that_failed_by_themselves_the_earlier_is_the_cause() -> None:
    later = Verdict(State.FAILED, "exit:1", "x", 60.0, True)
    told = [said("rank0", "failure", failure="ValueError"), said("rank1", "failure", failure="OSError")]

    assert whole([end(0, later), end(1, FAILED)], [*BOTH_BEGAN, *told], stop_was_asked=False)[1].host == "b"


def test_a_stop_that_was_asked_for_is_a_stop_and_says_what_cards_still_hold() -> None:
    ends = [end(0, STOPPED, held="GPU 0 still holds 3.00 GiB more than before the job"), end(1, STOPPED)]

    verdict, _ = whole(ends, BOTH_BEGAN, stop_was_asked=True)

    assert (verdict.state, verdict.reason) == (State.STOPPED, Reason.USER)
    assert "host a: GPU 0 still holds 3.00 GiB" in verdict.evidence


# ------------------------------------------------------------------------------ in the store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "runs.db") as made:
        made.create_run(new_run(RUN, host="a", more_hosts=("b", "c")))
        made.place_nodes(RUN, ["/work/a", "/work/b", "/work/c"])
        made.new_attempt(RUN)
        yield made


def view(store: Store, host: str) -> RunRow:
    return views_on(store.reader, host, store.reader.live_runs())[0]


def test_each_host_sees_its_own_part_until_it_has_ended_and_the_first_speaks_to_the_end(store: Store) -> None:
    part = view(store, "b")
    assert (part.node, part.host, part.workdir) == (1, "b", "/work/b")
    assert live_hosts(store.reader) == {"a", "b", "c"}

    for number in (0, 1):
        store.end_node(RUN, number, 1, end(number, STOPPED).dump())

    assert live_hosts(store.reader) == {"a", "c"}
    assert views_on(store.reader, "b", store.reader.live_runs()) == []
    store.set_state(RUN, State.STOPPED, evidence="x")
    store.new_attempt(RUN)
    assert live_hosts(store.reader) == {"a", "b", "c"}


def test_a_silent_host_is_a_view_on_the_run_until_each_of_its_hosts_answers(store: Store) -> None:
    store.host_unreachable("c", error="no route")
    store.host_unreachable("b", error="no route")
    store.host_seen("a")
    since = store.reader.run(RUN).unreachable_since_s

    store.host_seen("c")
    still = store.reader.run(RUN).unreachable_since_s
    store.host_seen("b")

    assert since is not None
    assert still is not None
    assert store.reader.run(RUN).unreachable_since_s is None
    assert store.reader.run(RUN).state is State.PENDING


def test_a_part_that_has_fallen_leaves_the_others_less_time_where_they_have_heard_of_the_cause(store: Store) -> None:
    assert fallen(store.reader, view(store, "a")) is None
    store.end_node(RUN, 1, 1, end(1, FAILED).dump())

    other = fallen(store.reader, view(store, "a"))
    assert other is not None
    assert patience_s(store.reader, view(store, "a"), other) == LONELY_S
    for place, fields in enumerate(({"kind": "start"}, {"kind": "failure", "failure": "RankLost", "message": "x"}), 1):
        store.ingest(batch([event(place, **fields)], writer="rank1"))
    assert patience_s(store.reader, view(store, "a"), other) == HEARD_S


def test_gpus_are_promised_on_each_host_and_sampled_apart(store: Store) -> None:
    store.promise_gpus(RUN, lambda taken: ("0",))
    store.promise_gpus(RUN, lambda taken: ("0", "1"), host="b")
    for writer in ("supervisor", "supervisor1"):
        store.ingest(batch([event(1, "gpu", samples=[{"index": 0, "used_bytes": 5}])], writer=writer))

    assert store.reader.promised_gpus("b") == {"0": RUN, "1": RUN}
    assert store.reader.promised_gpus("a") == {"0": RUN}
    assert store.reader.promised_gpus("elsewhere") == {}
    assert store.reader.gpus_by_host(RUN) == {"a": ("0",), "b": ("0", "1")}
    assert [sample.gpu for sample in store.reader.gpu_samples(RUN)] == [0, 100]


def test_a_run_is_found_by_any_of_its_hosts(store: Store) -> None:
    assert [run.hosts for run in store.reader.runs("host:b")] == [("a", "b", "c")]
    assert store.reader.runs("host:d") == []
