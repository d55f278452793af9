"""Modules loaded at first use: whole, even when a person is impatient or several threads look at once."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.interrupts import Interrupted, heard_as_interrupts
from orchestrator.lazy import lazy, loaded
from tests.test_architecture import ROOT

SLOW = "import time\ntime.sleep(0.3)\n"  # long enough for the other threads to look; how long is no matter to a whole module


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules that are forgotten with the test."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and Path(str(sys.modules[name].__file__)).parent == tmp_path:
            del sys.modules[name]


def test_a_ctrl_c_while_a_module_loads_waits_until_it_is_whole(shelf: Path) -> None:
    (shelf / "impatient_module.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nLAST_LINE = 'ran'\n"
    )
    module = lazy("impatient_module")
    before = signal.getsignal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        _ = module.LAST_LINE

    assert module.LAST_LINE == "ran"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_that_counts_as_ctrl_c_waits_as_well(shelf: Path) -> None:
    (shelf / "asked_to_end.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nLAST_LINE = 'ran'\n"
    )
    module = lazy("asked_to_end")

    with heard_as_interrupts(), pytest.raises(Interrupted, match="SIGTERM"):
        _ = module.LAST_LINE

    assert module.LAST_LINE == "ran"


def test_nothing_is_loaded_before_the_first_look_and_then_it_is_the_module_itself(shelf: Path) -> None:
    (shelf / "looked_into.py").write_text("WORD = 'first'\n")

    module = lazy("looked_into")

    assert "looked_into" not in sys.modules
    assert module.WORD == "first"
    sys.modules["looked_into"].WORD = "second"  # type: ignore[attr-defined]
    assert module.WORD == "second"
    assert loaded("looked_into") is sys.modules["looked_into"]


@pytest.mark.slow
def test_threads_that_look_while_a_module_loads_see_it_whole(shelf: Path) -> None:
    """Python's own lazy loader hands a second thread the half that has run so far."""
    (shelf / "slow_module.py").write_text(f"{SLOW}LAST_LINE = 'ran'\n")
    module = lazy("slow_module")
    start = threading.Barrier(8)

    def look(number: int) -> str:
        start.wait()
        return str(module.LAST_LINE if number % 2 else loaded("slow_module").LAST_LINE)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(look, range(8))) == ["ran"] * 8


@pytest.mark.slow
def test_two_threads_may_load_modules_that_import_each_other(shelf: Path) -> None:
    """Python's import locks break such a tie by handing out half a module."""
    (shelf / "heads.py").write_text(f"{SLOW}import tails\nLAST_LINE = 'heads'\n")
    (shelf / "tails.py").write_text(f"{SLOW}import heads\nLAST_LINE = 'tails'\n")
    start = threading.Barrier(2)

    def look(name: str) -> str:
        start.wait()
        return str(lazy(name).LAST_LINE)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(look, ["heads", "tails"])) == ["heads", "tails"]


@pytest.mark.slow
def test_a_module_that_looks_back_at_its_importer_hands_no_other_thread_half_of_it(shelf: Path) -> None:
    (shelf / "upper.py").write_text(f"EARLY = 1\nimport lower\n{SLOW}LAST_LINE = 'ran'\n")
    (shelf / "lower.py").write_text("from orchestrator.lazy import lazy\nSEEN = lazy('upper').EARLY\n")
    start = threading.Barrier(2)

    def look(delay_s: float) -> str:
        start.wait()
        threading.Event().wait(delay_s)  # the second looks when the first is past its import
        return str(lazy("upper").LAST_LINE)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(look, [0.0, 0.1])) == ["ran", "ran"]


def test_a_module_that_failed_to_load_is_loaded_anew(shelf: Path) -> None:
    (shelf / "moody.py").write_text(
        "import os\nif not os.environ.get('DRAFTYARD_TEST_MOOD'):\n    raise OSError('no')\n"
    )
    module = lazy("moody")
    with pytest.raises(OSError, match="no"):
        _ = module.os

    os.environ["DRAFTYARD_TEST_MOOD"] = "good"
    try:
        assert module.os is os
    finally:
        del os.environ["DRAFTYARD_TEST_MOOD"]


@pytest.mark.slow
def test_the_screens_threads_may_all_be_the_first_to_ask() -> None:
    """What broke `watch` once: two threads asked for a plan, and one met the module without its functions."""
    code = """
import threading
from concurrent.futures import ThreadPoolExecutor
from tui.ordering import actions
asked = [("plans", "plan_memory"), ("plans", "plan_body"), ("order", "find_host"), ("recipes", "check"),
         ("jobs", "rehearse"), ("life", "ensure_follower"), ("history", "find"), ("plans", "plan_memory")]
start = threading.Barrier(len(asked))
def ask(question):
    start.wait()
    return getattr(actions(question[0]), question[1]).__name__
with ThreadPoolExecutor(len(asked)) as pool:
    assert list(pool.map(ask, asked)) == [name for _, name in asked]
"""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
