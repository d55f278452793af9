"""The receiving end: what it believes of content that lies there already, and clients that fall silent or come together."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.parcel import header
from remote import trees
from remote.arriving import Arriving, Silence
from remote.manifest import MARKER, read_marker
from remote.receive import build, main, receive_large, want
from remote.trees import Store, to_be_written

CONTENT = b"weights " * 1000
SHA = hashlib.sha256(CONTENT).hexdigest()
ENTRIES = [["weights.bin", 0o644, len(CONTENT), SHA, None]]
HEADER: dict[str, Any] = {"hash": "t" * 64, "entries": ENTRIES}


def test_content_that_arrived_whole_is_hashed_before_it_is_put_into_a_tree(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (store.parts / SHA).write_bytes(bytes(len(CONTENT)))  # its length survived, its bytes did not

    answer = want(store, HEADER)

    assert answer["whole"] is False
    assert answer["missing"] == [[SHA, 0]]
    assert not (store.parts / SHA).exists()
    stream = io.BytesIO(zlib.compress(CONTENT))
    assert build(store, {**HEADER, "pack": [[SHA, len(CONTENT)]], "large": []}, stream)["whole"]
    assert (store.trees / HEADER["hash"] / "weights.bin").read_bytes() == CONTENT


def test_a_spoiled_tree_is_young_from_when_it_was_set_aside(tmp_path: Path) -> None:
    store = Store(tmp_path)
    body = {**HEADER, "pack": [[SHA, len(CONTENT)]], "large": []}
    tree = store.trees / HEADER["hash"]
    build(store, body, io.BytesIO(zlib.compress(CONTENT)))
    (tree / "weights.bin").write_bytes(b"of a job")
    os.utime(tree, (1e9, 1e9))

    assert build(store, body, io.BytesIO(zlib.compress(CONTENT)))["whole"]

    (aside,) = store.trees.glob(".spoiled-*")
    assert (aside / "weights.bin").read_bytes() == b"of a job"
    assert aside.stat().st_mtime > 1e9 + 1


def test_what_is_still_to_be_written_is_all_but_what_lies_among_the_parts(tmp_path: Path) -> None:
    store, other = Store(tmp_path), hashlib.sha256(b"other").hexdigest()
    build(store, {**HEADER, "pack": [[SHA, len(CONTENT)]], "large": []}, io.BytesIO(zlib.compress(CONTENT)))
    entries = [
        ["again", 0o644, len(CONTENT), SHA, None],  # lies in another tree, and is copied
        ["first", 0o644, 5, other, None],
        ["second", 0o644, 5, other, None],
        ["link", 0o644, 0, "", "first"],
    ]

    assert to_be_written(tmp_path, entries) == len(CONTENT) + 10
    store.part(other).write_bytes(b"oth")
    assert to_be_written(tmp_path, entries) == len(CONTENT) + 7
    store.part(other).rename(store.parts / other)
    (store.parts / other).write_bytes(b"other")
    assert to_be_written(tmp_path, entries) == len(CONTENT) + 5
    assert to_be_written(tmp_path / "absent", entries) == len(CONTENT) + 10


def test_a_tree_whose_folders_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    store, deep = Store(tmp_path), "/".join(["d" * 200] * 25)

    with pytest.raises(OSError, match="too long"):
        build(store, {"hash": "t" * 64, "entries": [["a/b", *ENTRIES[0][1:]], [f"{deep}/f", *ENTRIES[0][1:]]]}, None)

    assert [path.name for path in store.trees.iterdir()] == [".parts"]


def test_a_file_of_a_tree_that_became_a_pipe_is_made_anew_and_not_waited_for(tmp_path: Path) -> None:
    store, body = Store(tmp_path), {**HEADER, "pack": [[SHA, len(CONTENT)]], "large": []}
    build(store, body, io.BytesIO(zlib.compress(CONTENT)))
    place = store.trees / HEADER["hash"] / "weights.bin"
    time.sleep(0.02)  # a tick of the file system's clock
    place.unlink()
    os.mkfifo(place)

    assert want(store, HEADER)["missing"] == [[SHA, 0]]
    assert build(store, body, io.BytesIO(zlib.compress(CONTENT)))["whole"]
    assert place.read_bytes() == CONTENT


def test_what_stays_free_of_a_disk_is_a_twentieth_and_not_over_a_quarter_gibibyte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size, kept in ((8 * 1024**2, 8 * 1024**2 // 20), (10 * 1024**4, 256 * 1024**2)):
        found = SimpleNamespace(
            f_frsize=4096, f_blocks=size // 4096, f_bavail=100, f_files=1000, f_favail=60, f_bsize=4096
        )
        monkeypatch.setattr(trees.os, "statvfs", lambda _, found=found: found)
        sums = trees.disk(tmp_path, ENTRIES)
        assert (sums["reserve_bytes"], sums["free_bytes"], sums["free_files"]) == (kept // 4096 * 4096, 409_600, 10)
        assert sums["to_come_bytes"] == 8192  # in whole blocks
    monkeypatch.undo()
    Store(tmp_path).need_room(ENTRIES)


def test_reading_takes_no_new_memory_from_the_system() -> None:
    """Room for a MiB, of which a sixteenth is filled, was a third of a receiver's work."""
    read, write = os.pipe()
    arriving = Arriving(read)

    def faults_of(number: int) -> int:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        for _ in range(number):
            os.write(write, bytes(4096))
            arriving.read1(1024**2)
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    faults_of(20)
    assert faults_of(200) < 100
    os.close(read)
    os.close(write)


