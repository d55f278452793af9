"""From a Host to a Shell that reaches it. Loads fabric, so only verbs that contact a machine import it."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.host import Host
from orchestrator.shell.hops import HopShell
from orchestrator.shell.local import LocalShell
from orchestrator.shell.routes import Endpoint, Question, route
from orchestrator.shell.ssh import SshShell
from orchestrator.shell.stream import StreamShell


def connect(host: Host) -> StreamShell:
    """Opens the whole way at once; HostError says where it ends and why."""
    shell: StreamShell
    if host.is_local:
        shell = LocalShell()
    else:
        shell = ssh = SshShell(endpoints(host))
        try:
            ssh.open()
        except BaseException:
            ssh.close()
            raise
    for hop in host.hops:
        shell = HopShell(shell, hop)
    return shell


def endpoints(host: Host) -> tuple[Endpoint, ...]:
    """The machines on the way, with the host's own wishes about host keys on the last one."""
    way = route(
        Question(
            address=host.address,
            port=host.port,
            user=host.user,
            jump=host.jump,
            identity=host.identity,
            config_file=host.ssh_config,
        )
    )
    target = replace(way[-1], name=host.name)
    if host.host_keys == "accept-new":
        target = replace(target, host_keys="accept-new")
    if host.known_hosts is not None:
        target = replace(target, known_hosts_files=(host.known_hosts,))
    return (*way[:-1], target)
