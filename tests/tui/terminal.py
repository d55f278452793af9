"""A pseudo-terminal with the real program in it: what it writes there, what is typed, how the terminal is left."""

import fcntl
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.tui_terminal import Face

ENTER_SCREEN, LEAVE_SCREEN = "\x1b[?1049h", "\x1b[?1049l"
ALWAYS_SET = {"1049", "25", "7", "2004", "1004", "1000", "1003", "1006"}  # DEC private modes that the program changes
_ORDINARY = {"25": "h", "7": "h"}  # the cursor is shown, lines wrap; every other mode is off
MOUSE_ON, MOUSE_OFF = "\x1b[?1000h", "\x1b[?1000l"


LEFT_WITH = r"left with (\d+)"


class Child:
    """A forked process, by the words of Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} did not end within {timeout:g} s")
            time.sleep(0.05)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


@dataclass
class Terminal:
    process: subprocess.Popen[bytes] | Child
    leader: int
    written: str = ""
    size: tuple[int, int] = field(default=(80, 24))
    attributes: list[object] = field(
        default_factory=lambda: _fresh_attributes()
    )  # of termios, before the program began
    _face: Face | None = None
    _fed: int = 0  # of `written`

    def screen(self) -> str:
        """What stands on it now."""
        self.drain()
        self._face = self._face or Face(self.size)
        self._face.feed(self.written[self._fed :].encode())
        self._fed = len(self.written)
        return str(self._face)

    def read_until(self, pattern: str, *, timeout_s: float = 120.0, since: int = 0) -> bool:
        """Whether the pattern appears in what has been written, escape sequences left out."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if re.search(pattern, plain(self.written[since:])):
                return True
            if not self._read(0.2) and self.process.poll() is not None:
                break
        return bool(re.search(pattern, plain(self.written[since:])))

    def drain(self, wait_s: float = 0.0) -> None:
        """Takes what is there, so that the other side is not held up."""
        while self._read(wait_s):
            pass

    @property
    def modes(self) -> dict[str, str]:
        """Each private mode that was ever changed -> `h` or `l`, as it was written last."""
        changes = re.findall(r"\x1b\[\?([\d;]+)([hl])", self.written)
        return {mode: end for several, end in changes for mode in several.split(";")}

    def left_behind(self) -> set[str]:
        """What is not as the program found it: modes by their number, the keyboard's protocol, attributes, colours."""
        found = {mode for mode, end in self.modes.items() if end != _ORDINARY.get(mode, "l")}
        if len(re.findall(r"\x1b\[>\d*u", self.written)) > self.written.count("\x1b[<u"):
            found.add("keyboard")
        if termios.tcgetattr(self.leader) != self.attributes:
            found.add("attributes")
        return found

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self.leader, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def hang_up(self) -> None:
        os.close(self.leader)
        self.leader = -1

    def press(self, keys: str) -> None:
        os.write(self.leader, keys.encode())

    def end(self, *, timeout_s: float = 90.0) -> int:
        """Reads until the process has gone; its exit code."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read(0.1)
        while self._read(0.1):
            pass
        return self.process.wait(timeout=5)

    def _read(self, wait_s: float) -> bool:
        ready, _, _ = select.select([self.leader], [], [], wait_s)
        if not ready:
            return False
        try:
            piece = os.read(self.leader, 65536)
        except OSError:  # the other side has closed
            return False
        self.written += piece.decode("utf-8", "replace")
        return bool(piece)


class Tmux:
    """A pane of tmux with the program in it, by the words of Terminal."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def do(self, *words: str) -> str:
        command = ["tmux", "-u", "-S", str(self._socket), "-f", os.devnull, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout

    def screen(self) -> str:
        return self.do("capture-pane", "-p")

    def press(self, keys: str) -> None:
        self.do("send-keys", "-l", keys)

    def end(self, *, timeout_s: float = 90.0) -> int:
        """Waits until the program has gone; its exit code, as the shell says it."""
        assert shows(self, LEFT_WITH, timeout_s=timeout_s), self.screen()
        found = re.search(LEFT_WITH, self.screen())
        assert found is not None
        return int(found[1])


def shows(terminal: Terminal | Tmux, pattern: str, *, timeout_s: float = 120.0) -> bool:
    """Whether the pattern comes to stand on the screen."""
    deadline = time.monotonic() + timeout_s
    while not (is_there := re.search(pattern, terminal.screen()) is not None) and time.monotonic() < deadline:
        time.sleep(0.1)
    return is_there


def _fresh_attributes() -> list[object]:
    """Those of every new pseudo-terminal."""
    leader, follower = pty.openpty()
    try:
        return list(termios.tcgetattr(leader))
    finally:
        os.close(leader)
        os.close(follower)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[()][A-Z0-9]|\x1b\][^\x07]*\x07", "", text)


@contextmanager
def watching(db: Path, *arguments: str, env: dict[str, str] | None = None) -> Iterator[Terminal]:
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "orchestrator.cli", "watch", "--db", str(db), *arguments]
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24", "LANG": "C.UTF-8", **(env or {})}
    process = subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, env=environ, start_new_session=True
    )
    os.close(follower)
    terminal = Terminal(process, leader)
    try:
        yield terminal
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(leader)


@contextmanager
def at_terminal(command: list[str], *, size: tuple[int, int] = (80, 24)) -> Iterator[Terminal]:
    """The command in a session of its own with the pseudo-terminal as its controlling one."""
    pid, leader = pty.fork()
    if pid == 0:  # pragma: no cover - the other process
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        environ = {name: text for name, text in os.environ.items() if name not in ("COLUMNS", "LINES")}
        os.execvpe(command[0], command, {**environ, "TERM": "xterm-256color", "LANG": "C.UTF-8"})
    terminal = Terminal(Child(pid), leader, size=size)
    try:
        yield terminal
    finally:
        terminal.process.kill()
        if terminal.leader >= 0:
            os.close(terminal.leader)


@contextmanager
def in_tmux(command: list[str], *, size: tuple[int, int] = (80, 24)) -> Iterator[Tmux]:
    """The command in a server of tmux of its own."""
    with tempfile.TemporaryDirectory() as folder:
        terminal = Tmux(Path(folder) / "tmux")
        words = f"{shlex.join(['env', 'LANG=C.UTF-8', *command])}; echo left with $?; read line"
        begin = ["new-session", "-d", "-x", str(size[0]), "-y", str(size[1]), "-c", str(Path.cwd()), words]
        terminal.do(*begin)
        try:
            yield terminal
        finally:
            terminal.do("kill-server")
