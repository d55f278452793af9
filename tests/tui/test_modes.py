"""However the program ends or pauses, the terminal is left as it was found: modes, attributes, screen, cursor, keyboard."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from orchestrator.cli import Verbs
from tests.tui.terminal import ALWAYS_SET, ENTER_SCREEN, LEAVE_SCREEN, MOUSE_ON, Terminal, at_terminal, plain, watching

pytestmark = pytest.mark.slow  # starts the program

PROGRAM = [sys.executable, "-m", "orchestrator.cli"]


def left_behind(terminal: Terminal) -> set[str]:
    """Of a program that had the whole screen."""
    assert terminal.modes.keys() >= ALWAYS_SET
    return terminal.left_behind()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_restores_the_terminal(number: signal.Signals, yard_copy: Path) -> None:
    with watching(yard_copy, "--readonly") as terminal:
        assert terminal.read_until("qwen27b")
        terminal.process.send_signal(number)
        code = terminal.end()

        left = left_behind(terminal)

    assert code in (128 + number, -number)
    assert left == set()


def test_no_mouse_leaves_the_mouse_to_the_terminal(yard_copy: Path) -> None:
    with watching(yard_copy, "--readonly", "--no-mouse") as terminal:
        assert terminal.read_until("qwen27b")
        terminal.press("\x03")
        assert terminal.end() == 0
        assert terminal.left_behind() == set()

    assert MOUSE_ON not in terminal.written


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
    assert terminal.written.count(ENTER_SCREEN) == terminal.written.count(LEAVE_SCREEN) == 2


def test_a_crash_restores_the_terminal_and_says_one_line(yard_copy: Path) -> None:
    """A fault of our own: no traceback, and no secret of a local value or of its message."""
    broken = (
        "import sys, pathlib, tui.opening, tui.runs\n"
        "def present(self, snapshot):\n    token = 'hf_canary'\n    raise ZeroDivisionError('by zero with hf_canary1234567890')\n"
        "tui.runs.RunsScreen.present = present\n"
        f"sys.exit(tui.opening.run(pathlib.Path({str(yard_copy)!r})))\n"
    )
    with at_terminal([sys.executable, "-c", broken]) as terminal:
        code = terminal.end()
        left = left_behind(terminal)
    after = terminal.written[terminal.written.rfind(LEAVE_SCREEN) :]

    assert code == 1
    assert terminal.written.count(ENTER_SCREEN) == terminal.written.count(LEAVE_SCREEN) == 1
    assert left == set()
    assert "ZeroDivisionError: by zero" in plain(after)
    assert "runs go on" in plain(after)
    assert "hf_canary" not in terminal.written
    assert "Traceback" not in terminal.written


def test_a_lost_terminal_ends_the_screen(yard_copy: Path) -> None:
    """As when the connection drops: nobody is left to draw for."""
    command = [*PROGRAM, "watch", "--db", str(yard_copy), "--readonly"]
    with at_terminal(command) as terminal:
        assert terminal.read_until("qwen27b/ddtree")
        terminal.hang_up()

        assert terminal.process.wait(timeout=90) != 0


def test_going_on_after_a_stop_that_was_not_ours_starts_no_second_reader(yard_copy: Path) -> None:
    """A hang-up brings SIGCONT as well: Textual's driver began anew, and what it had begun before was never ended."""
    command = [*PROGRAM, "watch", "--db", str(yard_copy), "--readonly"]
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


def test_ctrl_z_leaves_the_terminal_as_it_was_until_it_goes_on(yard_copy: Path) -> None:
    """Without a shell, which puts attributes right by itself."""
    with at_terminal([*PROGRAM, "watch", "--db", str(yard_copy), "--readonly"]) as terminal:
        assert terminal.read_until("qwen27b/ddtree")
        terminal.press("\x1a")
        assert wait_for(lambda: state_of(terminal.process.pid) == "T", terminal)
        terminal.drain()
        paused = left_behind(terminal)
        seen = len(terminal.written)
        terminal.process.send_signal(signal.SIGCONT)
        assert terminal.read_until("qwen27b/ddtree", since=seen)
        going_on = terminal.left_behind()
        terminal.press("q")
        code = terminal.end()
        ended = left_behind(terminal)

    assert code == 0
    assert paused == ended == set()
    assert going_on >= {"1049", "25", "2004", "attributes"}


