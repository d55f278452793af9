"""`logs`: what is printed of a run's two outputs, whole, in order and told apart; and that the quick way is the plain one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import cli
from orchestrator.actions import log_text, logs
from orchestrator.actions.log_text import LogLine, clean_lines, clean_texts
from orchestrator.follow.lease import lease
from orchestrator.redact import redact, redact_lines
from orchestrator.store.rows import State
from orchestrator.store.writes import Store
from orchestrator.verbs.logs import SILENT_S
from tests.orchestrator.runs import RUN, started

NASTY = [
    b"\n", b"\r", b"\r\n", b"\t", b"\x00", b"\x07", b"\x1b", b"\x1b[", b"\x1b[0m", b"\x1b[31;1m", b"\x1b[A", b"\x1b[12A",
    b"\x1b[K", b"\x1b[1K", b"\x1b[2K", b"\x1b[3K", b"\x1b[2J", b"\x1b]0;title\x07", b"\x1b]8;;x\x1b\\", b"\x1bP", b"\xff", b"\xe2\x96",
    "█ – é\u202e\u2028".encode(), b"50%|##", b"RuntimeError: boom", b"Err", b"or: x", b"Warning", b"FATAL", b"aFATAL", b"FATALb",
    b"CUDA out of memory", b"Killed", b"[ERROR]", b"Traceback (most recent call last)", b" ", b"step 1 loss 2.5", b"x" * 1999,
    b"token=", b"secret: ", b"hf_AbCdEfGhIjKl", b"password\n", b"=abcdefgh1", b"https://u:pw@h", b"Bearer ", b"abcdef0123456789",
    "\u212aey=abcdefgh1".encode(), "\u0130".encode(),
]  # fmt: skip
PATIENCE_S = 90.0
ROOT = Path(__file__).resolve().parents[2]
LOGS = st.lists(st.sampled_from(NASTY), max_size=24).map(b"".join)


def plainly(raw: bytes) -> list[str]:
    """The slow way: every line as a row of a terminal that is moved token by token."""
    rows: list[str] = []
    row = 0
    for piece in raw.removesuffix(b"\n").split(b"\n") if raw else []:
        text = piece.decode("utf-8", errors="replace").rstrip("\r")
        row = _typed(rows, text, row) + 1 if "\x1b" in text or "\r" in text else _set(rows, row, text) + 1
    return rows


def _set(rows: list[str], row: int, text: str) -> int:
    rows[row : row + 1] = [_visible(text)]
    return row


def _typed(rows: list[str], text: str, row: int) -> int:
    current, is_back = "", False
    for token in re.findall(f"{log_text._SEQUENCE.pattern}|[^\x1b\r\n]+", text):
        up = re.fullmatch(r"\x1b\[(\d*)A", token)
        if token == "\r":
            if _is_trouble(current):
                row, current = _set(rows, row, current) + 1, ""
            is_back = True
        elif token in ("\x1b[K", "\x1b[0K", "\x1b[1K", "\x1b[2K"):
            current = "" if token == "\x1b[2K" or is_back == (token != "\x1b[1K") else current
        elif up:
            if current.strip():
                _set(rows, row, current)
            row, current, is_back = max(0, row - int(up[1] or 1)), "", False
        elif not token.startswith("\x1b"):
            keeps = current[len(token) :] if not _is_trouble(token) else ""
            current, is_back = (token + keeps if is_back else current + token), False
    return _set(rows, row, current.rstrip()) if current or row >= len(rows) else row


def _is_trouble(text: str) -> bool:
    first = r"^Traceback \(most recent call last\)|^[\w.]*(Error|Exception)\b|^\s*Killed\b|^\s*[\w.]*Warning\b"
    return bool(
        re.search(first + r"|CUDA out of memory|\bFATAL\b|Segmentation fault|^\s*\[?(ERROR|WARNING|CRITICAL)\b", text)
    )


def _visible(text: str) -> str:
    hidden = len(text) - log_text.LONGEST_LINE
    safe = text[: log_text.LONGEST_LINE].rstrip("\r").expandtabs(4)
    safe = "".join("\ufffd" if log_text._UNSAFE.match(mark) and mark not in "\t\n\r" else mark for mark in safe)
    return re.sub("[\t\n\r]", " ", safe) + (f"…(+{hidden:,})" if hidden > 0 else "")


@given(LOGS)
def test_the_quick_way_shows_what_the_plain_one_does(raw: bytes) -> None:
    assert clean_texts(raw) == plainly(raw)
    assert [line.text for line in clean_lines(raw)] == plainly(raw)


@given(st.binary(max_size=200))
def test_of_any_bytes_too(raw: bytes) -> None:
    assert clean_texts(raw) == plainly(raw)


@given(LOGS)
def test_hiding_secrets_in_many_lines_is_hiding_them_in_each(raw: bytes) -> None:
    texts = clean_texts(raw)

    assert redact_lines(texts) == [redact(text) for text in texts]


@given(LOGS.filter(lambda raw: not re.search(rb"\x1b\[\d*A", raw)), st.lists(st.integers(1, 60), max_size=12))
def test_wherever_a_log_is_cut_on_the_way_the_same_lines_come(raw: bytes, sizes: list[int]) -> None:
    log = _Cut(raw, sizes)
    output = logs._Output(log, RUN, 1, "stdout", 0)  # type: ignore[arg-type]  # the one method it asks for

    found = [text for _ in range(len(sizes) + 2) for one in output.passages(None, is_last=False) for text in one.texts]
    found += [text for one in output.passages(None, is_last=True) for text in one.texts]

    assert found == [redact(text) for text in plainly(raw)]


class _Cut:
    """A log that grows by these sizes, then to its end; every read is a short one."""

    def __init__(self, raw: bytes, sizes: list[int]) -> None:
        self._raw, self._sizes, self._there = raw, list(sizes), 0

    def read(self, *_: object, offset: int, size: int) -> bytes:
        if offset >= self._there:  # read up to what was there: this time nothing, next time there is more
            self._there += self._sizes.pop(0) if self._sizes else len(self._raw)
            return b""
        return self._raw[offset : min(self._there, offset + size, offset + 7)]


def test_ordinary_lines_are_cleaned_at_fifty_megabytes_a_second() -> None:
    """Said as a multiple of what splitting the bytes costs, so that it holds on any machine: that runs at 1 GB/s."""
    raw = b"".join(
        b"step %d loss 2.%04d lr 1.0e-4 tokens 8192 grad_norm 0.25 26.01 Ktok/s\n" % (i, i % 999) for i in range(14_000)
    )

    cleaning = min(_seconds(lambda: redact_lines(clean_texts(raw))) for _ in range(3))
    splitting = min(_seconds(lambda: [piece.decode() for piece in raw.split(b"\n")]) for _ in range(3))

    assert cleaning < 25 * splitting


def _seconds(work: object) -> float:
    began = time.process_time()
    work()  # type: ignore[operator]
    return time.process_time() - began


# The verb --------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A project with one run that is under way."""
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DRAFTYARD_DB", raising=False)
    opened = Store(tmp_path / "runs.db")
    started(opened, RUN)
    opened.set_state(RUN, State.SUCCEEDED, evidence="said so")
    return opened


