"""The host `local`: this machine, through the same seam as every other one.

A command runs in its own session, in the home folder, without our stdin; so nothing here depends on
the terminal it was started from, and a command that hangs is killed with all its children.
"""

from __future__ import annotations

import contextlib
import errno
import filecmp
import os
import secrets
import selectors
import shutil
import signal
import stat as stat_modes
import subprocess
from pathlib import Path
from typing import IO

from orchestrator.errors import DraftyardError, HostError
from orchestrator.shell import Completed, Stat
from orchestrator.shell.framing import check_argv
from orchestrator.shell.posix import SPAWN
from orchestrator.shell.stream import LINGER_S, PIECE_BYTES, Deadline, Ended, Sink, Source, timed_out, told


class LocalShell:
    """Runs commands here. `home` is the folder they start in."""

    label = "local"

    def __init__(self, home: Path | None = None) -> None:
        self._home = home or Path.home()

    def run(self, argv: list[str], *, stdin: bytes = b"", timeout_s: float = 60.0) -> Completed:
        pieces: list[bytes] = []
        ended = self.stream(argv, source=Source.of(stdin), sink=pieces.append, timeout_s=timeout_s)
        assert ended.exit_code is not None  # the sink took everything
        return Completed(ended.exit_code, b"".join(pieces), ended.stderr)

    def stream(self, argv: list[str], *, source: Source, sink: Sink, timeout_s: float, idle: bool = False) -> Ended:
        check_argv(argv)
        try:
            process = subprocess.Popen(
                [word.encode("utf-8", "surrogateescape") for word in argv],
                stdin=subprocess.DEVNULL if source.size_bytes == 0 else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self._home,
                start_new_session=True,
            )
        except OSError as error:  # the answers of a shell, so that all transports agree
            if str(error.filename) == str(self._home):
                told = f"local: the home folder {self._home} cannot be entered ({error.strerror})"
                raise HostError(f"{told}\n  repair: set HOME to a folder that is there") from error
            return _not_started(argv[0], error)
        with _Pump(process, source, sink) as pump:
            stderr = pump.until_exit(Deadline(timeout_s), idle=idle)
            is_over = process.poll() is not None
        if stderr is None:
            raise timed_out(self.label, argv, timeout_s)
        if not is_over:
            return Ended(None, stderr)
        code = process.returncode
        return Ended(code if code >= 0 else 128 - code, stderr)

    def spawn(self, argv: list[str], *, cwd: str) -> None:
        check_argv(argv)
        # The shell in between ends at once, so the command is no child of ours: nothing to reap, nothing to wait for.
        launched = subprocess.run(
            ["sh", "-c", SPAWN, "sh", cwd, *argv],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd=self._home,
            start_new_session=True,
            timeout=30,
            check=False,
        )
        if launched.returncode:
            raise DraftyardError(f"local: cannot start in {cwd}: {told(launched.stderr)}")

    def put(self, local: Path, remote: str, *, mode: int = 0o644) -> None:
        target = Path(remote)
        _copy_whole(local, target.with_name(f".{target.name[:200]}.{secrets.token_hex(6)}.put"), target, mode=mode)

    def get(self, remote: str, local: Path) -> None:
        source = Path(remote)
        if not source.is_file():
            raise FileNotFoundError(errno.ENOENT, "no such file on local", remote)
        if local.is_file() and filecmp.cmp(source, local, shallow=False):
            local.chmod(source.stat().st_mode & 0o777)  # an earlier get brought it
            return
        aside = local.with_name(f".{local.name[:200]}.{secrets.token_hex(6)}.get")
        _copy_whole(source, aside, local, mode=source.stat().st_mode & 0o777)

    def read_range(self, remote: str, offset: int, size: int) -> bytes:
        if not Path(remote).is_file():  # a pipe or a device of that name would hold the reader for ever
            raise FileNotFoundError(errno.ENOENT, "no such file on local", remote)
        with Path(remote).open("rb") as stream:
            stream.seek(offset)
            return stream.read(size)

    def stat(self, remote: str) -> Stat | None:
        try:
            found = os.lstat(remote)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return Stat(
            size_bytes=found.st_size,
            inode=found.st_ino,
            mode=stat_modes.S_IMODE(found.st_mode),
            modified_s=found.st_mtime,
            is_dir=stat_modes.S_ISDIR(found.st_mode),
            is_link=stat_modes.S_ISLNK(found.st_mode),
        )

    def close(self) -> None:
        """Nothing is held."""


