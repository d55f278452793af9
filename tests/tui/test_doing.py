"""The real program in a real terminal does real work by keys: gate, smoke, launch, stop, reap."""

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.store.reads import Reader
from tests.orchestrator.conftest import yard  # noqa: F401 - a project of its own
from tests.orchestrator.test_first_light import follower_pids
from tests.orchestrator.yard import RECIPE, Yard
from tests.tui.terminal import Terminal, at_terminal, plain

pytestmark = pytest.mark.slow  # starts the program, the follower and jobs

PATIENCE_S = 120.0  # for what takes a second or two on an idle machine
CTRL_L, ENTER, ESCAPE, TAB, ERASE = "\x0c", "\r", "\x1b", "\t", "\x7f"


@contextmanager
def watch(*words: str, size: tuple[int, int] = (120, 40)) -> Iterator[Terminal]:
    with at_terminal([sys.executable, "-m", "orchestrator.cli", "watch", *words], size=size) as terminal:
        yield terminal


def press_until(terminal: Terminal, keys: str, pattern: str) -> None:
    """The keys, then what they lead to: nothing is pressed before the screen has got there."""
    before = len(terminal.written)
    terminal.press(keys)
    assert terminal.read_until(pattern, timeout_s=PATIENCE_S, since=before), plain(terminal.written[before:])[-4000:]


def states(yard: Yard) -> list[tuple[str, str]]:  # noqa: F811
    """Kind and state of every run, oldest first."""
    return [(run["kind"], run["state"]) for run in reversed(yard.json("ls", "--kind", "all")["runs"])]


def test_a_run_is_launched_from_the_screen_once_the_gate_allows_it(yard: Yard) -> None:  # noqa: F811
    """Recipe, branch, host and overrides are chosen by keys; the plan and the gate are seen before `^l` works."""
    with watch() as terminal:
        assert terminal.read_until("No runs yet", timeout_s=PATIENCE_S)
        press_until(terminal, "4", "tiny/oom")
        press_until(terminal, "G", "must fit")  # a bundled branch has a plan of its memory
        press_until(terminal, "gj", "tiny/slow on local")
        press_until(terminal, TAB, "help")
        press_until(terminal, ERASE * len("local") + "nowhere", "nowhere.* is (not|no|un)|no host")
        press_until(terminal, ERASE * len("nowhere") + "local", "tiny/slow on local")
        press_until(terminal, TAB, "the gate chooses")
        press_until(terminal, TAB, "none; or section")
        press_until(terminal, "life.grace=2s", "did you mean .*grace_s")
        press_until(terminal, CTRL_L, "Ask the gate first")
        press_until(terminal, ERASE * len("=2s") + "_s=2s", "a plan is for the bundled trainer")
        press_until(terminal, ENTER, "Launch is refused")
        press_until(terminal, CTRL_L, r"Launch is refused: \w+ missing")
        assert states(yard) == []

        press_until(terminal, ESCAPE, "smoke missing")
        press_until(terminal, "m", "succeeded")  # the smoke run opens by itself
        press_until(terminal, ESCAPE, "tiny/slow on local")
        press_until(terminal, ENTER, "Launch is allowed")
        assert states(yard) == [("smoke", "succeeded")]

        press_until(terminal, CTRL_L, r"step [\d,]+ of 100,000")
        press_until(terminal, "x", r"stop tiny/slow[\s\S]*on local")
        press_until(terminal, "y", "X stopped")
        terminal.press("q")
        code = terminal.end()

    assert code == 0
    assert states(yard) == [("smoke", "succeeded"), ("train", "stopped")]
    with Reader(yard.root / "runs.db") as reader:
        spec = yard.json("show", reader.runs("")[0].id)["spec"]
    assert spec["life"]["grace_s"] == 2.0


