"""Hosts in network namespaces, each with an address and an sshd of its own, behind a link that can be cut.

The processes of all see the same files; what a host has of its own lies below the home folder of its server.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from orchestrator.host import Hosts
from orchestrator.shell.connect import connect
from orchestrator.shell.stream import StreamShell
from tests import sshd

# Tests run side by side in several processes: each has addresses of its own.
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def network(number: int) -> str:
    return f"198.18.{10 * WORKER + number + 10}"


@dataclass
class Away:
    """A machine behind a link that can be cut."""

    name: str
    link: str
    shell: StreamShell
    config: Path
    server: sshd.Server

    def cut(self, *, off: bool = True) -> None:
        subprocess.run(["ip", "link", "set", self.link, "down" if off else "up"], check=True)
        if not off:
            time.sleep(0.2)


def why_not() -> str | None:
    if os.geteuid() != 0 or not shutil.which("ip"):
        return "network namespaces need root and iproute2"
    name = f"dy{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None if tried.returncode == 0 else f"ip netns: {tried.stderr.decode(errors='replace').strip()}"


def away(number: int, folder: Path, stack: contextlib.ExitStack) -> Away:
    name, link, base = f"dy{os.getpid()}-{number}", f"dy{os.getpid() % 10000}v{number}", network(number)

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    ip("netns", "add", name)
    stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
    ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
    # By itself it goes some time after its namespace: too late for the next test's, which has the same name.
    stack.callback(subprocess.run, ["ip", "link", "del", link], check=False)
    ip("addr", "add", f"{base}.1/30", "dev", link)
    ip("link", "set", link, "up")
    for words in (
        ["addr", "add", f"{base}.2/30", "dev", "eth0"],
        ["link", "set", "eth0", "up"],
        ["link", "set", "lo", "up"],
    ):
        ip("-n", name, *words)
    server = stack.enter_context(sshd.running(folder / name, alias=name, address=f"{base}.2", netns=name))
    shell = connect(Hosts.load(None, server.config_file).find(name))
    stack.callback(shell.close)
    return Away(name, link, shell, server.config_file, server)


def joined(first: Away, second: Away) -> tuple[str, str]:
    """A wire between the two that this machine has no part in; their addresses on it. It goes with their namespaces."""
    made = [
        "ip",
        "link",
        "add",
        "eth1",
        "netns",
        first.name,
        "type",
        "veth",
        "peer",
        "name",
        "eth1",
        "netns",
        second.name,
    ]
    subprocess.run(made, check=True, capture_output=True)
    addresses = ("198.19.0.1", "198.19.0.2")
    for away, address in zip((first, second), addresses, strict=True):
        for words in (["addr", "add", f"{address}/30", "dev", "eth1"], ["link", "set", "eth1", "up"]):
            subprocess.run(["ip", "-n", away.name, *words], check=True, capture_output=True)
    return addresses
