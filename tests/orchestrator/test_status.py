"""States from evidence, look by look. Times are given, never waited for; real endings are in test_follow."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.failure import Findings, Told, causes, from_log
from orchestrator.follow.status import GONE_S, STARTING_S, Known, Rules, judge, proof, stall_limit_s
from orchestrator.observe import Evidence
from orchestrator.store.rows import AttemptRow, RunRow, State

HOST_NOW_S = 10_000.0
ALIVE = {"is_claimed": True, "supervisor": {"pid": 1}, "supervisor_alive": True, "job_alive": True}
DEAD = {"is_claimed": True, "supervisor": {"pid": 1}}


def seen(**facts: Any) -> Evidence:
    values = {"attempt": 1, "boot_id": "b", "uptime_s": 500.0, "host_time_s": HOST_NOW_S, "disk_free_bytes": None}
    return Evidence(**{**values, **facts})


RUN = RunRow(
    id="r", kind="train", recipe="x", branch="y", host="h", state=State.RUNNING, reason=None, evidence="", created_s=0.0,
    started_s=1.0, ended_s=None, attempt=1, step=5, num_steps=10, stage=None, unreachable_since_s=None, last_event_s=None,
    workdir="/w", tree_hash=None, git_commit=None, git_dirty=False, fingerprint=None, parent_run=None, forced_reason=None,
    tags=(), note="", why="", removed_s=None,
)  # fmt: skip
ATTEMPT = AttemptRow(
    run_id="r", number=1, state=State.RUNNING, reason=None, evidence="", created_s=0.0, started_s=1.0, ended_s=None,
    duration_s=None, first_step=1, last_step=5, exit_code=None, signal=None, pid=None, boot_id=None, start_ticks=None,
    last_event_s=HOST_NOW_S - 1, last_job_event_s=HOST_NOW_S - 1, last_step_s=HOST_NOW_S - 1, final_outcome=None,
    num_bad_lines=0, num_unknown_events=0,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    name: str
    seen: Evidence
    state: State | None
    reason: str | None = None
    evidence: str = ""
    outcome: str | None = None  # the job's last word
    was_asked: bool = False
    is_script: bool = False
    num_job_events: int = 5


def exit_with(code: int | None, signal: int | None = None, **more: Any) -> Evidence:
    return seen(**DEAD, exit={"exit_code": code, "signal": signal, "reason": None, "ended_s": 9_990.0, **more})


CASES = [
    Case("clean", exit_with(0), State.SUCCEEDED, None, "exit status 0 and the job's final event", outcome="succeeded"),
    Case("exit code", exit_with(3), State.FAILED, "exit:3", "exit status 3"),
    Case("exit 0 without the final event", exit_with(0), State.FAILED, "unmarked_exit", "without the final event"),
    Case(
        "exit 0 of a script that is silent",
        exit_with(0),
        State.SUCCEEDED,
        None,
        "reports nothing",
        is_script=True,
        num_job_events=0,
    ),
    Case("exit 0 of a script that spoke and never ended", exit_with(0), State.FAILED, "unmarked_exit", is_script=True),
    Case(
        "exit 0 after a reported failure", exit_with(0), State.FAILED, "exit:0", "reported a failure", outcome="failed"
    ),
    Case("SIGTERM from anyone", exit_with(None, 15), State.STOPPED, "signal:15", "SIGTERM that was not ours"),
    Case(
        "SIGTERM through a shell",
        exit_with(143),
        State.STOPPED,
        "signal:15",
        "exit status 143, as a shell says of SIGTERM; none was sent from here",
    ),
    Case("SIGINT", exit_with(None, 2), State.STOPPED, "signal:2"),
    Case("SIGKILL without our intent", exit_with(None, 9), State.FAILED, "signal:9", "without our asking"),
    Case(
        "SIGKILL through a shell, or a status of the job's own",
        exit_with(137),
        State.FAILED,
        "signal:9",
        "exit status 137, as a shell says of signal 9; none was sent from here",
    ),
    Case(
        "asked to stop, through a shell",
        exit_with(143, reason="user"),
        State.STOPPED,
        "user",
        "stopped as asked, exit status 143, as a shell says of signal 15",
        was_asked=True,
    ),
    Case("segmentation fault", exit_with(None, 11), State.FAILED, "signal:11"),
    Case("exit code above 128 that is no signal", exit_with(200), State.FAILED, "exit:200"),
    Case(
        "asked to stop",
        exit_with(None, 15, reason="user"),
        State.STOPPED,
        "user",
        "stopped as asked, ended by signal 15",
    ),
    Case("asked to stop and failed at saving", exit_with(1, reason="user"), State.STOPPED, "user", "exit status 1"),
    Case("asked to stop, saved and left", exit_with(0, reason="user"), State.STOPPED, "user", outcome="stopped"),
    Case(
        "asked to stop, some would not die",
        exit_with(None, 9, reason="user", stubborn=[4711]),
        State.STOPPED,
        "user",
        "would not die: [4711]",
    ),
    Case(
        "stopped politely by somebody else",
        exit_with(0),
        State.STOPPED,
        "signal:15",
        "saved its work",
        outcome="stopped",
    ),
    Case("stop and exit crossed", exit_with(0), State.STOPPED, "user", outcome="stopped", was_asked=True),
    Case(
        "max_duration",
        exit_with(None, 15, reason="max_duration"),
        State.STOPPED,
        "max_duration",
        "reached its max_duration",
    ),
    Case(
        "the supervisor was told to stop",
        exit_with(0, reason="signal"),
        State.STOPPED,
        "signal:15",
        "supervisor was told",
    ),
    Case(
        "could not be started",
        exit_with(None, reason="start_failed", message="cannot start /x: No such file"),
        State.FAILED,
        "exit",
        "cannot start /x",
    ),
    Case("exit file while the supervisor still writes", seen(**ALIVE, exit={"exit_code": 0}), State.RUNNING),
    Case(
        "exit file of another shape",
        seen(**DEAD, exit={"exit_code": "?", "signal": [], "ended_s": "x"}),
        State.LOST,
        None,
        "neither exit status nor signal",
    ),
    Case("reboot", seen(**DEAD, rebooted=True, uptime_s=125.0), State.LOST, "reboot", "restarted 2 min 5 s ago"),
    Case(
        "restart of a container",
        seen(**{**DEAD, "supervisor": {"pid": 1, "boot_id": "b"}}, rebooted=True),
        State.LOST,
        "reboot",
        "the container was restarted",
    ),
    Case("reboot after the last word", seen(**DEAD, rebooted=True), State.SUCCEEDED, None, outcome="succeeded"),
    Case("alive", seen(**ALIVE), State.RUNNING, None),
    Case(
        "supervisor killed, job alive",
        seen(**{**ALIVE, "supervisor_alive": False}),
        State.RUNNING,
        None,
        "supervisor was killed",
    ),
    Case("pid reused: nobody of ours lives", seen(**DEAD), State.LOST, None, "gone without an exit file"),
    Case("both gone, last word was success", seen(**DEAD), State.SUCCEEDED, None, "final event", outcome="succeeded"),
    Case(
        "both gone, last word was failure", seen(**DEAD), State.FAILED, "exit", "reported a failure", outcome="failed"
    ),
    Case("both gone, last word was stopped", seen(**DEAD), State.STOPPED, "signal:15", outcome="stopped"),
    Case("both gone after we asked", seen(**DEAD), State.STOPPED, "user", was_asked=True),
    Case("killed before it wrote supervisor.json", seen(is_claimed=True), State.LOST),
    Case("the folder is gone", seen(attempt=None), State.LOST, None, "folder has been gone"),
    Case(
        "the folder is gone, the processes live",
        seen(attempt=None, job_alive=True),
        State.RUNNING,
        None,
        "is gone from",
    ),
    Case(
        "only its claim is gone after we asked",
        seen(),
        State.STOPPED,
        "user",
        "and claim are gone from",
        was_asked=True,
    ),
    Case("the folder is gone after we asked", seen(attempt=None), State.STOPPED, "user", was_asked=True),
]


def known(case: Case, **changes: Any) -> Known:
    attempt = replace(ATTEMPT, final_outcome=case.outcome)
    values = {"run": RUN, "attempt": attempt, "stop_was_asked": case.was_asked, "num_job_events": case.num_job_events}
    return Known(**{**values, "gone_s": GONE_S + 1, **changes})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_ending_has_its_state(case: Case) -> None:
    verdict = judge(case.seen, known(case), Rules(is_script=case.is_script))

    assert verdict is not None
    assert (verdict.state, verdict.reason) == (case.state, case.reason)
    assert case.evidence in verdict.evidence


@pytest.mark.parametrize(("gone_s", "is_over"), [(0.0, False), (STARTING_S - 1, False), (STARTING_S + 1, True)])
def test_what_a_killed_launch_had_not_started_is_told_without_waiting_for_the_whole_patience(
    gone_s: float, is_over: bool
) -> None:
    """Of a run over several hosts some parts have started then, and this one has not."""
    attempt = replace(ATTEMPT, last_event_s=None, last_job_event_s=None)
    told = Known(RUN, attempt, stop_was_asked=False, num_job_events=0, launch_gone_s=gone_s)

    verdict = judge(seen(), told, Rules())

    assert (verdict is not None) is is_over
    if verdict is not None:
        assert (verdict.state, verdict.reason) == (State.FAILED, None)
        assert "its launch was killed before it came to that" in verdict.evidence


def test_a_folder_that_is_away_for_a_moment_decides_nothing() -> None:
    """A disk that is mounted again, a folder that is moved and moved back."""
    case = Case("away", seen(attempt=None), None)

    assert judge(case.seen, known(case, gone_s=GONE_S - 1), Rules()) is None


@pytest.mark.parametrize(
    ("exit_file", "outcome", "is_looked_for"),
    [
        (exit_with(1, reason="user"), None, True),
        (exit_with(1, reason="max_duration"), None, True),
        (exit_with(1, reason="signal"), None, True),
        (exit_with(None, 9, reason="user"), "failed", True),  # it said so before the grace was over
        (seen(**DEAD), "failed", True),
        (exit_with(0, reason="user"), "stopped", False),
        (exit_with(None, 15, reason="user"), None, False),
        (exit_with(143, reason="user"), None, False),  # a shell's word for the same
    ],
)
def test_a_stop_at_which_the_job_failed_is_asked_for_its_cause(
    exit_file: Evidence, outcome: str | None, is_looked_for: bool
) -> None:
    told = Known(RUN, replace(ATTEMPT, final_outcome=outcome), stop_was_asked=True, num_job_events=5)

    verdict = judge(exit_file, told, Rules())

    assert verdict is not None
    assert (verdict.state, verdict.needs_cause) == (State.STOPPED, is_looked_for)


@pytest.mark.parametrize("exit_file", [exit_with(1, reason="user"), exit_with(1, reason="lonely")])
def test_a_training_that_is_stopped_before_its_first_step_has_nothing_to_fail_at(exit_file: Evidence) -> None:
    """A launcher or a rank that is told to end while torch is loaded has no other way than an exit status."""
    attempt = replace(ATTEMPT, first_step=None, last_step=None, final_outcome="failed")

    verdict = judge(exit_file, Known(RUN, attempt, stop_was_asked=True, num_job_events=5), Rules())

    assert verdict is not None
    assert (verdict.state, verdict.needs_cause) == (State.STOPPED, False)


def test_the_end_is_when_the_host_says_it_was() -> None:
    verdict = judge(exit_with(0), known(CASES[0]), Rules())

    assert verdict is not None
    assert verdict.ended_s == 9_990.0


# ------------------------------------------------------------------------------------ deadlines

SILENT = replace(ATTEMPT, last_event_s=None, last_job_event_s=None, last_step_s=None)


def judged(evidence: Evidence, **changes: Any) -> tuple[State, str | None] | None:
    verdict = judge(
        evidence,
        Known(**{"run": RUN, "attempt": SILENT, "stop_was_asked": False, "num_job_events": 0, **changes}),
        Rules(start_timeout_s=600.0),
    )
    return None if verdict is None else (verdict.state, verdict.reason)


def test_pending_has_a_deadline() -> None:
    nothing = seen(attempt=None)

    assert judged(nothing, waited_s=599.0) is None
    assert judged(nothing, waited_s=601.0) == (State.FAILED, "start_timeout")


def test_setting_up_has_a_deadline() -> None:
    assert judged(seen(**ALIVE), waited_s=599.0) == (State.SETTING_UP, None)
    assert judged(seen(**ALIVE), waited_s=601.0) == (State.FAILED, "start_timeout")


def test_the_supervisors_beat_is_not_the_jobs_first_word() -> None:
    beating = replace(SILENT, last_event_s=HOST_NOW_S)
    spoke = replace(beating, last_job_event_s=HOST_NOW_S - 500.0)
    stopping = replace(RUN, state=State.STOPPING)

    assert judged(seen(**ALIVE), attempt=beating, waited_s=599.0) == (State.RUNNING, None)
    assert judged(seen(**ALIVE), attempt=beating, waited_s=601.0) == (State.FAILED, "start_timeout")
    assert judged(seen(**ALIVE), attempt=spoke, waited_s=601.0, num_job_events=1) == (State.RUNNING, None)
    assert judged(seen(**ALIVE), attempt=beating, waited_s=601.0, run=stopping) is None
    silent = Known(run=RUN, attempt=beating, stop_was_asked=False, num_job_events=0, waited_s=601.0)
    verdict = judge(seen(**ALIVE), silent, Rules(start_timeout_s=600.0, is_script=True))
    assert verdict is not None
    assert verdict.state is State.RUNNING  # a script may report nothing at all


def test_a_stop_before_the_start_waits_for_a_launch_in_flight() -> None:
    nothing = seen(attempt=None)

    assert judged(nothing, waited_s=10.0, stop_was_asked=True) is None
    assert judged(nothing, waited_s=61.0, stop_was_asked=True) == (State.STOPPED, "user")


@pytest.mark.parametrize(
    ("evidence", "outcome", "reason"),
    [
        (exit_with(1, reason="lonely"), "failed", None),
        (exit_with(None, 9, reason="lonely"), None, None),
        (exit_with(0), "stopped", "signal:15"),  # its ranks stopped together, before anybody ended this part
        (seen(**DEAD), None, None),
        (seen(**DEAD), "failed", None),
        (seen(attempt=None), None, None),
    ],
)
def test_a_part_that_is_ended_because_another_has_fallen_is_no_stop_of_the_users(
    evidence: Evidence, outcome: str | None, reason: str | None
) -> None:
    told = Known(RUN, replace(ATTEMPT, final_outcome=outcome), stop_was_asked=False, num_job_events=5, is_lonely=True)

    verdict = judge(evidence, told, Rules())

    assert verdict is not None
    assert (verdict.state, verdict.reason) == (State.STOPPED, reason)
    assert "asked" not in verdict.evidence
    assert ("another host" in verdict.evidence) is (reason is None)


def test_a_part_that_is_left_alone_before_it_was_started_is_stopped() -> None:
    assert judged(seen(attempt=None), waited_s=10.0, is_lonely=True) is None
    assert judged(seen(attempt=None), waited_s=61.0, is_lonely=True) == (State.STOPPED, None)


def test_a_hang_is_said_beside_the_running_state_and_taken_back() -> None:
    def at(quiet_s: float, steps: list[float]) -> tuple[State, str | None] | None:
        return judged(seen(**ALIVE), attempt=ATTEMPT, silent_s=quiet_s, step_seconds=steps)

    assert at(119.0, [0.5] * 5) == (State.RUNNING, None)
    assert at(121.0, [0.5] * 5) == (State.RUNNING, "stalled")
    assert at(1000.0, [60.0] * 5) == (State.RUNNING, None)
    assert at(1201.0, [60.0] * 5) == (State.RUNNING, "stalled")
    assert at(1e6, []) == (State.RUNNING, None)  # nothing to compare with before the first steps


def test_the_stall_limit_follows_the_median_step() -> None:
    assert stall_limit_s([], Rules()) is None
    assert stall_limit_s([1.0, 2.0, 300.0], Rules(stall_factor=20.0)) == 120.0
    assert stall_limit_s([100.0, 100.0, 1.0], Rules(stall_factor=20.0)) == 2000.0


def test_a_run_that_is_stopping_stays_so_until_there_is_an_exit() -> None:
    stopping = replace(RUN, state=State.STOPPING)
    silent = replace(ATTEMPT, last_event_s=None, last_job_event_s=None)  # asked to stop before its first event
    alive = [seen(**ALIVE), seen(**{**ALIVE, "supervisor_alive": False}), seen(**{**ALIVE, "attempt": None})]

    verdicts = [
        judged(look, run=stopping, attempt=attempt, waited_s=waited_s)
        for look in alive
        for attempt in (ATTEMPT, silent)
        for waited_s in (1.0, 601.0)
    ]

    assert verdicts == [None] * 12


# ------------------------------------------------------------------------------ anything at all

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
EXIT_KEYS = ["exit_code", "signal", "reason", "ended_s", "stubborn", "oom_kill_delta", "host_oom_kill_delta", "cgroup",
             "disk", "shm", "message", "gpus", "gpus_before", "left", "kernel", "gpu_health", "killed", "boot_id", "peak_bytes",
             "memory_limit_bytes"]  # fmt: skip
# As a supervisor writes it, with anything in place of each value.
cards = st.fixed_dictionaries({"uuid": st.just("a") | anything, "index": st.just(5) | anything, "used_bytes": anything})
exit_files = st.dictionaries(
    st.sampled_from(EXIT_KEYS),
    anything | st.sampled_from([0, 1, 9, 137, "user", "start_failed"]) | st.lists(cards, max_size=3),
    max_size=12,
)


@pytest.mark.slow
@given(exit_files)
def test_no_exit_file_of_any_shape_breaks_a_verdict(exit_file: dict[str, Any]) -> None:
    verdict = judge(seen(**DEAD, exit=exit_file), known(CASES[0]), Rules())

    assert verdict is not None
    assert verdict.state.is_final
    assert all(failure.message for failure in causes(Findings(exit_file=exit_file)))
    assert all("\n" not in proof(exit_file, own, is_stop=True) for own in ([], ["a"], ["5"]))


PIECES = ["Traceback (most recent call last):", '  File "a.py", line 1, in f', "ValueError: x", "[rank1]: ", "Killed", "",
          "During handling of the above exception, another exception occurred:", "torch.OutOfMemoryError: CUDA out of memory",
          "node:1:2 [0] NCCL WARN out of memory"]  # fmt: skip


@pytest.mark.slow
@given(
    st.lists(st.sampled_from(PIECES) | st.text(max_size=30), max_size=15),
    st.dictionaries(st.text(max_size=8), anything),
)
def test_no_text_of_any_shape_breaks_the_search_for_causes(lines: list[str], fields: dict[str, Any]) -> None:
    text = "\n".join(lines)

    found = [*from_log(text, "stderr"), *causes(Findings(told=[Told("rank0", 0.0, fields)], stderr=text, stdout=text))]

    assert all("\n" not in failure.message for failure in found)


UNKNOWN = "unknown whether GPU memory is back: nvidia-smi did not say"
BEFORE = [{"index": 5, "uuid": "a", "used_bytes": 2**30}, {"index": 6, "uuid": "b", "used_bytes": 2**30}]


def card(uuid: Any, index: Any, used_bytes: Any) -> dict[str, Any]:
    return {"uuid": uuid, "index": index, "used_bytes": used_bytes}


@pytest.mark.parametrize(
    ("gpus", "own", "held", "settled"),
    [
        ([card("a", 5, 13 * 2**30)], ["a"], "GPU 5 still holds 12.00 GiB more than before the job", ""),
        ([card("a", 5, 13 * 2**30)], ["5"], "GPU 5 still holds 12.00 GiB more than before the job", ""),
        ([card("a", 5, 2**30 + 2**20)], ["a"], "", "GPU 5 is back at 1.00 GiB"),
        ([card("a", 5, 13 * 2**30), card("b", 6, 2**30)], ["b"], "", "GPU 6 is back at 1.00 GiB"),
        ([card("c", 7, 2**20)], ["c"], "", "GPU 7 is back at 0.00 GiB"),  # nothing is left to ask about
        ([card("c", 7, 2**34)], ["c"], "", "GPU 7 holds 16.00 GiB, unknown how much of that before the job"),
        ([card("a", 5, None)], ["a"], "", UNKNOWN),
        ([card("b", 6, 2**30)], ["a"], "", UNKNOWN),  # the card is no longer listed
        (None, ["a"], "", UNKNOWN),
        ("many", ["a"], "", UNKNOWN),
        (["a"], ["a"], "", UNKNOWN),
        ([card("a", 5, 13 * 2**30)], [], "", ""),  # a job without cards of its own
    ],
)
def test_whether_the_memory_of_the_jobs_own_cards_is_back_is_said(
    gpus: Any, own: list[str], held: str, settled: str
) -> None:
    exit_file = {"gpus": gpus, "gpus_before": BEFORE, "stubborn": []}

    after_stop = proof(exit_file, own, is_stop=True)

    assert proof(exit_file, own, is_stop=False) == held
    assert after_stop == "; ".join(part for part in (held, "no process is left", settled) if part)


def test_nothing_is_said_of_cards_where_the_job_never_began_or_a_process_would_not_die() -> None:
    assert proof(None, ["a"], is_stop=True) == ""
    assert proof({"reason": "start_failed", "gpus": None}, ["a"], is_stop=True) == ""
    assert "no process is left" not in proof({"stubborn": [7]}, [], is_stop=True)
