"""Every way to a machine, opened for real on this one: the shells that the conformance suite runs on.

local    this machine                    jump     ssh through two jump hosts
ssh      a real sshd on loopback         inner    ssh, then `ssh` run there (forwarding forbidden)
pct      ssh, then a stand-in container  tty      an sshd that gives every command a terminal
docker   ssh, then a program that takes docker's words and runs what they say, without an engine; lxc likewise

Every sshd here is as unfriendly as rented machines are: no SFTP, ten sessions, a banner, and a .bashrc
that prints on both streams and returns early.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from orchestrator.host import LOCAL, Host, Hosts
from orchestrator.shell.connect import connect
from orchestrator.shell.stream import StreamShell
from tests import container, sshd

NAMES = ("local", "ssh", "jump", "pct", "docker", "lxc", "inner", "tty")

BANNER = "AUTHORISED USE ONLY <start>\n" * 20
BASHRC = "echo printed by .bashrc; echo and this >&2; printf 'no newline'\n[ -z \"$PS1\" ] && return 3\n"

# What a proxy that insists on a terminal does to every command: util-linux `script` gives it one.
FORCED_TTY = """#!/bin/sh
exec script -qec "$SSH_ORIGINAL_COMMAND" /dev/null
"""

# Refuses every word that the real program would not take from us; there is no other machine behind it.
STAND_INS = {
    "docker": """#!/bin/sh
case "$1 $2 $3" in
"exec -i trainer") shift 3; exec "$@";;
"inspect -f "*) echo running; exit;;
esac
echo "docker: not understood: $*" >&2; exit 125
""",
    "lxc": """#!/bin/sh
case "$1 $2 $3 $4" in
"exec trainer -T --") shift 4; exec "$@";;
"list ^trainer\\$ "*) echo RUNNING; exit;;
esac
echo "lxc: not understood: $*" >&2; exit 1
""",
}


@contextlib.contextmanager
def opened(name: str, folder: Path) -> Iterator[StreamShell]:
    with contextlib.ExitStack() as stack:
        host = _HOSTS[name](folder, stack)
        shell = connect(host)
        stack.callback(shell.close)
        yield shell


@contextlib.contextmanager
def _unfriendly(folder: Path, *, settings: tuple[str, ...] = (), **options: object) -> Iterator[sshd.Server]:
    folder.mkdir(parents=True)
    (folder / "banner").write_text(BANNER)
    all_settings = (*settings, "Subsystem none /bin/false", "MaxSessions 10", f"Banner {folder / 'banner'}")
    with sshd.running(folder, settings=all_settings, **options) as server:
        (server.home / ".bashrc").write_text(BASHRC)
        yield server


def _local(folder: Path, stack: contextlib.ExitStack) -> Host:
    return LOCAL


def _ssh(folder: Path, stack: contextlib.ExitStack) -> Host:
    server = stack.enter_context(_unfriendly(folder / "sshd", alias="box"))
    return Hosts.load(None, server.config_file).find("box")


def _jump(folder: Path, stack: contextlib.ExitStack) -> Host:
    outer, middle, target = (
        stack.enter_context(_unfriendly(folder / alias, alias=alias)) for alias in ("outer", "middle", "target")
    )
    config = folder / "ssh_config"
    config.write_text(outer.config() + middle.config() + target.config("ProxyJump outer,middle"))
    return Hosts.load(None, config).find("target")


def _pct(folder: Path, stack: contextlib.ExitStack) -> Host:
    inside = stack.enter_context(container.running(folder / "ct"))
    server = stack.enter_context(_unfriendly(folder / "sshd", alias="pve", path=f"{inside.bin}:/usr/bin:/bin"))
    hosts_file = folder / "hosts.yaml"
    hosts_file.write_text(server.hosts_yaml(hop=f"pct:{inside.number}"))
    return Hosts.load(hosts_file, server.config_file).find("pve")


def _stand_in(program: str) -> Callable[[Path, contextlib.ExitStack], Host]:
    def host(folder: Path, stack: contextlib.ExitStack) -> Host:
        file = folder / "bin" / program
        file.parent.mkdir()
        file.write_text(STAND_INS[program])
        file.chmod(0o755)
        server = stack.enter_context(_unfriendly(folder / "sshd", alias="engine", path=f"{file.parent}:/usr/bin:/bin"))
        hosts_file = folder / "hosts.yaml"
        hosts_file.write_text(server.hosts_yaml(hop=f"{program}:trainer"))
        return Hosts.load(hosts_file, server.config_file).find("engine")

    return host


def _inner(folder: Path, stack: contextlib.ExitStack) -> Host:
    target = stack.enter_context(_unfriendly(folder / "target", alias="inner"))
    wrapper = folder / "bin" / "ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {target.config_file} "$@"\n')
    wrapper.chmod(0o755)
    jump = stack.enter_context(
        _unfriendly(
            folder / "jump", alias="jump", path=f"{wrapper.parent}:/usr/bin:/bin", settings=("AllowTcpForwarding no",)
        )
    )
    hosts_file = folder / "hosts.yaml"
    hosts_file.write_text(jump.hosts_yaml(hop="ssh:inner"))
    return Hosts.load(hosts_file, jump.config_file).find("jump")


def _tty(folder: Path, stack: contextlib.ExitStack) -> Host:
    force = folder / "force.sh"
    force.write_text(FORCED_TTY)
    force.chmod(0o755)
    server = stack.enter_context(_unfriendly(folder / "sshd", alias="box", settings=(f"ForceCommand {force}",)))
    return replace(Hosts.load(None, server.config_file).find("box"), name="tty")


_HOSTS = {
    "local": _local,
    "ssh": _ssh,
    "jump": _jump,
    "pct": _pct,
    "docker": _stand_in("docker"),
    "lxc": _stand_in("lxc"),
    "inner": _inner,
    "tty": _tty,
}
