"""What every verb says when runs.db cannot be used: one line with the file and what to do, exit 1, nothing started."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.errors import StoreError
from orchestrator.store.faults import told_plainly
from orchestrator.store.reads import Reader
from orchestrator.store.rows import State
from orchestrator.store.writes import Store
from tests.orchestrator.runs import RUN, batch, started, steps
from tests.orchestrator.yard import Yard

pytestmark = pytest.mark.slow  # every verb on a broken database

READS = (
    ["ls"],
    ["show", RUN],
    ["logs", RUN],
    ["metrics", RUN],
    ["compare", RUN, RUN],
    ["diff", RUN, RUN],
    ["evidence"],
    ["hosts"],
    ["wait", RUN],
    ["pull", RUN],
    ["evaluate", RUN],
    ["resume", RUN],
    ["export", RUN],
    ["export", RUN, "--metrics", "jsonl"],
    ["plot", RUN],
    ["reap"],
    ["watch", RUN, "--once"],
)
WRITES = (
    ["tag", RUN, "best"],
    ["note", RUN, "a word"],
    ["mark", RUN, "failed", "a test"],
    ["rm", RUN],
    ["restore", RUN],
    ["purge", RUN, "--yes"],
    ["doctor"],
    ["doctor", "local"],
    ["stop", RUN, "--no-wait"],
    ["launch", "tiny", "--force", "a test"],
    ["smoke", "tiny", "--again"],
    ["follow"],
)


def _filled(yard: Yard) -> Path:
    with Store(yard.root / "runs.db") as store:
        started(store)
        store.set_state(RUN, State.FAILED, evidence="x")
    return yard.root / "runs.db"


def _expect_one_line(yard: Yard, words: list[str], *what: str) -> None:
    assert yard.run(*words) == 1, f"{words}: {yard.out}{yard.err}"
    # doctor goes on with the rest, and tells the database among it
    told, start = (yard.out, "FAIL database") if words[0] == "doctor" else (yard.err, "error: ")
    line = [line.replace("  ->  ", "; ") for line in told.splitlines() if line.startswith(start)]
    if words == ["doctor"]:  # here, where it may yet be read, and on the host local
        line = line[-1:]
    assert len(line) == 1, f"{words}: {told}"
    assert "Traceback" not in yard.err + yard.out
    for part in (str(yard.root / "runs.db"), *what):
        assert part in line[0], f"{words}: {line[0]}"
    if words[0] not in ("doctor", "follow", "watch"):
        assert yard.json(*words, code=1)["error"]["reason"] == "store", words


def _nothing_was_started(yard: Yard) -> bool:
    return not list((yard.root / "data").rglob("runs/*"))


@pytest.fixture
def broken(yard: Yard) -> Iterator[Yard]:
    """Whatever is done to its database is taken away before the yard is cleared up."""
    yield yard
    for path in yard.root.glob("runs.db*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.slow
def test_a_folder_in_place_of_the_database(broken: Yard) -> None:
    yard = broken
    (yard.root / "runs.db").mkdir()

    for words in (*READS, *WRITES):
        assert yard.run(*words) == 2, f"{words}: {yard.out}{yard.err}"
        assert yard.out == "", words
        told = "runs.db is a folder; a database file was expected: --db or DRAFTYARD_DB names another"
        assert yard.err == f"error: {yard.root}/{told}\n", words
    assert _nothing_was_started(yard)


def test_a_pipe_in_place_of_the_database_is_not_waited_for(broken: Yard) -> None:
    os.mkfifo(broken.root / "runs.db")

    for words in (["ls"], ["show", RUN], ["note", RUN, "a word"], ["doctor"], ["launch", "tiny"], ["follow"]):
        assert broken.run(*words) == 2, f"{words}: {broken.out}{broken.err}"
        assert "runs.db is a pipe; a database file was expected" in broken.err


@pytest.mark.slow
def test_a_database_that_another_keeps_locked_keeps_its_reason(broken: Yard) -> None:
    """Waited for ten seconds; it used to be translated twice, and its reason was lost on the way."""
    path = _filled(broken)
    other = sqlite3.connect(path)
    other.execute("PRAGMA journal_mode = DELETE")  # without the write-ahead log a writer keeps readers out
    other.execute("BEGIN EXCLUSIVE")
    try:
        told = broken.json("ls", code=1)["error"]
    finally:
        other.rollback()
        other.close()

    assert told["reason"] == "store"
    assert told["message"].startswith(f"{path}: database is locked; another process has kept it locked for too long")
    assert told["message"].count(str(path.name)) == 2  # the file, and how to find who holds it


@pytest.mark.slow
def test_a_damaged_database(broken: Yard) -> None:
    yard = broken
    path = _filled(yard)
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 4096))

    for words in (*READS, *WRITES):
        _expect_one_line(yard, words, f"it is damaged: save what can be read (sqlite3 '{path}' .recover)")
    assert _nothing_was_started(yard)


@pytest.fixture
def read_only(yard: Yard) -> Iterator[Callable[[], None]]:
    """Makes the project's folder read-only; root is stopped by a mount alone."""
    root = yard.root
    made = False

    def close() -> None:
        nonlocal made
        if os.getuid() != 0:
            root.chmod(0o555)
            (root / "runs.db").chmod(0o444)
            return
        steps = (["mount", "--bind", str(root), str(root)], ["mount", "-o", "remount,ro,bind", str(root)])
        made = subprocess.run(steps[0], capture_output=True, check=False).returncode == 0
        if not made or subprocess.run(steps[1], capture_output=True, check=False).returncode:
            pytest.skip("a read-only folder needs a mount here")
        os.chdir(root)

    yield close
    if made:
        os.chdir("/")
        subprocess.run(["umount", "-l", str(root)], check=True)
        os.chdir(root)
    root.chmod(0o755)
    (root / "runs.db").chmod(0o644)


