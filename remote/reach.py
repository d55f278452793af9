"""Whether hosts reach one another, before a job relies on it: one listens, the others try each of its addresses.

    python3 - listen TOKEN FIRST NUM OFFSET SECONDS
                                                   takes the first free port of NUM, beginning OFFSET after the first and
                                                   going round, and answers there with the token;
                                                   prints port and addresses, then an empty line now and then
    python3 - try TOKEN PORT ADDRESS [ADDRESS...]  connects to each; prints what came of it, and by which interface

Standard library only and nothing beside it: it is sent as text. Only who gives the token is the host that is meant, so
an address that another machine has as well (loopback, a bridge of containers) is told apart. IPv4, as torch's launcher
takes it.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TRY_S = 5.0
SIGN_OF_LIFE_S = 0.25  # when it cannot be printed, whoever asked has gone
SIOCGIFCONF, IFREQ_BYTES, MOST_ADDRESSES = 0x8912, 40, 256  # netdevice(7): a name of 16 bytes, then a sockaddr
SIOCGIFFLAGS, IFF_UP, IFF_RUNNING = 0x8913, 0x1, 0x40
GONE, DOWN, NO_LINK = "is gone", "is down", "has no link"


def addresses() -> list[dict[str, Any]]:
    """IPv4 addresses of this host, fastest interface first, loopback last: address, interface, mbit_per_s or null."""
    found = [{"address": address, "interface": name, "mbit_per_s": _speed(name)} for name, address in _interfaces()]
    return sorted(found, key=lambda item: (str(item["address"]).startswith("127."), -(item["mbit_per_s"] or 0)))


def _interfaces() -> list[tuple[str, str]]:
    rows = array.array("B", bytes(IFREQ_BYTES * MOST_ADDRESSES))
    place, size = rows.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        filled = fcntl.ioctl(asking.fileno(), SIOCGIFCONF, struct.pack("iL", size, place))  # struct ifconf
    told = rows.tobytes()[: struct.unpack("iL", filled)[0]]
    each = [told[at : at + IFREQ_BYTES] for at in range(0, len(told), IFREQ_BYTES)]
    # A second address of an interface stands under a name such as eth0:1.
    return [(row[:16].split(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(row[20:24])) for row in each]


def trouble(interface: str) -> str | None:
    """What keeps an interface of this host from leading anywhere: GONE, DOWN, or, as where the other end is down, NO_LINK.

    None where it has a link, or nobody says.
    """
    try:
        names = {name for _, name in socket.if_nameindex()}
    except OSError:
        return None
    if interface not in names:
        return GONE
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            told = fcntl.ioctl(asking.fileno(), SIOCGIFFLAGS, struct.pack("256s", interface.encode()[:15]))
        except OSError:  # it went just now
            return GONE
    flags = struct.unpack("H", told[16:18])[0]
    return DOWN if not flags & IFF_UP else None if flags & IFF_RUNNING else NO_LINK


def _speed(interface: str) -> int | None:
    """null for one that tells none: a bridge, loopback, one that is down."""
    with contextlib.suppress(OSError, ValueError):
        speed = int(Path(f"/sys/class/net/{interface}/speed").read_text(encoding="ascii"))
        return speed if speed > 0 else None
    return None


def listen(token: str, ports: Sequence[int], seconds: float) -> int:
    """At the first that is free; exit status 1 where none is."""
    server = _bound(ports)
    if server is None:
        _print({"port": None, "addresses": []})
        return 1
    _print({"port": server.getsockname()[1], "addresses": addresses()})
    ends = time.monotonic() + seconds
    server.settimeout(SIGN_OF_LIFE_S)
    with server:
        while time.monotonic() < ends:
            with contextlib.suppress(OSError):  # nobody came, or went again at once
                guest, _ = server.accept()
                with guest:
                    guest.sendall(f"{token}\n".encode())
            sys.stdout.write("\n")
            sys.stdout.flush()
    return 0


def _bound(ports: Sequence[int]) -> socket.socket | None:
    for port in ports:
        server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
            server.listen(64)
        except OSError:
            server.close()
        else:
            return server
    return None


def attempt(token: str, port: int, address: str) -> dict[str, Any]:
    """error: null where that host answered; interface: of this host's side, null where it is not told."""
    try:
        with socket.create_connection((address, port), timeout=TRY_S) as way:
            own = way.getsockname()[0]
            told = way.recv(256).decode("ascii", "replace").strip()
    except (OSError, UnicodeError) as error:  # the second of a name that can be none
        words = getattr(error, "strerror", None) or str(error) or "no answer"
        return {"address": address, "error": words, "interface": None}
    fault = None if told == token else "another machine answers there"
    names = {one: interface for interface, one in _interfaces()}
    return {"address": address, "error": fault, "interface": names.get(own)}


def try_all(token: str, port: int, wanted: list[str]) -> int:
    """All at once, so that one which is silent costs no more than its time."""
    found: dict[str, dict[str, Any]] = {}
    each = [threading.Thread(target=lambda one=one: found.update({one: attempt(token, port, one)})) for one in wanted]
    for thread in each:
        thread.start()
    for thread in each:
        thread.join()
    _print({"answers": [found[one] for one in wanted]})
    return 0


def _print(body: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(body) + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    word, token, *rest = arguments
    if word == "listen":
        first, num, offset = (int(text) for text in rest[:3])
        return listen(token, [first + (offset + place) % num for place in range(num)], float(rest[3]))
    return try_all(token, int(rest[0]), rest[1:])


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main(sys.argv[1:]))
