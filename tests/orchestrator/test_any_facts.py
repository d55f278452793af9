"""A job may write anything as the facts of its failure: its run ends all the same, and every page of it is shown."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.actions import history
from orchestrator.actions.places import Places, find_places
from orchestrator.failure import Failure, Findings, Told, causes
from orchestrator.follow import ending
from orchestrator.follow.desk import Desk
from orchestrator.follow.status import Verdict
from orchestrator.observe import Evidence
from orchestrator.store.rows import FailureRow, RunRow, State
from orchestrator.store.writes import Store
from orchestrator.verbs.held_page import held_rows
from orchestrator.verbs.jsonable import jsonable
from orchestrator.verbs.page import run_page
from remote.wire import decode, encode
from tests.orchestrator.runs import batch, event, started
from tests.orchestrator.test_cause import OOM, QKV, SDPA, failed, kept, tensor, text, trace
from tui.detail import RunDetail
from tui.failure import failure_lines

FAILED = Verdict(State.FAILED, "exit:1", "exit status 1", 2000.0, needs_cause=True)
EXITED = replace(Evidence.nothing(), exit={"exit_code": 1})

numbers = st.sampled_from(
    [0, 1, -1, 3, 32, 248_320, 2**31, 2**63 - 1, -(2**63) + 1, 1.5, 1e308, float("inf"), float("nan")]
)
leaves = (
    st.none() | st.booleans() | numbers | st.text(max_size=8) | st.sampled_from(["bfloat16", "/w/a.py:9 f", "\x1b[2J"])
)
names = st.text(max_size=6) | st.sampled_from(["bytes", "shape", "frame", "text", "x_bytes", "x_s", "layers"])
anything = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4), max_leaves=12
)


def nearly(**parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A mapping of the right names whose values may be wrong, or something else."""
    return st.fixed_dictionaries({}, optional={name: part | anything for name, part in parts.items()}) | anything


shapes = st.lists(numbers | st.sampled_from([2, 4, 8, 128]), max_size=5)
tensors = nearly(name=st.text(max_size=4), shape=shapes, dtype=st.sampled_from(["bfloat16", "float32"]))
place = nearly(bytes=numbers, num_blocks=numbers, repeats=numbers, frame=st.text(max_size=4))
KINDS = ("chunks", "layers", "steps", "buffers", "checkpointed", "optimizer", "backward")
SIZES = (
    "requested_bytes", "total_bytes", "free_bytes", "own_use_bytes", "allowed_bytes", "allocated_bytes", "reserved_bytes",
    "idle_reserved_bytes", "capacity_bytes", "memory_held_bytes", "limit_bytes", "peak_bytes",
)  # fmt: skip
facts = nearly(
    **dict.fromkeys(SIZES, numbers),
    tensors=st.lists(tensors, max_size=4),
    memory_kept=nearly(**dict.fromkeys(KINDS, place)),
    memory_held=st.lists(place, max_size=3),
    memory_unrecorded=st.text(max_size=4),
    remedies=st.lists(nearly(word=st.text(max_size=4), text=st.text(max_size=4)), max_size=3),
    frame=nearly(source=st.sampled_from([SDPA[3], "loss.backward()", "x"]), file=st.text(max_size=4), line=numbers),
    shortage=st.sampled_from(["other_process", "fragmentation", "process_limit", "full"]),
    level=st.sampled_from(["driver", "library"]),
    other_processes=st.lists(nearly(pid=numbers, used_bytes=numbers), max_size=3),
    expandable_segments=st.booleans(),
)
frames = st.sampled_from(
    [
        (),
        (SDPA,),
        (("/w/loss.py", 20, "kl", "log_q = F.log_softmax(student_logits.float(), -1)"),),
        (("/v/lib/python3.12/site-packages/torch/optim/adam.py", 9, "_init_group", "x"),),
        (("/w/train.py", 41, "main", "loss.backward()"),),
    ]
)
messages = st.sampled_from([text("2.00 GiB"), text("2.00 GiB", idle="40.00 GiB"), "CUDA driver error: out of memory"])