@pytest.mark.slow
def test_a_read_only_database(yard: Yard, read_only: Callable[[], None]) -> None:
    _filled(yard)
    read_only()

    for words in WRITES:
        _expect_one_line(yard, words)
    assert _nothing_was_started(yard)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, so that it can be filled."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def _fill(folder: Path) -> None:
    """Until not one more block fits."""
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as stream:
        while True:
            stream.write(b"x" * 4096)


# What only reads, with what it says of the run: as ever, where nothing at all can be written beside the database.
SAY = (
    (["ls"], "failed"),
    (["show", RUN], "loss"),
    (["logs", RUN], "a word of the job"),
    (["metrics", RUN, "loss"], "2"),
    (["export", RUN, "--metrics", "jsonl"], "loss"),
    (["compare", RUN, RUN], RUN),
    (["evidence"], ""),
    (["hosts"], "local"),
    (["watch", RUN, "--once"], "smollm2/v6"),
)


def _reads_as_ever(yard: Yard, db: Path) -> None:
    for words, said in SAY:
        assert yard.run(*words, "--db", str(db)) == 0, f"{words}: {yard.err}"
        assert said in yard.out, words
    assert yard.run("wait", RUN, "--db", str(db)) == 10


def _filled_with_words(db: Path) -> None:
    with Store(db) as store:
        started(store)
        store.ingest(batch(steps(1, 3, loss=2.0)))
        store.logs.write(RUN, 1, "stdout", offset=0, content=b"a word of the job\n")
        store.set_state(RUN, State.FAILED, evidence="x")


@pytest.mark.slow
def test_what_is_on_a_full_disk_can_be_read(yard: Yard, small_disk: Path) -> None:
    """SQLite's shared memory is a file beside the database: not even a reader could be opened."""
    db = small_disk / "runs.db"
    _filled_with_words(db)
    _fill(small_disk)

    _reads_as_ever(yard, db)

    assert yard.run("note", RUN, "a word", "--db", str(db)) == 1
    assert "its disk is full: make room there" in yard.err


@pytest.mark.slow
def test_what_is_in_a_read_only_folder_can_be_read(yard: Yard, read_only: Callable[[], None]) -> None:
    _filled_with_words(yard.root / "runs.db")
    read_only()

    _reads_as_ever(yard, yard.root / "runs.db")


@pytest.mark.slow
def test_a_reader_that_was_opened_on_a_full_disk_sees_what_is_written_later(small_disk: Path) -> None:
    _filled_with_words(small_disk / "runs.db")
    _fill(small_disk)
    with Reader(small_disk / "runs.db") as reader:
        before = reader.data_version()
        assert reader.run(RUN).note == ""
        (small_disk / "filler").unlink()

        with Store(small_disk / "runs.db") as store:
            store.note(RUN, "a word")
            assert reader.data_version() != before
            assert reader.run(RUN).note == "a word"
        assert reader.run(RUN).note == "a word"


