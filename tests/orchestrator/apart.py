"""Hosts in network namespaces, each with an address and an sshd of its own, behind a link that can be cut.

The processes of all see the same files; what a host has of its own lies below the home folder of its server.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator.host import Hosts
from orchestrator.shell.connect import connect
from orchestrator.shell.stream import StreamShell
from tests import sshd

# Tests run side by side in several processes, of one suite and of others: each host takes a network of four addresses
# for itself by making the link of that number, which the kernel lets nobody make twice.
NUM_NETWORKS = 2**14  # of four addresses in 198.18.0.0/16, which RFC 2544 sets apart for tests


@dataclass
class Away:
    """A machine behind a link that can be cut."""

    name: str  # of its namespace
    link: str
    address: str
    shell: StreamShell
    config: Path
    server: sshd.Server

    def cut(self, *, off: bool = True) -> None:
        subprocess.run(["ip", "link", "set", self.link, "down" if off else "up"], check=True)
        if not off:
            time.sleep(0.2)


def needed() -> None:
    """Skips where no namespace can be made; fails where it should be: for root, and where CI is to show what they show."""
    if (reason := why_not()) is None:
        return
    if os.environ.get("CI") or os.geteuid() == 0:
        pytest.fail(f"{reason}; nothing of hosts apart would be shown here", pytrace=False)
    pytest.skip(reason)


def why_not() -> str | None:
    if os.geteuid() != 0 or not shutil.which("ip"):
        return "network namespaces need root and iproute2"
    name = f"dy{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None if tried.returncode == 0 else f"ip netns: {tried.stderr.decode(errors='replace').strip()}"


def ip(*words: str, check: bool = True) -> bool:
    return subprocess.run(["ip", *words], check=check, capture_output=True).returncode == 0


def away(number: int, folder: Path, stack: contextlib.ExitStack) -> Away:
    name = f"dy{os.getpid()}-{number}"
    ip("netns", "add", name)
    stack.callback(ip, "netns", "del", name, check=False)
    link, ours, theirs = _network_of_its_own(name)
    # By itself it goes some time after its namespace: too late for whoever takes the number next.
    stack.callback(ip, "link", "del", link, check=False)
    ip("addr", "add", f"{ours}/30", "dev", link)
    ip("link", "set", link, "up")
    for words in (
        ["addr", "add", f"{theirs}/30", "dev", "eth0"],
        ["link", "set", "eth0", "up"],
        ["link", "set", "lo", "up"],
    ):
        ip("-n", name, *words)
    server = stack.enter_context(sshd.running(folder / name, alias=name, address=theirs, netns=name))
    shell = connect(Hosts.load(None, server.config_file).find(name))
    stack.callback(shell.close)
    return Away(name, link, theirs, shell, server.config_file, server)


def _network_of_its_own(name: str) -> tuple[str, str, str]:
    """The link into a namespace, made, and the addresses of this machine and of the namespace on it."""
    for _ in range(100):
        number = secrets.randbelow(NUM_NETWORKS)
        link, base = f"dyv{number}", f"198.18.{number // 64}.{number % 64 * 4}"
        if ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name, check=False):
            start, _, last = base.rpartition(".")
            return link, f"{start}.{int(last) + 1}", f"{start}.{int(last) + 2}"
    raise RuntimeError("no link to a namespace can be made")


def joined(first: Away, second: Away) -> tuple[str, str]:
    """A wire between the two that this machine has no part in; their addresses on it. It goes with their namespaces."""
    ip("link", "add", "eth1", "netns", first.name, "type", "veth", "peer", "name", "eth1", "netns", second.name)
    addresses = ("198.19.0.1", "198.19.0.2")
    for away, address in zip((first, second), addresses, strict=True):
        for words in (["addr", "add", f"{address}/30", "dev", "eth1"], ["link", "set", "eth1", "up"]):
            ip("-n", away.name, *words)
    return addresses
