"""What the benchmark of the screens sees of them, and that it loses nothing of what it has measured."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import pytest

from benchmarks import tui_program
from benchmarks.tui_cost import Costs
from benchmarks.tui_keys import rows_of, worst
from benchmarks.tui_program import cpu_s_of, memory, resident_bytes, seconds_told
from benchmarks.tui_rows import Row, measured
from benchmarks.tui_terminal import MOST_UNANSWERED, Face, Watching

RUNS = [f"live{number:04d}" for number in range(9, -1, -1)]


def painted(cursor: int, *, padding: int = 0) -> bytes:
    """The list with the cursor on that run; `padding`: bytes of styles in each row, as a screen full of colours has them."""
    style = "\x1b[38;2;205;213;223m" * (padding // 19)
    rows = [
        f"\x1b[{row + 3};1H{style}{'▌' if row == cursor else ' '}R  bench/live  {run} running\x1b[0m"
        for row, run in enumerate(RUNS)
    ]
    return "".join(rows).encode()


def test_the_cursor_is_seen_however_much_is_painted_behind_it() -> None:
    """One piece of a terminal may hold a whole screen: what was remembered of its end alone missed a cursor near the top."""
    face = Face()
    face.feed(painted(3))
    whole = painted(0, padding=2000)
    assert len(whole) > 18_000

    face.feed(whole)

    assert face.chosen() == RUNS[0]
    assert [run for run in face.runs() if run] == RUNS


@pytest.mark.parametrize("size", [1, 7, 64])
def test_pieces_cut_anywhere_paint_the_same(size: int) -> None:
    face, whole = Face(), painted(2) + "\x1b[30;1H名前 é\x1b]0;title\x07".encode() + painted(5)

    said = "".join(face.feed(whole[start : start + size]) for start in range(0, len(whole), size))

    assert face.chosen() == RUNS[5]
    assert "名前" in str(face)
    assert "title" not in said
    assert "[" not in said


@contextmanager
def answering(tmp_path: Path, deaf_to: set[int], *, deadline_s: float = 0.3) -> Iterator[Watching]:
    """A program of ten runs whose cursor moves with `j` and `k`, but for the keys of these numbers."""
    ours, theirs = socket.socketpair()
    notes = tmp_path / "notes"
    notes.touch()

    def program() -> None:
        cursor, number = 0, 0
        while keys := theirs.recv(1):
            number += 1
            if number not in deaf_to and keys in b"jk":
                cursor = min(max(cursor + (1 if keys == b"j" else -1), 0), len(RUNS) - 1)
                theirs.sendall(painted(cursor))

    thread = threading.Thread(target=program, daemon=True)
    with closing(ours), closing(theirs), closing(Costs(notes)) as costs:
        watching = Watching(ours.fileno(), os.getpid(), costs, deadline_s=deadline_s)
        theirs.sendall(painted(0))
        watching.shown("▌")
        thread.start()
        yield watching
        ours.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def test_a_key_without_an_answer_is_told_and_the_next_one_typed(tmp_path: Path) -> None:
    with answering(tmp_path, deaf_to={4}) as watching:
        answers = []
        for answer in watching.typed(60):
            answers.append(answer)
            if len(answers) == 6:
                break

    assert [answer.key for answer in answers] == ["j"] * 6
    assert not any(answer.strayed for answer in answers)
    assert len(watching.unanswered) == 1
    assert "key 'j' was not answered" in watching.unanswered[0]
    assert RUNS[3] in watching.unanswered[0]  # what stood on the screen


def test_after_a_few_keys_without_an_answer_nobody_waits_any_more(tmp_path: Path) -> None:
    with answering(tmp_path, deaf_to=set(range(3, 100)), deadline_s=0.05) as watching:
        answers = list(watching.typed(60))

    rows = rows_of(answers, 100, num_unanswered=len(watching.unanswered))

    assert len(answers) == 2
    assert len(watching.unanswered) == MOST_UNANSWERED
    assert not rows[0].holds(8.0)
    assert any(row.what.startswith("key to paint, median of 2 keys") for row in rows)
    assert len(worst(answers)) == 2


def test_a_cursor_that_moves_elsewhere_is_no_answer_like_others(tmp_path: Path) -> None:
    """Rows that change places under it, say: the key was taken, and led to another run than the next."""
    with answering(tmp_path, deaf_to=set()) as watching:
        watching.press("j")
        watching.face.feed(painted(1).replace(b"live0007", b"live0000"))  # as if another one stood below
        answer = watching.press("j")

    assert answer.strayed == f"j from {RUNS[1]} to {RUNS[2]}, not live0000"
    assert [row for row in rows_of([answer], 100, num_unanswered=0) if not row.holds(8.0)]


def test_a_part_that_fails_loses_nothing_of_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> list[Row]:
        raise TimeoutError("key 'j' was not answered")

    rows, failed = measured(
        [("first", lambda: [Row("one", 1.0, "ms")]), ("keys", broken), ("last", lambda: [Row("two", 2.0, "ms")])]
    )

    assert [row.what for row in rows] == ["one", "two"]
    assert failed == ["keys: TimeoutError: key 'j' was not answered"]
    assert "two" in capsys.readouterr().err


def test_a_first_paint_ends_with_the_bytes_that_show_a_run() -> None:
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        began = time.perf_counter()
        watching = Watching(ours.fileno(), os.getpid(), deadline_s=0.2)
        theirs.sendall(b"\x1b[2;1H draftyard  [1:runs] 2:hosts")
        with pytest.raises(TimeoutError, match="no run was painted"):
            watching.painted_run()
        waited = time.perf_counter()
        theirs.sendall(painted(0))
        painted_at = watching.painted_run()

    assert began < waited < painted_at < time.perf_counter()


def test_keys_that_lead_nowhere_measure_no_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tui_program, "KEY_S", 0.0)
    monkeypatch.setattr(tui_program, "LOOK_S", 0.01)

    with answering(tmp_path, deaf_to=set()) as watching:
        monkeypatch.setattr(tui_program, "watching_as_installed", lambda _path: nullcontext(watching))
        with pytest.raises(RuntimeError, match="did not lead to 1:overview, 2:hosts, compare 2 runs"):
            memory(tmp_path, 0.0, nullcontext(), 1000, is_quick=True)


def test_what_another_process_takes_is_counted_by_the_kernel() -> None:
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint(time.process_time(), flush=True)\ninput()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as other:  # type: ignore[call-overload]
        assert other.stdout is not None
        told_s = float(other.stdout.readline())
        counted_s, size = cpu_s_of(other.pid), resident_bytes(other.pid)
        other.communicate("\n")

    assert told_s <= counted_s < told_s + 0.2
    assert 2e6 < size < 200e6


@pytest.mark.parametrize(("span", "seconds"), [("0:00.53", 0.53), ("02:03:04", 7384), ("1-00:00:01", 86_401)])
def test_spans_of_ps_are_read(span: str, seconds: float) -> None:
    assert seconds_told(span) == seconds
