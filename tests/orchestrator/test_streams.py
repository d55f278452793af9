"""Bytes of real files into the store: torn lines, truncation, rotation, a link that breaks, floods of output."""

import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.chaos import Plan, run
from orchestrator.errors import HostError
from orchestrator.follow import streams
from orchestrator.follow.streams import AttemptPlace, Caught, Doubts, catch_up
from orchestrator.observe import EventFile
from orchestrator.shell.local import LocalShell
from orchestrator.store.rows import MetricValue
from orchestrator.store.writes import Store
from remote.report import Reporter
from remote.wire import Event, encode
from tests.orchestrator.runs import RUN, event, started, steps


class Box:
    """An attempt's folder on this machine and the store that follows it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "attempts" / "1"
        self.folder.mkdir(parents=True)
        self.store = Store(folder / "runs.db")
        self.doubts = Doubts()
        started(self.store)

    def files(self) -> list[EventFile]:
        return [EventFile(path.name, path.stat().st_size, path.stat().st_ino) for path in self.folder.iterdir()]

    def catch_up(self, shell: LocalShell | None = None, **more: int) -> Caught:
        place = AttemptPlace(RUN, 1, str(self.folder))
        return catch_up(self.store, shell or LocalShell(), place, self.files(), self.doubts, **more)

    def append(self, content: bytes, name: str = "events.rank0.jsonl") -> Path:
        path = self.folder / name
        with path.open("ab") as stream:
            stream.write(content)
        return path

    def values(self) -> list[MetricValue]:
        return self.store.reader.metric_values(RUN, "loss")

    def steps(self) -> list[int]:
        return [value.step for value in self.values()]

    def told(self, kind: str) -> list[str]:
        return [row.text for row in self.store.reader.events(RUN, kinds=[kind])]


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


def lines(first: int, last: int) -> bytes:
    return b"".join(encode(item) for item in steps(first, last))


# ---------------------------------------------------------------------------------------- events


def test_a_torn_last_line_waits_for_its_end(box: Box) -> None:
    whole = lines(1, 3)
    box.append(whole[:-10])
    assert box.catch_up().num_events == 2
    assert box.catch_up().num_events == 0

    box.append(whole[-10:])

    assert box.catch_up().num_events == 1
    assert box.steps() == [1, 2, 3]


def test_bad_lines_are_counted_kept_and_passed_over(box: Box) -> None:
    broken = encode(event(2, "metrics", step=2, values={"loss": 1.0})).replace(b'"step":2', b'"step":7')
    box.append(lines(1, 1) + broken + b"\xff\xfe not json\n" + lines(2, 3))

    box.catch_up()

    assert box.steps() == [1, 2, 3]
    assert [text.split(": ")[1] for text in box.told("bad_line")] == [
        "crc does not match the line",
        "no crc at the end of the line",
    ]
    assert box.store.reader.streams(RUN)[0].num_bad_lines == 2


def test_a_record_glued_to_a_torn_one_is_saved(box: Box) -> None:
    box.append(lines(1, 1) + lines(2, 2)[:20] + lines(2, 3))

    box.catch_up()

    assert box.steps() == [1, 2, 3]


def test_a_file_cut_in_the_middle_of_a_record_and_written_again_is_read_once(box: Box) -> None:
    path = box.append(lines(1, 50))
    box.catch_up()
    with path.open("r+b") as stream:
        stream.truncate(len(lines(1, 30)) + 17)
    box.catch_up()

    box.append(lines(31, 60)[17:])

    box.catch_up()
    assert box.steps() == list(range(1, 61))
    assert box.told("bad_line") == []


def test_a_file_replaced_by_a_longer_one_is_noticed_by_the_byte_before_the_offset(box: Box) -> None:
    path = box.append(lines(1, 50))
    box.catch_up()

    with path.open("r+b") as stream:  # the same file, other bytes: what lay at the offset is now mid-line
        stream.truncate(0)
        stream.write(
            encode(event(1, "note", text="x" * 37))
            + b"".join(encode(event(seq, "note", text="y" * 99)) for seq in range(2, 60))
        )
    box.catch_up()

    assert box.steps() == list(range(1, 51))
    assert len(box.told("note")) == 9  # 51 to 59; 1 to 50 are known


def test_a_rotated_file_is_read_to_its_end_before_the_new_one(box: Box) -> None:
    path = box.append(lines(1, 10))
    box.catch_up()
    box.append(lines(11, 20))
    path.rename(path.with_name("events.rank0.jsonl.1"))
    box.append(lines(21, 30))
    path.rename(path.with_name("events.rank0.jsonl-20261130"))
    box.append(lines(31, 40))

    box.catch_up()

    assert box.steps() == list(range(1, 41))
    assert box.told("gap") == []


def test_files_rotated_before_the_first_look_are_read_in_the_order_of_their_records(box: Box) -> None:
    for suffix, first in ((".2026-01-02", 1), (".2026-01-01", 11), ("", 21)):
        box.append(lines(first, first + 9), f"events.rank0.jsonl{suffix}")

    box.catch_up()

    assert box.steps() == list(range(1, 31))


def test_records_that_are_really_gone_are_said_after_a_second_look(box: Box) -> None:
    path = box.append(lines(1, 5))
    box.catch_up()
    path.unlink()
    box.append(lines(9, 10))

    first = box.catch_up()
    assert (first.num_events, first.is_complete) == (0, False)
    box.catch_up()

    assert box.steps() == [1, 2, 3, 4, 5, 9, 10]
    assert box.told("gap") == ["records 6 to 8 of rank0 never arrived"]


def test_an_unknown_version_stops_its_stream_and_no_other(box: Box) -> None:
    box.append(
        lines(1, 2) + encode(Event(3, "metrics", 1.0, 1.0, {"step": 3, "values": {"loss": 1}}, version=2)) + lines(4, 4)
    )
    box.append(b"".join(encode(item) for item in steps(1, 3, streak=1.0)), "events.rank1.jsonl")

    box.catch_up()
    box.catch_up()

    assert box.steps() == [1, 2]
    assert len(box.store.reader.metric_values(RUN, "streak")) == 3
    stopped = {row.writer: row.stopped_because for row in box.store.reader.streams(RUN)}
    assert stopped == {"rank0": "wire version 2, this code reads 1: update this program", "rank1": None}


@pytest.mark.slow
def test_reading_needs_memory_for_a_chunk_not_for_the_file(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "CHUNK_BYTES", 8 * 1024)
    box.append(lines(1, 2000))

    caught = box.catch_up()

    assert caught.num_events == 2000
    assert box.steps() == list(range(1, 2001))


def test_a_line_longer_than_a_chunk_is_read_whole(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "CHUNK_BYTES", 1024)
    text = "traceback " * 3000
    box.append(encode(event(1, "failure", failure="x", message="m", traceback=text, facts={})) + lines(2, 3))

    box.catch_up()

    assert box.store.reader.events(RUN, kinds=["failure"])[0].fields["traceback"] == text
    assert box.steps() == [2, 3]


def test_what_a_real_reporter_writes_across_restarts_is_one_stream(box: Box) -> None:
    for life in range(3):
        reporter = Reporter(box.folder)
        for step in range(life * 10 + 1, life * 10 + 11):
            reporter.metrics(step, {"loss": float("nan") if step == 5 else step / 2})
        reporter.close()
        box.append(b'{"v":1,"seq":')  # killed while writing
        box.catch_up()

    assert box.steps() == list(range(1, 31))
    assert repr(box.values()[4].value) == "nan"


class Cut(LocalShell):
    """A link that breaks after so many bytes."""

    def __init__(self, budget: int) -> None:
        super().__init__()
        self.budget = budget

    def read_range(self, remote: str, offset: int, size: int) -> bytes:
        if self.budget <= 0:
            raise HostError("the link was cut")
        content = super().read_range(remote, offset, min(size, self.budget))
        self.budget -= len(content)
        return content


@pytest.mark.slow
@settings(max_examples=8)
@given(st.lists(st.integers(1, 900), min_size=1, max_size=12))
def test_a_link_cut_after_any_number_of_bytes_changes_nothing(budgets: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        box = Box(Path(folder))
        box.append(lines(1, 30))
        box.append(b"hello\n" * 50, "stdout.log")
        for budget in budgets:
            try:
                box.catch_up(Cut(budget))
            except HostError:
                continue
        box.catch_up()

        assert box.steps() == list(range(1, 31))
        assert box.store.logs.read(RUN, 1, "stdout", offset=0, size=1000) == b"hello\n" * 50
        box.store.close()


# ------------------------------------------------------------------------------------------ logs


def test_logs_are_kept_byte_for_byte(box: Box) -> None:
    raw = bytes(range(256)) + b"\r 10%\r 20%\n\x1b[31mred\xff\x00"
    box.append(raw[:100], "stderr.log")
    box.catch_up()
    box.append(raw[100:], "stderr.log")
    box.catch_up()

    assert box.store.logs.read(RUN, 1, "stderr", offset=0, size=10_000) == raw
    assert box.store.logs.size_bytes(RUN, 1, "stdout") == 0


def test_a_write_that_was_never_counted_is_written_again_in_place(box: Box) -> None:
    """The follower died after the file was written and before the database knew."""
    box.append(b"first\n", "stdout.log")
    box.catch_up()
    box.store.logs.write(RUN, 1, "stdout", offset=6, content=b"second\nthi")
    box.append(b"second\nthird\n", "stdout.log")

    box.catch_up()

    assert box.store.logs.read(RUN, 1, "stdout", offset=0, size=100) == b"first\nsecond\nthird\n"


@pytest.mark.parametrize("rotated", ["stdout.log.1", "stdout.log-20261130"])
def test_a_rotated_or_truncated_log_goes_on_where_it_was(box: Box, rotated: str) -> None:
    path = box.append(b"one\n", "stdout.log")
    box.catch_up()
    box.append(b"two\n", "stdout.log")
    path.rename(path.with_name(rotated))
    box.append(b"three\n", "stdout.log")
    box.catch_up()
    path.write_bytes(b"4\n")  # truncated and begun anew
    box.catch_up()

    assert box.store.logs.read(RUN, 1, "stdout", offset=0, size=100) == b"one\ntwo\nthree\n4\n"


def test_a_log_truncated_and_grown_past_the_offset_between_two_looks_is_read_anew(box: Box) -> None:
    """Its size alone tells nothing: the bytes before the offset do."""
    path = box.append(b"old 1\nold 2\n", "stdout.log")
    box.catch_up()

    path.write_bytes(b"".join(b"new %d\n" % number for number in range(50)))
    box.catch_up()
    box.append(b"last\n", "stdout.log")
    box.catch_up()

    kept = box.store.logs.read(RUN, 1, "stdout", offset=0, size=10_000)
    assert kept == b"old 1\nold 2\n" + path.read_bytes()


def test_a_flood_of_output_never_holds_up_the_numbers(box: Box) -> None:
    box.append(b"x" * 100_000, "stdout.log")
    box.append(lines(1, 10))

    caught = box.catch_up(log_bytes=1000)

    assert (caught.num_events, caught.num_log_bytes, caught.is_complete) == (10, 1000, False)
    assert box.catch_up().num_log_bytes == 99_000


def test_a_byte_of_the_log_is_found_by_its_time(tmp_path: Path) -> None:
    now = 100.0
    box = Box(tmp_path)
    box.store._clock = lambda: now
    for text in (b"early\n", b"later\n"):
        box.append(text, "stdout.log")
        box.catch_up()
        now += 60.0

    offset = box.store.reader.log_offset(RUN, 1, "stdout", since_s=130.0)

    assert box.store.logs.read(RUN, 1, "stdout", offset=offset, size=100) == b"later\n"
    assert box.store.reader.log_offset(RUN, 1, "stdout", since_s=0.0) == 0


@pytest.mark.slow
def test_a_log_of_a_quarter_gigabyte_is_spooled_in_bounded_memory(tmp_path: Path) -> None:
    # VmHWM and not ru_maxrss: exec carries the parent's ru_maxrss over, and pytest's may be half a gigabyte.
    code = """
