"""Where the processes of a job on several hosts meet: an address of the first host that every other one reaches.

Found by trying, just before a start: the first host listens at the very port that the job will use, each other host
connects to each of its addresses. The fastest interface that all reach is taken. Which ports NCCL and gloo take beside
it is their choice, so between such hosts no port may be shut.
"""

from __future__ import annotations

import json
import secrets
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Any

from orchestrator.actions.site import Site
from orchestrator.errors import DraftyardError, HostError
from orchestrator.shell.stream import Source
from orchestrator.workplace import run_script, script_command, sense_in

FIRST_PORT, NUM_PORTS = 29500, 100  # torch's own and those after it
LISTEN_S = 90.0  # the longest that looking takes: a shell's answer, and five seconds an address
OFFER_S = 30.0


@dataclass(frozen=True)
class Offer:
    """What the first host listens at: its addresses in the order in which they are wished for."""

    port: int
    interfaces: Mapping[str, str | None]  # address -> interface there; null for one that leads to it from elsewhere


@dataclass(frozen=True)
class Answer:
    """What became of one address from one other host."""

    error: str | None
    interface: str | None


@dataclass(frozen=True)
class Meeting:
    """Address and port of the first host, and by which interface each host gets there, the first one included."""

    address: str
    port: int
    interfaces: tuple[str | None, ...]

    def variables(self, number: int) -> dict[str, str]:
        """What NCCL and gloo of that host are told, so that they take the same way: NCCL's `=` means just this name."""
        name = self.interfaces[number]
        return {} if name is None else {"NCCL_SOCKET_IFNAME": f"={name}", "GLOO_SOCKET_IFNAME": name}


def meet(sites: Sequence[Site], run_id: str) -> Meeting:
    """Raises HostError (exit 4) where no address of the first host is reached by all others, with what each said."""
    first, *others = sites
    token = secrets.token_hex(8)
    with _listening(first, token, run_id) as offer:
        answers = {site.host.name: _tried(site, token, offer) for site in others}
    return choose(first.host.name, offer, answers)


def choose(first: str, offer: Offer, answers: Mapping[str, Mapping[str, Answer]]) -> Meeting:
    """The earliest address of the offer that every other host has reached."""
    for address, interface in offer.interfaces.items():
        found = [answers[name][address] for name in answers]
        if all(answer.error is None for answer in found):
            return Meeting(address, offer.port, (interface, *(answer.interface for answer in found)))
    told = "\n".join(
        f"  {address}{f' ({interface})' if interface else ''}: "
        + ", ".join(f"{name}: {answers[name][address].error or 'reached'}" for name in answers)
        for address, interface in offer.interfaces.items()
    )
    raise HostError(
        f"no address of host {first} is reached by {' and '.join(answers)} at port {offer.port}, so their processes "
        f"cannot meet:\n{told or '  it has no IPv4 address'}\n  open the ports between these hosts, or put first a host "
        "that the others reach"
    )


# ------------------------------------------------------------------------- asking the hosts


@contextmanager
def _listening(site: Site, token: str, run_id: str) -> Iterator[Offer]:
    """The first host listens while inside, and its port is free again afterwards."""
    is_over, has_spoken = threading.Event(), threading.Event()
    said, faults = bytearray(), list[DraftyardError]()
    # Where runs start at the same time, each begins to look at another port.
    start = FIRST_PORT + zlib.crc32(run_id.encode()) % NUM_PORTS
    words = ["listen", token, str(start), str(NUM_PORTS), str(LISTEN_S)]

    def hear(piece: bytes) -> bool:
        said.extend(piece)
        if b"\n" in said:
            has_spoken.set()
        return is_over.is_set()

    def listen() -> None:
        command = script_command(site.place, "reach", words)
        try:
            site.shell.stream(command, source=Source.of(b""), sink=hear, timeout_s=LISTEN_S + 30)
        except DraftyardError as error:
            faults.append(error)
        has_spoken.set()

    listener = threading.Thread(target=listen, name=f"listening on {site.host.name}", daemon=True)
    listener.start()
    try:
        has_spoken.wait(OFFER_S)
        if faults:
            raise faults[0]
        yield _offer(site, bytes(said))
    finally:
        is_over.set()
        listener.join(OFFER_S)


def _offer(site: Site, said: bytes) -> Offer:
    line = said.partition(b"\n")[0]
    try:
        body = json.loads(line)
        port, own = body["port"], {str(item["address"]): str(item["interface"]) for item in body["addresses"]}
    except (ValueError, KeyError, TypeError) as error:
        raise DraftyardError(f"host {site.host.name}: remote/reach.py gives no such answer: {line[:200]!a}") from error
    if port is None:
        raise DraftyardError(f"host {site.host.name} has no free port to meet at; {NUM_PORTS} were tried")
    interfaces: dict[str, str | None] = dict(own)
    with suppress(ValueError):  # as it is reached from here, perhaps through a translated address; no name is asked for
        if not site.host.hops:
            interfaces.setdefault(str(IPv4Address(site.host.address)), None)
    return Offer(int(port), interfaces)


def _tried(site: Site, token: str, offer: Offer) -> dict[str, Answer]:
    answer: dict[str, Any] = run_script(
        site.shell, site.place, "reach", ["try", token, str(offer.port), *offer.interfaces]
    )
    with sense_in(site.shell, "reach", answer):
        return {str(item["address"]): Answer(item["error"], item["interface"]) for item in answer["answers"]}
