"""Two ways to one host, for us and for the tools beside us, and how they race on them.

An sshd of its own listens on loopback: the near way goes straight to it, the far one through a relay that holds
every byte back. Ours goes over an open connection; rsync and ssh over one of their own, or one that OpenSSH keeps.
What is sent over them is the business of `hosts`.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from orchestrator.host import Hosts
from orchestrator.shell.connect import connect
from orchestrator.shell.stream import StreamShell
from orchestrator.workplace import Workplace, workplace
from tests import delay, sshd

Act = Callable[[], object]
Made = Callable[[], Act]  # prepares one turn, untimed; what it returns is timed


@dataclass(frozen=True)
class Way:
    """A line to the host, for us and for the tools."""

    name: str  # near or far
    shell: StreamShell
    place: Workplace
    ssh: tuple[str, ...]
    keep: tuple[str, ...]  # what makes ssh keep its connection

    def run(self, *words: str, kept: bool) -> None:
        """A command over plain ssh."""
        call([*self._ssh(kept), self.name, *words])

    def rsync(self, source: Path, target: Path, *, kept: bool) -> None:
        call(["rsync", "-a", "-e", " ".join(self._ssh(kept)), f"{source}/", f"{self.name}:{target}/"])

    def _ssh(self, kept: bool) -> list[str]:
        return [*self.ssh, *(self.keep if kept else ())]


@contextlib.contextmanager
def two_ways(folder: Path, *, round_trip_ms: int) -> Iterator[tuple[sshd.Server, Way, Way]]:
    """The host below `folder`, the near way and the far one."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(sshd.running(folder / "sshd", alias="near"))
        port = stack.enter_context(delay.line(server.port, one_way_s=round_trip_ms / 2000))
        slow = replace(server, alias="far", port=port)
        server.config_file.write_text(server.config() + slow.config())
        server.known_hosts.write_text(
            "".join(f"[{server.address}]:{at} {server.host_key}\n" for at in (server.port, port))
        )
        near, far = (_way(stack, folder, server, name) for name in ("near", "far"))
        yield server, near, far


def call(words: list[str], *, check: bool = True) -> None:
    """A tool of this machine. Raises RuntimeError with what it said."""
    # stderr is no pipe: a connection that ssh keeps would hold it open.
    with tempfile.TemporaryFile() as said:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, check=False)
        said.seek(0)
        if check and done.returncode:
            raise RuntimeError(f"{words[0]} ended with exit code {done.returncode}: {said.read().decode().strip()}")


def race(repeats: int, ours: Made, fresh: Made, kept: Made) -> tuple[float, float, float]:
    """Medians; the three take turns, so that a busy moment hits all of them alike."""
    times: tuple[list[float], ...] = ([], [], [])
    for _ in range(repeats):
        for made, into in zip((ours, fresh, kept), times, strict=True):
            act = made()
            began = time.perf_counter()
            act()
            into.append(time.perf_counter() - began)
    return median(times[0]), median(times[1]), median(times[2])


def _way(stack: contextlib.ExitStack, folder: Path, server: sshd.Server, name: str) -> Way:
    host = replace(Hosts.load(None, server.config_file).find(name), python=sys.executable)
    shell = connect(host)
    stack.callback(shell.close)
    ssh = ("ssh", "-F", str(server.config_file))
    keep = ("-o", "ControlMaster=auto", "-o", "ControlPersist=600", "-o", f"ControlPath={folder}/{name}")
    stack.callback(call, [*ssh, *keep, "-O", "exit", name], check=False)
    return Way(name, shell, workplace(shell, host), ssh, keep)