def test_reset_term_puts_right_what_a_killed_screen_has_left(yard_copy: Path) -> None:
    """Under a shell that restores nothing, as nobody does where it is the shell's own terminal that was lost."""
    watch = shlex.join([*PROGRAM, "watch", "--db", str(yard_copy), "--readonly"])
    reset = shlex.join([*PROGRAM, "reset-term"])
    with at_terminal(
        ["sh", "-c", f"{watch}; echo was killed; read line; {reset}; echo was reset; read line"]
    ) as terminal:
        assert terminal.read_until("qwen27b/ddtree")
        children = children_of(terminal.process.pid)
        for child in children:
            os.kill(child, signal.SIGKILL)
        assert terminal.read_until("was killed")
        before = left_behind(terminal)
        terminal.press("\n")
        assert terminal.read_until("was reset")
        after = left_behind(terminal)
        terminal.press("\n")
        code = terminal.end()

    assert len(children) == 1
    assert before >= {*ALWAYS_SET, "keyboard", "attributes"}
    assert after == set()
    assert code == 0


SCREENS = {"watch", "reset-term"}  # what is there to change the terminal
ARGUMENTS = {  # of verbs that take no run: enough to do something, and nothing beyond this machine
    "recipe": "check smollm2", "plan": "smollm2", "deploy": "smollm2 --host nowhere", "prepare": "smollm2 --host nowhere",
    "smoke": "smollm2 --host nowhere", "evidence": "", "launch": "smollm2 --host nowhere", "ls": "", "import": "/nowhere",
    "reap": "nowhere", "gc": "nowhere", "hosts": "", "doctor": "nowhere", "config": "show", "follow": "--help",
    "mark": "h7kq2mxd lost why", "note": "h7kq2mxd words", "tag": "h7kq2mxd one", "compare": "h7kq2mxd c8vj3pzs", "diff": "h7kq2mxd c8vj3pzs",
}  # fmt: skip


@pytest.mark.slow
def test_no_verb_but_the_screens_changes_the_terminal(yard_copy: Path) -> None:
    """The cursor above all: whoever hides it and ends otherwise leaves a shell without one."""
    verbs = [verb for verb in loaded_verbs() if verb not in SCREENS]
    lines = []
    for verb in verbs:
        words = shlex.split(ARGUMENTS.get(verb, "h7kq2mxd"))
        words += ["--output", str(yard_copy.with_name("loss.png"))] if verb == "plot" else []  # else into this folder
        lines.append(f"{shlex.join([*PROGRAM, '--db', str(yard_copy), verb, *words])} </dev/null; echo :{verb}:")
    with at_terminal(["sh", "-c", "\n".join(lines)], size=(100, 30)) as terminal:
        code = terminal.end(timeout_s=300)
        left = terminal.left_behind()

    assert code == 0
    assert len(verbs) > 30
    assert [verb for verb in verbs if f":{verb}:" not in terminal.written] == []
    assert "Traceback" not in terminal.written
    assert terminal.modes == {}
    assert left == set()


def loaded_verbs() -> list[str]:
    return sorted(Verbs().list_commands(click.Context(click.Command("draftyard"))))


def test_reset_term_writes_nothing_into_a_pipe() -> None:
    done = subprocess.run([*PROGRAM, "reset-term"], capture_output=True, timeout=60, check=True)

    assert done.stdout == b""


def wait_for(is_so: Callable[[], bool], terminal: Terminal) -> bool:
    deadline = time.monotonic() + 60
    while not (found := is_so()) and time.monotonic() < deadline:
        terminal.drain(0.05)
    return found


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def children_of(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            if stat.read_text().rpartition(")")[2].split()[1] == str(parent):
                found.append(int(stat.parent.name))
    return found
