"""What is said of a machine that takes a connection and is no SSH server, or none yet."""

from __future__ import annotations

import contextlib
import re
import select
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import paramiko
import pytest

from orchestrator.errors import HostError
from orchestrator.host import Host, Hosts
from orchestrator.shell import link
from orchestrator.shell.connect import connect
from orchestrator.shell.keys import Identities
from orchestrator.shell.link import Link, _explained, _is_silence, _is_stranger
from orchestrator.shell.pulse import KeepAlive
from orchestrator.shell.routes import Endpoint
from tests import sshd

ENDPOINT = Endpoint(
    name="box",
    address="box.example",
    port=22,
    user="me",
    identity_files=(),
    identities_only=False,
    known_hosts_files=(),
    host_key_alias=None,
    host_keys="strict",
    connect_timeout_s=None,
    keepalive=KeepAlive(),
)


def _banner_fault(cause: Exception) -> paramiko.SSHException:
    try:
        try:
            raise cause
        except Exception as error:
            raise paramiko.SSHException("Error reading SSH protocol banner") from error
    except paramiko.SSHException as error:
        return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (_banner_fault(TimeoutError()), "accepts TCP, no SSH banner in 10 s, tried for 17 s"),
        (
            _banner_fault(EOFError()),
            "closes the connection without an SSH banner, tried for 17 s; is an SSH server on port 22",
        ),
        (EOFError("agrees on no keys"), "agrees on no keys, tried for 17 s"),
        (paramiko.SSHException("No existing session"), "sends its SSH banner and then nothing, tried for 17 s"),
    ],
)
def test_a_machine_that_does_not_speak_is_told_by_how_and_tried_again(error: Exception, said: str) -> None:
    assert _is_silence(error)
    assert said in str(_explained(ENDPOINT, error, tried_s=17.4))


@pytest.mark.parametrize("words", ['Indecipherable protocol version "hello"', "Invalid packet blocking"])
def test_what_is_no_ssh_is_told_without_the_words_of_a_library(words: str) -> None:
    told = str(_explained(ENDPOINT, paramiko.SSHException(words), tried_s=1.0))

    assert "breaks the SSH protocol on port 22" in told
    assert words not in told


