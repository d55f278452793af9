"""paramiko's transport without one way to stand still for ever, and with a short way for much to send.

Keys are renewed after every 512 MiB. paramiko's own thread reads the other side's answer to that, and the same thread
answers the end of a channel. An end that was on its way when the keys began to be renewed made it wait for the new keys,
which it alone could have read: after 30 s the connection was given up, in the midst of a long `pull`.

sshd takes packets of 32 KiB. paramiko copies each seven times, writes it by itself and asks anew for the right to send:
that was most of the work of a ship. Here the packets of a burst share it.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from typing import Any

import paramiko
from paramiko.common import MSG_CHANNEL_DATA
from paramiko.packet import Packetizer

BLOCK_BYTES = TAG_BYTES = 16  # of AES-GCM
AROUND_BYTES = 4 + 1 + 4 + BLOCK_BYTES + TAG_BYTES  # a packet is longer than its message by so much at most


class Transport(paramiko.Transport):
    """While keys are renewed, what its own thread has to say is said by another."""

    def __init__(self, sock: Any, **options: Any) -> None:
        super().__init__(sock, packetizer_class=Packets, **options)
        self.theirs: dict[str, list[str]] = {}  # the names that the server offered, by paramiko's names of the lists

    def _really_parse_kex_init(self, m: Any, ignore_first_byte: bool = False) -> Any:
        parsed = super()._really_parse_kex_init(m, ignore_first_byte)  # type: ignore[misc]  # the stubs leave it out
        if not ignore_first_byte:  # which is there in our own offer
            self.theirs = parsed
        return parsed

    @property
    def breaking_off(self) -> str:
        """What an end of the bytes before the log-in cut off; empty where no banner had come."""
        if not self.remote_version or self.initial_kex_done:
            return ""
        if self.packetizer.handshake_timed_out():
            return f"sends its SSH banner and agrees on no keys within {self.handshake_timeout:g} s"
        return "sends its SSH banner and closes the connection before keys are agreed on"

    def _send_user_message(self, data: Any) -> None:
        if threading.current_thread() is self and not self.clear_to_send.is_set():
            threading.Thread(target=self._send_later, args=(data,), name="draftyard-rekey", daemon=True).start()
        else:
            super()._send_user_message(data)  # type: ignore[misc]  # paramiko's stubs leave it out

    def _send_later(self, data: Any) -> None:
        with contextlib.suppress(
            paramiko.SSHException, EOFError, OSError
        ):  # the connection is gone: that shows elsewhere
            super()._send_user_message(data)  # type: ignore[misc]


class Burst(list[tuple[bytes, memoryview]]):
    """Messages that leave one right after the other: the head of each, and its data."""


class Packets(Packetizer):
    """Seals messages with AES-GCM, all of a burst into one buffer; what is encrypted in another way is paramiko's affair.

    paramiko's own counters of what leaves stand still for what is sealed here, which does no harm: its nonce is set anew with
    new keys, as ours is; its packet number goes into the MAC of other ciphers alone, and one connection keeps its cipher, as
    both sides offer the same again; how much left under the present keys is counted here. Its `*_overflow` are of what comes
    in while new keys are awaited, and new keys set them to 0.
    """

    def __init__(self, sock: Any) -> None:
        super().__init__(sock)
        self._is_socket = not isinstance(sock, paramiko.Channel)  # which a jump host gives
        self._turn = threading.RLock()  # packets are numbered: each is written in the order in which it was made
        self._engine: Any = None  # AES-GCM under the present keys
        self._compress: Any = None
        self._nonce, self._number = b"", 0
        self._num_bytes = self._num_packets = 0  # sent under the present keys
        self._plain, self._sealed = bytearray(), bytearray()

    def set_outbound_cipher(self, block_engine: Any, *others: Any, **named: Any) -> None:
        """New keys."""
        with self._turn:
            super().set_outbound_cipher(block_engine, *others, **named)
            self._engine = None
            if named.get("aead"):  # RFC 5647, 7.1: four fixed bytes, and a number that grows with every packet
                self._engine, nonce = block_engine, named["iv_out"]
                self._nonce, self._number = nonce[:4], int.from_bytes(nonce[4:], "big")
            self._num_bytes = self._num_packets = 0

    def set_outbound_compressor(self, compressor: Any) -> None:
        """Nothing asks for compression today; with it a message is packed before it is sealed."""
        with self._turn:
            super().set_outbound_compressor(compressor)
            self._compress = compressor

    def send_message(self, data: Any) -> None:
        messages = data if isinstance(data, Burst) else Burst([(data.asbytes(), memoryview(b""))])
        with self._turn:
            if self._engine is None:
                for head, body in messages:
                    super().send_message(paramiko.Message(head + body))
                return
            if self._compress is not None:
                messages = Burst((self._compress(head + body), memoryview(b"")) for head, body in messages)
            size = self._seal_all(messages)
            sealed = memoryview(self._sealed)[:size]
            self.write_all(sealed if self._is_socket else bytes(sealed))
            self._num_bytes, self._num_packets = self._num_bytes + size, self._num_packets + len(messages)
            is_much = self._num_bytes >= self.REKEY_BYTES or self._num_packets >= self.REKEY_PACKETS
            if is_much and not self.need_rekey():
                self._trigger_rekey()  # type: ignore[attr-defined]  # the stubs leave it out

    def _seal_all(self, messages: Burst) -> int:
        """How many bytes of `_sealed` are packets now."""
        room = sum(len(head) + len(body) + AROUND_BYTES for head, body in messages)
        if len(self._sealed) < room:
            self._plain, self._sealed = bytearray(room), bytearray(room)
        at = 0
        for head, body in messages:
            at += self._seal(head, body, memoryview(self._sealed)[at:])
        return at

    def _seal(self, head: bytes, body: memoryview, into: memoryview) -> int:
        """One packet; its length stands before it, authenticated and readable."""
        first, ends = 1 + len(head), 1 + len(head) + len(body)
        padding = BLOCK_BYTES + 4 - (ends + 4) % BLOCK_BYTES
        plain, size = memoryview(self._plain), ends + padding
        plain[0] = padding
        plain[1:first] = head
        plain[first:ends] = body
        plain[ends:size] = bytes(padding)
        length = size.to_bytes(4, "big")
        nonce = self._nonce + self._number.to_bytes(8, "big")
        self._number = (self._number + 1) % 2**64
        into[:4] = length
        into[4 : 4 + size + TAG_BYTES] = self._engine.encrypt(nonce, plain[:size], length)
        return 4 + size + TAG_BYTES


def send_all(channel: Any, piece: bytes) -> None:
    """As `sendall` of a paramiko channel, in bursts as large as the other side has room for. OSError when the channel is closed."""
    left = memoryview(piece)
    while left:
        burst = Burst()
        for size in _room(channel, len(left)):
            burst.append((struct.pack(">BII", MSG_CHANNEL_DATA, channel.remote_chanid, size), left[:size]))
            left = left[size:]
        channel.transport._send_user_message(burst)


def _room(channel: Any, wanted: int) -> list[int]:
    """The sizes of packets that may be sent now, one at least; waits while there is room for none."""
    with channel.lock:
        sizes = [channel._wait_for_send_window(wanted)]
        while sizes[-1] and sum(sizes) < wanted and channel.out_window_size:
            sizes.append(channel._wait_for_send_window(wanted - sum(sizes)))
    if not sizes[-1]:
        raise OSError("the channel is closed")
    return sizes
