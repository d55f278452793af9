"""Which machines lie on the way to a host, as the OpenSSH client itself reads ~/.ssh/config.

`ssh -G` is asked once per machine (9 ms): it knows Include, Match, wildcards and tokens, all of
which paramiko's reader gets wrong in silence. What it prints is parsed here into Endpoints, from
the first machine that is dialled to the host itself. Nothing is contacted.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.errors import HostError
from orchestrator.shell.pulse import KeepAlive
from orchestrator.shell.stream import told

MAX_HOPS = 10


@dataclass(frozen=True)
class Question:
    """What is asked of `ssh -G`: a name, and what is to win over the config file."""

    address: str
    port: int | None = None
    user: str | None = None
    jump: str | None = None  # "none" cuts what the config file says
    identity: tuple[str, ...] = ()
    config_file: Path | None = None  # instead of ~/.ssh/config and the system's


@dataclass(frozen=True)
class Endpoint:
    name: str  # as it was asked for
    address: str
    port: int
    user: str
    identity_files: tuple[Path, ...]
    identities_only: bool
    known_hosts_files: tuple[Path, ...]  # the user's first: new keys are appended there
    host_key_alias: str | None
    host_keys: str  # strict or accept-new
    connect_timeout_s: float | None
    keepalive: KeepAlive
    proxy_command: str | None = None
    agent: Path | None = None  # its socket

    @property
    def label(self) -> str:
        return f"{self.name} ({self.user}@{self.place})"

    @property
    def place(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    @property
    def key_name(self) -> str:
        """The name a known-hosts file has it under."""
        if self.host_key_alias:
            return self.host_key_alias
        return self.address if self.port == 22 else f"[{self.address}]:{self.port}"


def route(question: Question, *, num_hops_so_far: int = 0) -> tuple[Endpoint, ...]:
    """From the first machine to dial to the one that was asked for; HostError says what is wrong with the config."""
    if num_hops_so_far > MAX_HOPS:
        raise HostError(f"{question.address}: more than {MAX_HOPS} jump hosts; does a ProxyJump lead back to itself?")
    answer = _ask(question)
    target = _endpoint(question, answer)
    jumps = [jump.strip() for jump in answer.get("proxyjump", ["none"])[0].split(",") if jump.strip()]
    if not jumps or jumps == ["none"]:
        return (target,)
    # As OpenSSH does it: the first jump host is reached by its own settings, the others through the one before.
    before = route(_jump_question(jumps[0], question), num_hops_so_far=num_hops_so_far + 1)
    between = []
    for jump in jumps[1:]:
        hop = replace(_jump_question(jump, question), jump="none")
        between.append(replace(_endpoint(hop, _ask(hop)), proxy_command=None))
    return (*before, *between, replace(target, proxy_command=None))


def _ask(question: Question) -> dict[str, list[str]]:
    """`ssh -G` as keyword -> values."""
    if question.address.startswith("-"):
        raise HostError(f"{question.address!r} is not a host name: it starts with a dash")
    command = ["ssh", "-G", "-T"]
    command += ["-F", str(question.config_file)] if question.config_file else []
    command += ["-p", str(question.port)] if question.port else []
    command += ["-l", question.user] if question.user else []
    command += ["-o", f"ProxyJump={question.jump}"] if question.jump else []
    for identity in question.identity:
        quoted = identity.replace("\\", "\\\\").replace('"', '\\"')  # as ssh_config wants a name with blanks
        command += ["-o", f'IdentityFile="{quoted}"', "-o", "IdentitiesOnly=yes"]
    try:
        done = subprocess.run(
            [*command, question.address], stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False
        )
    except FileNotFoundError as error:
        raise HostError(
            "no `ssh` on this machine; install the OpenSSH client (apt-get install openssh-client)"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise HostError(
            f"{question.address}: `ssh -G` gave no answer in 10 s; is there a `Match exec` that hangs?"
        ) from error
    if done.returncode:
        raise HostError(f"{question.address}: ssh refuses its configuration: {told(done.stderr)}")
    return parse_answer(done.stdout.decode("utf-8", "surrogateescape"))


def parse_answer(text: str) -> dict[str, list[str]]:
    """Keyword (lower case) -> its values, in order."""
    answer: dict[str, list[str]] = {}
    for line in text.splitlines():
        keyword, _, value = line.strip().partition(" ")
        if keyword:
            answer.setdefault(keyword.lower(), []).append(value)
    return answer


def _endpoint(question: Question, answer: dict[str, list[str]]) -> Endpoint:
    def one(keyword: str) -> str | None:
        value = answer.get(keyword, ["none"])[0]
        return None if value in ("none", "") else value

    address, user, port = one("hostname") or question.address, one("user") or "", one("port") or "22"
    tokens = {"h": address, "n": question.address, "p": port, "r": user, "d": str(Path.home()), "%": "%"}
    tokens |= {"u": os.environ.get("USER", user), "k": one("hostkeyalias") or question.address}
    proxy = one("proxycommand")
    return Endpoint(
        name=question.address,
        address=address.strip("[]"),
        port=_number(question, "port", port),
        user=user,
        identity_files=_paths([path for path in answer.get("identityfile", []) if path != "none"], tokens),
        identities_only=one("identitiesonly") == "yes",
        known_hosts_files=_paths(_files(answer, "userknownhostsfile") + _files(answer, "globalknownhostsfile"), tokens),
        host_key_alias=one("hostkeyalias"),
        host_keys="accept-new" if one("stricthostkeychecking") in ("accept-new", "no", "off", "false") else "strict",
        connect_timeout_s=_number(question, "connecttimeout", one("connecttimeout") or "0") or None,
        proxy_command=_expand(proxy, tokens, {}) if proxy else None,
        agent=_agent(answer.get("identityagent", ["SSH_AUTH_SOCK"])[0], tokens),
        keepalive=KeepAlive.of(
            _number(question, "serveraliveinterval", one("serveraliveinterval") or "0"),
            _number(question, "serveralivecountmax", one("serveralivecountmax") or "3"),
        ),
    )


def _number(question: Question, keyword: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise HostError(f"{question.address}: `ssh -G` gives {text[:50]!r} for {keyword}; a number is due")
    return int(text)


def _jump_question(jump: str, question: Question) -> Question:
    """`[user@]host[:port]`, `ssh://…` or an alias; IPv6 in brackets."""
    text = jump.removeprefix("ssh://").rstrip("/")
    user, _, place = text.rpartition("@")
    found = re.fullmatch(r"\[(?P<v6>[^]]+)\](?::(?P<p6>\d+))?|(?P<host>[^:]+)(?::(?P<port>\d+))?|(?P<bare>.*)", place)
    assert found is not None  # the last branch takes anything
    port = found["p6"] or found["port"]
    return Question(
        address=found["v6"] or found["host"] or found["bare"],
        port=int(port) if port else None,
        user=user or None,
        config_file=question.config_file,
    )


def _files(answer: dict[str, list[str]], keyword: str) -> list[str]:
    """`ssh -G` prints names without their quotes: what does not begin like a path goes on with the one before."""
    names = re.split(r" (?=[/~%])", answer.get(keyword, [""])[0])
    return [name for name in names if name not in ("", "none")]


def _agent(place: str, tokens: dict[str, str]) -> Path | None:
    """IdentityAgent: a path, `none`, or a variable that holds the path."""
    if place == "SSH_AUTH_SOCK" or re.fullmatch(r"\$\w+", place):
        held = os.environ.get(place.removeprefix("$"), "")
        return Path(held) if held not in ("", "none") else None
    return next(iter(_paths([place] if place not in ("", "none") else [], tokens)), None)


def _paths(words: list[str], tokens: dict[str, str]) -> tuple[Path, ...]:
    # os.path's, because Path's raises for a user whom this machine does not know; to ssh that is a file that is not there.
    return tuple(Path(os.path.expanduser(_expand(word, tokens, os.environ))) for word in dict.fromkeys(words))  # noqa: PTH111


def _expand(text: str, tokens: Mapping[str, str], variables: Mapping[str, str]) -> str:
    """`%h` and its kin, and `${HOME}`; a letter or a variable that we do not know stays as it is.

    A path has both, a command tokens alone: its variables are for the shell that runs it, here or farther on.
    """
    known = {f"%{letter}": value for letter, value in tokens.items()}
    known |= {f"${{{name}}}": value for name, value in variables.items()}
    return re.sub(r"%.|\$\{\w+\}", lambda found: known.get(found[0], found[0]), text)
