"""Kinds of keys, of hosts and of users, against OpenSSH's own server: taken, or told in a clear line."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
import shutil
import socketserver
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from orchestrator.errors import HostError
from orchestrator.host import Hosts
from orchestrator.shell.connect import connect
from tests import sshd
from tests.sshd import Server

pytestmark = pytest.mark.slow  # a server for each kind

# What a server is told to show -> ssh-keygen's words.
KINDS = {
    "ssh-ed25519": "ed25519",
    "ecdsa-sha2-nistp256": "ecdsa -b 256",
    "ecdsa-sha2-nistp384": "ecdsa -b 384",
    "ecdsa-sha2-nistp521": "ecdsa -b 521",
    "rsa-sha2-256": "rsa -b 2048",
    "rsa-sha2-512": "rsa -b 2048",
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By ssh-keygen's words; making one of RSA takes a while."""
    folder = tmp_path_factory.mktemp("keys")
    return {words: make_key(folder / words.replace(" ", ""), words) for words in set(KINDS.values())}


def make_key(file: Path, words: str) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", *words.split(), "-N", "", "-C", "x", "-f", str(file)], check=True)
    return file


def certify(authority: Path, key: Path, *words: str) -> None:
    """Writes KEY-cert.pub."""
    subprocess.run(["ssh-keygen", "-q", "-s", str(authority), "-I", "x", *words, f"{key}.pub"], check=True)


def enter(server: Server) -> None:
    shell = connect(Hosts.load(None, server.config_file).find(server.alias))
    try:
        assert shell.run(["echo", "x"]).stdout == b"x\n"
    finally:
        shell.close()


@pytest.mark.parametrize("algorithm", KINDS)
def test_a_host_key_of_every_kind_is_refused_until_its_line_is_added_and_when_it_changes(
    tmp_path: Path, keys: dict[str, Path], algorithm: str
) -> None:
    key = keys[KINDS[algorithm]]
    settings = (f"HostKey {key}", f"HostKeyAlgorithms {algorithm}")
    with sshd.running(tmp_path / "sshd", settings=settings) as server:
        server.known_hosts.write_text("")
        with pytest.raises(HostError, match="its host key is not known") as unknown:
            enter(server)
        (repair,) = re.findall(r"repair: (.*)", str(unknown.value))
        subprocess.run(repair, shell=True, check=True)
        enter(server)

        another = server.key.with_suffix(".pub")
        server.known_hosts.write_text(f"[{server.address}]:{server.port} {another.read_text()}")
        with pytest.raises(HostError, match="THE HOST KEY HAS CHANGED") as changed:
            enter(server)

    for file in (another, f"{key}.pub"):
        printed = subprocess.run(["ssh-keygen", "-lf", str(file)], capture_output=True, text=True, check=True)
        assert printed.stdout.split()[1] in str(changed.value)


def test_a_host_with_a_certificate_is_known_by_its_plain_key_and_an_authority_alone_is_told(tmp_path: Path) -> None:
    authority, key = make_key(tmp_path / "authority", "ed25519"), make_key(tmp_path / "host", "ed25519")
    certify(authority, key, "-h", "-n", "127.0.0.1")
    with sshd.running(tmp_path / "sshd", settings=(f"HostKey {key}", f"HostCertificate {key}-cert.pub")) as server:
        name = f"[{server.address}]:{server.port}"
        trusting = f"@cert-authority {name} {(tmp_path / 'authority.pub').read_text()}"
        server.known_hosts.write_text(f"# of the office\n{trusting}")
        with pytest.raises(HostError) as unknown:
            enter(server)

        server.known_hosts.write_text(f"{trusting}{name} {(tmp_path / 'host.pub').read_text()}")
        enter(server)

    assert f"{server.known_hosts}:2 trusts an authority; host certificates are not read here" in str(unknown.value)
    assert unknown.value.reason == "host_key_unknown"


def test_a_server_that_signs_with_sha_1_alone_is_told_with_what_repairs_it(
    tmp_path: Path, keys: dict[str, Path]
) -> None:
    settings = (f"HostKey {keys['rsa -b 2048']}", "HostKeyAlgorithms ssh-rsa")
    with sshd.running(tmp_path / "old", settings=settings) as server, pytest.raises(HostError) as told:
        enter(server)
    (line,) = re.findall(r"repair: (.*?)   \(in its sshd_config", str(told.value))

    with sshd.running(tmp_path / "mended", settings=(line,)) as server:
        enter(server)

    assert "no HostKeyAlgorithms in common; it offers ssh-rsa\n" in str(told.value)
    assert "ssh-keygen -A" in str(told.value)