@pytest.mark.slow
def test_a_reader_that_was_opened_on_a_full_disk_sees_what_is_written_later_without_asking_for_it(
    small_disk: Path,
) -> None:
    """`logs -f` asks for the run alone, again and again: it waited for an end that had long been written."""
    _filled_with_words(small_disk / "runs.db")
    _fill(small_disk)
    with Reader(small_disk / "runs.db") as reader:
        assert reader.run(RUN).note == ""
        (small_disk / "filler").unlink()

        with Store(small_disk / "runs.db") as store:
            store.note(RUN, "a word")
            assert reader.run(RUN).note == "a word"
        assert reader.run(RUN).note == "a word"


@pytest.mark.slow
def test_a_reader_that_could_not_be_opened_anew_answers_once_it_can(small_disk: Path) -> None:
    _filled_with_words(small_disk / "runs.db")
    _fill(small_disk)
    log = small_disk / "runs.db-wal"
    with Reader(small_disk / "runs.db") as reader:
        before = reader.data_version()
        (small_disk / "filler").unlink()
        log.write_bytes(b"x" * 4096)
        _fill(small_disk)
        for _ in range(2):
            with pytest.raises(StoreError, match="its disk is full: make room there"):
                reader.data_version()
            with pytest.raises(StoreError, match="its disk is full: make room there"):
                reader.run(RUN)

        (small_disk / "filler").unlink()
        log.unlink()

        assert reader.run(RUN).state == State.FAILED
        with Store(small_disk / "runs.db") as store:
            store.note(RUN, "a word")
        assert reader.data_version() != before
        assert reader.run(RUN).note == "a word"


@pytest.mark.slow
def test_words_that_only_the_log_beside_the_database_has_are_never_passed_over(
    small_disk: Path, tmp_path: Path
) -> None:
    """Its writer died, and its shared memory has gone: rather an error than an older truth."""
    store = Store(tmp_path / "runs.db")
    started(store)
    for name in ("runs.db", "runs.db-wal"):
        shutil.copy(tmp_path / name, small_disk)
    store.close()
    assert (small_disk / "runs.db-wal").stat().st_size > 0
    _fill(small_disk)

    with pytest.raises(StoreError, match="its disk is full: make room there"):
        Reader(small_disk / "runs.db")


@pytest.mark.slow
def test_newest_words_in_a_read_only_folder_are_said_to_lie_beside_the_database(
    yard: Yard, read_only: Callable[[], None], tmp_path: Path
) -> None:
    """Its writer died, and nobody may make the shared memory there: the rights of the file are not what to look at."""
    store = Store(tmp_path / "live.db")
    started(store)
    for ending in ("", "-wal"):
        shutil.copy(tmp_path / f"live.db{ending}", yard.root / f"runs.db{ending}")
    store.close()
    read_only()

    for words in (*READS, ["note", RUN, "a word"], ["stop", RUN, "--no-wait"]):
        told = (
            f"its newest words lie in {yard.root}/runs.db-wal, which nobody can read in a folder that cannot be written"
        )
        _expect_one_line(yard, words, told, f"cp '{yard.root}/runs.db' '{yard.root}/runs.db-wal' FOLDER")


@pytest.mark.slow
def test_a_database_that_cannot_be_written_is_one_fault_whatever_lies_beside_it(
    yard: Yard, read_only: Callable[[], None]
) -> None:
    _filled(yard)
    read_only()

    for words in (["stop", RUN, "--no-wait"], ["note", RUN, "a word"]):
        _expect_one_line(yard, words, "it cannot be written: let this user write the file and its folder")


def test_a_refused_query_is_not_a_damaged_file(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "runs.db")
    with pytest.raises(StoreError, match="a shorter filter may do") as refused, told_plainly(tmp_path / "runs.db"):
        connection.execute("SELECT 'a' GLOB ?", ("*" * 60_000,))
    with pytest.raises(StoreError, match="not written by this program"), told_plainly(tmp_path / "runs.db"):
        connection.execute("SELECT * FROM runs")
    connection.close()

    assert "damaged" not in str(refused.value)
