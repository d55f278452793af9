"""Which machines are known and how each is reached: the embedded `local`, hosts.yaml, ~/.ssh/config.

    hosts:
      gpu:                            every key is optional
        address: 10.0.0.2             an address or an alias of ~/.ssh/config (the entry's own name by default)
        port: 22013
        user: root
        jump: admin@pve:2222          jump hosts, comma between; `none` cuts what ~/.ssh/config says
        identity: ~/.ssh/id_gpu       a key file, or a list of them
        hop: pct:200                  pct, docker, lxc or ssh, and a name; a list goes further inwards
        work_dir: /data/draftyard     by default ~/.local/share/draftyard there
        python: /root/venv/bin/python
        gpus: [5, 6, 7]               index or UUID; all by default
        env_file: ~/.secrets/gpu.env  KEY=VALUE lines on this machine, sent as a file of mode 0600
        host_keys: strict             or accept-new, a known-hosts file of its own, or both: `accept-new FILE`

Everything here is data: nothing is contacted, and `orchestrator.shell.connect` opens the way.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.errors import UsageError, one_line
from orchestrator.given import read_given
from orchestrator.nearest import nearest, unknown
from orchestrator.recipe.strict_yaml import Document, YamlFaults, parse

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # and half a surrogate pair, which no bytes spell
HOP_KINDS = ("pct", "docker", "lxc", "ssh")


@dataclass(frozen=True)
class Hop:
    kind: str  # pct, docker, lxc, ssh
    name: str  # container id or name, or what the inner ssh is asked for

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


@dataclass(frozen=True)
class Host:
    name: str
    source: str  # where it is said: "built in", "hosts.yaml:3:3", "~/.ssh/config"
    is_local: bool = False
    address: str = ""
    port: int | None = None
    user: str | None = None
    jump: str | None = None
    identity: tuple[str, ...] = ()
    hops: tuple[Hop, ...] = ()  # from the outside inwards
    work_dir: str | None = None
    python: str = "python3"
    gpus: tuple[str, ...] = ()
    env_file: Path | None = None
    env_file_at: str = ""  # the file, line and column that names it
    host_keys: str = "strict"
    known_hosts: Path | None = None  # instead of the files of ~/.ssh/config
    ssh_config: Path | None = None


LOCAL = Host(name="local", source="built in", is_local=True, python=sys.executable)


@dataclass(frozen=True)
class Hosts:
    """Every host that can be named. `local` may be given other settings in hosts.yaml."""

    by_name: dict[str, Host]
    patterns: tuple[str, ...] = ()  # wildcards of ~/.ssh/config; a bare * makes no name known
    ssh_config: Path | None = None
    file: Path | None = None  # the hosts.yaml, be it there or not
    faults: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of an entry: nobody else's business

    @classmethod
    def load(cls, hosts_file: Path | None, ssh_config: Path | None = None) -> Hosts:
        """Missing files are no fault; UsageError names file, line and column of one that no entry alone has."""
        config = ssh_config or Path.home() / ".ssh/config"
        words = list(_ssh_aliases(config, set()))
        aliases = [word for word in words if not re.search(r"[*?!]", word)]
        known = {LOCAL.name: LOCAL}
        known |= {
            name: Host(name=name, source=_shown(ssh_config), address=name, ssh_config=ssh_config)
            for name in aliases
            if name != LOCAL.name
        }
        faults: dict[str, tuple[str, ...]] = {}
        if hosts_file is not None:
            known |= _read_hosts(hosts_file, ssh_config, faults)
        patterns = tuple(word for word in words if re.search(r"[*?]", word) and word.strip("*") and word[0] != "!")
        return cls(known, patterns, ssh_config, hosts_file, faults)

    def names(self) -> list[str]:
        return list(self.by_name)

    def knows(self, name: str) -> bool:
        is_like = any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns) and not name.startswith("-")
        return name in self.by_name or is_like

    def find(self, name: str) -> Host:
        """UsageError for a name that nobody knows, with the nearest one, and for an entry with a fault."""
        if name in self.faults:
            raise UsageError("\n".join(self.faults[name]))
        if name in self.by_name:
            return self.by_name[name]
        if self.knows(name):
            return Host(name=name, source=_shown(self.ssh_config), address=name, ssh_config=self.ssh_config)
        make = f"a host is an alias in {_shown(self.ssh_config)} or an entry in {self.file or 'hosts.yaml'}"
        raise UsageError(unknown("host", name, self.by_name, hint=None if nearest(name, self.by_name) else make))


def _shown(ssh_config: Path | None) -> str:
    return "~/.ssh/config" if ssh_config is None else str(ssh_config)


def hosts_of(names: Iterable[str], *, kept: Path | None, here: Path | None) -> Hosts:
    """Where a run's hosts are found: in the hosts.yaml it was launched with, as that is now, and in the one here where that
    one's folder is gone, or closed to this user, or it knows them no longer.

    A database may hold runs of several folders, each with hosts of its own. Raises UsageError for a fault in what is read.
    """
    if kept is not None and _may_enter(kept.parent):
        hosts = Hosts.load(kept)
        if all(hosts.knows(name) for name in names):
            return hosts
    return Hosts.load(here)


def _may_enter(folder: Path) -> bool:
    try:
        (folder / "..").stat()  # which is asked of the folder itself
    except OSError:  # also of a folder above, or of a disk that is away
        return False
    return True


def read_env_file(path: Path, named_at: str = "") -> dict[str, str]:
    """`KEY=VALUE` lines, `#` comments, quotes as in a shell; UsageError names the line, never the value.

    `named_at`: where somebody may correct the path.
    """
    values: dict[str, str] = {}
    try:
        text = read_given(path.expanduser()).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        told = f"env file {path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}"
        repair = f"; write KEY=VALUE lines there, or correct its path at {named_at}" if named_at else ""
        raise UsageError(told + repair) from error
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip().removeprefix("export ").strip()
        if not stripped or stripped.startswith("#"):
            continue
        name, separator, value = stripped.partition("=")
        if not separator or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"env file {path}:{number}: expected KEY=VALUE")
        values[name] = _unquoted(value.strip(), f"{path}:{number}")
    return values


def _unquoted(value: str, where: str) -> str:
    if value[:1] not in ("'", '"'):
        return value
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise UsageError(f"env file {where}: {str(error).lower()}") from error
    if len(words) != 1:
        raise UsageError(f"env file {where}: text after the closing quote")
    return words[0]


# hosts.yaml ------------------------------------------------------------------------------------------


def _read_hosts(file: Path, ssh_config: Path | None, at_fault: dict[str, tuple[str, ...]]) -> dict[str, Host]:
    try:
        document = parse(read_given(file), str(file))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except YamlFaults as faults:
        raise UsageError(str(faults)) from faults
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    body = document.value if document.value is not None else {}
    hosts: dict[str, Host] = {}
    if not isinstance(body, dict) or set(body) - {"hosts"} or not isinstance(body.get("hosts", {}), dict | None):
        raise UsageError(f"{document.locate(())}: expected one key, `hosts`, with an entry for each host under it")
    for name, entry in (body.get("hosts") or {}).items():
        found: list[str] = []
        hosts[name] = replace(_host(name, entry, document, found), ssh_config=ssh_config)
        if found:
            at_fault[name] = tuple(map(one_line, found))
    return hosts


def _host(name: str, entry: Any, document: Document, faults: list[str]) -> Host:
    where = document.keys.get(("hosts", name)) or document.locate(("hosts", name))
    if name != LOCAL.name and not re.fullmatch(r"[A-Za-z0-9_][\w.@:-]*", name):
        raise UsageError(one_line(f"{where}: hosts.{name}: a host's name is letters, digits and . _ - only"))
    base = replace(LOCAL if name == LOCAL.name else Host(name, "", address=name), source=f"hosts.yaml:{where.line}")
    if entry is None:
        return base
    if not isinstance(entry, dict):
        faults.append(f"{where}: hosts.{name}: expected keys and values")
        return base
    values: dict[str, Any] = {}
    for key, value in entry.items():
        position = document.keys.get(("hosts", name, key)) or where
        reader = _READERS.get(key)
        if reader is None or (name == "local" and key in _NOT_LOCAL):
            due = [each for each in _READERS if name != "local" or each not in _NOT_LOCAL]
            told = unknown("key", key, due) if reader is None else f"not for `local`; known: {', '.join(due)}"
            faults.append(f"{position}: hosts.{name}.{key}: {told}")
            continue
        try:
            _refuse_control(value)
            values |= reader(value)
            values |= {"env_file_at": str(position)} if key == "env_file" else {}
        except ValueError as error:
            faults.append(f"{position}: hosts.{name}.{key}: {error}")
    return replace(base, **values)


def _refuse_control(value: Any) -> None:
    """No program takes a NUL, and what else is of their kind would hide in commands, paths and messages."""
    for text in value if isinstance(value, list) else [value]:
        found = _CONTROL.search(text) if isinstance(text, str) else None
        if found:
            raise ValueError(f"is {text!r}; it holds the control character {found[0]!r}, leave that out")


def _text(key: str) -> Callable[[Any], dict[str, Any]]:
    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, str) or not value or value.startswith("-"):
            raise ValueError(f"is {value!r}; expected text that does not start with a dash")
        return {key: value}

    return read


def _address(value: Any) -> dict[str, Any]:
    """IPv6 with or without brackets. A port beside it would be taken for a part of the name, and a user stands in one place."""
    read = _text("address")(value)
    found = re.fullmatch(r"(?:ssh://)?(?:(.+)@)?(\[[^]]+\]|[^:/]+|[0-9A-Fa-f:.]+(?:%[^:/]+)?)(?::(\d+))?/?", value)
    if found and (found[1] or found[3] or value.startswith("ssh://")):
        keys = [f"address: {found[2].strip('[]')}", *([f"user: {found[1]}"] if found[1] else [])]
        raise ValueError(f"is {value!r}; write {', '.join([*keys, *([f'port: {found[3]}'] if found[3] else [])])}")
    return read


def _port(value: Any) -> dict[str, Any]:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 65535:
        raise ValueError(f"is {value!r}; a port is a number from 1 to 65535")
    return {"port": value}


def _identity(value: Any) -> dict[str, Any]:
    return {"identity": tuple(_strings(value))}


def _hops(value: Any) -> dict[str, Any]:
    hops = []
    for text in _strings(value):
        kind, separator, name = text.partition(":")
        if kind in ("qm", "vm"):
            raise ValueError(
                f"is {text!r}; a virtual machine has no way in from its host: give its own address and jump:"
            )
        if kind not in HOP_KINDS or not separator or not re.fullmatch(r"[A-Za-z0-9_][\w.@:-]*", name):
            raise ValueError(f"is {text!r}; expected KIND:NAME with a kind of {', '.join(HOP_KINDS)}, such as pct:200")
        if kind == "pct" and not name.isdigit():
            raise ValueError(f"is {text!r}; a Proxmox container is named by its number, such as pct:200")
        hops.append(Hop(kind, name))
    return {"hops": tuple(hops)}


def _gpus(value: Any) -> dict[str, Any]:
    gpus = tuple(str(item) for item in (value if isinstance(value, list) else [value]))
    for gpu in gpus:
        if not re.fullmatch(r"\d+|(GPU|MIG)-[0-9A-Za-z/-]+", gpu):
            raise ValueError(f"has {gpu!r}; a GPU is an index or a UUID such as GPU-8f2c…")
    return {"gpus": gpus}


def _env_file(value: Any) -> dict[str, Any]:
    return {"env_file": _file(_text("env_file")(value)["env_file"])}


def _host_keys(value: Any) -> dict[str, Any]:
    mode, _, file = str(value).partition(" ") if str(value).startswith("accept-new") else ("strict", "", str(value))
    if mode not in ("strict", "accept-new"):
        raise ValueError(f"is {value!r}; expected strict, accept-new, a file, or `accept-new FILE`")
    if file in ("strict", ""):
        return {"host_keys": mode}
    if "/" not in file:
        raise ValueError(
            f"is {value!r}; expected strict, accept-new, a file (with a / in its path), or `accept-new FILE`"
        )
    return {"host_keys": mode, "known_hosts": _file(file)}


def _file(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"is {text!r}; this machine has no such user's home folder") from error


def _strings(value: Any) -> list[str]:
    items = value if isinstance(value, list) else [value]
    if not items or not all(isinstance(item, str) and item for item in items):
        raise ValueError(f"is {value!r}; expected text or a list of texts")
    return items


_READERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "address": _address,
    "port": _port,
    "user": _text("user"),
    "jump": _text("jump"),
    "identity": _identity,
    "hop": _hops,
    "work_dir": _text("work_dir"),
    "python": _text("python"),
    "gpus": _gpus,
    "env_file": _env_file,
    "host_keys": _host_keys,
}
_NOT_LOCAL = ("address", "port", "user", "jump", "identity", "host_keys")


# ~/.ssh/config: names only; their meaning is asked of `ssh -G` ---------------------------------------


def _ssh_aliases(config: Path, seen: set[str], depth: int = 0) -> Iterator[str]:
    """The words after `Host`, through Include; a file that cannot be read has none. Each is read once: files that include
    one another have as many ways through them as their number has permutations."""
    real = os.path.realpath(config)
    if real in seen:
        return
    seen.add(real)
    try:
        lines = read_given(config).decode("utf-8", "replace").splitlines()
    except OSError:
        return
    for line in lines:
        keyword, words = _ssh_words(line)
        if keyword == "host":
            yield from words
        elif keyword == "include" and depth < 16:  # as ssh itself
            for word in words:
                # Relative names lie in ~/.ssh, whichever file names them.
                place = Path.home() / ".ssh" / os.path.expanduser(word)  # noqa: PTH111  # Path's raises for unknown users
                for included in sorted(glob.glob(str(place))):  # noqa: PTH207  # the pattern may be absolute
                    yield from _ssh_aliases(Path(included), seen, depth + 1)


def _ssh_words(line: str) -> tuple[str, list[str]]:
    found = re.match(r"\s*(\w+)\s*[=\s]\s*(.*)", line)
    if not found:
        return "", []
    try:
        return found[1].lower(), shlex.split(found[2], comments=True)
    except ValueError:
        return found[1].lower(), found[2].split()