def test_a_pipe_takes_a_mebibyte_while_the_receiver_does_something_else() -> None:
    read, write = os.pipe()
    Arriving(read)
    os.set_blocking(write, False)

    assert os.write(write, bytes(1024**2)) == 1024**2
    os.close(read)
    os.close(write)


def test_a_beginning_from_before_the_last_start_of_the_machine_travels_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.part(SHA).write_bytes(bytes(4000))
    assert store.missing(ENTRIES) == [[SHA, 4000]]

    store.part(SHA).rename(store.parts / f"{SHA}.0000-an-earlier-boot.part")

    assert store.missing(ENTRIES) == [[SHA, 0]]
    receive_large(store, SHA, len(CONTENT), 0, io.BytesIO(CONTENT).read)
    assert (store.parts / SHA).read_bytes() == CONTENT


# Clients that fall silent, or come together ----------------------------------------------------------

LARGE = os.urandom(2_000_000)
LARGE_SHA = hashlib.sha256(LARGE).hexdigest()
SENT = 32_000  # all of it fits into a pipe at once, so that no pause of this process is a silence
ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def half_sent(work_dir: Path, tree: str, *, quiet_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """A receiver whose client sent the beginning of a large content and then nothing more, its connection still open."""
    question = header(hash=tree, entries=[["large", 0o644, len(LARGE), LARGE_SHA, None]])
    parcel = header(pack=[], large=[[LARGE_SHA, len(LARGE), 0]]) + zlib.compress(b"")
    script = f"from remote.receive import main; main('make', {str(work_dir)!r}, quiet_s={quiet_s})"
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "SSH_CONNECTION": "10.1.2.3 50000 10.0.0.2 22"},
    ) as receiver:
        assert receiver.stdin is not None
        receiver.stdin.write(question + parcel + LARGE[:SENT])
        receiver.stdin.flush()
        try:
            yield receiver
        finally:
            receiver.kill()


def until_locked(store: Store) -> None:
    for _ in range(2000):
        if store.who_sends([[LARGE_SHA, 0]]):
            return
        time.sleep(0.01)
    raise AssertionError("the receiver never began")


@pytest.mark.slow
def test_a_receiver_whose_client_fell_silent_ends_by_itself_and_gives_its_lock_back(tmp_path: Path) -> None:
    with half_sent(tmp_path, "t" * 64, quiet_s=0.2) as receiver:
        assert receiver.stdout is not None
        wanted, answer = json.loads(receiver.stdout.readline()), json.loads(receiver.stdout.readline())
        assert receiver.wait(30) == 0  # its input is still open

    assert wanted["missing"] == [[LARGE_SHA, 0]]
    assert answer == {"error": "nothing came for 0.2 s; the client is gone"}
    part = Store(tmp_path).part(LARGE_SHA)
    assert part.read_bytes() == LARGE[:SENT]  # the next client goes on here
    with part.open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_bytes_that_come_slowly_are_no_silence() -> None:
    read, write = os.pipe()

    def send() -> None:
        for _ in range(5):
            time.sleep(0.02)
            os.write(write, b"x")
        os.close(write)

    thread = threading.Thread(target=send)
    thread.start()
    content = Arriving(read, quiet_s=20).read(100)
    thread.join()
    os.close(read)

    assert content == b"xxxxx"


