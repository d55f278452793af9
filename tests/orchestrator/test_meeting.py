"""Where hosts meet: what they say is held to be an address and a name, and each is asked while the others are."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from orchestrator.actions.meeting import meet
from orchestrator.actions.site import Site
from orchestrator.errors import DraftyardError, HostError
from orchestrator.host import LOCAL
from orchestrator.shell.local import LocalShell
from orchestrator.shell.stream import Ended, Sink, Source
from orchestrator.workplace import Workplace

PLACE = Workplace("/srv/draftyard", sys.executable, "/root")
PATIENCE_S = 60.0


class Said:
    """A host that gives one answer to every script; as a listener it then stays until nobody hears it any more."""

    def __init__(self, name: str, answer: dict[str, Any], *, dies: bytes | None = None) -> None:
        self.label, self.dies = name, dies
        self.line = json.dumps(answer).encode() + b"\n"
        self.asked: list[list[str]] = []
        self.before: Callable[[], object] = lambda: None

    def stream(self, argv: list[str], *, source: Source, sink: Sink, timeout_s: float, idle: bool = False) -> Ended:
        self.asked.append(argv)
        self.before()
        is_over = sink(self.line)
        if "listen" not in argv or self.dies is not None:
            return Ended(1 if self.dies else 0, self.dies or b"")
        while not is_over:
            time.sleep(0.01)
            is_over = sink(b"\n")
        return Ended(None, b"")


def site(name: str, shell: object) -> Site:
    return Site(replace(LOCAL, name=name), cast("Any", shell), PLACE, {})


def offer(*, port: Any = 29517, address: Any = "192.0.2.1", interface: Any = "eth0") -> dict[str, Any]:
    return {"port": port, "addresses": [{"address": address, "interface": interface}]}


def answer(*, error: str | None = None, interface: Any = "eth1", address: str = "192.0.2.1") -> dict[str, Any]:
    return {"answers": [{"address": address, "error": error, "interface": interface}]}


@pytest.mark.slow
def test_hosts_that_reach_one_another_meet(tmp_path: Path) -> None:
    met = meet([site(name, LocalShell(tmp_path)) for name in "abc"], "a-run")

    assert 29500 <= met.port < 29700
    assert len(met.interfaces) == 3
    assert None not in met.interfaces


def test_a_listener_that_died_is_the_fault_and_no_port_is_blamed() -> None:
    first = Said("a", offer(), dies=b"Killed")

    with pytest.raises(DraftyardError, match=r"host a has ceased to listen while the others tried .*: Killed") as told:
        meet([site("a", first), site("b", Said("b", answer(error="Connection refused")))], "a-run")

    assert "open the ports" not in str(told.value)


def test_a_listener_that_lives_leaves_the_word_to_the_ports() -> None:
    with pytest.raises(HostError, match="open the ports"):
        meet([site("a", Said("a", offer())), site("b", Said("b", answer(error="Connection refused")))], "a-run")


@pytest.mark.parametrize(
    "said",
    [
        offer(address="--help"),
        offer(address="192.0.2.1 -x"),
        offer(address=["192.0.2.1"]),
        offer(port="29500"),
        offer(port=22),
        {"port": 29500, "addresses": {"192.0.2.1": "eth0"}},
    ],
)
def test_what_is_no_address_or_no_port_of_ours_becomes_no_word_of_a_command(said: dict[str, Any]) -> None:
    other = Said("b", answer())

    with pytest.raises(DraftyardError, match=r"host a: remote/reach\.py gives no such answer"):
        meet([site("a", Said("a", said)), site("b", other)], "a-run")

    assert other.asked == []


@pytest.mark.parametrize("name", ["^eth0", "eth0,eth1", "=lo", "", "a" * 16, "x y", "-x", "eth0\n", 7, None])
def test_what_is_no_name_of_an_interface_becomes_no_variable(name: object) -> None:
    here = meet([site("a", Said("a", offer(interface=name))), site("b", Said("b", answer()))], "a-run")
    there = meet([site("a", Said("a", offer())), site("b", Said("b", answer(interface=name)))], "a-run")

    assert (here.variables(0), there.variables(1)) == ({}, {})
    assert here.variables(1) == {"NCCL_SOCKET_IFNAME": "=eth1", "GLOO_SOCKET_IFNAME": "eth1"}


def test_an_answer_that_leaves_an_address_out_is_an_error_in_one_line() -> None:
    with pytest.raises(DraftyardError, match=r"b: remote/reach\.py gives no such answer"):
        meet([site("a", Said("a", offer())), site("b", Said("b", answer(address="192.0.2.9")))], "a-run")


def test_what_a_host_says_of_an_error_steers_no_terminal() -> None:
    with pytest.raises(HostError) as told:
        meet([site("a", Said("a", offer())), site("b", Said("b", answer(error="\x1b[2Jno route")))], "a-run")

    assert "b: no route" in str(told.value)


def test_all_others_try_at_the_same_time() -> None:
    """Each answers only once every one of them is asked: one after the other they would wait for ever."""
    others = [Said(name, answer()) for name in "bcd"]
    together = threading.Barrier(len(others))
    for other in others:
        other.before = lambda: together.wait(PATIENCE_S)

    met = meet([site("a", Said("a", offer())), *(site(other.label, other) for other in others)], "a-run")

    assert met.interfaces == ("eth0", "eth1", "eth1", "eth1")
