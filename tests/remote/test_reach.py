"""Whether hosts reach one another: who listens, who answers, and who is taken for somebody else."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remote import reach

SCRIPT = Path(reach.__file__)
TOKEN = "0123456789abcdef"


def asked(*words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=60, check=False
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[0])
    return found


@pytest.fixture
def offer() -> Iterator[dict[str, Any]]:
    command = [sys.executable, str(SCRIPT), "listen", TOKEN, "29500", "400", "0", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout is not None
        yield json.loads(listener.stdout.readline())
        listener.kill()


def test_every_address_of_a_host_answers_with_the_token_and_tells_its_interface(offer: dict[str, Any]) -> None:
    addresses = [item["address"] for item in offer["addresses"]]

    found = asked("try", TOKEN, str(offer["port"]), *addresses)["answers"]

    assert addresses[-1] == "127.0.0.1"
    assert [(item["address"], item["error"], item["interface"]) for item in found] == [
        (item["address"], None, item["interface"]) for item in offer["addresses"]
    ]


def test_another_machine_at_the_same_address_is_told_apart(offer: dict[str, Any]) -> None:
    (found,) = asked("try", "another token", str(offer["port"]), "127.0.0.1")["answers"]

    assert found["error"] == "another machine answers there"


def test_a_shut_port_and_a_name_that_nobody_knows_are_errors_in_words() -> None:
    with socket.socket() as taken:  # bound and not listening: nobody else gets it, and nobody answers
        taken.bind(("127.0.0.1", 0))
        shut, unknown = asked("try", TOKEN, str(taken.getsockname()[1]), "127.0.0.1", "a..b")["answers"]

    assert "refused" in shut["error"]
    assert unknown["error"]


@pytest.mark.slow
def test_the_first_free_port_is_taken_and_none_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]

        assert asked("listen", TOKEN, str(port), "1", "0", "0.1")["port"] is None
        assert asked("listen", TOKEN, str(port), "50", "0", "0.1")["port"] > port
        assert asked("listen", TOKEN, str(port - 49), "50", "49", "0.1")["port"] < port  # it goes round


def test_an_interface_that_is_gone_is_told_from_one_that_has_a_link() -> None:
    assert (reach.trouble("nosuch0"), reach.trouble("lo")) == ("is gone", None)
