"""An authenticated connection to a machine, through as many others as it takes.

The way is opened from the first machine inwards, each connection inside a channel of the one
before, each with an empty ssh_config, so that fabric adds nothing of its own. Whatever waits has a
deadline: names, TCP, banner, keys, channels. A machine that takes TCP connections and then says
nothing is tried again with growing pauses; one that stops answering later is noticed by `Pulse`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import tempfile
import threading
import time
from typing import IO, Any

import fabric
import paramiko
from paramiko.ssh_exception import IncompatiblePeer

from orchestrator.errors import HostError
from orchestrator.shell.keys import Identities
from orchestrator.shell.pulse import Pulse
from orchestrator.shell.routes import Endpoint
from orchestrator.shell.stream import quoted, told
from orchestrator.shell.transport import Transport
from orchestrator.shell.trust import Policy

CONNECT_S = 15.0
BANNER_S = 10.0
WORDS_S = 2.0  # for the first words of what may be another server
WORDS_BYTES = 400
OPEN_S = 38.0  # for the whole of one machine, retries included: a frozen one is an error in under 45 s

# By the lists in which a server offers them: the word of sshd_config, and one that both know.
SUITES = {
    "server_key_algo_list": ("HostKeyAlgorithms", "key_types", "ssh-ed25519"),
    "kex_algo_list": ("KexAlgorithms", "kex", "curve25519-sha256@libssh.org"),
    "server_encrypt_algo_list": ("Ciphers", "ciphers", "aes256-gcm@openssh.com"),
    "server_mac_algo_list": ("MACs", "digests", "hmac-sha2-256-etm@openssh.com"),
}

RDHUP: int = getattr(select, "POLLRDHUP", 0)  # Linux tells it before all is read; elsewhere it shows once all is

# What a connection attempt may end in; everything else is our own mistake.
TROUBLE = (OSError, EOFError, paramiko.SSHException)


class Link:
    """The whole way: connections from the outermost to the innermost, closed together."""

    def __init__(self, endpoints: tuple[Endpoint, ...]) -> None:
        logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # it prints tracebacks of what we answer ourselves
        self.label = endpoints[-1].label
        self._lock = threading.Lock()
        self._spare: paramiko.Channel | None = None
        self.num_talks = 0  # commands that run over it; each holds a session of the server
        self._connections: list[fabric.Connection] = []
        self._proxy: subprocess.Popen[bytes] | None = None
        self._proxy_said: IO[bytes] | None = None
        try:
            for endpoint in endpoints:
                self._connections.append(self._open(endpoint))
        except BaseException:
            self.close()
            raise
        self.transport: paramiko.Transport = self._connections[-1].transport
        self.pulse = Pulse(self.transport, self.label, endpoints[-1].keepalive)

    def take_spare(self) -> paramiko.Channel | None:
        """A session opened ahead of need: one round trip less for the next command."""
        with self._lock:
            spare, self._spare = self._spare, None
            return spare

    def keep_spare(self, channel: paramiko.Channel) -> None:
        with self._lock:
            if self._spare is None:
                self._spare = channel
                return
        channel.close()

    def count_talk(self, change: int) -> None:
        """One more or one less. Threads do this at once, and a lost count would change how long each later open waits."""
        with self._lock:
            self.num_talks += change

    @property
    def is_alive(self) -> bool:
        return self.transport.is_active() and not _is_hung_up(self.transport.sock)

    def close(self) -> None:
        for connection in reversed(self._connections):
            with contextlib.suppress(*TROUBLE):
                connection.client.close()
        if self._proxy is not None:
            self._proxy.kill()
            self._proxy.wait()
        if self._proxy_said is not None:
            self._proxy_said.close()

    def _open(self, endpoint: Endpoint) -> fabric.Connection:
        began, pause_s = time.monotonic(), 1.0
        said: str | None = None
        while True:
            try:
                return self._attempt(endpoint)
            except TROUBLE as error:
                if endpoint.proxy_command and self._proxy is not None and self._proxy.poll() is not None:
                    raise self._proxy_ended(endpoint) from error
                if said is None:
                    said = self._first_words(endpoint) if _is_silence(error) or _is_garbled(error) else ""
                tried_s = time.monotonic() - began
                if not _is_silence(error) or _is_stranger(said) or tried_s + pause_s + BANNER_S > OPEN_S:
                    raise _explained(endpoint, error, tried_s=tried_s, said=said) from error
            time.sleep(pause_s)
            pause_s *= 2

    def _first_words(self, endpoint: Endpoint) -> str:
        """What a server that brings no SSH banner says when it is greeted; empty for one that is silent or speaks SSH."""
        if endpoint.proxy_command:
            return ""
        try:
            sock = self._dial(endpoint)
        except TROUBLE:
            return ""
        heard, ends_s = b"", time.monotonic() + WORDS_S
        try:
            sock.sendall(b"SSH-2.0-draftyard\r\n\r\n")  # some wait for an empty line
            while len(heard) < WORDS_BYTES and not _has_banner(heard) and (left_s := ends_s - time.monotonic()) > 0:
                sock.settimeout(left_s)
                more = sock.recv(WORDS_BYTES)
                if not more:
                    break
                heard += more
        except TROUBLE:  # what came before it stands
            pass
        finally:
            sock.close()
        is_beginning = b"SSH-".startswith(heard)  # of a banner that comes slowly
        return "" if is_beginning or _has_banner(heard) else quoted(heard)

    def _attempt(self, endpoint: Endpoint) -> fabric.Connection:
        policy = Policy(endpoint)
        sock = self._dial(endpoint)
        transport: Transport | None = None

        def make(sock: Any, **options: Any) -> Transport:
            nonlocal transport
            transport = _transport(sock, policy, options)
            return transport

        connection = fabric.Connection(
            endpoint.address,
            user=endpoint.user,
            port=endpoint.port,
            config=fabric.Config(ssh_config=paramiko.SSHConfig(), lazy=True),
            gateway=False,
            connect_kwargs={
                "sock": sock,
                "timeout": CONNECT_S,
                "banner_timeout": BANNER_S,
                "auth_timeout": CONNECT_S,
                "channel_timeout": CONNECT_S,
                "auth_strategy": Identities(endpoint),
                "transport_factory": make,
            },
        )
        connection.client.set_missing_host_key_policy(policy)
        try:
            connection.open()
        except IncompatiblePeer as error:
            raise (transport and _nothing_in_common(endpoint, transport)) or error from error
        except EOFError as error:
            raise EOFError(transport.breaking_off if transport else "") from error
        finally:
            if not connection.is_connected:
                connection.client.close()
                sock.close()
        # Keeps a router's table warm; it is not answered.
        connection.transport.set_keepalive(int(endpoint.keepalive.interval_s))
        return connection

    def _dial(self, endpoint: Endpoint) -> Any:
        """A socket, or something that paramiko can use as one."""
        timeout_s = endpoint.connect_timeout_s or CONNECT_S
        if self._connections:
            gateway: paramiko.Transport = self._connections[-1].transport
            return gateway.open_channel(
                "direct-tcpip", (endpoint.address, endpoint.port), ("127.0.0.1", 0), timeout=timeout_s
            )
        if endpoint.proxy_command:
            return self._start_proxy(endpoint.proxy_command)
        sock = socket.create_connection((endpoint.address, endpoint.port), timeout=timeout_s)
        # Without NODELAY every command waits 40 ms for an acknowledgement.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: a cut cable is an error after 45 s, not after hours
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 45_000)
        return sock

    def _start_proxy(self, command: str) -> socket.socket:
        """Our own end of a socketpair: paramiko's ProxyCommand moves 2 MB/s and spins when the command dies."""
        if self._proxy is not None:
            self._proxy.kill()
            self._proxy.wait()
        self._proxy_said = self._proxy_said or tempfile.TemporaryFile()  # noqa: SIM115  # closed with the link
        ours, theirs = socket.socketpair()
        with theirs:
            self._proxy = subprocess.Popen(
                [os.environ.get("SHELL") or "/bin/sh", "-c", f"exec {command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._proxy_said,
                start_new_session=True,  # a Ctrl-C for us must not cut the way to the machine
            )
        return ours

    def _proxy_ended(self, endpoint: Endpoint) -> HostError:
        assert self._proxy is not None
        assert self._proxy_said is not None
        self._proxy_said.seek(0)
        said = told(self._proxy_said.read(), 500)
        return HostError(
            f"{endpoint.label}: its ProxyCommand ended with exit code {self._proxy.returncode} and brought no SSH banner: "
            f"{endpoint.proxy_command}" + (f"\n  it said: {said}" if said else "")
        )


def _is_hung_up(sock: Any) -> bool:
    """The other end has closed it, or it is broken: what is sent now is lost. paramiko's thread may not have noticed yet, as
    while it reads the rest of a large answer."""
    if isinstance(sock, paramiko.Channel):  # through a jump host
        return bool(sock.closed)
    poll = select.poll()
    poll.register(sock, select.POLLIN | RDHUP)
    try:
        seen = sum(events for _, events in poll.poll(0))
        if seen & (RDHUP | select.POLLHUP | select.POLLERR):
            return True
        return bool(seen) and not sock.recv(1, socket.MSG_PEEK)
    except TimeoutError:  # that thread was faster
        return False
    except OSError:
        return True


def _transport(sock: Any, policy: Policy, options: dict[str, Any]) -> Transport:
    made = Transport(sock, **options)
    security = made.get_security_options()
    security.key_types = policy.key_types_first(security.key_types)
    # Encrypts and authenticates in one pass; paramiko's own first choice needs a second one over every byte.
    security.ciphers = sorted(security.ciphers, key=lambda name: "gcm" not in name)
    made.daemon = True
    return made


def _nothing_in_common(endpoint: Endpoint, transport: Transport) -> HostError | None:
    """What each side offers where they agree on none, and two ways out."""
    ours = transport.get_security_options()
    for offered, (word, mine, common) in SUITES.items():
        names = [quoted(name.encode()) for name in transport.theirs.get(offered, [])]
        known = list(getattr(ours, mine))
        if names and not set(names) & set(known):
            return HostError(
                f"{endpoint.label}: no {word} in common; it offers {', '.join(names)}\n"
                f"  draftyard knows {', '.join(known)}\n"
                f"  repair: {word} {','.join([*names, common])}   (in its sshd_config, as its only line of {word}; then restart sshd)\n"
                + ("  and where it has no such key: ssh-keygen -A   (there, as root)\n" * (mine == "key_types"))
                + f"  or enter it with OpenSSH from a machine that reaches it: that one's address:, and hop: ssh:{endpoint.address}"
            )
    return None


def _is_silence(error: BaseException) -> bool:
    """It took the connection and did not go on: no banner, or (paramiko's "No existing session") nothing after it."""
    is_ssh = isinstance(error, paramiko.SSHException)
    return isinstance(error, EOFError) or (is_ssh and ("banner" in str(error) or _is_mute(error)))


def _is_mute(error: BaseException) -> bool:
    return "No existing session" in str(error)


def _has_banner(heard: bytes) -> bool:
    """Lines of greeting may come before it."""
    return heard.startswith(b"SSH-") or b"\nSSH-" in heard


def _is_garbled(error: BaseException) -> bool:
    """What came is no SSH, by paramiko's words, which say nothing to a person."""
    words = ("Indecipherable protocol version", "Invalid packet blocking", "Invalid SSH banner", "Mismatched MAC")
    return isinstance(error, paramiko.SSHException) and str(error).startswith(words)


def _is_stranger(said: str) -> bool:
    """It is another server than sshd, whose own refusals pass."""
    return bool(said) and not said.startswith(("Exceeded MaxStartups", "Not allowed at this time"))


def _explained(endpoint: Endpoint, error: BaseException, *, tried_s: float, said: str = "") -> HostError:
    """The error in words that name the machine and what to look at."""
    match error:
        case _ if _is_stranger(said):
            text = f'no SSH server on port {endpoint.port}; it says: "{said}"\n  is it the right port?'
        case _ if said:
            text = f'its SSH server takes no connection now, tried for {tried_s:.0f} s; it says: "{said}"'
        case paramiko.ChannelException(code=1):
            text = f"the jump host before it forbids forwarding (AllowTcpForwarding); use a hop instead: `hop: ssh:{endpoint.address}`"
        case paramiko.ChannelException():
            text = f"the jump host before it cannot reach {endpoint.place}: {error.text}"
        case socket.gaierror():
            text = f"no address for the name {endpoint.address}: {error.strerror}"
        case ConnectionRefusedError():
            text = f"refuses TCP connections on port {endpoint.port}: is sshd running there?"
        case TimeoutError():
            text = f"no answer from {endpoint.place} within {endpoint.connect_timeout_s or CONNECT_S:g} s"
        case _ if _is_silence(error) and endpoint.proxy_command:
            text = f"its ProxyCommand brought no SSH banner: {endpoint.proxy_command}"
        case _ if _is_garbled(error):
            text = f"breaks the SSH protocol on port {endpoint.port}; is it an SSH server, and does nothing between change bytes?"
        case _ if _is_mute(error):
            text = f"sends its SSH banner and then nothing, tried for {tried_s:.0f} s; is the machine overloaded or frozen?"
        case EOFError() if str(error):
            text = f"{error}, tried for {tried_s:.0f} s; is the machine overloaded or frozen, or is something between?"
        case _ if isinstance(error, EOFError) or isinstance(error.__context__, EOFError):
            text = (
                f"closes the connection without an SSH banner, tried for {tried_s:.0f} s; "
                f"is an SSH server on port {endpoint.port}, and does it take connections from here?"
            )
        case _ if _is_silence(error):
            text = f"accepts TCP, no SSH banner in {BANNER_S:g} s, tried for {tried_s:.0f} s; is the machine starting or frozen?"
        case _:
            text = str(error) or type(error).__name__
    return HostError(f"{endpoint.label}: {text}")