def test_nothing_at_all_is_a_silence() -> None:
    read, write = os.pipe()

    with pytest.raises(Silence):
        Arriving(read, quiet_s=0.01).read(1)
    os.close(read)
    os.close(write)


def test_another_client_is_told_who_sends_before_it_sends_anything_itself(tmp_path: Path) -> None:
    entries = [["large", 0o644, len(LARGE), LARGE_SHA, None]]
    with half_sent(tmp_path, "t" * 64, quiet_s=60) as receiver:
        until_locked(Store(tmp_path))

        answer = want(Store(tmp_path), {"hash": "u" * 64, "entries": entries})

        assert answer["busy"].startswith(f"pid {receiver.pid} for ")
        assert " s, for a client at 10.1.2.3 (" in answer["busy"]


def test_a_work_folder_that_cannot_be_made_is_named_with_what_moves_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    given = base64.b64encode(header(**HEADER)).decode()

    main("make", str(tmp_path / "file" / "work"), given)

    told = json.loads(capsys.readouterr().out)["error"]
    assert str(tmp_path / "file") in told
    assert "Not a directory; set work_dir: in hosts.yaml, or XDG_DATA_HOME there" in told


def test_what_is_written_while_a_tree_is_looked_at_is_noticed_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, name = Store(tmp_path), HEADER["hash"]
    build(store, {**HEADER, "pack": [[SHA, len(CONTENT)]], "large": []}, io.BytesIO(zlib.compress(CONTENT)))
    weights, look = store.trees / name / "weights.bin", trees.is_untouched

    def look_then_write(tree: Path, entry: list[Any]) -> bool:
        found = look(tree, entry)
        weights.write_bytes(bytes(len(CONTENT)))
        first_ns = weights.stat().st_ctime_ns
        while weights.stat().st_ctime_ns == first_ns:  # until the file system's clock has ticked
            weights.write_bytes(bytes(len(CONTENT)))
        return found

    monkeypatch.setattr(trees, "is_untouched", look_then_write)
    assert store.is_whole(name)
    monkeypatch.setattr(trees, "is_untouched", look)

    assert not store.is_whole(name)
    assert list(store.parts.iterdir()) == []


def told_of(work_dir: Path, packed: bytes, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    head = len(packed).to_bytes(4, "big") + packed
    main("make", str(work_dir), base64.b64encode(head).decode())
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


@pytest.mark.parametrize(
    "text",
    [
        *(b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"{", b"\xff", b"[]", b"3", b"{}"),
        b'{"hash": "t", "entries": %s}' % (b"[" * 100_000),
        b'{"hash": "../../x", "entries": []}',
        b'{"hash": [], "entries": []}',
        b'{"hash": "t", "entries": 5}',
        b'{"hash": "t", "entries": [["a", 420, 1e999, "x", null]]}',
    ],
)
def test_a_header_of_any_shape_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: bytes
) -> None:
    told = told_of(tmp_path, zlib.compress(text), capsys)

    assert told["error"].startswith("refused: ")
    assert list(tmp_path.iterdir()) == []


def test_a_header_that_was_not_packed_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told_of(tmp_path, b"no zlib", capsys)["error"].startswith("refused: ")


ODD = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just("\ud800") | st.just("a\0")


@given(st.lists(st.lists(ODD, min_size=4, max_size=6) | ODD, max_size=3) | ODD)
@example([["a", 0o644, 1, "x", False]])
@example([["a", -1, 1, "x", None]])
def test_a_marker_that_a_job_wrote_over_is_none_or_can_be_gone_through(entries: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        tree = store.trees / ("t" * 64)
        tree.mkdir()
        (tree / MARKER).write_text(json.dumps({"boot_id": "x", "entries": entries}))

        store.is_whole(tree.name)
        store.known_content()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"boot_id": "", "entries": ' + "[" * 100_000, "9" * 5000])
def test_a_marker_that_is_too_deep_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / MARKER).write_text(text)

    assert read_marker(tmp_path) is None
