"""The real program under a pseudo-terminal: what it writes there, and what it leaves behind."""

import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from orchestrator.follow.lease import lease
from tests.tui.world import Writer, Yard, steps

ENTER_SCREEN, LEAVE_SCREEN = "\x1b[?1049h", "\x1b[?1049l"
MOUSE_ON, MOUSE_OFF = "\x1b[?1000h", "\x1b[?1000l"


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

    def read_until(self, pattern: str, *, timeout_s: float = 120.0, since: int = 0) -> bool:
        """Whether the pattern appears in what has been written, escape sequences left out."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if re.search(pattern, _plain(self.written[since:])):
                return True
            if not self._read(0.2) and self.process.poll() is not None:
                break
        return bool(re.search(pattern, _plain(self.written[since:])))

    def drain(self, wait_s: float = 0.0) -> None:
        """Takes what is there, so that the other side is not held up."""
        while self._read(wait_s):
            pass

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


def _curve(written: str) -> dict[tuple[int, int], str]:
    """The cells of the charts as the terminal shows them: (row, column) -> braille mark; each cell's newest writing counts."""
    cells: dict[tuple[int, int], str] = {}
    row = column = 0
    for move, sequence, mark in re.findall(r"\x1b\[(\d+;\d+)H|(\x1b\[[0-?]*[ -/]*[@-~])|([^\x1b])", written):
        if move:
            row, column = (int(number) for number in move.split(";"))
        elif mark and not sequence:
            cells[row, column] = mark
            column += 1
    return {place: mark for place, mark in cells.items() if "\u2800" < mark <= "\u28ff"}


def _plain(text: str) -> str:
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
    terminal = Terminal(Child(pid), leader)
    try:
        yield terminal
    finally:
        terminal.process.kill()
        if terminal.leader >= 0:
            os.close(terminal.leader)


@pytest.mark.slow
def test_the_live_curve_moves_and_q_leaves_the_run_running(yard_copy: Path) -> None:
    with watching(yard_copy, "h7kq2mxd", "--readonly") as terminal:
        assert terminal.read_until(r"130,000 of 240,000")
        assert terminal.read_until("[\u2801-\u28ff]")
        terminal.drain(1.0)  # until nothing is painted for a second
        before = _curve(terminal.written)
        assert len(before) > 20
        yard = Yard(yard_copy)
        with yard.store:
            writer = Writer(yard.store, "h7kq2mxd", name="rank0")
            writer.skip_to(10_000)
            writer.tell(steps(131_000, 140_000, 1000, begin_s=yard.now_s, step_s=1.2, seed=4))
        assert terminal.read_until(r"140,000")
        deadline = time.monotonic() + 60
        while _curve(terminal.written) == before:
            assert time.monotonic() < deadline, "the steps are new and the curve is not"
            terminal.drain(0.2)
        assert len(_curve(terminal.written)) > 20
        terminal.press("q")
        code = terminal.end()

    assert code == 0
    assert "2 runs go on" in _plain(terminal.written)
    assert terminal.written.count(ENTER_SCREEN) == terminal.written.count(LEAVE_SCREEN) == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_restores_the_terminal(number: signal.Signals, yard_copy: Path) -> None:
    with watching(yard_copy, "--readonly") as terminal:
        assert terminal.read_until("qwen27b")
        terminal.process.send_signal(number)
        code = terminal.end()

    assert code in (128 + number, -number)
    assert LEAVE_SCREEN in terminal.written
    assert terminal.written.rfind(MOUSE_OFF) > terminal.written.rfind(MOUSE_ON)


@pytest.mark.slow
def test_no_mouse_leaves_the_mouse_to_the_terminal(yard_copy: Path) -> None:
    with watching(yard_copy, "--readonly", "--no-mouse") as terminal:
        assert terminal.read_until("qwen27b")
        terminal.press("\x03")
        assert terminal.end() == 0

    assert MOUSE_ON not in terminal.written