@contextlib.contextmanager
def _served(talk: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port where every caller is talked to like that."""

    class Talk(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                talk(self.request)

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Talk)
    server.daemon_threads, server.block_on_close = True, False
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def _a_byte_a_second(sock: socket.socket) -> None:
    for letter in b"hello world" * 10:
        sock.sendall(bytes([letter]))
        time.sleep(1)


def _a_line_a_second(sock: socket.socket) -> None:
    for _ in range(100):
        sock.sendall(b"hello\r\n")
        time.sleep(1)


def _three_megabytes(sock: socket.socket) -> None:
    sock.sendall(b"A" * 3_000_000)
    time.sleep(60)


def _hundred_lines(sock: socket.socket) -> None:
    sock.sendall(b"hello\r\n" * 200)
    time.sleep(60)


def _banner_and_noise(sock: socket.socket) -> None:
    sock.sendall(b"welcome\r\nSSH-2.0-noise\r\n" + b"\x07" * 500)
    time.sleep(60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("talk", "said"),
    [
        (_a_byte_a_second, 'no SSH server on port {port}; it says: "h'),
        (_a_line_a_second, 'no SSH server on port {port}; it says: "hello'),
        (_three_megabytes, 'no SSH server on port {port}; it says: "AAAA'),
        (_hundred_lines, 'no SSH server on port {port}; it says: "hello hello'),
        (_banner_and_noise, "breaks the SSH protocol on port {port}"),
    ],
)
def test_a_server_that_talks_and_is_none_is_told_by_what_it_says(
    talk: Callable[[socket.socket], None], said: str
) -> None:
    began = time.monotonic()
    with _served(talk) as port, pytest.raises(HostError) as refused:
        connect(Host(name="box", source="test", address="127.0.0.1", port=port, ssh_config=Path("/dev/null")))

    assert said.format(port=port) in str(refused.value)
    assert time.monotonic() - began < 45


def test_what_an_sshd_says_that_takes_no_one_now_is_quoted() -> None:
    told = str(_explained(ENDPOINT, EOFError(), tried_s=17.4, said="Exceeded MaxStartups"))

    assert 'its SSH server takes no connection now, tried for 17 s; it says: "Exceeded MaxStartups"' in told
    assert not _is_stranger("Exceeded MaxStartups")


class CutLine:
    """A transport whose line goes when a key is offered."""

    def auth_publickey(self, user: str, key: object) -> list[str]:
        raise paramiko.AuthenticationException("Authentication failed: transport shut down or saw EOF")

    def is_active(self) -> bool:
        return False


def test_a_line_that_is_cut_while_a_key_is_offered_is_no_refusal(tmp_path: Path) -> None:
    key = tmp_path / "key"
    paramiko.ECDSAKey.generate().write_private_key_file(str(key))
    identities = Identities(replace(ENDPOINT, identity_files=(key,), identities_only=True))

    with pytest.raises(HostError, match=r"the connection was lost while .*key was offered") as cut:
        identities.authenticate(CutLine())  # type: ignore[arg-type]

    assert cut.value.reason == "unreachable"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "offered"),
    [
        ("Ciphers", "chacha20-poly1305@openssh.com"),
        ("MACs", "umac-64@openssh.com"),
        ("KexAlgorithms", "sntrup761x25519-sha512@openssh.com"),
    ],
)
def test_a_server_with_nothing_in_common_says_what_each_side_offers_and_a_line_that_repairs_it(
    tmp_path: Path, word: str, offered: str
) -> None:
    with (
        sshd.running(tmp_path / "strict", settings=(f"{word} {offered}",)) as server,
        pytest.raises(HostError, match=rf"no {word} in common; it offers {offered}.*\n  draftyard knows \w") as told,
    ):
        connect(Hosts.load(None, server.config_file).find("box"))
    (line,) = re.findall(r"repair: (.*?)   \(in its sshd_config", str(told.value))

    with sshd.running(tmp_path / "mended", settings=(line,)) as server:
        shell = connect(Hosts.load(None, server.config_file).find("box"))
        assert shell.run(["echo", "x"]).stdout == b"x\n"
        shell.close()


@pytest.mark.slow
def test_such_a_server_is_entered_with_openssh_from_another_machine(tmp_path: Path) -> None:
    with sshd.running(tmp_path / "strict", alias="inner", settings=("Ciphers chacha20-poly1305@openssh.com",)) as inner:
        wrapper = tmp_path / "bin" / "ssh"
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {inner.config_file} "$@"\n')
        wrapper.chmod(0o755)
        with sshd.running(tmp_path / "jump", path=f"{wrapper.parent}:/usr/bin:/bin") as jump:
            (tmp_path / "hosts.yaml").write_text(jump.hosts_yaml(hop="ssh:inner"))
            shell = connect(Hosts.load(tmp_path / "hosts.yaml", jump.config_file).find("box"))
            assert shell.run(["sh", "-c", "echo $SSH_CONNECTION"]).stdout.split()[-1] == str(inner.port).encode()
            shell.run(["/usr/bin/ssh", "-F", str(inner.config_file), "-O", "exit", "inner"])
            shell.close()


def _banner_then_ignored(sock: socket.socket) -> None:
    sock.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
    while True:
        sock.sendall(b"\0\0\0\x0c\x0a\x02\0\0\0\0" + bytes(6))
        time.sleep(0.05)


def _banner_and_end(sock: socket.socket) -> None:
    sock.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
    sock.recv(9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("talk", "said"),
    [
        (_banner_then_ignored, "sends its SSH banner and agrees on no keys within 1 s, tried for"),
        (_banner_and_end, "sends its SSH banner and closes the connection before keys are agreed on, tried for"),
    ],
)
def test_a_server_that_says_its_banner_and_agrees_on_no_keys_is_told_as_that(
    talk: Callable[[socket.socket], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "OPEN_S", 0.0)  # one attempt
    made = link._transport

    def hasty(*words: Any) -> paramiko.Transport:
        transport = made(*words)
        transport.handshake_timeout = 1
        return transport

    monkeypatch.setattr(link, "_transport", hasty)
    with _served(talk) as port, pytest.raises(HostError, match=said):
        Link((replace(ENDPOINT, address="127.0.0.1", port=port),))


@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
def test_a_connection_that_was_closed_is_gone_before_all_that_it_said_is_read(is_reset: bool) -> None:
    """What a large answer left unread says nothing of the other end: the next command would be sent to nobody."""
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as ours:
        theirs, _ = listening.accept()
        with theirs:
            theirs.sendall(b"an answer")
            assert not link._is_hung_up(ours)
            if is_reset:
                ours.sendall(b"read by nobody")
                assert select.select([theirs], [], [], 30)[0]
        deadline_s = time.monotonic() + 10
        while not link._is_hung_up(ours) and time.monotonic() < deadline_s:
            time.sleep(0.01)

        assert link._is_hung_up(ours)
        assert ours.recv(100) == b"an answer"


def test_a_server_of_the_tests_never_answers_for_another_that_took_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sshd.running(tmp_path / "first") as first:
        ports = iter([first.port, sshd.free_port()])
        monkeypatch.setattr(sshd, "free_port", lambda address: next(ports))
        with sshd.running(tmp_path / "second") as second:
            assert second.port != first.port
            connect(Hosts.load(None, second.config_file).find("box")).close()
