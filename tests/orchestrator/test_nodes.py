"""A run over several hosts: a view for each, one verdict of all their ends, and which of them is the cause."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
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
LONELY = Verdict(State.STOPPED, None, "stopped because another host's part had ended", 62.0)
SIGTERM = Verdict(State.STOPPED, "signal:15", "the supervisor was told to stop (SIGTERM)", 49.0)
OVER = Verdict(State.STOPPED, Reason.MAX_DURATION, "reached its max_duration", 49.0)
NEVER_BEGAN = Verdict(State.FAILED, Reason.START_TIMEOUT, "no event within 10 min of its start")  # nobody knows when


def end(number: int, verdict: Verdict, *, exit_file: dict[str, Any] | None = None, held: str = "") -> End:
    writers = (f"rank{number}", "supervisor" if number == 0 else f"supervisor{number}")
    return End(number, "abc"[number], verdict, exit_file or {}, writers, held)


def said(writer: str, kind: str, **fields: Any) -> EventRow:
    return EventRow(id=1, run_id=RUN, attempt=1, writer=writer, kind=kind, text="", fields=fields, at_s=1.0)


BOTH_BEGAN = [said("rank0", "start"), said("rank1", "start")]
LOST = "remote.drafter.watch.RankLost"  # as a rank spells it
ECHO_OF = {number: said(f"rank{number}", "failure", failure=LOST, message="rank x is gone") for number in (0, 1)}


def test_a_run_has_succeeded_when_every_part_has() -> None:
    verdict, _ = whole([end(0, DONE), end(1, DONE)], BOTH_BEGAN, stop_was_asked=False)

    assert (verdict.state, verdict.evidence) == (State.SUCCEEDED, f"on all 2 hosts: {DONE.evidence}")


def test_the_host_whose_way_to_the_others_is_lost_is_the_cause_and_they_are_named() -> None:
    """Its ranks say which interface; those of the other host know only that they hear no more of them."""
    late = replace(FAILED, ended_s=60.0)
    told = [*BOTH_BEGAN, ECHO_OF[0], said("rank1", "failure", failure="remote.drafter.watch.WayLost", message="x")]

    verdict, chosen = whole([end(0, FAILED), end(1, late)], told, stop_was_asked=False)

    assert chosen.host == "b"
    assert verdict.evidence.startswith("host b, cut off from a: exit status 1")


@pytest.mark.parametrize(
    ("ends", "told", "cause", "state", "reason"),
    [
        ([FAILED, FAILED], [ECHO_OF[0]], "b", State.FAILED, "exit:1"),  # rank 1 was killed without a word
        ([FAILED, FAILED], [ECHO_OF[1], said("rank0", "failure", failure="ValueError")], "a", State.FAILED, "exit:1"),
        ([FAILED, REBOOTED], [ECHO_OF[0]], "b", State.LOST, Reason.REBOOT),
        (
            [FAILED, LONELY],
            [ECHO_OF[0]],
            "a",
            State.FAILED,
            "exit:1",
        ),  # a frozen rank, whose host was stopped afterwards
        ([FAILED, STOPPED], [ECHO_OF[0]], "a", State.FAILED, "exit:1"),  # by a supervisor that says "user" of it
        ([DONE, FAILED], [said("rank1", "failure", failure="OutOfMemoryError")], "b", State.FAILED, "exit:1"),
        ([NEVER_BEGAN, REBOOTED], [], "b", State.LOST, Reason.REBOOT),
        ([NEVER_BEGAN, LONELY], [], "a", State.FAILED, Reason.START_TIMEOUT),
    ],
    ids=["killed", "raised", "rebooted", "frozen", "old", "after the first was done", "a time and none", "never began"],
)
def test_the_cause_is_the_part_that_no_other_explains(
    ends: list[Verdict], told: list[EventRow], cause: str, state: State, reason: str
) -> None:
    parts = [end(number, verdict) for number, verdict in enumerate(ends)]

    verdict, chosen = whole(parts, [*BOTH_BEGAN, *told], stop_was_asked=False)

    assert (chosen.host, verdict.state, verdict.reason) == (cause, state, reason)
    assert verdict.evidence.startswith(f"host {cause}: ")
    assert verdict.ended_s == max(each.ended_s or 0 for each in ends)


def test_a_part_that_never_started_is_the_cause_of_one_that_was_stopped() -> None:
    ends = [end(0, STOPPED), end(1, FAILED, exit_file={"reason": "start_failed"})]

    verdict, chosen = whole(ends, BOTH_BEGAN, stop_was_asked=False)

    assert (chosen.host, verdict.state) == ("b", State.FAILED)


@pytest.mark.parametrize("first", [SIGTERM, OVER], ids=["signal", "max_duration"])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("left", [LONELY, STOPPED], ids=["marked", "by a supervisor that says user"])
def test_a_stop_keeps_its_cause_where_the_other_part_was_left_alone(first: Verdict, place: int, left: Verdict) -> None:
    ends = [end(place, first), end(1 - place, left)]

    verdict, chosen = whole(sorted(ends, key=lambda each: each.number), BOTH_BEGAN, stop_was_asked=False)

    assert (chosen.number, verdict.state, verdict.reason) == (place, State.STOPPED, first.reason)


def test_of_stops_by_themselves_the_earlier_is_the_cause_and_a_time_that_nobody_knows_is_late() -> None:
    ends = [end(0, replace(SIGTERM, ended_s=None)), end(1, replace(SIGTERM, ended_s=60.0)), end(2, OVER)]

    assert whole(ends, BOTH_BEGAN, stop_was_asked=False)[1].host == "c"
    assert whole(ends[:2], BOTH_BEGAN, stop_was_asked=False)[1].host == "b"


def test_a_stop_by_hand_on_a_host_outranks_the_part_that_was_left_alone() -> None:
    verdict, chosen = whole([end(0, LONELY), end(1, STOPPED)], BOTH_BEGAN, stop_was_asked=False)

    assert (chosen.host, verdict.reason) == ("b", Reason.USER)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("first", "asks", "state", "reason"),
    [
        (SIGTERM, False, State.STOPPED, "signal:15"),
        (OVER, False, State.STOPPED, Reason.MAX_DURATION),
        (replace(STOPPED, ended_s=49.0), True, State.STOPPED, Reason.USER),
        (SIGTERM, True, State.STOPPED, "signal:15"),
        (replace(SIGTERM, ended_s=52.0), False, State.STOPPED, "signal:15"),  # its supervisor speaks after its ranks
        (replace(SIGTERM, ended_s=50.0 + HEARD_S + 1), False, State.FAILED, "exit:1"),  # it came after the loss
        (replace(SIGTERM, ended_s=None), False, State.FAILED, "exit:1"),
        (LONELY, False, State.FAILED, "exit:1"),
    ],
    ids=[
        "signal",
        "max_duration",
        "asked",
        "signal, then asked",
        "a moment later",
        "much later",
        "nobody knows when",
        "left alone",
    ],
)
def test_an_echo_yields_to_a_part_that_was_stopped_before_it(
    first: Verdict, asks: bool, state: State, reason: str, place: int
) -> None:
    ends = sorted([end(place, first), end(1 - place, FAILED)], key=lambda each: each.number)

    verdict, _ = whole(ends, [*BOTH_BEGAN, ECHO_OF[1 - place]], stop_was_asked=asks)

    assert (verdict.state, verdict.reason) == (state, reason)


def test_a_failure_of_its_own_yields_to_no_stop() -> None:
    told = [*BOTH_BEGAN, said("rank0", "failure", failure="ValueError")]

    assert whole([end(0, FAILED), end(1, SIGTERM)], told, stop_was_asked=False)[1].host == "a"


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
        made.place_nodes(RUN, ["/srv/a", "/srv/b", "/srv/c"])
        made.new_attempt(RUN)
        yield made


def view(store: Store, host: str) -> RunRow:
    return views_on(store.reader, host, store.reader.live_runs())[0]


def test_each_host_sees_its_own_part_until_it_has_ended_and_the_first_speaks_to_the_end(store: Store) -> None:
    part = view(store, "b")
    assert (part.node, part.host, part.workdir) == (1, "b", "/srv/b")
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


def test_a_run_waits_for_a_host_that_never_comes_back_until_it_is_marked(store: Store) -> None:
    """The others have heard of the loss and ended; silence alone ends nothing."""
    for number in (0, 1):
        store.end_node(RUN, number, 1, end(number, FAILED).dump())
    store.host_unreachable("c", error="no route")
    assert live_hosts(store.reader) == {"a", "c"}  # the first speaks for all while the run lives
    assert not store.reader.run(RUN).state.is_final

    store.mark(RUN, State.LOST, why="host c is scrap")

    assert live_hosts(store.reader) == set()
    run = store.reader.run(RUN)
    assert (run.state, run.unreachable_since_s) == (State.LOST, None)
    assert run.evidence == "marked by hand: host c is scrap (it was pending, and no host was asked)"
    assert store.new_attempt(RUN) == 2  # with its GPUs promised to nobody


def test_a_part_that_has_fallen_leaves_the_others_less_time_where_they_have_heard_of_the_cause(store: Store) -> None:
    assert fallen(store.reader, view(store, "a")) is None
    store.end_node(RUN, 1, 1, end(1, FAILED).dump())

    other = fallen(store.reader, view(store, "a"))
    assert other is not None
    assert patience_s(store.reader, view(store, "a"), other) == LONELY_S
    for place, fields in enumerate(({"kind": "start"}, {"kind": "failure", "failure": LOST, "message": "x"}), 1):
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