@pytest.mark.parametrize("words", dict.fromkeys(KINDS.values()))
def test_a_users_key_of_every_kind_lets_in(tmp_path: Path, keys: dict[str, Path], words: str) -> None:
    with sshd.running(tmp_path / "sshd") as server:
        shutil.copy(keys[words], server.key)
        shutil.copy(f"{keys[words]}.pub", server.folder / "authorized_keys")

        enter(server)


def test_a_users_certificate_beside_the_key_lets_in_and_the_plain_key_comes_after_it(tmp_path: Path) -> None:
    authority, stranger = (make_key(tmp_path / name, "ed25519") for name in ("authority", "stranger"))
    with sshd.running(tmp_path / "sshd", settings=(f"TrustedUserCAKeys {authority}.pub",)) as server:
        certify(stranger, server.key, "-n", server.user)
        enter(server)  # by the plain key

        (server.folder / "authorized_keys").write_text("")
        with pytest.raises(HostError, match=r"refused: \S+ with its certificate\n  refused: \S+id_ed25519\n"):
            enter(server)
        certify(authority, server.key, "-n", server.user)
        enter(server)

        server.key.with_name(f"{server.key.name}-cert.pub").write_text("no certificate")
        with pytest.raises(HostError, match=r"or id_ed25519-cert\.pub beside it, cannot be read"):
            enter(server)


def test_a_key_that_lies_on_a_security_key_is_told_with_what_to_do(tmp_path: Path) -> None:
    with sshd.running(tmp_path / "sshd") as server:
        server.key.write_text(on_a_security_key())

        with pytest.raises(HostError, match=r"it lies on a security key; add it to the agent: ssh-add"):
            enter(server)


def test_a_security_key_lets_in_through_its_agent(tmp_path: Path) -> None:
    """The agent's part is played here; the server checks the signature as of a real device."""
    device = Ed25519PrivateKey.generate()
    public = on_device(device.public_key().public_bytes_raw())
    with sshd.running(tmp_path / "sshd") as server, agent_with(device, tmp_path / "agent.sock") as place:
        server.key.unlink()
        told = f"{SECURITY_KEY} {base64.b64encode(public).decode()} x\n"
        (server.folder / "authorized_keys").write_text(told)
        server.config_file.write_text(server.config(f"IdentityAgent {place}").replace("Only yes", "Only no"))

        enter(server)


SECURITY_KEY = "sk-ssh-ed25519@openssh.com"


def text(value: bytes) -> bytes:
    return struct.pack(">I", len(value)) + value


def on_device(point: bytes) -> bytes:
    return text(SECURITY_KEY.encode()) + text(point) + text(b"ssh:")


@contextlib.contextmanager
def agent_with(device: Ed25519PrivateKey, place: Path) -> Iterator[Path]:
    """Answers who it holds (11) and signs (13) as a device that was touched."""
    public = on_device(device.public_key().public_bytes_raw())

    class Answering(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while head := self.rfile.read(4):
                asked = self.rfile.read(int.from_bytes(head, "big"))
                self.wfile.write(text(b"\x0c\0\0\0\1" + text(public) + text(b"x") if asked[0] == 11 else sign(asked)))

    def sign(asked: bytes) -> bytes:
        start = 5 + int.from_bytes(asked[1:5], "big")
        content = asked[start + 4 : start + 4 + int.from_bytes(asked[start : start + 4], "big")]
        touched = b"\1" + struct.pack(">I", 7)
        signed = device.sign(hashlib.sha256(b"ssh:").digest() + touched + hashlib.sha256(content).digest())
        return b"\x0e" + text(text(SECURITY_KEY.encode()) + text(signed) + touched)

    with socketserver.UnixStreamServer(str(place), Answering) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield place
        finally:
            server.shutdown()
            thread.join()


def on_a_security_key() -> str:
    """Such a file as ssh-keygen writes it; the key itself stays on the device."""
    public = on_device(b"\1" * 32)
    private = struct.pack(">II", 7, 7) + public + b"\1" + text(b"handle") + text(b"") + text(b"x")
    private += bytes(range(1, 1 + -len(private) % 8))
    whole = b"openssh-key-v1\0" + text(b"none") * 2 + text(b"") + struct.pack(">I", 1) + text(public) + text(private)
    lines = re.findall(".{1,70}", base64.b64encode(whole).decode())
    return "\n".join(["-----BEGIN OPENSSH PRIVATE KEY-----", *lines, "-----END OPENSSH PRIVATE KEY-----", ""])