def told(found: Any, where: tuple[Any, ...], message: str, stage: Any = None, step: Any = None) -> dict[str, Any]:
    lines = trace(*where).replace(text("2.00 GiB"), message)
    fields = {"failure": OOM, "message": message, "traceback": lines, "facts": found, "stage": stage, "step": step}
    return decode(encode(event(1, "failure", **fields))).fields  # as a line of events that can be read has them


BREAKS = [
    {"tensors": [tensor("q", 2, 32, 768, 128), tensor("k", 2, 0, 8032, 128)]},
    {"tensors": [{**tensor("q"), "shape": ["a", None, {}, 1]}]},
    {"memory_kept": {"steps": {"bytes": None}}, "memory_held_bytes": 1},
    {"memory_kept": {"checkpointed": {"bytes": "9" * 30}}, "memory_held_bytes": 1},
    {"other_processes": [{"pid": 3}], "shortage": "other_process"},
    {"requested_bytes": [], "total_bytes": {}, "free_bytes": None},
]


@pytest.mark.parametrize("found", BREAKS, ids=str)
@pytest.mark.parametrize("where", [(), (SDPA,)], ids=["anywhere", "in attention"])
def test_facts_that_are_none_leave_a_cause_or_none(found: dict[str, Any], where: tuple[Any, ...]) -> None:
    (cause, *_) = causes(Findings(told=[Told("rank0", 1.0, told(found, where, text("2.00 GiB")))]))

    assert (cause.kind, cause.facts["requested_bytes"]) == ("gpu_oom", 2 * 2**30)


@pytest.mark.slow  # many examples
@given(found=facts, where=frames, message=messages, stage=anything, step=anything)
def test_whatever_a_job_says_causes_are_found(
    found: Any, where: tuple[Any, ...], message: str, stage: Any, step: Any
) -> None:
    failures = causes(Findings(told=[Told("rank0", 1.0, told(found, where, message, stage, step))]))

    assert failures[0].kind == "gpu_oom"
    assert all(isinstance(line, str) for failure in failures for line in (failure.message, failure.hint))
    assert all(isinstance(row, str) for name_and_row in held_rows(failures[0].facts) for row in name_and_row)


def test_what_is_well_formed_among_what_is_not_still_names_the_cause() -> None:
    odd = {**tensor("odd"), "shape": [0, "x"]}

    scores = failed(text("8.36 GiB"), SDPA, facts={"tensors": [odd, *QKV]})
    held = kept("steps", 60 * 2**30)
    leak = failed(text("2.00 GiB"), facts={**held, "memory_kept": {"chunks": {"bytes": None}, **held["memory_kept"]}})

    assert scores.facts["tensors"] == QKV
    assert leak.facts["cause"] == "kept_over_steps"
    assert list(leak.facts["memory_kept"]) == ["steps"]


@pytest.mark.parametrize("digits", ["9" * 400, "9" * 5000])
def test_a_log_whose_numbers_have_no_end_ends_no_explanation(digits: str) -> None:
    log = (
        f"{trace()}\n".replace("2.00 GiB", f"{digits} GiB")
        .replace("GPU 0", f"GPU {digits}")
        .replace("line 40", f"line {digits}")
    )
    more = f"\nOut of memory: Killed process {digits} (python) total-vm:{digits}kB, anon-rss:{digits}kB"
    more += f"\nNVRM: Xid (PCI:0000:01:00): {digits}, x"

    found = causes(Findings(stderr=log + more, exit_file={"exit_code": 1}))

    assert "gpu_oom" in {failure.kind for failure in found}


# ------------------------------------------------------------------ through the follower, and its pages


class Ended:
    """One store; each ending is a run of its own in it."""

    def __init__(self, folder: Path) -> None:
        self.places: Places = find_places(folder, {"HOME": str(folder)}, db=folder / "runs.db")
        self.store = Store(folder / "runs.db")
        self.desk = Desk(self.store, self.store.reader, time.time)
        self._number = 0

    def end(self, *fields: dict[str, Any], verdict: Verdict = FAILED, seen: Evidence = EXITED) -> RunRow:
        self._number += 1
        run_id = started(self.store, f"20260101-120000-{self._number:04x}")
        self.store.ingest(batch([event(seq, "failure", **each) for seq, each in enumerate(fields, 1)], run_id=run_id))
        ending.end_with_cause(self.desk, self.store.reader.run(run_id), seen, verdict)
        return self.store.reader.run(run_id)

    def failures(self, run: RunRow) -> list[FailureRow]:
        return list(history.show(self.places, run.id).failures)


