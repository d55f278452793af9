"""The real program in a real terminal on a real run over real SSH: watched, cut off, unplugged, stopped from the screen."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from shutil import which

import pytest

from tests import sshd
from tests.orchestrator.conftest import yard  # noqa: F401 - a project of its own
from tests.orchestrator.yard import RECIPE, Yard
from tests.tui.terminal import Terminal, Tmux, at_terminal, in_tmux, plain, shows


def newest_step(written: str) -> int:
    return max(
        (int(text.replace(",", "")) for text in re.findall(r"step ([\d,]+) of 100,000", plain(written))), default=0
    )


def launched(yard: Yard, server: sshd.Server, tmp_path: Path) -> str:  # noqa: F811
    hosts = server.hosts_yaml(work_dir=json.dumps(str(tmp_path / "there")), python=json.dumps(sys.executable))
    (yard.root / "hosts.yaml").write_text(hosts)
    yard.edit("tiny.yaml", RECIPE)
    assert yard.run("launch", "tiny", "-b", "slow", "--host", "box", "--force", "a test of the screen") == 0, yard.err
    return str(yard.json("ls")["runs"][0]["id"])


@contextmanager
def launched_run(yard: Yard, tmp_path: Path) -> Iterator[tuple[sshd.Server, str]]:  # noqa: F811
    """A run on a server of its own; stopped before the server goes, as nobody could stop it afterwards."""
    with sshd.running(tmp_path / "sshd", alias="box") as server:
        run_id = launched(yard, server, tmp_path)
        try:
            yield server, run_id
        finally:
            server.freeze(stopped=False)
            yard.run("stop", run_id, "--now", "--timeout", "60s")


@pytest.mark.slow
@pytest.mark.parametrize(
    "opened_in",
    [at_terminal, pytest.param(in_tmux, marks=pytest.mark.skipif(not which("tmux"), reason="tmux is not installed"))],
    ids=["pseudo-terminal", "tmux"],
)
def test_a_run_over_ssh_is_watched_through_a_cut_and_stopped_by_a_key(
    opened_in: Callable[..., AbstractContextManager[Terminal | Tmux]],
    yard: Yard,  # noqa: F811
    tmp_path: Path,
) -> None:
    with launched_run(yard, tmp_path) as (server, run_id):
        command = [sys.executable, "-m", "orchestrator.cli", "watch", run_id]
        with opened_in(command, size=(100, 30)) as terminal:
            assert shows(terminal, r"step [\d,]+ of 100,000")
            server.cut()
            step = newest_step(terminal.screen())
            for _ in range(120):
                if newest_step(terminal.screen()) > step + 20:
                    break
                time.sleep(0.5)
            reached = newest_step(terminal.screen())
            terminal.press("x")
            asked = shows(terminal, "on box")
            terminal.press("y")
            stopped = shows(terminal, "X stopped")
            terminal.press("q")
            code = terminal.end()

        assert reached > step + 20
        assert asked
        assert stopped
        assert code == 0
        assert yard.json("show", run_id)["run"]["state"] == "stopped"


@pytest.mark.slow
def test_a_host_that_falls_silent_is_said_and_the_screen_goes_on(yard: Yard, tmp_path: Path) -> None:  # noqa: F811
    """Its sshd takes no word any more, as when a cable is pulled; the run is live all the while and is found again."""
    with launched_run(yard, tmp_path) as (server, run_id):
        with at_terminal([sys.executable, "-m", "orchestrator.cli", "watch", run_id], size=(100, 30)) as terminal:
            assert terminal.read_until(r"step [\d,]+ of 100,000")
            server.freeze()
            server.cut()  # after the freeze: what was open is gone, and nobody answers a new connection
            assert terminal.read_until(r"R\? running  host unreachable since \d\d:\d\d", timeout_s=90)
            # Each is a repaint of what is known: 0.03 to 0.08 s. Whoever waited for the host would wait each time, for longer
            # than a connection is tried; so of three presses the quickest counts, which no busy neighbour slows.
            rounds = [[answered_in_s(terminal, key, words) for key, words in PANES] for _ in range(3)]
            answered_in_s(terminal, "\x1b", r"R\? +tiny/slow +\w+ running")
            answered_in_s(terminal, "2", r"unreachable since \d\d:\d\d")
            seen = len(terminal.written)
            server.freeze(stopped=False)
            assert terminal.read_until("reachable  seen", since=seen, timeout_s=90)
            terminal.press("q")
            code = terminal.end()
        state = yard.json("show", run_id)["run"]["state"]

    assert max(min(of_pane) for of_pane in zip(*rounds, strict=True)) < 1.0, rounds
    assert code == 0
    assert state == "running"


def curve(screen: str) -> set[tuple[int, int, str]]:
    """The cells of the charts: row, column and braille sign."""
    lines = enumerate(screen.splitlines())
    return {
        (row, column, sign) for row, line in lines for column, sign in enumerate(line) if "\u2800" < sign <= "\u28ff"
    }


@pytest.mark.slow
def test_the_curve_of_a_live_run_moves_and_q_leaves_it_training(yard: Yard, tmp_path: Path) -> None:  # noqa: F811
    with launched_run(yard, tmp_path) as (_, run_id):
        with at_terminal([sys.executable, "-m", "orchestrator.cli", "watch", run_id], size=(100, 30)) as terminal:
            assert shows(terminal, r"step [\d,]+ of 100,000")
            terminal.press("2")
            assert shows(terminal, "▸ loss")
            deadline = time.monotonic() + 120
            while len(before := curve(terminal.screen())) < 20:
                assert time.monotonic() < deadline, terminal.screen()
                time.sleep(0.2)
            while curve(terminal.screen()) == before:
                assert time.monotonic() < deadline, "the run goes on and its curves do not"
                time.sleep(0.2)
            terminal.press("1")
            assert shows(terminal, r"step [\d,]+ of 100,000")
            left_at = newest_step(terminal.screen())
            terminal.press("q")
            code = terminal.end()
        deadline = time.monotonic() + 120
        while (run := yard.json("show", run_id)["run"])["step"] <= left_at + 20:
            assert time.monotonic() < deadline, run
            time.sleep(0.5)

    assert code == 0
    assert run["state"] == "running"


PANES = (("2", "▸ loss"), ("4", "f follow"), ("6", "spec_version"), ("1", "bottleneck|Speed"))


def answered_in_s(terminal: Terminal, key: str, words: str) -> float:
    """From a key to what it opens."""
    seen, began = len(terminal.written), time.monotonic()
    terminal.press(key)
    assert terminal.read_until(words, since=seen), plain(terminal.written[seen:])
    return time.monotonic() - began