@pytest.mark.slow
def test_ctrl_z_gives_the_terminal_back_and_fg_takes_it_again(yard_copy: Path) -> None:
    """Under a shell with job control, as a person has it."""
    command = f"{sys.executable} -m orchestrator.cli watch --db {yard_copy} --readonly\n"
    with at_terminal(["bash", "--norc", "--noprofile", "-i"]) as terminal:
        terminal.press(command)
        assert terminal.read_until("qwen27b/ddtree")
        terminal.press("\x1a")
        assert terminal.read_until("Stopped")
        stopped = terminal.written
        terminal.press("fg\n")
        assert terminal.read_until("bottleneck|qwen27b/ddtree", since=len(stopped))
        terminal.press("q")
        assert terminal.read_until("runs go on", since=len(stopped))
        terminal.press("stty -a\n")
        assert terminal.read_until("[^-]icanon", since=len(stopped))
        terminal.press("exit\n")
        terminal.end()

    assert stopped.rfind(LEAVE_SCREEN) > stopped.rfind(ENTER_SCREEN)
    assert stopped.rfind(MOUSE_OFF) > stopped.rfind(MOUSE_ON)
    assert terminal.written.count(ENTER_SCREEN) == terminal.written.count(LEAVE_SCREEN) == 2


@pytest.mark.slow
def test_a_crash_restores_the_terminal_and_says_one_line(yard_copy: Path) -> None:
    """A fault of our own: no traceback, and no secret of a local value or of its message."""
    broken = (
        "import sys, pathlib, tui.app, tui.runs\n"
        "def present(self, snapshot):\n    token = 'hf_canary'\n    raise ZeroDivisionError('by zero with hf_canary1234567890')\n"
        "tui.runs.RunsScreen.present = present\n"
        f"sys.exit(tui.app.run(pathlib.Path({str(yard_copy)!r})))\n"
    )
    with at_terminal([sys.executable, "-c", broken]) as terminal:
        code = terminal.end()
    after = terminal.written[terminal.written.rfind(LEAVE_SCREEN) :]

    assert code == 1
    assert terminal.written.count(ENTER_SCREEN) == terminal.written.count(LEAVE_SCREEN) == 1
    assert terminal.written.rfind(MOUSE_OFF) > terminal.written.rfind(MOUSE_ON)
    assert "ZeroDivisionError: by zero" in _plain(after)
    assert "runs go on" in _plain(after)
    assert "hf_canary" not in terminal.written
    assert "Traceback" not in terminal.written


@pytest.mark.slow
def test_a_lost_terminal_ends_the_screen(yard_copy: Path) -> None:
    """As when the connection drops: nobody is left to draw for."""
    command = [sys.executable, "-m", "orchestrator.cli", "watch", "--db", str(yard_copy), "--readonly"]
    with at_terminal(command) as terminal:
        assert terminal.read_until("qwen27b/ddtree")
        terminal.hang_up()

        assert terminal.process.wait(timeout=90) != 0


@pytest.mark.slow
def test_going_on_after_a_stop_that_was_not_ours_starts_no_second_reader(yard_copy: Path) -> None:
    """A hang-up brings SIGCONT as well: Textual's driver began anew, and what it had begun before was never ended."""
    command = [sys.executable, "-m", "orchestrator.cli", "watch", "--db", str(yard_copy), "--readonly"]
    with at_terminal(command) as terminal:
        assert terminal.read_until("qwen27b/ddtree")
        tasks = Path(f"/proc/{terminal.process.pid}/task")
        names = sorted((task / "comm").read_text() for task in tasks.iterdir())
        for _ in range(2):
            seen = len(terminal.written)
            terminal.process.send_signal(signal.SIGSTOP)
            terminal.process.send_signal(signal.SIGCONT)
            assert terminal.read_until("qwen27b/ddtree", since=seen)  # it is painted again

        assert sorted((task / "comm").read_text() for task in tasks.iterdir()) == names
        terminal.press("q")
        assert terminal.end() == 0


@pytest.mark.slow
def test_a_storm_of_resizes_ends_at_the_last_size(yard_copy: Path) -> None:
    command = [sys.executable, "-m", "orchestrator.cli", "watch", "--db", str(yard_copy), "--readonly"]
    with at_terminal(command) as terminal:
        assert terminal.read_until("qwen27b/ddtree")
        for number in range(100):
            terminal.resize(*((20, 5), (400, 120), (81, 25), (60, 14))[number % 4])
            terminal.drain()
        terminal.resize(100, 30)
        begin = len(terminal.written)
        assert terminal.read_until("help.*quit", since=begin)
        terminal.press("q")
        code = terminal.end()

    assert code == 0
    assert "Traceback" not in terminal.written
    assert terminal.written.count(ENTER_SCREEN) == terminal.written.count(LEAVE_SCREEN) == 1


@pytest.mark.slow
def test_a_tiny_terminal_gets_a_message_and_still_quits(yard_copy: Path) -> None:
    command = [sys.executable, "-m", "orchestrator.cli", "watch", "--db", str(yard_copy), "--readonly"]
    with at_terminal(command, size=(20, 5)) as terminal:
        assert terminal.read_until("20×5 is too")
        terminal.press("q")

        assert terminal.end() == 0


