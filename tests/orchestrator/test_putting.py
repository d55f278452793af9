"""`put`: what landed before a cut is not sent again, and nothing wrong takes the file's name."""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import DraftyardError, HostError
from orchestrator.host import Hosts
from orchestrator.shell.connect import connect
from orchestrator.shell.local import LocalShell
from orchestrator.shell.posix import PosixFiles
from orchestrator.shell.stream import Source
from tests import sshd

pytestmark = pytest.mark.slow  # real shells and an sshd

SIZE = 8_004_321


class Line(PosixFiles):
    """The POSIX way of moving files, over this machine's own shell; input can be cut, and is counted."""

    label = "line"

    def __init__(self, *before: str) -> None:
        self.before, self.sent, self.cut_after = before, 0, 1 << 62

    def stream(self, argv: list[str], *, source: Source, **options: Any) -> Any:
        outer = self

        class Counted:
            def read(self, size: int) -> bytes:
                piece = source.stream.read(size)[: max(0, outer.cut_after - outer.sent)]
                outer.sent += len(piece)
                return piece

        ended = LocalShell().stream([*self.before, *argv], source=Source(Counted(), source.size_bytes), **options)  # type: ignore[arg-type]
        if self.sent >= self.cut_after:
            raise HostError("the connection was lost")
        return ended

    def close(self) -> None:
        """Nothing is held."""

    def restored(self) -> Line:
        self.sent, self.cut_after = 0, 1 << 62
        return self


@pytest.fixture
def large(tmp_path: Path) -> Path:
    (tmp_path / "here").write_bytes(random.Random(7).randbytes(SIZE))
    return tmp_path / "here"


@pytest.fixture
def there(tmp_path: Path) -> Path:
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "it's there").write_text("old")
    return tmp_path / "host" / "it's there"


def cut(line: Line, large: Path, there: Path, after: int) -> None:
    line.cut_after = after
    with pytest.raises(HostError, match="lost"):
        line.put(large, str(there))
    assert there.read_text() == "old"


@pytest.mark.parametrize("after", [1, 5_000_000, SIZE])
def test_a_put_that_was_cut_anywhere_sends_only_the_rest(large: Path, there: Path, after: int) -> None:
    line = Line()
    cut(line, large, there, after)

    line.restored().put(large, str(there), mode=0o640)

    assert there.read_bytes() == large.read_bytes()
    assert there.stat().st_mode & 0o777 == 0o640
    assert line.sent == SIZE - after
    assert [path.name for path in there.parent.iterdir()] == [there.name]


def test_a_put_cut_again_and_again_sends_every_byte_once(large: Path, there: Path) -> None:
    line, sent = Line(), 0
    for _ in range(4):
        cut(line.restored(), large, there, 2_000_000)
        sent += line.sent

    line.restored().put(large, str(there))

    assert there.read_bytes() == large.read_bytes()
    assert sent + line.sent == SIZE


def test_a_part_that_was_spoilt_is_noticed_and_all_is_sent_again(large: Path, there: Path) -> None:
    line = Line()
    cut(line, large, there, 3_000_000)
    [part] = there.parent.glob(".*.put")
    part.write_bytes(bytes(3_000_000))

    line.restored().put(large, str(there))

    assert there.read_bytes() == large.read_bytes()
    assert line.sent == SIZE - 3_000_000 + SIZE


def test_what_never_arrives_as_it_was_takes_no_name(large: Path, there: Path) -> None:
    class Spoiling(Line):
        def stream(self, argv: list[str], *, source: Source, **options: Any) -> Any:
            source.stream.read(source.size_bytes)
            return super().stream(argv, source=Source.of(bytes(source.size_bytes)), **options)

    with pytest.raises(DraftyardError, match=r"line: cannot write .*there: what arrived there is not what was sent"):
        Spoiling().put(large, str(there))

    assert there.read_text() == "old"
    assert [path.name for path in there.parent.iterdir()] == [there.name]


def test_a_file_that_changed_since_the_cut_travels_whole_and_the_old_part_goes_in_time(
    large: Path, there: Path
) -> None:
    line = Line()
    cut(line, large, there, 3_000_000)
    [part] = there.parent.glob(".*.put")
    large.write_bytes(random.Random(8).randbytes(SIZE))

    line.restored().put(large, str(there))
    assert there.read_bytes() == large.read_bytes()
    assert line.sent == SIZE
    assert part.exists()  # of another client, for all that is known

    os.utime(part, (0, 0))
    line.put(large, str(there))
    assert [path.name for path in there.parent.iterdir()] == [there.name]


@pytest.mark.parametrize("answer", ["", "-1", "9" * 40, "1e3", "٣", "nonsense\n12"])
def test_whatever_a_host_says_lies_there_already_the_file_arrives_whole(large: Path, there: Path, answer: str) -> None:
    class Liar(Line):
        def run(self, argv: list[str], **options: Any) -> Any:
            return replace(super().run(argv, **options), stdout=answer.encode())

    Liar().put(large, str(there))

    assert there.read_bytes() == large.read_bytes()


def together(*puts: Callable[[], None]) -> None:
    with ThreadPoolExecutor(len(puts)) as clients:
        for done in [clients.submit(put) for put in puts]:
            done.result()


def test_several_puts_of_one_file_at_once_all_succeed(large: Path, there: Path) -> None:
    cut(Line(), large, there, 3_000_000)

    together(*[lambda: Line().put(large, str(there))] * 3)

    assert there.read_bytes() == large.read_bytes()
    assert [path.name for path in there.parent.iterdir()] == [there.name]


