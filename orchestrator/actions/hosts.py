"""Hosts as a person asks about them: which are known, what was seen on them, what is wrong and how to repair it."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.actions.history import open_reader
from orchestrator.actions.host_facts import (
    TARGET_PACKAGES,
    TRAINER_PACKAGES,
    Lack,
    MissingDependency,
    fix_command,
    gpu_complaint,
    is_managed,
    lacks,
    lacks_for_targets,
    repair_of,
    unlisted,
)
from orchestrator.actions.installing import install_command, newer_python, tested
from orchestrator.actions.order import find_host
from orchestrator.actions.places import Places
from orchestrator.actions.site import open_site
from orchestrator.errors import DraftyardError, HostError, StoreError
from orchestrator.host import Hop, Host, Hosts
from orchestrator.line import Line, measure
from orchestrator.redact import redact
from orchestrator.shell.hops import ROWS
from orchestrator.store.rows import HostRow
from orchestrator.store.writes import Store
from orchestrator.units import counted, format_size

FREE_DISK_BYTES = 20 * 2**30  # checkpoints, a target, its hidden states
FREE_INODES = 20_000  # the files of a model hub's cache, a tree and a run
FREE_SHM_BYTES = 2**30  # workers of a data loader hand their batches over there
CLOCK_OFFSET_S = 5.0


@dataclass(frozen=True)
class Known:
    """A host that can be named, and what was last seen on it. With faults of its entry it is refused when it is used."""

    host: Host
    seen: HostRow | None
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One thing a doctor looks at. `repair` begins with a command where something is wrong; words follow after `#`."""

    name: str
    is_good: bool
    told: str
    repair: str = ""


def known(places: Places) -> list[Known]:
    """Every host of hosts.yaml and ~/.ssh/config, and those of past runs that are in neither."""
    hosts = Hosts.load(places.hosts_file)
    with open_reader(places) as reader:
        seen = {row.name: row for row in reader.hosts()}
    listed = [Known(host, seen.pop(name, None), hosts.faults.get(name, ())) for name, host in hosts.by_name.items()]
    return listed + [
        Known(Host(row.name, "seen before, known no longer", address=row.address), row) for row in seen.values()
    ]


def examine(places: Places, name: str, *, python: str | None = None) -> list[Finding]:
    """Looks at a host; what was seen is kept for `hosts` and `plan --host`. HostError becomes a finding.

    `python`: another interpreter than hosts.yaml has, which has just been made.
    """
    host = find_host(places, name)
    host = host if python is None else replace(host, python=python)
    try:
        with open_site(host) as site:
            reached = [
                Finding("reach", True, f"answers; work lies in {site.place.work_dir}"),
                *_kept(places, host, site.facts),
            ]
            if host.is_local:
                facts = {**site.facts, "time_s": None}  # it is this machine's own
                return [*reached, *findings_of(facts, python=site.place.python, host=name)]
            facts = {**site.facts, "time_s": None}  # its clock has been asked more closely
            line = line_findings(measure(site.shell))
            return [*reached, *line, *findings_of(facts, python=site.place.python, host=name)]
    except MissingDependency as error:
        return [Finding("Python", False, str(error).splitlines()[0], _NO_PYTHON)]
    except HostError as error:
        return [Finding("reach", False, *_way_back(host, error))]


def _kept(places: Places, host: Host, facts: Mapping[str, Any]) -> list[Finding]:
    """Keeps what was seen; a database that takes nothing is a finding among the others."""
    try:
        with Store(places.db) as store:
            store.host_seen(host.name, address=host.address, facts=facts)
    except StoreError as error:
        return [Finding("database", False, *_halves(error))]
    return []