@pytest.fixture(scope="module")
def ended() -> Iterator[Ended]:
    with tempfile.TemporaryDirectory() as folder:
        found = Ended(Path(folder))
        yield found
        found.store.close()


def shown(ended: Ended, run: RunRow) -> None:
    """Every page of a failure, as terminal, Markdown and JSON have it, and as the screens do."""
    page = history.show(ended.places, run.id)
    for only_failure in (True, False):
        lines = run_page(page, width=80, now_s=3000.0, only_failure=only_failure)
        assert any("Failure: " in line for line in lines)
    json.dumps(jsonable(page), allow_nan=False)
    assert failure_lines(RunDetail(run, failures=tuple(page.failures)), 78)


@pytest.mark.parametrize("found", BREAKS, ids=str)
def test_a_run_whose_facts_are_none_ends(ended: Ended, found: dict[str, Any]) -> None:
    run = ended.end(told(found, (SDPA,), text("2.00 GiB")))

    assert (run.state, run.reason) == (State.FAILED, "gpu_oom")
    shown(ended, run)


@pytest.mark.slow  # many examples
@given(found=facts, where=frames, message=messages, stage=anything, step=anything)
def test_whatever_a_job_says_its_run_ends_and_is_shown(
    ended: Ended, found: Any, where: tuple[Any, ...], message: str, stage: Any, step: Any
) -> None:
    run = ended.end(told(found, where, message, stage, step))

    assert (run.state, run.reason) == (State.FAILED, "gpu_oom")
    shown(ended, run)


@pytest.mark.slow  # many examples
@given(found=st.dictionaries(names | st.sampled_from([*SIZES, "cause"]), anything, max_size=6) | facts)
def test_facts_as_an_older_version_kept_them_are_shown(ended: Ended, found: Any) -> None:
    run = ended.end(told({}, (), text("2.00 GiB")))
    row = replace(ended.failures(run)[0], facts=found if isinstance(found, dict) else {})
    ended.store.replace_failures(run.id, run.attempt, [row])

    shown(ended, run)


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("integer modulo by zero"), RecursionError("deep"), OverflowError("")]
)
def test_a_fault_of_explaining_is_told_and_holds_no_verdict(
    ended: Ended, error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ending, "causes", _raising(error))

    run = ended.end(told({}, (), text("2.00 GiB")))

    assert (run.state, run.reason) == (State.FAILED, "exit:1")
    (failure,) = ended.failures(run)
    assert failure.message.startswith(f"the cause could not be told: {type(error).__name__}")
    assert failure.message in run.evidence
    (complaint,) = ended.store.reader.events(run.id, kinds=["follower_error"])
    assert type(error).__name__ in complaint.fields["traceback"]
    assert type(error).__name__ in capsys.readouterr().err


def test_a_cause_that_no_database_takes_is_told_as_that(ended: Ended) -> None:
    half_a_pair = replace(EXITED, exit={"exit_code": 1, "reason": "start_failed", "message": "\ud800"})

    run = ended.end(seen=half_a_pair)

    assert (run.state, run.reason) == (State.FAILED, "exit:1")
    assert ended.failures(run)[0].message.startswith("the cause could not be told: UnicodeEncodeError")


def test_a_fault_of_explaining_is_no_news_of_what_was_told_to_stop(
    ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "causes", _raising(ZeroDivisionError("x")))

    run = ended.end(verdict=Verdict(State.STOPPED, "user", "stopped as asked", 2000.0, needs_cause=True))

    assert (run.state, run.reason, ended.failures(run)) == (State.STOPPED, "user", [])
    assert ended.store.reader.events(run.id, kinds=["follower_error"])


def _raising(error: Exception) -> Any:
    def told_badly(*_: Any) -> list[Failure]:
        raise error

    return told_badly