class _Pump:
    """Feeds stdin and drains both streams at once, until the process itself is gone.

    The process's end, not the streams' end, is what counts: a grandchild may hold them open.
    """

    def __init__(self, process: subprocess.Popen[bytes], source: Source, sink: Sink) -> None:
        self._process, self._source, self._sink = process, source, sink
        self._stderr: list[bytes] = []
        self._waiting = memoryview(source.head)
        self._is_held = False  # stdin is let wait for what the source comes after
        self._has_enough = False
        self._selector = selectors.DefaultSelector()
        self._exit = os.pidfd_open(process.pid)
        self._selector.register(self._exit, selectors.EVENT_READ)
        for stream, event in (
            (process.stdout, selectors.EVENT_READ),
            (process.stderr, selectors.EVENT_READ),
            (process.stdin, selectors.EVENT_WRITE),
        ):
            if stream is not None:
                os.set_blocking(stream.fileno(), False)
                self._selector.register(stream, event)

    def __enter__(self) -> _Pump:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._selector.close()
        os.close(self._exit)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def until_exit(self, deadline: Deadline, *, idle: bool) -> bytes | None:
        """What came on stderr; None when the time was over first."""
        enough: Deadline | None = None
        while not deadline.is_over:
            if self._has_enough and enough is None:
                enough = Deadline(LINGER_S)
            if enough is not None and enough.is_over:
                return b"".join(self._stderr)
            for key, _ in self._selector.select((enough or deadline).left_s):
                if key.fd == self._exit:
                    self._process.wait()
                    self._drain()
                    return b"".join(self._stderr)
                self._move(key.fileobj)  # type: ignore[arg-type]  # registered as streams above
                self._go_on()
                if idle:
                    deadline.renew()
        return None

    def _move(self, stream: IO[bytes]) -> bool:
        """Moves one piece; False when there was none. A stream at its end is let go."""
        try:
            is_open = self._write(stream) if stream is self._process.stdin else self._read(stream)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            is_open = False
        if not is_open:
            self._selector.unregister(stream)
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        return is_open

    def _read(self, stream: IO[bytes]) -> bool:
        piece = os.read(stream.fileno(), PIECE_BYTES)
        if piece and stream is self._process.stderr:
            self._stderr.append(piece)
        elif piece and self._sink(piece) is True:
            self._has_enough = True
        return bool(piece)

    def _write(self, stream: IO[bytes]) -> bool:
        after = self._source.after
        if not self._waiting and after is not None and not after.is_set():
            self._selector.unregister(stream)
            self._is_held = True
            return True
        if not self._waiting:
            self._waiting = memoryview(self._source.stream.read(PIECE_BYTES))
        if self._waiting:
            self._waiting = self._waiting[os.write(stream.fileno(), self._waiting) :]
            return True
        return False

    def _go_on(self) -> None:
        stdin, after = self._process.stdin, self._source.after
        if self._is_held and after is not None and after.is_set() and stdin is not None:
            self._is_held = False
            self._selector.register(stdin, selectors.EVENT_WRITE)

    def _drain(self) -> None:
        for stream in (self._process.stdout, self._process.stderr):
            while stream is not None and not stream.closed and self._move(stream):
                pass


def _not_started(program: str, error: OSError) -> Ended:
    if error.errno == errno.E2BIG:
        return Ended(126, f"{program}: Argument list too long\n".encode())
    code = 127 if isinstance(error, FileNotFoundError | NotADirectoryError) else 126
    return Ended(code, f"{program}: {error.strerror}\n".encode("utf-8", "surrogateescape"))


def _copy_whole(source: Path, aside: Path, target: Path, *, mode: int) -> None:
    """Appears whole or not at all; DraftyardError when the source was written to meanwhile."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with source.open("rb") as reader, aside.open("wb") as writer:
            before = _version(reader)
            aside.chmod(0o600)
            shutil.copyfileobj(reader, writer, PIECE_BYTES * 4)
            if _version(reader) != before:
                raise DraftyardError(f"local: {source} changed while it was copied; try again")
        aside.chmod(mode)
        aside.replace(target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _version(stream: IO[bytes]) -> tuple[int, int]:
    found = os.fstat(stream.fileno())
    return found.st_size, found.st_mtime_ns