def line_findings(line: Line) -> list[Finding]:
    """How good the way to the host is, which says what shipping and pulling will take, and how right its clock."""
    rates = ((line.up_bytes_per_s, "up"), (line.down_bytes_per_s, "down"))
    told = [f"{rate / 2**20:.1f} MiB/s {way}" for rate, way in rates if rate is not None]
    found = [Finding("line", True, ", ".join([f"{line.round_trip_s * 1000:.0f} ms there and back", *told]))]
    found += [Finding("line", False, fault, _ODD_ANSWER) for fault in line.faults]
    return found if line.clock_offset_s is None else [*found, _clock_finding(line.clock_offset_s)]


# What reloads it, or else: a driver and its module of two versions after an update, a card that is lost until a reboot.
_DRIVER = "modprobe nvidia && nvidia-smi  # where that fails: reboot the machine; in a container, look on its host"
_NO_PYTHON = "apt-get install python3 python3-venv  # or name another as python: in hosts.yaml"
_ODD_ANSWER = "type -a date sh head"  # there: what these words run


def examine_here(places: Places) -> list[Finding]:
    """This machine as the side that orchestrates."""
    version = ".".join(map(str, sys.version_info[:3]))
    found = [
        Finding("Python", sys.version_info >= (3, 11), f"{version} ({sys.executable})", newer_python(sys.executable))
    ]
    for tool, use, package in (
        ("git", "says what is shipped", "git"),
        ("ssh", "reads ~/.ssh/config", "openssh-client"),
    ):
        path = shutil.which(tool)
        told = f"{path}, {use}" if path else f"not found; it {use}"
        found.append(Finding(tool, path is not None, told, f"apt-get install {package}"))
    try:
        with open_reader(places) as reader:
            found.append(Finding("database", True, f"{places.db}, {counted(len(reader.hosts()), 'host')} seen"))
    except DraftyardError as error:
        found.append(Finding("database", False, *_halves(error)))
    return found


def findings_of(facts: Mapping[str, Any], *, python: str, host: str) -> list[Finding]:
    """What a probe's facts say of a host, faults with their repairs."""
    return [*_python(facts, python, host), *_gpus(facts, python), *_room(facts), *_session(facts), *_clock(facts)]


def _python(facts: Mapping[str, Any], python: str, host: str) -> list[Finding]:
    version = (facts.get("python") or {}).get("version")
    missing = lacks(facts, None, python=python)
    too_old = "".join(lack.repair for lack in missing if lack.name == "Python")
    found = [Finding("Python", not too_old, f"{version} ({python})", too_old)]
    packages = (facts.get("python") or {}).get("packages") or {}
    there = ", ".join(
        f"{name} {packages[name]}" for name in (*TRAINER_PACKAGES, *TARGET_PACKAGES) if packages.get(name)
    )
    if there:
        found.append(Finding("packages", True, there))
    by_fix = (
        f"{fix_command(host)}  # in a virtual environment: pip may not change {python}" if is_managed(facts) else ""
    )
    for_pip = [lack for lack in missing if lack.package]
    if for_pip:
        found.append(Finding("packages", False, _told_together(for_pip), by_fix or repair_of(for_pip, python=python)))
    others = [lack for lack in missing if lack.name != "Python" and not lack.package]
    found += [Finding(lack.name, False, lack.seen, lack.repair) for lack in others]
    for_targets = lacks_for_targets(facts, python=python)
    if for_targets:
        names = ", ".join(lack.name for lack in for_targets)
        told = f"recipes with a GGUF file or smollm2 as their target also want {names}: "
        found.append(Finding("targets", True, told + (by_fix or repair_of(for_targets, python=python))))
    return found


def _told_together(missing: Sequence[Lack]) -> str:
    absent = [lack.name for lack in missing if lack.package == lack.name]
    old = [f"{lack.name} {lack.seen.replace(';', ',')}" for lack in missing if lack.package != lack.name]
    return "; ".join([*([f"{', '.join(absent)}: not installed"] if absent else []), *old])


