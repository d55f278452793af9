"""Who we say we are: the keys offered to a machine, in an order that survives an agent full of keys.

The identity files come first (from the agent where it holds them, so that an encrypted file needs no
passphrase), then the agent's other keys unless IdentitiesOnly is set. A server hangs up after six
offers; what was offered, and which file could not be read, is in the error. Nothing is asked of a person.
"""

from __future__ import annotations

import base64
import copy
import shlex
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from paramiko.agent import AgentSSH
from paramiko.auth_strategy import AuthResult, AuthSource, AuthStrategy, InMemoryPrivateKey
from paramiko.pkey import UnknownKeyType

from orchestrator.errors import HostError
from orchestrator.given import read_given
from orchestrator.shell.routes import Endpoint
from orchestrator.shell.trust import fingerprint

AGENT_S = 12.0  # for its list of keys, and for each signature: a person may have to touch something


@dataclass(frozen=True)
class Offer:
    name: str
    key: paramiko.PKey


class Agent(AgentSSH):
    """The agent behind a socket. paramiko's own waits for ever, and a forwarded one may be of a connection that is dead."""

    def __init__(self, place: Path) -> None:
        super().__init__()
        self._place = place
        conn = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            conn.settimeout(AGENT_S)
            conn.connect(str(place))
            self._connect(conn)  # type: ignore[attr-defined]  # the stubs leave it out
        except BaseException:
            conn.close()
            raise

    def close(self) -> None:
        self._close()  # type: ignore[attr-defined]

    def _send_message(self, msg: object) -> object:
        """A question and its answer; SSHException names the agent, also in the thread that signs."""
        try:
            return super()._send_message(msg)  # type: ignore[misc]
        except TimeoutError as error:
            told = f"the agent {self._place} gave no answer within {AGENT_S:g} s"
            raise paramiko.SSHException(told) from error
        except (OSError, paramiko.SSHException) as error:
            raise paramiko.SSHException(f"the agent {self._place}: {error}") from error


class Identities(AuthStrategy):
    """Offers one key after the other until the machine takes one; HostError (auth) when none is taken."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(paramiko.SSHConfig())
        self._endpoint = endpoint
        self._unreadable: list[str] = []

    def authenticate(self, transport: paramiko.Transport) -> AuthResult:
        refused: list[str] = []
        for offer in self._offers():
            try:
                missing = transport.auth_publickey(self._endpoint.user, offer.key)
            except paramiko.AuthenticationException:
                refused.append(offer.name)
                if not transport.is_active():
                    if len(refused) == 1:  # a server hangs up after several refusals, not before it has looked at one
                        raise _cut(self._endpoint.label, offer.name) from None
                    break
                continue
            if not missing:
                return AuthResult(self)
            raise HostError(
                f"{self._endpoint.label}: took {offer.name} and wants more: {', '.join(missing)}; "
                "draftyard answers no prompts: use a ProxyCommand or a control connection of ssh",
                reason="auth",
            )
        raise HostError(self._failure(refused, hung_up=not transport.is_active()), reason="auth")

    def get_sources(self) -> Iterator[AuthSource]:
        """For paramiko's own loop, which swallows every exception and is not used here."""
        return (InMemoryPrivateKey(self._endpoint.user, offer.key) for offer in self._offers())

    def _offers(self) -> Iterator[Offer]:
        with_agent = self._reached_agent()
        try:
            agent = {} if with_agent is None else {key.asbytes(): key for key in with_agent.get_keys()}
            for file in self._endpoint.identity_files:
                held = agent.pop(_public_blob(file), None)
                if held is not None:
                    yield Offer(f"{file} (agent)", held)
                elif file.is_file():
                    yield from self._from_file(file)
            if not self._endpoint.identities_only:
                for blob, key in agent.items():
                    yield Offer(f"agent key {key.comment or fingerprint(blob)}", key)
        finally:
            if with_agent is not None:
                with_agent.close()

    def _reached_agent(self) -> Agent | None:
        """None where there is none; one that does not answer is named if no key lets in."""
        place = self._endpoint.agent
        try:
            return None if place is None else Agent(place)
        except OSError as error:
            self._unreadable.append(f"the agent {place} cannot be reached: {error.strerror or error}")
        except (paramiko.SSHException, ValueError) as error:
            self._unreadable.append(str(error))
        return None

    def _from_file(self, file: Path) -> Iterator[Offer]:
        try:
            read_given(file)  # what is no file of a key's size is refused before it is read without bound
            key = paramiko.PKey.from_path(file)
        except (
            OSError,
            ValueError,
            TypeError,
            paramiko.SSHException,
            UnknownKeyType,
            UnsupportedAlgorithm,
        ) as error:
            certificate = file.with_name(f"{file.name}-cert.pub")
            beside = f", or {certificate.name} beside it," if certificate.is_file() else ""
            self._unreadable.append(f"{file}{beside} cannot be read: {_why(file, error)}")
            return
        if key.public_blob is not None:  # of the certificate beside it, which wins over the plain key
            yield Offer(f"{file} with its certificate", key)
            key = copy.copy(key)
            key.public_blob = None
        yield Offer(str(file), key)

    def _failure(self, refused: list[str], *, hung_up: bool) -> str:
        lines = [f"{self._endpoint.label}: let in with none of the keys"]
        lines += [f"  refused: {name}" for name in refused]
        lines += [f"  {line}" for line in self._unreadable]
        if not refused and not self._unreadable:
            files = ", ".join(str(file) for file in self._endpoint.identity_files) or "no IdentityFile"
            agent = self._endpoint.agent
            asked = "no agent (SSH_AUTH_SOCK, IdentityAgent)" if agent is None else f"no key in the agent {agent}"
            lines.append(f"  none was found: {asked}, and not one of {files}")
        if hung_up:
            lines.append(
                "  it hung up after too many offers: set IdentityFile and IdentitiesOnly yes for it in ~/.ssh/config"
            )
        lines.append(f"  does this work: {shlex.join(self._by_hand())}")
        return "\n".join(lines)

    def _by_hand(self) -> list[str]:
        """The same with ssh itself, all spelled: the name may be one that hosts.yaml alone knows."""
        at = self._endpoint
        files = [word for file in at.identity_files if file.is_file() for word in ("-i", str(file))]
        way = ["-o", f"ProxyCommand={at.proxy_command}"] if at.proxy_command else []
        return ["ssh", "-o", "BatchMode=yes", "-p", str(at.port), *files, *way, f"{at.user}@{at.address}", "true"]


def _cut(label: str, offered: str) -> HostError:
    return HostError(
        f"{label}: the connection was lost while {offered} was offered; is the line bad, "
        "or does its sshd hang up at a first refusal (MaxAuthTries 1)?"
    )


def _public_blob(file: Path) -> bytes:
    """The public half beside an identity file; empty when there is none."""
    public = file if file.suffix == ".pub" else file.with_name(file.name + ".pub")
    try:
        return base64.b64decode(read_given(public).decode("utf-8").split()[1])
    except (OSError, ValueError, IndexError):
        return b""


def _why(file: Path, error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    content = read_given(file)
    if isinstance(error, TypeError | paramiko.PasswordRequiredException):
        return "it has a passphrase; add it to the agent: ssh-add"
    if "sk-ssh" in str(error) or "sk-ecdsa" in str(error):
        return "it lies on a security key; add it to the agent: ssh-add"
    if content and not content.endswith(b"\n"):
        return "no trailing newline (was it pasted?)"
    if b"\r\n" in content:
        return "it has Windows line ends"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