def test_an_orphan_is_found_and_ended_from_the_hosts_screen(yard: Yard) -> None:  # noqa: F811
    """Its run was marked as ended by hand while the job lives on; the question names each process."""
    assert yard.run("launch", "tiny", "-b", "slow", "--force", "a test of the screen") == 0, yard.err
    run_id = str(yard.json("ls")["runs"][0]["id"])
    wait_for_step(yard, run_id)
    assert yard.run("mark", run_id, "failed", "the box was said to be gone") == 0

    with watch() as terminal:
        assert terminal.read_until("tiny/slow", timeout_s=PATIENCE_S)
        press_until(terminal, "2", "▸ local")
        press_until(terminal, "o", r"end \d+ process(es)? of ended runs on local")
        assert terminal.read_until(rf"pid \d+, run {run_id}", timeout_s=PATIENCE_S)
        pids = {int(pid) for pid in re.findall(rf"pid (\d+), run {run_id}", plain(terminal.written))}
        lived = [is_alive(pid) for pid in pids]
        press_until(terminal, "y", r"local: ended \d+ process")
        press_until(terminal, "o", "no process of an ended run is left")
        terminal.press("q")
        code = terminal.end()

    assert code == 0
    assert lived
    assert all(lived)
    assert not [pid for pid in pids if is_alive(pid)]


def test_a_rung_of_a_recipe_given_by_its_path_is_climbed_again_from_the_screen(yard: Yard) -> None:  # noqa: F811
    """Another recipe has the same name in the project: what is climbed is what was climbed, overrides and all."""
    elsewhere = yard.root / "elsewhere"
    (yard.root / "recipes" / "job").rename(yard.root / "job")
    elsewhere.mkdir()
    (yard.root / "job").rename(elsewhere / "job")
    (elsewhere / "tiny.yaml").write_text(RECIPE, encoding="utf-8")
    (yard.root / "recipes" / "tiny.yaml").write_text("name: tiny\nwhy: another one that cannot even be read\n")
    words = ["smoke", "elsewhere/tiny.yaml", "-b", "main", "--set", "life.grace_s=3s"]
    assert yard.run(*words) == 0, yard.err
    first = str(yard.json("ls", "--kind", "all")["runs"][0]["id"])
    assert yard.run("wait", first, "--timeout", "60s") == 0, yard.err

    with watch(size=(140, 40)) as terminal:
        assert terminal.read_until("help", timeout_s=PATIENCE_S)
        press_until(terminal, "3", "tiny/main")
        press_until(terminal, "m", "nothing is missing")
        press_until(terminal, "\x1b[C" * 9 + "R", r"smoke run \S+ started")
        press_until(terminal, ENTER, "succeeded")
        terminal.press("q")
        code = terminal.end()

    newest, *older = yard.json("ls", "--kind", "all")["runs"]
    assert code == 0
    assert [run["id"] for run in older] == [first]
    assert (newest["kind"], newest["state"]) == ("smoke", "succeeded")
    assert newest["fingerprint"] == older[0]["fingerprint"]


def test_a_live_run_that_nobody_follows_is_followed_again_by_whoever_watches(yard: Yard) -> None:  # noqa: F811
    assert yard.run("launch", "tiny", "-b", "slow", "--force", "a test of the screen") == 0, yard.err
    wait_for_step(yard, str(yard.json("ls")["runs"][0]["id"]))
    killed = follower_pids(yard.root / "runs.db")
    for pid in killed:
        os.kill(pid, signal.SIGKILL)

    with watch("--readonly") as terminal:
        assert terminal.read_until(r"follower off \(readonly\)", timeout_s=PATIENCE_S)
        terminal.press("q")
        terminal.end()
    only_looked = follower_pids(yard.root / "runs.db")
    with watch() as terminal:
        assert terminal.read_until("tiny/slow", timeout_s=PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while not (there := follower_pids(yard.root / "runs.db")) and time.monotonic() < deadline:
            terminal.drain(0.2)
        terminal.press("q")
        terminal.end()

    assert killed
    assert only_looked == []
    assert len(there) == 1


def wait_for_step(yard: Yard, run_id: str) -> None:  # noqa: F811
    deadline = time.monotonic() + PATIENCE_S
    while (yard.json("show", run_id)["run"]["step"] or 0) < 1:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    """Not ended, nor waiting to be collected by whoever started it."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False