import sys
from pathlib import Path
from tests.orchestrator.test_streams import Box
box = Box(Path(sys.argv[1]))
with (box.folder / "stdout.log").open("wb") as stream:
    stream.truncate(2**28)
caught = box.catch_up(log_bytes=2**62)
assert caught.num_log_bytes == 2**28
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)

    assert int(done.stdout) < 150 * 1024  # KiB, less than the log


# ----------------------------------------------------------------------------------------- chaos


@pytest.mark.slow
def test_chaos_leaves_every_record_once_and_in_order(tmp_path: Path) -> None:
    """The short form; `python -m benchmarks.chaos` is the full one."""
    report = run(
        tmp_path, Plan(records=50_000, cuts=40, kills=8, truncations=20, rotations=5, seed=random.randrange(2**31))
    )

    assert (report.records, report.cuts, report.kills) == (50_000, 40, 8)


# ----------------------------------------------------------------------------------------- names


def test_a_file_of_a_name_that_no_reporter_takes_is_passed_over_and_named(box: Box) -> None:
    odd = ["events.eval.en.jsonl", "events.stdout.jsonl", os.fsdecode(b"events.\xff.jsonl")]
    box.append(lines(1, 2))
    box.append(b"hello\n", "stdout.log")
    for name in odd:
        box.append(lines(1, 3), name)

    box.catch_up()

    assert not box.catch_up().num_log_bytes
    assert {row.writer for row in box.store.reader.streams(RUN)} == {"rank0"}
    assert box.store.logs.size_bytes(RUN, 1, "stdout") == 6
    assert streams.unread_names(box.files()) == sorted(odd)
