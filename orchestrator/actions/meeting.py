"""Where the processes of a job on several hosts meet: an address of the first host that every other one reaches.

Found by trying, just before a start: the first host listens at the very port that the job will use, each other host
connects to each of its addresses. The fastest interface that all reach is taken. Which ports NCCL and gloo take beside
it is their choice, so between such hosts no port may be shut.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Any

from orchestrator.actions.site import Site
from orchestrator.errors import DraftyardError, HostError
from orchestrator.shell.stream import Ended, Source, told
from orchestrator.workplace import run_script, script_command, sense_in

FIRST_PORT, NUM_PORTS = 29500, 100  # torch's own and those after it
LISTEN_S = 90.0  # the longest that looking takes: a shell's answer, and five seconds an address
OFFER_S = 30.0
INTERFACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+~-]{0,14}")  # no `^`, `=` or comma, which mean something to NCCL


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
    faults: list[DraftyardError] = []
    with _listening(first, token, run_id, faults) as offer, ThreadPoolExecutor(len(others)) as threads:
        found = list(threads.map(lambda site: _tried(site, token, offer), others))
    answers = {site.host.name: each for site, each in zip(others, found, strict=True)}
    try:
        return choose(first.host.name, offer, answers)
    except HostError:
        if faults:  # nobody was there to be reached: no word on the hosts' ports
            raise faults[0] from None
        raise


def choose(first: str, offer: Offer, answers: Mapping[str, Mapping[str, Answer]]) -> Meeting:
    """The earliest address of the offer that every other host has reached."""
    for address, interface in offer.interfaces.items():
        found = [answers[name][address] for name in answers]
        if all(answer.error is None for answer in found):
            return Meeting(address, offer.port, (interface, *(answer.interface for answer in found)))
    each = "\n".join(
        f"  {address}{f' ({interface})' if interface else ''}: "
        + ", ".join(f"{name}: {answers[name][address].error or 'reached'}" for name in answers)
        for address, interface in offer.interfaces.items()
    )
    raise HostError(
        f"no address of host {first} is reached by {' and '.join(answers)} at port {offer.port}, so their processes "
        f"cannot meet:\n{each or '  it has no IPv4 address, and processes meet over IPv4 alone'}\n  open the ports between these hosts, or put first a host "
        "that the others reach"
    )


# ------------------------------------------------------------------------- asking the hosts


@contextmanager
def _listening(site: Site, token: str, run_id: str, faults: list[DraftyardError]) -> Iterator[Offer]:
    """The first host listens while inside, and its port is free again afterwards. `faults`: why it ceased to before."""
    is_over, has_spoken = threading.Event(), threading.Event()
    said = bytearray()
    # Where runs start at the same time, each begins to look at another port.
    offset = zlib.crc32(run_id.encode()) % NUM_PORTS
    words = ["listen", token, str(FIRST_PORT), str(NUM_PORTS), str(offset), str(LISTEN_S)]

    def hear(piece: bytes) -> bool:
        said.extend(piece)
        if b"\n" in said:
            has_spoken.set()
        return is_over.is_set()

    def listen() -> None:
        command = script_command(site.place, "reach", words)
        try:
            ended = site.shell.stream(command, source=Source.of(b""), sink=hear, timeout_s=LISTEN_S + 30)
            if ended.exit_code is not None:  # by itself
                faults.append(_gone(site, ended))
        except DraftyardError as error:
            faults.append(error)
        has_spoken.set()

    listener = threading.Thread(target=listen, name=f"listening on {site.host.name}", daemon=True)
    listener.start()
    try:
        has_spoken.wait(OFFER_S)
        if faults and b"\n" not in said:
            raise faults[0]
        yield _offer(site, bytes(said))
    finally:
        is_over.set()
        listener.join(OFFER_S)


def _gone(site: Site, ended: Ended) -> DraftyardError:
    said = told(ended.stderr, 200) or f"exit status {ended.exit_code}"
    return DraftyardError(
        f"host {site.host.name} has ceased to listen while the others tried to reach it: {said}\n  launch it again; "
        "should it be so again, look for what ends processes there"
    )


def _offer(site: Site, said: bytes) -> Offer:
    """What a host says becomes a word of a command, and a variable of a job, on others: no more than an address, a port
    and a name of an interface passes."""
    line = said.partition(b"\n")[0]
    try:
        body = json.loads(line)
        port = body["port"]
        own = {str(IPv4Address(str(item["address"]))): _interface(item["interface"]) for item in body["addresses"]}
        if port is not None and port not in range(FIRST_PORT, FIRST_PORT + NUM_PORTS):
            raise ValueError(f"no port of ours: {port}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DraftyardError(f"host {site.host.name}: remote/reach.py gives no such answer: {line[:200]!a}") from error
    if port is None:
        raise DraftyardError(
            f"host {site.host.name} has no free port to meet at: all of {FIRST_PORT} to {FIRST_PORT + NUM_PORTS - 1} are "
            "taken\n  end what holds them there (ss -ltnp), or put another host first"
        )
    interfaces = dict(own)
    with suppress(ValueError):  # as it is reached from here, perhaps through a translated address; no name is asked for
        if not site.host.hops:
            interfaces.setdefault(str(IPv4Address(site.host.address)), None)
    return Offer(port, interfaces)


def _tried(site: Site, token: str, offer: Offer) -> dict[str, Answer]:
    answer: dict[str, Any] = run_script(
        site.shell, site.place, "reach", ["try", token, str(offer.port), *offer.interfaces]
    )
    with sense_in(site.shell, "reach", answer):
        found = {str(item["address"]): item for item in answer["answers"]}
        return {address: _answer(found[address]) for address in offer.interfaces}


def _answer(item: Mapping[str, Any]) -> Answer:
    error = item["error"]
    return Answer(None if error is None else told(str(error).encode(), 200), _interface(item["interface"]))


def _interface(name: object) -> str | None:
    """None also for one that NCCL and gloo could not be told, such as a list: then they look for themselves."""
    return name if isinstance(name, str) and INTERFACE.fullmatch(name) else None
