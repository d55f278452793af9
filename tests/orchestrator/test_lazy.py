"""Modules loaded at first use: whole, even when a person is impatient."""

import os
import signal
import sys
from pathlib import Path

import pytest

from orchestrator.lazy import lazy


def test_a_ctrl_c_while_a_module_loads_waits_until_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "impatient_module.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nLAST_LINE = 'ran'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = lazy("impatient_module")
    before = signal.getsignal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        _ = module.LAST_LINE

    assert module.LAST_LINE == "ran"
    assert signal.getsignal(signal.SIGINT) is before
    del sys.modules["impatient_module"]


def test_a_module_that_is_loaded_is_the_same_one() -> None:
    assert lazy("os") is os