def _printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["logs", RUN, *words])
    assert ended.value.code == 0
    return capsys.readouterr().out.splitlines()


def _says(store: Store, stdout: str, stderr: str) -> None:
    for name, text in (("stdout", stdout), ("stderr", stderr)):
        store.logs.write(RUN, 1, name, offset=0, content=text.encode())


def test_each_output_has_its_heading_as_tail_has_it(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    _says(store, "a\nb\nc\n", "d\ne\nf\n")

    assert _printed(capsys, "-n", "2") == ["==> stdout <==", "b", "c", "==> stderr <==", "e", "f"]
    assert _printed(capsys, "-f", "-n", "1")[:4] == ["==> stdout <==", "c", "==> stderr <==", "f"]
    assert _printed(capsys, "-n", "1", "--stream", "stderr") == ["f"]


def test_stdout_alone_has_no_heading_and_stderr_alone_has_one(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    _says(store, "a\nb\n", "")
    assert _printed(capsys) == ["a", "b"]

    _says(store, "", "d\n")
    assert _printed(capsys) == ["==> stderr <==", "d"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), f"attempt 2 of run {RUN} has printed nothing yet; it is setting up; --attempt 1 shows the one before"),
        (("--stream", "stderr"), f"attempt 2 of run {RUN} has printed nothing to stderr yet; it is setting up"),
        (("--attempt", "1"), ""),
        (("-n", "0", "--attempt", "1"), ""),
    ],
)
def test_an_attempt_that_has_printed_nothing_is_said(
    store: Store, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    _says(store, "a\n", "")
    store.set_up(RUN, store.new_attempt(RUN))

    with pytest.raises(SystemExit):
        cli.main(["logs", RUN, *words])

    assert capsys.readouterr().err.strip() == said
    if words:
        return
    store.set_state(RUN, State.FAILED, evidence="x")
    with pytest.raises(SystemExit):
        cli.main(["logs", RUN])
    told = f"attempt 2 of run {RUN} has printed nothing; --attempt 1 shows the one before"
    assert capsys.readouterr().err.strip() == told


@pytest.mark.slow
def test_whoever_follows_a_resumed_run_is_told_what_it_waits_for_and_then_reads_on(store: Store) -> None:
    """The first attempt's output is not printed again, and a quarter of an hour of loading looked like a fault."""
    _says(store, "a\n", "")
    store.set_up(RUN, store.new_attempt(RUN))
    with lease(store.path), _reading(RUN, "-f") as reader:
        assert reader.stderr is not None
        said = reader.stderr.readline()

        store.logs.write(RUN, 2, "stdout", offset=0, content=b"b\n")
        store.set_state(RUN, State.SUCCEEDED, evidence="said so")
        out, err = reader.communicate(timeout=PATIENCE_S)

    assert said == f"attempt 2 of run {RUN} has printed nothing yet; it is setting up; waiting for its first line\n"
    assert (out, err) == ("b\n", f"run {RUN} succeeded: said so\n")


@pytest.mark.slow
def test_whoever_follows_a_run_that_prints_is_told_no_such_thing(store: Store) -> None:
    store.set_up(RUN, store.new_attempt(RUN))
    store.logs.write(RUN, 2, "stdout", offset=0, content=b"b\n")
    with lease(store.path), _reading(RUN, "-f", "-n", "0") as reader:
        time.sleep(3 * SILENT_S)
        store.set_state(RUN, State.SUCCEEDED, evidence="said so")
        out, err = reader.communicate(timeout=PATIENCE_S)

    assert (out, err) == ("", f"run {RUN} succeeded: said so\n")


def _reading(*words: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "orchestrator.cli", "logs", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("-f",)])
def test_a_log_of_more_than_one_reading_comes_whole(
    store: Store, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    said = [f"line {number} of some that are many" for number in range(60_000)]
    _says(store, "\n".join(said), "")

    assert _printed(capsys, *words)[: len(said)] == said


@pytest.mark.slow
def test_a_bar_that_never_ends_its_line_is_held_in_bounded_memory(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(logs, "LONGEST_TORN_BYTES", 8000)
    states = [f"{number:5d}/30000 of it" for number in range(30_000)]
    _says(store, "\r".join(states), "")

    shown = _printed(capsys)

    assert shown[-1] == states[-1]
    assert 1 < len(shown) < 80
    assert set(shown) <= set(states)


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("-f",)])
@pytest.mark.parametrize("mark", ["[rank{}]: ", "rank {} (drafter {}): "], ids=["torch's", "the trainer's"])
def test_the_newest_lines_of_a_rank_are_as_many_as_asked(
    store: Store, capsys: pytest.CaptureFixture[str], mark: str, words: tuple[str, ...]
) -> None:
    _says(store, "".join(f"{mark.format(number % 2, number % 2)}step {number}\n" for number in range(100)), "")

    first = mark.format(0, 0)
    assert _printed(capsys, "-n", "2", "--rank", "0", *words)[:2] == [f"{first}step 96", f"{first}step 98"]


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("-f",)])
def test_the_newest_lines_are_found_however_far_back_they_begin(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr(logs, "LONGEST_REACH_BYTES", 5000)
    _says(store, "a\nb\nc" + " " * 9000 + "d\ne\n", "")

    assert [line[:1] for line in _printed(capsys, "-n", "3", *words)][:3] == ["b", "c", "e"]


# A process of its own, because the memory of this one holds what other tests have left.
READ = """
import sys
from orchestrator import cli
try:
    cli.main(["logs", *sys.argv[1:]])
finally:
    print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
def test_five_gigabytes_are_printed_from_either_end_in_bounded_memory(store: Store) -> None:
    many = "".join(f"line {number:06d}\n" for number in range(20_000))
    _says(store, many, "")
    path = store.logs.path(RUN, 1, "stdout")
    with path.open("r+b") as log:  # sparse: costs no disk
        log.truncate(5 * 1024**3)
        log.seek(0, os.SEEK_END)
        log.write(b"\n" + many.encode() + b"the very end\n")
    command = [sys.executable, "-c", READ, RUN]

    newest = [
        subprocess.run([*command, "-n", "2", *words], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
        for words in ((), ("-f",))
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as reading:
        assert reading.stdout is not None
        assert reading.stderr is not None
        oldest = [reading.stdout.readline() for _ in range(2)]
        reading.stdout.close()  # as `| head -2` does; the rest of the 5 GiB is not read
        said = reading.stderr.read()
        reading.wait(PATIENCE_S)

    for done in newest:
        *shown, peak_kib = done.stdout.splitlines()
        assert shown == ["line 019999", "the very end"]
        assert int(peak_kib) < 200 * 1024
    assert oldest == ["line 000000\n", "line 000001\n"]
    assert said == ""


def test_a_line_keeps_where_it_begins() -> None:
    assert clean_lines(b"a\n\x1b[1mb\x1b[0m\nc\x1b[A\xff\n", 100) == [
        LogLine(100, "a"), LogLine(102, "\ufffd"), LogLine(112, "c"),
    ]  # fmt: skip
