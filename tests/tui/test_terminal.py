"""The real program under a pseudo-terminal: what it writes there."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.tui_terminal import Face
from orchestrator.follow.lease import lease
from tests.tui.terminal import ENTER_SCREEN, LEAVE_SCREEN, Terminal, at_terminal, plain, watching
from tests.tui.world import Writer, Yard, steps
from tui.terminal import MOST_CELLS, terminal_size


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
    assert "2 runs go on" in plain(terminal.written)
    assert terminal.written.count(ENTER_SCREEN) == terminal.written.count(LEAVE_SCREEN) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "env", "kinds"),
    [
        (["--theme", "draftyard-light"], {"COLORTERM": "truecolor"}, {"2"}),
        (["--theme", "draftyard-16"], {"COLORTERM": "truecolor"}, set()),
        ([], {"TERM": "screen-256color", "COLORTERM": ""}, {"5"}),  # as in tmux
        ([], {"TERM": "xterm", "COLORTERM": ""}, set()),
        (["--theme", "draftyard-light"], {"NO_COLOR": "1", "FORCE_COLOR": "1", "COLORTERM": "truecolor"}, None),
        (["--theme", "draftyard-light"], {"NO_COLOR": "", "COLORTERM": "truecolor"}, {"2"}),
    ],
    ids=["light", "own-16", "256", "16", "none", "empty"],
)
def test_colours_are_those_that_the_terminal_knows_and_the_theme_has(
    arguments: list[str],
    env: dict[str, str],
    kinds: set[str] | None,
    filled_yard: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the sequences written: `2` for any colour, `5` for one of 256; without either the terminal's own; None: no colour."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    with watching(filled_yard, "--readonly", *arguments, env=env) as terminal:
        assert terminal.read_until("qwen27b/ddtree")
        terminal.press("q")
        assert terminal.end() == 0
    styles = re.findall(r"\x1b\[([\d;]+)m", terminal.written)
    mixed = {kind for style in styles for kind in re.findall(r"[34]8;([25])(?=;)", style)}
    rest = [re.sub(r"[34]8;(5;\d+|2;\d+;\d+;\d+)", "", style) for style in styles]
    own = {style for style in rest if re.search(r"(^|;)(3[0-7]|4[0-7]|9[0-7]|10[0-7])(;|$)", style)}

    assert mixed == (kinds or set())
    assert bool(own) == (kinds == set())
    assert ("48;2;250;250;250" in terminal.written) == ("draftyard-light" in arguments and kinds is not None)


@pytest.mark.slow
def test_a_storm_of_resizes_ends_at_the_last_size(yard_copy: Path) -> None:
    command = [sys.executable, "-m", "orchestrator.cli", "watch", "--db", str(yard_copy), "--readonly"]
    with at_terminal(command) as terminal:
        assert terminal.read_until("qwen27b/ddtree")
        for number in range(100):
            terminal.resize(*((20, 5), (400, 120), (81, 25), (60, 14))[number % 4])
            terminal.drain()
        begin = len(terminal.written)
        terminal.resize(100, 30)
        assert _has_keys_on_line(terminal, 30, since=begin)
        terminal.press("q")
        code = terminal.end()

    assert code == 0
    assert "Traceback" not in terminal.written
    assert terminal.written.count(ENTER_SCREEN) == terminal.written.count(LEAVE_SCREEN) == 1


def _has_keys_on_line(terminal: Terminal, line: int, *, since: int) -> bool:
    """Whether the line of keys comes to stand there, the last of a screen that is so high."""
    ends_s = time.monotonic() + 60
    while time.monotonic() < ends_s:
        terminal.drain(0.1)
        face = Face((100, line))
        face.feed(terminal.written[since:].encode())
        if "q quit" in (str(face).splitlines() or [""])[-1]:
            return True
    return False


@pytest.mark.slow
def test_resizes_that_come_in_bursts_are_laid_out_together(yard_copy: Path) -> None:
    """One layout for all of 1/120 s, and the last size wins: a handler that the next signal interrupts told the one before last."""
    command = [sys.executable, "-m", "orchestrator.cli", "watch", "--db", str(yard_copy), "--readonly"]
    with at_terminal(command) as terminal:
        assert terminal.read_until("qwen27b/ddtree")
        terminal.drain(0.5)
        seen, began_s = len(terminal.written), time.monotonic()
        for number in range(600):
            terminal.resize(*((20, 5), (400, 120), (81, 25), (60, 14))[number % 4])
            if number % 100 == 99:
                terminal.drain(0.01)
        terminal.resize(100, 30)
        is_last = _has_keys_on_line(terminal, 30, since=seen)
        took_s = time.monotonic() - began_s
        num_layouts = len(re.findall(r"draftyard  \[1:runs|is too small", plain(terminal.written[seen:])))
        terminal.press("q")
        terminal.end()

    assert is_last
    assert 1 <= num_layouts <= 2 + 120 * took_s
    assert num_layouts < 300


@pytest.mark.slow
def test_a_tiny_terminal_gets_a_message_and_still_quits(yard_copy: Path) -> None:
    command = [sys.executable, "-m", "orchestrator.cli", "watch", "--db", str(yard_copy), "--readonly"]
    with at_terminal(command, size=(20, 5)) as terminal:
        assert terminal.read_until("20×5 is too")
        terminal.press("q")

        assert terminal.end() == 0


@pytest.mark.slow
def test_sizes_of_no_use_end_no_screen(yard_copy: Path) -> None:
    """As a terminal that is dragged, or one whose size is told late, goes through them."""
    command = [sys.executable, "-m", "orchestrator.cli", "watch", "--db", str(yard_copy), "--readonly"]
    with at_terminal(command) as terminal:
        assert terminal.read_until("qwen27b/ddtree")
        for size in ((1, 1), (0, 0), (500, 1), (1, 300), (2, 2), (160, 40)) * 2:
            terminal.resize(*size)
            terminal.drain(0.15)  # long enough to be laid out for each
        begin = len(terminal.written)
        terminal.resize(100, 30)
        assert _has_keys_on_line(terminal, 30, since=begin)
        seen = len(terminal.written)
        terminal.resize(0, 0)
        terminal.drain(0.5)
        face = Face((100, 30))
        face.feed(terminal.written[seen:].encode())
        assert "q quit" not in "\n".join(str(face).splitlines()[:29]), "0 is a size that nobody knows, and not 80×24"
        terminal.press("q")

        assert terminal.end() == 0
    assert "broke" not in terminal.written


@pytest.mark.parametrize(
    ("told", "columns", "expected"),
    [
        ((0, 0), None, (81, 25)),
        ((0, 30), None, (81, 30)),
        ((1, 1), None, (1, 1)),
        ((65_535, 65_535), None, (MOST_CELLS, MOST_CELLS)),
        ((100, 30), "9" * 20, (MOST_CELLS, 30)),
        ((100, 30), "9" * 5000, (100, 30)),  # no number that Python reads
        ((100, 30), "-7", (100, 30)),
    ],
)
def test_a_size_is_one_that_a_terminal_can_have(
    told: tuple[int, int], columns: str | None, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size(told))

    assert terminal_size((81, 25)) == expected


@pytest.mark.slow
def test_columns_beyond_any_number_break_nothing(filled_yard: Path) -> None:
    environ = {**os.environ, "LANG": "C.UTF-8", "COLUMNS": "9" * 20, "LINES": "30"}
    command = [sys.executable, "-m", "orchestrator.cli", "watch", "--db", str(filled_yard), "--once"]

    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert "qwen27b/ddtree" in done.stdout


@pytest.mark.slow
def test_pasted_text_is_no_command(yard_copy: Path) -> None:
    """A terminal marks what is pasted; `q` and `x` in it neither quit nor stop."""
    with watching(yard_copy, "--readonly") as terminal:
        assert terminal.read_until("qwen27b/ddtree")
        assert "\x1b[?2004h" in terminal.written
        terminal.press("\x1b[200~q\nxq\x1b[201~")
        terminal.drain(1.0)
        assert terminal.process.poll() is None
        assert "only looks" not in plain(terminal.written)
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
        seen = len(terminal.written)
        terminal.press("4")  # the page before has the words of the log too
        assert terminal.read_until(r"attempt 1\s+stderr[\s\S]*OutOfMemoryError: CUDA", since=seen)
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
