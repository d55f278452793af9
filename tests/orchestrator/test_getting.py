"""Files read and fetched with a host's own commands: two at once, commands that fail, one session at a time."""

from __future__ import annotations

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import pytest

from orchestrator.errors import DraftyardError
from orchestrator.shell.local import LocalShell
from orchestrator.shell.posix import PosixFiles
from orchestrator.shell.stream import Ended, Sink, Source


class OneSession(PosixFiles):
    """This machine as a POSIX host that takes one command at a time, with tools of its own first on the path."""

    label = "box"

    def __init__(self, tools: Path) -> None:
        self._tools = tools
        self._shell = LocalShell()
        self._session = threading.Lock()

    def stream(self, argv: list[str], *, source: Source, sink: Sink, timeout_s: float, idle: bool = False) -> Ended:
        if not self._session.acquire(blocking=False):
            raise AssertionError("a second session was opened")
        try:
            command = ["env", f"PATH={self._tools}:{os.environ['PATH']}", *argv]
            return self._shell.stream(command, source=source, sink=sink, timeout_s=timeout_s, idle=idle)
        finally:
            self._session.release()


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    folder = tmp_path / "tools"
    folder.mkdir()
    return folder


def _tool(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    (folder / name).chmod(0o755)


def test_two_that_fetch_one_file_at_once_both_have_it_whole(tools: Path, tmp_path: Path) -> None:
    content = os.urandom(4 * 1024**2)
    (tmp_path / "there").write_bytes(content)
    here = tmp_path / "here" / "file"

    with ThreadPoolExecutor(2) as both:
        asked = [both.submit(OneSession(tools).get, str(tmp_path / "there"), here) for _ in range(2)]
        told = [future.exception() for future in asked]

    assert told == [None, None]
    assert here.read_bytes() == content
    assert list(here.parent.iterdir()) == [here]


def test_a_file_is_fetched_and_summed_in_one_session(tools: Path, tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"x" * 300_000)

    OneSession(tools).get(str(tmp_path / "there"), tmp_path / "here")

    assert (tmp_path / "here").read_bytes() == b"x" * 300_000


def test_a_read_that_fails_on_the_host_is_an_error_and_never_the_end_of_the_file(tools: Path, tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"0123456789" * 1000)
    _tool(tools, "tail", "echo 0123; echo 'tail: error reading: Stale file handle' >&2; exit 1")
    box = OneSession(tools)

    with pytest.raises(DraftyardError, match=r"cannot read .*/there: tail: error reading: Stale file handle"):
        box.read_range(str(tmp_path / "there"), 0, 10_000)
    with pytest.raises(DraftyardError, match=r"cannot read .*/there: tail: error reading: Stale file handle"):
        box.get(str(tmp_path / "there"), tmp_path / "here")
    (tools / "tail").unlink()

    box.get(str(tmp_path / "there"), tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"0123456789" * 1000
    assert box.read_range(str(tmp_path / "there"), 3, 4) == b"3456"
    assert box.read_range(str(tmp_path / "there"), 20_000, 4) == b""


def test_a_file_of_this_machine_that_changes_while_it_is_copied_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.write_bytes(b"A" * 300_000)
    os.utime(there, (1, 1))  # a clock tick is longer than this test
    copy = shutil.copyfileobj

    def copy_while_it_changes(source: IO[bytes], target: IO[bytes], length: int) -> None:
        copy(source, target, length)
        with there.open("r+b") as writer:
            writer.write(b"B" * 300_000)

    monkeypatch.setattr(shutil, "copyfileobj", copy_while_it_changes)
    with pytest.raises(DraftyardError, match="there changed while it was copied; try again"):
        LocalShell().get(str(there), here)

    assert list(tmp_path.iterdir()) == [there]