def _gpus(facts: Mapping[str, Any], python: str) -> list[Finding]:
    """The driver, its device nodes, and each card with what is free on it; holders are told, and are no fault."""
    found = []
    fault = gpu_complaint(facts)
    if fault is not None:
        found.append(Finding("driver", False, fault, _DRIVER))
    elif facts.get("driver"):
        found.append(Finding("driver", True, str(facts["driver"])))
    nodes = facts.get("nvidia_nodes") or {}
    for name, node in nodes.items():
        if not node.get("is_there"):
            repair = "nvidia-modprobe -u -c=0" if name == "nvidia-uvm" else "nvidia-modprobe -c=0"
            found.append(Finding(f"/dev/{name}", False, "is not there; CUDA cannot start without it", repair))
        elif node.get("major") != node.get("driver_major") and node.get("driver_major") is not None:
            told = (
                f"has major number {node.get('major')}, the driver has {node['driver_major']}: a node of an older boot"
            )
            found.append(Finding(f"/dev/{name}", False, told, f"rm /dev/{name} && nvidia-modprobe -u -c=0"))
    if nodes and not any(item.name.startswith("/dev/") for item in found):
        found.append(Finding("device nodes", True, ", ".join(f"/dev/{name}" for name in nodes)))
    if facts.get("torch_cuda"):
        found.append(Finding("CUDA of torch", True, str(facts["torch_cuda"])))
    for gpu in facts.get("gpus") or []:
        used, total = gpu.get("used_bytes") or 0, gpu.get("total_bytes") or 0
        told = f"{gpu.get('name')} ({gpu.get('uuid') or 'no UUID'}), "
        told += f"{(total - used) / 2**30:.2f} of {total / 2**30:.2f} GiB free"
        holders = [_holder(process) for process in gpu.get("processes") or []]
        held = f"; held by {', '.join(holders)}" if holders else "".join(f"; {line}" for line in unlisted(gpu, facts))
        found.append(Finding(f"GPU {gpu['index']}", True, told + held))
    has_torch = bool(((facts.get("python") or {}).get("packages") or {}).get("torch"))
    if facts.get("gpus") and has_torch and facts.get("torch_cuda") is None:
        repair = (
            install_command(python, "--force-reinstall", tested("torch"))
            + "  # a build for CUDA, not one for processors"
        )
        found.append(Finding("torch", False, "is built without CUDA, and there are GPUs", repair))
    return found or [Finding("GPU", True, "none; jobs run on the processor")]


def _holder(process: Mapping[str, Any]) -> str:
    """Who holds memory of a card; of one outside this container, the driver tells no more than its number and its GiB."""
    used, pid = process.get("used_bytes"), process.get("pid")
    size = "? GiB" if used is None else f"{used / 2**30:.2f} GiB"
    who = [] if process.get("is_outside") else [str(process.get("user") or "?")]
    command = "outside this container" if process.get("is_outside") else redact(str(process.get("command") or "?"))
    return f"pid {'?' if pid is None else pid} ({', '.join([*who, size, command])})"


def _session(facts: Mapping[str, Any]) -> list[Finding]:
    """What a command finds around it, and whether a job outlives the login that started it."""
    found = [
        Finding(word, True, str(facts.get(word.lower()) or "not set"))
        for word in ("PATH", "LANG")
        if word.lower() in facts
    ]
    session = facts.get("session") or {}
    if not session.get("kill_user_processes"):
        told = (
            "leaves a user's processes alone at logout"
            if session.get("systemd")
            else "not there: nothing ends a job at logout"
        )
        return [*found, Finding("logind", True, told)] if session else found
    told = "ends a user's processes at logout" + (", but this user lingers" if session.get("linger") else "")
    return [*found, Finding("logind", bool(session.get("linger")), told, f"loginctl enable-linger {facts.get('user')}")]


