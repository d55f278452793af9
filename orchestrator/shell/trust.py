"""Whether a machine is the one it was last time: host keys, checked before anything is sent.

`ssh-keygen -F` reads the known-hosts files: it knows hashed names, wildcards, other ports and
markers, and a line it cannot read spoils only itself. A key is known, new or changed. New is
refused unless `accept-new` was asked for; changed is always refused, with what to compare and how
to repair. Files are appended to, never rewritten.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import re
import shlex
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import paramiko

from orchestrator.errors import HostError
from orchestrator.shell.routes import Endpoint


@dataclass(frozen=True)
class KnownKey:
    kind: str  # ssh-ed25519, ...
    blob: bytes
    file: Path
    line: int
    marker: str = ""  # @revoked, @cert-authority

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.blob)


def fingerprint(blob: bytes) -> str:
    """As `ssh-keygen -l` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def known_keys(endpoint: Endpoint) -> list[KnownKey]:
    """Every key the known-hosts files have for this machine."""
    found = []
    for file in endpoint.known_hosts_files:
        if file.is_file() and str(file) != os.devnull:
            found += _search(endpoint.key_name, file)
    return found


def _search(name: str, file: Path) -> list[KnownKey]:
    done = subprocess.run(
        ["ssh-keygen", "-F", name, "-f", str(file)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=10,
        check=False,
    )
    return parse_search(done.stdout.decode("utf-8", "replace"), file)


def parse_search(text: str, file: Path) -> list[KnownKey]:
    """What `ssh-keygen -F` prints: a comment with the line number, then the line itself."""
    keys, line = [], 0
    for row in text.splitlines():
        comment = re.match(r"# Host .* found: line (\d+)", row)
        if comment:
            line = int(comment[1])
            continue
        words = row.split()
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) >= 3:
            try:
                keys.append(KnownKey(words[1], base64.b64decode(words[2], validate=True), file, line, marker))
            except ValueError:
                continue  # a damaged line is no key; ssh skips it too
    return keys


class Policy(paramiko.MissingHostKeyPolicy):
    """Asked by paramiko with the key that the machine showed; returning means trust."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._known = known_keys(endpoint)

    def key_types_first(self, offered: Iterable[str]) -> list[str]:
        """The machine is to show a key of a type that we know, if it has one."""
        known = {name for key in self._known if not key.marker for name in _algorithms(key.kind)}
        return sorted(offered, key=lambda name: name not in known)

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        shown = key.asbytes()
        plain = [known for known in self._known if not known.marker]
        if any(known.blob == shown and known.marker == "@revoked" for known in self._known):
            raise HostError(
                f"{self._endpoint.label}: its host key {fingerprint(shown)} is marked @revoked; do not connect",
                reason="host_key_changed",
            )
        if any(known.blob == shown for known in plain):
            return
        if plain:
            raise HostError(self._changed(plain, key), reason="host_key_changed")
        if self._endpoint.host_keys != "accept-new":
            raise HostError(self._unknown(key), reason="host_key_unknown")
        _append(self._endpoint, key)

    def _changed(self, known: list[KnownKey], key: paramiko.PKey) -> str:
        same = [old for old in known if old.kind == key.get_name()] or known
        lines = [f"{self._endpoint.label}: THE HOST KEY HAS CHANGED; nothing was sent"]
        lines += [f"  known: {old.fingerprint} ({old.kind}), {old.file}:{old.line}" for old in same]
        lines += [
            f"  shown: {fingerprint(key.asbytes())} ({key.get_name()})",
            "  the machine was set up anew, or somebody is in between. Compare with the machine's own",
            f"  console (ssh-keygen -lf /etc/ssh/ssh_host_{_short(key)}_key.pub); only if they agree:",
        ]
        lines += [
            f"  repair: ssh-keygen -R '{self._endpoint.key_name}' -f {shlex.quote(str(file))}"
            for file in dict.fromkeys(k.file for k in same)
        ]
        return "\n".join(lines)

    def _unknown(self, key: paramiko.PKey) -> str:
        files = [shlex.quote(str(file)) for file in self._endpoint.known_hosts_files]
        target = files[0] if files else "~/.ssh/known_hosts"
        line = f"{self._endpoint.key_name} {key.get_name()} {key.get_base64()}"
        authorities = [f"{known.file}:{known.line}" for known in self._known if known.marker == "@cert-authority"]
        return (
            f"{self._endpoint.label}: its host key is not known\n"
            + "".join(f"  {place} trusts an authority; host certificates are not read here\n" for place in authorities)
            + f"  shown: {fingerprint(key.asbytes())} ({key.get_name()})\n"
            "  compare it with the machine's own console or its provider's page; if they agree:\n"
            f"  repair: echo '{line}' >> {target}\n"
            "  (or `host_keys: accept-new` in its hosts.yaml entry, to trust first contacts)"
        )


def _append(endpoint: Endpoint, key: paramiko.PKey) -> None:
    """One whole line at the end of the user's file; two clients at once do not mix."""
    if not endpoint.known_hosts_files or str(endpoint.known_hosts_files[0]) == os.devnull:
        return
    file = endpoint.known_hosts_files[0]
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with file.open("ab+") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.seek(0, os.SEEK_END)
        newline = b""
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            newline = b"" if stream.read(1) == b"\n" else b"\n"
        stream.write(newline + f"{endpoint.key_name} {key.get_name()} {key.get_base64()}\n".encode())


def _algorithms(kind: str) -> tuple[str, ...]:
    """An ssh-rsa key signs with SHA-2 nowadays, under other names."""
    return ("rsa-sha2-512", "rsa-sha2-256") if kind == "ssh-rsa" else (kind,)


def _short(key: paramiko.PKey) -> str:
    return key.get_name().removeprefix("ssh-").split("-")[0]