def test_a_client_that_comes_just_after_another_has_renamed_the_part_leaves_none(large: Path, there: Path) -> None:
    """It has asked what lies there, and the part is gone when it goes on from there."""

    class Late(Line):
        def stream(self, argv: list[str], **options: Any) -> Any:
            if "cat" in argv[2] and there.read_bytes() != large.read_bytes():
                Line().put(large, str(there))
            return super().stream(argv, **options)

    cut(Line(), large, there, 3_000_000)

    Late().put(large, str(there))

    assert there.read_bytes() == large.read_bytes()
    assert [path.name for path in there.parent.iterdir()] == [there.name]


def test_of_clients_with_different_files_for_one_name_none_fails_and_one_wins_whole(
    tmp_path: Path, there: Path
) -> None:
    files = [tmp_path / f"file {number}" for number in range(4)]
    for number, file in enumerate(files):
        file.write_bytes(random.Random(number).randbytes(1_000_000 + number))

    together(*[partial(Line().put, file, str(there)) for file in files])

    assert there.read_bytes() in [file.read_bytes() for file in files]
    assert [path.name for path in there.parent.iterdir()] == [there.name]


TOOLS = ("cat", "chmod", "dd", "find", "head", "mkdir", "mv", "rm", "sha256sum", "stat", "tail", "wc")


def test_the_tools_that_move_files_are_named_for_a_person() -> None:
    page = (Path(__file__).parents[2] / "docs" / "hosts.md").read_text(encoding="utf-8")

    named = re.search(r"files are moved with (.*?)[;)]", page, re.DOTALL)
    assert named is not None
    assert tuple(re.findall(r"`(\w+)`", named[1])) == TOOLS


@pytest.mark.parametrize("kind", ["as installed", "busybox"])
def test_files_move_with_no_more_than_the_tools_that_are_named(
    kind: str, large: Path, there: Path, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    for tool in ("sh", *TOOLS):
        program = shutil.which(tool if kind == "as installed" else "busybox")
        if program is None:
            pytest.skip(f"no {kind} here")
        (tmp_path / "bin" / tool).symlink_to(program)
    line = Line("/usr/bin/env", f"PATH={tmp_path / 'bin'}")
    cut(line, large, there, 3_000_000)
    stale = there.parent / next(there.parent.glob(".*.put")).name.replace("-", "-0")
    stale.touch()
    os.utime(stale, (0, 0))

    line.restored().put(large, str(there))
    line.get(str(there), tmp_path / "back")

    assert line.sent == SIZE - 3_000_000
    assert (tmp_path / "back").read_bytes() == large.read_bytes()
    assert line.read_range(str(there), 5, 7) == large.read_bytes()[5:12]
    assert [path.name for path in there.parent.iterdir()] == [there.name]


def test_a_folder_of_that_name_is_said_and_left_alone(large: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()

    with pytest.raises(DraftyardError, match="a folder has this name there"):
        Line().put(large, str(tmp_path / "folder"))

    assert not list((tmp_path / "folder").iterdir())


# Over a real connection ------------------------------------------------------------------------------


@dataclass
class Relay:
    port: int = 0
    up_bytes: int = 0
    cut_after: int = 1 << 62

    def carry(self, near: socket.socket, target: int) -> None:
        with near, socket.create_connection(("127.0.0.1", target)) as far:
            threading.Thread(target=self._down, args=(far, near), daemon=True).start()
            with suppress(OSError):
                while (piece := near.recv(65536)) and self.up_bytes < self.cut_after:
                    far.sendall(piece)
                    self.up_bytes += len(piece)
            for end in (near, far):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _down(far: socket.socket, near: socket.socket) -> None:
        with suppress(OSError):
            while piece := far.recv(65536):
                near.sendall(piece)


@contextmanager
def relay_to(target: int) -> Iterator[Relay]:
    relay, is_over = Relay(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        relay.port = listener.getsockname()[1]

        def accept() -> None:
            while not is_over.is_set():
                with suppress(TimeoutError):
                    near, _ = listener.accept()
                    near.settimeout(None)
                    threading.Thread(target=relay.carry, args=(near, target), daemon=True).start()

        thread = threading.Thread(target=accept)
        thread.start()
        yield relay
        is_over.set()
        thread.join()


@pytest.mark.slow  # a real server, 40 MB
def test_a_put_over_a_line_cut_half_way_brings_only_the_rest_the_second_time(tmp_path: Path) -> None:
    (tmp_path / "here").write_bytes(random.Random(9).randbytes(40_000_000))
    with sshd.running(tmp_path / "sshd") as server, relay_to(server.port) as relay:
        text = re.sub(r"Port \d+", f"Port {relay.port}", server.config_file.read_text())
        server.config_file.write_text(text)
        server.known_hosts.write_text(f"[127.0.0.1]:{relay.port} {server.host_key}\n")
        shell = connect(Hosts.load(None, server.config_file).find("box"))
        relay.cut_after = 25_000_000
        with pytest.raises(HostError, match="lost"):
            shell.put(tmp_path / "here", f"{server.home}/there")
        assert not (server.home / "there").exists()
        relay.up_bytes, relay.cut_after = 0, 1 << 62

        shell.put(tmp_path / "here", f"{server.home}/there")
        shell.close()

        assert (server.home / "there").read_bytes() == (tmp_path / "here").read_bytes()
        assert relay.up_bytes < 20_000_000  # of 40; some of what had left was still on the way
        assert [path.name for path in server.home.iterdir()] == ["there"]
