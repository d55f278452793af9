"""The reporter against the wire it writes, real files, real processes and a really full disk."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote import hiding, report, rundir, wire
from remote.report import Reporter, UserFault
from remote.wire import Event, WireError, decode


def read(path: Path) -> list[Event]:
    """Every whole line of the file; lines that are not whole events are left out."""
    events = []
    for line in path.read_bytes().splitlines():
        try:
            events.append(decode(line))
        except WireError:
            continue
    return events


def events_of(attempt: Path, writer: str = "rank0") -> list[Event]:
    return read(attempt / f"events.{writer}.jsonl")


def test_every_method_writes_one_whole_line_with_the_fields_of_its_kind(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path)

    reporter.start(versions={"python": "3.12"}, devices=[{"name": "cpu"}], choices={"attention": "sdpa: no GPU"})
    reporter.stage("training")
    reporter.progress("hidden states", done=3, total=10, unit="rows")
    reporter.metrics(1, {"loss": 2.5, "accuracy_at": [0.5, 0.25]})
    reporter.memory("load", allocated_bytes=1024)
    reporter.rung("fwd", passed=True, values={"step_s": 0.1})
    reporter.checkpoint(1, path="checkpoints/step-00000001", size_bytes=10)
    reporter.checkpoint_removed(1, path="checkpoints/step-00000001")
    reporter.evaluation(1, protocol={"temperature": 0.0}, values={"acceptance_length": 1.7})
    reporter.failure(ValueError("no"), stage="training", step=1)
    reporter.note("said")
    reporter.final("succeeded")

    events = events_of(tmp_path)
    assert [event.seq for event in events] == list(range(1, 13))
    assert {event.kind for event in events} == set(wire.KINDS) - {"gpu", "beat"}
    assert all(tuple(event.fields) == wire.KINDS[event.kind] for event in events)


def test_a_checkpoints_path_is_told_relative_to_the_run_however_it_was_named(tmp_path: Path) -> None:
    root = tmp_path / "run"
    big_disk = tmp_path / "big disk"
    big_disk.mkdir()
    reporter = Reporter(root / "attempts" / "2")
    (root / "checkpoints").symlink_to(big_disk)
    (tmp_path / "link").symlink_to(root)
    named = ["checkpoints/a", root / "checkpoints/a", root / "x/../spare/a", tmp_path / "link/spare/a"]

    for path in [*named, str(root / "checkpoints/a")]:
        reporter.checkpoint(1, path=path, size_bytes=1)
        reporter.checkpoint_removed(1, path=path)

    told = [event.fields["path"] for event in events_of(root / "attempts" / "2")]
    assert told == [
        path for path in ("checkpoints/a", "checkpoints/a", "spare/a", "spare/a", "checkpoints/a") for _ in "12"
    ]


@pytest.mark.parametrize(
    "path", ["/elsewhere/step-20.bin", "../other/step-20.bin", "checkpoints/../..", "", ".", "checkpoints/a\nb"]
)
def test_a_checkpoint_that_is_not_below_the_run_ends_the_job_with_a_line(tmp_path: Path, path: str) -> None:
    """It could not be found again: better at the first save than at the resume."""
    attempt = tmp_path / "attempts" / "1"

    with pytest.raises(UserFault, match="not below the run's folder"), Reporter(attempt).job() as reporter:
        reporter.checkpoint(20, path=path, size_bytes=1)

    failure, final = events_of(attempt)
    assert "DRAFTYARD_RUN_DIR/checkpoints/" in failure.fields["message"]
    assert (failure.fields["traceback"], final.fields["outcome"]) == ("", "failed")


def test_a_users_mistake_is_kept_as_its_line_alone(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path)
    fault = UserFault("steps is 'x'; it must be a number")
    fault.__cause__ = ValueError("invalid literal")

    with pytest.raises(UserFault), reporter.job():
        raise fault

    failure, final = events_of(tmp_path)
    assert failure.fields["message"] == "steps is 'x'; it must be a number"
    assert failure.fields["traceback"] == ""
    assert final.fields == {"outcome": "failed", "exit_code": 1}


def test_numbers_json_cannot_hold_come_back_as_themselves(tmp_path: Path) -> None:
    Reporter(tmp_path).metrics(7, {"loss": math.nan, "grad_norm": math.inf, "lr": -math.inf})

    values = events_of(tmp_path)[0].fields["values"]
    assert math.isnan(values["loss"])
    assert (values["grad_norm"], values["lr"]) == (math.inf, -math.inf)


def test_a_script_may_hand_over_numbers_of_other_libraries_and_odd_facts(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    reporter = Reporter(tmp_path)

    reporter.metrics(1, {"loss": np.float32(0.5), "per_layer": np.array([1.0, np.nan])})
    reporter.failure(ValueError("no"), facts={"folder": Path("/x"), "shape": (1, 2), "names": {"a"}})

    metrics, failure = events_of(tmp_path)
    assert metrics.fields["values"]["loss"] == 0.5
    assert math.isnan(metrics.fields["values"]["per_layer"][1])
    assert failure.fields["facts"] == {"folder": "/x", "shape": [1, 2], "names": ["a"]}


def test_seq_goes_on_after_a_restart_even_behind_a_very_long_line(tmp_path: Path) -> None:
    first = Reporter(tmp_path)
    first.note("one")
    first.note("x" * 300_000)
    first.close()

    Reporter(tmp_path).note("three")

    assert [event.seq for event in events_of(tmp_path)] == [1, 2, 3]


def test_a_line_torn_by_a_crash_does_not_swallow_the_next_one(tmp_path: Path) -> None:
    first = Reporter(tmp_path)
    first.note("whole")
    first.note("torn")
    first.close()
    path = tmp_path / "events.rank0.jsonl"
    os.truncate(path, path.stat().st_size - 9)

    Reporter(tmp_path).note("after")

    assert [(event.seq, event.fields["text"]) for event in events_of(tmp_path)] == [(1, "whole"), (2, "after")]


@given(cut=st.integers(min_value=0, max_value=400))
def test_wherever_a_crash_cuts_the_file_the_seqs_stay_gapless(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    attempt = tmp_path_factory.mktemp("attempt")
    first = Reporter(attempt)
    for number in range(3):
        first.note(f"note {number}")
    first.close()
    path = attempt / "events.rank0.jsonl"
    os.truncate(path, max(0, path.stat().st_size - cut))

    second = Reporter(attempt)
    second.note("after")
    second.close()

    seqs = [event.seq for event in events_of(attempt)]
    assert seqs == list(range(1, len(seqs) + 1))


def test_a_full_disk_loses_events_but_never_the_training_and_says_so_later(tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes the kernel refuse bytes as a full disk does: first a part of a line, then none."""
    reporter = Reporter(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (250, hard))
    try:
        for step in range(1, 6):
            reporter.metrics(step, {"loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    reporter.metrics(6, {"loss": 1.0})

    events = events_of(tmp_path)
    kept = [event.fields["step"] for event in events if event.kind == "metrics"]
    note = next(event.fields["text"] for event in events if event.kind == "note")
    assert kept[0] == 1
    assert kept[-1] == 6
    assert note.startswith(f"{6 - len(kept)} events before this one could not be written: ")
    assert [event.seq for event in events] == list(range(1, len(events) + 1))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_no_space_left_is_named_in_the_loss_note(tmp_path: Path) -> None:
    (tmp_path / "events.rank0.jsonl").symlink_to("/dev/full")

    reporter = Reporter(tmp_path)
    reporter.note("lost")
    reporter.note("lost too")

    assert reporter._loss_note() == "2 events before this one could not be written: No space left on device"


def test_a_failure_keeps_the_whole_traceback_with_causes_and_notes(tmp_path: Path) -> None:
    def deep(level: int) -> None:
        if level:
            globals()["unused"] = level  # keeps each frame a line of its own
            return (deep_even if level % 2 else deep_odd)(level - 1)
        raise MemoryError("y" * 200_000)

    def deep_even(level: int) -> None:
        deep(level)

    def deep_odd(level: int) -> None:
        deep(level)

    try:
        try:
            deep(100)
        except MemoryError as error:
            raise RuntimeError("outer") from error
    except RuntimeError as error:
        error.add_note("while testing") if hasattr(error, "add_note") else None
        Reporter(tmp_path).failure(error, stage="backward", step=3, facts={"row": 5})

    fields = events_of(tmp_path)[0].fields
    assert fields["failure"] == "builtins.RuntimeError"
    assert "RuntimeError: outer" in fields["message"]
    assert (fields["stage"], fields["step"], fields["facts"]) == ("backward", 3, {"row": 5})
    assert fields["traceback"].count("in deep\n") == 101
    assert "y" * 200_000 in fields["traceback"]
    assert "direct cause" in fields["traceback"]


def test_a_job_that_returns_succeeds(tmp_path: Path) -> None:
    with Reporter(tmp_path).job() as reporter:
        reporter.metrics(1, {"loss": 1.0})

    assert events_of(tmp_path)[-1].fields == {"outcome": "succeeded", "exit_code": 0}


def test_a_job_that_has_spoken_its_last_word_keeps_it(tmp_path: Path) -> None:
    with Reporter(tmp_path).job() as reporter:
        reporter.final("stopped")

    assert [event.fields["outcome"] for event in events_of(tmp_path)] == ["stopped"]


def test_an_escaping_exception_becomes_a_failure_and_still_escapes(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Reporter(tmp_path).job():
        _ = 1 / 0

    failure, final = events_of(tmp_path)
    assert failure.fields["failure"] == "builtins.ZeroDivisionError"
    assert "_ = 1 / 0" in failure.fields["traceback"]
    assert final.fields == {"outcome": "failed", "exit_code": 1}


@pytest.mark.parametrize(
    ("code", "outcome", "status"),
    [(None, "succeeded", 0), (0, "succeeded", 0), (3, "failed", 3), ("text", "failed", 1)],
)
def test_sys_exit_ends_a_job_with_its_status(tmp_path: Path, code: object, outcome: str, status: int) -> None:
    with pytest.raises(SystemExit), Reporter(tmp_path).job():
        sys.exit(code)  # type: ignore[arg-type]

    assert events_of(tmp_path)[-1].fields == {"outcome": outcome, "exit_code": status}


SCRIPT = """\
from remote.report import Reporter, UserFault

reporter = Reporter.from_environment()
with reporter.job():
    reporter.start()
    for step in range(1, 6):
        reporter.metrics(step, {"loss": 1.0 / step})
    raise RuntimeError("out of luck")
"""


def run_copied_script(folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    (folder / "remote").mkdir()
    for module in (report, rundir, wire, hiding):
        shutil.copy(str(module.__file__), folder / "remote")
    (folder / "mine.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-I", "-c", "import sys, runpy; sys.path.insert(0, '.'); runpy.run_path('mine.py')"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_users_script_works_with_four_copied_files_and_ends_non_zero(tmp_path: Path) -> None:
    folder, run = tmp_path / "a folder", tmp_path / "run"
    folder.mkdir()

    ended = run_copied_script(folder, {"DRAFTYARD_RUN_DIR": str(run), "DRAFTYARD_ATTEMPT": "2", "RANK": "3"})

    events = read(run / "attempts/2/events.rank3.jsonl")
    assert ended.returncode == 1
    assert "RuntimeError: out of luck" in ended.stderr
    assert [event.kind for event in events] == ["start", *["metrics"] * 5, "failure", "final"]


def test_a_users_script_run_by_hand_reports_to_nowhere(tmp_path: Path) -> None:
    ended = run_copied_script(tmp_path, {})

    assert ended.returncode == 1
    assert not list(tmp_path.glob("**/events.*"))


def test_a_record_costs_50_microseconds_or_a_few_plain_lines(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path)
    values = dict.fromkeys(list(wire.METRIC_UNITS)[:16], 1.2345678)

    def plainly(step: int) -> None:
        os.write(plain.fileno(), json.dumps({"step": step, "values": values}).encode())

    def quartile_s(tell: Callable[[int], object], first: int) -> float:
        costs_s = []
        for step in range(first, first + 400):
            started_s = time.perf_counter()
            tell(step)
            costs_s.append(time.perf_counter() - started_s)
        return sorted(costs_s)[len(costs_s) // 4]

    def is_cheap(first: int) -> bool:
        """On a slow machine no more than a few plain lines of the same content cost there."""
        allowed_s = max(50e-6, 4 * quartile_s(plainly, first))
        return quartile_s(lambda step: reporter.metrics(step, values), first) < allowed_s

    with (tmp_path / "plain").open("wb") as plain:
        assert any(is_cheap(first) for first in range(0, 8000, 400))  # a busy neighbour is not our cost


@pytest.mark.parametrize("writer", ["eval.en", "stdout", "stderr", "", "a/b", "e\n", "\udcff", "x" * 65])
def test_a_writer_whose_events_would_not_be_read_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    monkeypatch.delenv("DRAFTYARD_RUN_DIR", raising=False)

    with pytest.raises(ValueError, match="the name of the writer is"):
        Reporter(tmp_path / "1", writer=writer)
    if writer:
        with pytest.raises(ValueError, match="letters, digits, - and _"):
            Reporter.from_environment(writer)
    assert not (tmp_path / "1").exists()
