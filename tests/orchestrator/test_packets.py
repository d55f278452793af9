"""What we send is what paramiko itself reads: any messages, in bursts or not, whatever encrypts them, from several threads."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import paramiko
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st
from paramiko.compress import ZlibCompressor, ZlibDecompressor
from paramiko.packet import Packetizer

from orchestrator.host import Hosts
from orchestrator.shell.connect import connect
from orchestrator.shell.stream import PACKET_BYTES, PIECE_BYTES
from orchestrator.shell.transport import Burst, Packets
from tests import sshd

IV = b"abcd" + (2**32 - 3).to_bytes(8, "big")


def _gcm(key_bytes: int) -> Callable[[Packets, Packetizer], None]:
    def agree(ours: Packets, theirs: Packetizer) -> None:
        ours.set_outbound_cipher(AESGCM(bytes(key_bytes)), 16, None, 16, None, aead=True, iv_out=IV)
        cast(Any, theirs).set_inbound_cipher(AESGCM(bytes(key_bytes)), 16, None, 16, None, aead=True, iv_in=IV)

    return agree


def _ctr(ours: Packets, theirs: Packetizer) -> None:
    cipher, mac = Cipher(algorithms.AES(bytes(16)), modes.CTR(bytes(16))), (cast(Any, hashlib.sha256), 32, b"key")
    ours.set_outbound_cipher(cipher.encryptor(), 16, *mac, sdctr=True)
    theirs.set_inbound_cipher(cast(Any, cipher.decryptor()), 16, *mac)


def _plain(_ours: Packets, _theirs: Packetizer) -> None:
    """As before the first keys."""


def _packed(agree: Callable[[Packets, Packetizer], None]) -> Callable[[Packets, Packetizer], None]:
    def agree_and_pack(ours: Packets, theirs: Packetizer) -> None:
        agree(ours, theirs)
        ours.set_outbound_compressor(ZlibCompressor())
        cast(Any, theirs).set_inbound_compressor(ZlibDecompressor())

    return agree_and_pack


AGREEMENTS = {"aes128-gcm": _gcm(16), "aes256-gcm": _gcm(32), "aes128-ctr": _ctr, "none": _plain}
AGREEMENTS |= {"aes128-gcm, packed": _packed(_gcm(16)), "aes128-ctr, packed": _packed(_ctr)}


class _Line:
    """A socket that keeps what is written, a part at a time, and gives it to who reads."""

    def __init__(self) -> None:
        self.bytes = bytearray()
        self.num_writes = 0

    def send(self, out: Any) -> int:
        self.num_writes += 1
        taken = bytes(out[:200_000])
        self.bytes += taken
        return len(taken)

    def recv(self, size: int) -> bytes:
        given, self.bytes = bytes(self.bytes[:size]), self.bytes[size:]
        return given


def _message(content: bytes) -> paramiko.Message:
    return paramiko.Message(content)


def _read(theirs: Packetizer) -> bytes:
    kind, message = theirs.read_message()
    return bytes([kind]) + message.asbytes()


_contents = st.binary(min_size=1, max_size=70) | st.integers(1, 40_000).map(lambda size: b"\x5e" + bytes(size))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(how=st.sampled_from(sorted(AGREEMENTS)), sent=st.lists(_contents | st.lists(_contents, max_size=9), max_size=8))
def test_paramiko_reads_what_was_sent_in_its_order(how: str, sent: list[bytes | list[bytes]]) -> None:
    line = _Line()
    ours, theirs = Packets(line), Packetizer(cast(Any, line))
    AGREEMENTS[how](ours, theirs)

    for each in sent:
        if isinstance(each, bytes):
            ours.send_message(_message(each))
        else:
            ours.send_message(Burst((content[:9], memoryview(content)[9:]) for content in each))

    expected = [content for each in sent for content in ([each] if isinstance(each, bytes) else each)]
    assert [_read(theirs) for _ in expected] == expected
    assert not line.bytes


def test_threads_that_send_at_once_do_not_mix_their_packets() -> None:
    near, far = socket.socketpair()
    ours, theirs = Packets(near), Packetizer(far)
    AGREEMENTS["aes128-gcm"](ours, theirs)

    def send(letter: int) -> None:
        for number in range(100):
            content = bytes([letter]) + number.to_bytes(2, "big") + bytes(500 * (number % 5))
            ours.send_message(_message(content))
            ours.send_message(Burst([(content, memoryview(b"first")), (content, memoryview(b"second"))]))

    threads = [threading.Thread(target=send, args=(letter,)) for letter in (7, 8, 9)]
    for thread in threads:
        thread.start()
    came = [_read(theirs) for _ in range(3 * 100 * 3)]
    for thread in threads:
        thread.join()
    near.close()
    far.close()

    for letter in (7, 8, 9):
        numbers = [int.from_bytes(content[1:3], "big") for content in came if content[0] == letter]
        assert numbers == sorted(numbers)
        assert len(numbers) == 300


def test_a_burst_is_one_write() -> None:
    line = _Line()
    ours, theirs = Packets(line), Packetizer(cast(Any, line))
    AGREEMENTS["aes256-gcm"](ours, theirs)

    ours.send_message(Burst([(b"\x5e", memoryview(bytes(PACKET_BYTES // 2)))] * 8))

    assert line.num_writes == 1


@pytest.mark.slow
@pytest.mark.parametrize("cipher", ["aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes256-ctr"])
def test_what_is_sent_while_keys_are_renewed_again_and_again_arrives_as_it_was(
    cipher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Packetizer, "REKEY_BYTES", 3 * PIECE_BYTES)  # where paramiko renews after 512 MiB
    renewed: list[str] = []
    activate = paramiko.Transport._activate_outbound  # type: ignore[attr-defined]

    def activated(transport: paramiko.Transport) -> None:
        activate(transport)
        renewed.append(transport.local_cipher)

    monkeypatch.setattr(paramiko.Transport, "_activate_outbound", activated)
    content = os.urandom(6_000_000)
    with sshd.running(tmp_path / "sshd", settings=(f"Ciphers {cipher}",)) as server:
        shell = connect(Hosts.load(None, server.config_file).find(server.alias))
        try:
            done = shell.run(["sha256sum"], stdin=content, timeout_s=60)
        finally:
            shell.close()

    assert done.stdout.split()[0].decode() == hashlib.sha256(content).hexdigest()
    assert set(renewed) == {cipher}
    assert len(renewed) > 1  # the first keys, and others: how many, the threads decide