def _room(facts: Mapping[str, Any]) -> list[Finding]:
    found = []
    folder = shlex.quote(str((facts.get("disk") or {}).get("path")))
    disk, shm = facts.get("disk") or {}, facts.get("shm_free_bytes")
    if disk.get("free_bytes") is not None:
        free = int(disk["free_bytes"])
        told = f"{format_size(free)} free at {disk.get('path')}"
        found.append(
            Finding(
                "disk",
                free >= FREE_DISK_BYTES,
                told,
                f"du -xhd 2 {folder} | sort -h | tail  # remove what is large and not needed, or set work_dir: to a disk "
                f"with {FREE_DISK_BYTES / 2**30:.0f} GiB free",
            )
        )
    if disk.get("free_inodes") is not None and disk.get("total_inodes"):  # some file systems count none
        told = f"{disk['free_inodes']:,} of {disk['total_inodes']:,} free at {disk.get('path')}"
        repair = f"du --inodes -xd 2 {folder} | sort -n | tail  # remove what is many small files, or set work_dir: "
        repair += "to another disk"
        found.append(Finding("inodes", int(disk["free_inodes"]) >= FREE_INODES, told, repair))
    if disk.get("is_writable") is False:
        told = f"user {facts.get('user')} may write nothing into {disk.get('path')}"
        repair = f"ls -ld {folder}  # set work_dir: in hosts.yaml, or XDG_DATA_HOME there, to a folder of this user"
        found.append(Finding("work folder", False, told, repair))
    if shm is not None:
        told = f"{format_size(int(shm))} free in /dev/shm"
        found.append(Finding("shared memory", int(shm) >= FREE_SHM_BYTES, told, "mount -o remount,size=8G /dev/shm"))
    return found


def _clock(facts: Mapping[str, Any]) -> list[Finding]:
    there_s = facts.get("time_s")
    if there_s is None:
        return []
    return [_clock_finding(float(there_s) - time.time())]


def _clock_finding(offset_s: float) -> Finding:
    told = f"{abs(offset_s):.1f} s {'ahead of' if offset_s > 0 else 'behind'} this machine"
    return Finding("clock", abs(offset_s) <= CLOCK_OFFSET_S, told, "timedatectl set-ntp true")


def _halves(error: DraftyardError) -> tuple[str, str]:
    told, _, repair = str(error).partition("; ")
    return told.splitlines()[0], repair


def _way_back(host: Host, error: HostError) -> tuple[str, str]:
    """What any verb says, in one line, and the repair: its own, else the command that shows what ssh itself says."""
    lines = [line.strip() for line in str(error).splitlines()]
    at = next((place for place, line in enumerate(lines) if line.startswith(("repair:", "does this work:"))), None)
    told = "; ".join(lines[:at])
    if at is not None:
        return told, lines[at].partition(":")[2].strip()
    at_fault = [hop for hop in host.hops if f" {hop}" in lines[0]]
    if not at_fault:
        return told, shlex.join(_ssh(host, "-v", "true"))
    return told, shlex.join(_ssh(host, "", _through(host.hops[: host.hops.index(at_fault[-1]) + 1])))


def _ssh(host: Host, option: str, command: str) -> list[str]:
    """As hosts.yaml spells the machine: its name need not be one that ssh knows."""
    words = ["ssh", *([option] if option else []), *(["-p", str(host.port)] if host.port else [])]
    words += [word for file in host.identity for word in ("-i", file)]
    words += ["-J", host.jump] if host.jump else []
    return [*words, (f"{host.user}@" if host.user else "") + (host.address or host.name), command]


def _through(hops: Sequence[Hop]) -> str:
    """A command for the outer machine that enters these and does nothing there; pct lies where a user's PATH has nothing."""
    command = "true"
    for hop in reversed(hops):
        row = ROWS[hop.kind]
        prefix = ("-o", "BatchMode=yes", "--", "{name}") if row.joins_words else row.prefix
        inner = [command] if row.joins_words or command == "true" else ["sh", "-c", command]
        command = shlex.join([row.program, *(word.replace("{name}", hop.name) for word in prefix), *inner])
    return f"PATH=$PATH:/usr/sbin:/snap/bin; {command}"
