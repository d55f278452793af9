"""Two clients that ship the same content at once: one sends, the other waits and goes on where the first one stopped."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.parcel import Progress
from orchestrator.shell.local import LocalShell
from orchestrator.shell.stream import Source
from orchestrator.ship import Patience, ship
from orchestrator.tree import Entry, Tree
from orchestrator.workplace import Workplace
from remote.receive import Store
from tests.remote.test_receive import LARGE, LARGE_SHA, SENT, half_sent, until_locked


class Counting(LocalShell):
    """Lets the other client go on at the first look, and knows what each question weighed."""

    def __init__(self, other: subprocess.Popen[bytes]) -> None:
        super().__init__()
        self._other = other
        self.weights: list[tuple[str, int]] = []

    def stream(self, argv: list[str], *, source: Source, **options: Any) -> Any:
        verb = next(word for word in argv if word in ("make", "look"))
        self.weights.append((verb, sum(map(len, argv)) + len(source.head)))
        if verb == "look":
            self._other.communicate(LARGE[SENT:])
        return super().stream(argv, source=source, **options)


@pytest.mark.slow
def test_while_another_client_sends_no_manifest_travels_again(tmp_path: Path) -> None:
    """Of 100,000 files it would be 15 MB, twice a second."""
    names = [f"{hashlib.sha256(str(number).encode()).hexdigest()}.txt" for number in range(1000)]
    (tmp_path / "large").write_bytes(LARGE)
    (tmp_path / "empty").touch()
    empty = [Entry(name, 0o644, 0, hashlib.sha256().hexdigest(), None, tmp_path / "empty") for name in names]
    tree = Tree((*empty, Entry("large", 0o644, len(LARGE), LARGE_SHA, None, tmp_path / "large")))
    with half_sent(tmp_path / "work", "o" * 64, quiet_s=60) as other:
        until_locked(Store(tmp_path / "work"))
        shell = Counting(other)

        place = Workplace(str(tmp_path / "work"), sys.executable, "/")
        shipped = ship(tree, shell, place, patience=Patience(pause_s=0.02))

    assert [verb for verb, _ in shell.weights] == ["make", "look", "make"]
    assert shell.weights[1][1] < shell.weights[0][1] - 30_000
    assert shipped.sent_bytes == 0
    assert (Path(shipped.path) / "large").read_bytes() == LARGE


@pytest.mark.slow  # the silence is real, and longer than a busy machine pauses
def test_a_client_that_waited_goes_on_where_the_silent_one_stopped(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(LARGE)
    tree = Tree((Entry("large", 0o644, len(LARGE), LARGE_SHA, None, tmp_path / "large"),))
    told: list[Progress] = []
    with half_sent(tmp_path / "work", tree.hash, quiet_s=3.0) as receiver:
        until_locked(Store(tmp_path / "work"))

        place = Workplace(str(tmp_path / "work"), sys.executable, "/")
        shipped = ship(tree, LocalShell(), place, on_progress=told.append, patience=Patience(pause_s=0.02))

    assert (Path(shipped.path) / "large").read_bytes() == LARGE
    assert shipped.sent_bytes == len(LARGE) - SENT
    assert any(f"pid {receiver.pid} " in step.waits_for for step in told)