@pytest.mark.slow
def test_pasted_text_is_no_command(yard_copy: Path) -> None:
    """A terminal marks what is pasted; `q` and `x` in it neither quit nor stop."""
    with watching(yard_copy, "--readonly") as terminal:
        assert terminal.read_until("qwen27b/ddtree")
        assert "\x1b[?2004h" in terminal.written
        terminal.press("\x1b[200~q\nxq\x1b[201~")
        terminal.drain(1.0)
        assert terminal.process.poll() is None
        assert "only looks" not in _plain(terminal.written)
        terminal.press("q")

        assert terminal.end() == 0


@pytest.mark.slow
def test_the_editor_gets_the_terminal_and_gives_it_back(
    yard_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`e` opens the recipe of the run, and in its log the log."""
    script = tmp_path / "my editor"
    script.write_text('#!/bin/sh\necho "editing $2 with $1"\n')
    script.chmod(0o755)
    monkeypatch.setenv("VISUAL", f"'{script}' --wait")
    monkeypatch.setenv("HOME", str(tmp_path))
    command = [sys.executable, "-m", "orchestrator.cli", "watch", "--db", str(yard_copy)]
    with lease(yard_copy), at_terminal(command) as terminal:  # somebody follows already
        assert terminal.read_until("qwen27b/ddtree")
        terminal.press("!")
        assert terminal.read_until("GPU out of memory")
        edited(terminal, r"editing \S*recipes/qwen3.6-27b.yaml with --wait", back="GPU out of memory")
        terminal.press("4")
        assert terminal.read_until("OutOfMemoryError: CUDA")
        edited(terminal, r"editing \S*stderr\S* with --wait", back="OutOfMemoryError: CUDA")
        terminal.press("q")
        code = terminal.end()

    assert code == 0
    assert terminal.written.count(ENTER_SCREEN) == terminal.written.count(LEAVE_SCREEN) == 3


def edited(terminal: Terminal, said: str, *, back: str) -> None:
    """`e`, what the editor says, and the screen as it is drawn when it is back."""
    seen = len(terminal.written)
    terminal.press("e")
    assert terminal.read_until(said + f"[\\s\\S]*{back}", since=seen)


@pytest.mark.slow
def test_once_prints_one_screen_into_a_pipe(filled_yard: Path) -> None:
    environ = {**os.environ, "LANG": "C.UTF-8", "COLUMNS": "100", "LINES": "30"}
    command = [sys.executable, "-m", "orchestrator.cli", "watch", "--db", str(filled_yard), "--once"]

    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60, check=True)

    assert "qwen27b/ddtree" in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
def test_a_dumb_terminal_gets_ascii(filled_yard: Path) -> None:
    environ = {**os.environ, "LANG": "C", "TERM": "dumb", "COLUMNS": "100", "LINES": "30", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "orchestrator.cli", "watch", "--db", str(filled_yard), "--once"]

    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60, check=True)

    assert "qwen27b/ddtree" in done.stdout
    assert done.stdout.isascii()


@pytest.mark.slow
def test_json_prints_what_the_screen_shows(filled_yard: Path) -> None:
    import json

    command = [sys.executable, "-m", "orchestrator.cli", "watch", "--db", str(filled_yard), "--json"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    body = json.loads(done.stdout)
    assert body["schema_version"] == 1
    assert {run["id"] for run in body["runs"]} >= {"h7kq2mxd", "c8vj3pzs"}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed here")
def test_tmux_shows_the_same_screen(filled_yard: Path, tmp_path: Path) -> None:
    socket = str(tmp_path / "tmux")
    run = [sys.executable, "-m", "orchestrator.cli", "watch", "--db", str(filled_yard), "--readonly"]

    def tmux(*words: str) -> str:
        done = subprocess.run(["tmux", "-S", socket, *words], capture_output=True, text=True, timeout=90, check=True)
        return done.stdout

    tmux("new-session", "-d", "-x", "100", "-y", "30", " ".join(run))
    try:
        deadline = time.monotonic() + 120
        while "qwen27b" not in (shown := tmux("capture-pane", "-p")) and time.monotonic() < deadline:
            time.sleep(0.3)
        tmux("send-keys", "j", "Enter")
        while "bottleneck" not in (opened := tmux("capture-pane", "-p")) and time.monotonic() < deadline:
            time.sleep(0.3)
    finally:
        tmux("kill-server")

    assert "qwen27b/ddtree" in shown
    assert "bottleneck" in opened
